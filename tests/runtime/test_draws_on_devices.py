"""A random operation draws by its own seed from every generator that it may draw from, and leaves all as they were."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from autosplit.runtime.lanes.lanes import generators
from autosplit.runtime.ops import CallState, CellContext, draw

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
