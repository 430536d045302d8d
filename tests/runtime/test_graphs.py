"""graphs=True: the bits of the stages as they are, for every schedule; nothing stale is ever used."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autosplit import autosplit
from autosplit.runtime import batch_norm, graph_slot
from tests.runtime.graph_pipes import Pair, same

WIDTH, ROWS = 4, 6


class Net(nn.Module):
    """A skip, one weight at both ends and one used twice, a norm that counts, dropout, an operation in place."""

    def __init__(self, dropout: float = 0.25) -> None:
        super().__init__()
        self.first, self.twice, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.norm, self.drop = nn.BatchNorm1d(WIDTH), nn.Dropout(dropout)
        self.mid = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH))
        self.last.weight = self.first.weight

    def forward(self, value: Tensor) -> Tensor:
        near = torch.relu_(self.norm(self.first(value)))
        far = self.mid(self.drop(near)) + near
        far = torch.tanh(self.twice(torch.tanh(self.twice(far))))
        return self.last(self.drop(far) + near)


def batch(rows: int = ROWS) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, WIDTH), torch.randn(rows, WIDTH)


def pair(model: nn.Module | None = None, **options: Any) -> Pair:
    torch.manual_seed(0)
    return Pair(Net() if model is None else model, torch.zeros(ROWS, WIDTH), **options)


SCHEDULES: dict[str, dict[str, Any]] = {
    "gpipe": {},
    "1f1b": {"stages": 3},
    "interleaved": {"virtual_stages": 2},
    "looped_bfs": {"virtual_stages": 2},
    "zb_h1": {},
    "zb_v": {"virtual_stages": 2},
}


@pytest.fixture(autouse=True)
def _no_looks_at_means(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have norms not look at numbers, as they do on the CPU only."""
    monkeypatch.setattr(batch_norm, "_rounded", lambda *given: None)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_training_steps_have_the_same_bits(schedule: str) -> None:
    two = pair(schedule=schedule, **SCHEDULES[schedule])
    for step in range(4):
        two.train(*batch())
        assert bool(two.replays) == bool(step), "the first step is the warm-up"
    made = len(two.streams.graphs)
    two.train(*batch())
    assert len(two.streams.graphs) == made
    assert all("as graphs" in line and "not all" not in line for line in two.lines()), two.lines()


@pytest.mark.parametrize("again", ["always", "block", "except_last"])
def test_what_runs_again_does_so_in_the_graph(again: str) -> None:
    two = pair(recompute=again, schedule="1f1b")
    for _ in range(3):
        two.train(*batch())
    assert two.replays
    assert not any("not all" in line for line in two.lines()), two.lines()


def test_ragged_batches_and_gradients_that_add_up() -> None:
    two = pair(chunks=3)
    for rows in (6, 5, 6, 5, 5, 4, 6):  # microbatches of 2 and of 1 rows; a norm refuses one, so five rows are 3 + 2
        two.train(*batch(rows), clear=rows != 5)
    assert two.replays


def test_calls_have_the_same_bits() -> None:
    two = pair()
    for _ in range(3):
        two.call(torch.randn(ROWS, WIDTH))
        two.both(lambda pipe, model: pipe.eval_step(torch.ones(ROWS, WIDTH)))
        with torch.inference_mode():
            two.both(lambda pipe, model: pipe(torch.ones(ROWS, WIDTH)))
    assert two.replays
    assert not any("not all" in line for line in two.lines()), two.lines()


def test_calls_that_overlap_have_slots_of_their_own() -> None:
    two = pair(Net(0.0))
    values = torch.randn(3, ROWS, WIDTH)

    def run(pipe: Any, model: nn.Module) -> list[Tensor]:
        model.zero_grad()
        first, second, dropped = (pipe(value) for value in values)
        del dropped
        second.sum().backward()
        (first * first).sum().backward()
        return [first.detach(), second.detach()]

    for _ in range(4):
        two.both(run)
    assert two.replays
    assert any("in flight" in line for line in two.lines())


