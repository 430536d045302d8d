"""What stands behind tensors in autograd's graph: its leaves, and what its nodes have saved."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch


def leaves_behind(tensors: Sequence[torch.Tensor], stop: Sequence[Any] = ()) -> Iterator[torch.Tensor]:
    """Yield the leaves that gradients of tensors reach, each once, but not through the nodes at which to stop."""
    leaves = (getattr(node, "variable", None) for node in _nodes_behind(tensors, stop))
    yield from (leaf for leaf in leaves if leaf is not None)


def saved_behind(tensors: Sequence[torch.Tensor]) -> set[int]:
    """Return the addresses of the storages of which autograd saved something behind tensors.

    By the attributes that nodes have for that ("Saved tensors" in torch's notes on autograd).
    """
    found: set[int] = set()
    for node in _nodes_behind(tensors):
        names = [name for name in dir(node) if name.startswith("_saved_") or name == "saved_tensors"]
        for value in (getattr(node, name) for name in names):
            every = value if isinstance(value, (tuple, list)) else (value,)
            found |= {own.untyped_storage().data_ptr() for own in every if isinstance(own, torch.Tensor)}
    return found


def _nodes_behind(tensors: Sequence[torch.Tensor], stop: Sequence[Any] = ()) -> Iterator[Any]:
    """Yield the nodes of autograd's graph behind tensors, each once, but none at which to stop, nor behind it."""
    seen: set[Any] = {None, *stop}
    todo: list[Any] = [tensor.grad_fn for tensor in tensors if tensor.requires_grad]
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        yield node
        todo += [following for following, _ in node.next_functions]
