"""Watch a model's own forward: does anything in it hang on more than the rows that it is given?

    torch operations     random draws, values that Python reads, sizes that hang on values, writes to the model's state
    attributes           what the forward sets on a module, also when it sets it back
    Python's state       lists, dicts and objects that modules hold, their classes, torch's global switches

A model in which nothing of this is seen runs the same operations for any rows of these sizes.
"""

from __future__ import annotations

import contextlib
import random
import sys
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.utils._pytree as pytree
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from autosplit.trace.holders import TABLES, Holders, position
from autosplit.trace.python_watch import PythonWatch
from autosplit.trace.random_watch import RandomWatch
from autosplit.trace.state import attribute_tensors, data_of, is_on

_MEMORY = frozenset("tolist numpy __array__ __dlpack__ data_ptr storage untyped_storage __reduce_ex__".split())
"""Functions that let Python see values without an operation."""
_GRADIENT = frozenset(("backward", "register_hook", "register_post_accumulate_grad_hook"))
"""Functions whose effect is on gradients, or comes with the backward."""
_SIZES_BY_VALUES = torch.Tag.dynamic_output_shape
_READS = torch.Tag.data_dependent_output
_PICKING = frozenset(
    "select slice unbind split split_with_sizes narrow index as_strided detach alias view reshape _unsafe_view "
    "_local_scalar_dense empty_like zeros_like ones_like new_zeros new_empty new_ones new_full full_like".split()
)
"""Operations that pick values, one row among them, or ask for no values at all."""
_MASKS = (torch.bool, torch.uint8)
_ABSENT = object()


class Watch:
    """Collects what was seen; ``why`` is the first thing in words, or None."""

    def __init__(self, model: nn.Module, rows: int) -> None:
        self.model, self.rows = model, rows
        self.why: str | None = None

    def note(self, what: str) -> None:
        """Keep the first observation."""
        self.why = self.why or what

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch what this thread does in here.

        It patches ``nn.Module`` for the whole process; other threads see it as it ever was.
        """
        state = [*self.model.parameters(), *self.model.buffers(), *attribute_tensors(self.model)]
        versions = [(tensor, _version(tensor)) for tensor in state]
        data = data_of([self.model])
        python, drawn = PythonWatch(self.model, self.note), RandomWatch()
        before = random.getstate(), np.random.get_state()
        tables = [(table, dict(table)) for table in _tables(self.model)]
        iterators = [(one, position(one)) for one in Holders([self.model]).iterators()]
        with contextlib.ExitStack() as undo:
            operations = undo.enter_context(_Operations(state, self.rows, self.note))
            undo.callback(operations.give_back)
            reads = _Reads(operations, python, self.note)
            with drawn, reads, _attributes_seen(self.note):
                torch.empty(0)  # under modes torch imports much of itself at its first operation
                with python.following():
                    yield
            python.look(closely=True)
            if any(list(map(id, now.values())) != list(map(id, was.values())) for now, was in tables):
                self.note("it sets parameters, buffers, modules or hooks of a module")
            if any(position(one) != where for one, where in iterators):
                self.note("it advances an iterator that it keeps between calls")
            if drawn.drew:
                self.note("it draws random numbers")
            after = random.getstate(), np.random.get_state()
            if before[0] != after[0] or not all(map(np.array_equal, before[1], after[1])):
                self.note("it draws random numbers of Python or numpy")
            if any(_version(tensor) != version for tensor, version in versions):
                self.note("it writes to its buffers")
            if not all(is_on(tensor, own) for tensor, own in data):
                self.note("it assigns the data of its parameters or buffers")
            if operations.together is not None:
                self.note(operations.together)


@contextlib.contextmanager
def written_back(model: nn.Module) -> Iterator[Collection[Any]]:
    """Undo what is written to a model's parameters in here; yield what was, as it grows.

    Nobody could hold copies of all of them; buffers are small, see :func:`autosplit.trace.state.buffer_contents`.
    """
    operations = _Operations(model.parameters(), sys.maxsize, lambda _: None)
    try:
        with operations:
            yield operations.saved
    finally:
        operations.give_back()


@contextlib.contextmanager
def own_gradients(model: nn.Module) -> Iterator[None]:
    """Put the caller's gradients aside: a forward that calls backward would add to them."""
    aside = [(parameter, parameter.grad) for parameter in model.parameters()]
    for parameter, _ in aside:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in aside:
            parameter.grad = gradient


def _tables(model: nn.Module) -> Iterator[dict[Any, Any]]:
    """Yield where modules keep their parameters, buffers, modules and hooks."""
    for module in model.modules():
        yield from (module.__dict__[name] for name in TABLES if name in module.__dict__)


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


