"""The longest rows that fit: found from the lengths around them, and what has no length."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import autosplit
from autosplit import InputError, Sample
from autosplit.planning.paper import with_tokens


class Tokens(nn.Module):
    """An embedding and two layers, with a mask of a word per token."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.first, self.second = nn.Embedding(64, 32), nn.Linear(32, 256), nn.Linear(256, 64)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        hidden = self.second(self.first(self.embed(ids)).relu())
        return (hidden * mask.unsqueeze(-1)).square().mean((1, 2))


def planned(tokens: int, **choices: Any) -> autosplit.Plan:
    sample = {"ids": torch.zeros(4, tokens, dtype=torch.int64), "mask": torch.ones(4, tokens, dtype=torch.bool)}
    asked = {"memory_limit": "16MiB", "schedule": "1f1b", "recompute": "never", **choices}
    return autosplit.plan(Tokens(), "2xL4-24GB", 2, sample=sample, **asked)


def test_the_longest_rows_fit_and_longer_ones_do_not() -> None:
    found = planned(128, find="largest_sequence")
    assert found.sequence is not None
    assert found.verdict == "fits"
    assert found.sequence > 1024
    assert found.reasons[0].startswith(f"the longest rows that surely fit, 4 in a batch, have {found.sequence} tokens;")
    beyond = int(found.reasons[0].split("; of ")[1].split()[0])
    assert beyond <= found.sequence * 1.07 + 64
    assert planned(beyond).verdict != "fits"
    assert planned(found.sequence).stages == found.stages


def test_a_limit_that_holds_no_row_and_what_has_no_length() -> None:
    assert planned(128, find="largest_sequence", memory_limit="256KiB").reasons[0] == (
        "not even rows of 64 tokens surely fit, 4 in a batch"
    )
    with pytest.raises(InputError, match="no input is a table of integers"):
        autosplit.plan(nn.Linear(4, 4), "1xL4-24GB", sample=torch.zeros(8, 4), find="largest_sequence")


def test_masks_and_tables_are_longer_and_what_floats_stays() -> None:
    sample = Sample(
        torch.zeros(2, 16, dtype=torch.int64), mask=torch.ones(2, 1, 16, 16, dtype=torch.bool), x=torch.ones(2, 16)
    )
    longer = with_tokens(sample, 16, 40)
    assert longer.args[0].shape == (2, 40)
    assert longer.kwargs["mask"].shape == (2, 1, 40, 40)
    assert longer.kwargs["x"].shape == (2, 16)
