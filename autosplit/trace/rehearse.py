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
    if meta or not scope.exporting or scope.capture is not None or any(info.random for info in infos):
        return None
    pairs = zip(inputs.leaves, inputs.batch_dims, strict=True)
    leaves = [leaf if dim is None else probe_rows(leaf, dim, range(2)) for leaf, dim in pairs]
    args, kwargs = inputs.rebuild(leaves)
    own = answering(model, replace(scope, exporting=False)) if scope.answers else contextlib.nullcontext()
    borrowed = state.random_state(), written_back(model), stand_ins(model, recording.root), torch.no_grad()
    with contextlib.ExitStack() as stack:
        for context in (*borrowed, slow_attention()):
            stack.enter_context(context)
        try:
            with own:
                wanted = flatten_output(model.forward(*args, **kwargs))[0]
        except Refusal:
            return "the model reads other values when it is told that it is exported"
        except Exception:  # it does not run on two rows with the answers of the sample: nothing to compare with
            return None
        given = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        made = fx.Interpreter(recording.root, graph=recording.graph).run(2, *given)
        both = [pair for pair in zip(wanted, made, strict=True) if isinstance(pair[0], torch.Tensor)]
        if not all(close(want, got) for want, got in both):
            return "the model does other things when it is told that it is exported"
    return None


def close(want: torch.Tensor, got: torch.Tensor) -> bool:
    """Tell whether two results are equal but for another kernel's rounding; NaNs are equal."""
    if want.shape != got.shape:
        return False
    if not want.is_floating_point():
        return want.is_complex() or torch.equal(want, got)
    want, got = want.double().nan_to_num(), got.double().nan_to_num()
    scale = float(want.abs().max()) if want.numel() else 0.0
    return not want.numel() or float((want - got).abs().max()) <= 0.02 * scale + 1e-6


@contextlib.contextmanager
def answering(model: nn.Module, scope: Scope) -> Iterator[None]:
    """Give a model's own Python, in real runs inside, the answers to value reads that a recording took."""
    watcher = Watcher(model, scope)
    with patched(watcher), watcher:
        yield
