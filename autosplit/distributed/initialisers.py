"""A model's initialisers, run for some of its tensors only.

Constructors cannot run again, but what they call can: methods of the modules, from the inside out, as those outside
write to what is inside. One run goes through the whole model while only the tensors that are asked for have values; a
write to a tensor on meta does nothing and draws nothing::

    root              call                             when "blocks.0.fc.weight" is asked for
      blocks.0          blocks.0.fc.reset_parameters()   its draw 0
        fc              blocks.1.fc.reset_parameters()   nothing
      blocks.1          root._init_weights(blocks.0.fc)  its draw 1
        fc              root._init_weights(blocks.0)     nothing
                        ...

Each draw is seeded with the tensor's name and the draw's number, so no value depends on which others are asked for.

Private torch interface: a mode that sees the operations below autograd; tried on torch 2.13.
"""

from __future__ import annotations

import hashlib
import inspect
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor, nn
from torch.fx.node import map_aggregate
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from autosplit.distributed.places import Entry, listed, replacement
from autosplit.errors import InputError

_META, _CPU = torch.device("meta"), torch.device("cpu")
_WITH_NAN = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_OWN = ("reset_parameters", "_reset_parameters"), ("init_non_persistent_buffers",)
"""Methods for what a module holds itself: of torch and others, and of timm."""
_WHOLE = "init_weights", "initialize_weights"
"""Methods for all that is in a module: of timm, torchtitan, MAE and others."""
_WAY_OUT = (
    "give weights= that hold it, or give the model an init_weights() that sets all it has, or build it on a real device"
)


class _Call(NamedTuple):
    """A call of a module's initialiser, for the module ``inner``.

    ``tied``: constructors make it after they have tied tensors.
    """

    name: str
    module: nn.Module
    method: str
    arguments: tuple[Any, ...] = ()
    inner: str = ""
    tied: bool = False


class _Blank(NamedTuple):
    """What stands in for a tensor while initialisers run; ``tensor`` is ``meta`` where no value is asked for."""

    tensor: Tensor
    meta: Tensor

    def put(self, entry: Entry) -> None:
        """Put it in the first place only: what a constructor draws for the others, a tie replaces."""
        entry.put(self.meta)
        entry.places[0].set(self.tensor)


def initial_values(model: nn.Module, entries: list[Entry], wanted: list[Entry], seed: int) -> dict[str, Tensor]:
    """Return the initial values of ``wanted`` on the CPU, by name; the model is left as it was.

    Raises InputError for those that are not filled, or had been written to more often than here.
    """
    units = {_parametrized(model, entry) for entry in wanted} - {None}
    real = {*wanted, *(entry for entry in entries if _parametrized(model, entry) in units)}
    with _own_random_state(), _blanks(entries, real) as blanks:
        replay = _Replay(seed, blanks)
        for call in _calls("", model):
            replay.run(call)
        values = {entry: entry.places[0].get() for entry in wanted}
    replaced = {entry for entry, value in values.items() if value is not blanks[entry].tensor}
    writes = {entry: replay.writes[entry.name] for entry in wanted}
    if unfilled := [e.shown for e in wanted if not _is_filled(values[e], e.tensor, e in replaced or writes[e] > 0)]:
        raise InputError(f"no initialiser fills {listed(unfilled)} of a model on meta: {_WAY_OUT}")
    untracked = {*replaced, *(entry for entry in wanted if _parametrized(model, entry) in units)}
    if more := [e.shown for e in wanted if e not in untracked and _version(e.tensor) > writes[e]]:
        raise InputError(
            f"the constructor of a model on meta, or who called it, has written to {listed(more)} more often than its "
            f"initialisers do, and what was written is not known: {_WAY_OUT}"
        )
    return {e.name: value.detach().to(e.tensor.dtype) for e, value in values.items() if value is not None}


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _is_filled(value: Tensor | None, like: Tensor, written: bool) -> bool:
    """Return whether each element of a floating tensor was written, or any of another."""
    if value is None or value.is_meta or value.shape != like.shape:
        return False
    return not (value.numel() and bool(value.amax().isnan())) if value.dtype in _WITH_NAN else written