class _Operations(TorchDispatchMode):
    """Sees every operation: reads, sizes that hang on values, writes to the model's own tensors.

    ``TorchDispatchMode`` lives in a private module; there is no public name for it (tried on torch 2.11 to 2.15).
    """

    def __init__(self, state: Iterable[torch.Tensor], rows: int, note: Callable[[str], None]) -> None:
        super().__init__()
        self.note, self.rows = note, rows
        self.together: str | None = None
        """The first operation that takes rows together, in words."""
        self.clean: dict[int, weakref.ref[torch.Tensor]] = {}
        """What comes from the model's state alone: reading it tells nothing of the batch."""
        self.storages: dict[int, torch.Tensor] = {}
        self.saved: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for tensor in state:
            self.mark(tensor)
            key = _storage(tensor)
            if key is not None:
                self.storages.setdefault(key, tensor)

    def mark(self, tensor: torch.Tensor) -> None:
        self.clean[id(tensor)] = weakref.ref(tensor)

    def is_clean(self, tensor: torch.Tensor) -> bool:
        known = self.clean.get(id(tensor))
        return known is not None and known() is tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        clean = bool(tensors) and all(map(self.is_clean, tensors))
        if not clean and _READS in func.tags:
            self.note(f"its Python reads values of the batch ({func})")
        if not clean and _SIZES_BY_VALUES in func.tags and not _is_plain_index(func, args):
            self.note(f"it makes tensors whose sizes hang on values of the batch ({func})")
        if func._schema.is_mutable:
            self._written(func, args, kwargs)
        result = func(*args, **kwargs)
        if not clean and self._meet([t for t in tensors if not self.is_clean(t)], result, func):
            self.together = self.together or f"an operation takes rows of the batch together ({func})"
        if clean:
            for leaf in pytree.tree_leaves(result):
                if isinstance(leaf, torch.Tensor):
                    self.mark(leaf)
        return result

    def _meet(self, given: Sequence[torch.Tensor], result: Any, func: Any) -> bool:
        """Tell by sizes whether an operation that computes loses the rows, or sets rows against rows."""
        made = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor) and leaf.numel()]
        if not made or func._schema.name.partition("::")[2].partition(".")[0] in _PICKING:
            return False
        before = max((self._batched(tensor) for tensor in given), default=0)
        after = max(self._batched(tensor) for tensor in made)
        return bool(before) and (after == 0 or after > max(before, 1))

    def _batched(self, tensor: torch.Tensor) -> int:
        """Count the dimensions that the rows may lie in."""
        return sum(size == self.rows for size in (() if tensor.is_nested else tensor.shape))

    def _written(self, func: Any, args: Any, kwargs: Any) -> None:
        for number, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            value = args[number] if number < len(args) else kwargs.get(argument.name)
            for leaf in pytree.tree_leaves(value):
                owner = self.storages.get(_storage(leaf) or 0) if isinstance(leaf, torch.Tensor) else None
                if owner is not None:
                    self.note("it writes to its parameters or buffers")
                    if isinstance(owner, nn.Parameter) and id(owner) not in self.saved:
                        self.saved[id(owner)] = owner, owner.detach().clone()

    def give_back(self) -> None:
        """Undo what was written to parameters."""
        with torch.no_grad():
            for owner, content in self.saved.values():
                owner.data.copy_(content)


def _storage(tensor: torch.Tensor) -> int | None:
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return None


def _is_plain_index(func: Any, args: Any) -> bool:
    """Tell whether an operation is indexing by numbers: only by masks do sizes hang on values."""
    if func._opname not in ("index", "_unsafe_index"):
        return False
    return not any(isinstance(i, torch.Tensor) and i.dtype in _MASKS for i in args[1])


class _Reads(TorchFunctionMode):
    """Sees what reads memory without an operation, and looks at Python's state at every call."""

    def __init__(self, operations: _Operations, python: PythonWatch, note: Callable[[str], None]) -> None:
        super().__init__()
        self.operations, self.python, self.note = operations, python, note

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in _MEMORY and args and isinstance(args[0], torch.Tensor) and not self.operations.is_clean(args[0]):
            self.note(f"its Python reads values of the batch ({name})")
        if name in _GRADIENT:
            self.note(f"its forward has to do with gradients ({name})")
        result = func(*args, **(kwargs or {}))
        self.python.look()
        return result


@contextlib.contextmanager
def _attributes_seen(note: Callable[[str], None]) -> Iterator[None]:
    """Note attributes of modules that this thread sets to something else, or deletes."""
    own, store, delete = threading.get_ident(), nn.Module.__setattr__, nn.Module.__delattr__

    def seen_store(module: nn.Module, name: str, value: Any) -> None:
        if threading.get_ident() == own and not _unchanged(module, name, value):
            note(f"it sets the attribute {name!r} of a module ({type(module).__name__})")
        store(module, name, value)

    def seen_delete(module: nn.Module, name: str) -> None:
        if threading.get_ident() == own:
            note(f"it deletes the attribute {name!r} of a module ({type(module).__name__})")
        delete(module, name)

    with patch.object(nn.Module, "__setattr__", seen_store), patch.object(nn.Module, "__delattr__", seen_delete):
        yield


def _unchanged(module: nn.Module, name: str, value: Any) -> bool:
    before = getattr(module, name, _ABSENT)
    if before is value:
        return True
    return type(before) is type(value) and isinstance(value, (bool, int, float, str)) and before == value
