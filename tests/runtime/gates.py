"""A model with a gate at the end of every stage, where a test looks on, waits or raises; and what every test asks."""

from __future__ import annotations

import contextlib
import copy
import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from autosplit.options import Options
from autosplit.pipelined import PipelinedModule
from autosplit.schedule.action import Action
from tests.equivalence.equality import TOLERANCE, Batch, difference

STAGES, CHUNKS, WIDTH = 3, 4, 6
ROWS = 2 * CHUNKS
SAFETY_S = 60.0
"""A limit for waits that end at once when all is well."""
LANES = ("inline", "threads")
HOWS = ("call", "gpipe", "1f1b")
Handler = Callable[[], None]


class Boom(Exception):
    """What a test raises inside an action."""


class Gates:
    """The gates of one model: what each does when a value passes, and which actions passed.

    It passes for an object of the standard library: what a plain one holds would be a part of every call's signature.
    """

    __module__ = "threading"

    def __init__(self) -> None:
        self.handlers: dict[Action, Handler] | None = None
        self.passed: list[Action] = []
        self.inside: set[Action] = set()
        self.threads: dict[int, set[threading.Thread]] = {}
        """The threads that a stage's actions passed on."""
        self.function = _gate(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Gates:
        return self

    @contextlib.contextmanager
    def at(self, handlers: Mapping[Action, Handler]) -> Iterator[None]:
        """Call a handler whenever its action passes."""
        self.handlers = dict(handlers)
        self.passed.clear()
        self.threads.clear()
        try:
            yield
        finally:
            self.handlers = None

    def visit(self, stage: int, kind: Any, mark: Tensor) -> None:
        if self.handlers is None:
            return
        action = Action(stage, kind, int(mark.flatten()[0]))
        self.passed.append(action)
        self.threads.setdefault(stage, set()).add(threading.current_thread())
        self.inside.add(action)
        try:
            self.handlers.get(action, lambda: None)()
        finally:
            self.inside.discard(action)


def _gate(gates: Gates) -> type[torch.autograd.Function]:
    """Return a function that is one operation of a model and tells the gates; ``mark`` holds the microbatch."""

    class Gate(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: Tensor, mark: Tensor, stage: int) -> Tensor:
            ctx.stage, ctx.mark = stage, mark
            gates.visit(stage, "F", mark)
            return value.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
            gates.visit(ctx.stage, "B", ctx.mark)
            return gradients[0].clone(), None, None

    return Gate


class Gated(nn.Module):
    """As many equal blocks as stages, a gate behind each."""

    def __init__(self, gates: Gates) -> None:
        super().__init__()
        self.gates = gates
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(STAGES))
        self.double()

    def forward(self, value: Tensor, mark: Tensor) -> Tensor:
        for stage, block in enumerate(self.blocks):
            value = self.gates.function.apply(torch.tanh(block(value)), mark, stage)
        return value


MARK = torch.arange(CHUNKS, dtype=torch.float64).repeat_interleave(ROWS // CHUNKS)[:, None]
"""The microbatch of each row."""
VALUE = torch.randn(ROWS, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
TARGET = torch.randn(ROWS, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def split(model: nn.Module, *, lanes: str = "threads", schedule: str = "gpipe", **options: Any) -> PipelinedModule:
    """Split a model by estimated costs, which are the same in every run, so that equal blocks have a stage each."""
    devices = (torch.device("cpu"),) * STAGES
    return PipelinedModule(
        model, Options(devices, CHUNKS, schedule=schedule, lanes=lanes, **{"measure": False, **options})
    )


class Case:
    """A gated pipe that has run, the plain model beside it, and a batch whose input wants a gradient."""

    def __init__(self, *, lanes: str = "threads", schedule: str = "gpipe", model: Callable[[Gates], Any] = Gated):
        torch.manual_seed(0)
        self.gates = Gates()
        self.plain = model(self.gates)
        self.pipe = split(copy.deepcopy(self.plain), lanes=lanes, schedule=schedule)
        self.value = VALUE.clone().requires_grad_()
        self.loss_fn: Callable[..., Tensor] = nn.MSELoss()
        self.target = TARGET
        self.run("call")
        self.run("step")
        self.clear()

    def leaves(self) -> dict[str, Tensor]:
        return dict(self.pipe.named_parameters()) | {"input": self.value}

    def clear(self) -> None:
        for leaf in self.leaves().values():
            leaf.grad = None

    def run(self, how: str) -> Tensor:
        """Run a call and its backward, or a training step; return the loss."""
        if how != "call":
            return self.pipe.train_step(self.value, MARK, target=self.target, loss_fn=self.loss_fn)
        loss = self.loss_fn(self.pipe(self.value, MARK), self.target)
        loss.backward()
        return loss.detach()

    def assert_works(self) -> None:
        """Assert that a call, its backward and a training step give the plain loss and gradients."""
        for how in ("call", "step"):
            self.clear()
            self.assert_plain(self.run(how))
        self.clear()

    def assert_plain(self, loss: Tensor) -> None:
        """Assert that this loss and the gradients are those of one plain step."""
        plain, gradients = self.of_plain()
        assert difference(loss, plain) <= TOLERANCE[torch.float64]
        for name, leaf in self.leaves().items():
            assert leaf.grad is not None, name
            assert difference(leaf.grad, gradients[name]) <= TOLERANCE[torch.float64], name

    def threads(self) -> list[threading.Thread]:
        """Return the one thread that each lane works on, found by a call."""
        with self.gates.at({}):
            self.pipe(self.value, MARK)
        for own in self.gates.threads.values():
            assert len(own) == 1
        return [next(iter(self.gates.threads[stage])) for stage in range(STAGES)]

    def of_plain(self) -> tuple[Tensor, dict[str, Tensor]]:
        value = VALUE.clone().requires_grad_()
        parameters = dict(self.plain.named_parameters())
        loss = self.loss_fn(self.plain(value, MARK), self.target)
        found = torch.autograd.grad(loss, [*parameters.values(), value])
        return loss.detach(), dict(zip([*parameters, "input"], found, strict=True))


@functools.cache
def case_of(lanes: str, how: str) -> Case:
    """Return the case that all tests of these lanes and this way to run share, whatever went wrong in it before."""
    return Case(lanes=lanes, schedule="gpipe" if how == "call" else how)


def batch() -> Batch:
    return Batch((VALUE, MARK))


def lane_threads() -> set[threading.Thread]:
    """Return the threads of all lanes of this process; those of earlier tests' pipes may end at any time."""
    return {thread for thread in threading.enumerate() if thread.name.startswith("autosplit lane")}


def raiser(error: BaseException) -> Handler:
    """Return a handler that raises this very exception."""

    def trip() -> None:
        raise error

    return trip


def hold(*, until: threading.Event) -> None:
    """Wait for an event that is sure to come."""
    assert until.wait(SAFETY_S), "what should have come did not"


def frames(error: BaseException) -> list[str]:
    """Return the names of the functions in an exception's traceback, outermost first."""
    names, traceback = [], error.__traceback__
    while traceback is not None:
        names.append(traceback.tb_frame.f_code.co_name)
        traceback = traceback.tb_next
    return names


def notes(error: BaseException) -> list[str]:
    return list(getattr(error, "__notes__", ()))
