"""PEFT: adapters that are there before the split, switched and merged after it, or added to what was split."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn

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


@pytest.mark.slow
def test_adapters_for_what_was_split() -> None:
    pipe = split(llama())
    train(pipe, steps=2)
    again = split(adapted(pipe.unsplit()))
    plain = llama()
    train(plain, steps=2)
    plain = adapted(plain)
    assert_close(train(again, steps=4), train(plain, steps=4))


@pytest.mark.slow
def test_adapters_around_a_pipe() -> None:
    pipe, plain = adapted(split(llama())), adapted(llama())
    assert_close(train(pipe, steps=4), train(plain, steps=4))
