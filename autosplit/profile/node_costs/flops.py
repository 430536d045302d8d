"""Floating-point operations and bytes of one aten call: torch's own formulas, and those that torch lacks.

``torch.utils.flop_counter.flop_registry`` is not in that module's ``__all__``; it is used here only, because a
``FlopCounterMode`` per node would cost more than the nodes (tried on torch 2.13). It has no entry for the attention and
recurrent kernels of the CPU, for matrix-vector products, for bilinear layers, for the fused inference layers, for
transforms and linear algebra: they would count as zero. And it counts the weight gradient of a grouped convolution once
for every group. Everything else is counted as torch counts it.

Transforms: 5 N log2 N for a complex one of N points and half of that for a real one, the count by which FFT libraries
are compared (Frigo and Johnson, Proc. IEEE 93, 2005). Factorisations: leading terms (Golub and Van Loan, Matrix
Computations, 4th ed., 2013). Iterative ones (eigenvalues, singular values) have no count that shapes give.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

aten = torch.ops.aten

Formula = Callable[..., int]


def flop_formulas() -> Mapping[Any, Formula]:
    """Return the formula of each aten operation that has one: called with the operation's arguments and ``out_val``."""
    by_name: dict[str, Formula] = {
        "_scaled_dot_product_flash_attention_for_cpu": lambda *args, **_: sdpa_flop_count(*_shapes(args[:3])),
        "_scaled_dot_product_flash_attention_for_cpu_backward": lambda *args, **_: sdpa_backward_flop_count(
            *_shapes(args[:4])
        ),
        "mkldnn_rnn_layer": lambda *args, **_: 2 * _recurrent(args[0], args[1:3]),
        "mkldnn_rnn_layer_backward": lambda *args, **_: 4 * _recurrent(args[0], args[1:3]),
        "_cudnn_rnn": lambda *args, **_: 2 * _recurrent(*args[:2]),
        "_cudnn_rnn_backward": lambda *args, **_: 4 * _recurrent(*args[:2]),
        "_transformer_encoder_layer_fwd": lambda source, width, *rest, **named: _dense_and_attention(
            source, width, (*rest, *named.values())
        ),
        "_native_multi_head_attention": lambda query, _key, _value, width, *rest, **named: _dense_and_attention(
            query, width, (*rest, *named.values())
        ),
        "_addmm_activation": _product(1, 2, -1),
        "_grouped_mm": _grouped_mm,
        "_scaled_grouped_mm": _grouped_mm,
        "addbmm": _product(1, 2, -1),
        "_int_mm": _product(0, 1, -1),
        "_weight_int8pack_mm": _product(0, 1, 0),
        "mkldnn_linear": _product(0, 1, 0),
        "addr": _product(1, 2, 0),
        "_trilinear": _trilinear,
        "_sparse_addmm": _sparse_product,
        "mv": _product(0),
        "addmv": _product(1),
        "dot": _product(0),
        "vdot": _product(0),
    }
    by_name |= algebra_formulas()
    formulas = {getattr(aten, name): formula for name, formula in by_name.items() if hasattr(aten, name)}
    return {**formulas, **flop_registry, aten.convolution_backward: _convolution_backward}


def _sparse_product(_bias: Any, left: Any, right: Any, *_: Any, **__: Any) -> int:
    sparse, dense = (left, right) if left.layout == torch.sparse_coo else (right, left)
    return 2 * sparse._nnz() * dense.shape[-1]


def _product(left: int, right: int | None = None, dim: int = 0) -> Formula:
    """Return the formula of a product: each element of an operand takes part in as many as ``dim`` of the other has.

    ``left`` and ``right`` are the operands' places among the arguments; without ``right``, in one.
    """

    def flops(*args: Any, **_: Any) -> int:
        return 2 * args[left].numel() * (1 if right is None else args[right].shape[dim])

    return flops


