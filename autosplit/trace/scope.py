"""What a recording enters and what it takes as one call.

leaf      a layer of torch.nn, a linear layer with a packed weight, a module with hooks: one call, run by its own code
entered   everything else: its Python runs, its operations are recorded one by one
opaque    a module in whose own Python something cannot be recorded: one call, whatever its size
stack     a recurrent network of several layers: run layer by layer, each layer and dropout an operation of its own
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import nn
from torch.nn.modules.module import _has_any_global_hook

from autosplit.trace.borrowed.holders import HOOK_TABLES
from autosplit.trace.borrowed.hooks import is_of_model
from autosplit.trace.inputs.objects import mapped
from autosplit.trace.recording.recording import Call

CONTAINERS = (
    nn.Sequential,
    nn.ModuleList,
    nn.ModuleDict,
    nn.Transformer,
    nn.TransformerEncoder,
    nn.TransformerDecoder,
)
STATEFUL_LEAVES = (nn.modules.batchnorm._NormBase,)
_STATISTICS = {
    nn.functional.batch_norm: ("training", 5),
    nn.functional.instance_norm: ("use_input_stats", 5),
    torch.batch_norm: ("training", 5),
    torch.instance_norm: ("use_input_stats", 5),
    torch.native_batch_norm: ("training", 5),
}
CALLS = ("_wrapped_call_impl", "_call_impl")
"""What a call of a module goes through, which may be replaced."""
_CALLED = nn.Module.__call__, nn.Module._wrapped_call_impl, nn.Module._call_impl
_FEATURES = (("out_features", "in_features"), ("outfeatures", "infeatures"))
"""What libraries call how many features come out of a linear layer and go in."""
_ATTENTION = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer, nn.MultiheadAttention)


class Casts(NamedTuple):
    """What floating inputs and outputs of a module are cast to; None: they are not."""

    inputs: torch.dtype | None
    outputs: torch.dtype | None


@dataclass(frozen=True)
class Answer:
    """What a value read gave: the stable name of the reading call, the value, and the line of the model that reads."""

    name: str
    value: Any
    line: str = ""


@dataclass(frozen=True)
class OpaqueModule:
    """A module that is one call: why, and why the call must see the whole batch (or "")."""

    reason: str
    whole: str = ""


@dataclass(frozen=True)
class Scope:
    """The modules that a recording enters, the opaque ones, and the answers to value reads.

    Attributes:
        entered: leaves that are entered all the same, because their parameters are used elsewhere too.
        opaque: modules that are one call.
        answers: the values of the reads that are recorded, in order.
        deciding: lines of code in which a number that is read does more than to be kept.
        whole_norms: whether batch norms that keep running statistics see the whole batch at once.
        on_cpu: whether all tensors are taken to lie on the CPU, wherever they lie.
        home: the device that the model lay on when it was recorded; None: on several, or it has no tensors.
        blocks: modules that the caller wants to be one call, unless their parameters are used elsewhere too.
        casts: the dtypes of floating inputs and outputs of modules, where the caller sets them.
    """

    entered: frozenset[str] = frozenset()
    opaque: Mapping[str, OpaqueModule] = field(default_factory=dict)
    answers: tuple[Answer, ...] = ()
    deciding: frozenset[str] = frozenset()
    whole_norms: bool = False
    on_cpu: bool = False
    home: torch.device | None = None
    blocks: frozenset[str] = frozenset()
    casts: Mapping[str, Casts] = field(default_factory=dict)

    def only_keeps(self, read: str, line: str) -> bool:
        """Tell whether a read of a value in a line of code is taken to keep the number and no more."""
        return read == "item" and line != "" and line not in self.deciding

    def is_leaf(self, module: nn.Module, path: str) -> bool:
        """Tell whether a module is recorded as one call."""
        if path in self.opaque or has_hooks(module):
            return True
        if path in self.entered:
            return False
        if path in self.blocks:
            return True
        if not is_layer(module):
            return is_quantised(module)
        if isinstance(module, _ATTENTION):
            return takes_fast_path(module)
        return not isinstance(module, CONTAINERS)


def cast(value: Any, dtype: torch.dtype | None) -> Any:
    """Return a nested value with its floating tensors in a dtype; None: as it is."""

    def one(leaf: Any) -> Any:
        floats = isinstance(leaf, torch.Tensor) and leaf.dtype.is_floating_point and leaf.dtype != dtype
        return leaf.to(dtype) if floats else leaf

    return value if dtype is None else mapped(one, value)


def is_layer(module: nn.Module) -> bool:
    """Tell whether a module is one of torch's own; losses are entered, for their functions say what they reduce."""
    home = type(module).__module__
    return home.startswith("torch.nn") and not home.startswith(("torch.nn.utils", "torch.nn.modules.loss"))


