"""What the dispatcher does not see: scratch inside kernels, and results whose fake size is wrong.

Fake tensors show every result of every operation, but not what its kernel allocates and frees inside. Here each
operation that needs some says how much: as a formula, as a measurement, or as an unknown that widens what is printed.

What is not here, because it outlives no operation in any probe: thread-local buffers and weight caches. oneDNN caches
compiled kernels, which do not come from torch's allocator; MKL's packing buffers do not either.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from autosplit.profile.opaque_cpu import cpu_workspace
from autosplit.profile.opaque_cuda import ALWAYS_OBSERVED, cuda_results, cuda_workspace
from autosplit.profile.opaque_recurrent import recurrent_results
from autosplit.profile.workspaces import Workspace

__all__ = ["ALWAYS_OBSERVED", "Workspace", "true_results", "workspace"]

_KEEPS_ITS_TERMS = frozenset(("mse_loss", "smooth_l1_loss", "huber_loss"))


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
    "cuda": whose kernels. ``observed`` is what they were seen to hold on the device. CPU figures depend on
    ``torch.get_num_threads()`` and on the instruction set in use.
    """
    if target == "cuda":
        return cuda_workspace(func._opname, args, kwargs, out, observed=observed)
    return cpu_workspace(func._opname, args, kwargs, out)


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
        return recurrent_results(args, out)
    if name in _KEEPS_ITS_TERMS and isinstance(out, torch.Tensor) and out.dim() == 0:
        terms = torch.broadcast_shapes(args[0].shape, args[1].shape).numel()
        if terms > 1 and out.untyped_storage().nbytes() <= out.element_size():
            return out.new_empty(terms).as_strided((), ())
    return out