def _calls(name: str, module: nn.Module, in_hf: bool = False) -> Iterator[_Call]:
    """Yield the initialisers in the order in which constructors call them, children first.

    In transformers, whose models have ``_initialize_weights``, ``_init_weights(module)`` gets what is inside and in no
    inner model, before weights are tied, and calls all else. Elsewhere it gets all that is inside, by ``apply`` or,
    with names, by timm's ``named_apply``; ``init_weights()`` stands for that where there is one.
    """
    is_hf = _is_hf(module)
    for key, child in list(module.named_children()):
        yield from _calls(f"{name}.{key}" if name else key, child, in_hf or is_hf)
    for methods in _OWN:
        yield from [_Call(name, module, method) for method in methods if _required(module, method) == 0][:1]
    whole = [] if in_hf or is_hf else [method for method in _WHOLE if _required(module, method) == 0]
    number = _required(module, "_init_weights")
    if whole:
        yield _Call(name, module, whole[0], tied=True)
    elif number in (1, 2):
        for path, inner in _children_first("", module, skip_hf=is_hf):
            yield _Call(name, module, "_init_weights", (inner, path)[:number], path, not is_hf)


def _children_first(path: str, module: nn.Module, *, skip_hf: bool) -> Iterator[tuple[str, nn.Module]]:
    for key, child in list(module.named_children()):
        if not (skip_hf and _is_hf(child)):
            yield from _children_first(f"{path}.{key}" if path else key, child, skip_hf=skip_hf)
    yield path, module


def _is_hf(module: nn.Module) -> bool:
    return hasattr(module, "_initialize_weights")


def _required(module: nn.Module, method: str) -> int | None:
    """Return how many arguments a method of a module's class cannot do without; None where there is no such method."""
    if not inspect.isfunction(getattr(type(module), method, None)):
        return None
    parameters = inspect.signature(getattr(module, method)).parameters.values()
    return sum(p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)


class _Replay(TorchDispatchMode):
    """Runs initialisers: seeds each draw, and lets tensors on meta meet others.

    A draw's seed is made of the tensor that is filled and how many draws there were for it. What is drawn into a
    temporary tensor by a function for some ``tensor``, as torch's are, counts for that one: such functions return early
    for tensors on meta, and reject draws. Elsewhere the call and the operation stand for the tensor.

    Attributes:
        writes: how often each tensor of the model was written to in place, by name.
    """

    def __init__(self, seed: int, blanks: dict[Entry, _Blank]) -> None:
        super().__init__()
        self._seed, self._blanks = seed, blanks
        self._storages = [(t.untyped_storage(), entry.name) for entry, blank in blanks.items() for t in blank]
        self._names = {id(storage): name for storage, name in self._storages}
        self._draws: Counter[str] = Counter()
        self.writes: Counter[str] = Counter()

    def run(self, call: _Call) -> None:
        """Make a call; raise InputError where it fails."""
        name, module, method, arguments, inner, tied = call
        self._label = f"{name}.{method}({inner})"
        random.seed(_number(f"{self._seed}:{self._label}"))
        numpy.random.seed(random.getrandbits(32))
        plain = method in _OWN[0] and parametrize.is_parametrized(module)
        try:
            with torch.device(_CPU), _TensorOnCpu(), self, _as_plain(module) if plain else self._tied(tied):
                getattr(module, method)(*arguments)
        except Exception as error:
            raise InputError(
                f"{type(module).__name__}.{method}() of {name or 'the model'!r} failed with {type(error).__name__}: "
                f"{error}, when it initialised one part of a model on meta: {_WAY_OUT}"
            ) from error

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {key: None if key == "generator" else value for key, value in (kwargs or {}).items()}
        target = args[0] if func._schema.is_mutable and args and isinstance(args[0], Tensor) else None
        name = self._name(target)
        self.writes[name] += 1
        if torch.Tag.nondeterministic_seeded in func.tags:
            name = name or self._filled() or f"{self._label} {func}"
            # torch.manual_seed would reach the generators of all devices
            torch.default_generator.manual_seed(_number(f"{self._seed}:{name}:{self._draws[name]}"))
            self._draws[name] += 1
        if any(isinstance(arg, Tensor) and arg.is_meta for arg in args):
            if target is None or target.is_meta:
                args = map_aggregate(args, lambda arg: arg.to(_META) if isinstance(arg, Tensor) else arg)
        elif kwargs.get("device") == _META:  # as a neighbour's, which is not asked for
            kwargs["device"] = _CPU
        return func(*args, **kwargs)

    def _name(self, value: Any) -> str:
        """Return the name of a tensor of the model, or of a view of it; nothing for all else."""
        return self._names.get(id(value.untyped_storage()), "") if isinstance(value, Tensor) else ""

    def _filled(self) -> str:
        """Return the name of what the functions under way fill."""
        frame = inspect.currentframe()
        while frame is not None and frame.f_code is not _Replay.run.__code__:
            if name := self._name(frame.f_locals.get("tensor")):
                return name
            frame = frame.f_back
        return ""

    @contextmanager
    def _tied(self, tied: bool) -> Iterator[None]:
        """Let tensors be in all their places."""
        ties = [(entry, blank) for entry, blank in self._blanks.items() if tied and len(entry.places) > 1]
        for entry, blank in ties:
            entry.put(blank.tensor)
        yield
        for entry, blank in ties:
            blank.put(entry)


