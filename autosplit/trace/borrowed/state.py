"""Borrow a model for a recording or a measurement and give it back exactly as it was."""

from __future__ import annotations

import contextlib
import random
import types
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.utils._pytree as pytree
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from autosplit.errors import InputError, TraceError
from autosplit.trace.borrowed.holders import Holders
from autosplit.trace.inputs.objects import storage_key
from autosplit.trace.scope import silence

QUIETED = (nn.modules.batchnorm._NormBase, nn.modules.dropout._DropoutNd)
_PLAIN = frozenset((bool, int, float, str, type(None), types.FunctionType, types.MethodType, dict, OrderedDict, set))
"""Types of which it is known without a look that their objects are no tensors."""
_SMALL = 1 << 22


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


@contextlib.contextmanager
def attributes(*models: nn.Module, functions: Iterable[Callable[..., Any]] = ()) -> Iterator[Holders]:
    """Restore every module's attributes, tables, hooks and class at the end; yield where all of that lives.

    Restored is all Python state in :class:`autosplit.trace.borrowed.holders.Holders`, which reaches outside of the
    modules too, what is written inside to small tensors that are held there, and which ``data`` parameters and buffers
    have; what is written to these is not. Hooks of the caller's that only observe are not called inside. ``functions``
    run there too.
    """
    holders = Holders(models, functions)
    before = holders.read()
    outside = [t for t in holders.tensors.values() if t.numel() <= _SMALL and t.layout is torch.strided]
    data = data_of(models)
    with contents(outside):
        try:
            holders.stand_in()
            silence(holders.hook_tables)
            yield holders
        finally:
            for holder, content in zip(holders.found, before, strict=True):
                holder.write(content)
            for tensor, own in data:
                if not is_on(tensor, own):
                    tensor.data = own