def is_plain_layer(module: nn.Module) -> bool:
    """Tell whether a call of a module is the forward of a layer of torch that has no other list of its parameters."""
    attributes = vars(module)
    tables = ("_modules", *HOOK_TABLES, "_compiled_call_impl")
    names = (*attributes["_parameters"], *attributes["_buffers"], "forward", *CALLS)
    alone = not any(map(attributes.get, tables)) and attributes.keys().isdisjoint(names)
    return alone and is_layer(module) and is_called_as_torchs(type(module)) and not isinstance(module, nn.RNNBase)


def is_quantised(module: nn.Module) -> bool:
    """Tell whether a module is a linear layer with a packed weight, by its interface.

    It has no modules inside, says how many features come out and go in, and holds integers: in a parameter, as
    bitsandbytes' layers do, or in a buffer, as those of GPTQ and AWQ do.
    """
    return bool(not module._modules and not is_layer(module) and features_of(module) and codes_of(module))


def features_of(module: nn.Module) -> tuple[int, int] | None:
    """Return how many features come out of a linear layer and go in, as it says itself; None where it does not."""
    sizes = [tuple(getattr(module, name, None) for name in names) for names in _FEATURES]
    return next(((out, taken) for out, taken in sizes if type(out) is int and type(taken) is int), None)


def codes_of(module: nn.Module) -> list[torch.Tensor]:
    """Return the parameters and buffers of a module itself that are integers, but for single numbers."""
    tensors = (*module._parameters.values(), *module._buffers.values())
    return [t for t in tensors if t is not None and t.dim() and not (t.is_floating_point() or t.is_complex())]


def packed_result(module: nn.Module, value: torch.Tensor) -> torch.Tensor:
    """Return a tensor like what a layer that `is_quantised` gives: input [..., in], result [..., out] in its dtype."""
    out, _ = features_of(module) or (0, 0)
    result, bias = value[..., :1] * value.new_empty(out), module._parameters.get("bias")
    return result if bias is None else (result + bias).to(value.dtype)


def has_hooks(module: nn.Module) -> bool:
    """Tell whether hooks want to see a module's calls.

    The hooks by which transformers' models collect their own hidden states and router logits, and those that let the
    embeddings of a frozen model require gradients, are part of the model: they are recorded with it.
    """
    others = not all(map(is_of_model, module._forward_hooks.values()))
    return bool(others or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks)


def has_module_hooks() -> bool:
    """Tell whether there are hooks on every module's call, as ``FlopCounterMode`` and trackers of modules set them."""
    return bool(_has_any_global_hook())


def runs_only(module: nn.Module, forward: Any) -> bool:
    """Tell whether a call of a module is that forward, of its class, and nothing else."""
    alone = getattr(module.forward, "__func__", None) is forward and not has_module_hooks()
    more = any(map(vars(module).get, (*HOOK_TABLES, *CALLS, "_compiled_call_impl")))
    return alone and not more and is_called_as_torchs(type(module))


def is_called_as_torchs(kind: type[nn.Module]) -> bool:
    """Tell whether modules of a class are called as torch's are: nobody has replaced how."""
    return (kind.__call__, kind._wrapped_call_impl, kind._call_impl) == _CALLED


def takes_fast_path(module: nn.Module) -> bool:
    """Tell whether torch may run an attention layer by its inference kernel, which rounds and pads in its own way."""
    if module.training or not torch.backends.mha.get_fastpath_enabled():
        return False
    return not (torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters()))


def pads_in_its_own_way(module: nn.Module, args: Any, kwargs: Any) -> bool:
    """Tell whether torch's encoder may take its fast path with padding: that path puts zeros where padding is."""
    if not isinstance(module, nn.TransformerEncoder) or not takes_fast_path(module):
        return False
    return kwargs.get("src_key_padding_mask", args[2] if len(args) > 2 else None) is not None


def takes_statistics(call: Call) -> bool:
    """Tell whether a call is a functional norm in training: it changes the statistics that it is given."""
    if call.target not in _STATISTICS:
        return False
    name, position = _STATISTICS[call.target]
    return bool(call.kwargs.get(name, call.args[position] if len(call.args) > position else False))


# -- stacks of recurrent layers ----------------------------------------------------------------------------------------
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
    hidden: Any = states if len(states) > 1 else states[0]
    module.check_forward_args(input, hidden, None)  # the kernels check nothing
    run = _RUN[module.mode, getattr(module, "nonlinearity", "tanh")]
    count = len(module._flat_weights_names) // module.num_layers
    last: list[list[torch.Tensor]] = [[] for _ in states]
    for layer in range(module.num_layers):
        names = module._flat_weights_names[layer * count : (layer + 1) * count]
        weights = [getattr(module, name) for name in names]
        first = layer * directions
        layer_states = [state[first : first + directions] for state in states]
        hidden = tuple(layer_states) if len(layer_states) > 1 else layer_states[0]
        input, *new = run(
            input, hidden, weights, module.bias, 1, 0.0, module.training, module.bidirectional, module.batch_first
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
