"""1F1B: a few forwards to fill the pipeline, then one forward and one backward in turn (PipeDream-Flush, 2021)."""

from __future__ import annotations

from autosplit.schedule.action import Action, Schedule


def one_f_one_b(stages: int, microbatches: int) -> Schedule:
    """Return the 1F1B schedule; a stage holds at most ``stages - stage`` microbatches between forward and backward."""
    return Schedule("1f1b", tuple(_lane(stage, stages=stages, microbatches=microbatches) for stage in range(stages)))


def _lane(stage: int, *, stages: int, microbatches: int) -> tuple[Action, ...]:
    warm_up = min(microbatches, stages - 1 - stage)
    lane = [Action(stage, "F", index) for index in range(warm_up)]
    for index in range(microbatches - warm_up):
        lane += [Action(stage, "F", warm_up + index), Action(stage, "B", index)]
    lane += [Action(stage, "B", index) for index in range(microbatches - warm_up, microbatches)]
    return tuple(lane)
