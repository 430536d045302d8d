"""What a plan says about plain execution, where that is the better choice."""

from __future__ import annotations

import os
from collections.abc import Iterator

from autosplit.options import Options
from autosplit.partition.problem import Problem
from autosplit.partition.solve import Partition
from autosplit.profile.types import Profile

PLAIN_ON_TWO = (1.74, 1.83)
"""How many times as fast as on one thread plain training steps were on two idle cores: conv net, transformer, MLP."""


def advice(problem: Problem, partition: Partition, options: Options, *, measured: bool) -> Iterator[str]:
    """Yield when plain execution is the better choice; times are those that were measured on one thread."""
    if measured and all(device.type == "cpu" for device in options.devices) and problem.schedule != "forward":
        yield from _on_cores(problem, partition)


def note_on_training(costs: Profile, schedule: str) -> str | None:
    """Return that nothing trains, and why; None where something does, and under a schedule without a backward."""
    parameters = [state for state in costs.state.values() if state.is_parameter and state.uses]
    if schedule == "forward" or any(state.trainable for state in parameters):
        return None
    why = f"all {len(parameters)} parameters that it uses are frozen" if parameters else "the model uses no parameters"
    backward = any(node.backward_s for node in costs.nodes.values())
    has = "a backward for the gradients of inputs alone" if backward else "no backward"
    return (
        f"nothing trains: {why}, and the plan has {has} and no gradients of parameters; "
        "requires_grad_() on what is to be trained changes that, schedule='forward' plans an evaluation"
    )


def _on_cores(problem: Problem, partition: Partition) -> Iterator[str]:
    """Say when lanes have to share cores, and when the plan is predicted below what plain execution reached on two."""
    cores, lanes = _cores(), len(set(partition.costs.lane))
    if lanes > cores:
        yield f"{lanes} lanes share {cores} cores of this machine: the predicted step is for a core per lane"
    alone_s = problem.microbatches * sum(work.forward_s + work.backward_s for work in problem.works)
    step_s = partition.costs.step_s
    faster = min(alone_s / step_s if step_s else 1.0, cores)
    if cores > 1 and lanes > 1 and faster < PLAIN_ON_TWO[0]:
        yield (
            "plain execution is likely the better choice on this CPU where the model fits: the plan is predicted to be "
            f"{faster:.2f} times as fast as one thread; plain PyTorch on two threads was {PLAIN_ON_TWO[0]} to "
            f"{PLAIN_ON_TWO[1]} times as fast in reference measurements of other models; this one's was not measured"
        )


def _cores() -> int:
    """Return how many cores this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1
