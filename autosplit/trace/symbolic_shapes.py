"""Shapes of operations under symbolic sizes that need not be computed: what has been seen before, and recurrent layers.

Symbolic shapes cost about ten times what plain ones do. Blocks of a model ask for the same operations on operands of
the same shapes again and again: from the second time on, the result is made from what the first one looked like.

Private in torch is ``FakeTensor``, whose constants must not be taken for any other tensor (tried on torch 2.13).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode

from autosplit.trace.random_watch import RandomWatch
from autosplit.trace.structure import tensors_in

_SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)
_PLAIN = (bool, int, float, str, type(None), type(...), torch.dtype, torch.device, torch.layout, torch.memory_format)
_ASKS = frozenset("__get__ __set__ __setitem__ untyped_storage stride size storage_offset dim numel item".split())
_RECURRENT = {torch.lstm: 2, torch.gru: 1, torch.rnn_tanh: 1, torch.rnn_relu: 1}


class _Unknown(Exception):
    """An operand is no plain value: the operation is run."""


class ShapeMemory(TorchFunctionMode):
    """Runs every operation once for operands of equal shapes; see the module's docstring.

    Args:
        repeats: whether results are made from earlier ones. They are leaves for autograd then, so a model that changes
            one in place needs a recording without.
    """

    def __init__(self, *, repeats: bool) -> None:
        super().__init__()
        self.repeats = repeats
        self._known: dict[Any, tuple[type, list[tuple[Any, ...]]]] = {}
        self._random = RandomWatch()

    def watch(self, random: RandomWatch) -> None:
        """Run what draws random numbers every time, as ``random`` tells."""
        self._random = random

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _RECURRENT:
            return _recurrent(_RECURRENT[func], *args, **kwargs)
        key = self._key(func, args, kwargs) if self.repeats else None
        if key is None:
            return func(*args, **kwargs)
        if key in self._known:
            return _made(*self._known[key])
        inputs = tensors_in((args, kwargs))
        versions = [tensor._version for tensor in inputs]
        drawn = len(self._random.drawn)
        out = func(*args, **kwargs)
        found = [out] if isinstance(out, torch.Tensor) else out
        if (
            (isinstance(out, torch.Tensor) or type(out) in (tuple, list))
            and all(isinstance(tensor, FakeTensor) and tensor.layout is torch.strided for tensor in found)
            and not any(tensor is other for tensor in found for other in inputs)
            and versions == [tensor._version for tensor in inputs]
            and drawn == len(self._random.drawn)
        ):
            self._known[key] = type(out), [_looks(tensor) for tensor in found]
        return out

    def _key(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Return all that the result's shapes depend on; None where that is not known."""
        name = getattr(func, "__name__", "__get__")
        if name in _ASKS or (name.endswith("_") and not name.endswith("__")):
            return None
        autocast = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
        try:
            return func, torch.is_grad_enabled(), autocast, _described(args), _described(kwargs)
        except _Unknown:
            return None


def _described(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        if not isinstance(value, FakeTensor) or value.constant is not None or value.layout is not torch.strided:
            raise _Unknown
        sizes = tuple(map(_described, value.shape)), tuple(map(_described, value.stride()))
        return "tensor", sizes, value.dtype, value.device, value.requires_grad
    if isinstance(value, _SYMBOLS):
        return "symbol", value.node.expr
    if isinstance(value, _PLAIN):
        return type(value), value
    if isinstance(value, slice):
        return "slice", _described(value.start), _described(value.stop), _described(value.step)
    if isinstance(value, (tuple, list)):
        return type(value), tuple(map(_described, value))
    if isinstance(value, dict):
        return "dict", tuple((key, _described(part)) for key, part in value.items())
    raise _Unknown


def _looks(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.device, tensor.requires_grad


def _made(kind: type, looks: Sequence[tuple[Any, ...]]) -> Any:
    made = []
    for shape, strides, dtype, device, requires_grad in looks:
        tensor = torch.empty_strided(shape, strides, dtype=dtype, device=device)
        made.append(tensor.requires_grad_() if requires_grad else tensor)
    return kind(made) if kind in (tuple, list) else made[0]


def _recurrent(states: int, input: torch.Tensor, hx: Any, weights: Sequence[torch.Tensor], *options: Any) -> Any:
    """Return tensors like those of ``torch.lstm`` and its like on a padded batch, which fake tensors cannot tell."""
    if len(options) != 6:
        raise NotImplementedError("a packed sequence has no symbolic length")
    bidirectional = options[4]
    given = hx if states > 1 else (hx,)
    width = given[0].shape[-1] * (2 if bidirectional else 1)
    output = input.new_empty((*input.shape[:-1], width))
    found = [output, *(torch.empty_like(state) for state in given)]
    if torch.is_grad_enabled() and any(t.requires_grad for t in (input, *given, *weights)):
        found = [tensor.requires_grad_().clone() for tensor in found]
    return tuple(found)
