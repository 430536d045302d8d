"""A model whose units tell a test what passes through them, run by its own Python on lanes."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from autosplit.runtime.lanes import CpuLane
from autosplit.runtime.tree import TreeRun

STAGES, CHUNKS, ROWS, WIDTH = 3, 4, 8, 5
SAFETY_S = 60.0
"""A limit for waits that end at once when all is well."""
Place = tuple[str, int]
"""A unit and a microbatch."""


class Gate(nn.Module):
    """A layer that calls a test's handler; the microbatch is what column 0 of its rows says."""

    def __init__(self, name: str, handlers: Handlers) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.name, self.handlers = name, handlers

    def forward(self, x: Tensor, mark: Tensor) -> Tensor:
        self.handlers.visit(self.name, mark)
        return torch.tanh(self.layer(x))


class Handlers:
    """What a test does when a microbatch passes a unit, and who passed."""

    def __init__(self) -> None:
        self.by_place: Mapping[Place, Callable[[], Any]] | None = None
        self.default: Callable[[str, int], Any] = lambda name, microbatch: None
        self.passed: list[Place] = []
        self.threads: dict[Place, threading.Thread] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> Handlers:
        return self

    def visit(self, name: str, mark: Tensor) -> None:
        if self.by_place is None:
            return
        place = name, int(mark.detach().numpy().reshape(-1)[0])
        self.passed.append(place)
        self.threads[place] = threading.current_thread()
        self.default(*place)
        self.by_place.get(place, lambda: None)()

    @contextlib.contextmanager
    def at(
        self, by_place: Mapping[Place, Callable[[], Any]], default: Callable[[str, int], Any] | None = None
    ) -> Iterator[None]:
        """Call handlers while in here."""
        self.by_place, before = dict(by_place), self.default
        self.default = default or before
        self.passed.clear()
        self.threads.clear()
        try:
            yield
        finally:
            self.by_place, self.default = None, before


class Gates(nn.Module):
    """As many gates as stages, and a handler in the model's own Python."""

    def __init__(self, handlers: Handlers) -> None:
        super().__init__()
        self.handlers = handlers
        self.gates = nn.ModuleList(Gate(f"gates.{stage}", handlers) for stage in range(STAGES))

    def forward(self, x: Tensor, mark: Tensor) -> Tensor:
        for gate in self.gates:
            x = gate(x, mark)
        self.handlers.visit("", mark)
        return x


MARK = torch.arange(CHUNKS, dtype=torch.float64).repeat_interleave(ROWS // CHUNKS)[:, None]


def value() -> Tensor:
    return torch.randn(ROWS, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


class Case:
    """A gated model that runs in microbatches, and its handlers."""

    def __init__(self, **options: Any) -> None:
        torch.manual_seed(0)
        self.handlers = Handlers()
        self.model = Gates(self.handlers).double()
        stage_of = {f"gates.{stage}#0": stage for stage in range(STAGES)}
        self.run = TreeRun(self.model, stage_of, [CpuLane()] * STAGES, chunks=CHUNKS, **options)
        assert self.run.findings((value(), MARK), {}).why is None

    def call(self, x: Tensor | None = None) -> Tensor:
        x = value() if x is None else x
        return self.run.call((x, MARK), {})

    def assert_works(self) -> None:
        """Assert that a call and its backward give the plain model's output and gradients."""
        found = []
        for call in (self.call, lambda x: self.model(x, MARK)):
            x = value().requires_grad_()
            output = call(x)
            found.append((output, *torch.autograd.grad(output.square().sum(), [x, *self.model.parameters()])))
        for mine, plain in zip(*found, strict=True):
            assert torch.allclose(mine, plain, rtol=1e-12, atol=1e-14)


def own_threads() -> set[threading.Thread]:
    """Return the threads of microbatches that are alive."""
    return {thread for thread in threading.enumerate() if thread.name.startswith("autosplit microbatch")}


def notes(error: BaseException) -> list[str]:
    return list(getattr(error, "__notes__", ()))