def _shapes(operands: Sequence[Any]) -> list[torch.Size]:
    return [operand.shape for operand in operands]


def _recurrent(steps: Any, weights: Sequence[Any]) -> int:
    """Return the multiplications of a recurrent layer, biases left out."""
    return steps.numel() // steps.shape[-1] * sum(weight.numel() for weight in weights if weight.dim() == 2)


def _dense_and_attention(source: Any, embed_dim: int, arguments: tuple[Any, ...]) -> int:
    batch, length = source.shape[0], source.shape[1]
    weights = [a for a in arguments if isinstance(a, torch.Tensor) and a.dim() == 2 and a.is_floating_point()]
    dense = 2 * batch * length * sum(w.numel() for w in weights)
    return dense + 4 * batch * length * length * embed_dim


def _grouped_mm(left: Any, right: Any, *_: Any, out_val: Any, **__: Any) -> int:
    if left.dim() == right.dim() == 2:
        return 2 * left.shape[0] * left.shape[1] * right.shape[1]
    return 2 * out_val.numel() * left.shape[-1]


def _trilinear(
    first: Any, second: Any, third: Any, expand1: Any, expand2: Any, expand3: Any, *_: Any, **__: Any
) -> int:
    """Return two products and a sum for each point of the space that the three operands span."""
    dims = first.dim() + len(expand1)
    points = 1
    for dim in range(dims):
        sizes = []
        for tensor, expanded in ((first, expand1), (second, expand2), (third, expand3)):
            if dim not in expanded:
                sizes.append(tensor.shape[dim - sum(1 for other in expanded if other < dim)])
        points *= max(sizes)
    return 3 * points


