"""CUDA's kernels for a run on fake CPU tensors: what autograd saves and what is allocated are those of a GPU.

Fake CUDA tensors that require grad abort the process where there is no GPU, so the run is on fake CPU tensors and the
calls whose CUDA kernels save other things than the CPU's are exchanged:

    call                      the CPU keeps                     CUDA keeps
    attention                 a [s, s] matrix under dropout     out, fp32 logsumexp, random state (flash, efficient)
    dropout                   a mask in the input's type        a mask of bytes
    rms_norm                  five results of a formula         input, fp32 reciprocal deviations
    lstm, gru, rnn            oneDNN's or every step's          the reserve space of cuDNN
    autocast("cuda")          nothing (it is not on for it)     casts by CUDA's lists

``layer_norm``'s statistics and the reserve space have their true bytes through ``opaque.true_results``.

``TorchFunctionMode`` is public in name only (``torch.overrides``); Python functions of torch that call each other hide
behind ``has_torch_function``, which such a mode has to open. Tried on torch 2.13.

The CUDA operations themselves are called where torch knows their results without a device
(``_scaled_dot_product_flash_attention``, ``native_dropout``, ``_cudnn_rnn``): what autograd saves, and the FLOPs, are
then theirs. ``NotImplemented`` means: as on the CPU. ``torch._C.DispatchKey`` is private: operators are asked with it
whether they run without a device.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

aten = torch.ops.aten

_HALF = (torch.bfloat16, torch.float16)
_FLASH_WIDTH = 256
_MODES = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 2, "gru": 3}
"""``cudnnRNNMode_t`` as ``_cudnn_rnn`` takes it."""


@dataclass(frozen=True)
class LoweredCall:
    """What runs instead, and whether CUDA's autocast casts its operands to the lower type."""

    run: Callable[..., Any]
    in_lower_type: bool = False


