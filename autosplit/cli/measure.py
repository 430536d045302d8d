"""A training step that the command line runs, to stand beside the prediction."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from autosplit.errors import InputError
from autosplit.options import Sample
from autosplit.trace.structure import flatten_output

if TYPE_CHECKING:
    from autosplit.pipelined import PipelinedModule
    from autosplit.planning.timeline import StepTimeline


def measured_step(pipe: PipelinedModule, given: Any) -> StepTimeline:
    """Run a pipe's training step on a sample: once to warm up, once for the times, once for the bytes of CPU lanes.

    The loss is the model's own, else the mean of what it returns. Raises InputError where nothing can be trained.
    """
    sample = Sample.of(given)
    loss: dict[str, Any] = {}
    try:
        pipe.train_step(*sample.args, **sample.kwargs)
    except InputError:  # it returns no loss
        loss = {"loss_fn": mean_of, "loss_reduction": "mean"}
        pipe.train_step(*sample.args, **loss, **sample.kwargs)
    for memory in (False, True):
        pipe.zero_grad(set_to_none=True)
        pipe.profile_step(*sample.args, memory=memory, **loss, **sample.kwargs)
    pipe.zero_grad(set_to_none=True)
    assert pipe.profiled is not None
    return pipe.profiled


def mean_of(output: Any) -> torch.Tensor:
    """Return the sum of the means of all that hangs on parameters."""
    leaves = [leaf for leaf in flatten_output(output)[0] if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    if not leaves:
        raise InputError("--measure runs a training step, and nothing that the model returns hangs on its parameters")
    return sum((leaf.mean() for leaf in leaves[1:]), leaves[0].mean())
