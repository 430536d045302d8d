"""Pairs of pipes of one model, with and without graphs, on the lanes of a machine whose graphs are a fake."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from autosplit import autosplit
from autosplit.planning.plan import Plan
from autosplit.runtime.lanes import CudaLane
from tests.runtime.recording_graphs import HostStreams

CPU = torch.device("cpu")


def lay(pipe: Any, streams: HostStreams) -> None:
    """Put a pipe's stages on lanes that have streams, one per device of its plan, also for kinds of calls to come."""
    recordings = pipe._core.recordings
    lanes = [CudaLane(CPU, streams) for _ in pipe.plan.devices]
    recordings.lanes = tuple(lanes[stage.lane] for stage in pipe.plan.stages)
    for recorded in (one for variants in recordings.kept.values() for one in variants):
        recorded.lanes = recordings.lanes
        for stage, lane in zip(recorded.graphs.stages if recorded.graphs else (), recorded.lanes, strict=False):
            stage.lane = lane
        for made in ("parts", "setup", "ending"):
            recorded.__dict__.pop(made, None)
        pipe._attach(recorded)


@functools.cache
def _plan(kind: type[nn.Module], stages: int, virtual_stages: int, folded: bool) -> Plan:
    """Return a plan for a class of models; what is asked of it is only where the stages lie."""
    schedule = "zb_v" if folded else "interleaved" if virtual_stages > 1 else "gpipe"
    options = {"schedule": schedule, "virtual_stages": virtual_stages, "chunks": 3}
    pipe = autosplit(kind(), devices=["cpu"] * stages, sample=torch.zeros(6, 4), **options)
    assert pipe.plan is not None
    return pipe.plan


class Pair:
    """A model's pipe with graphs, and a copy's without: all that they give is held to be the same, bit by bit."""

    def __init__(self, model: nn.Module, sample: Any, *, stages: int = 2, chunks: int = 3, **options: Any) -> None:
        self.streams = HostStreams()
        self.models = model, copy.deepcopy(model)
        self.pipes: list[Any] = []
        schedule, again = options.pop("schedule", "gpipe"), options.pop("recompute", "never")
        plan = _plan(type(model), stages, options.get("virtual_stages", 1), schedule == "zb_v")
        found = tuple(stage.model_copy(update={"recompute": again}) for stage in plan.stages)
        plan = plan.model_copy(update={"schedule": schedule, "stages": found})
        for own, graphs in zip(self.models, (True, False), strict=True):
            given = {"lanes": "inline", "rng": "counter", "sample": sample, "plan": plan}
            pipe = autosplit(own, devices=["cpu"] * stages, chunks=chunks, graphs=graphs, **given)
            lay(pipe, self.streams if graphs else HostStreams())
            self.pipes.append(pipe)
        self.seed = 0

    @property
    def replays(self) -> int:
        return self.streams.replays

    def both(self, run: Callable[[Any, nn.Module], Any]) -> list[Any]:
        """Run something on both pipes; results, gradients and buffers are the same bits."""
        self.seed += 1
        found = []
        for pipe, model in zip(self.pipes, self.models, strict=True):
            torch.manual_seed(self.seed)
            result = run(pipe, model)
            state = [p.grad for p in model.parameters()] + list(model.buffers())
            found.append([result, *(None if t is None else t.detach().clone() for t in state)])
        same(*found)
        return found

    def train(self, value: Tensor, target: Tensor, loss_fn: Any = None, *, clear: bool = True) -> list[Any]:
        """Run a training step on both, then change their parameters as an optimizer would."""

        def run(pipe: Any, model: nn.Module) -> Tensor:
            if clear:
                model.zero_grad(set_to_none=True)
            return pipe.train_step(value, target=target, loss_fn=loss_fn or nn.MSELoss())

        found = self.both(run)
        with torch.no_grad():
            for parameter in (p for model in self.models for p in model.parameters() if p.grad is not None):
                parameter.sub_(parameter.grad, alpha=0.1)
        return found

    def call(self, value: Tensor, *, grad_of_input: bool = True) -> list[Any]:
        """Run a call and its backward on both."""

        def run(pipe: Any, model: nn.Module) -> list[Any]:
            model.zero_grad(set_to_none=True)
            given = value.detach().clone().requires_grad_(grad_of_input)
            output = pipe(given)
            output.square().sum().backward()
            return [output.detach(), given.grad]

        return self.both(run)

    def lines(self) -> list[str]:
        """Return what the report says of graphs."""
        return [line for line in self.pipes[0].report().splitlines() if line.startswith("graphs: ")]


def same(one: Any, other: Any) -> None:
    """Hold two nestings of tensors to be the same bits, zeros' signs too."""
    if isinstance(one, Tensor):
        assert torch.equal(one, other), (one, other)
        if one.is_floating_point():
            assert torch.equal(torch.signbit(one), torch.signbit(other))
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for first, second in zip(one, other, strict=True):
            same(first, second)
    else:
        assert one == other
