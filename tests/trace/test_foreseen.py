"""Blocks whose calls are foreseen: the recording is the one in which all ran; where one did not, all begins anew."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autosplit import Sample
from autosplit.aside import checked, later, second_core
from autosplit.errors import TraceError
from autosplit.trace import gather as gathering
from autosplit.trace.foreseen import same
from autosplit.trace.gather import Gathered, gather
from autosplit.trace.inputs import flatten
from tests.trace.test_repeats import LOG, RUNS, WIDTH, Block, Body, gated, plain

pytestmark = pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="children are forked on Linux only")

BLOCKS = 9
ODD: set[int] = set()
"""Blocks that do something else, which is not to be seen in their attributes."""
BEGUN: Counter[str] = Counter()
PLACES: dict[int, str] = {}


@pytest.fixture(autouse=True)
def _two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    ODD.clear()
    BEGUN.clear()
    RUNS.clear()


class Halved(torch.autograd.Function):
    """An operation that takes an object which each call makes anew."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, _: object) -> Tensor:
        return x / 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] / 2, None


class Still(Block):
    """A block that does not look at its number."""

    def __init__(self, *settings: Any) -> None:
        super().__init__(*settings)
        self.act = nn.Tanh()

    def forward(self, x: Tensor) -> Any:
        LOG.info(PLACES[id(self)])
        return self._body(self, x)


class Line(nn.Module):
    """A layer, blocks, and a head; ``again``: a layer of the third block's that is called again, or a new object."""

    def __init__(self, *bodies: Body, factors: tuple[float, ...] = (), again: str = "") -> None:
        super().__init__()
        self.again, self.embed, self.head = again, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)
        factors = factors or (1.0,) * len(bodies)
        pairs = enumerate(zip(bodies, factors, strict=True))
        self.blocks = nn.ModuleList(Still(index, body, factor) for index, (body, factor) in pairs)
        PLACES.update({id(block): str(index) for index, block in enumerate(self.blocks)})

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(Halved.apply(x, object()) if self.again == "object" else x)
        for block in self.blocks:
            x = block(x)
        return self.head(getattr(self.blocks[2], self.again)(x)[:, :WIDTH] if self.again in ("up", "act") else x)


def on_meta(*bodies: Body, **settings: Any) -> Line:
    with torch.device("meta"):
        return Line(*bodies, **settings)


def gathered(model: nn.Module) -> Gathered:
    RUNS.clear()
    BEGUN["gather"] += 1
    return gather(model, flatten(model, Sample(torch.zeros(7, WIDTH, device="meta"))))


def foreseen(model: nn.Module) -> Gathered:
    """Record with a second core's help, which has looked at all blocks before this returns."""
    BEGUN.clear()
    with second_core():
        return checked(lambda: gathered(model))


def assert_alike(one: Gathered, other: Gathered) -> None:
    assert same(one.recording.recording, other.recording.recording)
    assert one.scope == other.scope
    assert one.min_rows == other.min_rows
    assert [_merged(call) for call in one.recording.calls] == [_merged(call) for call in other.recording.calls]


def _merged(call: Any) -> tuple[Any, ...]:
    return call.args, call.kwargs, call.tensors, call.draws


def test_all_blocks_but_two_are_foreseen() -> None:
    model = on_meta(*[plain] * BLOCKS)
    alone = gathered(model)
    assert all(RUNS[str(index)] for index in range(BLOCKS))
    helped = foreseen(model)
    assert BEGUN["gather"] == 1
    assert set(RUNS) == {"0", "1"}
    assert RUNS["0"] == 3, "at three, four and six rows; the caller's rows and one are looked at aside"
    assert_alike(helped, alone)


def test_kinds_in_turn_and_blocks_that_differ_in_what_they_read() -> None:
    model = on_meta(*[plain, gated] * BLOCKS, factors=(1.0,) * 2 * (BLOCKS - 1) + (2.0, 2.0))
    alone = gathered(model)
    helped = foreseen(model)
    assert BEGUN["gather"] == 1
    assert set(RUNS) == {"0", "1", "2", "3", "16", "17"}
    assert_alike(helped, alone)


def secretly(block: Any, x: Tensor) -> Tensor:
    return x.tanh() if id(block) in ODD else plain(block, x)


def test_a_block_that_did_something_else_is_found_and_all_begins_anew() -> None:
    model = on_meta(*[secretly] * BLOCKS)
    ODD.add(id(model.blocks[5]))
    alone = gathered(model)
    assert any(call.call.name == "blocks.5#0/tanh_0" for call in alone.recording.calls)
    helped = foreseen(model)
    assert BEGUN["gather"] == 2
    assert_alike(helped, alone)


