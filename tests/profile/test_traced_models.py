"""Recordings of whole models: what the profile says is saved is what autograd really keeps."""

from __future__ import annotations

import pytest
import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from autosplit.options import Sample
from autosplit.profile.node_costs.combine import profile
from autosplit.trace.ladder import trace
from tests.equivalence.equality import Batch
from tests.models.named import CASES

ROWS = 4
ATTENTION = ("tiny gpt", "encoder")


def really_kept(model: nn.Module, batch: Batch) -> int:
    """Return the bytes that a real forward leaves for the backward; state, inputs and oneDNN's scratch left out."""
    held: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: held.append(t) or t, lambda t: t):
        output = model(*batch.args, **batch.kwargs)
    inputs = [t for t in pytree.tree_leaves((batch.args, batch.kwargs)) if isinstance(t, Tensor)]
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers(), *inputs)}
    kept = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held if t.dtype != torch.uint8}
    del output
    return sum(size for pointer, size in kept.items() if pointer not in own)


@pytest.mark.parametrize("name", list(CASES))
def test_saved_bytes_and_an_untouched_model(name):
    model, batch = CASES[name].build(), CASES[name].batch(ROWS)
    recording = trace(model, Sample(*batch.args, **batch.kwargs))
    inputs = [recording.inputs.leaves[entry.index] for entry in recording.graph.inputs]
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    draws = torch.get_rng_state()
    found = profile(recording.graph, inputs=inputs, rows=ROWS, batch_rows=ROWS)
    assert torch.equal(draws, torch.get_rng_state())
    assert all(torch.equal(before[key], tensor) for key, tensor in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert found.measured
    assert found.estimated == {}
    saved = {number: size for node in found.nodes.values() for number, size in node.saved.items()}
    kept = really_kept(model, batch)
    if name in ATTENTION and torch.__version__ < "2.12":  # its fake kernel has a float32 logsumexp for float64
        assert sum(saved.values()) == pytest.approx(kept, rel=0.02)
    else:
        assert sum(saved.values()) == kept
