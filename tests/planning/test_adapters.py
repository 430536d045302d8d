"""LoRA and quantised bases on paper: what is trained, counted and computed, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from autosplit import InputError, Plan, plan
from autosplit.adapters import Lora
from autosplit.report.sections import render
from tests.clients.models import llama

ROWS, WIDTH = 32, 64


def stack(layers: int = 4) -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)])


def planned(model: nn.Module, **choices: Any) -> Plan:
    sample = choices.pop("sample", torch.empty(ROWS, WIDTH, device="meta"))
    return plan(model, "1xL4-24GB", 1, sample=sample, recompute="never", **choices)


def test_frozen_layers_have_neither_gradients_nor_their_work() -> None:
    found = planned(stack(), lora="r=4")  # for three layers: the last one is the head
    [stage] = found.stages
    adapters = 3 * 2 * 4 * WIDTH
    assert (found.parameters, stage.trained) == (4 * WIDTH**2 + adapters, adapters)
    assert stage.memory.gradient_bytes <= 4 * adapters
    assert stage.memory.optimizer_bytes == 8 * adapters
    base, thin = 2 * ROWS * WIDTH**2, 2 * ROWS * WIDTH * 4
    forward, backward = 4 * base + 6 * thin, 3 * base + 12 * thin - thin  # the sample wants no gradient
    assert found.model_flops == forward + backward
    assert "trained 1.54 k of 17.9 k parameters" in render(found)
    assert "LoRA r=4,targets=all-linear" in render(found)


@pytest.mark.parametrize(("base", "bits"), [("nf4", 4 + 8 / 64 + 32 / 64 / 256), ("int8", 8 + 32 / 1024)])
def test_a_quantised_base_has_the_bytes_of_bitsandbytes(base: str, bits: float) -> None:
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(3)])
    sample = torch.empty(8, 1024, device="meta")
    found = planned(model, sample=sample, lora="r=1", base=base, precision="bf16")
    memory = found.stages[0].memory
    tables = 2 * 4 * (16 + 256 + 1) * (base == "nf4")
    held = memory.parameter_bytes + memory.buffer_bytes
    assert held == 2 * 1024**2 * bits / 8 + tables + 2 * 1024**2 + 2 * 2 * 1024 * 4
    assert found.parameters == 3 * 1024**2 + 2 * 2 * 1024
    assert found.base == base
    # One weight at a time is whole, in bf16, and codes of 4 bits have their maxima in fp32 beside it for a while.
    assert 2 * 1024**2 <= memory.transient_bytes < 2 * 2 * 1024**2
    assert found.stages[0].forward_s > planned(model, sample=sample, lora="r=1", precision="bf16").stages[0].forward_s


def test_adapters_have_pefts_numbers() -> None:
    names = ["q_proj", "down_proj"]
    own = planned(llama(), sample=batch(), lora="r=2,targets=q_proj+down_proj")
    peft = get_peft_model(llama(), LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=names))
    theirs = planned(peft, sample=batch())
    for field in ("parameters", "trained", "memory", "forward_s", "backward_s"):
        assert getattr(own.stages[0], field) == getattr(theirs.stages[0], field)


def test_matrices_that_no_linear_layer_has_are_told() -> None:
    class Stacked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.experts = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.zeros(2, WIDTH, WIDTH))

        def forward(self, value: torch.Tensor) -> torch.Tensor:
            return self.first(value) @ self.experts[0]

    model = nn.Sequential(Stacked(), nn.Linear(WIDTH, WIDTH))
    with pytest.warns(UserWarning, match=r"1 parameters of no linear layer \(first: 0.experts\) get no adapter"):
        planned(model, lora="r=4")


def batch() -> dict[str, torch.Tensor]:
    ids = torch.zeros(8, 8, dtype=torch.int64)
    return {"input_ids": ids, "labels": ids}


def test_the_model_stays_as_it_is_and_a_plan_is_costed_anew() -> None:
    model = stack()
    found = planned(model, lora="r=4", base="int8")
    assert all(type(layer) is nn.Linear and layer.weight.requires_grad for layer in model)
    again = planned(model, lora="r=4", base="int8", plan=found)
    assert (again.step_s, again.lora) == (found.step_s, found.lora)
    assert Plan.model_validate_json(found.to_json()) == found


def test_masters_are_those_of_adapters_alone() -> None:
    narrow, masters = (planned(stack(), lora="r=4", precision=name) for name in ("bf16", "bf16_fp32_master"))
    assert narrow.stages[0].memory == masters.stages[0].memory


@pytest.mark.parametrize(
    "text", ["r=16,targets=all-linear", "r=8,targets=q_proj+v_proj,alpha=32,dropout=0.05,dtype=bf16"]
)
def test_the_text_form_comes_back(text: str) -> None:
    assert str(Lora.parse(text)) == text


@pytest.mark.parametrize(
    ("choices", "words"),
    [
        ({"lora": "16"}, r"lora='16' cannot be read; write r=16,targets=q_proj\+v_proj"),
        ({"lora": "r=0"}, "r is at least 1"),
        ({"lora": "r=4,targets=q_proj"}, "no linear layer is called 'q_proj'; there are 0, 1, 2, 3"),
        ({"lora": 4}, "lora=4 is no text"),
        ({"lora": "r=4", "base": "nf5"}, "base='nf5' is not available .did you mean 'nf4'?"),
        ({"base": "nf4"}, "freezes the model, so nothing trains; give lora= too"),
        ({"lora": "r=4", "precision": "fp8"}, "a frozen base has none of"),
    ],
)
def test_what_cannot_be_read_is_said(choices: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        planned(stack(), **choices)


def test_an_optimizer_on_the_host_takes_its_states_and_time_for_them() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(2048, 2048, bias=False) for _ in range(4)])
    sample = torch.empty(64, 2048, device="meta")
    asked = {"sample": sample, "precision": "bf16_fp32_master"}
    here, hosted = (planned(model, **asked, optimizer=name) for name in ("adamw", "cpu_adamw"))
    count = 4 * 2048**2
    [before, after] = (found.stages[0].memory for found in (here, hosted))
    assert (before.optimizer_bytes, after.optimizer_bytes) == (12 * count, 0)
    assert before.peak_bytes - after.peak_bytes >= 12 * count
    pcie = 4 * count / 32e9  # gradients down, weights up
    assert hosted.step_s - here.step_s == pytest.approx(pcie + 1e-10 * count, rel=0.3)
    assert "the hosts hold 192 MiB of fp32 weights and Adam's state" in " ".join(hosted.notes)
