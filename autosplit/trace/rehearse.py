"""Real runs of a model that stand beside its recordings: to see what atoms give, and to compare."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from autosplit.errors import TraceError
from autosplit.trace import state
from autosplit.trace.parameter_writes import written_back
from autosplit.trace.probe import probe_rows
from autosplit.trace.recording import Unexpected, is_fault
from autosplit.trace.run import FlatInputs, patched
from autosplit.trace.scope import Scope
from autosplit.trace.watch import Observations, Watcher


def observe(model: nn.Module, inputs: FlatInputs, rows: int, scope: Scope) -> Observations | None:
    """Run the model on ``rows`` real rows and note what its atoms give; None when it has none, or no values.

    The model and the random states are as before at the end. Raises Unexpected for an exception of the model's own.
    """
    if not scope.atoms or any(parameter.is_meta for parameter in model.parameters()):
        return None
    pairs = zip(inputs.leaves, inputs.batch_dims, strict=True)
    leaves = [leaf if dim is None else probe_rows(leaf, dim, range(rows)) for leaf, dim in pairs]
    args, kwargs = inputs.rebuild(leaves)
    with (
        state.random_state(),
        state.attributes(model) as holders,
        state.buffer_contents(model),
        written_back(model),
        torch.no_grad(),
        torch.inference_mode(False),
    ):
        watcher = Watcher(model, scope, holders)
        try:
            with patched(watcher), watcher:
                model(*args, **kwargs)
        except TraceError:
            raise
        except Exception as error:
            if is_fault(error):
                raise
            raise Unexpected(error, "") from error
    return Observations(model, scope, watcher.seen)


@contextlib.contextmanager
def answering(model: nn.Module, scope: Scope) -> Iterator[None]:
    """Give a model's own Python, in real runs inside, the answers to value reads that a recording took."""
    watcher = Watcher(model, scope)
    with patched(watcher), watcher:
        yield
