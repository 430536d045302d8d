"""What an operation is known to do with the rows that it is given."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx, nn

from autosplit.trace.calls import apply_function, invoke, under
from autosplit.trace.graph import INFO
from autosplit.trace.scope import has_hooks

REARRANGING = frozenset(
    "getitem getattr view view_as reshape reshape_as transpose permute flip fliplr flipud roll unflatten flatten "
    "gather index_select take_along_dim contiguous clone chunk split split_with_sizes tensor_split unbind squeeze "
    "unsqueeze expand expand_as narrow select movedim moveaxis swapaxes swapdims t cat concat stack detach".split()
)
SHAPE_ONLY = frozenset(
    "new_zeros new_ones new_empty new_full new_tensor zeros_like ones_like empty_like full_like rand_like randn_like "
    "randint_like".split()
)
UNSET = frozenset("empty new_empty empty_like empty_strided new_empty_strided".split())
ALONG = frozenset(
    "cumsum cumprod cummax cummin logcumsumexp softmax log_softmax softmin sort argsort diff normalize".split()
)
_BY_FREQUENCY = {"embedding": 5, "embedding_bag": 5}
"""Where functions take `scale_grad_by_freq`."""
_MODULES = (nn.Flatten, nn.Unflatten, nn.Identity, nn.PixelShuffle, nn.PixelUnshuffle)


def function_of(node: fx.Node, root: nn.Module) -> Any:
    """Return the function, method or module that a node calls, also when it is wrapped in an ambient state."""
    if node.op == "call_module":
        return root.get_submodule(str(node.target))
    if node.op == "call_method":
        return getattr(torch.Tensor, str(node.target), None)
    if node.target is under and isinstance(node.args[1], fx.Node):
        name = str(node.args[1].target)
        return getattr(root, name) if name.startswith("_object") else root.get_submodule(name)
    return node.target


def is_torchs(node: fx.Node, root: nn.Module) -> bool:
    """Tell whether none of the user's own Python runs in a call, which may do something else each time."""
    called = function_of(node, root)
    if called is under:
        called = node.args[1]
    if isinstance(called, nn.Module):
        return type(called).__module__.startswith("torch.nn.") and not has_hooks(called)
    return called not in (apply_function, invoke)


def rearranges(node: fx.Node, root: nn.Module) -> bool:
    """Tell whether an operation only moves values: indexing, views, permutations, concatenation."""
    function = function_of(node, root)
    if isinstance(function, nn.Module):
        return isinstance(function, _MODULES)
    return _name(function) in REARRANGING or function in (operator.getitem, getattr)


def takes_shape_only(node: fx.Node, root: nn.Module) -> bool:
    """Tell whether an operation reads no value of its tensor operand, only shape and dtype."""
    return _name(function_of(node, root)) in SHAPE_ONLY


def leaves_unset(node: fx.Node, root: nn.Module) -> bool:
    """Tell whether an operation gives memory as it is, for others to fill."""
    return _name(function_of(node, root)) in UNSET


def permutes_at_random(node: fx.Node, root: nn.Module) -> bool:
    """Tell whether an operation draws row numbers: drawn per microbatch they would name other rows."""
    info = node.meta.get(INFO)
    if info is None or not info.random:
        return False
    name = _name(function_of(node, root))
    bounds = node.args[:2] if name == "randint" else ()
    return name in ("randperm", "multinomial") or any(isinstance(bound, fx.Node) for bound in bounds)


def runs_along_batch(node: fx.Node, root: nn.Module) -> bool:
    """Tell whether an operation runs along the batch dimension of its operand: a cumulative sum, a sort, a softmax."""
    source = node.args[0] if node.args and isinstance(node.args[0], fx.Node) else None
    if source is None or INFO not in source.meta or not source.meta[INFO].tensors:
        return False
    function = function_of(node, root)
    if isinstance(function, nn.Module):
        dim = getattr(function, "dim", None) if isinstance(function, (nn.Softmax, nn.LogSoftmax, nn.Softmin)) else None
    elif _name(function) in ALONG:
        dim = node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else None)
    else:
        return False
    tensor = source.meta[INFO].tensors[0]
    return isinstance(dim, int) and bool(tensor.shape) and dim % len(tensor.shape) == tensor.batch_dim


def mixes_gradients(node: fx.Node, root: nn.Module) -> bool:
    """Tell whether an operation is known to mix rows in its backward only."""
    function = function_of(node, root)
    if isinstance(function, (nn.Embedding, nn.EmbeddingBag)):
        return function.scale_grad_by_freq
    position = _BY_FREQUENCY.get(_name(function)) if node.op == "call_function" else None
    if position is None:
        return False
    return bool(node.kwargs.get("scale_grad_by_freq", node.args[position] if len(node.args) > position else False))


def _name(function: Any) -> str:
    return str(getattr(function, "__name__", "")).strip("_")