def lowered_calls() -> Mapping[Any, LoweredCall]:
    """Return what stands for a torch function on CUDA, by function."""
    recurrent = {getattr(torch, name): LoweredCall(_recurrent(name), in_lower_type=True) for name in _MODES}
    return {
        F.scaled_dot_product_attention: LoweredCall(attention, in_lower_type=True),
        F.dropout: LoweredCall(_dropout),
        torch.dropout: LoweredCall(_dropout),
        F.rms_norm: LoweredCall(_rms_norm),
        torch.rms_norm: LoweredCall(_rms_norm),
        **recurrent,
    }


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Return what CUDA's ``scaled_dot_product_attention`` returns, by the kernel that it takes.

    Flash attention takes halves without a mask, the memory-efficient kernel everything else of four dimensions; the
    matrix of scores is made where neither can (``aten/src/ATen/native/transformers/cuda/sdp_utils.cpp``). cuDNN's
    attention, which newer GPUs may prefer, saves what flash attention saves.
    """
    shapes = query.dim() == key.dim() == value.dim() == 4 and query.shape[-1] == value.shape[-1]
    grouped = enable_gqa and query.shape[-3] != key.shape[-3]
    alike = query.dtype == key.dtype == value.dtype
    flash = alike and query.dtype in _HALF and attn_mask is None and query.shape[-1] <= _FLASH_WIDTH
    if shapes and flash and torch.backends.cuda.flash_sdp_enabled():
        return _flash(query, key, value, dropout_p, is_causal, scale)
    if shapes and alike and not grouped and torch.backends.cuda.mem_efficient_sdp_enabled():
        return _efficient(query, key, value, attn_mask, dropout_p, is_causal, scale)
    if grouped:
        key, value = (t.repeat_interleave(query.shape[-3] // t.shape[-3], -3) for t in (key, value))
    return _scores(query, key, value, attn_mask, dropout_p, is_causal, scale)


def _flash(query: Tensor, key: Tensor, value: Tensor, dropout: float, causal: bool, scale: float | None) -> Tensor:
    width = query.shape[-1]
    if missing := -width % 8:
        scale = scale if scale is not None else 1 / math.sqrt(width)
        query, key, value = (F.pad(tensor, (0, missing)) for tensor in (query, key, value))
    out = aten._scaled_dot_product_flash_attention(query, key, value, dropout, causal, False, scale=scale)[0]
    return out[..., :width] if missing else out


def _efficient(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, causal: bool, scale: float | None
) -> Tensor:
    if mask is not None:
        mask = _additive(mask, query)
        if missing := -mask.shape[-1] % 16:
            mask = F.pad(mask, (0, missing))[..., : mask.shape[-1]]
        mask = mask.expand(*query.shape[:2], query.shape[2], key.shape[2])
    statistics = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value))
    call = aten._scaled_dot_product_efficient_attention
    out: Tensor = call(query, key, value, mask, statistics, dropout, causal, scale=scale)[0]
    return out


def _scores(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, causal: bool, scale: float | None
) -> Tensor:
    """Attention by its formula: the matrix of scores, its softmax, and a mask of bytes under dropout."""
    root = math.sqrt(scale if scale is not None else 1 / math.sqrt(query.shape[-1]))
    scores = (query * root) @ (key * root).transpose(-2, -1)
    if causal:
        allowed = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
        scores = scores + _additive(allowed, query)
    elif mask is not None:
        scores = scores + _additive(mask, query)
    weights = torch.softmax(scores, -1)
    if dropout > 0:
        weights = aten.native_dropout(weights, dropout, True)[0]
    return weights @ value


def _additive(mask: Tensor, query: Tensor) -> Tensor:
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), -math.inf)


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    """The fused kernel; in place, and at the ends of the range, CUDA does as the CPU."""
    if inplace or not training or not 0 < p < 1:
        return NotImplemented
    return aten.native_dropout(input, p, True)[0]


def _rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Any:
    """The fused kernel, which takes one type (``_fused_rms_norm``)."""
    if weight is not None and weight.dtype != input.dtype:
        return NotImplemented
    return _FusedRmsNorm.apply(input, weight, len(normalized_shape))


class _FusedRmsNorm(torch.autograd.Function):
    """Allocates, saves and moves what ``_fused_rms_norm`` and its backward do; the values are not computed."""

    @staticmethod
    def forward(ctx: Any, source: Tensor, weight: Tensor | None, dims: int) -> Tensor:
        statistic = source.new_empty((*source.shape[:-dims], *[1] * dims), dtype=torch.float32)
        ctx.save_for_backward(source, weight, statistic)
        return torch.mul(source, source if weight is None else weight)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        source, weight, _ = ctx.saved_tensors
        (cotangent,) = cotangents
        needed = ctx.needs_input_grad
        moved = torch.mul(cotangent, source) if needed[0] else None
        if weight is None or not needed[1]:
            return moved, None, None
        return moved, cotangent.sum(list(range(cotangent.dim() - weight.dim()))), None


def _recurrent(name: str) -> Callable[..., Any]:
    """Return cuDNN's call for ``torch.lstm`` and its kin; packed sequences stay the CPU's."""
    mode = _MODES[name]

    def run(source: Tensor, state: Any, weights: Any, *rest: Any) -> Any:
        if isinstance(weights, Tensor) or len(rest) != 6:
            return NotImplemented
        biases, layers, dropout, train, bidirectional, batch_first = rest
        hidden, cell = state if mode == _MODES["lstm"] else (state, None)
        stride = len(weights) // (layers * (1 + bidirectional))
        if stride != 2 + 2 * biases:
            return NotImplemented  # projections
        weights = list(weights)
        _let_backward_run_without_device()
        # The parameters are views of one buffer on CUDA: the first stands for it.
        out = aten._cudnn_rnn(
            source,
            weights,
            stride,
            weights[0].detach(),
            hidden,
            cell,
            mode,
            hidden.shape[-1],
            0,
            layers,
            batch_first,
            dropout,
            train,
            bidirectional,
            [],
            None,
        )
        return out[:3] if cell is not None else out[:2]

    return run


@cache
def _let_backward_run_without_device() -> None:
    """Give ``_cudnn_rnn_backward`` the results on fake tensors that torch has for its forward only."""
    if not aten._cudnn_rnn_backward.default.has_kernel_for_dispatch_key(torch._C.DispatchKey.Meta):
        torch.library.impl("aten::_cudnn_rnn_backward", "Meta")(_recurrent_gradients)


def _recurrent_gradients(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    source, weights, hidden, cell, wanted = arguments[0], arguments[1], arguments[4], arguments[5], arguments[21]
    state = torch.empty_like(hidden)
    weight_gradients = [torch.empty_like(weight) for weight in weights] if wanted[3] else []
    return torch.empty_like(source), state, torch.empty_like(hidden if cell is None else cell), weight_gradients


_GUARDS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
_MODULES = frozenset(("torch.nn.functional", "torch.functional"))

_FP32 = frozenset(
    "__pow__ __rpow__ __rdiv__ __rtruediv__ acos asin binary_cross_entropy_with_logits cdist cosh "
    "cosine_embedding_loss cosine_similarity cumprod cumsum dist erfinv exp expm1 group_norm hinge_embedding_loss "
    "huber_loss kl_div l1_loss layer_norm log log10 log1p log2 log_softmax logsumexp margin_ranking_loss mse_loss "
    "multi_margin_loss multilabel_margin_loss native_layer_norm nll_loss norm pdist poisson_nll_loss pow prod "
    "reciprocal renorm rsqrt sinh smooth_l1_loss soft_margin_loss softmax softmin softplus sum tan "
    "triplet_margin_loss interpolate upsample".split()
)
"""What CUDA's autocast computes in fp32 (``aten/src/ATen/autocast_mode.h``, ``AT_FORALL_FP32``). Of these the CPU's
computes only losses and ``prod`` in fp32; both take matrix products, convolutions and attention in the lower type."""


class CudaKernels(TorchFunctionMode):
    """Entered around a run on fake CPU tensors, it exchanges the calls whose CUDA kernels save or allocate otherwise.

    A region under ``torch.autocast("cuda")`` computes in that type, by CUDA's lists of operations. Calls from C++ are
    not seen: what ``torch.einsum`` or a fused layer calls inside stays the CPU's.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lowered: Mapping[Any, LoweredCall] = lowered_calls()
        self._opened: dict[Any, Callable[..., Any]] = {}
        self._inside: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the call, or the one that stands for it on CUDA."""
        named = kwargs or {}
        if not torch.is_autocast_enabled("cuda"):
            return self._run(func, args, named)
        dtype = torch.get_autocast_dtype("cuda")
        name = getattr(func, "__name__", "")
        if name in _FP32:
            return self._cast(func, args, named, _HALF, torch.float32)
        if func in self._lowered and self._lowered[func].in_lower_type:
            return self._cast(func, args, named, (torch.float32, *_HALF), dtype)
        with torch.autocast("cpu", dtype=dtype, cache_enabled=torch.is_autocast_cache_enabled()):
            return self._run(func, args, named)

    def _cast(self, func: Any, args: Any, kwargs: Any, dtypes: Sequence[torch.dtype], to: torch.dtype) -> Any:
        """Run a call on its tensors of some dtypes in another."""
        args, kwargs = pytree.tree_map_only(Tensor, lambda t: t.to(to) if t.dtype in dtypes else t, (args, kwargs))
        return self._run(func, args, kwargs)

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        call = self._lowered.get(func) if isinstance(func, _CALLABLE) else None
        if call is not None:
            lowered = call.run(*args, **kwargs)
            if lowered is not NotImplemented:
                return lowered
        opens = type(func) is types.FunctionType and func.__globals__.get("__name__") in _MODULES
        if not opens or self._inside.count(func) == _DEEPEST:
            return func(*args, **kwargs)
        self._inside.append(func)
        try:
            with self:
                return self._open(func)(*args, **kwargs)
        finally:
            self._inside.pop()

    def _open(self, func: types.FunctionType) -> Callable[..., Any]:
        """Return a twin of a Python function that does not hand itself to this mode again."""
        twin = self._opened.get(func)
        if twin is None:
            names = {**func.__globals__, **dict.fromkeys(_GUARDS, lambda *_: False)}
            twin = types.FunctionType(func.__code__, names, func.__name__, func.__defaults__, func.__closure__)
            twin.__kwdefaults__ = func.__kwdefaults__
            self._opened[func] = twin
        return twin


_DEEPEST = 2
"""How often a function opens inside of itself: `einsum` takes a list apart so; a helper of `meshgrid` asks for ever."""
_CALLABLE = (types.FunctionType, types.BuiltinFunctionType)


@contextmanager
def cuda_autocast(dtype: torch.dtype) -> Iterator[None]:
    """Switch CUDA's autocast on for a block, also where there is no CUDA device.

    ``torch.autocast("cuda")`` warns and does nothing there; a :class:`CudaKernels` needs it to be on.
    """
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    torch.autocast_increment_nesting()
    try:
        torch.set_autocast_enabled("cuda", True)
        torch.set_autocast_dtype("cuda", dtype)
        yield
    finally:
        torch.set_autocast_enabled("cuda", before[0])
        torch.set_autocast_dtype("cuda", before[1])
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()
