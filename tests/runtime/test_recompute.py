"""When stages run again, how often, what is held in between, and what a failure says."""

from __future__ import annotations

import gc
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autosplit.options import Options
from autosplit.pipelined import PipelinedModule
from autosplit.profile.node_costs.ledger import Ledger
from tests.equivalence.equality import LANES
from tests.models.blocks import WideBlock
from tests.runtime.gates import Boom

WIDTH, ROWS, CHUNKS, BLOCKS = 16, 32, 4, 4


class Net(nn.Module):
    """A layer, equal blocks, a layer."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(width, width), nn.Linear(width, width)
        self.blocks = nn.ModuleList(WideBlock(width, norm=True) for _ in range(BLOCKS))

    def forward(self, value: Tensor) -> Tensor:
        value = self.first(value)
        for block in self.blocks:
            value = block(value)
        return self.last(value)


def split(
    recompute: str, *, model: nn.Module | None = None, lanes: str = "inline", stages: int = 2, schedule: str = "gpipe"
) -> PipelinedModule:
    devices = (torch.device("cpu"),) * stages
    options = Options(devices, CHUNKS, schedule=schedule, lanes=lanes, recompute=(recompute,), measure=False)
    return PipelinedModule(Net() if model is None else model, options)


def value(width: int = WIDTH) -> Tensor:
    return torch.randn(ROWS, width, generator=torch.Generator().manual_seed(0))


class Calls:
    """Counts the calls of some layers by hooks."""

    def __init__(self, model: nn.Module) -> None:
        self.counts: Counter[str] = Counter()
        for name in ("first", "blocks.0.wide", "blocks.3.norm", "last"):
            module = model.get_submodule(name)
            module.register_forward_hook(lambda *_, name=name: self.counts.update([name]))

    def taken(self) -> dict[str, int]:
        counts = dict(self.counts)
        self.counts.clear()
        return counts


# autograd saves what the last layer takes before the layer runs: its second run ends there
TIMES = {
    "never": (1.0, 1.0, 1.0, 1.0),
    "always": (2.0, 2.0, 2.0, 1.0),
    "except_last": (1.75, 1.75, 1.75, 1.0),
    "block": (1.0, 2.0, 2.0, 1.0),
}


@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("recompute", list(TIMES))
def test_layers_run_again_in_the_backward_only(recompute: str, lanes: str) -> None:
    model = Net()
    calls = Calls(model)
    pipe = split(recompute, model=model, lanes=lanes)
    loss = pipe(value()).sum()
    calls.taken()
    loss = pipe(value()).sum()
    assert set(calls.taken().values()) == {CHUNKS}
    loss.backward()
    asked = [round((times - 1) * CHUNKS) for times in TIMES[recompute]]
    names = ("first", "blocks.0.wide", "blocks.3.norm", "last")
    assert calls.taken() == {name: count for name, count in zip(names, asked, strict=True) if count}
    pipe.train_step(value(), target=value(), loss_fn=nn.MSELoss())
    assert calls.taken() == dict(zip(names, (round(times * CHUNKS) for times in TIMES[recompute]), strict=True))


@pytest.mark.parametrize("lanes", ["inline", pytest.param("threads", marks=pytest.mark.slow)])
def test_what_is_held_between_forward_and_backward_falls(lanes: str) -> None:
    held, peaks = {}, {}
    for recompute in TIMES:
        pipe = split(recompute, lanes=lanes)
        pipe(value()).sum().backward()
        pipe.zero_grad()
        gc.collect()
        with Ledger() as ledger:
            loss = pipe(value()).sum()
            held[recompute] = ledger.live_bytes
            loss.backward()
            peaks[recompute] = ledger.peak_bytes
    batch = value().nbytes
    assert held["always"] <= 4 * batch  # microbatches, what the stages sent, the whole output
    assert held["block"] - held["always"] == (BLOCKS - 1) * batch + CHUNKS * batch // CHUNKS
    assert held["never"] - held["except_last"] == pytest.approx(0.75 * (held["never"] - held["always"]), rel=0.01)
    if lanes == "inline":  # how far threads overlap, and so their peak, differs from run to run
        assert peaks["never"] > peaks["except_last"] >= peaks["always"]
        assert peaks["never"] > peaks["block"]


@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("recompute", ["always", "block"])
def test_a_fault_in_the_second_run_says_where_and_leaves_no_gradient(recompute: str, lanes: str) -> None:
    model = Net()
    pipe = split(recompute, model=model, lanes=lanes, schedule="1f1b")
    pipe.train_step(value(), target=value(), loss_fn=nn.MSELoss())
    pipe.zero_grad()
    left = [0]

    def fail(module: nn.Module, given: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            raise Boom
        return given  # what only observes does not see the second run

    handle = model.blocks[3].narrow.register_forward_pre_hook(fail)
    pipe(value())  # a module with a hook is recorded anew
    left[0] = 2 * CHUNKS  # the last backward of the last stage
    with pytest.raises(Boom) as caught:
        pipe.train_step(value(), target=value(), loss_fn=nn.MSELoss())
    notes = "\n".join(caught.value.__notes__)
    assert "stage 1 ran again for its backward" in notes
    assert "stage 1, backward, microbatch" in notes
    assert "blocks.3.narrow" in notes
    assert all(parameter.grad is None for parameter in pipe.parameters())
    handle.remove()
    pipe.train_step(value(), target=value(), loss_fn=nn.MSELoss())
