"""A module that a model imports inside its forward, and that sets a global of its own meanwhile."""

STATE = 0


def begin() -> None:
    global STATE
    STATE = 1


begin()
