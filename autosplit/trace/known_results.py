"""What common operations give, told by rule: new contiguous tensors, of which shape and dtype.

Torch works them out in Python, a tenth of a millisecond to several for each kind of call; the first of them imports its
compiler and sympy, a second that a plan of a convolutional net does not need.

    func, operands ─► a rule, and all operands in order ─► shapes and dtypes of the results
                  └► else                               ─► None: torch works it out

A rule holds for strided tensors whose strides are those of a new tensor of their shape, none of them empty, and (where
it does not say otherwise) of one floating dtype; on the meta device and on fake CPU tensors alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

_aten = torch.ops.aten
_FLOATS = frozenset((torch.float32, torch.float64, torch.bfloat16, torch.float16))
_GROUPED = frozenset((torch.float32, torch.bfloat16, torch.float16))
_WIDE = frozenset((torch.float32, torch.float64))
_COUNTED = _WIDE | {torch.int32, torch.int64}
_Shape = tuple[int, ...]


class New(NamedTuple):
    """A new contiguous tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def strides(self) -> tuple[int, ...]:
        """Steps from one element to the next along each dimension; there is at least one element."""
        return tuple(math.prod(self.shape[place + 1 :]) for place in range(len(self.shape)))


class Results(NamedTuple):
    """What an operation gives; ``several``: as a tuple. A result that is not asked for is None."""

    parts: tuple[New | None, ...]
    several: bool = False


