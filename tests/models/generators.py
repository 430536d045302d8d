"""Tiny language models of families of transformers, with random weights, and prompts: what `generate` is tried on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedModel

VOCABULARY, PAD, BOS, EOS = 97, 0, 1, 2
LENGTH = 128
"""Most positions of a model."""

_WORDS: dict[str, Any] = {"vocab_size": VOCABULARY, "pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS}
_SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": LENGTH,
}
_GPT: dict[str, Any] = {"n_positions": LENGTH, "n_embd": 32, "n_layer": 4, "n_head": 4}
_BART: dict[str, Any] = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": LENGTH,
    "decoder_start_token_id": 5,
    "forced_eos_token_id": None,
}
_T5: dict[str, Any] = {
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": PAD,
}


def _without(sizes: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in sizes.items() if name not in names}


_PLAIN = _without(_SIZES, "head_dim")
_MANY = _without(_PLAIN, "num_key_value_heads")

_CONFIGS: dict[str, dict[str, Any]] = {
    "llama": _PLAIN,
    "qwen2": _PLAIN,
    "qwen3": _SIZES,
    "mistral": _SIZES | {"sliding_window": 6},
    "gemma": _SIZES,
    "gemma2": _SIZES | {"sliding_window": 6},
    "gemma3_text": _SIZES | {"sliding_window": 6, "sliding_window_pattern": 2},
    "gpt2": _GPT,
    "gptj": _GPT | {"rotary_dim": 4},
    "gpt_neox": _MANY,
    "gpt_bigcode": _GPT,
    "phi": _MANY,
    "phi3": _PLAIN,
    "falcon": _MANY | {"new_decoder_architecture": False},
    "bloom": {"hidden_size": 32, "n_layer": 4, "n_head": 4},
    "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 4, "expansion_ratio": 2, "max_seq_len": LENGTH},
    "opt": _MANY | {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "stablelm": _PLAIN,
    "starcoder2": _PLAIN,
    "cohere": _PLAIN,
    "olmo2": _PLAIN,
    "granite": _PLAIN,
    "mixtral": _PLAIN | {"num_local_experts": 4},
    "mamba": {"hidden_size": 32, "num_hidden_layers": 4, "state_size": 8, "time_step_rank": 4},
    "bamba": _PLAIN
    | {
        "attn_layer_indices": [1, 3],
        "mamba_n_heads": 8,
        "mamba_d_head": 8,
        "mamba_d_state": 8,
        "mamba_n_groups": 1,
        "mamba_chunk_size": 8,
    },
    "jamba": _PLAIN
    | {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "num_experts": 4,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
    },
    "recurrent_gemma": _PLAIN | {"attention_window_size": 6, "block_types": ["recurrent", "recurrent", "attention"]},
    "t5": _T5,
    "bart": _BART,
    "mbart": _BART,
    "pegasus": _BART | {"pad_token_id": PAD, "eos_token_id": BOS, "decoder_start_token_id": PAD},
}
"""What differs from a family's defaults."""


def _maker(family: str) -> Callable[[], PreTrainedModel]:
    def make() -> PreTrainedModel:
        config = CONFIG_MAPPING[family](**(_WORDS | _CONFIGS[family]))
        auto = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model: PreTrainedModel = auto.from_config(config).eval()
            words = model.get_input_embeddings().weight
            for parameter in model.parameters():
                # Text of small weights repeats one token: larger layers, beside the embeddings, give varied text.
                if parameter.dim() > 1 and parameter is not words:
                    parameter.data.mul_(6.0 if config.is_encoder_decoder else 12.0)
        return model

    return make


FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {family: _maker(family) for family in _CONFIGS}
"""By the name of the family: a function that makes the model, in eval mode, with the same weights each time."""


def prompts(model: PreTrainedModel, rows: int, left_padded: bool = True, *, length: int = 9) -> dict[str, Tensor]:
    """Return ``input_ids`` and ``attention_mask`` [rows, length]; prompts of different lengths are padded.

    A decoder's prompts are padded on the left, those of an encoder on the right. Without ``left_padded`` all have the
    full length.
    """
    generator = torch.Generator().manual_seed(rows)
    ids = torch.randint(3, VOCABULARY, (rows, length), generator=generator)
    mask = torch.ones_like(ids)
    if left_padded:
        for row in range(rows):
            padding = row * 5 % (length - 2)
            span = slice(length - padding, length) if model.config.is_encoder_decoder else slice(padding)
            mask[row, span], ids[row, span] = 0, PAD
    return {"input_ids": ids, "attention_mask": mask}