def test_a_second_backward_and_a_second_derivative() -> None:
    two = pair(Net(0.0))

    def run(pipe: Any, model: nn.Module) -> list[Any]:
        value = torch.linspace(-1, 1, ROWS * WIDTH).reshape(ROWS, WIDTH).requires_grad_()
        output = pipe(value)
        one = torch.autograd.grad(output.sum(), value, retain_graph=True)
        other = torch.autograd.grad(output.square().sum(), value)
        return [*one, *other]

    def twice(pipe: Any, model: nn.Module) -> list[Any]:
        value = torch.linspace(-1, 1, ROWS * WIDTH).reshape(ROWS, WIDTH).requires_grad_()
        (slope,) = torch.autograd.grad(pipe(value).square().sum(), value, create_graph=True)
        return list(torch.autograd.grad(slope.square().sum(), [value, model.first.weight]))

    for _ in range(3):
        two.both(run)
        one, other = ([*twice(pipe, own)] for pipe, own in zip(two.pipes, two.models, strict=True))
        torch.testing.assert_close(one, other)
    assert two.replays


def test_gradients_are_nobody_elses_memory() -> None:
    two = pair(Net(0.0))
    kept = []
    for _ in range(4):
        found = two.train(*batch())
        kept.append(([p.grad for p in two.models[0].parameters()], found[0][1:]))
    for gradients, copies in kept:
        same(gradients, copies[: len(gradients)])


CHANGES = ["assign", "data", "unfreeze", "replace", "constant", "buffer"]


@pytest.mark.parametrize("change", CHANGES)
def test_nothing_stale_is_used(change: str) -> None:
    model = Net()
    model.twice.weight.requires_grad_(change != "unfreeze")
    two = pair(model)
    for _ in range(3):
        two.train(*batch())
    state = {name: tensor + 0.25 for name, tensor in copy.deepcopy(two.models[0].state_dict()).items()}
    state["norm.num_batches_tracked"] = torch.tensor(3)
    for own in two.models:
        mid: Any = own.mid[0]
        if change == "assign":
            own.load_state_dict(copy.deepcopy(state), assign=True)
        elif change == "data":
            mid.weight.data = mid.weight.data.t().contiguous()
        elif change == "unfreeze":
            own.twice.weight.requires_grad_(True)
        elif change == "replace":
            mid.weight = nn.Parameter(mid.weight.detach() * 2)
        elif change == "constant":
            own.drop.p, own.mid[3].eps = 0.75, 0.5
        else:
            own.norm.running_mean = torch.ones(WIDTH)
    for _ in range(3):
        before = two.replays
        two.train(*batch())
    assert two.replays > before


def test_a_parameter_changed_before_its_backward_is_an_error() -> None:
    two = pair(Net(0.0))
    for _ in range(2):
        two.call(torch.randn(ROWS, WIDTH))
    output = two.pipes[0](torch.randn(ROWS, WIDTH, requires_grad=True))
    with torch.no_grad():
        two.models[0].mid[2].weight.mul_(2)
    with pytest.raises(RuntimeError, match=r"parameter of stage \d.*inplace operation"):
        output.sum().backward()


def test_hooks_are_called_and_named() -> None:
    two, seen = pair(), []
    for own in two.models:
        own.mid[2].register_forward_hook(lambda *given: seen.append("module"))
        own.mid[0].weight.register_hook(lambda gradient: seen.append("parameter"))
    for _ in range(3):
        two.train(*batch())
    assert seen.count("module") == 2 * 3 * 3
    assert seen.count("parameter") == 2 * 3
    assert two.replays
    assert any("mid.2, a Linear, has hooks" in line for line in two.lines()), two.lines()


def test_under_autocast() -> None:
    two = pair(Net(0.0))
    for cast in (True, False, True, True, False):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=cast):
            two.train(*batch())
        value, found = torch.randn(ROWS, WIDTH), []
        for pipe, own in zip(two.pipes, two.models, strict=True):
            own.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=cast):
                pipe(value).square().sum().backward()
            found.append([p.grad for p in own.parameters()])
        torch.testing.assert_close(
            *found, atol=0.1, rtol=0.1
        )  # a weight's cast has one gradient per cell, or one in all
        for owner in two.models:
            owner.zero_grad(set_to_none=True)
    assert two.replays


