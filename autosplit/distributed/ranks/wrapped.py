"""This rank's part of the model as modules, which ``parallelize=`` wraps, and whose parameters replicas share out.

    the model      layers.0.weight  ◄── set ──  layers.0.weight      a copy of each module: same names, same tensors
    between steps  a DTensor, this replica's shard                   what the optimizer has
    in a step      a plain parameter, gathered from all replicas     what cells compute with; gradients are scattered

The copies are what ``parallelize`` changes: the model keeps its modules, and gets the parameters that they hold at the
time, so that whatever reads the model's state by name needs to know nothing of it. Where the caller wraps modules, a
step has those in the places of the model's own, and its graph calls them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from autosplit.distributed.ranks.parallelize import Parallelize
from autosplit.distributed.units import Sharded, Units
from autosplit.distributed.world import World, attempt
from autosplit.errors import InputError, listed
from autosplit.recorded import SHARED
from autosplit.runtime.lower.split import Lowered
from autosplit.runtime.optimizers import refuse
from autosplit.tensor.part import PARTS
from autosplit.trace.borrowed.holders import HOOK_TABLES, Holders
from autosplit.trace.borrowed.values import difference

_TABLES = frozenset(SHARED) - {"_buffers"}
"""Attributes of a module that its copy does not share: hooks and tables, except for that of buffers."""
_WRAPPERS = ("_checkpoint_wrapped_module", "_orig_mod")
"""Under which names torch's wrappers for recomputing and compiling hold a module."""


class _NoDDP:
    """The attribute that DistributedDataParallel reads of every module that it wraps; reading it raises."""

    def __iter__(self) -> Iterator[str]:
        raise InputError("parallelize= wraps modules in DistributedDataParallel; replicas add up gradients without it")


class _Place(NamedTuple):
    """A parameter of the model and of the part, or a module, under one key in a module of each."""

    name: str
    module: nn.Module
    twin: nn.Module
    key: str


