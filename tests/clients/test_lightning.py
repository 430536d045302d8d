"""Lightning: a module that holds a pipe, and a pipe of a module."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from autosplit import autosplit
from tests.clients.models import assert_close, llama, rows, split
from tests.state.test_untouched_attributes import runs_of


class Language(L.LightningModule):
    """A module as one writes it for Lightning."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.losses: list[float] = []

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        return self.model(input_ids=input_ids, labels=labels).loss

    def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
        loss = self(**batch)
        self.log("train_loss", loss)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: dict[str, torch.Tensor], index: int) -> None:
        self.log("loss", self(**batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def fit(module: L.LightningModule, folder: Path, *, steps: int = 4) -> L.Trainer:
    torch.manual_seed(0)
    trainer = L.Trainer(
        accelerator="cpu",
        max_steps=steps,
        default_root_dir=str(folder),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=True,
        gradient_clip_val=0.5,
    )
    trainer.fit(module, DataLoader(rows(steps * 4), batch_size=4), DataLoader(rows(4, seed=2), batch_size=4))
    return trainer


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[float], float]:
    module = Language(llama())
    trainer = fit(module, tmp_path_factory.mktemp("plain"))
    return module.losses, float(trainer.callback_metrics["loss"])


def test_a_module_that_holds_a_pipe(plain: tuple[list[float], float], tmp_path: Path) -> None:
    module = Language(split(llama()))
    trainer = fit(module, tmp_path)
    assert_close(module.losses, plain[0])
    assert float(trainer.callback_metrics["loss"]) == pytest.approx(plain[1], abs=1e-6)
    assert len(module.model.plan.stages) == 2


@pytest.mark.slow
def test_a_pipe_of_a_module(plain: tuple[list[float], float], tmp_path: Path) -> None:
    pipe = autosplit(Language(llama()), devices=2, chunks=2)
    trainer = fit(pipe, tmp_path)
    assert_close(pipe.losses, plain[0])
    assert float(trainer.callback_metrics["loss"]) == pytest.approx(plain[1], abs=1e-6)
    assert len(pipe.plan.stages) == 2
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    again = autosplit(Language(llama()), devices=2, chunks=2)
    state = torch.load(tmp_path / "last.ckpt", weights_only=False)["state_dict"]
    again.load_state_dict(state)
    assert all(torch.equal(value, state[name]) for name, value in pipe.state_dict().items())


@pytest.mark.campaign
def test_a_pipe_of_a_module_is_recorded_once_for_each_mode(tmp_path: Path) -> None:
    counts = []
    for steps in (1, 5):
        pipe = autosplit(Language(llama()), devices=2, chunks=2)
        counts.append(
            runs_of(
                Language.forward.__code__, lambda pipe=pipe, steps=steps: fit(pipe, tmp_path / str(steps), steps=steps)
            )
        )
    assert counts[0] == counts[1] > 0