@pytest.mark.parametrize("fails", ["first", "backward", "all"])
def test_a_capture_that_fails_costs_a_line_in_the_report(fails: str) -> None:
    two = pair()
    asked = 0

    def failing() -> bool:
        nonlocal asked
        asked += 1
        return fails == "all" or asked == {"first": 1, "backward": 3}[fails]

    two.streams.fails = failing
    for _ in range(4):
        two.train(*batch())
    assert any("not permitted" in line for line in two.lines())
    assert bool(two.replays) == (fails != "all")


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1"])
@pytest.mark.parametrize("nth", [1, 2, 3, 4])
def test_a_backward_that_cannot_be_captured_runs_its_cell_again(
    schedule: str, nth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And never the engine on what a captured forward saved."""
    two, asked, engine = pair(schedule=schedule), [0], graph_slot.gradients

    def captured(*given: Any, **named: Any) -> Any:
        assert two.streams.capturing, "outside of a capture"
        asked[0] += 1
        if asked[0] == nth:
            raise RuntimeError("operation not permitted when stream is capturing")
        return engine(*given, **named)

    monkeypatch.setattr(graph_slot, "gradients", captured)
    for _ in range(3):
        two.train(*batch())
        two.call(torch.randn(ROWS, WIDTH))
    assert asked[0] >= nth
    assert any("no graphs: operation not permitted" in line for line in two.lines()), two.lines()


def test_a_stage_with_tensors_on_another_device_has_no_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    two = pair(Net(0.0))
    apart: Any = two.models[0].mid
    apart, meta, cpu = apart[0].weight, torch.device("meta"), torch.device("cpu")
    monkeypatch.setattr(two.streams, "device", lambda tensor: meta if tensor is apart else cpu)
    for _ in range(3):
        two.train(*batch())
    assert any("no graphs: it uses a tensor on meta" in line for line in two.lines()), two.lines()


def test_a_cell_that_is_given_tensors_of_another_device_is_no_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    two = pair(Net(0.0))
    meta, cpu = torch.device("meta"), torch.device("cpu")
    monkeypatch.setattr(two.streams, "device", lambda tensor: meta if tensor.shape == (2, WIDTH) else cpu)
    for _ in range(3):
        two.train(*batch())
    assert all("no graphs: it uses a tensor on meta" in line for line in two.lines()), two.lines()


def test_slots_that_are_dropped_do_not_wait_for_the_garbage_collector() -> None:
    two = pair(Net(0.0))
    for _ in range(3):
        two.train(*batch())
    stages = [s for kept in two.pipes[0]._core.recordings.kept.values() for one in kept for s in one.graphs.stages]
    slots = [weakref.ref(slot) for stage in stages for kind in stage.kinds.values() for slot in kind.slots]
    assert slots
    gc.collect()
    gc.disable()
    try:
        for stage in stages:
            stage.kinds.clear()
        assert not any(slot() for slot in slots)
    finally:
        gc.enable()


class Reads(nn.Module):
    """Looks at a value where it is not in the way of a recording."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
        self.rnn = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, value: Tensor) -> Tensor:
        return self.rnn(self.layers(value)[:, None])[0][:, 0]


def test_recurrent_layers_weights_are_their_graphs_own() -> None:
    two = pair(Reads())
    for _ in range(3):
        two.train(*batch())
    assert two.replays


class Penalty(nn.Module):
    """A loss with a parameter of its own that looks at one of the model's last stage too."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.held = [weight]

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return ((output * self.scale - target) ** 2).mean() + self.held[0].square().mean()


def test_a_loss_that_looks_at_parameters() -> None:
    two = pair(Net(0.0), schedule="1f1b")
    value, target = batch()
    losses = [Penalty(own.last.bias) for own in two.models]
    for _ in range(3):
        found = []
        for pipe, own, loss_fn in zip(two.pipes, two.models, losses, strict=True):
            own.zero_grad()
            loss_fn.scale.grad = None
            total = pipe.train_step(value, target=target, loss_fn=loss_fn, loss_reduction="mean")
            found.append([total, loss_fn.scale.grad, *(p.grad for p in own.parameters())])
        same(*found)
    assert two.replays


def test_on_the_cpu_the_report_says_that_there_are_none() -> None:
    pipe = autosplit(Net(), devices=2, chunks=2, graphs=True, sample=torch.zeros(ROWS, WIDTH))
    pipe(torch.randn(ROWS, WIDTH))
    lines = [line for line in pipe.report().splitlines() if line.startswith("graphs: ")]
    assert len(lines) == 2
    assert all("its device is cpu, and graphs are for CUDA devices" in line for line in lines)