class WrappedPart:
    """This rank's part of a model, wrapped.

    Attributes:
        module: what ``parallelize`` returned.
        given_back: whether the model has plain parameters again.
        units: what gathers its parameters unit by unit; None: they are gathered once per step.
    """

    given_back = False
    units: Units | None = None

    def __init__(self, model: nn.Module, names: Collection[str], parallelize: Parallelize, world: World) -> None:
        """``names`` are the parameters and buffers that this rank holds."""
        before = {name: p for name, p in model.named_parameters(remove_duplicate=False) if name in names}
        self.module = parallelize.wrap(_copied(model, names))
        if not isinstance(self.module, nn.Module):
            raise InputError(f"parallelize= returned a {type(self.module).__name__}; return the part")
        self._model, self._world, self._by_units = model, world, parallelize.by_units
        self._dtype = None if parallelize.policy is None else parallelize.policy.param_dtype
        self._reduce_dtype = parallelize.reduce_dtype
        self._holders = world.holders(world.rank)
        self._places = _places(model, self.module, before)
        for slot in self._places:
            _keep_part(before[slot.name], getattr(slot.twin, slot.key))
        replaced = {p.name: before[p.name] for p in self._places if getattr(p.twin, p.key) is not before[p.name]}
        if hooked := [n for n, p in replaced.items() if p._backward_hooks or p._post_accumulate_grad_hooks]:
            raise InputError(
                f"{listed(hooked)} have hooks, and the model gets other parameters, of shards; register hooks on "
                "pipe.parameters(), after autosplit"
            )
        blocks = parallelize.blocks_of(model)
        _check_inside(blocks, model)
        self._calls = _calls(model, self.module, blocks, names) if parallelize.whole else []
        self._modes = _modes(model, self.module)
        self._runs = {path: _state(module) for slot in self._calls for path, module in self._inside(slot)}
        for unit in self._units():
            unit.set_reshard_after_forward(False)
            unit.set_reshard_after_backward(False)
            unit.set_requires_gradient_sync(False)
            unit.set_is_last_backward(False)
        self._set()
        kept = Holders([model]).tensors
        if stale := next((name for name, parameter in replaced.items() if id(parameter) in kept), None):
            for slot in self._places:
                setattr(slot.module, slot.key, before[slot.name])
            module = model.get_submodule(stale.rpartition(".")[0])
            if isinstance(module, nn.RNNBase):
                raise InputError(
                    f"{stale!r} is of {type(module).__name__}, whose kernel takes its weights from a list of its own, "
                    "and not shards; leave parallelize= out, or give a function that shards the other modules"
                )
            raise InputError(
                f"{'.'.join(filter(None, kept[id(before[stale])][0]))!r} holds {stale!r} too, and would not be its "
                "shard; read the parameter where the model has it"
            )
        self._storages = [self._storage(slot) for slot in self._places]
        refuse(replaced.values(), "parallelize= gave the model new parameters; make the optimizer of pipe.parameters()")

    @property
    def sharded(self) -> bool:
        """Whether it has shards of any parameter."""
        return any(isinstance(getattr(slot.twin, slot.key), DTensor) for slot in self._places)

    def check(self) -> None:
        """Raise InputError where gathered parameters are not those that the model had; all replicas call it."""
        before = [getattr(slot.twin, slot.key) for slot in self._places]
        for name, shard in zip((slot.name for slot in self._places), before, strict=True):
            ranks = set(shard.device_mesh.mesh.flatten().tolist()) if isinstance(shard, DTensor) else self._holders
            if ranks != self._holders:
                raise InputError(
                    f"parallelize= spreads {name!r} over ranks {sorted(ranks)}, and its replicas are ranks "
                    f"{sorted(self._holders)}; shard over the mesh's dp"
                )
        sharded = dict[str, Sharded]()
        for number, unit in enumerate(self._units()):
            with self._gathered(unit):
                for slot, shard in zip(self._places, before, strict=True):
                    if (whole := getattr(slot.twin, slot.key)) is not shard:
                        sharded[slot.name] = Sharded(number, shard, whole)
                        _keep_part(shard, whole)
        for slot, shard in zip(self._places, before, strict=True):
            if isinstance(shard, DTensor):
                gathered = sharded[slot.name].whole if slot.name in sharded else shard
                dtype = self._dtype if self._dtype is not None and shard.is_floating_point() else shard.dtype
                if isinstance(gathered, DTensor) or gathered.dtype != dtype or gathered.shape != shard.shape:
                    raise InputError(
                        f"parallelize= has {slot.name!r} of {shard.dtype} {list(shard.shape)} gathered as a "
                        f"{type(gathered).__name__} of {gathered.dtype} {list(gathered.shape)}; use fully_shard, and "
                        "for mixed precision parallelize='fsdp' with mp_policy=, or torch.autocast"
                    )
        if self._by_units:
            self.units = Units(list(self._units()), sharded, self._world, self._reduce_dtype)

    @staticmethod
    @contextmanager
    def _gathered(unit: FSDPModule) -> Iterator[None]:
        with torch.inference_mode(False):  # what is gathered into is trained, too
            unit.unshard()
        try:
            yield
        finally:
            unit.reshard()

    def check_step(self, lowered: Lowered) -> None:
        """Raise InputError where parameters were given back or set anew; else note what a step reads of its units."""
        if self.given_back:
            raise InputError("unsplit() gave the model plain parameters again, in the place of shards; split it anew")
        self.check_unchanged()
        if self.units is not None:
            self.units.note(lowered)

    def check_unchanged(self) -> None:
        """Raise InputError where the model has other tensors than its part."""
        named = dict(self._model.named_parameters(remove_duplicate=False))
        for slot, storage in zip(self._places, self._storages, strict=True):
            current = getattr(slot.twin, slot.key)
            if named.get(slot.name) is not current or self._storage(slot) is not storage:
                raise InputError(
                    f"{slot.name!r} was set to another tensor (by an assignment, .data or assign=True), which its "
                    "shards do not see; split anew, and change values in place or by pipe.load_state_dict()"
                )

        for path, current in (entry for slot in self._calls for entry in self._inside(slot)):
            if path not in self._runs or difference(self._runs[path], _state(current)):
                raise InputError(
                    f"{path!r} has other hooks or attributes than when parallelize= wrapped it, which its copy does "
                    "not see; set them before autosplit"
                )

    def _inside(self, slot: _Place) -> list[tuple[str, nn.Module]]:
        return list(self._model.get_submodule(slot.name).named_modules(prefix=slot.name))

    @staticmethod
    def _storage(slot: _Place) -> Any:
        """Return what tells that a sharded parameter is the one of before; ``.data =`` leaves its shard as it was."""
        shard = getattr(slot.twin, slot.key)
        return shard.untyped_storage() if isinstance(shard, DTensor) else None

    def _set(self) -> None:
        """Give the model the parameters that the part holds now."""
        for slot in self._places:
            setattr(slot.module, slot.key, getattr(slot.twin, slot.key))

    def _units(self) -> Iterator[FSDPModule]:
        return (module for module in self.module.modules() if isinstance(module, FSDPModule))

    @contextmanager
    def by_units(self, units: Units, names: Collection[str]) -> Iterator[dict[int, Tensor]]:
        """Have in the model the parameters that units are gathered to; those of ``names`` are gathered all the time.

        Returns the parameters by the identity of those that it has outside.
        """
        try:
            with units.gathered(names) as whole:
                for slot in self._places:
                    current = getattr(slot.module, slot.key)
                    setattr(slot.module, slot.key, whole.get(id(current), current))
                yield whole
        finally:
            self._set()

    @contextmanager
    def whole(self) -> Iterator[dict[int, Tensor]]:
        """Have whole parameters, and modules as they were wrapped, in the model.

        Returns the parameters by the identity of those that it has outside.
        """
        before = [getattr(slot.twin, slot.key) for slot in self._places]
        modules = [slot.module._modules[slot.key] for slot in self._calls]
        try:
            with torch.inference_mode(False):  # what is gathered into is trained, too
                for unit in self._units():
                    unit.unshard()
            self._set()
            for slot in self._calls:
                slot.module._modules[slot.key] = slot.twin
            for module, twin in self._modes:
                twin.training = module.training
            now = [getattr(slot.twin, slot.key) for slot in self._places]
            yield {id(shard): whole for shard, whole in zip(before, now, strict=True)}
        finally:
            for slot, called in zip(self._calls, modules, strict=True):
                slot.module._modules[slot.key] = called
            for unit in self._units():
                unit.reshard()
            self._set()

    def give_back(self) -> None:
        """Give the model plain parameters with the values, gradients and hooks of all shards; ties stay ties."""
        self.given_back = True
        whole: dict[int, nn.Parameter] = {}
        shards = {id(p): p for slot in self._places if isinstance(p := getattr(slot.twin, slot.key), DTensor)}
        for key, p in shards.items():
            whole[key] = nn.Parameter(p.full_tensor().detach(), p.requires_grad)
            whole[key].grad = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
            _keep_part(p, whole[key])
            whole[key]._backward_hooks = p._backward_hooks
            whole[key]._post_accumulate_grad_hooks = p._post_accumulate_grad_hooks
        for slot in self._places:
            if (parameter := whole.get(id(getattr(slot.twin, slot.key)))) is not None:
                setattr(slot.module, slot.key, parameter)
        refuse(shards.values(), "unsplit() gave the model other parameters; make the optimizer of model.parameters()")


