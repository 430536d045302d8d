"""A pipe answers for its model: attributes, methods and assignments that are not the pipe's own are the model's.

pipe.config           ─► model.config
pipe.temperature = 2  ─► model.temperature = 2
pipe.training_step(b) ─► the model's method; its ``self`` is a twin of the model: an object of the same attributes
                         (the same ``__dict__``) whose call is the pipe's
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import threading
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, NoReturn, Self

import torch
from torch import fx, nn

from autosplit.errors import DeviceError, InputError
from autosplit.trace.borrowed.state import RECORDING

INSIDE: set[int] = set()
"""The threads that work for a call of a pipe, which has the lock of its calls."""
_SPECIAL = frozenset("__len__ __iter__ __reversed__ __getitem__ __setitem__ __delitem__ __contains__".split())
"""Python looks these up in the class, never in the instance."""
_CALLS = frozenset(("forward", "_call_impl", "_wrapped_call_impl"))
_LISTS = "parameters named_parameters buffers named_buffers get_parameter get_buffer".split()
_CHANGES = "state_dict load_state_dict train _apply to".split()
"""Methods of nn.Module that read what its modules hold, and those that wait for calls of the pipe too."""


class Delegating:
    """The part of a pipe that answers for its model."""

    refused: ClassVar[Mapping[str, str]] = {}
    """What the model's methods may not call on their ``self``, and why."""
    instead: ClassVar[Mapping[str, Callable[..., Any]]] = {}
    """What runs in the place of methods of the model, on their ``self``."""

    def _class(self) -> type:
        core = self.__dict__.get("_autosplit")
        return type(self) if core is None else type(core.model)

    __class__ = property(_class, doc="The model's class: ``isinstance(pipe, Model)`` holds.")

    def __getattr__(self, name: str) -> Any:
        core = self.__dict__.get("_autosplit")
        if core is None or hasattr(type(self), name):  # a property of the pipe failed: its own error
            return object.__getattribute__(self, name)
        for registered in ("_parameters", "_buffers", "_modules"):
            if name in self.__dict__[registered]:
                return self.__dict__[registered][name]
        return _answer(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        core = self.__dict__.get("_autosplit")
        if core is None or hasattr(type(self), name) or name in self.__dict__:
            fx.GraphModule.__setattr__(self, name, value)  # type: ignore[arg-type]
            if core is not None and name == "training":
                core.model.training = value
        elif getattr(value, "__self__", None) is self:  # accelerate keeps the forward of the pipe in the pipe
            self.__dict__[name] = value
        else:
            setattr(core.model, name, value)

    def __delattr__(self, name: str) -> None:
        if name in self.__dict__:
            object.__delattr__(self, name)
        else:
            delattr(self.__dict__["_autosplit"].model, name)

    def __dir__(self) -> list[str]:
        return sorted({*dir(type(self)), *self.__dict__, *dir(self.__dict__["_autosplit"].model)})


class PlacedModule(nn.Module):
    """A module whose parts lie on the devices of a plan: told to move, they stay there."""

    _core: Any

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Change the dtype; a device is refused when stages lie on others: it would collapse the placement."""
        device = torch._C._nn._parse_to(*args, **kwargs)[0]
        self._refuse_collapse(device)
        self._core.model.to(*args, **kwargs)
        return self

    def cpu(self) -> Self:
        """Do nothing when all stages are on the CPU; else refuse, as :meth:`to` does."""
        return self.to("cpu")

    def cuda(self, device: Any = None) -> Self:
        """Do nothing when all stages are on that CUDA device; else refuse, as :meth:`to` does."""
        return self.to(torch.device("cuda", device) if isinstance(device, int) else device or "cuda")

    @property
    def _devices(self) -> Sequence[torch.device]:
        """Where the stages lie that this process holds."""
        return [torch.device(device) for device in self._core.recordings.options.devices]

    def _refuse_collapse(self, device: torch.device | None) -> None:
        devices = {(d.type, d.index or 0) for d in self._devices}
        if device is not None and devices != {(device.type, device.index or 0)}:
            names = ", ".join(sorted({str(d) for d in self._devices}))
            raise DeviceError(
                f"the stages lie on {names}; moving all to {device} would collapse the pipeline. "
                f"Take the model back with pipe.unsplit().to({str(device)!r}), or split it anew with devices="
            )


class Unlisted:
    """A base of classes that are derived from a model's while a pipe is used."""

    def __init_subclass__(cls) -> None:
        """Keep the class from the model's own ``__init_subclass__``, which may list its subclasses."""


class _Twin(Unlisted):
    """What the model's methods are given as ``self``: the model's attributes, and the call of the pipe."""

    _autosplit_pipe: Callable[[], Any]
    """A weak reference."""
    __class__ = property(lambda self: type(self).__mro__[3])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._autosplit_pipe()(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._autosplit_pipe().forward(*args, **kwargs)

    def train(self, mode: bool = True) -> Any:
        return self._autosplit_pipe().train(mode)


class _Forwarded:
    """A method of ``nn.Module`` that the model's class overrides, or a special one, in the class of the pipe."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, pipe: Any, kind: type) -> Any:
        return self if pipe is None else _answer(pipe, self.name)


def forward_overrides(pipe: nn.Module, model: nn.Module) -> None:
    """Give the class of the pipe what Python would not look up in the model: its special methods and overrides."""
    kinds, own = type(pipe).__mro__, type(model).__mro__
    defined = {name for kind in kinds[: kinds.index(nn.Module)] for name in vars(kind)}
    for kind in own[: own.index(nn.Module)]:
        for name in vars(kind).keys() - defined - _CALLS:
            special = name.startswith("__")
            if name in _SPECIAL or (not special and callable(getattr(nn.Module, name, None))):
                setattr(type(pipe), name, _Forwarded(name))
    for name in (*_LISTS, *_CHANGES):
        setattr(type(pipe), name, _waiting(getattr(type(pipe), name), for_calls=name in _CHANGES))


def forward_like(model: nn.Module) -> Callable[..., Any]:
    """Return the forward of a pipe with the signature of the model's; torch.compile does not trace into it."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if "torch._dynamo" not in sys.modules:
            return self._dispatch(*args, **kwargs)
        core = self.__dict__["_autosplit"]
        if core.untraced is None:
            core.untraced = torch.compiler.disable(type(self)._dispatch, reason="a pipe issues its stages on lanes")
        return core.untraced(self, *args, **kwargs)

    this = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    try:
        signature = inspect.signature(model.forward)
    except (TypeError, ValueError):  # a ScriptModule's
        return forward
    forward.__signature__ = signature.replace(parameters=(this, *signature.parameters.values()))  # type: ignore[attr-defined]
    forward.__doc__ = model.forward.__doc__
    return forward


def one_at_a_time(method: Callable[..., Any]) -> Callable[..., Any]:
    """Make a method of a pipe wait while another thread calls the pipe, except for what is called by a recording.

    Other calls wait for that one.
    """

    @functools.wraps(method)
    def alone(pipe: Any, /, *args: Any, **kwargs: Any) -> Any:
        core = pipe._core
        core.stream.drain()
        if core.threads is not None:
            core.threads.check_caller()
        with _for_calls(core):
            return method(pipe, *args, **kwargs)

    return alone


def _for_calls(core: Any) -> AbstractContextManager[Any]:
    """Return what waits for other threads' calls of pipes of the model, unless a recording in this thread asks."""
    inside = RECORDING._is_owned() or threading.get_ident() in INSIDE  # type: ignore[attr-defined]
    return contextlib.nullcontext() if inside else core.stream.lock


def _waiting(method: Any, *, for_calls: bool) -> Callable[..., Any]:
    """Return a method of a pipe that waits while another thread records: modules hold stand-ins of tensors then.

    With ``for_calls`` it waits for other threads' calls of the pipe too. What runs inside of a call does not wait.
    """

    @functools.wraps(method)
    def waits(pipe: Any, /, *args: Any, **kwargs: Any) -> Any:
        core = pipe.__dict__.get("_autosplit")
        inside = core is None or (core.threads is not None and core.threads.has_caller())
        with contextlib.ExitStack() as stack:
            if not inside:
                stack.enter_context(_for_calls(core) if for_calls else contextlib.nullcontext())
                stack.enter_context(RECORDING)
            result = method.__get__(pipe, type(pipe))(*args, **kwargs)
            return iter([*result]) if isinstance(result, types.GeneratorType) else result

    return waits


def _answer(pipe: Any, name: str) -> Any:
    """Return an attribute of the model; its methods run through the pipe."""
    core = pipe.__dict__["_autosplit"]
    devices = core.recordings.options.devices
    if name == "hf_device_map" and len(set(devices)) > 1:  # Trainer and accelerate do not move such models
        return {f"stage{index}": str(device) for index, device in enumerate(devices)}
    if core.twin is None:
        core.twin = _twin(pipe, core.model)
    kind = type(core.twin)
    member = next((vars(base)[name] for base in kind.__mro__ if name in vars(base)), None)
    if isinstance(member, classmethod):
        return getattr(type(core.model), name)
    # A property that fails gives its own error; by getattr torch would say that there is none.
    value = member.__get__(core.twin, kind) if isinstance(member, property) else getattr(core.twin, name)
    if isinstance(value, types.MethodType) and value.__self__ is core.twin:
        return _method(pipe, value)
    return pipe if value is core.twin else value


def _method(pipe: Any, method: types.MethodType) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        return pipe if result is method.__self__ else result

    return call


def _twin(pipe: Any, model: nn.Module) -> Any:
    members: dict[str, Any] = {"_autosplit_pipe": weakref.ref(pipe)}
    others = {name: _refusal(why) for name, why in pipe.refused.items()} | dict(pipe.instead)
    return object_like(model, members | {n: method for n, method in others.items() if hasattr(type(model), n)}, _Twin)


def object_like(model: nn.Module, members: Mapping[str, Any], base: type[Unlisted] = Unlisted) -> Any:
    """Return an object with a model's attributes, the same ``__dict__``, whose class has further members."""
    kind = type(model)
    space = {"__module__": kind.__module__, **members}
    twin: Any = object.__new__(types.new_class(kind.__name__, (base, kind), {}, lambda body: body.update(space)))
    object.__setattr__(twin, "__dict__", model.__dict__)
    return twin


def _refusal(why: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise InputError(why)

    return refuse


def refuse_tracers(leaves: Sequence[Any]) -> None:
    """Raise InputError where a call is made to be traced: what a pipe does with lanes and modules is no such graph."""
    tracing = torch.jit.is_tracing() or torch.compiler.is_exporting()  # type: ignore[attr-defined]
    if tracing or any(isinstance(leaf, fx.Proxy) for leaf in leaves):
        raise InputError(
            "a pipe cannot be traced by torch.jit.trace, torch.export or torch.fx: trace the model, which "
            "pipe.unsplit() gives back; pipe.code is the program that the pipe runs"
        )


def refuse_unplanned() -> NoReturn:
    """Stand for the program of a pipe that was not called yet; raise InputError where something runs it."""
    raise InputError("the pipe has no program before its first call: call it once, or pass sample=")


def free_names(model: nn.Module, stages: int) -> dict[str, str]:
    """Choose attribute names for the parts that hide nothing of the model's own."""
    names = {}
    for wanted in (
        *(f"stage{i}" for i in range(stages)),
        *(f"shared{i}" for i in range(stages)),
        "epilogue",
        "module_tree",
    ):
        name = wanted
        while hasattr(model, name):
            name = f"pipe_{name}"
        names[wanted] = name
    return names
