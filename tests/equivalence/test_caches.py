"""transformers' models with their default use_cache=True: the cache comes back as the plain model's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from autosplit import autosplit

transformers = pytest.importorskip("transformers")
SIZES: dict[str, Any] = {"vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def llama(**more: Any) -> nn.Module:
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        **SIZES,
        **more,
    )
    return transformers.LlamaForCausalLM(config).double()


def gpt2(**more: Any) -> nn.Module:
    config = transformers.GPT2Config(
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=64,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        **SIZES,
        **more,
    )
    return transformers.GPT2LMHeadModel(config).double()


def ids(rows: int, length: int = 7) -> torch.Tensor:
    return torch.randint(3, 64, (rows, length))


@pytest.mark.parametrize("make", [llama, gpt2])
def test_the_cache_is_the_plain_models(make: Any) -> None:
    model, batch = make(), ids(8)
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