def _keep_part(before: Tensor, now: Tensor) -> None:
    """Note that a parameter is the part over "tp" that the one in whose place it is was."""
    if before in PARTS:
        PARTS[now] = PARTS[before]


def _copied(model: nn.Module, names: Collection[str]) -> nn.Module:
    """Return copies of the modules that hold some tensors, which they share, of those above and of all inside them."""
    kept = {".".join(name.split(".")[:depth]) for name in names for depth in range(name.count(".") + 1)}
    copies: dict[int, nn.Module] = {}

    def copied(module: nn.Module, path: str, *, inside: bool) -> nn.Module:
        if id(module) in copies:
            return copies[id(module)]
        twin = copies[id(module)] = module.__new__(type(module))
        twin.__dict__.update({key: copy(v) if key in _TABLES else v for key, v in module.__dict__.items()})
        twin.__dict__["_ddp_params_and_buffers_to_ignore"] = _NoDDP()
        twin.__dict__["_parameters"] = {
            k: v for k, v in module._parameters.items() if v is None or f"{path}{k}" in names
        }
        children = [(key, child) for key, child in module._modules.items() if child is not None]
        held = [key for key, child in children if f"{path}{key}" in kept]
        bare = [key for key, child in children if not any(True for _ in child.parameters())]
        twin.__dict__["_modules"] = {
            key: copied(child, f"{path}{key}.", inside=True)
            for key, child in children
            if key in held or (inside and key in bare)
        }
        return twin

    return copied(model, "", inside=False)


