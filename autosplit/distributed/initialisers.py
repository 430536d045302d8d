"""A model's initialisers, run for the tensors of one module at a time.

Constructors cannot run again, but what they call can: methods of the modules, from the inside out, as those outside
write to what is inside. While they run, one module's own tensors are on the CPU and all others on meta, where a write
does nothing and draws nothing::

    root              calls for the tensors of "blocks.0.fc"
      blocks.0          blocks.0.fc.reset_parameters()
        fc              root._init_weights(blocks.0.fc)
      blocks.1          root._init_weights(blocks.0)
        fc              root._init_weights(root)

The random state is seeded with that module's name before, so no value depends on which others are asked for.
"""

from __future__ import annotations

import hashlib
import inspect
import random
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor, nn
from torch.fx.node import map_aggregate
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode

from autosplit.distributed import constructors
from autosplit.distributed.places import TensorEntry, replacement
from autosplit.errors import InputError, listed

_META, _CPU = torch.device("meta"), torch.device("cpu")
_WITH_NAN = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_OWN = ("reset_parameters", "_reset_parameters"), ("init_non_persistent_buffers",)
"""Methods for what a module holds itself: of torch and others, and of timm."""
_WHOLE = "initialize_weights", "init_weights"
"""Methods for all that is in a module: of transformers and MAE, and of timm, torchtitan and others."""
_INITIALISERS = (*_OWN[0], *_OWN[1], *_WHOLE, "_init_weights")
_WAY_OUT = (
    "give weights= that hold it, or give the model an init_weights() that sets all it has, or build it on a real device"
)


class _Call(NamedTuple):
    """A call of a module's initialiser, which writes to the tensors of the module ``name``.

    ``tied``: constructors call it after tensors were tied. ``counted``: the module's constructor may call it; how often
    the constructor wrote to the tensors tells whether it did, and with these arguments.
    """

    name: str
    module: nn.Module
    method: str
    arguments: tuple[Any, ...] = ()
    tied: bool = False
    counted: bool = False


def initial_values(
    model: nn.Module,
    entries: list[TensorEntry],
    wanted: list[TensorEntry],
    seed: int,
    device: torch.device,
    kept: Callable[[str, Tensor], Tensor] | None = None,
) -> dict[TensorEntry, Tensor]:
    """Return the initial values of ``wanted`` on a device, or what is kept of them; the model is left as it was.

    Raises InputError for those that are not filled, or had been written to more often than here.
    """
    groups: dict[str, list[TensorEntry]] = defaultdict(list)
    for entry in entries:
        groups[_owner(model, entry)].append(entry)
    calls = list(_calls(model))
    kinds = {kind for kind in set(map(type, model.modules())) if constructors.writes_data(kind, _INITIALISERS)}
    hidden = [name for name, module in model.named_modules() if type(module) in kinds]
    values: dict[TensorEntry, Tensor] = {}
    unfilled: list[str] = []
    unknown: list[str] = []
    with _on_meta(entries):
        for owner in dict.fromkeys(_owner(model, entry) for entry in wanted):
            drafts = _filled(model, groups[owner], calls, f"{seed}:{owner}")
            for draft in drafts:
                entry = draft.entry
                if entry in wanted and not draft.is_filled:
                    unfilled.append(entry.shown)
                elif entry in wanted and (draft.written_more > 0 or any(_is_inside(owner, name) for name in hidden)):
                    unknown.append(entry.shown)
                elif entry in wanted:
                    value = draft.value.detach().to(device, entry.tensor.dtype)
                    values[entry] = value if kept is None else kept(entry.name, value)
    if unfilled:
        raise InputError(f"no initialiser fills {listed(unfilled)} of a model on meta: {_WAY_OUT}")
    if unknown:
        raise InputError(
            f"the constructor of a model on meta, or who called it, has written to {listed(unknown)} by .data, or "
            f"more often than its initialisers do, and what was written is not known: {_WAY_OUT}"
        )
    return values


def _owner(model: nn.Module, entry: TensorEntry) -> str:
    """Return the module that initialises a tensor: the one that holds it, or the one that it parametrizes."""
    outer, separator, _ = f".{entry.name}".partition(".parametrizations.")
    if separator and parametrize.is_parametrized(model.get_submodule(outer[1:])):
        return outer[1:]
    return entry.name.rpartition(".")[0]


