"""Real runs of a model that stand beside its recordings: to see what atoms give, and to compare."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn

from autosplit.trace import state
from autosplit.trace.borrow import stand_ins
from autosplit.trace.graph import INFO
from autosplit.trace.probe import probe_rows, slow_attention
from autosplit.trace.recording import Refusal
from autosplit.trace.run import FlatInputs, patched
from autosplit.trace.scope import Scope
from autosplit.trace.structure import flatten_output
from autosplit.trace.tree_rows import agree
from autosplit.trace.tree_watch import written_back
from autosplit.trace.watch import Observations, Watcher


def observe(model: nn.Module, inputs: FlatInputs, rows: int, scope: Scope) -> Observations | None:
    """Run the model on ``rows`` real rows and note what its atoms give; None when it has none, or no values.

    The model and the random states are as before at the end.
    """
    if not scope.atoms or any(parameter.is_meta for parameter in model.parameters()):
        return None
    watcher = Watcher(model, scope)
    pairs = zip(inputs.leaves, inputs.batch_dims, strict=True)
    leaves = [leaf if dim is None else probe_rows(leaf, dim, range(rows)) for leaf, dim in pairs]
    args, kwargs = inputs.rebuild(leaves)
    with (
        state.random_state(),
        state.attributes(model),
        state.buffer_contents(model),
        written_back(model),
        torch.no_grad(),
        torch.inference_mode(False),
        patched(watcher),
        watcher,
    ):
        model(*args, **kwargs)
    return Observations(model, scope, watcher.seen)


def unlike_unasked(model: nn.Module, recording: Any, inputs: FlatInputs, scope: Scope) -> str | None:
    """Return how a recording differs, by more than rounding, from the model that is not told that it is exported.

    Asked of two rows, forward only; None where they agree, where nothing was told, or where the model draws.
    """
    infos = [node.meta[INFO] for node in recording.graph.nodes if INFO in node.meta]
    meta = any(parameter.is_meta for parameter in model.parameters())
    if meta or not scope.exporting or any(info.random for info in infos):
        return None
    own = answering(model, replace(scope, exporting=False)) if scope.answers else contextlib.nullcontext()
    try:
        with _borrowed(model, recording.root), own:
            args, kwargs = inputs.rebuild(_two_rows(inputs))
            wanted = flatten_output(model.forward(*args, **kwargs))[0]
    except Refusal:
        return "the model reads other values when it is told that it is exported"
    except Exception:  # it does not run on two rows with the answers of the sample: nothing to compare with
        return None
    try:
        with _borrowed(model, recording.root):
            given = [leaf for leaf in _two_rows(inputs) if isinstance(leaf, torch.Tensor)]
            made = fx.Interpreter(recording.root, graph=recording.graph).run(2, *given)
    except Exception as error:
        return f"what was recorded does not run on two rows as the model does ({type(error).__name__}: {error})"
    if len(wanted) != len(made):
        return f"the model gives {len(wanted)} values, and {len(made)} when it is told that it is exported"
    if not all(_close(want, got) for want, got in zip(wanted, made, strict=True) if isinstance(want, torch.Tensor)):
        return "the model does other things when it is told that it is exported"
    return None


@contextlib.contextmanager
def _borrowed(model: nn.Module, root: nn.Module) -> Iterator[None]:
    """Make a run leave no trace: on stand-ins, without gradients, on the kernels that rows do not meet in."""
    with state.random_state(), written_back(model), stand_ins(model, root), torch.no_grad(), slow_attention():
        yield


def _two_rows(inputs: FlatInputs) -> list[Any]:
    """Return the leaves at two rows, as copies: a forward may write to its inputs."""
    pairs = zip(inputs.leaves, inputs.batch_dims, strict=True)
    rows = [leaf if dim is None else probe_rows(leaf, dim, range(2)) for leaf, dim in pairs]
    return [leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in rows]


def _close(want: torch.Tensor, got: Any) -> bool:
    """Tell whether two results are equal but for another kernel's rounding; whole numbers are equal as they are."""
    rounds = want.is_floating_point() or want.is_complex()
    return isinstance(got, torch.Tensor) and agree(got, want, 0.02 if rounds else 0.0, scale=0.05 if rounds else 0.0)


@contextlib.contextmanager
def answering(model: nn.Module, scope: Scope) -> Iterator[None]:
    """Give a model's own Python, in real runs inside, the answers to value reads that a recording took."""
    watcher = Watcher(model, scope)
    with patched(watcher), watcher:
        yield