def wrapped_part(
    model: nn.Module, names: Collection[str], parallelize: Parallelize, world: World
) -> tuple[WrappedPart, bool]:
    """Return this rank's part, wrapped, and whether that of any rank has shards; all ranks call it."""
    wrapped, error = attempt(lambda: WrappedPart(model, names, parallelize, world))
    sharded = world.agree("wraps its part of the model", {}, error, wrapped is not None and wrapped.sharded)
    assert wrapped is not None
    wrapped.check()
    return wrapped, any(sharded)


def _clean(name: str) -> str:
    """Return a name without those of torch's wrappers."""
    return ".".join(key for key in name.split(".") if key not in _WRAPPERS)


def _places(model: nn.Module, wrapped: nn.Module, before: Mapping[str, nn.Parameter]) -> list[_Place]:
    """Return where the parameters of a part are in the model; raise InputError where they are not the same ones."""
    holders = {
        _clean(f"{path}.{key}".lstrip(".")): (module, key)
        for path, module in wrapped.named_modules(remove_duplicate=False)
        for key, parameter in module._parameters.items()
        if parameter is not None
    }
    if differ := sorted(holders.keys() ^ before.keys()):
        raise InputError(
            f"parallelize= returned a module without or with other parameters than the part that it took: "
            f"{listed(differ)}; keep their names"
        )
    places = [_Place(n, model.get_submodule(n.rpartition(".")[0]), *holders[n]) for n in before]
    first: dict[int, tuple[str, Tensor]] = {}
    for slot in places:
        tied, now = first.setdefault(id(before[slot.name]), (slot.name, getattr(slot.twin, slot.key)))
        if now is not getattr(slot.twin, slot.key):
            raise InputError(
                f"{tied!r} and {slot.name!r} are one parameter in the model, and two after parallelize=; shard what "
                "holds both in one call of fully_shard"
            )
    return places


def _calls(model: nn.Module, wrapped: nn.Module, blocks: Collection[str], names: Collection[str]) -> list[_Place]:
    """Return the modules of a part that run by their call, and where they are in the model: blocks, and other layers.

    One of which another rank has a parameter is entered, since that one is tied.
    """
    modules: dict[str, nn.Module] = {}
    for path, module in wrapped.named_modules(remove_duplicate=False):
        modules.setdefault(_clean(path), module)  # a wrapper comes before what it holds
    calls = []
    for path, original in model.named_modules(remove_duplicate=False):
        layer = not original._modules and not any(path.startswith(f"{block}.") for block in blocks)
        held = all(f"{path}.{name}" in names for name, _ in original.named_parameters(remove_duplicate=False))
        if path in modules and held and path and (layer or path in blocks):
            parent, _, key = path.rpartition(".")
            calls.append(_Place(path, model.get_submodule(parent), modules[path], key))
    return calls


def _state(module: nn.Module) -> dict[Any, Any]:
    """Return the attributes of a module that decide what it computes, and the entries of its tables of hooks."""
    attributes = {key: value for key, value in module.__dict__.items() if key not in (*SHARED, "training")}
    hooks = {(table, key): hook for table in HOOK_TABLES for key, hook in module.__dict__[table].items()}
    return attributes | hooks


def _check_inside(blocks: Collection[str], model: nn.Module) -> None:
    """Raise InputError where a block refers to a module that it does not contain, whose parameters it may read."""
    for path in blocks:
        inside = set(model.get_submodule(path).modules())
        for module in inside:
            for key, value in _state(module).items():
                held = value.values() if isinstance(value, dict) else value
                for other in held if isinstance(value, dict | list | tuple) else (value,):
                    if isinstance(other, nn.Module) and other not in inside:
                        raise InputError(
                            f"{path!r} refers to a module outside of it by {key!r}, whose parameters would get no "
                            "gradient there; use parallelize='fsdp'"
                        )


def _modes(model: nn.Module, wrapped: nn.Module) -> list[tuple[nn.Module, nn.Module]]:
    """Return the modules of a model, each with one of the part that has its mode: a copy, or a wrapper of that."""
    named = dict(model.named_modules())
    pairs = ((named.get(_clean(path)), module) for path, module in wrapped.named_modules())
    return [(original, module) for original, module in pairs if original is not None]
