"""Stages of one kind share a trace, under the names of each; stages that differ in anything have their own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autosplit.options import Sample
from autosplit.profile.stage_trace import kinds
from autosplit.profile.stage_trace.kinds import StageKinds
from autosplit.profile.stage_trace.stage_graph import StageNodes, Stages, block_paths
from autosplit.profile.stage_trace.stage_trace import How, trace_stage
from autosplit.schedule.memory.pieces import NodeStep, StageTrace
from autosplit.trace.graph import INFO, TracedGraph
from autosplit.trace.ladder import trace

ROWS, WIDTH = 3, 8


class Block(nn.Module):
    """Two products around an activation, with what may differ."""

    def __init__(self, act: Callable[[Tensor], Tensor] = torch.tanh, *, inner: int = 16, norm: bool = False) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, inner), nn.Linear(inner, WIDTH)
        self.norm: nn.Module = nn.BatchNorm1d(WIDTH) if norm else nn.LayerNorm(WIDTH)
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(self.norm(x))))


def frozen(block: Block) -> Block:
    block.up.weight.requires_grad_(False)
    return block


class Twice(Block):
    """Uses one layer twice, where another block has two of its shape."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x)) - self.down(self.up(x + 1.0))


class Four(Block):
    """Has layers of its own where `Twice` uses the same again."""

    def __init__(self) -> None:
        super().__init__()
        self.up2, self.down2 = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x)) - self.down2(self.up2(x + 1.0))


class Hooked(Block):
    """Has a hook on a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.up.register_forward_hook(lambda _module, _args, output: output * 2.0)


class Dropping(Block):
    """Draws random numbers."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.drop = nn.Dropout(p)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(super().forward(x))


class InPlace(Block):
    """Changes a value in place."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu_(self.up(self.norm(x))))


BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "plain": Block,
    "activation": lambda: Block(torch.sigmoid),
    "width": lambda: Block(inner=24),
    "buffers": lambda: Block(norm=True),
    "frozen": lambda: frozen(Block()),
    "twice": Twice,
    "four": Four,
    "hook": Hooked,
    "dropout": lambda: Dropping(0.1),
    "other dropout": lambda: Dropping(0.2),
    "in place": InPlace,
}


def recorded(blocks: Iterable[nn.Module]) -> TracedGraph:
    return trace(nn.Sequential(*blocks), Sample(torch.zeros(ROWS, WIDTH))).graph


def stages_of(graph: TracedGraph, sizes: Iterable[int]) -> list[StageNodes]:
    """Return stages of so many blocks each."""
    stages, first, result = Stages(graph), 0, []
    for size in sizes:
        paths = tuple(f"{number}" for number in range(first, first + size))
        names = [info.name for _, info in graph.compute_nodes() if info.module.partition(".")[0] in paths]
        result.append(stages.of(names))
        first += size
    return result


def how(stage: StageNodes, **options: Any) -> How:
    grads = {node.meta[INFO].name: node.meta[INFO].name != "input/input" for node in stage.inputs}
    return How(2, input_grads=grads, apart=True, **options)


def shape(trace: StageTrace) -> tuple[Any, ...]:
    """Return a trace with its storages numbered as they come."""
    numbers: dict[int, int] = {}

    def number(storage: int) -> int:
        return numbers.setdefault(storage, len(numbers))

    def steps(before: Iterable[NodeStep]) -> list[Any]:
        return [(step.node, [(number(storage), count) for storage, count in step.changes]) for step in before]

    passes = [steps(each) for each in (trace.forward, trace.backward, trace.backward_later)]
    gradients = {number(storage): name for storage, name in trace.gradients.items()}
    split = {n: (s.cotangent_bytes, sorted(map(number, s.gradients))) for n, s in trace.split.items()}
    return (*passes, gradients, split, len(trace.kept), trace.guessed_bytes)


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[StageNodes]:
    """The stages that were run on fake tensors."""
    ran: list[StageNodes] = []
    monkeypatch.setattr(kinds, "trace_stage", lambda stage, how: ran.append(stage) or trace_stage(stage, how))
    return ran


def test_equal_stages_are_traced_once(traced: list[StageNodes]) -> None:
    graph, memo = recorded(Block() for _ in range(6)), StageKinds()
    for stage in stages_of(graph, (2, 2, 2)):
        assert shape(memo.trace(stage, how(stage))) == shape(trace_stage(stage, how(stage)))
    # The first takes an input that wants no gradient, nobody but the caller takes the last one's output.
    assert len(traced) <= 3
    assert len({tuple(info.name for _, info in stage.computing()) for stage in traced}) == len(traced)


@pytest.mark.parametrize("options", [{}, {"whole": True}, {"units": "blocks"}], ids=["never", "always", "block"])
def test_stages_that_differ_have_traces_of_their_own(options: dict[str, Any], traced: list[StageNodes]) -> None:
    graph, memo = recorded([Block(), *(make() for make in BLOCKS.values()), Block()]), StageKinds()
    stages = stages_of(graph, [1] * (len(BLOCKS) + 2))[1:-1]
    for stage in stages:
        asked = dict(options)
        if "units" in asked:
            asked["units"] = block_paths(stage.root, (info.module for _, info in stage.computing()))
        assert shape(memo.trace(stage, how(stage, **asked))) == shape(trace_stage(stage, how(stage, **asked)))
    assert len(traced) == len(stages)


def test_one_stage_run_in_other_ways_is_traced_again(traced: list[StageNodes]) -> None:
    graph, memo = recorded(Block() for _ in range(3)), StageKinds()
    stage = stages_of(graph, (1, 1, 1))[1]
    asked = [how(stage), how(stage, kernels="cuda"), How(2, apart=True), How(3, apart=True), How(2)]
    for each in asked:
        assert shape(memo.trace(stage, each)) == shape(trace_stage(stage, each))
    assert len(traced) == len(asked)
