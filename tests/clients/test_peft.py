"""PEFT: adapters that are there before the split, switched and merged after it, or added to what was split."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from torch.nn import functional as F

from tests.clients.models import TOLERANCE, assert_close, batches, llama, split, train


def adapted(model: nn.Module) -> Any:
    """Return the model with adapters whose effect shows."""
    torch.manual_seed(0)
    config = LoraConfig(task_type="CAUSAL_LM", r=2, lora_dropout=0.1, target_modules=["q_proj", "v_proj"])
    model = get_peft_model(model, config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    return model


def assert_same_output(pipe: Any, model: Any) -> None:
    [batch] = batches(1)
    torch.testing.assert_close(pipe(**batch).logits, model(**batch).logits, rtol=0, atol=TOLERANCE)


def test_adapters_train_as_in_the_plain_model() -> None:
    pipe = split(adapted(llama()))
    assert_close(train(pipe), train(adapted(llama())))
    assert len(pipe.plan.stages) == 2
    assert isinstance(pipe, PeftModel)
    assert pipe.get_nb_trainable_parameters() == adapted(llama()).get_nb_trainable_parameters()


def test_below_adapters_of_the_last_layers_stages_run_forwards_only() -> None:
    def make() -> Any:
        config = LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj", "v_proj"], layers_to_transform=[3])
        model = get_peft_model(llama(num_hidden_layers=4), config)
        model.enable_input_require_grads()  # as `prepare_model_for_kbit_training` does: nobody sees these gradients
        return model

    pipe = split(make(), devices=4, schedule="1f1b")
    assert_close(train(pipe, steps=3), train(make(), steps=3))
    kinds = {(bar.stage, bar.kind) for bar in pipe.profile_step(**batches(1)[0]).bars}
    assert kinds == {
        (stage.index, kind) for stage in pipe.plan.stages for kind in "FB"[: 1 + (stage.gradients != "none")]
    }
    assert pipe.plan.stages[0].gradients == "none"


class Codes(nn.Parameter):
    """A frozen weight of integers with the scales of its rows, as bitsandbytes' Int8Params and Params4bit."""

    scales: torch.Tensor


class EightBit(nn.Linear):
    """A linear layer of eight bits that keeps its codes in a state beside the weight, as bitsandbytes' Linear8bitLt."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=False)
        scales = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        self.weight: Any = Codes((linear.weight.detach() / scales).round().to(torch.int8), requires_grad=False)
        self.weight.scales, self.state = scales, SimpleNamespace(codes=self.weight.data)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        result = F.linear(value, self.state.codes.to(value.dtype) * self.weight.scales)
        self.weight.data = self.state.codes
        return result


def quantised() -> Any:
    """Return a model in eight bits with adapters beside its layers."""
    model = llama()
    linear = [(name, module) for name, module in model.named_modules() if name.endswith(("q_proj", "v_proj"))]
    for name, module in linear:
        model.set_submodule(name, EightBit(module))
    return adapted(model)


def test_adapters_of_a_model_in_eight_bits_train_in_microbatches() -> None:
    pipe = split(quantised())
    assert_close(train(pipe), train(quantised()))
    assert len(pipe.plan.stages) == 2
    assert "mix rows" not in pipe.report()


@pytest.mark.slow
def test_adapters_are_switched_and_merged_behind_the_split() -> None:
    pipe, model = split(adapted(llama())).eval(), adapted(llama()).eval()
    assert_same_output(pipe, model)
    with pipe.disable_adapter(), model.disable_adapter():
        assert_same_output(pipe, model)
        assert_same_output(pipe, llama())
    pipe.merge_adapter()
    model.merge_adapter()
    assert_same_output(pipe, model)
    pipe.unmerge_adapter()
    model.unmerge_adapter()
    assert_same_output(pipe, adapted(llama()).eval())
    assert_same_output(split(pipe.merge_and_unload()).eval(), model.merge_and_unload())
