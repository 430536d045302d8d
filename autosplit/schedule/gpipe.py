"""GPipe: all forwards, then all backwards (Huang et al. 2019, section 2.3)."""

from __future__ import annotations

from autosplit.schedule.action import Action, Schedule


def gpipe(stages: int, microbatches: int) -> Schedule:
    """Return the GPipe schedule; backwards run in ascending order of microbatches, as under every schedule."""
    lanes = tuple(
        (
            *(Action(stage, "F", microbatch) for microbatch in range(microbatches)),
            *(Action(stage, "B", microbatch) for microbatch in range(microbatches)),
        )
        for stage in range(stages)
    )
    return Schedule("gpipe", lanes)


def forward_only(stages: int, microbatches: int) -> Schedule:
    """Return the schedule of an evaluation: every microbatch's forward, no backward."""
    lanes = tuple(tuple(Action(stage, "F", index) for index in range(microbatches)) for stage in range(stages))
    return Schedule("forward", lanes)