def data_of(models: Iterable[nn.Module]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the parameters and buffers of models, each with its ``data``."""
    tensors = [t for model in models for t in (*model.parameters(), *model.buffers())]
    return [(t, t.data) for t in tensors if type(t) in (nn.Parameter, torch.Tensor) and t.layout is torch.strided]


def is_on(tensor: torch.Tensor, data: torch.Tensor) -> bool:
    """Tell whether a tensor still lies where its ``data`` lay."""
    same = tensor.untyped_storage()._cdata == data.untyped_storage()._cdata
    return same and tensor.shape == data.shape and tensor.stride() == data.stride()


@contextlib.contextmanager
def buffer_contents(model: nn.Module) -> Iterator[None]:
    """Restore what changed in buffers, in tensors held as attributes and in tables with ``max_norm`` at the end."""
    tables = [m for m in model.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag)) and m.max_norm is not None]
    with contents([*model.buffers(), *attribute_tensors(model), *(table.weight for table in tables)]):
        yield


@contextlib.contextmanager
def contents(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Restore tensors at the end; what did not change is not written, so that graphs stay valid for their backward.

    Those on meta have nothing to restore, nor have fake ones, which a function of the recording's may hold.
    """
    real = [t for t in tensors if not (t.is_meta or isinstance(t, FakeTensor))]
    saved = [(t, t.detach().clone(), t._version) for t in real]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, content, version in saved:
                if tensor.layout is torch.strided:
                    changed = not torch.equal(tensor, content)
                else:
                    changed = tensor._version != version  # sparse tensors cannot be compared
                if changed:
                    tensor.copy_(content)


def places(model: nn.Module) -> dict[str, bool]:
    """Return the names of all modules, parameters and buffers, and for each whether there is one with a shape."""
    found = dict.fromkeys((f"module {path}" for path, _ in model.named_modules()), True)
    for path, module in model.named_modules():
        if not isinstance(module, torch.jit.ScriptModule):
            for table in ("_parameters", "_buffers"):
                for name, tensor in module.__dict__[table].items():
                    exists = tensor is not None and not nn.parameter.is_lazy(tensor)
                    found[f"{path}.{name}" if path else name] = exists
    return found


def attribute_tensors(model: nn.Module) -> list[torch.Tensor]:
    """Return the tensors that modules hold as plain attributes."""
    values = (v for m in model.modules() for v in m.__dict__.values() if type(v) not in _PLAIN)
    return [v for v in values if isinstance(v, torch.Tensor)]


@contextlib.contextmanager
def norm_dropout_eval(model: nn.Module) -> Iterator[bool]:
    """Put torch.nn's layers in eval mode, and every module back in its own at the end; yield whether any was not.

    Norm layers then use their running statistics and dropout draws nothing, while the model's own modules keep the mode
    that decides what their Python does.
    """
    flags = [(m, m.training) for m in model.modules()]
    loud = False
    for module, training in flags:
        if training and (type(module).__module__.startswith("torch.nn") or isinstance(module, QUIETED)):
            loud, module.training = True, False
    try:
        yield loud
    finally:
        for module, flag in flags:
            module.training = flag


@contextlib.contextmanager
def fake_tensors(model: nn.Module, mode: FakeTensorMode) -> Iterator[dict[int, torch.Tensor]]:
    """Replace parameters and buffers by fake ones, inside of :func:`attributes`; yield the real ones by their ids."""
    real: dict[int, torch.Tensor] = {}
    twins: dict[int, torch.Tensor] = {}
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            if any(True for _ in module.parameters()) or any(True for _ in module.buffers()):
                raise TraceError(
                    f"module {path or 'root'!r} is TorchScript and has parameters or buffers, which no graph can hand "
                    "to it; use the module that was scripted"
                )
            continue
        for table in ("_parameters", "_buffers"):
            entries = module.__dict__[table]
            for name, tensor in entries.items():
                if tensor is not None and tensor.layout not in (torch.strided, torch.sparse_coo):
                    layout = str(tensor.layout).removeprefix("torch.")
                    raise TraceError(
                        f"{f'{path}.{name}' if path else name} is a {layout} tensor, which cannot be recorded; "
                        "a sparse_coo tensor can: keep it so"
                    )
                if tensor is not None:
                    own = twins.setdefault(id(tensor), _with_own_gradient(tensor))
                    entries[name] = mode.from_tensor(own, static_shapes=True)
                    real[id(entries[name])] = tensor
    yield real


def _with_own_gradient(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor; where its data was replaced by data of another size, one of the same data and no gradient."""
    if not tensor.is_leaf or tensor.grad is None or tensor.grad.shape == tensor.shape:
        return tensor
    return nn.Parameter(tensor.detach(), tensor.requires_grad)


# -- writes to parameters ----------------------------------------------------------------------------------------------
@contextlib.contextmanager
def written_back(model: nn.Module) -> Iterator[Collection[Any]]:
    """Undo what is written to a model's parameters in here; yield what was, as it grows.

    Copies of all of them would not fit; buffers are small, see
    :func:`autosplit.trace.borrowed.state.buffer_contents`.
    """
    writes = _Writes(model.parameters())
    try:
        with writes:
            yield writes.saved
    finally:
        writes.give_back()


class _Writes(TorchDispatchMode):
    """Copies each parameter before the first operation that writes to it.

    ``TorchDispatchMode`` lives in a private module; there is no public name for it (tried on torch 2.11 to 2.15).
    """

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.storages: dict[int, torch.Tensor] = {}
        self.saved: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for parameter in parameters:
            self.storages.setdefault(storage_key(parameter), parameter)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            self._written(func, args, kwargs)
        return func(*args, **kwargs)

    def _written(self, func: Any, args: Any, kwargs: Any) -> None:
        for number, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            value = args[number] if number < len(args) else kwargs.get(argument.name)
            for leaf in pytree.tree_leaves(value):
                owner = self.storages.get(storage_key(leaf)) if isinstance(leaf, torch.Tensor) else None
                if owner is not None and id(owner) not in self.saved:
                    self.saved[id(owner)] = owner, owner.detach().clone()

    def give_back(self) -> None:
        """Undo what was written."""
        with torch.no_grad():
            for owner, content in self.saved.values():
                owner.data.copy_(content)


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
            if module.training != training:
                module.__dict__["training"] = training


@contextlib.contextmanager
def gradients_aside(leaves: Iterable[torch.Tensor]) -> Iterator[None]:
    """Give leaves no gradients inside, and their own back at the end.

    A gradient of another shape than its leaf's, whose data was replaced, stays: it could not be put back.
    """
    gradients = [(leaf, leaf.grad) for leaf in leaves]
    saved = [(leaf, gradient) for leaf, gradient in gradients if gradient is None or gradient.shape == leaf.shape]
    for leaf, _ in saved:
        leaf.grad = None
    try:
        yield
    finally:
        for leaf, gradient in saved:
            leaf.grad = gradient


@contextlib.contextmanager
def left_alone(model: nn.Module, given: Any) -> Iterator[None]:
    """Run steps that leave no trace: gradients, buffers, attributes, what is given and random states are as before.

    Gradients are None inside.
    """
    modules = [model, *(leaf for leaf in pytree.tree_leaves(given) if isinstance(leaf, nn.Module))]
    tensors = [leaf for leaf in pytree.tree_leaves(given) if isinstance(leaf, torch.Tensor)]
    leaves = [leaf for leaf in tensors if leaf.is_leaf]
    leaves += [parameter for module in modules for parameter in module.parameters()]
    with contextlib.ExitStack() as stack:
        stack.enter_context(random_state())
        stack.enter_context(contents(tensors))
        stack.enter_context(attributes(*modules))
        for module in modules:
            stack.enter_context(buffer_contents(module))
        stack.enter_context(gradients_aside(dict.fromkeys(leaves)))
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