# -- what is called --------------------------------------------------------------------------------------------------
def _calls(model: nn.Module) -> Iterator[_Call]:
    """Yield the initialisers in the order in which constructors call them, children first.

    Models of transformers, which have ``_initialize_weights``, initialise all that is inside, other such models too,
    before weights are tied. ``_init_weights(module)`` of others gets all that is inside, by ``apply`` or, with names,
    by timm's ``named_apply``; ``init_weights()`` stands for that where there is one.
    """
    hf = [module for module in model.modules() if hasattr(module, "_initialize_weights")]
    copies = any(map(constructors.copies, set(map(type, model.modules()))))
    in_hf = {inner for outer in hf for inner in outer.modules() if inner is not outer}
    for name, module in _children_first("", model):
        for methods in _OWN:
            yield from [_Call(name, module, method) for method in methods if _required(module, method) == 0][:1]
        if module in in_hf:
            continue
        if whole := [method for method in _WHOLE if _required(module, method) == 0]:
            plain = module not in hf
            yield _Call(
                name,
                module,
                whole[0],
                tied=plain,
                counted=plain and not copies and constructors.calls(type(module), whole[0]),
            )
        elif (number := _required(module, "_init_weights")) in (1, 2):
            counted = not copies and constructors.calls(type(module), "_init_weights")
            for path, inner in _children_first("", module):
                full = f"{name}.{path}".strip(".")
                yield _Call(full, module, "_init_weights", (inner, path)[:number], tied=True, counted=counted)


