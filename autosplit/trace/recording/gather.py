"""Record a model at several batch sizes until the recordings agree, with as few opaque modules as that takes.

record ──► at the sample's own number of rows: its values answer value reads (a guard)
       ──► with these answers at 1 and 3 rows: merged; at 4 too where these do not agree
       ──► at 2 instead of 3 where the model has no values by which it is compared with the recording on 2 rows
       ──► a refusal: the module in whose Python it stands becomes an opaque module, record again
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from autosplit.errors import TraceError
from autosplit.progress import phase
from autosplit.trace.borrowed import state
from autosplit.trace.borrowed.blank import has_meta
from autosplit.trace.borrowed.logged import Decides
from autosplit.trace.borrowed.surroundings import on_other_rows
from autosplit.trace.borrowed.writes import written_back
from autosplit.trace.graph import LEAST, lengths_in
from autosplit.trace.inputs.inputs import batch_rows
from autosplit.trace.reads.model_state import ModelState
from autosplit.trace.reads.reads import MetaValueReader, Reader, ValueReader
from autosplit.trace.reads.watch import Watcher
from autosplit.trace.recording.merge import BATCH_SIZES, MergedRecording, holds_at, merge
from autosplit.trace.recording.recording import OBSERVES, Call, Recording, Refusal, Unexpected, is_fault
from autosplit.trace.recording.run import FlatInputs, PythonRun, patched, run_python
from autosplit.trace.rows.probe import probe_rows
from autosplit.trace.scope import STATEFUL_LEAVES, OpaqueModule, Scope, has_hooks, is_quantised

_HIDES = 0.4
"""Share of the parameters above which an opaque module that has parts is not accepted, unless it runs by microbatch."""
_ROUNDS = 64
_THIRD = 6
"""The third number of rows where the sample's own is one of the first two, or one row."""


@dataclass(frozen=True)
class Gathered:
    """The recording of a model at all batch sizes, what it entered, and the smallest batch for which it holds.

    ``sizes`` are the numbers of rows of the recordings that were merged.
    """

    recording: MergedRecording
    min_rows: int
    scope: Scope
    sizes: tuple[int, ...]

    def run_python(self, model: nn.Module, flat: FlatInputs, rows: int) -> PythonRun | None:
        """Run the model's own Python at the sizes of a call; None where its calls are not the recorded ones."""
        lengths = lengths_in(self.recording.lengths, flat.shapes())
        try:
            run = _run_at(model, flat, rows, self.scope)
        except (Refusal, Unexpected):
            return None
        return run if holds_at(self.recording, run.recording, rows=rows, lengths=lengths) else None

    def check_rows(self, model: nn.Module, flat: FlatInputs, rows: int) -> None:
        """Record once more at another batch size; raise Refusal when the recording does not hold there."""
        self.check(record_at(model, flat, rows, self.scope), flat, rows)

    def check(self, again: Recording, flat: FlatInputs, rows: int) -> None:
        """Raise Refusal when the merged recording is not another one at its number of rows."""
        lengths = lengths_in(self.recording.lengths, flat.shapes())
        self.recording.recording.changed |= again.changed
        if not holds_at(self.recording, again, rows=rows, lengths=lengths):
            raise Refusal(
                f"forward does other things at {rows} rows than at {' and '.join(map(str, BATCH_SIZES))}: Python code "
                "depends on the number of rows, or batch_dims= must say where the batch is; a graph holds for all "
                "batch sizes only when sizes are a*rows + b",
                "",
            )


def _run_at(model: nn.Module, flat: FlatInputs, rows: int, scope: Scope, reader: Reader | None = None) -> PythonRun:
    """Run a model's own Python at a batch size; opaque modules run for real beforehand, where the model has values."""
    observed = observe(model, flat, rows, scope)
    return run_python(model, flat, rows=rows, scope=scope, reader=reader, observed=observed)


def record_at(model: nn.Module, flat: FlatInputs, rows: int, scope: Scope) -> Recording:
    """Record a model at a batch size."""
    return _run_at(model, flat, rows, scope).recording


