"""Scripts as users write them, at module level and in the cells of a notebook: one recording per kind of call."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch

MODEL = """
import torch
from torch import nn
from autosplit import autosplit

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.step, self.loss = nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.epoch, self.i = 0, 0

    def forward(self, x):
        out = self.norm(x)
        return x + self.loss(torch.tanh(self.step(out)))

    def training_step(self, batch):
        x, y = batch
        out = self(x)
        loss = (out - y).square().mean()
        self.i += 1
        norm = float(loss.detach())
        model = epoch = step = i = norm
        return loss

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(Block(), Block())
        self.out = nn.Linear(8, 4)
        self.epoch = self.step = self.i = 0

    def forward(self, x):
        return self.out(self.model(x))
"""
PIPE = """
torch.manual_seed(0)
model = Net()
pipe = autosplit(model, devices=["cpu"] * 2, chunks=2)
optimizer = torch.optim.SGD(model.parameters(), 1e-2)
criterion = nn.MSELoss()
x = torch.randn(8, 8)
y = torch.randn(8, 4)
step = 0
"""
CALLS = """
for epoch in range(2):
    for i in range(STEPS // 2):
        x = torch.randn(8, 8)
        out = pipe(x)
        loss = criterion(out, y)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        loss = loss.item()
"""
STEPS = """
for epoch in range(2):
    for i in range(STEPS // 2):
        x = torch.randn(8, 8)
        loss = pipe.train_step(x, target=y, loss_fn=LOSS)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        out = loss = loss.item()
"""


def run(space: dict[str, Any], *cells: str, loss: str = "criterion") -> Any:
    """Run cells in one namespace, as IPython does; return the pipe."""
    for number, cell in enumerate(cells):
        exec(compile(cell.replace("LOSS", loss), f"<cell {number}>", "exec"), space)
    return space["pipe"]


def space_of(steps: int = 40) -> dict[str, Any]:
    return {"__name__": "a_script", "STEPS": steps}


SCRIPTS = {
    "call": (CALLS, "criterion"),
    "train_step": (STEPS, "criterion"),
    "a new criterion per step": (STEPS, "nn.MSELoss()"),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_whose_globals_have_the_names_of_attributes(name: str) -> None:
    cell, loss = SCRIPTS[name]
    pipe = run(space_of(), MODEL + PIPE + cell, loss=loss)
    assert len(pipe.recordings) == 1, "\n".join(map(str, pipe.recordings))


@pytest.mark.parametrize("cell", [CALLS, STEPS], ids=["call", "train_step"])
def test_cells_that_are_run_again(cell: str) -> None:
    """The class is defined anew, and the pipe made anew; each pipe records once, and the loop cell goes on with it."""
    space = space_of(20)
    first = run(space, MODEL, PIPE, cell, cell)
    second = run(space, MODEL, PIPE, cell, cell)
    assert first is not second
    for pipe in (first, second):
        assert len(pipe.recordings) == 1, "\n".join(map(str, pipe.recordings))


def test_a_class_that_is_defined_anew_beside_a_pipe_of_the_old_one() -> None:
    space = space_of(6)
    pipe = run(space, MODEL, PIPE, CALLS)
    run(space, MODEL, CALLS)
    assert len(pipe.recordings) == 1, "\n".join(map(str, pipe.recordings))


def test_a_module_that_is_imported_and_used_by_a_script() -> None:
    module: Any = types.ModuleType("a_module_of_models")
    exec(compile(MODEL, "<module>", "exec"), vars(module))
    space = {**space_of(6), "torch": torch, "nn": torch.nn, "autosplit": module.autosplit, "Net": module.Net}
    assert len(run(space, PIPE, CALLS, STEPS).recordings) == 1
