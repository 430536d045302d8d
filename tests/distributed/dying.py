"""Trainings of a small model through the pipe, with checkpoints, whose ranks die: what the tests of kills start."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from autosplit import autosplit
from autosplit.distributed import checkpoint
from tests.distributed.launching import started
from tests.distributed.models import WIDTH, WORDS, few_targets, next_token, tokens
from tests.distributed.moments import Moment, Watch

STEPS, EVERY = 12, 2
"""Steps of a training, and after how many of them it saves."""


class Layer(nn.Module):
    """A linear layer with dropout: a stage that has one has a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, value: Tensor) -> Tensor:
        return torch.tanh(F.dropout(self.linear(value), 0.2, self.training))


class Tied(nn.Module):
    """Embedding and head are one weight; dropout between them. It takes little time to record."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(WIDTH, WORDS)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        value = self.tokens(tokens)
        for layer in self.layers:
            value = layer(value)
        return self.head(value)


class Training:
    """A training of which everything that changes is in its checkpoints."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.step = folder, 0
        self.pipe = autosplit(Tied(), devices="torchrun", chunks=4, sample=tokens(8).args)
        self.optimizer = torch.optim.AdamW(self.pipe.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=STEPS)
        torch.manual_seed(1)
        if checkpoint.latest(folder) is not None:
            others = checkpoint.restore(folder, self.pipe, self.optimizer)
            self.step = others["step"]
            self.scheduler.load_state_dict(others["scheduler"])
            torch.set_rng_state(others["random"])
        with open(folder / f"starts{dist.get_rank()}", "a") as file:
            file.write(f"{self.step}\n")

    def advance(self) -> None:
        """Take a step, and write its loss down."""
        batch = tokens(8 - self.step % 2)
        self.optimizer.zero_grad()
        loss = self.pipe.train_step(*batch.args, target=few_targets(batch, self.step % 3), loss_fn=next_token)
        self.pipe.clip_grad_norm_(1.0)
        self.optimizer.step()
        self.scheduler.step()
        self.step += 1
        with open(self.folder / f"losses{dist.get_rank()}", "a") as file:
            file.write(f"{self.step} {loss.item().hex()}\n")

    def save(self, save: Callable[..., object] = checkpoint.save, *, wait: bool = True) -> None:
        others = {"step": self.step, "scheduler": self.scheduler.state_dict(), "random": torch.get_rng_state()}
        save(self.folder, self.step, self.pipe, self.optimizer, others=others, wait=wait)


def losses(folder: Path, rank: int = 0) -> list[tuple[int, str]]:
    """Return the steps that a rank has finished, in that order, with their losses."""
    lines = [line.split() for line in (folder / f"losses{rank}").read_text().splitlines()]
    return [(int(step), loss) for step, loss in lines]


def starts(folder: Path, rank: int = 0) -> list[int]:
    """Return from where a rank has begun, by attempt."""
    path = folder / f"starts{rank}"
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def train(folder: Path, steps: int = STEPS, ready: int = 0, tired_s: float = 0.0) -> None:
    """Train to the end, from the last checkpoint; after ``ready`` steps somebody may kill a rank.

    At the first attempt every step takes ``tired_s`` longer.
    """
    training = Training(folder)
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
        tired_s = 0.0
    while training.step < steps:
        if training.step == ready:
            started()
        training.advance()
        time.sleep(tired_s)
        if training.step % EVERY == 0:
            training.save()


def save_and_die(folder: Path, moment: Moment, wait: bool) -> None:
    """Save after every step; one rank does not survive the third save."""
    training, watch = Training(folder), Watch()
    started()
    while training.step < 3:
        training.advance()
        if training.step == 3 and dist.get_rank() == moment.rank:
            watch.arm(moment)
        training.save(watch.save, wait=wait)


def outputs(folder: Path, steps: int) -> dict[int, Tensor]:
    """Train undisturbed; return what the model gives in eval mode after every step, where the last stage runs."""
    training, found = Training(folder), {}
    while training.step < steps:
        training.advance()
        found[training.step] = training.pipe.eval_step(*tokens(8).args)
    return found
