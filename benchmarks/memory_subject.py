"""What memory is predicted and measured for: a family's model with its loss, recorded on the meta device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from autosplit.options import Sample
from autosplit.profile.blocks import block_trace
from autosplit.profile.stage_trace.stage_graph import StageNodes
from autosplit.profile.stage_trace.stage_trace import How
from autosplit.schedule.memory.pieces import StageTraces
from autosplit.schedule.memory.updates import Updated
from autosplit.trace.graph import TracedGraph
from autosplit.trace.ladder import trace
from benchmarks.families import Family

Precision = Literal["fp32", "amp_bf16"]
Recompute = Literal["never", "block"]


class Training(nn.Module):
    """A model and its loss as one forward."""

    def __init__(self, model: nn.Module, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, target: Tensor, *inputs: Tensor) -> Tensor:
        return self.loss(self.model(*inputs), target)


@dataclass(frozen=True)
class Subject:
    """A family, recorded: ``model`` holds no memory, ``units`` are the paths of its blocks."""

    family: Family
    model: Training
    graph: TracedGraph
    units: tuple[str, ...]


@dataclass(frozen=True)
class Line:
    """One prediction and what was measured; ``cell`` says what for.

    Attributes:
        rows: batch rows of the step, or of a microbatch.
        static_bytes: parameters, buffers and optimizer state, which are in both others.
    """

    cell: str
    kind: str
    rows: int
    asked: float
    static_bytes: int
    predicted_bytes: int
    measured_bytes: int

    @property
    def error(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted_bytes / self.measured_bytes - 1

    @property
    def dynamic_error(self) -> float:
        """The same, of what is beside the static bytes."""
        return (self.predicted_bytes - self.measured_bytes) / (self.measured_bytes - self.static_bytes)


def recorded(family: Family, precision: Precision) -> Subject:
    """Record a family's training forward without memory; regions with another precision inside are kept."""
    with torch.device("meta"):
        model = Training(family.make(), family.loss).train()
    rows = (family.target(family.rows), *family.batch(family.rows))
    with autocast(precision):
        graph = trace(model, Sample(*(tensor.to("meta") for tensor in rows))).graph
    return Subject(family, model, graph, block_paths(family, model))


def block_paths(family: Family, model: Training) -> tuple[str, ...]:
    """Return the paths of the blocks that are recomputed one at a time."""
    paths = {id(module): path for path, module in model.named_modules()}
    return tuple(paths[id(block)] for block in family.blocks(model.model))


def traces(stage: StageNodes, how: How, *, recompute: Recompute) -> StageTraces:
    """Return what a stage allocates and frees, its repeated blocks run once; the caller's autocast counts."""
    found = block_trace(stage, how)
    if recompute == "never":
        return StageTraces("never", never=found)
    return StageTraces(recompute, recomputed=found)


def autocast(precision: Precision) -> contextlib.AbstractContextManager[object]:
    """Return the context of a precision on the CPU."""
    return torch.autocast("cpu", torch.bfloat16, enabled=precision == "amp_bf16")


@contextlib.contextmanager
def recomputed(modules: Collection[nn.Module]) -> Iterator[None]:
    """Let modules recompute their forward in the backward, as ``torch.utils.checkpoint`` does it."""
    for module in modules:
        module.__dict__["forward"] = partial(checkpoint, module.forward, use_reentrant=False)
    try:
        yield
    finally:
        for module in modules:
            del module.__dict__["forward"]


def bytes_of(tensors: Iterable[Tensor]) -> tuple[int, ...]:
    """Return the bytes of each tensor, one that comes twice counted once."""
    return tuple(tensor.numel() * tensor.element_size() for tensor in {id(t): t for t in tensors}.values())


def trained(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that an optimizer updates."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def updated(model: nn.Module) -> list[Updated]:
    """Return them by their sizes and shapes."""
    return [Updated(each.numel(), each.element_size(), tuple(each.shape)) for each in trained(model)]


def held_by(modules: Iterable[nn.Module]) -> tuple[int, ...]:
    """Return the bytes of each parameter and buffer of some modules."""
    found = list(modules)
    return bytes_of(tensor for module in found for tensor in (*module.parameters(), *module.buffers()))
