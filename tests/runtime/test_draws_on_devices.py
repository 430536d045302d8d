"""A random operation draws by its own seed from every generator that it may draw from, and leaves all as they were."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from autosplit.runtime.lanes.lanes import generators_of
from autosplit.runtime.ops import CallState, CellContext, draw

CARDS = 3


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> tuple[torch.Generator, ...]:
    made = tuple(torch.Generator().manual_seed(card) for card in range(CARDS))
    monkeypatch.setattr(torch.cuda, "default_generators", made)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    return made


def on_card(card: int) -> Tensor:
    with FakeTensorMode():
        return torch.empty(1, device=f"cuda:{card}")


@pytest.mark.parametrize(
    ("args", "kwargs", "drawn"),
    [
        ((lambda: on_card(1),), {}, [1]),
        ((), {"input": lambda: on_card(1)}, [1]),
        ((), {"device": lambda: torch.device("cuda:1")}, [1]),
        ((), {"device": lambda: "cuda:0"}, [0]),
        ((), {"device": lambda: "cuda"}, [2]),
        ((lambda: torch.zeros(1), lambda: (on_card(0), [on_card(1)])), {}, [0, 1]),
        ((lambda: torch.zeros(1),), {"mode": lambda: "cubic"}, []),
    ],
)
def test_every_generator(cards: tuple[torch.Generator, ...], args: Any, kwargs: Any, drawn: list[int]) -> None:
    own = [generator.get_state() for generator in (torch.default_generator, *cards)]

    def draws(*_: Any, **__: Any) -> list[Tensor]:
        return [torch.rand(4, generator=cards[card]) for card in drawn] + [torch.rand(4)]

    given, named = [make() for make in args], {name: make() for name, make in kwargs.items()}
    key = CellContext(CallState(seed=7), 2)
    first, second = (draw(key, "dropout", draws, *given, **named) for _ in range(2))
    other = draw(CellContext(CallState(seed=7), 3), "dropout", draws, *given, **named)
    for one, again, apart in zip(first, second, other, strict=True):
        assert torch.equal(one, again)
        assert not torch.equal(one, apart)
    for before, generator in zip(own, (torch.default_generator, *cards), strict=True):
        assert torch.equal(before, generator.get_state())
    assert len(generators_of((given, named))) == 1 + len(drawn)
