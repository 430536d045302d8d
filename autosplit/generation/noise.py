"""Random numbers of groups of rows: the noise of a whole batch, drawn once per step and shared by rows.

``torch.multinomial`` without replacement takes the largest quotients of probabilities and exponential noise of their
shape, so what a row draws depends on the noise of that row only.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from autosplit.runtime.lanes.lanes import generators

AHEAD = 8
"""The most steps by which a group may be ahead of another: so much noise is kept."""
_THREAD = threading.local()


class WholeBatch(Exception):
    """Why rows cannot be split. Whatever runs in a group may raise it: all rows run again as a single group."""


class SharedNoise:
    """The noise that groups of ``sizes`` rows sample with, from copies of torch's default generators.

    The first error of a group stops all of them.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = sizes
        self._error: BaseException | None = None
        self._taken: list[float] = [0] * len(sizes)
        self._steps: dict[float, Tensor] = {}
        self._news = threading.Condition()
        default = [(generator, generator.get_state()) for generator in generators()]
        self._sources = {
            own.device: (own, state, torch.Generator(own.device).set_state(state)) for own, state in default
        }

    def end(self, group: int, error: BaseException | None = None) -> None:
        """Note that a group draws no more, and the error that ended it."""
        with self._news:
            self._error = self._error or error
            self._take(group, math.inf)

    def check(self) -> None:
        """Raise an exception where a group has failed."""
        if self._error is not None:
            raise WholeBatch

    def multinomial(
        self, group: int, plain: Any, input: Tensor, num_samples: int, replacement: bool = False, **others: Any
    ) -> Tensor:
        """Return what ``torch.multinomial`` draws for a group's rows as it draws for the whole batch."""
        repeats, rest = divmod(input.shape[0], self._sizes[group])
        if input.dim() != 2 or rest or replacement or others or input.device not in self._sources:
            raise WholeBatch("it samples from something else than rows of tokens")
        least, sums = input.min().item(), input.sum(1).aminmax()
        if not (least >= 0 and sums.min.item() > 0 and sums.max.item() < math.inf):
            plain(input, num_samples)  # which raises the error
            raise WholeBatch("it samples by weights of unusual size")
        start, shape = repeats * sum(self._sizes[:group]), (repeats * sum(self._sizes), input.shape[1])
        with self._news:
            step = self._taken[group]
            self._news.wait_for(lambda: self._error is not None or step < min(self._taken) + AHEAD)
            self.check()
            if step not in self._steps:
                self._steps[step] = input.new_empty(shape).exponential_(1, generator=self._sources[input.device][2])
            noise = self._steps[step]
            self._take(group, step + 1)
        if noise.shape != shape:
            raise WholeBatch("its rows sample from different numbers of tokens")
        quotients = input / noise[start : start + input.shape[0]]
        return quotients.argmax(-1, keepdim=True) if num_samples == 1 else quotients.topk(num_samples)[1]

    def _take(self, group: int, steps: float) -> None:
        self._taken[group] = steps
        self._steps = {step: noise for step, noise in self._steps.items() if step >= min(self._taken)}
        self._news.notify_all()

    def settle(self) -> None:
        """Leave the default generators as the whole batch does, or as they were and raise what stopped the groups.

        Raises WholeBatch where something else drew from the generators.
        """
        error, self._error = self._error, None
        if error is None and any(not torch.equal(own.get_state(), state) for own, state, _ in self._sources.values()):
            error = WholeBatch("it draws other random numbers than those of sampling")
        for own, state, copy in self._sources.values():
            own.set_state(copy.get_state() if error is None else state)
        if error is not None:
            try:
                raise error
            finally:
                del error  # its traceback holds this frame


class GroupMode(TorchFunctionMode):
    """Has a group's thread sample with its rows of the shared noise, and end where another group has failed."""

    def __init__(self, noise: SharedNoise, group: int) -> None:
        super().__init__()
        self._noise, self._group, self.is_off = noise, group, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._noise.check()
        kwargs = kwargs or {}
        if kwargs.get("generator") is not None:
            raise WholeBatch("it draws from a generator of its own")
        if func in (torch.multinomial, Tensor.multinomial):
            return self._noise.multinomial(self._group, func, *args, **kwargs)
        return func(*args, **kwargs)

    def __enter__(self) -> GroupMode:
        _THREAD.mode = self
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        _THREAD.mode = None
        super().__exit__(*error)


def in_group() -> bool:
    """Tell whether this thread runs a group of rows."""
    return getattr(_THREAD, "mode", None) is not None


@contextlib.contextmanager
def outside_group() -> Iterator[None]:
    """Take the mode of this thread's group, if any, off what runs on the stages of a pipe."""
    with contextlib.ExitStack() as stack:
        if (mode := getattr(_THREAD, "mode", None)) is not None and not mode.is_off:
            mode.is_off = True
            TorchFunctionMode.__exit__(mode, None, None, None)
            stack.callback(TorchFunctionMode.__enter__, mode)
            stack.callback(setattr, mode, "is_off", False)
        yield
