"""Tensors of a fixed size that are made with the type of another one's: they take nothing else from it.

    x.new_zeros((h, w))  ─►  torch.zeros((h, w), dtype=..., device=...)
    table.type_as(x)     ─►  table.to(dtype)

As a method of ``x``, a mask over positions would seem to depend on the batch, and with it all that it is added to.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autosplit.trace.build import RawGraph
from autosplit.trace.calls import under
from autosplit.trace.graph import INFO
from autosplit.trace.kinds import function_of

_MAKERS: dict[Any, Any] = {
    torch.Tensor.new_zeros: torch.zeros,
    torch.Tensor.new_ones: torch.ones,
    torch.Tensor.new_empty: torch.empty,
    torch.Tensor.new_full: torch.full,
}


def free_sources(raw: RawGraph) -> None:
    """Rewrite what takes no more than a type from another tensor: sources of a fixed size, and casts."""
    devices = {parameter.device for parameter in raw.root.parameters()}
    if len(devices) != 1:
        return
    for node in raw.graph.nodes:
        info = node.meta.get(INFO)
        if info is None or node.op not in ("call_method", "call_function") or len(info.tensors) != 1:
            continue
        if function_of(node, raw.root) is torch.Tensor.type_as and node.op == "call_method":
            node.target, node.args, node.kwargs = "to", (node.args[0], info.tensors[0].dtype), {}
            continue
        maker = _MAKERS.get(function_of(node, raw.root)) if not info.tensors[0].varying_dims else None
        if maker is not None:
            _free(node, maker, dtype=info.tensors[0].dtype, device=next(iter(devices)))


def _free(node: fx.Node, maker: Any, *, dtype: torch.dtype, device: torch.device) -> None:
    args = node.args[3:] if node.target is under else node.args[1:]
    options = {"dtype": dtype, "device": device, **{k: v for k, v in node.kwargs.items() if k not in ("dtype", "size")}}
    if "size" in node.kwargs:
        args = (node.kwargs["size"], *args)
    elif args and not isinstance(args[0], (tuple, list)):
        args = (args,)
    if "device" in node.kwargs and node.kwargs["device"] is None:
        options["device"] = device
    node.op, node.target = "call_function", maker
    node.args, node.kwargs = args, options
