"""One kind of call of a model: its recording, cut into stages, and what has been built from it."""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import fx, nn

from autosplit.errors import InputError, TraceError
from autosplit.options import Options, Sample
from autosplit.planning.plan.plan import Plan
from autosplit.runtime.lanes.ambient import is_transformed, without_callers_modes
from autosplit.runtime.lanes.lanes import Lane, caller_lane
from autosplit.runtime.lower.replicas import Replicas
from autosplit.runtime.lower.split import Lowered
from autosplit.runtime.ops import CallState, on_lane
from autosplit.runtime.step.step import Step
from autosplit.runtime.tape import Tape
from autosplit.runtime.tree import TreeRun
from autosplit.trace.borrowed.contents import Place
from autosplit.trace.borrowed.touched import BACKWARD, touched
from autosplit.trace.graph import INFO, TracedGraph
from autosplit.trace.inputs.inputs import has_uneven_list
from autosplit.trace.inputs.lengths import without_rows
from autosplit.trace.inputs.objects import leaves_of, take_apart, tensors_in
from autosplit.trace.inputs.python_state import OutsideValues
from autosplit.trace.inputs.signature import CallSignature, Key, Kind, SignatureScope
from autosplit.trace.inputs.token import Token
from autosplit.trace.ladder import Trace
from autosplit.trace.recording.run import PythonRun

_SEED_BITS = 62
_NUMBERS = 32
_CONSTANTS = (bool, int, float, complex, str, bytes, type(None), type(Ellipsis), slice, range, type, enum.Enum)
_CONSTANTS += (np.generic, np.ndarray, torch.dtype, torch.device, torch.layout, torch.memory_format)  # type: ignore
"""Inputs that are no tensors and tell by themselves what they are."""


SHARED = tuple(name for name in nn.Module().__dict__ if name != "training")
"""The attributes of a model that its pipe has too, the same objects: its state and its hooks."""


@dataclass
class Recorded:
    """One signature of the model: its recording, cut by the plan, and the programs made of it per microbatch count."""

    traced: TracedGraph
    lowered: Lowered
    trace: Trace
    kind: Kind
    lanes: tuple[Lane, ...]
    replicas: tuple[Replicas, ...] = ()
    left_out: Mapping[Place, Any] = field(default_factory=dict)
    """The attributes that signatures leave out and that its forward has read or set, as they were."""
    outside: Mapping[Place, Any] = field(default_factory=dict)
    """What they leave out outside of the modules and inside of opaque ones, as it was when its Python last did this."""
    failed_generalizations: int = 0
    """How many attempts to make one recording of several lengths have failed so far."""
    rows_tried: bool = False
    """Whether it was found out for which numbers of rows it holds."""
    programs: dict[int, fx.Graph] = field(default_factory=dict)
    orders: dict[Any, Any] = field(default_factory=dict)
    settled: dict[Key, Any] = field(default_factory=dict)
    """Calls after which the model's own Python changed nothing more: what signatures leave out then; else None."""

    @property
    def changes_python(self) -> bool:
        """Whether the model's own Python has to run in a call, for what it changes besides tensors."""
        return bool(self.trace.gathered.recording.recording.changed)

    @property
    def values_read(self) -> dict[tuple[str, str], Any]:
        """What the model's own Python read of tensors' values while it was recorded, by names for the reads."""
        return {("values", f"value read by {read.name}"): read.value for read in self.trace.gathered.scope.answers}

    def holds(self, key: Key, sample: Sample) -> bool:
        """Tell whether value reads give the recorded answers on a batch, and state outside of signatures is unchanged.

        The latter is not asked where the model's own Python runs in each call, which shows it.
        """
        known = {} if self.changes_python else self.left_out
        if known and any(known.get(path, content) != content for path, content in key.left_out):
            return False
        guard = self.trace.guard
        return guard is None or guard.holds(tensors_in((sample.args, sample.kwargs)), self.kind.rows_in(key))

    def is_stale(self, key: Key) -> bool:
        """Tell whether what signatures leave out there is another: its Python may do other things."""
        return any(self.outside.get(path, self) != content for path, content in key.outside)

    def is_same_but_for_rows(self, key: Key) -> bool:
        """Tell whether a call's inputs have the shapes for which it was made, except for the batch."""
        return self.kind.shapes == without_rows(key.shapes, self.kind.batch_dims) and self.kind.rows_in(key) > 0

    def covers(self, key: Key) -> bool:
        """Tell whether it is for many lengths and known to be what the model does at those of a call."""
        domain, lengths, rows = self.trace.domain, self.kind.lengths_in(key), self.kind.rows_in(key)
        return domain is not None and lengths is not None and rows > 0 and domain.holds(rows, lengths)

    def lacks_one_row(self, key: Key) -> bool:
        """Tell whether it is for many lengths and would do for a call if it were known to hold for one row."""
        domain, one_row = self.trace.domain, self.kind.rows_in(key) == 1
        return domain is not None and domain.single is None and one_row and self.kind.lengths_in(key) is not None

    @cached_property
    def parts(self) -> dict[str, nn.Module]:
        """The modules that the program calls, each on its lane."""
        lowered, lanes = self.lowered, self.lanes
        parts = {f"stage{i}": on_lane(lowered.runs[i], lanes[i]) for i in range(len(lowered.stages))}
        parts |= {f"shared{i}": on_lane(p, lanes[i]) for i, p in enumerate(lowered.prologues) if p is not None}
        if lowered.epilogue is not None:
            parts["epilogue"] = on_lane(lowered.epilogue, lanes[-1])
        return parts


