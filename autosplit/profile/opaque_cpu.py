"""Scratch of the CPU's kernels: what they hold beside their results, by aten operation.

Found by the allocator's events of single operations over a grid of shapes (``benchmarks/workspaces.py``) and, where a
source is named, by its code. What is not here held nothing in any probe, or a few bytes per row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from autosplit.profile.opaque_convolution import convolution, convolution_backward
from autosplit.profile.opaque_recurrent import recurrent_layer, recurrent_layer_backward
from autosplit.profile.workspaces import Workspace, nbytes

_Rule = Callable[[Sequence[Any], Mapping[str, Any], Any], Workspace | None]

_HALF = (torch.bfloat16, torch.float16)
_MEAN_OF_HALF_EXTRA = 12

_PROMOTING = frozenset(
    "add add_ sub sub_ rsub mul mul_ div div_ pow where maximum minimum fmod remainder atan2 addcmul addcmul_ addcdiv "
    "addcdiv_ lerp lerp_ eq ne lt le gt ge hypot copysign".split()
)
"""Elementwise operations that first copy each operand to the common type (``TensorIterator.cpp``,
``cast_common_dtype_to_inputs``, on the CPU only)."""


def cpu_workspace(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> Workspace | None:
    """Return the scratch of the operation called ``name``; None when it needs none."""
    rule = _RULES.get(name)
    if rule is not None:
        return rule(args, kwargs, out)
    if name in _PROMOTING:
        return _promotion(name, args)
    if name in _CONTIGUOUS:
        return _some(sum(nbytes(args[i]) for i in _CONTIGUOUS[name] if not args[i].is_contiguous()))
    return None


def _some(count: int) -> Workspace | None:
    return Workspace(count, "formula") if count else None


def _promotion(name: str, args: Sequence[Any]) -> Workspace | None:
    tensors = [t for t in args[name == "where" :] if isinstance(t, torch.Tensor)]
    if len({tensor.dtype for tensor in tensors}) < 2:
        return None
    common = torch.result_type(tensors[0], tensors[1])
    for tensor in tensors[2:]:
        common = torch.promote_types(common, tensor.dtype)
    if name.startswith("div") and not common.is_floating_point:
        common = torch.get_default_dtype()
    return _some(sum(tensor.numel() * common.itemsize for tensor in tensors if tensor.dtype != common))


def _matrix_copy(matrix: torch.Tensor) -> int:
    """Bytes of the copy that BLAS needs of a matrix (the last two dimensions) whose strides it does not take."""
    rows, columns = matrix.shape[-2:]
    down, across = matrix.stride()[-2:]
    by_rows = across == 1 and (down >= max(1, columns) or rows == 1)
    by_columns = down == 1 and (across >= max(1, rows) or columns == 1)
    return 0 if by_rows or by_columns else rows * columns * matrix.element_size()


def _product(args: Sequence[Any], _kwargs: Mapping[str, Any], _out: Any) -> Workspace | None:
    left, right = args[-2:]
    if _is_packed(left):
        return Workspace(torch.get_num_threads() * _packed_bytes(left, right), "unknown")
    return _some(_matrix_copy(left) + _matrix_copy(right))


def _is_packed(matrix: torch.Tensor) -> bool:
    """Tell whether oneDNN multiplies it, in blocks: bfloat16 with AVX-512."""
    return matrix.dtype is torch.bfloat16 and "AVX512" in torch.backends.cpu.get_cpu_capability()


def _packed_bytes(left: torch.Tensor, right: torch.Tensor) -> int:
    """About what a thread of oneDNN's product in blocks holds: their sums in fp32, and the matrices' parts packed.

    Its blocks follow from the caches. On one Zen 5 the products of 64 to 16,384 rows held half to twice of this.
    """
    rows, inner, columns = *left.shape[-2:], right.shape[-1]
    sums = 4 * min(rows, 128) * min(columns, 128)
    packed = 2 * min(columns, 128) * min(inner, 256)
    turned = 2 * min(rows, 512) * min(inner, 1024) if left.stride(-1) != 1 else 0
    return sums + packed + turned


def _reduced(args: Sequence[Any], _kwargs: Mapping[str, Any], out: Any) -> Workspace | None:
    """Means of halves are sums in fp32: of a copy, into a copy."""
    source = args[0]
    if source.dtype not in _HALF or out.dtype not in _HALF:
        return None
    return _some(4 * (source.numel() + out.numel()))


def _summed(args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> Workspace | None:
    source = args[0]
    if out.dtype != source.dtype:
        return _some(source.numel() * out.element_size())
    if source.dtype not in _HALF or len(args) < 2 or not args[1]:
        return None
    dims = sorted(dim % source.dim() for dim in args[1] if source.shape[dim] > 1)
    adjacent = all(source.shape[dim] == 1 for dim in range(dims[0], dims[-1]) if dim not in dims) if dims else True
    return None if adjacent else _reduced(args, kwargs, out)


def _batch_norm(args: Sequence[Any], _kwargs: Mapping[str, Any], _out: Any) -> Workspace | None:
    return _some(8 * args[0].shape[1])


def _batch_norm_backward(args: Sequence[Any], _kwargs: Mapping[str, Any], out: Any) -> Workspace | None:
    ragged = sum(nbytes(tensor) for tensor in args[:2] if not _dense(tensor))
    return _some(nbytes(out[0]) + ragged)


def _dense(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() or (tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last))


def _layer_norm_backward(args: Sequence[Any], _kwargs: Mapping[str, Any], out: Any) -> Workspace | None:
    ragged = sum(nbytes(tensor) for tensor in args[:2] if not tensor.is_contiguous())
    partial = 2 * torch.get_num_threads() * args[1].element_size() * _count(args[2]) if out[1] is not None else 0
    return _some(partial + ragged)


def _count(shape: Sequence[int]) -> int:
    return torch.Size(shape).numel()


def _group_norm_backward(args: Sequence[Any], _kwargs: Mapping[str, Any], _out: Any) -> Workspace | None:
    ragged = sum(nbytes(tensor) for tensor in args[:2] if not tensor.is_contiguous())
    return _some(8 * args[5] * args[6] + ragged)


def _safe_softmax(args: Sequence[Any], _kwargs: Mapping[str, Any], out: Any) -> Workspace | None:
    rows = out.numel() // max(1, out.shape[args[1]])
    return _some(out.numel() + rows + out.element_size())


def _attention_blocks(query: Any, key: Any) -> tuple[int, int]:
    """Rows and columns of the part of the scores that one thread holds (``FlashAttentionKernel.cpp``)."""
    length = query.shape[2]
    rows = 256 if length >= 768 else 64 if length >= 192 else 32
    return min(rows, length), min(512, key.shape[2])


def _attention(args: Sequence[Any], _kwargs: Mapping[str, Any], _out: Any) -> Workspace | None:
    query, key, value = args[:3]
    rows, columns = _attention_blocks(query, key)
    held = 4 * (rows * columns + 2 * rows + rows * value.shape[3])
    halves = rows * columns * query.element_size() if query.dtype in _HALF else 0
    return Workspace(torch.get_num_threads() * (held + halves), "unknown" if _is_packed(query) else "formula")


def _attention_backward(args: Sequence[Any], _kwargs: Mapping[str, Any], _out: Any) -> Workspace | None:
    cotangent, query, key = args[:3]
    rows, columns = _attention_blocks(query, key)
    halves = 2 * rows * columns * query.element_size() if query.dtype in _HALF else 0
    copied = 0 if cotangent.transpose(1, 2).is_contiguous() else nbytes(cotangent)
    count = torch.get_num_threads() * (8 * rows * columns + 4 * rows + halves) + copied
    return Workspace(count, "unknown" if _is_packed(query) else "formula")


def _sort(args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> Workspace | None:
    values = out[0]
    dim = kwargs.get("dim", next((a for a in args[1:] if isinstance(a, int) and not isinstance(a, bool)), -1))
    return _some(8 * values.shape[dim]) if values.dim() else None


def _loss(args: Sequence[Any], kwargs: Mapping[str, Any], _out: Any) -> Workspace | None:
    """A loss that is reduced: element by element first, in a storage that the result keeps (see ``cpu_results``)."""
    reduction = kwargs.get("reduction", args[2] if len(args) > 2 else 1)
    source = args[0]
    if reduction == 0:
        return None
    if source.dtype in _HALF:
        return _some(nbytes(source) + 4 * source.numel() + 4)
    return _some(nbytes(source) + _MEAN_OF_HALF_EXTRA)


def _binary_cross_entropy(args: Sequence[Any], _kwargs: Mapping[str, Any], _out: Any) -> Workspace | None:
    source = args[0]
    if source.dtype in _HALF:
        return _some(4 * nbytes(source) + 4)
    return _some(2 * nbytes(source) + _MEAN_OF_HALF_EXTRA)


def _upsample(args: Sequence[Any], _kwargs: Mapping[str, Any], out: Any) -> Workspace | None:
    """Small images grow in channels-last copies (``UpSampleKernel.cpp``, ``_use_vectorized_kernel_cond_2d``)."""
    small = sum(out.shape[2:]) <= 128 and out.shape[1] > 1 and args[0].is_contiguous()
    return _some((nbytes(args[0]) + nbytes(out)) * small)


def _scatter(args: Sequence[Any], _kwargs: Mapping[str, Any], out: Any) -> Workspace | None:
    return _some(4 * out.numel()) if out.dtype in _HALF else None


def _unfold(args: Sequence[Any], _kwargs: Mapping[str, Any], _out: Any) -> Workspace | None:
    return _some(nbytes(args[0]))


def _log_sum(args: Sequence[Any], _kwargs: Mapping[str, Any], out: Any) -> Workspace | None:
    return _some(nbytes(args[0]) + nbytes(out))


def _native_dropout(args: Sequence[Any], _kwargs: Mapping[str, Any], _out: Any) -> Workspace | None:
    return _some(nbytes(args[0]))


_CONTIGUOUS: Mapping[str, tuple[int, ...]] = MappingProxyType(
    {
        "embedding_dense_backward": (0,),
        "_log_softmax_backward_data": (0, 1),
        "gelu_backward": (0, 1),
        "max_pool2d_with_indices_backward": (0, 1),
        "avg_pool2d_backward": (0, 1),
        "_adaptive_avg_pool2d_backward": (0, 1),
        "upsample_nearest2d_backward": (0,),
        "upsample_bilinear2d_backward": (0,),
    }
)
"""Operations that copy these arguments when they are not contiguous."""

_RULES: Mapping[str, _Rule] = MappingProxyType(
    {
        "convolution": lambda args, _, out: convolution(args, out),
        "convolution_backward": lambda args, _, out: convolution_backward(args, out),
        "mkldnn_rnn_layer": lambda args, _, out: recurrent_layer(args, out),
        "mkldnn_rnn_layer_backward": lambda args, _, out: recurrent_layer_backward(args, out),
        "mm": _product,
        "addmm": _product,
        "bmm": _product,
        "baddbmm": _product,
        "mean": _reduced,
        "sum": _summed,
        "native_batch_norm": _batch_norm,
        "_native_batch_norm_legit": _batch_norm,
        "native_batch_norm_backward": _batch_norm_backward,
        "native_layer_norm_backward": _layer_norm_backward,
        "native_group_norm_backward": _group_norm_backward,
        "_safe_softmax": _safe_softmax,
        "_scaled_dot_product_flash_attention_for_cpu": _attention,
        "_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
        "sort": _sort,
        "mse_loss": _loss,
        "smooth_l1_loss": _loss,
        "huber_loss": _loss,
        "binary_cross_entropy_with_logits": _binary_cross_entropy,
        "upsample_nearest2d": _upsample,
        "upsample_bilinear2d": _upsample,
        "scatter": _scatter,
        "im2col": _unfold,
        "logsumexp": _log_sum,
        "native_dropout": _native_dropout,
        "native_dropout_backward": _native_dropout,
    }
)