def _convolution_backward(*args: Any, out_val: Any, **named: Any) -> int:
    """Return torch's count; with groups, what each of the gradients costs, which is what the forward costs."""
    cotangent, source, weight = args[:3]
    transposed, groups, mask = args[7], args[9], args[10]
    if groups == 1:
        return int(flop_registry[aten.convolution_backward](*args, out_val=out_val, **named))
    swept = source if transposed else cotangent
    return int(2 * swept.numel() * (weight.numel() // weight.shape[0]) * (bool(mask[0]) + bool(mask[1])))


_PRODUCTS = {"mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1, "_addmm_activation": 1}
"""Products, and the place of the first operand."""
_CAUSAL_TILE = 128
"""Queries that a kernel of attention takes at once (FlashAttention-2, arXiv 2307.08691, section 3.3: 64 or 128)."""


def sides_of(name: str, args: Sequence[Any]) -> tuple[int, int, int, int] | None:
    """Return the sides of a product or of attention as `cost_models.OpWork` has them."""
    if "attention" in name and "_scaled_dot" in name:
        query, key = args["backward" in name :][:2]
        rows, heads, length, width = query.shape
        return rows * heads, length, key.shape[2], width
    if (first := _PRODUCTS.get(name)) is None:
        return None
    left, right = args[first : first + 2]
    return (left.shape[0] if left.dim() == 3 else 1), left.shape[-2], right.shape[-1], left.shape[-1]


def causal_part(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], sides: Sequence[int] | None) -> float:
    """Return the part of attention's FLOPs that its kernel computes: all, or the tiles of keys up to each query's."""
    names = [argument.name for argument in func._schema.arguments] if "attention" in func._opname else []
    if sides is None or "is_causal" not in names:
        return 1.0
    at, (_, queries, keys, _) = names.index("is_causal"), sides
    if not (args[at] if at < len(args) else kwargs.get("is_causal", False)):
        return 1.0
    ends = [min(keys, end + _CAUSAL_TILE) for end in range(0, queries, _CAUSAL_TILE)]
    return sum(ends) / (len(ends) * keys)


_LOOKUPS = frozenset(
    "embedding index index_select gather take _unsafe_index nll_loss_forward nll_loss2d_forward".split()
)
"""Operations that read of their first operand only as many bytes as they return."""

_WRITES = frozenset("index_put_ _index_put_impl_ index_copy_ index_add_ index_fill_ scatter_ scatter_add_".split())
"""Operations that read and write of their first operand only as many bytes as their last tensor has."""


def moved_bytes(func: Any, args: Sequence[Any], results: Sequence[torch.Tensor]) -> int:
    """Return the bytes that an aten call reads and writes: its operands and its results, each once.

    An expanded tensor counts with its storage, a table that is looked up with the entries that are taken from it.
    """
    operands = list(flat_tensors(args))
    name = func._opname
    if name in _LOOKUPS and operands:
        return 2 * sum(map(_bytes, results)) + sum(map(_bytes, operands[1:]))
    if name in _WRITES and operands:
        return 2 * _bytes(operands[-1]) + sum(map(_bytes, operands[1:-1]))
    return sum(map(_bytes, results)) + sum(map(_bytes, operands))


def _bytes(tensor: torch.Tensor) -> int:
    size = tensor.numel() * tensor.element_size()
    try:
        return min(size, tensor.untyped_storage().nbytes())
    except (NotImplementedError, RuntimeError):
        return size


def flat_tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors among the operands or the results of an aten call."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from flat_tensors(item)


def algebra_formulas() -> Mapping[str, Callable[..., int]]:
    """Return the formulas by the name of the aten operation; called as those of torch's registry."""
    return {
        "_fft_c2c": lambda source, dims, *_, **__: _transforms(source.shape, dims, 5.0),
        "_fft_r2c": lambda source, dims, *_, **__: _transforms(source.shape, dims, 2.5),
        "_fft_c2r": lambda _source, dims, *_, out_val, **__: _transforms(out_val.shape, dims, 2.5),
        "linalg_cholesky_ex": lambda matrix, **_: _matrices(matrix) * matrix.shape[-1] ** 3 // 3,
        "linalg_lu_factor_ex": _lu,
        "linalg_lu": _lu,
        "linalg_lu_solve": lambda factors, _pivots, right, **_: _substitutions(factors, right),
        "_linalg_solve_ex": lambda matrix, right, **_: _lu(matrix) + _substitutions(matrix, right),
        "linalg_inv_ex": lambda matrix, **_: _matrices(matrix) * 2 * matrix.shape[-1] ** 3,
        "linalg_solve_triangular": lambda matrix, right, **_: matrix.shape[-1] * right.numel(),
        "linalg_qr": _qr,
        # A product and two sums for each pair of points and dimension of space.
        "_euclidean_dist": lambda left, *_, out_val, **__: 3 * out_val.numel() * left.shape[-1],
        "_cdist_forward": lambda left, *_, out_val, **__: 3 * out_val.numel() * left.shape[-1],
    }


def _transforms(shape: Sequence[int], dims: Sequence[int], factor: float) -> int:
    points = math.prod(shape[dim] for dim in dims)
    return round(factor * math.prod(shape) * math.log2(points)) if points else 0


def _matrices(matrix: Any) -> int:
    return math.prod(matrix.shape[:-2])


def _lu(matrix: Any, *_: Any, **__: Any) -> int:
    rows, columns = matrix.shape[-2:]
    least = min(rows, columns)
    return int(_matrices(matrix) * (least**2 * (max(rows, columns) - least / 3)))


def _substitutions(matrix: Any, right: Any) -> int:
    """Return the cost of solving by factors, forward and back, for each column."""
    columns = int(right.shape[-1]) if right.dim() == matrix.dim() else 1
    return _matrices(matrix) * 2 * matrix.shape[-1] ** 2 * columns


def _qr(matrix: Any, *_: Any, **__: Any) -> int:
    """Return the cost of the factors; Q itself is made of them at as much again."""
    rows, columns = matrix.shape[-2:]
    least, most = min(rows, columns), max(rows, columns)
    return int(_matrices(matrix) * 4 * least**2 * (most - least / 3))
