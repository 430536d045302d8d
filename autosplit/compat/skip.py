"""Skip connections between layers of a sequential model, as ``torchgpipe.skip`` declares them.

    @skippable(stash=["long"])  ─ stash ─►  (namespace, "long")  ─ pop ─►  @skippable(pop=["long"])

Under a pipe a skip is a value like any other: it travels directly from the stage that stashes it to the one that pops
it. Outside of one a layer leaves what it stashes with its thread, and the next layer that pops it takes it there.
"""

from __future__ import annotations

import contextlib
import threading
import uuid
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any, ClassVar, TypeVar

import torch
from torch import nn

_HERE = threading.local()
"""What layers outside of a pipe have stashed in this thread and not popped yet."""
Own = TypeVar("Own", bound="Skippable")


class Namespace:
    """Keeps skips of equal names apart: pairs in different namespaces are different pairs.

    A copy is equal to its original, so that a copied model pops what it stashed.
    """

    __slots__ = ("id",)

    def __init__(self) -> None:
        self.id = uuid.uuid4()

    def __repr__(self) -> str:
        return f"<Namespace '{self.id}'>"

    def __hash__(self) -> int:
        return hash(self.id)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Namespace) and self.id == other.id

    def __lt__(self, other: object) -> bool:
        return isinstance(other, Namespace) and self.id < other.id


Key = tuple[Namespace | None, str]
"""What tells skips apart: the namespace, if there is one, and the name."""


class stash:  # noqa: N801 - torchgpipe's name, which models are written with
    """What a skippable layer yields to leave a tensor, or None, for the layer that pops this name."""

    __slots__ = ("name", "tensor")

    def __init__(self, name: str, tensor: torch.Tensor | None) -> None:
        self.name = name
        self.tensor = tensor


class pop:  # noqa: N801 - torchgpipe's name, which models are written with
    """What a skippable layer yields to be given the tensor, or None, that was stashed under this name."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


class Skippable(nn.Module):
    """A layer with skips; made by :func:`skippable`, which says what it stashes and what it pops."""

    module_cls: ClassVar[type[nn.Module]]
    stashable_names: ClassVar[frozenset[str]]
    poppable_names: ClassVar[frozenset[str]]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.module = self.module_cls(*args, **kwargs)
        self.namespaces: dict[str, Namespace] = {}

    def __repr__(self) -> str:
        return f"@skippable({self.module})"

    def isolate(self: Own, ns: Namespace, *, only: Iterable[str] | None = None) -> Own:
        """Put all of the layer's skips, or ``only`` some by name, into a namespace; return the layer itself."""
        names = self.stashable_names | self.poppable_names if only is None else set(only)
        self.namespaces.update(dict.fromkeys(names, ns))
        return self

    def stashable(self) -> Iterator[Key]:
        """Yield the keys of what the layer stashes, in the order of their names."""
        yield from ((self.namespaces.get(name), name) for name in sorted(self.stashable_names))

    def poppable(self) -> Iterator[Key]:
        """Yield the keys of what the layer pops, in the order of their names."""
        yield from ((self.namespaces.get(name), name) for name in sorted(self.poppable_names))

    def forward(self, *inputs: Any, skips: tuple[Any, ...] | None = None) -> Any:
        """Run the layer; ``skips`` are what it pops, in the order of :meth:`poppable`.

        With them it returns its output and, in the order of :meth:`stashable`, what it stashed; without, skips come
        from and stay with this thread. Raises RuntimeError for a skip that was not stashed, not declared or not used.
        """
        if skips is not None:
            return self._run(inputs, dict(zip(self.poppable(), skips, strict=True)))
        held: dict[Key, Any] = _HERE.__dict__.setdefault("held", {})
        missing = next((key for key in self.poppable() if key not in held), None)
        if missing is not None:
            raise RuntimeError(f"'{missing[1]}' has not been stashed")
        output, stashed = self._run(inputs, {key: held.pop(key) for key in self.poppable()})
        held.update(zip(self.stashable(), stashed, strict=True))
        return output

    def _run(self, inputs: tuple[Any, ...], popped: dict[Key, Any]) -> tuple[Any, tuple[Any, ...]]:
        stashed: dict[Key, Any] = {}
        output = self._steps(self.module(*inputs), popped, stashed)
        not_stashed = [key for key in self.stashable() if key not in stashed]
        for left, done in ((not_stashed, "stashed"), (popped, "popped")):
            if left:
                raise RuntimeError(f"{', '.join(repr(name) for _, name in left)} must be {done} but have not")
        return output, tuple(stashed[key] for key in self.stashable())

    def _steps(self, steps: Any, popped: dict[Key, Any], stashed: dict[Key, Any]) -> Any:
        """Do what the layer's forward yields; return what it returns."""
        if not isinstance(steps, Generator):
            return steps
        answer = None
        while True:
            try:
                step = steps.send(answer)
            except StopIteration as end:
                return end.value
            if not isinstance(step, (stash, pop)):
                raise TypeError(f"{step!r} is not a command from @skippable")
            names, able = (self.stashable_names, "stash") if isinstance(step, stash) else (self.poppable_names, "popp")
            if step.name not in names:
                raise RuntimeError(f"'{step.name}' has not been declared as {able}able")
            key = self.namespaces.get(step.name), step.name
            answer = None
            if isinstance(step, stash):
                stashed[key] = step.tensor
            else:
                answer = popped.pop(key)


