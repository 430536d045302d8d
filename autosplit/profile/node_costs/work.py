"""A cost model by its name or file, and what it is told of an aten call: class, arithmetic, FLOPs, bytes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import torch

import cost_models
from autosplit.errors import DeviceError
from autosplit.profile.node_costs.ledger import Operation
from cost_models.calibration import Calibrated
from cost_models.roofline import Roofline
from cost_models.specs import DeviceSpec
from cost_models.work import CostModel, DType, OpWork

_KINDS_OF = {
    "matmul": "mm addmm _addmm_activation linear mkldnn_linear",
    "matmul.batched": "bmm baddbmm _grouped_mm _trilinear",
    "matmul.vector": "mv addmv dot vdot",
    "conv": "convolution _convolution mkldnn_convolution cudnn_convolution miopen_convolution conv_depthwise3d",
    "conv.backward": "convolution_backward mkldnn_convolution_backward",
    "recurrent": "mkldnn_rnn_layer _cudnn_rnn miopen_rnn _thnn_fused_lstm_cell _thnn_fused_gru_cell",
    "recurrent.backward": "mkldnn_rnn_layer_backward _cudnn_rnn_backward miopen_rnn_backward "
    "_thnn_fused_lstm_cell_backward_impl _thnn_fused_gru_cell_backward",
    "elementwise.special": "gelu gelu_backward silu silu_backward exp log tanh sigmoid erf sin cos mish elu softplus "
    "hardswish elu_backward mish_backward softplus_backward log1p expm1 atan2 erfinv lgamma",
    "elementwise.random": "bernoulli_ bernoulli native_dropout rand rand_like randn randn_like normal_ uniform_ "
    "exponential_ random_ randint randint_like randperm multinomial",
    "reduction": "sum mean amax amin max min prod norm linalg_vector_norm var std var_mean any all argmax argmin "
    "logsumexp mse_loss avg_pool2d adaptive_avg_pool2d _adaptive_avg_pool2d",
    "reduction.softmax": "_softmax _log_softmax",
    "reduction.softmax_backward": "_softmax_backward_data _log_softmax_backward_data",
    "reduction.pool": "max_pool2d_with_indices max_pool3d_with_indices max_pool2d adaptive_max_pool2d",
    "normalization.layer": "native_layer_norm native_layer_norm_backward _fused_rms_norm _fused_rms_norm_backward",
    "normalization.group": "native_group_norm native_group_norm_backward",
    "normalization.batch": "native_batch_norm cudnn_batch_norm _native_batch_norm_legit _batch_norm_with_update",
    "normalization.batch_backward": "native_batch_norm_backward cudnn_batch_norm_backward batch_norm_backward",
    "embedding": "embedding index index_select gather take _embedding_bag _unsafe_index "
    "nll_loss_forward nll_loss2d_forward",
    "embedding.write": "index_put index_put_ index_copy index_copy_ index_add index_add_ scatter scatter_ scatter_add "
    "scatter_add_ scatter_reduce masked_scatter index_fill _index_put_impl_ _unsafe_index_put",
    "embedding.backward": "embedding_dense_backward _embedding_bag_backward",
    "copy": "copy_ clone cat stack _to_copy contiguous repeat constant_pad_nd roll flip tril triu _pin_memory",
    "copy.fill": "fill_ zero_ zeros zeros_like ones ones_like full full_like new_zeros new_ones new_full fill arange "
    "slice_backward select_backward nll_loss_backward nll_loss2d_backward max_pool2d_with_indices_backward",
    "other.fft": "_fft_r2c _fft_c2r _fft_c2c",
    "other.algebra": "linalg_cholesky_ex linalg_lu_factor_ex linalg_lu linalg_lu_solve _linalg_solve_ex linalg_inv_ex "
    "linalg_solve_triangular triangular_solve cholesky_solve linalg_qr _euclidean_dist _cdist_forward _cdist_backward "
    "_pdist_forward _pdist_backward linalg_matrix_exp _linalg_svd _linalg_eigh",
    "sort": "sort topk cumsum cumprod kthvalue unique unique_dim _unique2 bincount median",
    "optimizer": "_fused_adam_ _fused_adamw_ _fused_sgd_ _fused_adagrad_",
}

_KIND: Mapping[str, str] = MappingProxyType({name: kind for kind, names in _KINDS_OF.items() for name in names.split()})

_ARITHMETIC: Mapping[torch.dtype, DType] = MappingProxyType(
    {torch.float64: "fp64", torch.complex128: "fp64", torch.bfloat16: "bf16", torch.float16: "fp16"}
)


def work_of(operation: Operation) -> OpWork:
    """Return what a cost model wants to know of an operation."""
    return OpWork(
        kind=kind_of(operation.name, flops=operation.flops),
        flops=round(operation.flops * operation.computed),
        bytes=operation.bytes,
        dtype=_arithmetic(operation.dtype),
        sides=operation.sides,
    )


def kind_of(name: str, *, flops: int) -> str:
    """Return the class of an aten operation, refined after a dot; ``name`` is without namespace and overload."""
    if name.startswith("_foreach"):
        return "optimizer"
    if "attention" in name:
        return "attention_backward" if "backward" in name else "attention"
    kind = _KIND.get(name) or _KIND.get(name.removesuffix("_"))
    if kind is None:
        kind = "matmul" if flops else "elementwise"
    return kind


def _arithmetic(dtype: torch.dtype) -> DType:
    if not dtype.is_floating_point and not dtype.is_complex:
        return "int"
    return "fp8" if dtype.itemsize == 1 else _ARITHMETIC.get(dtype, "fp32")


def cost_model_of(device: str | Path | DeviceSpec) -> CostModel:
    """Return the cost model of a device, by name too, of a device file, or what a calibration file fitted.

    Files end in ``.json``; a calibration is what ``autosplit profile --calibrate`` writes. Raises DeviceError for a
    name that is not known, with the nearest ones, and for a file that describes neither.
    """
    if isinstance(device, DeviceSpec):
        return Roofline(device)
    try:
        return Calibrated.load(device) if _is_calibration(device) else Roofline(cost_models.device(device))
    except ValueError as error:
        raise DeviceError(str(error)) from error


def _is_calibration(device: str | Path) -> bool:
    """Tell whether a file holds fitted curves, however broken, rather than a device's figures."""
    if not str(device).endswith(".json"):
        return False
    try:
        content = json.loads(Path(device).read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(content, dict) and not {"curves", "stamp"}.isdisjoint(content)
