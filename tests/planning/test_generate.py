"""Generating text on paper: caches have the bytes of transformers', stages and times follow what is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from typer.testing import CliRunner

from autosplit import InputError, Plan, Sample, plan
from autosplit.cli import app as cli
from autosplit.planning.generate import Prompts, caches_of
from autosplit.report.sections import render
from benchmarks.generate_memory import FAMILIES, GROUPED, family, kept

LENGTH = 24


@pytest.mark.parametrize("name", FAMILIES)
def test_caches_are_those_of_transformers(name: str) -> None:
    model = family(name)
    prompts = Prompts(model, Sample(torch.zeros(3, LENGTH, dtype=torch.int64)))
    caches = caches_of(model.to("meta"), prompts, 6)
    real = family(name)
    for length in (LENGTH, LENGTH // 2, 2 * LENGTH):  # the first was looked at, the others follow from it
        known_by = prompts.length(length, 6)
        assert 3 * sum(cache.bytes(known_by) for cache in caches) == kept(real, 3, length, 6)


def test_a_loop_over_tokens_is_not_waited_for() -> None:
    model = family("mamba").to("meta")
    prompts = Prompts(model, Sample(torch.zeros(2, 2**16, dtype=torch.int64, device="meta")))
    caches = caches_of(model, prompts, 512)
    assert sum(cache.bytes(2**16) for cache in caches) == kept(family("mamba"), 1, 4, 1)


class Remembers(nn.Module):
    """An own decoder that keeps the tokens' values in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.value, self.head = nn.Embedding(8, 4), nn.Linear(4, 6), nn.Linear(6, 8)
        self.values = torch.zeros(0)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        self.values = self.value(self.embed(ids)).cumsum(1)
        return self.head(self.values)


def test_what_stays_in_attributes_is_a_cache() -> None:
    with torch.device("meta"):
        model = Remembers()
    ids = torch.zeros(2, LENGTH, dtype=torch.int64)
    (cache,) = caches_of(model, Prompts(model, Sample(ids)), 9)
    assert cache.bytes(LENGTH + 8) == (LENGTH + 8) * 6 * 4


def planned(model: nn.Module, devices: str = "2xL40S", *, rows: int = 8, new: int = 8, **more: Any) -> Plan:
    ids = torch.zeros(rows, LENGTH, dtype=torch.int64, device="meta")
    return plan(model, devices, sample={"input_ids": ids, "logits_to_keep": 1}, generate=new, **more)


def test_each_stage_has_the_cache_of_its_layers() -> None:
    found = planned(family("llama", num_hidden_layers=6))
    made = found.generation
    assert made is not None
    assert sum(made.cache_bytes) == 8 * (LENGTH + 8 - 1) * 6 * 2 * 2 * 8 * 4
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
    more = 3 * longer.cache_bytes[0] / 2 / bandwidth  # half of the new ones' on average: read, copied to be longer
    assert more < longer.decode_s - found.generation.decode_s < more / 0.7


def test_the_largest_batch_and_context_just_fit() -> None:
    model = wide()
    limits = {"memory_limit": "4GiB", "reserve": None}
    made = planned(model, "1xL40S", new=100, **limits).generation
    assert made is not None
    assert made.largest_batch is not None
    assert made.largest_prompt is not None
    assert planned(model, "1xL40S", rows=made.largest_batch, new=100, **limits).verdict == "fits"
    assert planned(model, "1xL40S", rows=made.largest_batch * 21 // 20, new=100, **limits).verdict != "fits"
    assert made.largest_prompt > LENGTH


def test_both_schedules_are_planned() -> None:
    model = wide()
    many, one = planned(model), planned(model, chunks=1)
    made, alone = many.generation, one.generation
    assert made is not None
    assert alone is not None
    assert made.decode_s == made.throughput_s
    assert alone.decode_s == alone.latency_s == pytest.approx(made.latency_s)
    assert alone.throughput_s == pytest.approx(made.throughput_s)
    assert made.throughput_s < made.latency_s
    assert "(planned)" in render(many).split("throughput")[1].split("latency")[0]
    assert "(planned)" in render(one).split("latency ")[1]
    assert "a batch of one row keeps one of the devices at work" in render(planned(model, rows=1))


def test_an_encoder_takes_no_time_of_a_token() -> None:
    layers = {"d_model": 512, "d_ff": 2048, "num_heads": 8, "d_kv": 64, "num_decoder_layers": 2}
    models = [family("t5", num_layers=count, **layers) for count in (2, 12)]
    short, deep = (
        plan(model, "1xL40S", sample=torch.zeros(4, LENGTH, dtype=torch.int64), generate=8).generation
        for model in models
    )
    assert short is not None
    assert deep is not None
    assert deep.decode_s == pytest.approx(short.decode_s)
    assert deep.cache_bytes == short.cache_bytes
    assert sum(deep.cache_bytes) == 4 * 2 * 2 * 512 * 4 * (LENGTH + 8)  # of the prompt and of what is made


def test_a_quantised_base_leaves_more_room() -> None:
    model = wide()
    whole, packed = (planned(model, "1xL40S", base=base).generation for base in (None, "nf4"))
    assert whole is not None
    assert packed is not None
    assert (packed.largest_batch or 0) > (whole.largest_batch or 0)


@pytest.mark.parametrize(("name", "tokens"), [("llama", LENGTH + 7), ("t5", LENGTH + 8)])
def test_a_config_is_planned_by_the_command_line(name: str, tokens: int, tmp_path: Path) -> None:
    """What a decoder of an encoder makes begins with one token, and it keeps the encoder's."""
    config = AutoConfig.for_model(name, **FAMILIES[name]).to_dict() | {"architectures": [type(family(name)).__name__]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    asked = ["--generate", "8", "--batch", "4", "--sequence", str(LENGTH), "--precision", "fp32", "--json"]
    result = CliRunner().invoke(cli.app, ["plan", f"hf:{tmp_path}/config.json", "--devices", "2xL40S", *asked])
    assert result.exit_code == 0, result.output
    made = Plan.model_validate_json(result.stdout).generation
    assert made is not None
    each = 4 * 2 * 2 * 8 if name == "llama" else 2 * 2 * 4 * 8  # layers, keys and values, heads, width
    assert sum(made.cache_bytes) == 4 * tokens * each * 4
    missing = CliRunner().invoke(cli.app, ["plan", "hf:config.json", "--generate", "512"])
    assert missing.exit_code == 2
    assert "No such file or directory: 'config.json'" in missing.output


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


def test_a_model_whose_cache_cannot_be_followed_is_named() -> None:
    ids = torch.zeros(2, LENGTH, dtype=torch.int64)
    with pytest.raises(InputError, match=r"cache of Embedding cannot be followed.*own generate\(\) runs"):
        plan(nn.Embedding(8, 8), "1xL40S", sample=torch.zeros(2, 4, dtype=torch.int64), generate=4)
    config = AutoConfig.for_model("recurrent_gemma", **GROUPED, attention_window_size=8, lru_width=32)
    with pytest.raises(InputError, match="cache of RecurrentGemmaForCausalLM cannot be followed"):
        plan(AutoModelForCausalLM.from_config(config), "1xL40S", sample=ids, generate=4)
