"""A model that tells what its lanes see, forward and backward, and modes that note what they see."""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from autosplit import autosplit

WIDTH = 6
STAGES = 3
SPOT: contextvars.ContextVar[str] = contextvars.ContextVar("SPOT", default="nowhere")


class Watch(torch.autograd.Function):
    """The identity; its backward tells what it sees, or raises."""

    seen: ClassVar[list[tuple[str, Any]]] = []
    observe: ClassVar[Callable[[], Any]] = staticmethod(lambda: None)
    fails: ClassVar[bool] = False

    @staticmethod
    @contextlib.contextmanager
    def fresh() -> Iterator[None]:
        """Watch nothing at the beginning and at the end, whatever a test watches in between."""
        Watch.reset()
        try:
            yield
        finally:
            Watch.reset()

    @staticmethod
    def reset() -> None:
        Watch.seen, Watch.observe, Watch.fails = [], staticmethod(lambda: None), False

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        Watch.look()
        return gradient

    @staticmethod
    def look(*_: Any) -> None:
        """Note this thread's name and what it observes."""
        Watch.seen.append((threading.current_thread().name, Watch.observe()))
        if Watch.fails:
            raise ArithmeticError("a stage fails")


class Block(nn.Module):
    """A layer with a watched value behind it for the backward; its own hook looks in the forward and keeps it whole."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_forward_pre_hook(Watch.look)

    def forward(self, value: Tensor) -> Tensor:
        return torch.tanh(Watch.apply(self.layer(value)))


def build(lanes: str, *, dtype: torch.dtype = torch.float32) -> Any:
    """Return a pipe of three watched blocks."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(STAGES))).to(dtype)
    return autosplit(model, devices=["cpu"] * STAGES, chunks=4, lanes=lanes)


def value_of(*, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.linspace(-1, 1, 9 * WIDTH, dtype=dtype).view(9, WIDTH)


def watch(observe: Callable[[], Any], run: Callable[[], Any]) -> list[Any]:
    """Return what the lanes observed while ``run`` ran; assert that they were three threads of their own."""
    Watch.seen, Watch.observe = [], staticmethod(observe)
    run()
    names = {name for name, _ in Watch.seen}
    assert len(names) == STAGES
    assert threading.current_thread().name not in names
    assert len(Watch.seen) >= 4 * STAGES
    return [value for _, value in Watch.seen]


def autocast_state() -> Any:
    kind = torch.get_autocast_dtype("cpu")
    return torch.is_autocast_enabled("cpu"), kind, torch.is_autocast_cache_enabled()


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Change the default dtype, and back."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class Functions(TorchFunctionMode):
    """Notes every function's name and thread."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, str]] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append((getattr(function, "__name__", ""), threading.current_thread().name))
        return function(*args, **(kwargs or {}))


class Operations(TorchDispatchMode):
    """Notes every operation's name and thread."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, str]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append((str(function), threading.current_thread().name))
        return function(*args, **(kwargs or {}))


def refusal() -> str:
    """Return why this thread may not have hooks on saved tensors, or that it may."""
    try:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
            return "allowed"
    except RuntimeError as error:
        return str(error)
