"""Which outputs a loss uses: the others are not kept, moved or merged in a training step.

A model that returns its cache beside its logits would have every layer's keys and values brought to the last stage for
a loss that looks at the logits alone. So the loss is called once on outputs without values, while every operation says
which of them it takes. In the step the others are placeholders: they tell sizes, and raise where values are asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from autosplit.errors import InputError
from autosplit.runtime.loss.outputs import Outputs
from autosplit.runtime.loss.parts import call_loss
from autosplit.trace.graph import INFO
from autosplit.trace.inputs.structure import tensors_in

_SIZES = frozenset("shape size dim ndim ndimension numel nelement __len__ dtype is_floating_point is_complex".split())


def used_outputs(loss_fn: Callable[..., Any], outputs: Outputs, target: Any) -> frozenset[str] | None:
    """Return the names of the values that a loss uses of a model's outputs; None: of all, or nobody can tell."""
    nodes = [node for node in outputs.nodes if isinstance(node, fx.Node) and INFO in node.meta]
    if len(set(nodes)) < 2 or hasattr(loss_fn, "_torchdynamo_orig_callable"):
        return None
    mode, device = FakeTensorMode(allow_non_fake_inputs=True), outputs.step.lanes[-2].device
    with mode, torch.no_grad():
        leaves = [
            torch.empty(leaf.shape, dtype=leaf.dtype, device=device) if isinstance(leaf, torch.Tensor) else leaf
            for leaf in outputs.leaves()
        ]
    names = {
        id(leaf): node.name for node, leaf in zip(outputs.nodes, leaves, strict=True) if isinstance(leaf, torch.Tensor)
    }
    blank = pytree.tree_map_only(torch.Tensor, mode.from_tensor, target)
    uses = _Uses(names)
    try:
        with mode, torch.no_grad(), torch.random.fork_rng([]), uses:
            loss = call_loss(loss_fn, outputs.step.lowered.traced.unflatten(leaves), blank)
    except Exception:  # it reads values, which decide what it uses
        return None
    found = uses.found | ({names[id(loss)]} if id(loss) in names else set())
    return None if found == set(names.values()) else frozenset(found)


class _Uses(TorchFunctionMode):
    def __init__(self, names: dict[int, str]) -> None:
        super().__init__()
        self.names = names
        self.found: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _name(func) not in _SIZES:
            self.found |= {self.names[id(t)] for t in tensors_in((args, kwargs)) if id(t) in self.names}
        return func(*args, **kwargs)


class Placeholder(torch.Tensor):
    """An output that the loss does not use: it tells its sizes and raises InputError for anything else."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _name(func) not in _SIZES:
            raise InputError(
                "loss_fn uses an output of the model that it did not use before: what it uses may depend on its "
                "arguments' sizes and on whole numbers that it holds, and on nothing else; call pipe(x) and "
                "loss.backward(), which give it all outputs"
            )
        return super().__torch_function__(func, types, args, kwargs or {})


def with_placeholders(outputs: Outputs, values: Sequence[Any], microbatch: int) -> list[Any]:
    """Return flat outputs of a microbatch with placeholders where a value is None, and the output is a tensor."""
    if all(value is not None for value in values):
        return list(values)
    blank = outputs.leaves(microbatch)
    return [
        other.as_subclass(Placeholder) if value is None and isinstance(other, torch.Tensor) else value
        for value, other in zip(values, blank, strict=True)
    ]


def joined(parts: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    """Join the microbatches of an output; placeholders give one of the whole batch's sizes."""
    if not isinstance(parts[0], Placeholder):
        return torch.cat(list(parts), dim)
    with torch._C.DisableTorchFunctionSubclass():
        return torch.cat([part.as_subclass(torch.Tensor) for part in parts], dim).as_subclass(Placeholder)


def _name(func: Any) -> str:
    name = getattr(func, "__name__", "")
    return str(func.__self__.__name__) if name == "__get__" else name
