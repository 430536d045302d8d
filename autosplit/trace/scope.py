"""What a recording enters and what it takes as one call.

leaf      a layer of torch.nn, or a module with hooks: one call, run by its own code
entered   everything else: its Python runs, its operations are recorded one by one
opaque    a module in whose own Python something cannot be recorded: one call, whatever its size

``_has_any_global_hook`` is private; torch has no public way to ask. Tried on torch 2.11, 2.13 and 2.15.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import _has_any_global_hook

from autosplit.trace.borrowed.silence import COLLECTS
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
_ATTENTION = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer, nn.MultiheadAttention)


@dataclass(frozen=True)
class Answer:
    """What a value read gave: the stable name of the reading call, and the value."""

    name: str
    value: Any


@dataclass(frozen=True)
class OpaqueModule:
    """A module that is one call: why, and why the call must see the whole batch (or "")."""

    reason: str
    whole: str = ""


@dataclass(frozen=True)
class Scope:
    """What is entered, what is an opaque module, and what value reads are told.

    Attributes:
        entered: leaves that are entered all the same, because their parameters are used elsewhere too.
        opaque modules: modules that are one call.
        answers: the values of the reads that are recorded, in order; None until a read was met.
        deciding: lines of code in which a number that is read does more than to be kept.
        whole_norms: whether batch norms that keep running statistics see the whole batch at once.
    """

    entered: frozenset[str] = frozenset()
    opaque: Mapping[str, OpaqueModule] = field(default_factory=dict)
    answers: tuple[Answer, ...] | None = None
    deciding: frozenset[str] = frozenset()
    whole_norms: bool = False

    def with_opaque(self, opaque: Mapping[str, OpaqueModule]) -> Scope:
        """Return a scope with more opaque modules; its value reads have to be answered anew."""
        return replace(self, opaque={**self.opaque, **opaque}, answers=None)

    def only_keeps(self, read: str, line: str) -> bool:
        """Tell whether a read of a value in a line of code is taken to keep the number and no more."""
        return read == "item" and line != "" and line not in self.deciding

    def is_leaf(self, module: nn.Module, path: str) -> bool:
        """Tell whether a module is recorded as one call."""
        if path in self.opaque or has_hooks(module):
            return True
        if path in self.entered or not is_layer(module):
            return False
        if isinstance(module, _ATTENTION):
            return takes_fast_path(module)
        return not isinstance(module, CONTAINERS)


def is_layer(module: nn.Module) -> bool:
    """Tell whether a module is one of torch's own; losses are entered, for their functions say what they reduce."""
    home = type(module).__module__
    return home.startswith("torch.nn") and not home.startswith(("torch.nn.utils", "torch.nn.modules.loss"))


def has_hooks(module: nn.Module) -> bool:
    """Tell whether hooks want to see a module's calls.

    The hooks by which transformers' models collect their own hidden states and router logits are part of the model:
    they are recorded with it.
    """
    own = all(getattr(hook, "__module__", "") == COLLECTS for hook in module._forward_hooks.values())
    return bool(not own or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks)


def has_module_hooks() -> bool:
    """Tell whether there are hooks on every module's call, as ``FlopCounterMode`` and trackers of modules set them."""
    return bool(_has_any_global_hook())


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
