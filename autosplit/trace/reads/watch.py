"""Run a model for real, as a recording runs it: value reads get the recorded answers, opaque modules are watched.

What an opaque module gives (shapes, dtypes, which inputs it changes or returns) is written down in a real run on few
rows and played back to a recorder, whose fake tensors have no values to compute it from.
"""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from autosplit.errors import ForeignSuppressed
from autosplit.trace.borrowed import state
from autosplit.trace.borrowed.contents import Place
from autosplit.trace.borrowed.holders import Holders
from autosplit.trace.inputs.objects import mapped, storage_key, take_apart, tensors_in
from autosplit.trace.reads.assertions import assertion_here
from autosplit.trace.reads.model_state import ModelState, is_equal
from autosplit.trace.recording.random_watch import Draw, RandomWatch
from autosplit.trace.recording.recording import (
    OBSERVES,
    VALUE_READS,
    Call,
    FirstCall,
    Refusal,
    run_checkpointed,
    source_line,
)
from autosplit.trace.recording.values import in_place
from autosplit.trace.scope import Scope

_INDEX_MAKERS = frozenset("nonzero argwhere where".split())
_PICKS = frozenset("getitem __getitem__ unbind __iter__ eq __eq__ ne __ne__ squeeze view reshape flatten to".split())
"""What may be done with indices so that reading the result tells no more than which indices there are."""
SIZES = frozenset("shape size numel nelement __len__".split())
READS = "it reads"
"""How the reason begins for which a module sees the whole batch, where the value probe may show that it need not."""
_SHAPED_AS_FIRST = frozenset("index_add index_copy index_put index_fill scatter scatter_add masked_scatter".split())
_MASKS = (torch.bool, torch.uint8)
_BY_VALUES = frozenset("nonzero argwhere where unique unique_consecutive masked_select bincount".split())


