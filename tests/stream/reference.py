"""What an asynchronous pipeline should compute, from its definition: one model, a list of earlier weights per stage.

Written from the formulas of PipeDream (Narayanan et al. 2019) and PipeDream-2BW (2021), without the pipeline: minibatch
m runs through the plain model with weights that lack the newest updates, and its gradients step the newest weights.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

Batch = tuple[tuple[Any, ...], Mapping[str, Any]]


def version(staleness: str, stages: int, stage: int, minibatch: int) -> int:
    """Return how many updates of a stage a minibatch sees: the issue's formulas for one replica per stage."""
    if staleness == "stash":
        return max(0, minibatch - (stages - 1 - stage))
    if staleness == "vertical":
        return max(0, minibatch - (stages - 1))
    return max(0, minibatch - 1)


def train(
    model: nn.Module,
    stage_of: Mapping[str, int],
    stages: int,
    staleness: str,
    items: Iterable[tuple[Batch, Any]],
    loss_of: Callable[[Any, Any], Tensor],
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    *,
    drains: Sequence[int] = (),
) -> list[float]:
    """Train a model as stages that lag behind; return the losses. ``drains``: minibatches before which all is done."""
    newest = dict(model.named_parameters())
    optimizers = {
        stage: make(own)
        for stage in range(stages)
        if (own := [p for name, p in newest.items() if stage_of.get(name) == stage])
    }
    history = [copy.deepcopy({n: p.data for n, p in newest.items()})]
    losses: list[float] = []
    since = 0
    for number, (batch, target) in enumerate(items):
        if number in drains:
            history, since = history[-1:], number
        lag = number - since
        for name, parameter in newest.items():
            at = version(staleness, stages, stage_of.get(name, 0), lag)
            parameter.data = history[at][name].clone()
        model.zero_grad(set_to_none=True)
        args, kwargs = batch
        loss = loss_of(model(*args, **kwargs), target)
        loss.backward()
        for name, parameter in newest.items():
            parameter.data = history[-1][name].clone()
        for optimizer in optimizers.values():
            optimizer.step()
        history.append(copy.deepcopy({n: p.data for n, p in newest.items()}))
        losses.append(loss.item())
    return losses
