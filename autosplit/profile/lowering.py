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
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from autosplit.profile.lowering_calls import Call, lowered_calls

_HALF = (torch.bfloat16, torch.float16)
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
        self._lowered: Mapping[Any, Call] = lowered_calls()
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
            args, named = pytree.tree_map_only(torch.Tensor, _in_fp32, (args, named))
            return self._run(func, args, named)
        if func in self._lowered and self._lowered[func].in_lower_type:
            args, named = pytree.tree_map_only(torch.Tensor, lambda tensor: _in(tensor, dtype), (args, named))
            return self._run(func, args, named)
        with torch.autocast("cpu", dtype=dtype, cache_enabled=torch.is_autocast_cache_enabled()):
            return self._run(func, args, named)

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        call = self._lowered.get(func) if isinstance(func, _CALLABLE) else None
        if call is not None:
            found = call.run(*args, **kwargs)
            if found is not NotImplemented:
                return found
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
            names = {**func.__globals__, **dict.fromkeys(_GUARDS, _nobody)}
            twin = types.FunctionType(func.__code__, names, func.__name__, func.__defaults__, func.__closure__)
            twin.__kwdefaults__ = func.__kwdefaults__
            self._opened[func] = twin
        return twin


_DEEPEST = 2
"""How often a function opens inside of itself: `einsum` takes a list apart so; a helper of `meshgrid` asks for ever."""
_CALLABLE = (types.FunctionType, types.BuiltinFunctionType)


def _nobody(*_: Any) -> bool:
    return False


def _in_fp32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in _HALF else tensor


def _in(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to(dtype) if tensor.dtype in (torch.float32, *_HALF) else tensor


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
