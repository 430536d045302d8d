"""Generating text on paper: caches have the bytes of transformers', stages and times follow what is read."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from autosplit import InputError, Plan, plan
from autosplit.planning.generate import caches_of
from autosplit.report.sections import render

SIZES: dict[str, Any] = {"vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SMALL = SIZES | {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
GROUPED = SMALL | {"num_key_value_heads": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": GROUPED,
    "mistral": GROUPED | {"sliding_window": 16},
    "gemma2": GROUPED | {"head_dim": 16, "sliding_window": 16},
    "qwen3": GROUPED | {"head_dim": 16},
    "gpt2": SIZES | {"n_embd": 32, "n_layer": 4, "n_head": 4},
    "gpt_neox": SMALL,
    "phi": SMALL,
    "mixtral": GROUPED | {"num_local_experts": 2},
}
LENGTH = 24


def family(name: str, **more: Any) -> nn.Module:
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **(FAMILIES[name] | more))).eval()


@pytest.mark.parametrize("name", FAMILIES)
def test_caches_are_those_of_transformers(name: str) -> None:
    model = family(name)
    ids = torch.zeros(2, LENGTH, dtype=torch.int64)
    with torch.no_grad():
        cache = model(input_ids=ids, use_cache=True).past_key_values
    kept = [layer.keys.numel() + layer.values.numel() for layer in cache.layers]
    window = model.config.sliding_window if hasattr(model.config, "sliding_window") else None
    # A window's cache has no place for the token that is being made.
    planned = [
        2 * each.token_elements * (min(LENGTH, window - 1) if each.window else LENGTH) for each in caches_of(model)
    ]
    assert planned == kept


def planned(model: nn.Module, devices: str = "2xL40S", *, rows: int = 8, new: int = 8, **more: Any) -> Plan:
    ids = torch.zeros(rows, LENGTH, dtype=torch.int64, device="meta")
    return plan(model, devices, sample={"input_ids": ids, "logits_to_keep": 1}, generate=new, **more)


def test_each_stage_has_the_cache_of_its_layers() -> None:
    found = planned(family("llama", num_hidden_layers=6))
    made = found.generation
    assert made is not None
    assert sum(made.cache_bytes) == 8 * (LENGTH + 8) * 6 * 2 * 2 * 8 * 4
    for stage, size in zip(found.stages, made.cache_bytes, strict=True):
        assert size > 0
        assert stage.memory.buffer_bytes == pytest.approx(size, abs=1024)
        assert stage.memory.optimizer_bytes == stage.memory.gradient_bytes == 0
        assert stage.backward_s == 0
    assert made.groups == len(found.microbatch_rows) == 2
    assert "Generating 8 tokens behind prompts of 24" in render(found)
    assert Plan.model_validate_json(found.to_json()) == found


def wide(layers: int = 4) -> nn.Module:
    config = AutoConfig.for_model("llama", **(GROUPED | {"hidden_size": 2048, "intermediate_size": 8192}))
    config.num_hidden_layers = layers
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config).to(torch.bfloat16).eval()


def test_a_token_takes_the_bytes_that_are_read() -> None:
    model = wide()
    found = planned(model, "1xL40S", rows=1)
    weights = sum(p.numel() for p in model.model.layers.parameters()) * 2
    bandwidth = 864e9
    assert found.generation is not None
    launches_s = 4.5e-6 * 60 * 4
    assert weights / bandwidth < found.generation.decode_s < weights / bandwidth / 0.7 + launches_s
    longer = planned(model, "1xL40S", rows=1, new=2 * 10**6).generation
    assert longer is not None
    more = longer.cache_bytes[0] / 2 / bandwidth  # a token reads half of the new ones' on average
    assert more < longer.decode_s - found.generation.decode_s < more / 0.7


def test_the_largest_batch_and_context_just_fit() -> None:
    model = wide()
    limits = {"memory_limit": "4GiB", "reserve": None}
    made = planned(model, "1xL40S", new=1000, **limits).generation
    assert made is not None
    assert made.largest_batch is not None
    assert made.largest_prompt is not None
    assert planned(model, "1xL40S", rows=made.largest_batch, new=1000, **limits).verdict == "fits"
    assert planned(model, "1xL40S", rows=made.largest_batch * 21 // 20, new=1000, **limits).verdict != "fits"
    assert made.largest_prompt > LENGTH


def test_a_quantised_base_leaves_more_room() -> None:
    model = wide()
    whole, packed = (planned(model, "1xL40S", base=base).generation for base in (None, "nf4"))
    assert whole is not None
    assert packed is not None
    assert (packed.largest_batch or 0) > (whole.largest_batch or 0)


@pytest.mark.parametrize(
    ("choices", "words"),
    [
        ({"generate": 0}, "give the number of new tokens"),
        ({"mesh": "dp=2"}, "plans one pipeline of forwards"),
        ({"schedule": "1f1b"}, "plans one pipeline of forwards"),
    ],
)
def test_what_is_not_planned_is_refused(choices: dict[str, Any], words: str) -> None:
    ids = torch.zeros(8, LENGTH, dtype=torch.int64)
    with pytest.raises(InputError, match=words):
        plan(family("llama"), "2xL40S", sample={"input_ids": ids}, **({"generate": 8} | choices))


def test_a_model_without_a_config_is_refused() -> None:
    with pytest.raises(InputError, match="no config of a decoder"):
        plan(nn.Embedding(8, 8), "1xL40S", sample=torch.zeros(2, 4, dtype=torch.int64), generate=4)
