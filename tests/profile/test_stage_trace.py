"""What a stage allocates and frees: against numbers worked out by hand, and against real runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from autosplit.devices import Allocations
from autosplit.options import Sample
from autosplit.profile.stage_trace.stage_graph import Stages
from autosplit.profile.stage_trace.stage_trace import How, trace_stage
from autosplit.schedule.memory.pieces import StageTrace
from autosplit.trace.graph import NodeClass
from autosplit.trace.ladder import trace
from tests.memory.extents import extent

ROWS, WIDTH = 4, 8
VALUE = ROWS * WIDTH * 4
"""Bytes of one activation."""


def graph_of(model: nn.Module, *inputs: Tensor) -> Any:
    return trace(model, Sample(*inputs)).graph


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh())


def live(trace: StageTrace, *passes: str) -> dict[int, int]:
    found: dict[int, int] = {}
    for name in passes:
        for step in getattr(trace, name):
            for storage, count in step.changes:
                found[storage] = found.get(storage, 0) + count
    return {storage: count for storage, count in found.items() if count}


def test_a_stage_by_hand() -> None:
    stage = Stages(graph_of(mlp(), torch.zeros(ROWS, WIDTH))).of()
    found = trace_stage(stage, How(ROWS))
    # the input, and what both Tanh save: their results, which the layer behind saves too
    assert sorted(live(found, "forward").values()) == [VALUE] * 3
    assert extent(found.forward).peak_bytes == 4 * VALUE  # a layer's result beside the input, a saved value and Tanh's
    weight, bias = WIDTH * WIDTH * 4, WIDTH * 4
    assert sorted(live(found, "forward", "backward").values()) == sorted([weight, bias] * 2)
    assert sorted(found.gradients.values()) == ["0.bias", "0.weight", "2.bias", "2.weight"]
    assert not live(found, "forward", "backward_later")
    assert [step.node for step in found.forward if step.node] == ["0#0", "1#0", "2#0", "3#0"]


def test_recompute_holds_less_and_needs_more() -> None:
    stage = Stages(graph_of(nn.Sequential(mlp(), mlp()), torch.zeros(ROWS, WIDTH))).of()
    never, block, always = (
        trace_stage(stage, how) for how in (How(ROWS), How(ROWS, units=("0", "1")), How(ROWS, whole=True))
    )
    held = [extent(trace.forward).left_bytes for trace in (never, block, always)]
    assert held == [5 * VALUE, 3 * VALUE, 2 * VALUE]  # always: the input, and the result that was sent
    for found in (block, always):
        assert live(found, "forward", "backward").keys() == found.gradients.keys()
        assert not live(found, "forward", "backward_later")


def test_gradients_apart_are_beside_the_sums_until_all_are_made() -> None:
    stage = Stages(graph_of(mlp(), torch.zeros(ROWS, WIDTH))).of()
    place, apart = (trace_stage(stage, How(ROWS, apart=flag)) for flag in (False, True))
    assert extent(place.backward) == extent(apart.backward)
    gradients = sum(live(place, "forward", "backward").values())
    above = [extent((*t.forward, *t.backward_later)).peak_bytes for t in (place, apart)]
    assert 0 < above[1] - above[0] <= gradients
    assert not live(apart, "forward", "backward_later")


@pytest.mark.parametrize("whole", [False, True])
def test_large_sums_are_added_to_in_place_where_nobody_else_holds_them(whole: bool) -> None:
    """An embedding's gradient; a linear layer's is a view, which autograd does not change the first time."""
    words, width = 1 << 12, 4
    model = nn.Sequential(nn.Embedding(words, width), nn.Linear(width, words))
    stage = Stages(graph_of(model, torch.zeros(ROWS, dtype=torch.long))).of()
    found = trace_stage(stage, How(ROWS, apart=True, whole=whole))
    large = words * width * 4
    assert sorted(found.gradients.values()) == ["0.weight", "1.bias", "1.weight"]
    changes = {
        node: [count for step in found.backward_later if step.node == node for _, count in step.changes]
        for node in ("0#0", "1#0")
    }
    assert [changes["0#0"].count(sign * large) for sign in (1, -1)] == [1, 1], "the gradient, added and gone"
    assert [changes["1#0"].count(sign * large) for sign in (1, -1)] == [2, 2], "the new sum, and the old one too"


class Masked(nn.Module):
    """Adds a value that does not depend on the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.place = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + torch.tanh(self.place)


def test_a_shared_value_is_there_before_the_microbatch_and_collects_a_gradient() -> None:
    graph = graph_of(Masked(), torch.zeros(ROWS, WIDTH))
    own = [info.name for _, info in graph.compute_nodes() if info.node_class is NodeClass.MICRO]
    (shared,) = {info.name for _, info in graph.compute_nodes()} - set(own)
    found = trace_stage(Stages(graph).of(own), How(ROWS, input_grads={shared: True}))
    assert shared in found.gradients.values()
    assert WIDTH * 4 not in [count for step in found.forward for _, count in step.changes]


class Small(nn.Module):
    """A convolution, a norm, blocks with attention: in a few shapes, big enough to be seen."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.norm = nn.Conv2d(3, 64, 4, 4), nn.LayerNorm(64)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(64, 4, 256, 0.0, batch_first=True) for _ in range(3))
        self.head = nn.Linear(64, 100)

    def forward(self, image: Tensor) -> Tensor:
        x = self.norm(self.patches(image).flatten(2).transpose(1, 2))
        for block in self.blocks:
            x = block(x)
        return self.head(x).float().square().mean()


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("amp", [False, True])
def test_a_whole_step_is_what_the_allocator_says(amp: bool, recompute: bool) -> None:
    torch.manual_seed(0)
    model, image = Small(), torch.randn(4, 3, 64, 64)
    paths = [f"blocks.{number}" for number in range(3)] if recompute else []
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=amp):
        found = trace_stage(Stages(graph_of(model, image)).of(), How(4, units=paths))
    for path in paths:
        block = model.get_submodule(path)
        block.forward = lambda *args, run=block.forward, **named: checkpoint(run, *args, use_reentrant=False, **named)

    def step() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=amp):
            model(image).backward()

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        step()
        model.zero_grad(set_to_none=True)
        with Allocations() as real:
            step()
    finally:
        torch.set_num_threads(threads)
    predicted = extent((*found.forward, *found.backward)).peak_bytes - image.untyped_storage().nbytes()
    assert predicted == pytest.approx(real.peak_bytes, rel=5e-3)
