"""What an asynchronous pipeline should compute, from its definition: one model, a list of earlier weights per stage.

Written from the formulas of PipeDream (Narayanan et al. 2019) and PipeDream-2BW (2021), without the pipeline: minibatch
m runs through the plain model with weights that lack the newest updates, and its gradients step the newest weights. A
stage with R replicas steps once per R minibatches, by the mean of their gradients over all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

Batch = tuple[tuple[Any, ...], Mapping[str, Any]]

BEHIND = {
    (1, 2): (2, 1),
    (1, 2, 1): (4, 2, 0),
    (2,): (0,),
    (2, 1): (1, 0),
    (2, 1, 1): (2, 1, 0),
    (3,): (0,),
    (3, 1): (1, 0),
}
"""How many updates each stage is behind under "stash", by the stages' replicas."""


def version(staleness: str, replicas: Sequence[int], stage: int, minibatch: int) -> int:
    """Return how many updates of a stage a minibatch sees: the issue's formulas where each stage has one replica."""
    stages = len(replicas)
    if staleness == "stash":
        behind = BEHIND[tuple(replicas)][stage] if max(replicas) > 1 else stages - 1 - stage
        return max(0, minibatch // replicas[stage] - behind)
    if staleness == "vertical":
        return max(0, minibatch - (stages - 1))
    return max(0, minibatch - 1)


class Stage:
    """The parameters of a stage, all their versions, and the gradients of the minibatches of its round so far."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], make: Any, round_size: int) -> None:
        self.parameters, self.round_size = parameters, round_size
        self.optimizer = make(list(parameters.values())) if parameters else None
        self.begin()

    def begin(self) -> None:
        self.versions = [{name: own.detach().clone() for name, own in self.parameters.items()}]
        self.round: list[tuple[int, dict[str, Tensor | None]]] = []

    def use(self, version: int) -> None:
        for name, own in self.parameters.items():
            own.data = self.versions[version][name].clone()

    def add(self, rows: int) -> None:
        """Keep the gradients of a minibatch, and step behind the last one of a round."""
        self.round.append((rows, {n: None if p.grad is None else p.grad.clone() for n, p in self.parameters.items()}))
        if len(self.round) == self.round_size:
            self.step()

    def step(self) -> None:
        """Step the newest weights by the mean gradient of the minibatches of the round that there are."""
        self.use(-1)
        total = sum(rows for rows, _ in self.round)
        for name, own in self.parameters.items():
            parts = [gradient * (rows / total) for rows, each in self.round if (gradient := each[name]) is not None]
            own.grad = torch.stack(parts).sum(0) if parts else None
        if self.optimizer is not None:
            self.optimizer.step()
        self.versions.append({name: own.detach().clone() for name, own in self.parameters.items()})
        self.round = []


def train(
    model: nn.Module,
    stage_of: Mapping[str, int],
    replicas: Sequence[int],
    staleness: str,
    items: Iterable[tuple[Batch, Any]],
    loss_of: Callable[[Any, Any], Tensor],
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    *,
    drains: Sequence[int] = (),
) -> list[float]:
    """Train a model as stages that lag behind; return the losses. ``drains``: minibatches before which all is done."""
    named = dict(model.named_parameters())
    stages = [
        Stage({n: p for n, p in named.items() if stage_of.get(n) == s}, make, 1 if staleness == "2bw" else own)
        for s, own in enumerate(replicas)
    ]
    losses: list[float] = []
    since = 0
    for number, ((args, kwargs), target) in enumerate(items):
        if number in drains:
            drain(stages)
            since = number
        for place, stage in enumerate(stages):
            stage.use(version(staleness, replicas, place, number - since))
        model.zero_grad(set_to_none=True)
        loss = loss_of(model(*args, **kwargs), target)
        loss.backward()
        rows = next(len(value) for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        for stage in stages:
            stage.add(rows)
        losses.append(loss.item())
    drain(stages)
    return losses


def drain(stages: Sequence[Stage]) -> None:
    """Step by the rounds that are not whole; all begin anew."""
    for stage in stages:
        if stage.round:
            stage.step()
        stage.use(-1)
        stage.begin()