def known_results(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Results | None:
    """Return what an operation gives; None: there is no rule for it, or none for such operands."""
    rule = _RULES.get(func)
    return None if rule is None else rule(args, kwargs)


def gives_first(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Tell whether an operation changes the values of its first operand, nothing else, and gives that operand."""
    if func not in _IN_PLACE or kwargs or not is_plain(args[0], floating=False):
        return False
    floating = args[0].dtype in _FLOATS
    return all(
        (isinstance(value, int) and args[0].dtype is not torch.bool) or (isinstance(value, float) and floating)
        if not isinstance(value, torch.Tensor)
        else is_plain(value, floating=False) and value.shape == args[0].shape and value.dtype is args[0].dtype
        for value in args[1:]
    )


def is_plain(tensor: Any, *, floating: bool = True, spread: bool = False) -> bool:
    """Tell whether a value is a tensor, not empty, whose strides are those of a new one of its shape.

    ``spread``: or of one that was expanded since.
    """
    if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
        return False
    if floating and tensor.dtype not in _FLOATS:
        return False
    step = 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        if not size or (stride != step and (stride or not spread)):
            return False
        step *= size if stride else 1
    return True


def _alike(*tensors: Any) -> bool:
    """Tell whether values are plain tensors of one dtype; None is passed over."""
    own = [tensor for tensor in tensors if tensor is not None]
    return all(is_plain(tensor) and tensor.dtype is own[0].dtype for tensor in own)


def _like(tensor: torch.Tensor) -> Results:
    return Results((New(tuple(tensor.shape), tensor.dtype),))


# -- element by element ------------------------------------------------------------------------------------------------
def _unary(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Results | None:
    """One tensor, and numbers behind it."""
    given, *numbers = args
    return _like(given) if is_plain(given, spread=True) and _numbers((*numbers, *kwargs.values())) else None


def _binary(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Results | None:
    """Two tensors, one of which has the shape of the result, or a tensor and a number."""
    if len(args) != 2 or not _numbers(kwargs.values()) or not is_plain(args[0]):
        return None
    first, second = args
    if isinstance(second, (int, float)):
        return _like(first)
    if not _alike(first, second):
        return None
    shape = _broadcast(first.shape, second.shape)
    return None if shape is None else Results((New(shape, first.dtype),))


def _gradient(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Results | None:
    """A gradient, the operand or the result that it is for, and numbers."""
    if len(args) < 2 or not _alike(*args[:2]) or args[0].shape != args[1].shape:
        return None
    return _like(args[0]) if _numbers((*args[2:], *kwargs.values())) else None


def _broadcast(one: Sequence[int], other: Sequence[int]) -> _Shape | None:
    """Return the shape of the longer one, where the other can be repeated to it."""
    long, short = (one, other) if math.prod(one) >= math.prod(other) and len(one) >= len(other) else (other, one)
    if len(long) < len(short):
        return None
    fits = all(own in (size, 1) for own, size in zip(reversed(short), reversed(long), strict=False))
    return tuple(long) if fits else None


def _numbers(values: Any) -> bool:
    return all(isinstance(value, (int, float, str)) for value in values)


def _softmax(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Results | None:
    if len(args) != 3 or args[2] is not False or kwargs or not is_plain(args[0]):
        return None
    return _like(args[0]) if -args[0].dim() <= args[1] < args[0].dim() else None


def _softmax_gradient(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Results | None:
    fits = len(args) == 4 and args[3] is args[0].dtype and not kwargs and -args[0].dim() <= args[2] < args[0].dim()
    return _gradient(args[:2], {}) if fits else None


def _empty_like(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Results | None:
    """A tensor of the same kind; another memory format or place is left to torch."""
    allowed = all(value in (None, False) for value in kwargs.values()) and len(args) == 1
    return _like(args[0]) if allowed and is_plain(args[0], floating=False) else None


def _zeros(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Results | None:
    """Zeros of another shape and the same kind."""
    plain = len(args) == 2 and 0 not in args[1] and all(value in (None, False) for value in kwargs.values())
    return Results((New(tuple(args[1]), args[0].dtype),)) if plain and args[0].layout is torch.strided else None


# -- reductions and products -------------------------------------------------------------------------------------------
def _reduced(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Results | None:
    """A sum or a mean over dimensions; over all of them where none are given."""
    given, dims, keep = (*args, None, False)[:3] if len(args) < 3 else args
    if kwargs or not is_plain(given):
        return None
    rank = given.dim()
    gone = {dim % rank for dim in dims or () if -rank <= dim < rank} if dims else set(range(rank))
    if len(gone) < len(dims or ()):
        return None
    shape = tuple(1 if place in gone else size for place, size in enumerate(given.shape) if keep or place not in gone)
    return Results((New(shape, given.dtype),))


def _mm(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Results | None:
    """A product of two matrices, or of two rows of them; their own strides do not matter."""
    one, other = args if len(args) == 2 and not kwargs else (None, None)
    return None if one is None or other is None else _product(one, other)


def _grouped_mm(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Results | None:
    """Products of groups of rows: torch's own rule takes bfloat16 only, its kernels for the CPU any dtype."""
    one, other, *rest = args
    groups = (rest[0] if rest else kwargs.get("offs")) if one.dim() == other.dim() == 2 else None
    if one.dtype is not other.dtype or one.dtype not in _GROUPED or len(rest) > 1 or kwargs.keys() - {"offs"}:
        return None
    leads = ((len(groups),) if groups is not None else ()) if one.dim() == other.dim() == 2 else one.shape[:-2]
    rows, width = one.shape[-2], other.shape[-1]
    return Results((New((*(leads if other.dim() == one.dim() else ()), rows, width), one.dtype),))


def _addmm(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Results | None:
    """A product of two matrices, and a vector added to each of its rows."""
    if len(args) != 3 or kwargs or not is_plain(args[0]) or args[0].dtype is not args[1].dtype:
        return None
    found = _product(args[1], args[2])
    fits = found is not None and found.parts[0] is not None and tuple(args[0].shape) == found.parts[0].shape[-1:]
    return found if fits else None


def _product(one: torch.Tensor, other: torch.Tensor) -> Results | None:
    rank = one.dim()
    if rank != other.dim() or one.dtype not in _FLOATS or one.dtype is not other.dtype:
        return None
    if one.layout is not torch.strided or other.layout is not torch.strided or 0 in (*one.shape, *other.shape):
        return None
    if one.shape[-1] != other.shape[-2] or one.shape[:-2] != other.shape[:-2]:
        return None
    return Results((New((*one.shape[:-1], other.shape[-1]), one.dtype),))


# -- convolutions, pools and norms -------------------------------------------------------------------------------------
def _convolution(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Results | None:
    """A convolution over two dimensions or three, not transposed."""
    if len(args) != 9 or kwargs or args[6] is not False or not _alike(*args[:3]):
        return None
    given, weight, bias, strides, paddings, dilations, _, _, groups = args
    rank = given.dim() - 2
    if rank not in (2, 3) or weight.dim() != given.dim() or {rank} != {*map(len, (strides, paddings, dilations))}:
        return None
    if weight.shape[1] * groups != given.shape[1] or weight.shape[0] % groups:
        return None
    if bias is not None and tuple(bias.shape) != (weight.shape[0],):
        return None
    sizes = _windows(given.shape[2:], weight.shape[2:], strides, paddings, dilations)
    return None if sizes is None else Results((New((given.shape[0], weight.shape[0], *sizes), given.dtype),))


def _convolution_gradients(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Results | None:
    if len(args) != 11 or kwargs or args[7] is not False or not _alike(*args[:3]) or args[1].dim() not in (4, 5):
        return None
    gradient, given, weight, bias, *_, mask = args
    made = _convolution((given, weight, None, *args[4:10]), {})
    if made is None or made.parts[0] is None or made.parts[0].shape != tuple(gradient.shape) or (mask[2] and not bias):
        return None
    shapes = tuple(given.shape), tuple(weight.shape), (weight.shape[0],)
    parts = tuple(New(shape, given.dtype) if asked else None for shape, asked in zip(shapes, mask, strict=True))
    return Results(parts, several=True)


def _windows(
    sizes: Sequence[int], kernels: Sequence[int], strides: Sequence[int], paddings: Sequence[int], dilations: Any
) -> _Shape | None:
    """Return how many places a window has along each dimension; None where it has none in one of them."""
    found = []
    for size, kernel, stride, padding, dilation in zip(sizes, kernels, strides, paddings, dilations, strict=True):
        room = size + 2 * padding - dilation * (kernel - 1) - 1
        if room < 0 or stride < 1:
            return None
        found.append(room // stride + 1)
    return tuple(found)


def _pool(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Results | None:
    """A largest of two dimensions, with its places; windows that hang over the end are left to torch."""
    values: list[Any] = [*args, *(None, (), (0, 0), (1, 1), False)[len(args) - 1 :]]
    given, kernels, strides, paddings, dilations, hanging = values
    if kwargs or hanging or not is_plain(given) or given.dim() != 4:
        return None
    kernels, paddings, dilations = _pair(kernels), _pair(paddings), _pair(dilations)
    strides = _pair(strides) if strides else kernels
    if any(2 * padding > kernel for kernel, padding in zip(kernels, paddings, strict=True)):
        return None
    sizes = _windows(given.shape[2:], kernels, strides, paddings, dilations)
    if sizes is None:
        return None
    shape = (*given.shape[:2], *sizes)
    return Results((New(shape, given.dtype), New(shape, torch.int64)), several=True)


def _pool_gradient(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Results | None:
    if len(args) != 8 or kwargs or not _alike(*args[:2]) or not is_plain(args[7], floating=False):
        return None
    made = _pool(args[1:7], {})
    fits = made is not None and made.parts[0] is not None and made.parts[0].shape == tuple(args[0].shape)
    return _like(args[1]) if fits and args[7].shape == args[0].shape else None


def _pair(value: Any) -> tuple[int, int]:
    one, other = value if len(value) == 2 else (*value, *value)
    return one, other


def _norm(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Results | None:
    """A batch norm by the statistics of its batch."""
    if len(args) != 8 or kwargs or args[5] is not True:
        return None
    return _normed(args[0], args[1:5], (True, True, True))


def _norm_gradients(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Results | None:
    if len(args) != 10 or kwargs or args[7] is not True or not args[9][0] or args[0].shape != args[1].shape:
        return None
    return _normed(args[1], (args[0], *args[2:7]), args[9])


def _normed(given: Any, rest: Sequence[Any], mask: Sequence[bool]) -> Results | None:
    if not _alike(given, *rest) or given.dtype not in _WIDE or given.dim() < 2:
        return None
    shapes = tuple(given.shape), (given.shape[1],), (given.shape[1],)
    parts = tuple(New(shape, given.dtype) if asked else None for shape, asked in zip(shapes, mask, strict=True))
    return Results(parts, several=True)


# -- tokens ------------------------------------------------------------------------------------------------------------
def _cast(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Results | None:
    """A copy in another dtype; another place or memory format is left to torch."""
    dtype = kwargs.get("dtype")
    if len(args) != 1 or not isinstance(dtype, torch.dtype) or not is_plain(args[0], floating=False):
        return None
    others = (value for name, value in kwargs.items() if name != "dtype")
    if dtype.is_complex or args[0].is_complex() or any(value not in (None, False) for value in others):
        return None
    return Results((New(tuple(args[0].shape), dtype),))


def _cat(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Results | None:
    """Tensors of one dtype and rank, one behind the other."""
    tensors, dim = args if len(args) == 2 else (args[0], 0)
    if kwargs or not tensors or not _alike(*tensors) or not -tensors[0].dim() <= dim < tensors[0].dim():
        return None
    shapes = [list(tensor.shape) for tensor in tensors]
    if any(len(shape) != len(shapes[0]) for shape in shapes):
        return None
    length = sum(shape.pop(dim) for shape in shapes)
    if any(shape != shapes[0] for shape in shapes):
        return None
    whole = shapes[0]
    whole.insert(dim % tensors[0].dim(), length)
    return Results((New(tuple(whole), tensors[0].dtype),))


def _histogram(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Results | None:
    """Counts in the values' own dtype. Of integers a CPU has no kernel, which fakes would ask; CUDA has."""
    bins = args[1] if len(args) > 1 else kwargs.get("bins", 100)
    if not is_plain(args[0], floating=False) or args[0].dtype not in _COUNTED or bins < 1:
        return None
    return Results((New((bins,), args[0].dtype),))


def _embedding(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Results | None:
    table, places = args[:2]
    if kwargs or not is_plain(table) or table.dim() != 2 or not is_plain(places, floating=False):
        return None
    fits = places.dtype in (torch.int64, torch.int32)
    return Results((New((*places.shape, table.shape[1]), table.dtype),)) if fits else None


def _loss(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Results | None:
    """The mean or the sum over rows of what the classes' scores say of the true ones."""
    if len(args) != 5 or kwargs or args[2] is not None or args[3] not in (1, 2) or not _has_classes(*args[:2]):
        return None
    return Results((New((), args[0].dtype), New((), args[0].dtype)), several=True)


def _loss_gradient(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Results | None:
    if len(args) != 7 or kwargs or args[3] is not None or args[4] not in (1, 2) or not _has_classes(*args[1:3]):
        return None
    scalars = _alike(args[1], args[0], args[6]) and not args[0].dim() and not args[6].dim()
    return _like(args[1]) if scalars else None


def _has_classes(scores: Any, classes: Any) -> bool:
    plain = is_plain(scores) and scores.dim() == 2 and is_plain(classes, floating=False)
    return plain and classes.dtype is torch.int64 and tuple(classes.shape) == (scores.shape[0],)


_IN_PLACE = frozenset((_aten.relu_.default, _aten.add_.Tensor, _aten.mul_.Tensor, _aten.zero_.default))
_RULES: dict[Any, Callable[[Sequence[Any], Mapping[str, Any]], Results | None]] = {
    _aten.convolution.default: _convolution,
    _aten.convolution_backward.default: _convolution_gradients,
    _aten.max_pool2d_with_indices.default: _pool,
    _aten.max_pool2d_with_indices_backward.default: _pool_gradient,
    _aten.native_batch_norm.default: _norm,
    _aten.native_batch_norm_backward.default: _norm_gradients,
    _aten._to_copy.default: _cast,
    _aten.cat.default: _cat,
    _aten.embedding.default: _embedding,
    _aten.histc.default: _histogram,
    _aten.nll_loss_forward.default: _loss,
    _aten.nll_loss_backward.default: _loss_gradient,
    _aten.mm.default: _mm,
    _aten.bmm.default: _mm,
    _aten.addmm.default: _addmm,
    _aten._grouped_mm.default: _grouped_mm,
    _aten._softmax.default: _softmax,
    _aten._log_softmax.default: _softmax,
    _aten._softmax_backward_data.default: _softmax_gradient,
    _aten._log_softmax_backward_data.default: _softmax_gradient,
}
_RULES[_aten.new_zeros.default] = _zeros
_RULES |= dict.fromkeys((_aten.empty_like.default, _aten.zeros_like.default, _aten.ones_like.default), _empty_like)
_RULES |= dict.fromkeys((_aten.sum.default, _aten.sum.dim_IntList, _aten.mean.default, _aten.mean.dim), _reduced)
_RULES |= dict.fromkeys((_aten.add.Tensor, _aten.sub.Tensor, _aten.mul.Tensor, _aten.div.Tensor), _binary)
_RULES |= dict.fromkeys((_aten.threshold_backward.default, _aten.gelu_backward.default), _gradient)
_RULES |= dict.fromkeys((_aten.silu_backward.default, _aten.sigmoid_backward.default), _gradient)
_RULES |= dict.fromkeys((_aten.tanh_backward.default,), _gradient)
_RULES |= dict.fromkeys((_aten.relu.default, _aten.gelu.default, _aten.silu.default, _aten.sigmoid.default), _unary)
_RULES |= dict.fromkeys((_aten.tanh.default, _aten.neg.default, _aten.exp.default, _aten.rsqrt.default), _unary)
_RULES |= dict.fromkeys((_aten.sin.default, _aten.cos.default, _aten.pow.Tensor_Scalar), _unary)
_RULES |= dict.fromkeys((_aten.add.Scalar, _aten.sub.Scalar, _aten.mul.Scalar, _aten.div.Scalar), _unary)
