"""One recording: the model's forward on fake tensors at a given batch size."""

from __future__ import annotations

import contextlib
import logging
import random
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from torch.autograd.graph import saved_tensors_hooks

from autosplit.trace.borrowed import side_effects, state
from autosplit.trace.borrowed.blank import home_of, lies_apart
from autosplit.trace.borrowed.contents import Holder
from autosplit.trace.borrowed.holders import HOOK_TABLES
from autosplit.trace.borrowed.hooks import COLLECTS
from autosplit.trace.borrowed.logged import Decides
from autosplit.trace.borrowed.side_effects import check_given
from autosplit.trace.borrowed.surroundings import GradModeWatch, as_in_a_plain_call
from autosplit.trace.inputs.objects import empty_in_layout, layout_of, one_tensor
from autosplit.trace.reads.reads import Reader, Recall
from autosplit.trace.reads.watch import Watcher
from autosplit.trace.recording.record import Recorder
from autosplit.trace.recording.recording import (
    NESTED,
    FirstCall,
    Recording,
    Refusal,
    Unexpected,
    is_fault,
    raised_line,
    where,
)
from autosplit.trace.scope import Scope

if TYPE_CHECKING:
    from autosplit.trace.shapes.symbols import SymbolicSizes


@dataclass(frozen=True)
class FlatInputs:
    """The flattened inputs of one call: leaves, structure, names, and the batch dimension of each leaf (None: none)."""

    leaves: tuple[Any, ...]
    spec: Any
    names: tuple[str, ...]
    batch_dims: tuple[int | None, ...]

    def tensors(self) -> list[int]:
        """Return the positions of the tensors among the leaves."""
        return [i for i, leaf in enumerate(self.leaves) if isinstance(leaf, torch.Tensor)]

    def shapes(self) -> list[tuple[int, ...]]:
        """Return the shapes of the tensors."""
        return [tuple(self.leaves[index].shape) for index in self.tensors()]

    def lie_apart(self, model: nn.Module) -> bool:
        """Tell whether the model cannot run on these inputs by itself, for where it and they lie."""
        return lies_apart(model, (self.leaves[index] for index in self.tensors()))

    def lie_elsewhere(self, model: nn.Module, home: torch.device | None) -> bool:
        """Tell whether the model cannot run by itself, or would not where it was when it lay on one device."""
        moved = home is not None and home.type != "meta" and home_of(model) != home
        return moved or self.lie_apart(model)

    def at(self, device: torch.device) -> FlatInputs:
        """Return the inputs with copies on a device of the tensors that lie elsewhere."""
        tensors = {id(leaf): leaf for leaf in self.leaves if isinstance(leaf, torch.Tensor) and not leaf.is_meta}
        apart = {key: tensor for key, tensor in tensors.items() if tensor.device != device}
        copies = {key: t.detach().to(device).requires_grad_(t.requires_grad) for key, t in apart.items()}
        return replace(self, leaves=tuple(copies.get(id(leaf), leaf) for leaf in self.leaves))

    def rebuild(self, leaves: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return positional and keyword arguments made of other leaves; those that were one tensor are one again."""
        args, kwargs = self.spec([leaves[i] for i in one_tensor(self.leaves)] if self.leaves else leaves)
        return args, kwargs


@dataclass(frozen=True)
class PythonRun:
    """A run of the model's own Python: what it did, what it changed, and what its tensors stand for."""

    recording: Recording
    changes: side_effects.Changes
    real: Mapping[int, torch.Tensor]
    """Parameters, buffers and inputs by the ids of the fake tensors that stood for them."""
    kept: Sequence[torch.Tensor]
    """The fake tensors that the run left, in the order of the recording's last outputs."""

    def leave(self, kept: Sequence[torch.Tensor]) -> None:
        """Leave what the run left, with real tensors in the places of those that were kept."""
        self.changes.make({**self.real, **{id(fake): tensor for fake, tensor in zip(self.kept, kept, strict=True)}})


def run_python(
    model: nn.Module,
    inputs: FlatInputs,
    *,
    rows: int,
    scope: Scope,
    reader: Reader | None = None,
    observed: Watcher | None = None,
    symbols: SymbolicSizes | None = None,
) -> PythonRun:
    """Record the model's forward at ``rows`` batch rows, and what it changed; the model is as before at the end.

    ``reader`` answers value reads; None: as the scope says. ``observed`` tells what opaque modules give; None: a run
    on fake tensors does. ``symbols`` stand for sizes of the inputs; None: the sizes are the sample's, ``rows`` rows.

    Raises Refusal for what a graph cannot follow, FirstCall where the model is not complete yet, Unexpected for an
    exception of the model's own.
    """
    registered = (*model.named_parameters(), *model.named_buffers())
    if lazy := [name for name, tensor in registered if nn.parameter.is_lazy(tensor)]:
        raise FirstCall(lazy)
    with state.random_state(), state.attributes(model) as holders:
        tensors = [*model.parameters(), *model.buffers(), *(tensor for _, tensor in holders.tensors.values())]
        device = torch.device("cpu") if scope.on_cpu else None
        if device is None and inputs.lie_elsewhere(model, scope.home):
            device = scope.home or torch.device("cpu")
        if symbols is not None:
            mode: FakeTensorMode | None = symbols.fake_mode()
        elif device is None and tensors and all(tensor.is_meta for tensor in tensors):
            mode = None  # a model without values runs as it is, on the meta device
        else:
            mode = FakeTensorMode(allow_non_fake_inputs=True)
        real = state.fake_tensors(model, mode, holders, device=device)
        recorder = Recorder(model, scope, reader=reader or Recall(scope.answers), observed=observed, holders=holders)
        return _run(model, inputs, symbols, mode, rows=rows, recorder=recorder, real=real, device=device)


def _run(
    model: nn.Module,
    inputs: FlatInputs,
    symbols: SymbolicSizes | None,
    mode: FakeTensorMode | None,
    *,
    rows: int,
    recorder: Recorder,
    real: dict[int, torch.Tensor],
    device: torch.device | None,
) -> PythonRun:
    """Record one run of a model whose tensors are fake; it is left as the run leaves it.

    ``device``: where all tensors are taken to lie; None: where they do.
    """
    seed, holders = torch.initial_seed(), recorder.holders
    before = holders.read()
    random.seed(rows)  # each recording has other Python draws: what depends on them shows as a difference
    np.random.seed(rows)
    leaves = list(inputs.leaves)
    for position, index in enumerate(inputs.tensors()):
        leaf, batch_dim = leaves[index], inputs.batch_dims[index]
        shape = [rows if dim == batch_dim else size for dim, size in enumerate(leaf.shape)]
        if symbols is not None:
            shape = symbols.shape(position, leaf, batch_dim)
        leaves[index] = _fake(leaf, shape, mode, device or leaf.device)
        real[id(leaves[index])] = leaf
    for index in inputs.tensors():
        recorder.add_input(inputs.names[index], leaves[index])
    args, kwargs = inputs.rebuild(leaves)
    asked = GradModeWatch()
    output = _forward(model, args, kwargs, recorder, (symbols, mode, recorder.random, recorder, asked))
    changes = side_effects.changes(holders, before)
    if names := changes.made_or_gone():
        raise FirstCall(names)
    check_given((args, kwargs), inputs.spec, [leaves[i] for i in one_tensor(inputs.leaves)], output)
    if torch.initial_seed() != seed:
        raise Refusal("forward sets torch's random seed; a graph would not: set it outside the model", "")
    changes = changes.without(partial(_comes_with_the_graph, recorder))
    _refuse_modules(changes)
    left = side_effects.kept(changes, real)
    numbers = _logged(recorder, changes)
    left += numbers
    recording = recorder.finish(output, dict(model.named_buffers()), left)
    recording.logged = len(numbers)
    recording.inside = {} if recorder.observed is None else recorder.observed.inside()
    recording.asks_grad_mode, recording.changed = asked.line or recorder.asks_grad_mode, changes.places
    recording.checkpoints = recorder.checkpoints
    return PythonRun(recording, changes, real, left)


def _comes_with_the_graph(recorder: Recorder, holder: Holder, key: Any, value: Any) -> bool:
    """Tell whether a change is a buffer that the graph assigns, or an attribute that a layer sets by its hooks."""
    path, table = holder.place
    if table == "_buffers":
        return id(value) in recorder.refs
    return not table and (path, key) in recorder.by_layers


def _logged(recorder: Recorder, changes: side_effects.Changes) -> list[torch.Tensor]:
    """Return the tensors of the numbers that the run kept; raise Decides where one is used, or kept out of sight."""
    kept = changes.numbers()
    ids = {id(number) for number in kept}
    alive = [number for ref in recorder.logged if (number := ref()) is not None]
    lines = recorder.decided.union(*(number.lines for number in alive if id(number) not in ids))
    if lines:
        raise Decides(lines, "")
    return list({id(tensor): tensor for number in kept for tensor in number.tensors}.values())


def _refuse_modules(changes: side_effects.Changes) -> None:
    """Raise Refusal where a forward sets or deletes parameters, modules, or hooks that are not for its own outputs."""
    for holder, _, entries in changes.entries:
        path, table = holder.place
        collects = all(getattr(hook, "__module__", "") == COLLECTS for hook in entries.values())
        if table in ("_parameters", "_modules") or (table in HOOK_TABLES and not collects):
            what = {"_parameters": "parameter", "_modules": "module"}.get(table, "hook")
            raise Refusal(
                f"forward sets the {what} {next(iter(entries))!r} of module {path or 'root'!r}, which a graph "
                "does not: do so before the model is called",
                "",
            )


def _forward(model: nn.Module, args: Any, kwargs: Any, recorder: Recorder, modes: tuple[Any, ...]) -> Any:
    """Run the forward while it is recorded, and tell what a graph cannot follow from what the model itself raises."""
    try:
        with (
            torch.inference_mode(False),
            quiet_log(),
            patched(recorder),
            as_in_a_plain_call(),
            contextlib.ExitStack() as stack,
        ):
            for each in modes:
                stack.enter_context(each or contextlib.nullcontext())
            return model(*args, **kwargs)
    except (DataDependentOutputException, DynamicOutputShapeException, UnsupportedFakeTensorException) as error:
        line = raised_line(error)
        location = f" in {line}" if line else ""
        raise Refusal(
            f"a shape or a Python value depends on a tensor's contents ({str(error).splitlines()[0]}{location})"
            f"{_notes(error)}; a graph cannot follow that: compute it for all rows and choose by torch.where, or mask",
            recorder.failed_in or "",
        ) from error
    except Refusal:
        raise
    except Exception as error:
        if is_fault(error):
            raise
        if recorder.modules_made:
            raise FirstCall([f"a {kind.__name__}" for kind in recorder.modules_made]) from error
        location = where(recorder.failed_in or "")
        if _is_nested(error):
            raise Refusal(f"{location} {NESTED}", "") from error
        if isinstance(error, UnsupportedOperatorException):
            what = f"{location} calls {error.func}, which torch cannot run on shapes alone"
            raise Refusal(what, recorder.failed_in or "") from error
        if recorder.logged_lines:  # the model may have met a number that is none yet
            raise Decides(recorder.logged_lines, "") from error
        raise Unexpected(error, recorder.failed_in or "") from error


def _is_nested(error: Exception) -> bool:
    """Tell whether an exception came out of what makes nested tensors."""
    if isinstance(error, UnsupportedOperatorException):
        return "nested" in str(error.func)
    return any(frame.f_code.co_filename.startswith(_NESTED) for frame, _ in traceback.walk_tb(error.__traceback__))


_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
"""What slices of themselves make, of modules that are there."""
_NESTED = str(Path(torch.nested.__file__).parent)


def _fake(leaf: torch.Tensor, shape: Sequence[Any], mode: FakeTensorMode | None, device: torch.device) -> torch.Tensor:
    device = torch.device("meta") if mode is None else device
    with mode or contextlib.nullcontext():
        fake = empty_in_layout(layout_of(leaf), shape, dtype=leaf.dtype, device=device)
        if isinstance(leaf, nn.Parameter):
            return nn.Parameter(fake, leaf.requires_grad)
        fake.requires_grad_(leaf.requires_grad)
        return fake if leaf.is_leaf else fake.clone(memory_format=torch.preserve_format)


def _notes(error: BaseException) -> str:
    return "".join(f", {note}" for note in getattr(error, "__notes__", ()))


def quiet_log() -> contextlib.AbstractContextManager[Any]:
    """Keep FakeTensorMode from printing a traceback for an exception that is about to be raised anyway."""
    return patch.object(logging.getLogger("torch._subclasses.fake_tensor"), "disabled", True)


@contextlib.contextmanager
def patched(recorder: Recorder | Watcher) -> Iterator[None]:
    """Show calls of modules and of autograd functions to a recorder; those of other threads go on as ever."""
    call, initialize, apply = nn.Module.__call__, nn.Module.__init__, torch.autograd.Function.__dict__["apply"]
    enter, thread = saved_tensors_hooks.__enter__, threading.get_ident()

    def call_module(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != thread:
            return call(module, *args, **kwargs)
        return recorder.call_module(call, module, args, kwargs)

    def make(module: nn.Module, *args: Any, **kwargs: Any) -> None:
        if threading.get_ident() == thread and isinstance(recorder, Recorder) and not isinstance(module, _LISTS):
            recorder.modules_made.append(type(module))
        initialize(module, *args, **kwargs)

    def apply_function(function: type, *args: Any, **kwargs: Any) -> Any:
        plain = apply.__get__(None, function)
        if threading.get_ident() != thread:
            return plain(*args, **kwargs)
        return recorder.call_function(plain, function, args, kwargs)

    def enter_hooks(hooks: saved_tensors_hooks) -> None:
        if threading.get_ident() == thread and isinstance(recorder, Recorder):
            recorder.check_saved_hooks(hooks)
        enter(hooks)

    with (
        patch.object(saved_tensors_hooks, "__enter__", enter_hooks),
        patch.object(nn.Module, "__call__", call_module),
        patch.object(nn.Module, "__init__", make),
        patch.object(torch.autograd.Function, "apply", classmethod(apply_function)),
    ):
        yield