def _children_first(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for key, child in module.named_children():
        yield from _children_first(f"{name}.{key}".lstrip("."), child)
    yield name, module


def _required(module: nn.Module, method: str) -> int | None:
    """Return the number of required arguments of a method of a module's class; None if the class has no such method."""
    if not inspect.isfunction(getattr(type(module), method, None)):
        return None
    parameters = inspect.signature(getattr(module, method)).parameters.values()
    return sum(p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)


# -- what is written -------------------------------------------------------------------------------------------------
class _Draft:
    """The value of a tensor while initialisers run: on the CPU, and NaN at first if its dtype has NaN."""

    def __init__(self, entry: TensorEntry, device: torch.device) -> None:
        start = torch.full_like(entry.tensor, float("nan") if entry.tensor.dtype in _WITH_NAN else 0, device=device)
        self.entry, self._meta = entry, entry.places[0].get()
        self.value = self._start = replacement(entry.tensor, start)

    @property
    def is_filled(self) -> bool:
        """Whether every element of a floating-point tensor was written; for other dtypes, whether any was."""
        if self.value.is_meta or self.value.shape != self.entry.tensor.shape:
            return False
        if self.value.dtype in _WITH_NAN:
            return not (self.value.numel() and bool(self.value.amax().isnan()))
        return self.value is not self._start or self._start._version > 0

    @property
    def written_more(self) -> int:
        """How many more writes the constructor made than the calls; 0 if that is unknown."""
        tensor, paths = self.entry.tensor, self.entry.name.split(".")
        counted = self.value is self._start and "parametrizations" not in paths and not tensor.is_inference()
        return tensor._version - self._start._version if counted else 0

    def put(self, *, tied: bool) -> None:
        """Put the tensor where initialisers write to it: in its first place only, as long as it is not ``tied``."""
        for holder in self.entry.places if tied else self.entry.places[:1]:
            holder.set(self.value)

    def take(self) -> None:
        """Keep the tensor as a call left it, or the one that the call put in its place."""
        if (now := self.entry.places[0].get()) is not self._meta:
            self.value = now
        self.entry.put(self._meta)


def _filled(model: nn.Module, entries: list[TensorEntry], calls: list[_Call], seed: str) -> list[_Draft]:
    """Return the tensors of one module, filled by the calls that its constructor made.

    Whether it made the ``counted`` calls follows from how often it wrote to the tensors on meta. If it wrote as often
    as the other calls do, and less often than all calls do, it did not make the counted ones, or without any effect.
    """
    drafts = _written(model, entries, calls, seed)
    sure = [call for call in calls if not call.counted]
    if len(sure) == len(calls) or all(draft.written_more >= 0 for draft in drafts):
        return drafts
    on_meta = [[d.written_more for d in _written(model, entries, some, seed, _META)] for some in (calls, sure)]
    fewer = _written(model, entries, sure, seed)
    numbers = zip(*on_meta, fewer, drafts, strict=True)
    return [few if more < 0 and not less and few.is_filled else draft for more, less, few, draft in numbers]


def _written(
    model: nn.Module, entries: list[TensorEntry], calls: list[_Call], seed: str, device: torch.device = _CPU
) -> list[_Draft]:
    """Return the tensors of one module after calls; on meta they count their writes, and have no values."""
    drafts = [_Draft(entry, device) for entry in entries]
    with _seeded(seed):
        _fill(model, drafts, calls)
    return drafts


def _is_inside(name: str, outer: str) -> bool:
    """Tell whether a module is ``outer`` or inside of it."""
    return f"{name}.".startswith(f"{outer}." if outer else "")


def _fill(model: nn.Module, drafts: list[_Draft], calls: list[_Call]) -> None:
    """Make the calls that may write to some tensors; raise InputError where one fails."""
    paths = [holder.name.split(".")[:-1] for draft in drafts for holder in draft.entry.places]
    around = {".".join(path[:end]) for path in paths for end in range(len(path) + 1)}
    for call in (call for call in calls if call.name in around):
        plain = call.method in _OWN[0] and parametrize.is_parametrized(call.module)
        for draft in drafts:
            draft.put(tied=call.tied)
        try:
            with _CPU, _Neighbours(), _around(model, around), _as_plain(call.module) if plain else nullcontext():
                getattr(call.module, call.method)(*call.arguments)
        except Exception as error:
            raise InputError(
                f"{type(call.module).__name__}.{call.method}() of {call.name or 'the model'!r} failed with "
                f"{type(error).__name__}: {error}, when it initialised one part of a model on meta: {_WAY_OUT}"
            ) from error
        for draft in drafts:
            draft.take()


@contextmanager
def _around(model: nn.Module, names: Collection[str]) -> Iterator[None]:
    """Mark all modules except ``names`` as initialised for transformers, which then skips them."""
    for name, module in model.named_modules(remove_duplicate=False):
        vars(module)["_is_hf_initialized"] = name not in names
    try:
        yield
    finally:
        for module in model.modules():
            vars(module).pop("_is_hf_initialized")


class _Neighbours(TorchFunctionMode):
    """Lets initialisers meet tensors on meta: what they make on the device of one is on the CPU, and can go to it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        first = next((arg for arg in args if isinstance(arg, Tensor)), None)
        if first is None and kwargs.get("device") == _META:
            kwargs = {**kwargs, "device": _CPU}
        elif first is not None and first.is_meta:
            args = map_aggregate(args, lambda arg: arg.to(_META) if isinstance(arg, Tensor) else arg)
        return func(*args, **kwargs)


@contextmanager
def _as_plain(module: Any) -> Iterator[None]:
    """Let parametrized tensors be written to as if they were plain ones; then set the originals to what gives them."""
    with parametrize.cached():
        weights = {key: getattr(module, key).fill_(float("nan")) for key in module.parametrizations}
        yield
    for key, weight in weights.items():
        setattr(module, key, weight)


@contextmanager
def _on_meta(entries: list[TensorEntry]) -> Iterator[None]:
    """Let the model hold stand-ins on meta, so that nothing is written to its own tensors."""
    try:
        for entry in entries:
            entry.put(replacement(entry.tensor, torch.empty_like(entry.tensor, device=_META)))
        yield
    finally:
        for entry in entries:
            entry.put(entry.tensor)


@contextmanager
def _seeded(text: str) -> Iterator[None]:
    """Seed what initialisers draw from, and leave the caller's random state as it was."""
    number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4])
    states = random.getstate(), numpy.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(number)  # torch.manual_seed would reach those of all devices
            random.seed(number)
            numpy.random.seed(number)
            yield
    finally:
        random.setstate(states[0])
        numpy.random.set_state(states[1])
