"""Cuts beside what takes a result apart, a split or an LSTM: the pipe is the plain model, its peaks are the plan's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autosplit import PlanError, autosplit
from autosplit.options import Sample
from autosplit.planning.plan.plan import Plan
from autosplit.profile.stage_trace.stage_graph import Stages
from autosplit.profile.stage_trace.stage_trace import How, trace_stage
from autosplit.trace.graph import INFO
from autosplit.trace.ladder import trace
from benchmarks.memory_pipe import ASKED, lane_bytes
from tests.equivalence.equality import TOLERANCE

ROWS, LENGTH, WIDTH = 16, 12, 24
"""The input is two wide: the plan counts the microbatches of the batch, which the lane does not copy."""
CHUNKS = 4

Parts = tuple[Tensor, Tensor, Tensor]


class Net(nn.Module):
    """Takes a value three times as wide apart, by a function or by an LSTM of its own."""

    def __init__(self, apart: Callable[[Tensor], Any] | None = None) -> None:
        super().__init__()
        self.apart = apart
        self.wide, self.narrow = nn.Linear(2, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.lstm = None if apart else nn.LSTM(3 * WIDTH, WIDTH, batch_first=True)

    def parts(self, wide: Tensor) -> Parts:
        if self.lstm is None:
            assert self.apart is not None
            first, second, third = self.apart(wide)
            return first, second, third
        result, (hidden, cell) = self.lstm(wide)
        return result, hidden.transpose(0, 1), cell.transpose(0, 1)

    def forward(self, x: Tensor) -> Tensor:
        first, second, third = self.parts(self.wide(x))
        return self.narrow(torch.tanh(first) * torch.sigmoid(second) + third)


CASES: dict[str, Callable[[Tensor], Any] | None] = {
    "split": lambda wide: wide.split(WIDTH, dim=-1),
    "chunk": lambda wide: wide.chunk(3, dim=-1),
    "unbind": lambda wide: wide.unflatten(-1, (3, WIDTH)).unbind(-2),
    "lstm": None,
}


def batch(rows: int) -> Tensor:
    return torch.randn(rows, LENGTH, 2, generator=torch.Generator().manual_seed(0))


def net(name: str) -> Net:
    torch.manual_seed(0)
    return Net(CASES[name])


def is_part(name: str) -> bool:
    """Tell whether a node is a part of another one's result: ``split_0.1`` of ``split_0``."""
    return name.rpartition("#")[2].partition("/")[2].rpartition(".")[2].isdecimal() or "#0." in name


@pytest.mark.parametrize("kernels", ["cpu", "cuda"])
@pytest.mark.parametrize("name", CASES)
def test_a_stage_that_begins_between_a_result_and_its_parts_repeats_itself(name: str, kernels: Any) -> None:
    graph = trace(net(name), Sample(batch(4))).graph
    names = [info.name for _, info in graph.compute_nodes()]
    for place in (number for number, node in enumerate(names) if is_part(node)):
        stage = Stages(graph).of(names[place:])
        grads = {node.meta[INFO].name: True for node in stage.inputs}
        for whole in (False, True):
            found = trace_stage(stage, How(4, input_grads=grads, whole=whole, apart=True, kernels=kernels))
            assert not found.kept
            alive = {s for step in (*found.forward, *found.backward) for s, size in step.changes if size > 0}
            freed = {s for step in (*found.forward, *found.backward) for s, size in step.changes if size < 0}
            assert alive - freed == found.gradients.keys()


def cut_at(plan: Plan, place: int) -> Plan:
    names = [node for stage in plan.stages for node in stage.nodes]
    parts = (tuple(names[:place]), tuple(names[place:]))
    stages = (stage.model_copy(update={"nodes": own}) for stage, own in zip(plan.stages, parts, strict=True))
    return plan.model_copy(update={"stages": tuple(stages), "edited": True})


@pytest.mark.parametrize("name", ["split", "lstm"])
def test_a_pipe_that_is_cut_beside_the_parts_is_the_plain_model(name: str) -> None:
    model, x = net(name), batch(ROWS)
    twin = copy.deepcopy(model)
    expected = twin(x)
    expected.mean().backward()
    pipe = autosplit(model, devices=["cpu"] * 2, chunks=CHUNKS, sample=x)
    plan = pipe.plan
    assert plan is not None
    pipe.unsplit()
    names = [node for stage in plan.stages for node in stage.nodes]
    own = [number for number, node in enumerate(names) if is_part(node)]
    with pytest.raises(PlanError, match="belongs with others"):
        autosplit(model, devices=["cpu"] * 2, sample=x, plan=cut_at(plan, own[0]))
    for place in (own[0] - 1, own[-1] + 1, own[-1] + 2):
        pipe = autosplit(model, devices=["cpu"] * 2, plan=cut_at(plan, place), lanes="inline")
        for predicted, measured in lane_bytes(pipe, (x,)):
            # what an LSTM sends, and its gradient, lies in another order, which the trace of the next stage lacks
            assert name == "lstm" or abs(predicted / measured - 1) <= ASKED, (names[place], predicted, measured)
        assert pipe.plan is not None
        assert [len(stage.nodes) for stage in pipe.plan.stages] == [place, len(names) - place]
        found = pipe(x)
        torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE[torch.float32])
        found.mean().backward()
        for (_, one), (_, other) in zip(pipe.named_parameters(), twin.named_parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad, rtol=0, atol=TOLERANCE[torch.float32])
        pipe.unsplit()
        model.zero_grad()
