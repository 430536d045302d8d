"""The outputs of one step before any of them is there, the targets that belong to them, and which a loss uses.

A model that returns its cache beside its logits would have every layer's keys and values brought to the last stage for
a loss that looks at the logits alone. So the loss is called once on outputs without values, while every operation says
which of them it takes. In the step the others are placeholders: they tell sizes, and raise where values are asked for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.utils._pytree as pytree
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from autosplit.errors import InputError
from autosplit.runtime.loss.parts import call_loss
from autosplit.runtime.ops import rows_along
from autosplit.runtime.step.step import Step
from autosplit.trace.graph import INFO, NodeClass, TensorInfo
from autosplit.trace.inputs.objects import take_apart, tensors_in


@dataclass(frozen=True)
class Shape:
    """The sizes of one output, and which of its dimensions is the batch."""

    sizes: tuple[int, ...]
    batch_dim: int

    @property
    def elements(self) -> int:
        """The number of elements."""
        return math.prod(self.sizes)

    def without(self, dim: int) -> tuple[int, ...]:
        """Return the sizes without one dimension."""
        return self.sizes[:dim] + self.sizes[dim + 1 :]


class Outputs:
    """The outputs of one step."""

    def __init__(self, step: Step) -> None:
        self.step = step
        self.nodes: tuple[Any, ...] = step.lowered.outputs
        """The flat outputs: fx nodes, and constants as they are."""

    def by_rows(self, wants: frozenset[str] | None) -> bool:
        """Tell whether every output that is used is known per microbatch: it is the batch's rows, or a constant."""
        used = [n for n in self.nodes if isinstance(n, fx.Node) and (wants is None or n.name in wants)]
        return self.step.lowered.epilogue is None and not any(
            INFO not in node.meta or node.meta[INFO].node_class is not NodeClass.MICRO for node in used
        )

    def shapes(self) -> list[Shape]:
        """Return the shapes of the outputs that have a batch."""
        dims = self.step.lowered.traced.batch_outputs
        pairs = zip(self.nodes, dims, strict=True)
        rows, lengths = self.step.rows, self.step.lengths
        return [Shape(_info(node).shape_at(rows, lengths), dim) for node, dim in pairs if dim is not None]

    def stand_in(self, microbatch: int | None = None, *, zeros: bool = False) -> Any:
        """Return an output of the right shapes and dtypes for a microbatch, or for the whole batch (None).

        Its tensors have no values; with ``zeros`` they are zeros on the last stage's device, and take no memory.
        """
        return self.step.lowered.traced.unflatten(self.leaves(microbatch, zeros=zeros))

    def leaves(self, microbatch: int | None = None, *, zeros: bool = False) -> list[Any]:
        """Return the flat leaves of :meth:`stand_in`."""
        rows, lengths = self.step.rows, self.step.lengths
        if microbatch is not None:
            rows, lengths = self.step.sizes[microbatch], self.step.call(microbatch)[0].lengths
        leaves: list[Any] = []
        for node in self.nodes:
            if not (isinstance(node, fx.Node) and INFO in node.meta):
                leaves.append(node)
                continue
            shape, dtype = _info(node).shape_at(rows, lengths), _info(node).dtype
            if zeros:
                leaves.append(torch.zeros((), dtype=dtype, device=self.step.lanes[-2].device).expand(shape))
            else:
                leaves.append(torch.empty(shape, dtype=dtype, device="meta"))
        return leaves


def _info(node: fx.Node) -> TensorInfo:
    tensor: TensorInfo = node.meta[INFO].tensors[0]
    return tensor


def split_target(target: Any, sizes: Sequence[int], *, outputs: Sequence[Shape] = ()) -> list[Any]:
    """Cut every tensor of a target into microbatches; other values and tensors without dimensions go to all of them.

    The batch dimension of a target with the shape of one of the model's ``outputs``, with or without its dimension of
    classes, is that of the output; of others the first one, or else the only one of the batch's size.

    Raises InputError for a tensor of another batch size.
    """
    rows = sum(sizes)
    leaves, rebuild = take_apart(target)
    pieces: list[list[Any]] = []
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor) or leaf.dim() == 0:
            _check_plain(leaf)
            pieces.append([leaf] * len(sizes))
        else:
            pieces.append(list(rows_along(leaf, sizes, _batch_dim(leaf, rows, outputs))))
    if not pieces:
        return [target] * len(sizes)
    return [rebuild(list(parts)) for parts in zip(*pieces, strict=True)]


def _batch_dim(target: torch.Tensor, rows: int, outputs: Sequence[Shape]) -> int:
    shape = tuple(target.shape)
    for output in outputs:
        if output.sizes == shape:
            return output.batch_dim
    for output in outputs:
        for classes in range(len(output.sizes)):
            if classes != output.batch_dim and output.without(classes) == shape:
                return output.batch_dim - (classes < output.batch_dim)
    if shape[0] == rows or (shape[0] and shape[0] % rows == 0 and _gives(outputs, rows, shape[0] // rows)):
        return 0
    fitting = [dim for dim, size in enumerate(shape) if size == rows]
    if len(fitting) == 1:
        return fitting[0]
    raise InputError(
        f"the target has shape {list(shape)}, the batch {rows} rows; give one target row per batch row, and what has "
        "no batch by functools.partial(loss_fn, ...), or say by batch_dims= which dimension of the inputs is the batch"
    )


def _gives(outputs: Sequence[Shape], rows: int, entries: int) -> bool:
    """Tell whether a row of an output may have that many entries with a target each, as tokens have."""
    return not outputs or any(output.elements % (rows * entries) == 0 for output in outputs)


def _check_plain(leaf: Any) -> None:
    if isinstance(leaf, np.ndarray) and leaf.ndim:
        raise InputError(f"the target holds a numpy array of shape {list(leaf.shape)}; give a tensor")
    held = leaf.values() if isinstance(leaf, Mapping) else vars(leaf).values() if hasattr(leaf, "__dict__") else ()
    if any(isinstance(value, torch.Tensor) for value in held):
        raise InputError(
            f"the target is a {type(leaf).__name__}, whose tensors cannot be cut into microbatches; give a tensor, or "
            "a tuple, list, dict or dataclass of them"
        )


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
    uses = _OutputUses(names)
    try:
        with mode, torch.no_grad(), torch.random.fork_rng([]), uses:
            loss = call_loss(loss_fn, outputs.step.lowered.traced.unflatten(leaves), blank)
    except Exception:  # it reads values, which decide what it uses
        return None
    used = uses.used | ({names[id(loss)]} if id(loss) in names else set())
    return None if used == set(names.values()) else frozenset(used)


class _OutputUses(TorchFunctionMode):
    def __init__(self, names: dict[int, str]) -> None:
        super().__init__()
        self.names = names
        self.used: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _name(func) not in _SIZES:
            self.used |= {self.names[id(t)] for t in tensors_in((args, kwargs)) if id(t) in self.names}
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
        return torch.cat([piece.as_subclass(torch.Tensor) for piece in parts], dim).as_subclass(Placeholder)


def _name(func: Any) -> str:
    name = getattr(func, "__name__", "")
    return str(func.__self__.__name__) if name == "__get__" else name
