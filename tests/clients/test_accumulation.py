"""Accumulation as microbatches of one schedule: by Trainer, with losses over all tokens of it, of unlike lengths."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import Trainer, TrainingArguments

from autosplit import InputError
from autosplit.trainers import MicrobatchesFromAccumulation
from tests.clients.models import assert_close, gpt2, llama, rows, split
from tests.clients.test_peft import adapted
from tests.pairwise import mostly_slow

Rows = list[dict[str, torch.Tensor]]


class PipelineTrainer(MicrobatchesFromAccumulation, Trainer):
    pass


class Averaging(Trainer):
    """A loss of its own, which Trainer divides by the number of batches."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **count: Any) -> Any:
        labels = inputs.pop("labels")
        output = model(**inputs)
        loss = F.cross_entropy(output.logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())
        return (loss, output) if return_outputs else loss


class AveragingPipeline(MicrobatchesFromAccumulation, Averaging):
    pass


class Twice(MicrobatchesFromAccumulation, Trainer):
    """Two calls of the model for one batch, as DPO's."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **count: Any) -> Any:
        return model(**inputs).loss - model(**inputs).loss.detach()


def total(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
    logits, labels = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return F.cross_entropy(logits.float(), labels, reduction="sum") / num_items_in_batch


def cut(every: Rows) -> Rows:
    """Return rows of unlike lengths."""
    lengths = torch.randint(4, 9, (len(every),), generator=torch.Generator().manual_seed(2)).tolist()
    return [{name: row[name][:length] for name in row} for row, length in zip(every, lengths, strict=True)]


def padded(batch: Rows) -> dict[str, torch.Tensor]:
    def together(name: str, value: int) -> torch.Tensor:
        return nn.utils.rnn.pad_sequence([row[name] for row in batch], batch_first=True, padding_value=value)

    ids = together("input_ids", 0)
    return {"input_ids": ids, "labels": together("labels", -100), "attention_mask": (ids != 0).long()}


def logged(kind: type[Trainer], model: nn.Module, folder: Path, **options: Any) -> list[float]:
    """Return losses, norms of gradients and losses of evaluations; the last accumulation of an epoch is short."""
    given: dict[str, Any] = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4, "num_train_epochs": 2}
    given |= {"logging_steps": 1, "save_strategy": "no", "report_to": "none", "disable_tqdm": True, "use_cpu": True}
    given |= {"output_dir": str(folder), "dataloader_pin_memory": False, "seed": 3, "eval_strategy": "epoch"}
    others = {name: options.pop(name) for name in ("compute_loss_func", "data_collator") if name in options}
    train = rows(10) if "data_collator" not in others else cut(rows(10))
    arguments = TrainingArguments(**(given | options))
    trainer = kind(model=model, args=arguments, train_dataset=train, eval_dataset=rows(4, seed=2), **others)
    trainer.train()
    entries = [entry for entry in trainer.state.log_history if "loss" in entry or "eval_loss" in entry]
    assert [entry["epoch"] for entry in entries] == [0.4, 0.8, 1.0, 1.0, 1.4, 1.8, 2.0, 2.0]
    return [entry[name] for entry in entries for name in ("loss", "grad_norm", "eval_loss") if name in entry]


CASES: list[Any] = [
    {},
    {"label_smoothing_factor": 0.1},
    {"compute_loss_func": total},
    {"data_collator": padded, "per_device_train_batch_size": 1},
    {"activation_checkpointing": True},
    {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"use_reentrant": True}},
    {"bf16": True},
]


@pytest.mark.parametrize("options", mostly_slow(CASES, {}))
def test_trainer_logs_what_it_logs_with_the_plain_model(options: dict[str, Any], tmp_path: Path) -> None:
    found = logged(PipelineTrainer, split(llama(), chunks=4), tmp_path, **options)
    assert_close(found, logged(Trainer, llama(), tmp_path, **options))


@pytest.mark.parametrize("make", mostly_slow([gpt2, lambda: adapted(llama())], gpt2))
def test_dropout_is_drawn_in_the_order_of_the_batches(make: Callable[[], nn.Module], tmp_path: Path) -> None:
    found = logged(PipelineTrainer, split(make(), chunks=4), tmp_path)
    assert_close(found, logged(Trainer, make(), tmp_path))


def test_a_compute_loss_of_the_callers(tmp_path: Path) -> None:
    found = logged(AveragingPipeline, split(llama(), chunks=4), tmp_path)
    assert_close(found, logged(Averaging, llama(), tmp_path))


def test_a_plain_model_trains_as_ever(tmp_path: Path) -> None:
    assert logged(PipelineTrainer, llama(), tmp_path) == logged(Trainer, llama(), tmp_path)


def test_two_calls_for_one_batch_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="calls the model twice"):
        logged(Twice, split(llama(), chunks=4), tmp_path)


@pytest.mark.parametrize("make", mostly_slow([llama, gpt2], llama))
def test_lengths_may_differ_and_counts_belong_to_no_recording(make: Callable[[], nn.Module]) -> None:
    pipe, plain = split(make(), chunks=4), make()
    made = []
    for step in range(3):
        every = padded(rows(5, seed=step))
        places = zip((0, 2, 3, 4), (2, 3, 4, 5), (8, 6, 7, 6), strict=True)
        batches = [{name: every[name][i:j, :length] for name in ("input_ids", "labels")} for i, j, length in places]
        count = 20 + step
        torch.manual_seed(step)
        losses = [plain(**batch, num_items_in_batch=count).loss for batch in batches]
        sum(losses).backward()
        torch.manual_seed(step)
        loss = pipe.train_step(microbatches=batches, num_items_in_batch=count)
        assert_close([loss.item()], [sum(losses).item()])
        for (name, parameter), other in zip(pipe.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-5, atol=1e-6, msg=name)
        made.append(len(pipe.recordings))
    assert made == made[:1] * 3


def test_a_count_is_a_number_or_a_tensor() -> None:
    pipe, plain = split(llama()), llama()
    batch = padded(rows(4))
    for count in (30, 31, torch.tensor(32), 33.0, 34):
        kept = [plain(**batch, num_items_in_batch=count).loss.item()]
        assert_close([pipe(**batch, num_items_in_batch=count).loss.item()], kept)
        assert_close([pipe.train_step(**batch, num_items_in_batch=count).item()], kept)
    assert len(pipe.recordings) <= 2  # of int64 and of float64