class _TensorOnCpu(TorchFunctionMode):
    """Makes ``torch.tensor(..., device=...)`` on the CPU for a device of meta; no dispatch mode sees that call."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.tensor, torch.as_tensor) and kwargs.get("device") == _META:
            kwargs = {**kwargs, "device": _CPU}
        return func(*args, **kwargs)


@contextmanager
def _blanks(entries: list[Entry], real: set[Entry]) -> Iterator[dict[Entry, _Blank]]:
    """Let the model hold blank tensors: those in ``real`` on the CPU, of NaN where there is one, all else on meta."""
    blanks = {}
    for entry in entries:
        like = entry.tensor
        tensor = meta = replacement(like, torch.empty_like(like, device=_META))
        if entry in real:
            start = float("nan") if like.dtype in _WITH_NAN else 0
            tensor = replacement(like, torch.full_like(like, start, device=_CPU))
        blanks[entry] = _Blank(tensor, meta)
    try:
        for entry, blank in blanks.items():
            blank.put(entry)
        yield blanks
    finally:
        for entry in entries:
            entry.put(entry.tensor)


def _parametrized(model: nn.Module, entry: Entry) -> str | None:
    """Return the parametrized module that this tensor is an original of; all of its originals are needed at once."""
    outer, found, _ = f".{entry.name}".partition(".parametrizations.")
    return outer[1:] if found and parametrize.is_parametrized(model.get_submodule(outer[1:])) else None


@contextmanager
def _as_plain(module: Any) -> Iterator[None]:
    """Let parametrized tensors be written to as if they were plain ones; then set the originals to what gives them."""
    with parametrize.cached():
        weights = {key: getattr(module, key).fill_(float("nan")) for key in module.parametrizations}
        yield
    for key, value in weights.items():
        for parametrization in reversed(module.parametrizations[key]):
            with suppress(AttributeError, NotImplementedError):  # torch takes it for the identity
                value = parametrization.right_inverse(value)
        for name, original in module.parametrizations[key].named_parameters(recurse=False):
            original.copy_(value if name == "original" else value[int(name.removeprefix("original"))])


def _number(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7])


@contextmanager
def _own_random_state() -> Iterator[None]:
    states = torch.get_rng_state(), random.getstate(), numpy.random.get_state()
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        numpy.random.set_state(states[2])
