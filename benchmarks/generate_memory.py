"""The caches of a generation: bytes that are planned, and what transformers' own generate() ends with.

    python -m benchmarks.generate_memory [--json FILE] [--rows 3] [--prompt 24] [--new 16]

Tiny models of 30 families. Planned is from a model on meta; held are the tensors of the cache. Asked: within 2%.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from autosplit import Sample
from autosplit.planning.generate import Prompts, caches_of
from autosplit.trace.inputs.objects import leaves_of
from benchmarks import pairs

ASKED = 0.02
SIZES: dict[str, Any] = {"vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SMALL = SIZES | {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
GROUPED = SMALL | {"num_key_value_heads": 2}
OLD = SIZES | {"n_embd": 32, "n_layer": 4, "n_head": 4}
LATENT = SMALL | {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
LATENT |= {"n_routed_experts": 4, "moe_intermediate_size": 16, "num_experts_per_tok": 2, "topk_group": 1}
STATES = SIZES | {"hidden_size": 32, "num_hidden_layers": 4, "state_size": 4}
ENCODER = {"encoder_layers": 2, "encoder_ffn_dim": 64, "encoder_attention_heads": 4}
DECODER = {"decoder_layers": 2, "decoder_ffn_dim": 64, "decoder_attention_heads": 4}
MAMBA_LAYERS = {"mamba_d_state": 4, "mamba_dt_rank": 4, "attn_layer_period": 2, "attn_layer_offset": 1}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": GROUPED,
    "qwen2": GROUPED,
    "qwen3": GROUPED | {"head_dim": 16},
    "mistral": GROUPED | {"sliding_window": 16},
    "gemma": GROUPED | {"head_dim": 16},
    "gemma2": GROUPED | {"head_dim": 16, "sliding_window": 16},
    "gemma3_text": GROUPED | {"head_dim": 16, "sliding_window": 16, "num_hidden_layers": 6},
    "gpt2": OLD,
    "gpt_neox": SMALL,
    "gpt_bigcode": OLD,
    "gptj": OLD | {"rotary_dim": 4},
    "phi": SMALL,
    "phi3": GROUPED,
    "falcon": SMALL | {"multi_query": True, "new_decoder_architecture": False},
    "bloom": SIZES | {"hidden_size": 32, "n_layer": 2, "n_head": 4},
    "mpt": SIZES | {"d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 64},
    "opt": SMALL | {"ffn_dim": 64, "word_embed_proj_dim": 32},
    "stablelm": GROUPED,
    "starcoder2": GROUPED | {"sliding_window": 16},
    "cohere": GROUPED,
    "olmo2": GROUPED,
    "mixtral": GROUPED | {"num_local_experts": 2},
    "gpt_oss": GROUPED | {"head_dim": 8, "num_local_experts": 4, "sliding_window": 16},
    "deepseek_v2": LATENT | {"n_group": 1},
    "deepseek_v3": LATENT | {"n_group": 2},
    "mamba": STATES,
    "mamba2": STATES | {"num_heads": 4, "head_dim": 16, "n_groups": 2, "chunk_size": 8},
    "jamba": GROUPED | MAMBA_LAYERS | {"num_experts": 2},
    "t5": SIZES | {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0},
    "bart": SIZES | {"d_model": 32} | ENCODER | DECODER,
}


def family(name: str, **more: Any) -> nn.Module:
    config = AutoConfig.for_model(name, **(FAMILIES[name] | more))
    kind = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    return kind.from_config(config).eval()


def kept(model: Any, rows: int, length: int, new: int) -> int:
    """Return the bytes of the cache that transformers' own generate() ends with."""
    ids = torch.full((rows, length), 3)
    made = model.generate(ids, max_new_tokens=new, min_new_tokens=new, use_cache=True, return_dict_in_generate=True)
    cache = next(made[name] for name in ("past_key_values", "cache_params") if made.get(name) is not None)
    tensors = {id(leaf): leaf for leaf in leaves_of(cache) if isinstance(leaf, torch.Tensor) and leaf.dim()}
    return sum(tensor.nbytes for tensor in tensors.values())


def planned(model: nn.Module, rows: int, length: int, new: int) -> int:
    """Return the bytes that are planned for the cache of a model on meta."""
    prompts = Prompts(model, Sample(torch.zeros(rows, length, dtype=torch.int64)))
    return rows * sum(cache.bytes(prompts.length(length, new)) for cache in caches_of(model, prompts, new))


def main(argv: Sequence[str] | None = None) -> int:
    """Compare what the command line asks for."""
    parser = pairs.parser(__doc__)
    for name, default in (("rows", 3), ("prompt", 24), ("new", 16)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args(argv)
    sizes = options.rows, options.prompt, options.new
    figures: list[dict[str, Any]] = []
    for name in FAMILIES:
        on_paper, held = planned(family(name).to("meta"), *sizes), kept(family(name), *sizes)
        figures.append({"family": name, "planned": on_paper, "held": held, "off": abs(on_paper - held) / held})
    worst = max(each["off"] for each in figures)
    checks = [pairs.at_most("planned against held, the worst of all families", ASKED, worst)]
    print(pairs.facts_text(machine := pairs.facts()))
    print(pairs.table([each | {"off": f"{each['off']:.2%}"} for each in figures]))
    settings = {"rows": options.rows, "prompt": options.prompt, "new": options.new}
    pairs.conclude(
        options.json, benchmark="generate-memory", settings=settings, machine=machine, figures=figures, checks=checks
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