class FoundCall(NamedTuple):
    """A call and its recording."""

    recorded: Recorded | TreeRun
    key: Key
    sample: Sample
    python: PythonRun | None
    """What the call changes besides tensors; None: nothing."""
    tensors: list[torch.Tensor]
    """The input tensors, flat."""


def call_state(
    lowered: Lowered, options: Options, sizes: Sequence[int], lengths: Mapping[str, int], *, ahead: bool = False
) -> CallState:
    """Return where the random numbers of a call come from, and where what its norms see goes.

    Under transforms operations draw by a seed. ``ahead``: all is drawn now, for calls that overlap, or by a seed.
    """
    taped = options.rng == "plain" and bool(lowered.tape) and not is_transformed()
    nodes = tuple(node for node in lowered.tape if not ahead or node.draws is not None) if taped else ()
    seeded = bool(lowered.off_tape) or len(nodes) < len(lowered.tape) if taped else lowered.random
    seed = int(torch.randint(2**_SEED_BITS, ())) if seeded else 0
    tape = Tape(nodes, sizes, lengths) if taped else None
    if tape is not None and ahead:
        tape.finish()
    each, whole = options.norm_counts == "microbatch", len(sizes) == 1 and not (ahead or is_transformed())
    return CallState(seed, tape, update_each=each, microbatches=len(sizes), whole=whole)


@dataclass(frozen=True)
class PreparedTree:
    """One call of a model that runs by its own Python; ``lanes`` are the stages' and last the caller's."""

    tree: TreeRun
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    lanes: tuple[Lane, ...]
    leave: Callable[[Sample], None]

    def call(self) -> Any:
        """Run the model's own Python, and note what that has changed."""
        output = self.tree.call(self.args, self.kwargs)
        self.leave(Sample(*self.args, **self.kwargs))
        return output


@dataclass
class PreparedStep(Step):
    """One call of the pipe, ready to run, and the recording that it follows."""

    recorded: Recorded
    key: Key
    sample: Sample
    python: PythonRun | None = None
    """What the call changes besides tensors; None: nothing."""


def lane_of_caller(leaves: Sequence[Any]) -> Lane:
    """Return the lane of the caller: on the device of the batch."""
    return caller_lane(next((t.device for t in leaves if isinstance(t, torch.Tensor)), torch.device("cpu")))


def tree_of(model: nn.Module, plan: Plan, lanes: tuple[Lane, ...]) -> TreeRun:
    """Return what runs a model's own Python, its modules on the stages of a plan."""
    paths = {path for path, _ in model.named_modules()}
    units = {name: s for name, s in plan.stage_of().items() if name.endswith("#0") and name[:-2] in paths}
    return TreeRun(model, units, lanes)