@phase("tracing the forward")
@state.no_collection()
def gather(model: nn.Module, flat: FlatInputs, *, scope: Scope | None = None) -> Gathered:
    """Record a model and merge; modules that cannot be recorded become opaque modules.

    Raises Refusal for what no graph can follow, Unexpected for an exception of the model's own: that of the first
    attempt, which knows the module that it came out of.
    """
    scope, first = scope or Scope(), None
    if not only_recorded(model, scope):  # what its layers keep beside their weights shows in real runs alone
        packed = (path for path, module in model.named_modules() if path and is_quantised(module))
        scope = replace(scope, opaque={path: OpaqueModule("its weight is packed") for path in packed})
    for _ in range(_ROUNDS):
        try:
            return _merged(model, flat, scope)
        except Decides as error:
            scope = replace(scope, deciding=scope.deciding | error.lines)
        except (Refusal, Unexpected) as error:
            first = first or error
            if not (opaque := _opaque_modules(model, scope, error)):
                raise (error if isinstance(error, Refusal) and isinstance(first, Refusal) else first) from None
            scope = replace(scope, opaque={**scope.opaque, **opaque})
    raise Refusal(f"forward could not be recorded in {_ROUNDS} attempts", "")


def _merged(model: nn.Module, flat: FlatInputs, scope: Scope) -> Gathered:
    rows = batch_rows(flat)
    few = LEAST if only_recorded(model, scope) else BATCH_SIZES[0]
    recorded, scope = _own(model, flat, rows, scope)
    recordings = {rows: recorded}

    def at(*sizes: int) -> Gathered:
        recordings.update((size, record_at(model, flat, size, scope)) for size in sizes if size not in recordings)
        merged = merge([recordings[size] for size in sizes], sizes)
        merged.recording.changed = frozenset().union(*(recording.changed for recording in recordings.values()))
        merged.recording.inside = recorded.inside
        return Gathered(merged, LEAST, scope, sizes)

    single = None if any(_one_row_misleads(model, call) for call in recorded.calls) else recorded
    if single is not None and rows != 1:
        single = _single(model, flat, scope)
    if single is not None and rows > max(BATCH_SIZES) and math.gcd(rows - 1, few - 1) == 1:  # no modulus has one rest
        with contextlib.suppress(TraceError):
            gathered = at(few, rows)
            if _holds_for_one(gathered, single):
                return replace(gathered, min_rows=1)
    gathered = at(*BATCH_SIZES, _THIRD if rows in (1, *BATCH_SIZES) else rows)
    if rows == 1:
        gathered.check(recorded, flat, rows)
    return replace(gathered, min_rows=1 if single is not None and _holds_for_one(gathered, single) else LEAST)


def only_recorded(model: nn.Module, scope: Scope) -> bool:
    """Tell whether a recording is compared with others only: the model is on meta, or lies apart, and does not run."""
    return scope.on_cpu or has_meta(model)


def _own(model: nn.Module, flat: FlatInputs, rows: int, scope: Scope) -> tuple[Recording, Scope]:
    """Record at the sample's own number of rows; return what value reads gave in the scope.

    Those leaves are entered whose parameters are used more than once: at first those that hold one together.
    """
    blank = any(parameter.is_meta for parameter in model.parameters())
    inputs = {flat.names[i]: flat.leaves[i] for i in flat.tensors()}
    entered = scope.entered
    scope = replace(scope, entered=entered | _holding_together(model, scope))
    while True:
        reader = (MetaValueReader if blank else ValueReader)(model, inputs, on_cpu=scope.on_cpu)
        recording = _run_at(model, flat, rows, scope, reader).recording
        wanted = entered | _to_enter(model, recording.calls, scope.entered)
        others = scope.entered - wanted
        if wanted <= scope.entered and not any(call.module in others for call in recording.calls):
            return recording, replace(scope, entered=wanted, answers=tuple(reader.answers))
        scope, entered = replace(scope, entered=wanted), wanted


def _single(model: nn.Module, flat: FlatInputs, scope: Scope) -> Recording | None:
    """Record at one row; what that makes the model raise is no error."""
    try:
        return record_at(model, flat, 1, scope)
    except (TraceError, Unexpected):
        return None


def _holds_for_one(gathered: Gathered, single: Recording) -> bool:
    """Tell whether microbatches of one row can be made."""
    gathered.recording.recording.changed |= single.changed
    return holds_at(gathered.recording, single, rows=1)


def _one_row_misleads(model: nn.Module, call: Call) -> bool:
    """Tell whether a call is a batch norm over more than vectors.

    torch's backward of it on the CPU reads the layout off the gradient's strides; those of a dimension of size one say
    nothing, and for one row its gradients can be wrong (seen on torch 2.13; a model at batch size 1 has them too).
    """
    if not call.shapes or len(call.shapes[0]) <= 2:
        return False
    if call.leaf is None:
        return call.target is F.batch_norm
    return any(isinstance(module, _BatchNorm) for module in model.get_submodule(call.leaf).modules())


