"""Other threads draw and compute as ever while a model is recorded."""

from __future__ import annotations

import random
import threading
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from autosplit import autosplit

WIDTH = 4


class Drops(nn.Module):
    """Draws Python's and numpy's numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, value: Tensor) -> Tensor:
        for layer in self.layers:
            if random.random() < 2 and np.random.rand() < 2:
                value = torch.relu(layer(value))
        return value


class Thread(threading.Thread):
    """Draws, and calls a layer, until it is told to end."""

    def __init__(self) -> None:
        super().__init__()
        self.ends = threading.Event()
        self.drawn: list[Any] = []
        self.wrong = 0

    def run(self) -> None:
        layer, value = nn.Linear(WIDTH, WIDTH), torch.ones(2, WIDTH)
        with torch.no_grad():
            wanted = layer(value)
            while not self.ends.wait(0.001):
                self.drawn.append((random.random(), float(np.random.rand())))
                self.wrong += not torch.equal(layer(value), wanted) or torch.compiler.is_exporting()


def test_other_threads_draw_on_while_a_model_is_recorded() -> None:
    random.seed(1)
    np.random.seed(2)
    thread = Thread()
    thread.start()
    try:
        autosplit(Drops(), devices=2, chunks=2, sample=torch.randn(6, WIDTH))
    finally:
        thread.ends.set()
        thread.join()
    after = random.random(), float(np.random.rand())
    python, numbers = random.Random(1), np.random.RandomState(2)
    wanted = [(python.random(), float(numbers.rand())) for _ in range(len(thread.drawn) + 1)]
    assert [*thread.drawn, after] == wanted
    assert len(thread.drawn) > 10
    assert thread.wrong == 0
