"""The tape: drawn when needed, in model order, dropped when used; what its rules take to be so of torch's kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autosplit.runtime.lanes.lanes import generators
from autosplit.runtime.ops import CallState, CellContext, draw
from autosplit.runtime.tape import Tape, TapeNode
from autosplit.trace.graph import Symbol
from autosplit.trace.recording.random_watch import Draw, TensorSpec

aten = torch.ops.aten
ROWS = Symbol("rows")
NOISE = TensorSpec((ROWS, 4), (4, 1), torch.float32)


def node(name: str, *, again: bool = False, micro: bool = True) -> TapeNode:
    return TapeNode(name, (Draw(aten.bernoulli_.float, (NOISE, 0.5), (), NOISE),), micro, again)


def mask(rows: int) -> torch.Tensor:
    return torch.empty(rows, 4).bernoulli_(0.5)


def masks(tape: Tape, name: str, *, sizes: tuple[int, ...] = (3, 2)) -> torch.Tensor:
    return torch.cat([tape.run(name, m, mask, (rows,), {}) for m, rows in enumerate(sizes)])


def test_any_order_of_cells_gives_the_models_numbers_in_the_models_order() -> None:
    torch.manual_seed(0)
    expected = [mask(5) for _ in range(3)]
    after = torch.get_rng_state()
    torch.manual_seed(0)
    tape = Tape([node("a"), node("b"), node("c")], (3, 2), {})
    found = {name: masks(tape, name) for name in "bca"}
    assert all(torch.equal(found[name], own) for name, own in zip("abc", expected, strict=True))
    assert torch.equal(torch.get_rng_state(), after)


def test_it_draws_no_more_than_is_asked_for_and_keeps_only_what_is_needed_again() -> None:
    torch.manual_seed(0)
    mask(5)
    after = torch.get_rng_state()
    torch.manual_seed(0)
    tape = Tape([node("a"), node("b", again=True)], (3, 2), {})
    masks(tape, "a")
    assert torch.equal(torch.get_rng_state(), after)
    assert torch.equal(masks(tape, "b"), masks(tape, "b"))


def test_once_more_from_where_it_began() -> None:
    torch.manual_seed(0)
    tape = Tape([node("a"), node("b")], (3, 2), {})
    first = [masks(tape, name) for name in "ab"]
    mask(100)
    before = torch.get_rng_state()
    for again in (tape.again(), tape.again().again()):
        assert all(map(torch.equal, [masks(again, name) for name in "ab"], first))
        assert torch.equal(torch.get_rng_state(), before)


def test_what_runs_once_draws_by_itself() -> None:
    torch.manual_seed(0)
    expected = [mask(5) for _ in range(4)]
    after = torch.get_rng_state()
    for last in ("bdca", "abcd"):
        torch.manual_seed(0)
        tape = Tape([node("a"), node("b"), node("c", again=True), node("d", micro=False)], (5,), {})
        found = {name: tape.run(name, 0, mask, (5,), {}) for name in last}
        assert all(torch.equal(found[name], own) for name, own in zip("abcd", expected, strict=True))
        assert torch.equal(torch.get_rng_state(), after)
        assert all(torch.equal(tape.again().run(name, 0, mask, (5,), {}), found[name]) for name in "abcd")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("module", [False, True])
def test_dropout_has_torchs_bits(dtype: torch.dtype, inplace: bool, module: bool) -> None:
    torch.manual_seed(0)
    value, slope = torch.randn(5, 4).to(dtype).requires_grad_(), torch.randn(5, 4).to(dtype)
    expected = F.dropout(value * 1, 0.3, inplace=inplace)
    (gradient,) = torch.autograd.grad(expected, value, slope)
    torch.manual_seed(0)
    torch.randn(5, 4), torch.randn(5, 4)
    tape = Tape([TapeNode("a", (Draw(aten.bernoulli_.float, (NOISE, 0.7), (), NOISE),), True, False)], (3, 2), {})
    function, kwargs = (nn.Dropout(0.3, inplace), {}) if module else (F.dropout, {"p": 0.3, "inplace": inplace})
    parts = [tape.run("a", m, function, (part * 1,), kwargs) for m, part in enumerate(value.split([3, 2]))]
    assert torch.equal(torch.cat(parts), expected)
    assert torch.equal(torch.autograd.grad(torch.cat(parts), value, slope)[0], gradient)


def test_other_operations_than_were_recorded_are_an_error() -> None:
    tape = Tape([node("a")], (3, 2), {})
    with pytest.raises(RuntimeError, match=r"a draws aten::rand.*bernoulli_.*rng='counter'"):
        tape.run("a", 0, torch.rand, (3, 4), {})
    with pytest.raises(RuntimeError, match=r"of \[2, 4\] where aten::bernoulli_.float of \[3, 4\] was recorded"):
        tape.run("a", 0, mask, (2,), {})


CARDS = 3


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> tuple[torch.Generator, ...]:
    made = tuple(torch.Generator().manual_seed(card) for card in range(CARDS))
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "default_generators", made)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    return made


def test_the_generators_of_the_cpu_and_the_current_device(cards: tuple[torch.Generator, ...]) -> None:
    everything = (torch.default_generator, *cards)
    own = [generator.get_state() for generator in everything]

    def draws(*_: Any) -> list[Tensor]:
        return [torch.rand(4, generator=cards[2]), torch.rand(4)]

    first, second = (draw(CellContext(CallState(seed=7), 2), "dropout", draws, torch.zeros(1)) for _ in range(2))
    other = draw(CellContext(CallState(seed=7), 3), "dropout", draws, torch.zeros(1))
    for one, again, apart in zip(first, second, other, strict=True):
        assert torch.equal(one, again)
        assert not torch.equal(one, apart)
    for before, generator in zip(own, everything, strict=True):
        assert torch.equal(before, generator.get_state())
    assert generators() == [torch.default_generator, cards[2]]


def test_a_card_that_nobody_uses_is_left_alone(
    cards: tuple[torch.Generator, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert generators() == [torch.default_generator]