@dataclass(frozen=True)
class _TensorLike:
    """A tensor that an opaque module gave: a new one, or input number ``source`` (with ``view``: a view of it)."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    source: int | None = None
    view: tuple[tuple[int, ...], int] | None = None


@dataclass
class Seen:
    """What was seen of one call of an opaque module."""

    leaves: list[Any] = field(default_factory=list)
    rebuild: Callable[[list[Any]], Any] = lambda leaves: leaves
    changed: list[int] = field(default_factory=list)
    writes: list[str] = field(default_factory=list)
    random: bool = False
    draws: tuple[Draw, ...] | None = ()
    whole: str = ""
    places: frozenset[Place] = frozenset()
    """Where it changed Python state, or the hooks did in its backward."""
    settled: frozenset[Place] = frozenset()
    """Where it changed Python state and would not in a second call: it has set itself up."""


class Watcher(TorchFunctionMode):
    """Answers value reads outside of leaves; watches calls of opaque modules and plays them back to a recorder."""

    def __init__(
        self, model: nn.Module, scope: Scope, holders: Holders | None = None, *, closely: bool = False
    ) -> None:
        """``closely``: look at the whole model around each opaque module, which says which of them changes it."""
        super().__init__()
        self.model = model
        self.scope = scope
        self.holders = holders
        self.closely = closely
        self.seen: dict[tuple[str, int], Seen] = {}
        self.random = RandomWatch()
        self._paths = {id(module): path for path, module in model.named_modules()}
        self._steady = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
        self._steady |= set() if holders is None else holders.tensors.keys()
        self._position = 0
        self._muted = 0
        self._calls: Counter[str] = Counter()
        self._watched: Taint | None = None

    # -- the seams that a recorder has too -------------------------------------------------------------------------
    def call_module(self, original: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Stand in for ``nn.Module.__call__``."""
        path = self._paths.get(id(module))
        if self._muted or path is None:
            return original(module, *args, **kwargs)
        if path == "":
            return module.forward(*args, **kwargs)
        number = self._calls[path]
        self._calls[path] += 1
        if not self.scope.is_leaf(module, path):
            return original(module, *args, **kwargs)
        self._muted += 1
        try:
            if path in self.scope.opaque:
                return self._watch(partial(original, module), path, number, args, kwargs)
            return original(module, *args, **kwargs)
        finally:
            self._muted -= 1

    def call_function(self, original: Callable[..., Any], function: type, args: Any, kwargs: Any) -> Any:
        """Stand in for ``autograd.Function.apply``: nothing inside is answered.

        A reentrant checkpoint, which knows no gradients of some leaves only, runs again in the backward as others do.
        """
        from torch.utils.checkpoint import CheckpointFunction, checkpoint, set_checkpoint_early_stop

        if function is CheckpointFunction and not self._muted:
            with set_checkpoint_early_stop(False):
                return run_checkpointed(partial(checkpoint, args[0], use_reentrant=False), *args[1:])
        self.random.runs_twice |= function is CheckpointFunction
        self._muted += 1
        try:
            return original(*args, **kwargs)
        finally:
            self._muted -= 1

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._watched is not None:
            return self._watched.call(func, args, kwargs)
        label = getattr(func, "__name__", "")
        if self._muted or label not in VALUE_READS or assertion_here(label) is not None:
            return func(*args, **kwargs)
        if self.scope.only_keeps(label, line := source_line()) or not self._is_recorded(line):
            return func(*args, **kwargs)
        if label == "tolist":  # a fake tensor, on which the recording was made, reads its elements one by one
            answers = [self._answer(line) for _ in range(args[0].numel())]
            return np.array(answers, dtype=object).reshape(args[0].shape).tolist()
        return self._answer(line)

    def _is_recorded(self, line: str) -> bool:
        """Tell whether a line reads values on fake tensors too; what reads real ones alone is not in the recording."""
        return any(answer.line == line for answer in self.scope.answers)

    def _answer(self, line: str) -> Any:
        if self._position >= len(self.scope.answers) or self.scope.answers[self._position].line != line:
            raise Refusal(f"forward reads a tensor's value where the recording does not ({line})", "")
        self._position += 1
        return self.scope.answers[self._position - 1].value

    # -- opaque modules --------------------------------------------------------------------------------------------
    def _watch(self, run: Callable[..., Any], path: str, number: int, args: Any, kwargs: Any) -> Any:
        inputs = tensors_in((args, kwargs))
        seen = self.seen[path, number] = Seen()
        versions = [tensor._version for tensor in inputs]
        before = ModelState(self.model, self.holders) if self.closely else None
        self._watched = taint = Taint(self._steady)
        self.random.begin()
        try:
            with self.random, self._with_backward(path, inputs):
                out = run(*args, **kwargs)
        finally:
            self._watched = None
        seen.random, seen.draws = self.random.drew, None if taint.asked or taint.sized else self.random.draws
        seen.changed = [i for i, (t, v) in enumerate(zip(inputs, versions, strict=True)) if t._version != v]
        if before is not None:
            seen.places, seen.whole, seen.writes = before.changes()
            if new := [name for name in seen.writes if name not in before.tensors]:
                raise FirstCall(new)
            if seen.places and not seen.changed and self._settles(before, run, args, kwargs):
                seen.settled, seen.places, seen.whole, seen.writes = seen.places, frozenset(), "", []
        seen.whole = seen.whole or taint.read
        if self.random.own_generator:
            seen.whole = seen.whole or "it draws from a generator of its own"
        if changed := [name for name, _ in self.model.named_parameters() if name in seen.writes]:
            raise Refusal(in_place(changed[0]), "")
        flat, seen.rebuild = take_apart(out)
        if any(isinstance(leaf, (bool, int, float)) for leaf in flat):
            raise Refusal(
                f"module {path!r} returns a Python number that it reads from a tensor", path.rpartition(".")[0]
            )
        seen.leaves = [_like(leaf, inputs) if isinstance(leaf, torch.Tensor) else leaf for leaf in flat]
        return out

    @contextlib.contextmanager
    def _with_backward(self, path: str, inputs: list[torch.Tensor]) -> Iterator[None]:
        """Have a module that observes gradients run its backward at the end of its call, for what its hooks change.

        Parameters that have hooks before are left out, and no gradient is kept.
        """
        module = self.model.get_submodule(path)
        parameters = [p for p in module.parameters() if not (p._backward_hooks or p._post_accumulate_grad_hooks)]

        def run(module: nn.Module, args: Any, out: Any) -> None:
            ends = [tensor for tensor in (*inputs, *parameters) if tensor.requires_grad]
            starts = [tensor for tensor in tensors_in(out) if tensor.requires_grad]
            taint, self._watched = self._watched, None
            with (
                contextlib.suppress(Exception),
                state.gradients_aside(ends),
            ):  # what is not seen here is compared later on
                if starts and ends:
                    ones = [torch.ones_like(tensor) for tensor in starts]
                    torch.autograd.backward(starts, ones, retain_graph=True, inputs=ends)
            self._watched = taint

        observes = self.scope.opaque[path].whole.startswith(OBSERVES)
        with module.register_forward_hook(run) if observes else contextlib.nullcontext():
            yield

    def _settles(self, before: ModelState, run: Callable[..., Any], args: Any, kwargs: Any) -> bool:
        """Tell whether other and more rows set up the state that the first call did, and leave it as it is then."""
        tensors = tensors_in((args, kwargs))
        if any(not tensor.is_floating_point() or tensor.dim() < 2 for tensor in tensors):
            return False
        now, first = ModelState(self.model, self.holders), before.set_up()
        args, kwargs = mapped(
            lambda leaf: _other_rows(leaf) if isinstance(leaf, torch.Tensor) else leaf, (args, kwargs)
        )
        try:
            with ForeignSuppressed(), state.random_state():
                run(*args, **kwargs)
                if any(now.changes()):
                    return False
                before.restore()
                run(*args, **kwargs)
                return is_equal(before.set_up(), first)
            return False
        finally:
            now.restore()

    def inside(self) -> Mapping[str, frozenset[Place]]:
        """Return what opaque modules that see the whole batch, or set themselves up, changed, by their paths."""
        changed: defaultdict[str, frozenset[Place]] = defaultdict(frozenset)
        for (path, _), seen in self.seen.items():
            if seen.places or seen.settled or self.scope.opaque[path].whole:
                changed[path] |= seen.places | seen.settled
        return changed

    def replay(self, call: Call, number: int, args: Any, kwargs: Any) -> Any:
        """Return tensors like those that the opaque module gave, and write into ``call`` what it did besides."""
        assert call.leaf is not None
        seen = self.seen.get((call.leaf, number))
        if seen is None:
            raise Refusal(f"module {call.leaf!r} is called in some runs only", call.leaf.rpartition(".")[0])
        inputs = tensors_in((args, kwargs))
        tensors = (*inputs, *self.model.get_submodule(call.leaf).parameters())
        needs_grad = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
        call.random, call.draws = seen.random, seen.draws
        call.whole = self.scope.opaque[call.leaf].whole or seen.whole
        call.writes += seen.writes
        with torch.no_grad():
            for position in seen.changed:
                inputs[position].add_(0)
        return seen.rebuild([_made(leaf, inputs, needs_grad) for leaf in seen.leaves])


