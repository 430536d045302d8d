"""What a process that has a part of a model refuses of the model itself, and that part as a module of its own.

model(x), model.state_dict(), deepcopy, pickle     InputError: what other ranks have is stale here
model.modules(), parameters, hooks, loading        as ever: what is changed of this rank's part counts
deepcopy(pipe)                                     a RankPart, such as torch's AveragedModel makes of the pipe
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar, NoReturn

from torch import nn

from autosplit.errors import InputError
from autosplit.tensor.part import PARTS
from autosplit.tensor.state import as_part

_CALL = "_compiled_call_impl"
"""Where torch looks for what to run in the place of a module's call."""
_WAYS_OUT = (
    "call the pipe; save pipe.state_dict(), or by autosplit.distributed.checkpoint; average by AveragedModel(pipe), "
    "made after autosplit(); or take the whole model back by pipe.unsplit()"
)


class _Refusal:
    """Stands among a module's hooks of its state, and refuses that and copies; its call in the place of calls."""

    works: ClassVar[int] = 0
    """How many pipes read their models at this moment."""

    def __init__(self, why: str) -> None:
        self.why = why

    def _refuse(self, what: str) -> None:
        if not _Refusal.works:
            raise InputError(f"{what}: {self.why}; {_WAYS_OUT}")

    def __call__(self, module: nn.Module, *_: Any) -> None:
        self._refuse(f"the state of {type(module).__name__} was asked for")

    def called(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Call a module, for a pipe alone."""
        self._refuse(f"{type(module).__name__} was called by itself")
        return module._call_impl(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> Any:
        self._refuse("the model was copied")
        return self

    def __reduce__(self) -> Any:
        self._refuse("the model was pickled")
        return _Refusal, (self.why,)


class ModelGuard:
    """Refuses calls, states and copies of a model's modules that hold what is another rank's."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._calls: list[tuple[nn.Module, Any]] = []
        """Modules, and what refuses their calls."""

    def begin(self, is_own: Callable[[str], bool], rank: int) -> None:
        """Refuse from now on; ``is_own`` tells by name what this rank has."""
        self.end()
        elsewhere: dict[nn.Module, str] = {}
        for path, module in self._model.named_modules():
            for key, tensor in [*module._parameters.items(), *module._buffers.items()]:
                name = f"{path}.{key}".lstrip(".")
                if tensor is not None and not is_own(name):
                    elsewhere.setdefault(module, name)
                if tensor is not None and (module in elsewhere or tensor in PARTS):
                    elsewhere.setdefault(self._model, name)
        for module, name in elsewhere.items():
            refusal = _Refusal(
                f"rank {rank} has a part of the model, and {name!r}, or the rest of it, is another rank's"
            )
            module.register_state_dict_pre_hook(refusal)
            self._calls.append((module, partial(refusal.called, module)))
            module.__dict__.setdefault(_CALL, self._calls[-1][1])

    def end(self) -> None:
        """Refuse nothing of the model any more, nor does another pipe's guard."""
        self._calls.clear()
        for module in self._model.modules():
            hooks = module._state_dict_pre_hooks
            for key in [key for key, hook in hooks.items() if isinstance(hook, _Refusal)]:
                del hooks[key]
            if isinstance(getattr(getattr(module.__dict__.get(_CALL), "func", None), "__self__", None), _Refusal):
                del module.__dict__[_CALL]

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Let the pipe read, call and copy the model, whose attributes are as without a guard."""
        held = [module for module, call in self._calls if module.__dict__.get(_CALL) is call]
        for module in held:
            del module.__dict__[_CALL]
        _Refusal.works += 1
        try:
            yield
        finally:
            _Refusal.works -= 1
            for module, call in self._calls if held else ():
                module.__dict__.setdefault(_CALL, call)


class RankPart(nn.Module):
    """Values of its own for one rank's part of a model, under the model's names.

    ``torch.optim.swa_utils.AveragedModel`` averages them; :func:`autosplit.distributed.checkpoint.save_weights` saves
    them as the whole model, and ``pipe.load_state_dict()`` takes its ``state_dict()``. It cannot be called.
    """

    def __init__(self, model: nn.Module, is_own: Callable[[str], bool], memo: dict[int, Any]) -> None:
        """Copy what ``is_own`` tells to be this rank's, by name, of a model."""
        super().__init__()
        for path, module in model.named_modules(remove_duplicate=False):
            for key, tensor in [*module._parameters.items(), *module._buffers.items()]:
                if tensor is None or not is_own(f"{path}.{key}".lstrip(".")):
                    continue
                holder: nn.Module = self
                for name in filter(None, path.split(".")):
                    if name not in holder._modules:
                        holder.add_module(name, nn.Module())
                    holder = holder._modules[name]  # type: ignore[assignment]
                own = copy.deepcopy(tensor, memo)
                if (part := PARTS.get(tensor)) is not None:
                    PARTS[own] = part
                if key in module._parameters:
                    holder.register_parameter(key, own)
                else:
                    holder.register_buffer(key, own, persistent=key not in module._non_persistent_buffers_set)
        self.register_state_dict_post_hook(_with_parts)

    def forward(self, *_: Any, **__: Any) -> NoReturn:
        """Raise InputError: a rank's part computes no outputs."""
        raise InputError(
            "a rank's part of a model has values, and no forward; load them into the pipe to run it with them: "
            "pipe.load_state_dict(part.state_dict())"
        )


def _with_parts(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Have parts of parameters in a state as what they are of the whole."""
    for name, tensor in (*module.named_parameters(remove_duplicate=False), *module.named_buffers()):
        if (part := PARTS.get(tensor)) is not None and state.get(prefix + name) is not tensor:
            state[prefix + name] = as_part(state[prefix + name], part)


def check_average(model: nn.Module) -> None:
    """Raise InputError where a copy of the whole model asks for a rank's part, to take it for the whole.

    ``AveragedModel.update_parameters(pipe)`` and timm's ``ModelEma`` pair what they hold with that by its position,
    and what asks is told by the frame that calls the pipe.
    """
    held = getattr(sys._getframe(2).f_locals.get("self"), "module", None)
    if type(held) is type(model) and held is not model:
        raise InputError(
            f"an average of all of {type(model).__name__}, which was made before autosplit(), would pair a rank's part "
            "with other parameters; make it of the pipe: AveragedModel(pipe)"
        )
