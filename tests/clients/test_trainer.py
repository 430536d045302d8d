"""transformers' Trainer around a pipe: the losses, checkpoints and evaluation of the plain model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM, Trainer, TrainingArguments

from tests.clients.models import STEPS, assert_close, gpt2, llama, rows, split
from tests.pairwise import mostly_slow


def trainer(model: nn.Module, folder: Path, **options: Any) -> Trainer:
    given: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": STEPS,
        "per_device_train_batch_size": 4,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "dataloader_pin_memory": False,
        "seed": 3,
    }
    arguments = TrainingArguments(**(given | options))
    return Trainer(model=model, args=arguments, train_dataset=rows(24), eval_dataset=rows(6, seed=2))


def losses(model: nn.Module, folder: Path, **options: Any) -> list[float]:
    each = trainer(model, folder, **options)
    each.train()
    return [entry["loss"] for entry in each.state.log_history if "loss" in entry]


@pytest.mark.parametrize("make", mostly_slow([llama, gpt2], gpt2))
@pytest.mark.quick
def test_the_losses_are_those_of_the_plain_model(make: Callable[[], nn.Module], tmp_path: Path) -> None:
    pipe = split(make())
    found = losses(pipe, tmp_path)
    assert len(found) == STEPS
    assert_close(found, losses(make(), tmp_path))
    assert len(pipe.plan.stages) == 2


def test_accumulated_gradients_count_tokens_of_the_whole_batch(tmp_path: Path) -> None:
    options = {"gradient_accumulation_steps": 2, "max_steps": 6}
    assert_close(losses(split(llama()), tmp_path, **options), losses(llama(), tmp_path, **options))


@pytest.mark.slow
def test_gradient_checkpointing(tmp_path: Path) -> None:
    options = {"activation_checkpointing": True, "max_steps": 4}
    assert_close(losses(split(llama()), tmp_path, **options), losses(llama(), tmp_path, **options))


@pytest.mark.slow
def test_evaluation_and_a_checkpoint_to_go_on_from(tmp_path: Path) -> None:
    options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    model = llama()
    pipe = split(model)
    first = trainer(pipe, tmp_path, **options)
    first.train()
    plain = trainer(copy.deepcopy(model), tmp_path, **options)
    assert first.evaluate()["eval_loss"] == pytest.approx(plain.evaluate()["eval_loss"], abs=1e-6)
    saved = LlamaForCausalLM.from_pretrained(tmp_path / "checkpoint-4")
    for name, value in model.state_dict().items():
        assert torch.equal(saved.state_dict()[name], value), name
    second = trainer(split(llama()), tmp_path, **options)
    second.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    found = [entry["loss"] for entry in second.state.log_history if "loss" in entry]
    assert_close(found, [entry["loss"] for entry in first.state.log_history if "loss" in entry])