class Taint:
    """Tells harmless value reads in an opaque module from those on which other rows' results may hang.

    Harmless are reads of the model's own state, and of the indices that ``nonzero`` and its like return: loops over
    the experts that were hit. Whether rows mix there all the same is for the value probe to say. Sizes that depend on
    values (how many rows a mask selects) are values too.
    """

    def __init__(self, steady: set[int]) -> None:
        self.steady = set(steady)
        self.indices: set[int] = set()
        self.sized: set[int] = set()
        self.kept: list[Any] = []
        self.read = ""
        self.asked = False
        """Whether any value was read, also a harmless one: how much is drawn may depend on it."""

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a function; write down what it reads that is not harmless."""
        label = getattr(func, "__name__", "")
        if label == "__get__":
            label = func.__self__.__name__
        inputs = tensors_in((args, kwargs))
        steady = bool(inputs) and all(id(tensor) in self.steady for tensor in inputs)
        index = bool(inputs) and all(id(tensor) in self.indices or id(tensor) in self.steady for tensor in inputs)
        self.asked |= label in VALUE_READS
        if label in VALUE_READS and not index and not self.read:
            self.read = f"{READS} a tensor's value ({label.strip('_')}, {source_line()})"
        if label in SIZES and not steady and not self.read and any(id(tensor) in self.sized for tensor in inputs):
            self.read = f"{READS} a size that depends on values ({label.strip('_')}, {source_line()})"
        out = func(*args, **kwargs)
        if label == "__iter__":
            tensors = list(out)
            out = iter(tensors)
        else:
            tensors = tensors_in(out)
        ids = {id(tensor) for tensor in tensors}
        if steady:
            self.steady |= ids
        else:  # state that something else was written to is no longer the model's own
            self.steady -= ids | {id(tensor) for tensor in inputs[:1] if label == "__setitem__"}
        if not steady and ((label in _INDEX_MAKERS and len(args) == 1 and not kwargs) or (index and label in _PICKS)):
            self.indices |= ids
        masks = label in ("getitem", "__getitem__") and any(tensor.dtype in _MASKS for tensor in inputs[1:])
        shaped = inputs[:1] if label.endswith("_") or label in _SHAPED_AS_FIRST else inputs
        if label in _BY_VALUES or masks or any(id(tensor) in self.sized for tensor in shaped):
            self.sized |= ids
        self.kept += tensors
        return out


def _other_rows(tensor: torch.Tensor) -> torch.Tensor:
    return torch.cat([tensor, tensor]).mul_(-3)


def _like(tensor: torch.Tensor, inputs: list[torch.Tensor]) -> _TensorLike:
    shape = tuple(tensor.shape)
    for position, other in enumerate(inputs):
        if other is tensor:
            return _TensorLike(shape, tensor.dtype, position)
    for position, other in enumerate(inputs):
        if storage_key(other) == storage_key(tensor):
            offset = int(tensor.storage_offset() - other.storage_offset())
            return _TensorLike(shape, tensor.dtype, position, (tuple(tensor.stride()), offset))
    return _TensorLike(shape, tensor.dtype)


def _made(leaf: Any, inputs: list[torch.Tensor], needs_grad: bool) -> Any:
    if not isinstance(leaf, _TensorLike):
        return leaf
    if leaf.source is not None:
        source = inputs[leaf.source]
        if leaf.view is None:
            return source
        strides, offset = leaf.view
        return torch.as_strided(source, leaf.shape, strides, source.storage_offset() + offset)
    tensor = torch.empty(leaf.shape, dtype=leaf.dtype, device=inputs[0].device if inputs else None)
    return tensor.requires_grad_().clone() if needs_grad and leaf.dtype.is_floating_point else tensor
