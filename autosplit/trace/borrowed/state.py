"""Borrow a model for a recording or a measurement and give it back exactly as it was.

The model itself runs in :func:`borrowed`, which undoes what a run writes. Where not even gradients and hooks of the
model's own may see a run, it runs on :func:`stand_ins`:

parameters               a new leaf on the same memory
buffers, other tensors   copies, which share memory where theirs do: what a forward writes is thrown away
"""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import random
import threading
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch
import torch.utils._pytree as pytree
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from autosplit.errors import InputError, TraceError
from autosplit.trace.borrowed.blank import fake
from autosplit.trace.borrowed.holders import Holders
from autosplit.trace.borrowed.hooks import silence
from autosplit.trace.borrowed.values import is_same_content
from autosplit.trace.inputs.objects import storage_key
from autosplit.trace.scope import has_hooks

RECORDING = threading.RLock()
"""Held while a model is recorded, where its modules hold stand-ins: that patches torch for the whole process."""
_AROUND: ContextVar[tuple[tuple[Sequence[Any], Holders, list[Any]], ...]] = ContextVar("borrowed", default=())
"""What is borrowed around this: modules and functions, where their state lives, and its contents inside."""
_SMALL = 1 << 22
"""Elements of a tensor that is copied wherever it is held."""
_QUIETED = (nn.modules.batchnorm._NormBase, nn.modules.dropout._DropoutNd)


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Do without Python's collector of cycles, which would go through all that a recording makes again and again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextlib.contextmanager
def random_state() -> Iterator[None]:
    """Restore the random states of torch, Python and numpy at the end."""
    python, numpy = random.getstate(), np.random.get_state()
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


def random_states() -> tuple[bytes, bytes]:
    """Return the states of torch's generator, and of Python's and numpy's."""
    python = pickle.dumps((random.getstate(), np.random.get_state()))
    return torch.get_rng_state().numpy().tobytes(), python


@contextlib.contextmanager
def attributes(*models: nn.Module, functions: Iterable[Callable[..., Any]] = ()) -> Iterator[Holders]:
    """Restore every module's attributes, tables, hooks and class at the end; yield where all of that lives.

    It restores all Python state in :class:`autosplit.trace.borrowed.holders.Holders`, also outside of the modules, the
    contents of tensors that are held there, and the ``data`` of parameters and buffers; not what is written to the
    memory of these. The caller's hooks that only observe are not called. The code of ``functions`` counts as the
    models'. Raises InputError where a tensor was written to that is too large to be copied.

    What borrows the same again inside does not walk through it again, as long as all is as it was.
    """
    holders, before = _walk(models, functions := [*functions])
    tensors = [t for model in models for t in (*model.parameters(), *model.buffers())]
    data = [(tensor, tensor.data) for tensor in tensors if _has_memory(tensor)]
    copyable, kept = _copyable(holders, models), {id(tensor) for tensor in tensors}
    large = [
        (name, tensor, tensor._version)
        for name, tensor in holders.named_tensors()
        if id(tensor) not in copyable | kept and not tensor.is_inference()
    ]
    held = contents([tensor for _, tensor in holders.tensors.values() if id(tensor) in copyable])
    inside: list[Any] = []
    with held:
        around = _AROUND.set((*_AROUND.get(), ((*models, *functions), holders, inside)))
        try:
            holders.stand_in(before)
            silence(holders.hook_tables)
            inside += holders.read()
            yield holders
        finally:
            _AROUND.reset(around)
            holders.write(before)
            for tensor, memory in data:
                if not is_on(tensor, memory):
                    tensor.data = memory
    for name, tensor, version in large:
        if tensor._version != version:
            raise InputError(
                f"the forward writes in place to {name}, whose {tensor.numel():,} elements are too many to be copied "
                "and put back while the model is recorded; make it a buffer (register_buffer) or a module's attribute"
            )


