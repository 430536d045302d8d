"""Scratch and workspace of oneDNN's LSTM layer, which torch's fake tensors leave at nothing.

The spaces and their rounding are those of oneDNN's ``rnn_utils`` (v3.12, ``set_workspace_sizes``, ``set_offsets``);
the constants beside them were the same in every probe of fp32 on AVX2. One call is one layer in one direction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autosplit.profile.workspaces import Workspace, nbytes

_PAGE_BYTES = 4096
_TRAINING_EXTRA_BYTES = 4664
_INFERENCE_EXTRA_BYTES = 4872
_GATES = 4
_SPLIT_FROM = 128


@dataclass(frozen=True)
class _Layer:
    steps: int
    batch: int
    inputs: int
    hidden: int

    @property
    def gate_row(self) -> int:
        """Elements of one row of gates, padded."""
        return _row(_GATES * self.hidden)

    @property
    def states_bytes(self) -> int:
        return _paged(2 * (self.steps + 1) * self.batch * _row(max(self.inputs, self.hidden)) * 4)

    @property
    def cells_bytes(self) -> int:
        return _paged(2 * (self.steps + 1) * self.batch * self.hidden * 4)

    @property
    def bias_bytes(self) -> int:
        return _GATES * self.hidden * 4

    @property
    def workspace_bytes(self) -> int:
        """What the forward leaves for the backward."""
        gates = _paged(self.steps * self.batch * self.gate_row * 4)
        outputs = _paged(self.steps * self.batch * _row(self.hidden) * 4)
        return gates + outputs + 3 * self.states_bytes + 2 * self.cells_bytes

    @property
    def weights_bytes(self) -> int:
        return (self.inputs + self.hidden) * self.gate_row * 4

    def training_bytes(self, *, forward: bool) -> int:
        """What one pass of training holds; the forward takes all steps' gates at once while rows are few."""
        steps = 1 if forward and self.batch >= _SPLIT_FROM else self.steps
        gates = _paged(steps * self.batch * self.gate_row * 4)
        return gates + 2 * _paged(self.batch * _row(self.hidden) * 4) + _TRAINING_EXTRA_BYTES


def _row(elements: int) -> int:
    """Return oneDNN's leading dimension: whole cache lines, and no multiple of 1 KiB."""
    padded = -(-elements // 16) * 16
    return padded + 16 if padded % 256 == 0 else padded


def _paged(count: int) -> int:
    return -(-count // _PAGE_BYTES) * _PAGE_BYTES


def _layer(args: Sequence[Any]) -> _Layer:
    steps, weight = args[0], args[2]
    return _Layer(steps.shape[0], steps.shape[1], steps.shape[2], weight.shape[1])


def _known(args: Sequence[Any], count: int) -> Workspace:
    plain = args[0].dtype == torch.float32 and "AVX512" not in torch.backends.cpu.get_cpu_capability()
    return Workspace(count, "measured" if plain else "unknown")


def recurrent_layer(args: Sequence[Any], _out: Any) -> Workspace:
    """Return the scratch of ``aten.mkldnn_rnn_layer``."""
    layer = _layer(args)
    if torch.is_grad_enabled():
        return _known(args, layer.bias_bytes + layer.weights_bytes + layer.training_bytes(forward=True))
    weights = (layer.inputs + layer.hidden) * _GATES * (-(-layer.hidden // 32) * 32) * 4
    gates = _paged(layer.batch * layer.gate_row * 4) + _paged(layer.batch * _row(layer.hidden) * 4)
    scratch = layer.states_bytes + layer.cells_bytes + gates + _INFERENCE_EXTRA_BYTES
    return _known(args, layer.bias_bytes + weights + scratch)


def recurrent_layer_backward(args: Sequence[Any], _out: Any) -> Workspace:
    """Return the scratch of ``aten.mkldnn_rnn_layer_backward``."""
    layer = _layer(args)
    ragged = sum(_row(size) * layer.bias_bytes for size in (layer.inputs, layer.hidden) if _row(size) != size)
    missing = sum(gradient is None for gradient in args[11:13]) * layer.batch * layer.hidden * 4
    copied = sum(nbytes(gradient) for gradient in args[10:13] if gradient is not None and not gradient.is_contiguous())
    held = layer.weights_bytes + layer.bias_bytes + layer.training_bytes(forward=False)
    return _known(args, held + ragged + missing + copied)


def recurrent_results(args: Sequence[Any], out: Sequence[Any]) -> Sequence[Any]:
    """Return the results of ``aten.mkldnn_rnn_layer`` with its workspace in its true size."""
    *results, workspace = out
    if not torch.is_grad_enabled() or workspace.numel():
        return out
    return (*results, workspace.new_empty(_layer(args).workspace_bytes, dtype=torch.uint8))
