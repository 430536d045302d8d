"""Which uses of a value send it exactly one gradient.

Gradients of several uses add from the last use to the first. A use that sends several has them summed in a view of its
own first, so that the sum is the same on any cut; one that sends a single gradient needs no view.
"""

from __future__ import annotations

from typing import Any

from torch import fx, nn

from autosplit.trace.recording.recording import under
from autosplit.trace.scope import has_hooks, is_layer

_ONCE = frozenset(
    "abs adaptive_avg_pool2d add avg_pool2d bmm cat chunk clamp conv1d conv2d conv3d cos div exp expand gelu "
    "group_norm layer_norm leaky_relu linear log log_softmax masked_fill matmul max_pool2d mean mm mul narrow neg "
    "permute pow relu reshape rms_norm rsqrt scaled_dot_product_attention sigmoid silu sin softmax split sqrt "
    "square stack sub sum tanh transpose truediv unbind unsqueeze view where".split()
)
"""Functions of torch, methods of tensors and operators that send each tensor among their arguments one gradient.

Not those that may return their argument itself, as ``contiguous`` does: it gets a gradient per use of the result.
"""
_PASSING = (nn.Identity, nn.Flatten, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)
"""Layers that may return their input itself."""
_HOMES = ("torch", "_operator")


def takes_once(node: fx.Node, operand: fx.Node, root: nn.Module) -> bool:
    """Tell whether a recorded call of a model is known to send one gradient back to an operand."""
    operands: list[fx.Node] = []
    fx.node.map_arg((node.args, node.kwargs), operands.append)
    if operands.count(operand) != 1:
        return False
    if node.op == "call_module":
        module = root.get_submodule(str(node.target))
        simple = is_layer(module) and not module._modules and not has_hooks(module)
        return simple and not isinstance(module, (nn.RNNBase, *_PASSING))
    target: Any = node.args[1] if node.target is under else node.target
    if isinstance(target, str):
        return target in _ONCE
    home = getattr(target, "__module__", None) or "torch"
    return home.partition(".")[0] in _HOMES and getattr(target, "__name__", "") in _ONCE
