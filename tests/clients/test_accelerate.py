"""accelerate around a pipe: prepare, backward, accumulate, clipping, autocast, unwrapping, checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import nn
from torch.utils.data import DataLoader

from tests.clients.models import STEPS, assert_close, llama, rows, split


@pytest.fixture(autouse=True)
def _fresh_state() -> Any:
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def losses(model: nn.Module, *, steps: int = STEPS, accelerator: Accelerator | None = None) -> list[float]:
    """Train as accelerate's examples do."""
    torch.manual_seed(0)
    accelerator = accelerator or Accelerator(cpu=True, gradient_accumulation_steps=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(rows(steps * 4), batch_size=4))
    found = []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        found.append(loss.item())
    return found


def test_the_losses_are_those_of_the_plain_model() -> None:
    pipe = split(llama())
    assert_close(losses(pipe), losses(llama()))
    assert len(pipe.plan.stages) == 2


@pytest.mark.slow
def test_mixed_precision_and_unwrapping() -> None:
    pipe, model = split(llama()), llama()
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    found = losses(pipe, steps=4, accelerator=accelerator)
    torch.testing.assert_close(
        torch.tensor(found), torch.tensor(losses(model, steps=4, accelerator=accelerator)), rtol=0, atol=2e-2
    )
    assert "_original_forward" not in vars(pipe.unsplit())
    [batch] = DataLoader(rows(4), batch_size=4)
    assert accelerator.unwrap_model(pipe, keep_fp32_wrapper=False) is pipe
    plain = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    plain.load_state_dict(pipe.state_dict())
    torch.testing.assert_close(pipe(**batch).loss, plain(**batch).loss, rtol=0, atol=1e-6)


@pytest.mark.slow
def test_states_are_saved_and_loaded(tmp_path: Path) -> None:
    pipe = split(llama())
    accelerator = Accelerator(cpu=True)
    losses(pipe, steps=2, accelerator=accelerator)
    accelerator.save_state(str(tmp_path))
    before = {name: value.clone() for name, value in pipe.state_dict().items()}
    losses(pipe, steps=2, accelerator=accelerator)
    accelerator._models, accelerator._optimizers = accelerator._models[:1], accelerator._optimizers[:1]
    accelerator.load_state(str(tmp_path))
    for name, value in pipe.state_dict().items():
        assert torch.equal(value, before[name]), name
