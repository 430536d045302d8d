"""What a kernel holds beside its results, and results whose fake size is wrong.

Fake tensors show every result of every operation, but not what its kernel allocates and frees inside. For CUDA there is
what was observed on a device (`workspace_watch`), tagged "measured"; then rules, none of them measured: what follows
from torch's source is tagged "formula", everything else "unknown", with a guess of its bytes or 0. CUDA kernels read
mixed types without copies, and reductions of halves need none either. The CPU's kernels can run here: each kind of
operation that may hold scratch runs once, on zeros, under the allocator's events. One of more than `LARGEST_BYTES` does
not run; its scratch is unknown and counts as nothing.

What is not here, because it outlives no operation in any probe: thread-local buffers and weight caches. oneDNN caches
compiled kernels, which do not come from torch's allocator; MKL's packing buffers do not either.

Private torch API, used in this file only, tried on torch 2.13: the enabling and disabling functions under
``torch.autograd.profiler_legacy`` list what the allocator does, in order; the public profiler writes two lines to
stderr each time that it starts. ``no_dispatch`` of ``torch.utils._mode_utils`` makes real tensors under a fake mode;
torch has no public name for that.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch._C._autograd import _disable_profiler_legacy, _enable_profiler_legacy, _profiler_enabled
from torch._C._profiler import ProfilerConfig, ProfilerState, _ExperimentalConfig
from torch.fx.node import map_aggregate
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_leaves

Source = Literal["formula", "measured", "unknown"]


@dataclass(frozen=True)
class Workspace:
    """Scratch of one kernel: bytes that live only while it runs, beside its results.

    ``source``: "formula" follows from what the library does; "measured" was observed; "unknown" is a guess for a kernel
    that surely needs some, and widens what is printed.
    """

    bytes: int
    source: Source


def nbytes(tensor: Any) -> int:
    """Return the bytes of a tensor's elements, were it contiguous; 0 for None."""
    return tensor.numel() * tensor.element_size() if isinstance(tensor, torch.Tensor) else 0


