"""The same bits on any number of lanes, inline or on threads, run after run, while the lanes' timing varies."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from autosplit import autosplit
from autosplit.runtime.step.cells import Cells
from autosplit.schedule.action import Action
from tests.equivalence.equality import Batch, Run, assert_same_bits, forward_backward, train_step
from tests.models.named import CASES, WIDTH, flat, numbers, tokens
from tests.models.random_modules import Recipe, make_batch, recipes
from tests.models.random_modules import build as build_random
from tests.pairwise import mostly_slow
from tests.properties import examples

pytestmark = [pytest.mark.filterwarnings("ignore:.*stage:UserWarning"), pytest.mark.usefixtures("one_intra_op_thread")]

RUNS = examples(12, few=4)
LONGEST_S = 0.002


class Delays:
    """Sleeps before each action on a lane's thread, a time drawn from a seed, and notes the order of the actions."""

    def __init__(self, act: Callable[[Cells, Action], None]) -> None:
        self.act = act
        self.random = random.Random(0)
        self.orders: set[tuple[str, ...]] = set()
        self.order: list[str] = []
        self.longest_s = LONGEST_S

    def __call__(self, cells: Cells, action: Action) -> None:
        if threading.current_thread() is not threading.main_thread():
            time.sleep(self.random.random() * self.longest_s)
            self.order.append(str(action))
        self.act(cells, action)

    def next_run(self) -> None:
        """Begin to note another run's order."""
        self.orders.add(tuple(self.order))
        self.order = []


@pytest.fixture
def delays(monkeypatch: pytest.MonkeyPatch) -> Iterator[Delays]:
    delayed = Delays(Cells.act)
    monkeypatch.setattr(Cells, "act", lambda cells, action: delayed(cells, action))
    return delayed


class Everything(nn.Module):
    """Ties at both ends, a layer used three times, skips, dropout in every stage, and batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(13, WIDTH), nn.Linear(WIDTH, 13, bias=False)
        self.head.weight = self.table.weight
        self.repeated = nn.Linear(WIDTH, WIDTH)
        self.norms = nn.ModuleList(nn.BatchNorm1d(WIDTH) for _ in range(3))
        self.mixes = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH) for _ in range(3))

    def forward(self, words: Tensor) -> Tensor:
        first = value = self.table(words).mean(1)
        for norm, mix in zip(self.norms, self.mixes, strict=True):
            value = F.dropout(torch.tanh(self.repeated(value)), 0.3, self.training)
            value = norm(mix(torch.cat([value, first], dim=1)))
        return self.head(F.dropout(value, 0.2, self.training))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Batch]]] = {
    "everything": (Everything, lambda rows: Batch((tokens(rows, 4),))),
    "tied": (CASES["shared weight"].make, flat),
    "repeated": (CASES["repeated block"].make, flat),
    "skips": (CASES["hub"].make, flat),
    "gpt": (CASES["tiny gpt"].make, lambda rows: Batch((tokens(rows, 6),))),
}


def build(name: str) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return MODELS[name][0]().double()


def split(name: str, lanes: str, devices: int, *, schedule: str = "auto") -> Any:
    return autosplit(build(name), devices=["cpu"] * devices, chunks=4, lanes=lanes, schedule=schedule)


def output_of(value: Any) -> Tensor:
    return value if isinstance(value, Tensor) else value.logits


def mean_square(output: Any, target: Tensor) -> Tensor:
    return F.mse_loss(output_of(output), target)


def seeded(pipe: Any, run: Callable[[], Run]) -> tuple[Run, Tensor]:
    """Return a run from one seed on buffers as they were, and the caller's random state after it."""
    kept = [buffer.clone() for buffer in pipe.buffers()]
    torch.manual_seed(11)
    found = run()
    state = torch.get_rng_state()
    with torch.no_grad():
        for buffer, before in zip(pipe.buffers(), kept, strict=True):
            buffer.copy_(before)
    return found, state


def assert_same(actual: tuple[Run, Tensor], expected: tuple[Run, Tensor]) -> None:
    assert_same_bits(actual[0], expected[0])
    assert torch.equal(actual[1], expected[1]), "the random state went elsewhere"