class Constants:
    """Checks the inputs of calls, and counts the numbers that were among them."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self._numbers: dict[Any, set[Any]] = {}

    def check(self, key: Key, sample: Sample) -> None:
        """Raise TraceError for inputs that a recording cannot hold, InputError for those without values."""
        leaves = leaves_of((sample.args, sample.kwargs))
        if self.options.batch_dims is None and has_uneven_list(sample):
            raise TraceError("an input is a list of tensors of different sizes: it has no batch dimension")
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if any(tensor.is_meta for tensor in tensors):
            raise InputError(
                "an input is on the meta device and has no values; give one on a real device. autosplit.plan() takes "
                "meta tensors"
            )
        if any(tensor.is_nested for tensor in tensors):
            raise TraceError("an input is a nested tensor, which has no rows to cut: give a padded one with a mask")
        if self.options.batch_dims is None and any(tensor.layout is not torch.strided for tensor in tensors):
            raise TraceError("an input is a sparse tensor, which has no rows to cut: say by batch_dims= what has")
        opaque = next((leaf for leaf in leaves if not isinstance(leaf, (torch.Tensor, *_CONSTANTS))), None)
        if opaque is not None:
            raise TraceError(f"an input is a {type(opaque).__name__}: what it holds may differ from call to call")
        kinds = tuple(first for first, _ in key.rest.kinds)
        values = self._numbers.setdefault(replace(key.rest, kinds=kinds), set())
        values.add(key.rest.kinds)
        if len(values) > _NUMBERS:
            raise TraceError(
                f"Python numbers among the inputs were others in {_NUMBERS} recordings of one kind of call"
            )


def refusal(traced: TracedGraph, tensors: Sequence[torch.Tensor], model: nn.Module) -> str:
    """Return why a recording cannot write to the inputs of this call that the model changes; "" where it can.

    Microbatches of such an input are views of the caller's tensor, so that what they write is written there.
    """
    nodes = [node.meta[INFO] for node in traced.graph.nodes if node.op == "placeholder" and INFO in node.meta]
    changed = [index for index, info in enumerate(nodes) if info.mutated]
    for index in changed:
        tensor, dim = tensors[index], traced.inputs[index].batch_dim
        others = [*tensors[:index], *tensors[index + 1 :], *model.buffers()]
        if tensor.requires_grad:
            why = "which requires a gradient"
        elif any(_memory(other) == _memory(tensor) for other in others):
            why = "which shares memory with another input or a buffer"
        elif any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
            why = "which is expanded"
        elif dim and tensor.is_contiguous():
            why = f"whose rows, along dimension {dim}, are not contiguous"
        else:
            continue
        return f"the model changes its input {traced.inputs[index].name!r} in place, {why}"
    return ""


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else -id(tensor)


class PythonRuns:
    """Runs a model's own Python, and knows which attributes calls change time and again."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._changed: frozenset[Place] = frozenset()
        """Where calls of the model have changed Python state."""
        self._known: list[SignatureScope] = [SignatureScope()]
        """What is known of attributes, again after each recording that told more."""
        self._touches: Mapping[tuple[str, ...], set[Place]] = {}
        """Attributes that the recording made last has read or set, by the modules that were being called."""
        self._outside = OutsideValues()
        self.token: Token | None = None
        """Of the last call: another one where its walk through the model may come to something else."""
        self._keys: Callable[..., dict[CallSignature, Key]] = lru_cache(_NUMBERS)(lambda *_: {})
        """Keeps the signatures of calls by what these have of the model."""

    def key_of(self, leaves: Sequence[Any], spec: Any) -> Key:
        """Return a call's signature, without attributes that calls change time and again or never touch.

        Calls that are alike get the same object; what depends on a kind of call may be kept by it.
        """
        return self._key_of(CallSignature.of(leaves, spec))

    def _key_of(self, call: CallSignature) -> Key:
        scope, token = self._known[-1], self.token
        if token is None or token.scope is not scope or not token.holds():
            token = self.token = Token(self.model, self._outside, scope)
            token.keys = self._keys(token.entries, token.values)
        return token.key(call)

    def earlier_keys(self, sample: Sample) -> list[Key]:
        """Return the signatures that a call had before the last recordings touched more attributes."""
        call = CallSignature.of(*take_apart((sample.args, sample.kwargs)))
        return [Token(self.model, self._outside, scope).key(call) for scope in self._known[:-1]]

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Run the model's own Python to record it, and note the attributes that it touches."""
        self._touches = {}
        try:
            with torch.inference_mode(False), without_callers_modes(), touched(self.model) as self._touches:
                yield
        finally:
            known = self._known[-1]
            self._learn(known._replace(touched=(known.touched or frozenset()).union(*self._touches.values())))

    def _learn(self, known: SignatureScope) -> None:
        if known != self._known[-1]:
            self._known.append(known)

    def _leave_out(self, places: Collection[Place]) -> bool:
        """Leave places out of all signatures from now on; tell whether that is new."""
        if new := not self._known[-1].without.issuperset(places):
            self._known = [known._replace(without=known.without.union(places)) for known in self._known]
        return new

    def left_out(self, inside: Mapping[str, frozenset[Place]]) -> tuple[dict[Place, Any], dict[Place, Any]]:
        """Return `Recorded.left_out` and `Recorded.outside` of the recording that was made last.

        What opaque modules change themselves, ``inside`` by their paths, is left out of signatures from now on. What
        they touch does not count: their Python runs in each call.
        """
        known = self._known[-1]
        self._learn(known._replace(inside=known.inside.union(*inside.values())))
        key = self.key_of((), None)
        live = {*BACKWARD, *inside}
        touched = set[Place]().union(*(places for by, places in self._touches.items() if live.isdisjoint(by)))
        left = {path: content for path, content in key.left_out if path in touched or (path[0], "") in touched}
        return left, dict(key.outside)

    def without_changes(self, before: Key, sample: Sample) -> Key:
        """Leave what a call of the model's own Python has changed out of signatures; return the call's now."""
        leaves, spec = take_apart((sample.args, sample.kwargs))
        self.called()
        for old, new in zip(before.rest.modules, self.key_of(leaves, spec).rest.modules, strict=False):
            known = dict(old.attributes)
            self._leave_out({(new.path, name) for name, now in new.attributes if known.get(name, now) != now})
        return self.key_of(leaves, spec)

    def called(self) -> bool:
        """Leave what a call has changed outside of the modules out of signatures; tell whether that is new."""
        return self._leave_out(self._outside.changed())

    def run(self, recorded: Recorded, key: Key, sample: Sample) -> PythonRun | None:
        """Run a call's Python, undo its changes and return them; None if it differs from the recording."""
        with self.watched():
            flat = replace(recorded.trace.inputs, leaves=tuple(leaves_of((sample.args, sample.kwargs))))
            return recorded.trace.gathered.run_python(self.model, flat, recorded.kind.rows_in(key))

    def choose(
        self, variants: Iterable[Recorded], key: Key, sample: Sample
    ) -> tuple[Recorded, PythonRun | None] | None:
        """Return the first recording of which the model's own Python makes the calls, and what that changes.

        None where there is no such recording.
        """
        for recorded in variants:
            is_settled = not recorded.changes_python or recorded.settled.get(key) == key.left_out
            if is_settled and not recorded.is_stale(key):
                return recorded, None
            if (run := self.run(recorded, key, sample)) is not None:
                recorded.outside = dict(key.outside)
                return recorded, run if run.changes else None
        return None

    def leave(
        self, recorded: Recorded, key: Key, run: PythonRun | None, sample: Sample, kept: Sequence[torch.Tensor]
    ) -> Key:
        """Leave what a call changes, and return the signature that its recording is good for now too.

        Attributes that a second run would change again are no part of signatures any more. Where a second run changes
        nothing, the model's Python does not have to run in later calls of this kind.
        """
        if run is None:
            return self._key_of(key.call)
        run.leave(kept)
        places, again = run.changes.places, None
        if key not in recorded.settled:
            again = self.run(recorded, key, sample)
            self._leave_out(frozenset() if again is None else again.changes.places)
        self._leave_out(places & self._changed)
        self._changed |= places
        recorded.settled[key] = None
        now = self.key_of(*take_apart((sample.args, sample.kwargs)))
        if again is not None:
            recorded.settled[now] = None if again.changes else now.left_out
        return now
