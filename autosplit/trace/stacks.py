"""Recurrent networks of several layers, run layer by layer, so that each layer is an operation of its own."""

from __future__ import annotations

from typing import Any, TypeGuard

import torch
from torch import nn

_RUN: dict[Any, Any] = {
    ("LSTM", "tanh"): torch.lstm,
    ("GRU", "tanh"): torch.gru,
    ("RNN_TANH", "tanh"): torch.rnn_tanh,
    ("RNN_RELU", "relu"): torch.rnn_relu,
}


def is_stack(module: nn.Module, inputs: Any) -> TypeGuard[nn.RNNBase]:
    """Tell whether a call is one of several recurrent layers on a padded batch."""
    return (
        type(module) in (nn.LSTM, nn.GRU, nn.RNN)
        and isinstance(module, nn.RNNBase)
        and module.num_layers > 1
        and bool(inputs)
        and isinstance(inputs[0], torch.Tensor)
        and inputs[0].dim() == 3
    )


def run_stack(module: nn.RNNBase, input: torch.Tensor, hx: Any = None) -> Any:
    """Do what ``module(input, hx)`` does, one torch operation per layer and dropout between layers.

    Shapes are those of ``nn.LSTM``, ``nn.GRU`` and ``nn.RNN``: input [T, B, features] or [B, T, features]; returns the
    output and the last state (for LSTM a pair).
    """
    directions = 2 if module.bidirectional else 1
    states = _states(module, input, hx, directions)
    given: Any = states if len(states) > 1 else states[0]
    module.check_forward_args(input, given, None)  # the kernels check nothing
    run = _RUN[module.mode, getattr(module, "nonlinearity", "tanh")]
    count = len(module._flat_weights_names) // module.num_layers
    last: list[list[torch.Tensor]] = [[] for _ in states]
    for layer in range(module.num_layers):
        names = module._flat_weights_names[layer * count : (layer + 1) * count]
        weights = [getattr(module, name) for name in names]
        first = layer * directions
        own = [state[first : first + directions] for state in states]
        given = tuple(own) if len(own) > 1 else own[0]
        input, *new = run(
            input, given, weights, module.bias, 1, 0.0, module.training, module.bidirectional, module.batch_first
        )
        for kept, state in zip(last, new, strict=True):
            kept.append(state)
        if module.dropout and module.training and layer + 1 < module.num_layers:
            input = nn.functional.dropout(input, module.dropout, training=True)
    ends = tuple(torch.cat(kept) for kept in last)
    return input, ends if len(ends) > 1 else ends[0]


def _states(module: nn.RNNBase, input: torch.Tensor, hx: Any, directions: int) -> tuple[torch.Tensor, ...]:
    if hx is not None:
        return tuple(hx) if isinstance(hx, (tuple, list)) else (hx,)
    rows = input.shape[0] if module.batch_first else input.shape[1]
    layers = module.num_layers * directions
    sizes = [module.hidden_size]
    if isinstance(module, nn.LSTM):
        sizes = [module.proj_size or module.hidden_size, module.hidden_size]
    return tuple(torch.zeros(layers, rows, size, dtype=input.dtype, device=input.device) for size in sizes)