@pytest.mark.parametrize("devices", [2, 4])
def test_a_call_and_its_backward_many_times(devices: int, delays: Delays) -> None:
    batch = MODELS["everything"][1](10)
    inline = split("everything", "inline", devices)
    expected = seeded(inline, lambda: forward_backward(inline, batch))
    pipe = split("everything", "threads", devices)
    for _ in range(RUNS):
        assert_same(seeded(pipe, lambda: forward_backward(pipe, batch)), expected)
        delays.next_run()
    assert len(delays.orders) > RUNS / 2


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_step_many_times(schedule: str, delays: Delays) -> None:
    batch = MODELS["everything"][1](10)
    options = {"target": numbers(10, 13, seed=1), "loss_fn": mean_square, "loss_reduction": "mean"}
    inline = split("everything", "inline", 4, schedule="gpipe")
    expected = seeded(inline, lambda: train_step(inline, batch, **options))
    pipe = split("everything", "threads", 4, schedule=schedule)
    for _ in range(RUNS):
        assert_same(seeded(pipe, lambda: train_step(pipe, batch, **options)), expected)
        delays.next_run()
    assert len(delays.orders) > RUNS / 2


@pytest.mark.parametrize("name", mostly_slow(MODELS, "everything", "skips"))
def test_any_number_of_lanes_of_either_kind(name: str, delays: Delays) -> None:
    batch = MODELS[name][1](9)
    calls, steps = [], []
    for lanes, devices, schedule in (("inline", 1, "gpipe"), ("threads", 2, "1f1b"), ("inline", 4, "gpipe")):
        pipe = split(name, lanes, devices, schedule=schedule)
        calls.append(seeded(pipe, lambda pipe=pipe: forward_backward(pipe, batch)))
        target = torch.zeros_like(calls[0][0].outputs[next(iter(calls[0][0].outputs))])
        options = {"target": target, "loss_fn": mean_square, "loss_reduction": "mean"}
        steps.append(seeded(pipe, lambda pipe=pipe, options=options: train_step(pipe, batch, **options)))
    for found in (calls, steps):
        for one in found[1:]:
            assert_same(one, found[0])


class Aside(nn.Module):
    """Its first two layers have results that nobody uses: the last stage waits for no other."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(True)) for _ in range(3))

    def forward(self, value: Tensor) -> Tensor:
        self.first(value)
        self.second(value)
        return self.last(value)


@pytest.mark.parametrize("slow", mostly_slow([0, 1, 2], 1))
def test_stages_that_wait_for_nothing(slow: int, monkeypatch: pytest.MonkeyPatch) -> None:
    act = Cells.act

    def late(cells: Cells, action: Action) -> None:
        if action.stage == slow and threading.current_thread() is not threading.main_thread():
            time.sleep(0.02)
        act(cells, action)

    monkeypatch.setattr(Cells, "act", late)
    options = {"target": numbers(4, WIDTH, seed=1), "loss_fn": F.mse_loss}
    found = []
    for lanes in ("inline", "threads"):
        torch.manual_seed(0)
        pipe = autosplit(Aside().double(), devices=["cpu"] * 3, chunks=2, lanes=lanes)
        found.append((forward_backward(pipe, flat(4)), train_step(pipe, flat(4), **options)))
    for inline, threaded in zip(*found, strict=True):
        assert_same_bits(threaded, inline)


@settings(max_examples=examples(16, few=2))
@given(
    recipe=recipes(forms=("tensor",)),
    rows=st.integers(1, 13),
    chunks=st.integers(1, 9),
    devices=st.integers(2, 5),
    schedules=st.permutations(("gpipe", "1f1b", "1f1b")),
)
def test_random_modules(recipe: Recipe, rows: int, chunks: int, devices: int, schedules: list[str]) -> None:
    """Uncut, cut inline and cut on threads; and in a second run."""
    batch = make_batch(recipe, rows=rows)
    options = {"target": torch.zeros(rows, recipe.width, dtype=torch.float64), "loss_fn": F.mse_loss}
    delayed = Delays(Cells.act)
    delayed.longest_s = LONGEST_S / 4
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Cells, "act", lambda cells, action: delayed(cells, action))
        cases = [("inline", 1), ("inline", devices), ("threads", devices), ("threads", devices)]
        for (lanes, count), schedule in zip(cases, (*schedules, schedules[-1]), strict=True):
            model = build_random(recipe)
            pipe = autosplit(model, devices=["cpu"] * count, chunks=chunks, lanes=lanes, schedule=schedule)
            runs = [forward_backward(pipe, batch), forward_backward(pipe, batch)]
            if any(parameter.requires_grad for parameter in model.parameters()):
                runs += [train_step(pipe, batch, **options) for _ in range(2)]
            found.append(runs)
    for other in found[1:]:
        for one, whole in zip(other, found[0], strict=True):
            assert_same_bits(one, whole)