def operation_key(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Return an aten operation as text: its name, and shapes, layouts and dtypes of all that it is given.

    Equal text, equal kernel, on one device with one set of libraries; what is in tensors is left out.
    """
    named = [f"{key}={_told(value)}" for key, value in sorted(kwargs.items())]
    return f"{name}({', '.join([*map(_told, args), *named])})"


def _told(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        size = "x".join(map(str, value.shape))
        dtype = str(value.dtype).removeprefix("torch.")
        layout = "" if value.is_contiguous() else f"/{'x'.join(map(str, value.stride()))}"
        return f"{dtype}[{size}]{layout}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_told, value))}]"
    if isinstance(value, (torch.Generator, torch.device)):
        return type(value).__name__
    return str(value)


_Rule = Callable[[Sequence[Any], Any], Workspace | None]

_CONFIG = re.compile(r":(\d+):(\d+)")
_HALF = (torch.bfloat16, torch.float16)
_SORT_FROM = 3072
"""Indices up to which the embedding's backward does without a sort (``Embedding.cu``)."""


def cublas_workspace_bytes(capability: tuple[int, int], *, config: str | None = None) -> int:
    """Return what cuBLAS keeps, once it was called, per handle and stream on a device of this compute capability.

    It comes from torch's allocator and stays; the forward's thread and autograd's own a handle each. cuBLASLt uses the
    same memory. ``config`` is the text of ``CUBLAS_WORKSPACE_CONFIG``, sizes in KiB and how many of each: ``:4096:2``,
    which torch reads itself and passes over where it has no such form (``ATen/cuda/CublasHandlePool.cpp``,
    ``parseChosenWorkspaceSize``, ``getChosenWorkspaceSize``).
    """
    sizes = _CONFIG.findall(config or "")
    if sizes:
        return sum(1024 * int(size) * int(count) for size, count in sizes)
    return 32 * 2**20 if capability[0] in (9, 10, 12) else 4096 * 1024 * 2 + 16 * 1024 * 8


def cuda_workspace(
    name: str, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any, *, observed: Mapping[str, int] | None = None
) -> Workspace | None:
    """Return the scratch of the operation called ``name``; None when it needs none.

    What was ``observed`` of the very same operation on the device, by `operation_key`, goes before any rule.
    """
    if observed:
        count = observed.get(operation_key(name, args, kwargs))
        if count is not None:
            return Workspace(count, "measured")
    rule = _RULES.get(name)
    return rule(args, out) if rule is not None else None


def cuda_results(name: str, args: Sequence[Any], _kwargs: Mapping[str, Any], out: Any) -> Any:
    """Return the results with the storages that the CUDA kernel would leave."""
    if name == "native_layer_norm" and out[0].dtype in _HALF:
        return (out[0], *(statistic.new_empty(statistic.shape, dtype=torch.float32) for statistic in out[1:]))
    if name == "_cudnn_rnn" and out[3].numel() == 0:
        return (*out[:3], out[3].new_empty(_recurrent_reserve(args), dtype=torch.uint8), out[4])
    return out


def _recurrent_reserve(args: Sequence[Any]) -> int:
    """A guess at cuDNN's reserve space: what a step's backward needs, once per layer and direction."""
    source, mode, hidden, layers, first, directions = args[0], args[6], args[7], args[9], args[10], 1 + args[13]
    steps, batch = source.shape[:2] if not first else (source.shape[1], source.shape[0])
    kept = {2: 6, 3: 5}.get(mode, 2)
    return int(steps * batch * hidden * layers * directions * kept * source.element_size()) if args[12] else 0


def _flash_backward(args: Sequence[Any], _out: Any) -> Workspace:
    """The queries' gradient summed in fp32, and one row of sums (``flash_attn/flash_api.cpp``, ``mha_bwd``)."""
    query, key = args[1], args[2]
    batch, heads, length, width = query.shape
    rows = batch * heads * (-(-length // 128) * 128)
    grouped = 2 * nbytes(key) * (heads // key.shape[1]) if heads != key.shape[1] else 0
    return Workspace(rows * 4 * (1 + -(-width // 32) * 32) + grouped, "formula")


def _index_backward(args: Sequence[Any], _out: Any) -> Workspace | None:
    """Values added at places that may repeat are sorted by place first."""
    accumulate = len(args) > 3 and args[3]
    places = max((index.numel() for index in args[1] if index is not None), default=0)
    return Workspace(32 * places, "unknown") if accumulate else None


def _reduced_loss(args: Sequence[Any], _out: Any) -> Workspace | None:
    return Workspace(nbytes(args[0]), "formula") if len(args) < 3 or args[2] else None


def _unknown(_args: Sequence[Any], _out: Any) -> Workspace:
    return Workspace(0, "unknown")


_RULES: Mapping[str, _Rule] = MappingProxyType(
    {
        "_scaled_dot_product_flash_attention_backward": _flash_backward,
        # One row of sums is certain (``delta``); the kernel's own workspace depends on the shape.
        "_scaled_dot_product_efficient_attention_backward": lambda args, _: Workspace(
            4 * args[1].shape[:3].numel(), "unknown"
        ),
        "_scaled_dot_product_cudnn_attention": _unknown,
        "_scaled_dot_product_cudnn_attention_backward": _unknown,
        "embedding_dense_backward": lambda args, _: (
            Workspace(32 * args[1].numel(), "unknown") if args[1].numel() > _SORT_FROM else None
        ),
        "index_put": _index_backward,
        "index_put_": _index_backward,
        "_index_put_impl_": _index_backward,
        "sort": lambda args, out: Workspace(nbytes(args[0]) + nbytes(out[1]), "unknown"),
        "topk": _unknown,
        "cumsum": _unknown,
        "nonzero": _unknown,
        "convolution": _unknown,
        "convolution_backward": _unknown,
        "_cudnn_rnn": _unknown,
        "_cudnn_rnn_backward": _unknown,
        "mse_loss": _reduced_loss,
        "smooth_l1_loss": _reduced_loss,
        "huber_loss": _reduced_loss,
        "binary_cross_entropy_with_logits": _reduced_loss,
    }
)

ALWAYS_OBSERVED = frozenset(_RULES)
"""Operations whose scratch is recorded even if it is 0."""


__all__ = ["ALWAYS_OBSERVED", "Workspace", "true_results", "workspace"]

LARGEST_BYTES = 1 << 29

_KEEPS_ITS_TERMS = frozenset(("mse_loss", "smooth_l1_loss", "huber_loss"))

_HOLDS_SCRATCH = frozenset(
    "convolution convolution_backward mkldnn_rnn_layer mkldnn_rnn_layer_backward mean sum native_batch_norm "
    "_native_batch_norm_legit native_batch_norm_backward native_layer_norm_backward native_group_norm_backward "
    "_safe_softmax _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention_for_cpu_backward "
    "sort mse_loss smooth_l1_loss huber_loss binary_cross_entropy_with_logits upsample_nearest2d upsample_bilinear2d "
    "scatter im2col logsumexp native_dropout native_dropout_backward embedding_dense_backward "
    "_log_softmax_backward_data gelu_backward max_pool2d_with_indices_backward avg_pool2d_backward "
    "_adaptive_avg_pool2d_backward upsample_nearest2d_backward upsample_bilinear2d_backward".split()
)
"""Operations whose CPU kernel was seen to hold more than its results."""
_PRODUCTS = frozenset(("mm", "addmm", "bmm", "baddbmm"))
"""Those of bfloat16 are made in blocks by oneDNN, where the CPU has AVX-512."""


def workspace(
    func: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    out: Any,
    *,
    target: str = "cpu",
    observed: Mapping[str, int] | None = None,
) -> Workspace | None:
    """Return what the kernel of an aten operation holds beside its results while it runs; None when it needs nothing.

    ``func`` is the overload as the dispatcher calls it, ``out`` what it returned (fake or real); ``target`` is "cpu" or
    "cuda": whose kernels. ``observed`` is what those of a CUDA device were seen to hold. CPU figures are those of this
    machine, for ``torch.get_num_threads()`` threads.
    """
    if target == "cuda":
        return cuda_workspace(func._opname, args, kwargs, out, observed=observed)
    kernel = _cpu_kernel(func, args, kwargs)
    return Workspace(kernel.scratch_bytes, "measured") if kernel is not None and kernel.scratch_bytes else None


def true_results(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any, *, target: str = "cpu") -> Any:
    """Return the results of an operation on fake tensors with the storages that the real operation would leave.

    - ``mkldnn_rnn_layer``: its workspace, which is saved for the backward, has no bytes on fake tensors.
    - ``mse_loss`` and its kin, reduced: the scalar keeps the storage of all terms.
    - For CUDA: ``native_layer_norm``'s statistics in fp32, the reserve space of ``_cudnn_rnn``.
    """
    name = func._opname
    if target == "cuda":
        out = cuda_results(name, args, kwargs, out)
    elif name == "mkldnn_rnn_layer":
        kernel = _cpu_kernel(func, args, kwargs)
        *results, saved = out
        return out if kernel is None else (*results, saved.new_empty(kernel.results_bytes[-1], dtype=torch.uint8))
    if name in _KEEPS_ITS_TERMS and isinstance(out, torch.Tensor) and out.dim() == 0:
        terms = torch.broadcast_shapes(args[0].shape, args[1].shape).numel()
        if terms > 1 and out.untyped_storage().nbytes() <= out.element_size():
            return out.new_empty(terms).as_strided((), ())
    return out


@dataclass(frozen=True)
class _Kernel:
    """What a CPU kernel was seen to hold beside its results, and the storages of these."""

    scratch_bytes: int
    results_bytes: tuple[int, ...]


@dataclass(frozen=True)
class _Like:
    """A tensor without its values."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    def zeros(self) -> torch.Tensor:
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype).zero_()


def _cpu_kernel(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Kernel | None:
    """Return the scratch memory of an operation's kernel on this machine; None if it has none, or cannot run here."""
    listed = func._opname in _HOLDS_SCRATCH or (func._opname in _PRODUCTS and _in_blocks(args))
    if not listed and torch.Tag.pointwise not in func.tags:
        return None
    tensors = [leaf for leaf in tree_leaves((args, dict(kwargs))) if isinstance(leaf, torch.Tensor)]
    if not listed and len({tensor.dtype for tensor in tensors}) < 2:
        return None
    plain = all(tensor.layout is torch.strided for tensor in tensors)
    if not plain or sum(map(nbytes, tensors)) > LARGEST_BYTES or _profiler_enabled():
        return None

    def described(value: Any) -> Any:
        is_tensor = isinstance(value, torch.Tensor)
        return _Like(tuple(value.shape), value.stride(), value.dtype) if is_tensor else value

    call: Any = map_aggregate((tuple(args), dict(kwargs)), described)
    return _observed(func, *call, torch.is_grad_enabled(), torch.get_num_threads())


def _in_blocks(operands: Sequence[Any]) -> bool:
    return operands[0].dtype is torch.bfloat16 and "AVX512" in torch.backends.cpu.get_cpu_capability()


@lru_cache(maxsize=1 << 12)
def _observed(func: Any, args: Any, kwargs: Any, _grad: bool, _threads: int) -> _Kernel | None:
    """Run an operation on zeros; the same call holds the same on one machine, so that it runs once per process.

    None where the kernel refuses dtypes that its fake counterpart takes.
    """
    with no_dispatch():
        zeros, named = map_aggregate((args, kwargs), lambda value: value.zeros() if isinstance(value, _Like) else value)
        _enable_profiler_legacy(
            ProfilerConfig(ProfilerState.CPU, False, True, False, False, False, _ExperimentalConfig())
        )
        try:
            out = func(*zeros, **named)
        except RuntimeError:
            return None
        finally:
            records = _disable_profiler_legacy()
        results = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        sizes = tuple(tensor.untyped_storage().nbytes() for tensor in results)
    events: list[Any] = [event for thread in records for event in thread]
    changes = (event.cpu_memory_usage() for event in events if event.kind() == "memory_alloc")
    held = list(accumulate(changes, initial=0))
    return _Kernel(max(0, max(held) - max(0, held[-1])), sizes)
