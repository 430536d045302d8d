"""transformers' models with their default use_cache=True: the cache comes back as the plain model's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autosplit import autosplit
from tests.clients.models import gpt2, llama


def ids(rows: int, length: int = 7) -> torch.Tensor:
    return torch.randint(3, 64, (rows, length))


@pytest.mark.parametrize("make", [llama, gpt2])
def test_the_cache_is_the_plain_models(make: Any) -> None:
    silent = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0) if make is gpt2 else {}
    model, batch = make(use_cache=True, **silent).double(), ids(8)
    pipe = autosplit(model, devices=2, chunks=4, sample=batch)
    for given in (batch, ids(6)):
        want, got = model(given), pipe(given)
        assert len(pipe.graph.find_nodes(op="call_module", target="stage0")) == 4
        assert type(got) is type(want)
        assert type(got.past_key_values) is type(want.past_key_values)
        assert got.past_key_values.get_seq_length() == 7
        torch.testing.assert_close(got.logits, want.logits)
        for mine, plain in zip(got.past_key_values.layers, want.past_key_values.layers, strict=True):
            assert vars(mine).keys() == vars(plain).keys()
            torch.testing.assert_close(mine.keys, plain.keys)
            torch.testing.assert_close(mine.values, plain.values)
        following = ids(len(given), 1)
        after = [model(following, past_key_values=out.past_key_values).logits for out in (want, got)]
        torch.testing.assert_close(*after)