def _opaque_modules(model: nn.Module, scope: Scope, error: Refusal | Unexpected) -> dict[str, OpaqueModule]:
    """Return the module that has to be opaque, and its like: equal Python fails in an equal way; none for the root."""
    path = error.module
    while path in scope.opaque:
        path = path.rpartition(".")[0]
    if not path:
        return {}
    kind = type(model.get_submodule(path))
    whole = error.whole if isinstance(error, Refusal) else ""
    alike = [p for p, module in model.named_modules() if p and type(module) is kind and p not in scope.opaque]
    return {p: OpaqueModule(str(error), whole) for p in alike}


def refuse_hiding(model: nn.Module, scope: Scope, once: Collection[str]) -> None:
    """Raise Refusal when an opaque module among ``once``, which run once per step, holds too much to be whole."""
    total = sum(parameter.numel() for parameter in model.parameters())
    for path in scope.opaque.keys() & set(once):
        module = model.get_submodule(path)
        share = sum(parameter.numel() for parameter in module.parameters()) / max(total, 1)
        parts = [m for m in module.modules() if sum(any(True for _ in c.parameters()) for c in m.children()) > 1]
        if share > _HIDES and parts:
            reason = scope.opaque[path].reason
            raise Refusal(f"module {path!r} would stay whole and holds {share:.0%} of the parameters: {reason}", "")


def _holding_together(model: nn.Module, scope: Scope) -> frozenset[str]:
    """Return the leaf modules that hold a parameter which another one holds too."""
    leaves = [(path, module) for path, module in model.named_modules() if path and scope.is_leaf(module, path)]
    parameters = {path: [id(p) for p in module.parameters(recurse=False)] for path, module in leaves}
    held = Counter(itertools.chain(*parameters.values()))
    return _enterable(model, {path for path, ids in parameters.items() if any(held[key] > 1 for key in ids)})


def _to_enter(model: nn.Module, calls: Sequence[Call], entered: Collection[str]) -> frozenset[str]:
    """Return the leaf modules whose parameters are used more than once: inside them, the parameter is a value."""
    parameters = dict(model.named_parameters())
    uses: dict[str, list[Call]] = defaultdict(list)
    for call in calls:
        for name in dict.fromkeys(call.reads):
            uses[name].append(call)
    paths: set[str] = set()
    for name, users in uses.items():
        if name in parameters and len(users) > 1:
            paths.update(call.leaf for call in users if call.leaf is not None)
            paths.update(call.module for call in users if call.module in entered)
    return _enterable(model, paths)


def _enterable(model: nn.Module, paths: Iterable[str]) -> frozenset[str]:
    modules = {path: model.get_submodule(path) for path in paths}
    kept = (nn.RNNBase, *STATEFUL_LEAVES)
    return frozenset(path for path, leaf in modules.items() if not has_hooks(leaf) and not isinstance(leaf, kept))


# -- real runs ---------------------------------------------------------------------------------------------------------
def observe(model: nn.Module, inputs: FlatInputs, rows: int, scope: Scope) -> Watcher | None:
    """Run the model on ``rows`` real rows and note what its opaque modules give; None when it has none, or cannot run.

    The model and the random states are as before at the end. Raises Unexpected for an exception of the model's own.
    """
    if not scope.opaque or any(parameter.is_meta for parameter in model.parameters()) or inputs.lie_apart(model):
        return None
    watcher, has_changed = _observe(model, inputs, rows, scope, closely=False)
    return _observe(model, inputs, rows, scope, closely=True)[0] if has_changed else watcher


def _observe(model: nn.Module, inputs: FlatInputs, rows: int, scope: Scope, *, closely: bool) -> tuple[Watcher, bool]:
    """Run the model once; return what was noted, and whether the run changed anything of the model."""
    pairs = zip(inputs.leaves, inputs.batch_dims, strict=True)
    leaves = [leaf if dim is None else probe_rows(leaf, dim, range(rows)) for leaf, dim in pairs]
    args, kwargs = inputs.rebuild(leaves)
    hooked = any(opaque.whole.startswith(OBSERVES) for opaque in scope.opaque.values())
    with (
        state.borrowed(model) as holders,
        written_back(model),
        state.contents([leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]),
        on_other_rows(),
        torch.inference_mode(False),
        torch.set_grad_enabled(hooked),
    ):
        watcher, before = Watcher(model, scope, holders, closely=closely), ModelState(model, holders)
        try:
            with patched(watcher), watcher:
                model(*args, **kwargs)
        except TraceError:
            raise
        except Exception as error:
            if is_fault(error):
                raise
            raise Unexpected(error, "") from error
        return watcher, any(before.changes())


@contextlib.contextmanager
def answering(model: nn.Module, scope: Scope) -> Iterator[None]:
    """Give a model's own Python, in real runs inside, the answers to value reads that a recording took."""
    watcher = Watcher(model, scope)
    with patched(watcher), watcher:
        yield
