"""What a process that has a part of a model refuses of the model itself, and that part as a module of its own.

model(x), model.state_dict(), deepcopy, pickle     InputError: what other ranks have is stale here
model.modules(), parameters, hooks, loading        as ever: what is changed of this rank's part counts
deepcopy(pipe)                                     this rank's part, such as torch's AveragedModel makes of the pipe
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any, ClassVar, NoReturn

from torch import nn

from autosplit.errors import OWN, InputError
from autosplit.runtime.lower.split import named_state
from autosplit.tensor.part import PARTS
from autosplit.tensor.state import as_part

_CALL = "_compiled_call_impl"
"""Where torch looks for what to run in the place of a module's call."""
_WAYS_OUT = (
    "call the pipe; save pipe.state_dict(), or by autosplit.distributed.checkpoint; average by AveragedModel(pipe), "
    "made after autosplit(); or take the whole model back by pipe.unsplit()"
)


class ModelGuard:
    """Refuses calls, states and copies of a model's modules that hold what is another rank's.

    It stands among their hooks of ``state_dict()``, where copies and pickles find it too, and in the place of calls.
    """

    working: ClassVar[int] = 0
    """How many pipes read their models at this moment."""

    def __init__(self, model: nn.Module) -> None:
        self._model, self._why = model, ""
        self._calls: list[tuple[nn.Module, Any]] = []
        """Modules, and what refuses their calls."""

    def begin(self, is_own: Callable[[str], bool], rank: int) -> None:
        """Refuse from now on; ``is_own`` tells by name what this rank has."""
        self.end()
        named = dict(named_state(self._model))
        elsewhere = [name for name in named if not is_own(name)]
        if first := [*elsewhere, *(name for name, tensor in named.items() if tensor in PARTS)][:1]:
            self._why = f"rank {rank} has a part of the model, and {first[0]!r}, or a part of it, is another rank's"
            paths = dict.fromkeys(["", *(name.rpartition(".")[0] for name in elsewhere)])
            for module in map(self._model.get_submodule, paths):
                module.register_state_dict_pre_hook(self)
                self._calls.append((module, partial(self.called, module)))
                module.__dict__.setdefault(_CALL, self._calls[-1][1])

    def end(self) -> None:
        """Refuse nothing of the model any more, nor does another pipe's guard."""
        self._calls.clear()
        for module in self._model.modules():
            hooks = module._state_dict_pre_hooks
            for key in [key for key, hook in hooks.items() if isinstance(hook, ModelGuard)]:
                del hooks[key]
            if isinstance(getattr(getattr(module.__dict__.get(_CALL), "func", None), "__self__", None), ModelGuard):
                del module.__dict__[_CALL]

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Let the pipe read, call and copy the model, whose attributes are as without a guard."""
        held = [(module, call) for module, call in self._calls if module.__dict__.get(_CALL) is call]
        for module, _ in held:
            del module.__dict__[_CALL]
        ModelGuard.working += 1
        try:
            yield
        finally:
            ModelGuard.working -= 1
            for module, call in held:
                module.__dict__.setdefault(_CALL, call)

    def refuse(self, what: str) -> None:
        """Raise InputError, but while a pipe does it."""
        if not ModelGuard.working:
            raise InputError(f"{what}: {self._why}; {_WAYS_OUT}")

    def __call__(self, module: nn.Module, *_: Any) -> None:
        """Refuse a module's ``state_dict()``."""
        self.refuse(f"the state of {type(module).__name__} was asked for")

    def called(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Call a module, for a pipe alone."""
        self.refuse(f"{type(module).__name__} was called by itself")
        return module._call_impl(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> Any:
        self.refuse("the model was copied")
        return _nothing

    def __reduce__(self) -> Any:
        self.refuse("the model was pickled")
        return "_nothing"


def _nothing(*_: Any) -> None:
    """Stand for a guard in copies of its module."""


def part_of(model: nn.Module, is_own: Callable[[str], bool], memo: dict[int, Any]) -> nn.Module:
    """Return a copy of a model with only a rank's own parameters and buffers; it cannot be called."""
    named = dict(named_state(model))
    memo.update((id(tensor), None) for name, tensor in named.items() if not is_own(name))
    rank_model: nn.Module = copy.deepcopy(model, memo)
    PARTS.update((memo[id(tensor)], PARTS[tensor]) for tensor in named.values() if tensor in PARTS)
    rank_model.register_state_dict_post_hook(_with_parts)
    rank_model.__dict__[_CALL] = _no_forward
    return rank_model


def _no_forward(*_: Any, **__: Any) -> NoReturn:
    raise InputError(
        "a rank's part of a model has values, and no forward; load them into the pipe to run it with them: "
        "pipe.load_state_dict(part.state_dict())"
    )


def _with_parts(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Have parts of parameters in a state as what they are of the whole."""
    for name, tensor in named_state(module):
        if (shard := PARTS.get(tensor)) is not None and state.get(prefix + name) is not tensor:
            state[prefix + name] = as_part(state[prefix + name], shard)


def check_average(model: nn.Module) -> None:
    """Raise InputError where a copy of the whole model asks for a rank's part, to take it for the whole.

    ``AveragedModel.update_parameters(pipe)`` and timm's ``ModelEma`` pair what they hold with that by its position,
    and what asks is told by the innermost frame that is not autosplit's.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(OWN):
        frame = frame.f_back
    held = None if frame is None else getattr(frame.f_locals.get("self"), "module", None)
    if type(held) is type(model) and held is not model and _CALL not in held.__dict__:
        raise InputError(
            f"an average of all of {type(model).__name__}, which was made before autosplit(), would pair a rank's part "
            "with other parameters; make it of the pipe: AveragedModel(pipe)"
        )