def _has_memory(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor lies in memory of its own: also one of a class that only adds to it, as packed weights."""
    plain = type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__ and not nn.parameter.is_lazy(tensor)
    return plain and tensor.layout is torch.strided


def _walk(models: Sequence[nn.Module], functions: Sequence[Callable[..., Any]]) -> tuple[Holders, list[Any]]:
    """Return where Python state lives, and its contents; what is borrowed around this is not walked through again."""
    for roots, holders, contents in reversed(_AROUND.get()):
        if contents and is_same_content(roots, (*models, *functions)) and holders.is_as(contents):
            return copy.copy(holders), contents
    with no_collection():
        holders = Holders(models, functions)
        return holders, holders.read()


def _copyable(holders: Holders, models: Iterable[nn.Module]) -> set[int]:
    """Return the ids of the held tensors that may be copied: large ones in lists and objects may be all the weights."""
    owners = (owner for model in models for owner in (*model.modules(), *model.parameters()))
    direct = {id(value) for owner in owners for value in vars(owner).values()}
    held = (tensor for _, tensor in holders.tensors.values())
    return {id(tensor) for tensor in held if tensor.numel() <= _SMALL or id(tensor) in direct}


def is_on(tensor: torch.Tensor, data: torch.Tensor) -> bool:
    """Tell whether a tensor still lies where its ``data`` lay."""
    if tensor.layout is not torch.strided:  # it has no strides to compare
        return True
    same = storage_key(tensor) == storage_key(data)
    return same and tensor.shape == data.shape and tensor.stride() == data.stride()


@contextlib.contextmanager
def borrowed(*models: nn.Module) -> Iterator[Holders]:
    """Restore random states, attributes, gradients and what changed in tensors; yield where Python state lives.

    The tensors are buffers, tables with ``max_norm``, and those of :func:`attributes`.
    """
    tensors = [t for model in models for t in (*model.buffers(), *_renormed(model))]
    leaves = [parameter for model in models for parameter in model.parameters()]
    with random_state(), attributes(*models) as holders, contents(tensors), gradients_aside(leaves):
        yield holders


def _renormed(model: nn.Module) -> list[torch.Tensor]:
    """Return the weights that a forward changes: those of tables with ``max_norm``."""
    tables = (m for m in model.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag)))
    return [table.weight for table in tables if table.max_norm is not None]


@contextlib.contextmanager
def contents(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Restore tensors at the end; what did not change is not written, so that graphs stay valid for their backward.

    Those on meta have nothing to restore, nor have fake ones, which a function of the recording's may hold.
    """
    real = [t for t in tensors if not (t.is_meta or isinstance(t, FakeTensor))]
    constant = [t for t in real if not (t.requires_grad or t._is_view())]
    saved = [(t, t.detach().clone(), None if t.layout is torch.strided else t._version) for t in real]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, content, version in saved:
                # sparse tensors cannot be compared
                changed = not torch.equal(tensor, content) if version is None else tensor._version != version
                if changed:
                    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
                        tensor.copy_(content)
            for tensor in constant:
                if tensor.requires_grad:
                    tensor.detach_()


def norm_dropout_eval(model: nn.Module) -> None:
    """Put torch.nn's layers in eval mode, inside of :func:`attributes`.

    Norm layers then use their running statistics and dropout draws nothing, while the model's own modules, and layers
    with hooks, keep the mode that decides what their Python does.
    """
    for module in model.modules():
        layer = type(module).__module__.startswith("torch.nn")
        if isinstance(module, _QUIETED) or (layer and (hasattr(module, "dropout") or not has_hooks(module))):
            module.training = False


def fake_tensors(
    model: nn.Module, mode: FakeTensorMode | None, holders: Holders, *, device: torch.device | None
) -> dict[int, torch.Tensor]:
    """Replace parameters and buffers by fake ones, inside of :func:`attributes`; return the real ones by their ids.

    Without a mode they stay as they are. With a device all of them are taken to lie there, wherever they are held.
    """
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule) and [*module.parameters(), *module.buffers()]:
            raise TraceError(
                f"module {path or 'root'!r} is TorchScript and has parameters or buffers, which no graph can hand "
                "to it; use the module that was scripted"
            )
    named = (*model.named_parameters(), *model.named_buffers())
    for name, tensor in named:
        if tensor.layout not in (torch.strided, torch.sparse_coo):
            layout = str(tensor.layout).removeprefix("torch.")
            raise TraceError(
                f"{name} is a {layout} tensor, which cannot be recorded; a sparse_coo tensor can: keep it so"
            )
    if mode is None:
        return {id(tensor): tensor for _, tensor in named}
    pairs = [(tensor, _twin(_with_own_gradient(tensor), mode, device)) for _, tensor in named]
    for tensor, twin in pairs:
        twin.grad = None
        vars(twin).update(vars(tensor))
    holders.swap(pairs)
    return {id(twin): tensor for tensor, twin in pairs}


def _twin(tensor: torch.Tensor, mode: FakeTensorMode, device: torch.device | None) -> torch.Tensor:
    return mode.from_tensor(tensor, static_shapes=True) if device is None else fake(tensor, mode, device)


