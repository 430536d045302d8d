"""What the dispatcher does not see: scratch inside kernels, and results whose fake size is wrong.

Fake tensors show every result of every operation, but not what its kernel allocates and frees inside. For CUDA there is
a table of what was observed on the device, and rules (`opaque_cuda`). The CPU's kernels can run here: each kind of
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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch
from torch._C._autograd import _disable_profiler_legacy, _enable_profiler_legacy, _profiler_enabled
from torch._C._profiler import ProfilerConfig, ProfilerState, _ExperimentalConfig
from torch.fx.node import map_aggregate
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_leaves

from autosplit.profile.workspaces.workspaces import ALWAYS_OBSERVED, Workspace, cuda_results, cuda_workspace, nbytes

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
"""Operations of which a CPU kernel was seen to hold more than its results."""
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
    found = _cpu_kernel(func, args, kwargs)
    return Workspace(found.scratch_bytes, "measured") if found is not None and found.scratch_bytes else None


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
        found = _cpu_kernel(func, args, kwargs)
        *results, saved = out
        return out if found is None else (*results, saved.new_empty(found.results_bytes[-1], dtype=torch.uint8))
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
    """Return what an operation's kernel holds on this machine; None where it holds nothing, or cannot run here."""
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

    given: Any = map_aggregate((tuple(args), dict(kwargs)), described)
    return _observed(func, *given, torch.is_grad_enabled(), torch.get_num_threads())


def _in_blocks(operands: Sequence[Any]) -> bool:
    return operands[0].dtype is torch.bfloat16 and "AVX512" in torch.backends.cpu.get_cpu_capability()


@lru_cache(maxsize=1 << 12)
def _observed(func: Any, args: Any, kwargs: Any, _grad: bool, _threads: int) -> _Kernel | None:
    """Run an operation on zeros; the same call holds the same on one machine, so that it runs once per process.

    None where the kernel refuses dtypes that its fake counterpart takes.
    """
    with no_dispatch():
        given, named = map_aggregate((args, kwargs), lambda value: value.zeros() if isinstance(value, _Like) else value)
        _enable_profiler_legacy(
            ProfilerConfig(ProfilerState.CPU, False, True, False, False, False, _ExperimentalConfig())
        )
        try:
            out = func(*given, **named)
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