def refusing(block: Any, x: Tensor) -> Tensor:
    return plain(block, x) * float(x.sum() > 0) if id(block) in ODD else plain(block, x)


def test_a_block_that_no_graph_follows_is_refused_in_the_same_words() -> None:
    model = on_meta(*[refusing] * BLOCKS)
    ODD.add(id(model.blocks[5]))
    with pytest.raises(TraceError) as alone:
        gathered(model)
    with pytest.raises(TraceError) as helped:
        foreseen(model)
    assert BEGUN["gather"] == 2
    assert str(helped.value) == str(alone.value)


def test_what_is_refused_before_anything_is_foreseen_is_recorded_once() -> None:
    model = on_meta(*[refusing] * BLOCKS)
    ODD.add(id(model.blocks[0]))
    with pytest.raises(TraceError) as alone:
        gathered(model)
    before = dict(RUNS)
    with pytest.raises(TraceError) as helped:
        foreseen(model)
    assert dict(RUNS) == before
    assert BEGUN["gather"] == 1
    assert str(helped.value) == str(alone.value)


def speaking(block: Any, x: Tensor) -> Tensor:
    print("block", PLACES[id(block)])
    return refusing(block, x)


@pytest.mark.parametrize("odd", [None, 0], ids=["foreseen", "refused"])
def test_what_a_forward_prints_is_said_as_often_as_on_one_core(
    odd: int | None, capsys: pytest.CaptureFixture[str]
) -> None:
    model = on_meta(*[speaking] * BLOCKS)
    if odd is not None:
        ODD.add(id(model.blocks[odd]))
    _tried(model, gathered)
    alone = Counter(capsys.readouterr().out.splitlines())
    helped = _tried(model, foreseen)
    assert isinstance(helped, Gathered) is (odd is None)
    assert Counter(capsys.readouterr().out.splitlines()) == alone


def acting(block: Any, x: Tensor) -> Tensor:
    return plain(block, block.act(x))


def renewing(block: Any, x: Tensor) -> Tensor:
    block.table = block.table + 1
    return plain(block, x)


@pytest.mark.parametrize(("body", "again"), [(renewing, ""), (plain, "object"), (acting, "act")])
def test_what_is_not_foreseen_is_not_tried(body: Body, again: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = on_meta(*[body] * BLOCKS, again=again)
    alone = _tried(model, gathered)
    begun: list[Any] = []

    def begin(check: Any) -> Any:
        begun.append(check)
        return later(check)

    monkeypatch.setattr(gathering, "later", begin)
    helped = _tried(model, foreseen)
    assert BEGUN["gather"] == 1
    assert all("_foreseen" not in check.__qualname__ for check in begun)
    if isinstance(alone, Gathered) and isinstance(helped, Gathered):
        assert helped.recording.calls == alone.recording.calls
    else:
        assert helped == alone


def test_a_block_of_which_a_layer_is_entered_runs() -> None:
    model = on_meta(*[plain] * BLOCKS, again="up")
    alone = gathered(model)
    helped = foreseen(model)
    assert BEGUN["gather"] == 1
    assert set(RUNS) == {"0", "1", "2"}
    assert alone.scope.entered == {"blocks.2.up"}
    assert_alike(helped, alone)


def _tried(model: nn.Module, make: Callable[[nn.Module], Gathered]) -> Gathered | str:
    try:
        return make(model)
    except TraceError as error:
        return str(error)


def test_on_one_core_all_blocks_run(monkeypatch: pytest.MonkeyPatch) -> None:
    model = on_meta(*[plain] * BLOCKS)
    gathered(model)
    before = dict(RUNS)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    foreseen(model)
    assert before == RUNS


@pytest.mark.parametrize(
    "other",
    [
        {"constants": {"other": torch.relu}},
        {"output": []},
        {"unflatten": lambda leaves: list(leaves)},
        {"calls": []},
    ],
    ids=lambda other: next(iter(other)),
)
def test_recordings_that_differ_in_one_thing_are_not_the_same(other: dict[str, Any]) -> None:
    own = gathered(on_meta(*[plain] * 2)).recording.recording
    assert same(own, replace(own))
    assert not same(own, replace(own, **other))


def test_equal_numbers_of_other_types_are_not_the_same() -> None:
    own = gathered(on_meta(*[plain] * 2)).recording.recording
    assert own.output
    assert same(replace(own, output=[1]), replace(own, output=[1]))
    assert not same(replace(own, output=[1]), replace(own, output=[True]))