def _with_own_gradient(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor; where its data was replaced by data of another size, one of the same data and no gradient."""
    if not tensor.is_leaf or tensor.grad is None or tensor.grad.shape == tensor.shape:
        return tensor
    return nn.Parameter(tensor.detach(), tensor.requires_grad)


# -- stand-ins ---------------------------------------------------------------------------------------------------------
@contextlib.contextmanager
def stand_ins(
    model: nn.Module, *others: nn.Module, written: Collection[str] = (), registered: bool = False
) -> Iterator[tuple[dict[str, torch.Tensor], Holders]]:
    """Put stand-ins in the places of a model's tensors; yield those that require gradients, and where state lives.

    Parameters named in ``written``, and tables with ``max_norm``, are copied: a forward changes them. ``others`` are
    modules that hold some of the same tensors as plain attributes. With ``registered`` only parameters and buffers are
    replaced, wherever they are held; else also what :func:`attributes` copies, and what requires gradients. All
    attributes are as before at the end.
    """
    with attributes(model) as holders, attributes(*others) as other_holders:
        named = [*model.named_parameters(), *model.named_buffers()]
        copied = {id(t) for t in _renormed(model)} | {id(t) for name, t in named if name in written}
        if not registered:
            copyable = _copyable(holders, [model])
            named += [(name, t) for name, t in holders.named_tensors() if t.requires_grad or id(t) in copyable]
        kept = (p for p in model.parameters() if p.layout is torch.strided and id(p) not in copied)
        storages = {storage_key(p): p.untyped_storage() for p in kept}  # other tensors may share a parameter's memory
        stands: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        leaves: dict[str, torch.Tensor] = {}
        for name, tensor in named:
            plain = type(tensor) in (torch.Tensor, nn.Parameter) and tensor.is_leaf and not tensor.is_inference()
            if plain and id(tensor) not in stands:
                stand_in = _stand_in(tensor, storages, copied=id(tensor) in copied)
                stands[id(tensor)] = tensor, stand_in
                if stand_in.requires_grad:
                    leaves[name] = stand_in
        holders.swap(stands.values())
        other_holders.swap(stands.values())
        yield leaves, holders


def _stand_in(tensor: torch.Tensor, storages: dict[int, Any], *, copied: bool) -> torch.Tensor:
    data = tensor.detach()
    if copied:
        data = data.clone()
    elif not (isinstance(tensor, nn.Parameter) or tensor.requires_grad):
        data = _copy(data, storages)
    result = nn.Parameter(data, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else data
    result.requires_grad_(tensor.requires_grad)
    result.__dict__.update(tensor.__dict__)
    return result


def _copy(data: torch.Tensor, storages: dict[int, Any]) -> torch.Tensor:
    """Return a copy that shares memory with the copies of other tensors on the same ``storages``."""
    if data.is_meta or data.layout is not torch.strided:
        return data.clone()
    key = storage_key(data)
    if key not in storages:
        storages[key] = data.untyped_storage().clone()
    empty = torch.empty(0, dtype=data.dtype, device=data.device)
    return empty.set_(storages[key], data.storage_offset(), data.shape, data.stride())


def free_leaves(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors that require gradients and are no parameters, by the names that stand-ins have too."""
    registered = {id(t) for t in (*model.parameters(), *model.buffers())}
    held = Holders([model]).named_tensors()
    return {name: t for name, t in held if t.requires_grad and t.is_leaf and id(t) not in registered}


@contextlib.contextmanager
def eval_mode(model: nn.Module, *others: nn.Module) -> Iterator[None]:
    """Have a model in eval mode, by its own ``eval()``; at the end every module is in its own mode again.

    ``others`` get the same flag. A module with a ``train()`` of its own (one that merges weights for eval mode, say)
    is told to go back by it.
    """
    flags = [(module, module.training) for module in (*model.modules(), *others)]
    try:
        if any(training for _, training in flags):
            model.eval()
            for other in others:
                other.__dict__["training"] = False
        yield
    finally:
        for module, training in flags:
            if training != module.training and type(module).train is not nn.Module.train and module not in others:
                module.train(training)
        for module, training in flags:
            if "training" not in vars(module):  # a scripted module keeps it elsewhere
                module.training = training
            elif module.training != training:
                vars(module)["training"] = training


@contextlib.contextmanager
def gradients_aside(leaves: Iterable[torch.Tensor]) -> Iterator[None]:
    """Give leaves no gradients inside, and their own back at the end.

    A gradient that is not like its leaf, whose data was replaced, stays: it could not be put back.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
        gradients = [(leaf, leaf.grad) for leaf in leaves]
    saved = [(t, g) for t, g in gradients if g is None or (g.shape, g.dtype, g.device) == (t.shape, t.dtype, t.device)]
    for leaf, _ in saved:
        leaf.grad = None
    try:
        yield
    finally:
        for leaf, gradient in saved:
            leaf.grad = gradient


@contextlib.contextmanager
def left_alone(model: nn.Module, inputs: Any) -> Iterator[None]:
    """Run steps that leave no trace: gradients, buffers, attributes, what is given and random states are as before.

    Gradients are None inside.
    """
    modules = [model, *(leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, nn.Module))]
    tensors = [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, torch.Tensor)]
    with borrowed(*modules), contents(tensors), gradients_aside(dict.fromkeys(t for t in tensors if t.is_leaf)):
        yield


@contextlib.contextmanager
def random_state_on_refusal() -> Iterator[None]:
    """Restore torch's random state when arguments are refused: what was drawn for the step was drawn for nothing."""
    before = torch.get_rng_state()
    try:
        yield
    except InputError:
        torch.set_rng_state(before)
        raise