def skippable(stash: Iterable[str] = (), pop: Iterable[str] = ()) -> Callable[[type[nn.Module]], type[Skippable]]:
    """Decorate a layer class whose forward yields :class:`stash` and :class:`pop` of the names that are declared here.

    Every name is stashed by exactly one layer and popped by exactly one later one; :meth:`Skippable.isolate` tells
    several pairs of one name apart. A declared skip must be used in each forward; None can be stashed instead.
    """
    names = {"stashable_names": frozenset(stash), "poppable_names": frozenset(pop)}

    def extend(module_cls: type[nn.Module]) -> type[Skippable]:
        attributes = {"module_cls": module_cls, "__module__": module_cls.__module__, "__doc__": module_cls.__doc__}
        return type(module_cls.__name__, (Skippable,), attributes | names)

    return extend


@contextlib.contextmanager
def on_their_own() -> Iterator[None]:
    """Let layers outside of a pipe begin with no skips; what was stashed before is there again at the end."""
    before = _HERE.__dict__.get("held", {})
    _HERE.held = {}
    try:
        yield
    finally:
        _HERE.held = before


def verify_skippables(module: nn.Sequential) -> None:
    """Raise TypeError, with a line for each, where skips of a sequential model are not stashed and popped once each."""
    stashed: set[Key] = set()
    popped: set[Key] = set()
    problems = []
    for path, layer in module.named_children():
        if not isinstance(layer, Skippable):
            continue
        both = layer.stashable_names & layer.poppable_names
        problems += [f"'{path}' declared '{name}' both as stashable and as poppable" for name in sorted(both)]
        for key in layer.stashable():
            if key in stashed:
                problems.append(f"'{path}' redeclared '{key[1]}' as stashable but not isolated by namespace")
            elif key[1] not in both:
                stashed.add(key)
        for key in layer.poppable():
            if key in popped:
                problems.append(f"'{path}' redeclared '{key[1]}' as poppable but not isolated by namespace")
            elif key[1] not in both and key not in stashed:
                problems.append(f"'{path}' declared '{key[1]}' as poppable but it was not stashed")
            elif key[1] not in both:
                popped.add(key)
    problems += [f"no module declared '{name}' as poppable but stashed" for _, name in stashed - popped]
    if problems:
        listed = "\n".join(f"* {problem}" for problem in problems)
        raise TypeError(f"one or more pairs of stash and pop do not match:\n\n{listed}")
