"""What a kernel holds beside its results: rules for CUDA's, and the results that they make otherwise than the CPU's.

None of the rules was measured: what follows from torch's source is tagged "formula", everything else "unknown", with a
guess of its bytes or 0. What was observed on a device (`workspace_watch`) goes before it, tagged "measured".
CUDA kernels read mixed types without copies, and reductions of halves need none either.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import torch

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
    given = _CONFIG.findall(config or "")
    if given:
        return sum(1024 * int(size) * int(count) for size, count in given)
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


def _efficient_backward(args: Sequence[Any], _out: Any) -> Workspace:
    """One row of sums is certain (``delta``); the kernel's own workspace depends on the shape."""
    query = args[1]
    return Workspace(4 * query.shape[0] * query.shape[1] * query.shape[2], "unknown")


def _embedding_backward(args: Sequence[Any], _out: Any) -> Workspace | None:
    count = args[1].numel()
    return Workspace(32 * count, "unknown") if count > _SORT_FROM else None


def _index_backward(args: Sequence[Any], _out: Any) -> Workspace | None:
    """Values added at places that may repeat are sorted by place first."""
    accumulate = len(args) > 3 and args[3]
    places = max((index.numel() for index in args[1] if index is not None), default=0)
    return Workspace(32 * places, "unknown") if accumulate else None


def _sort(args: Sequence[Any], out: Any) -> Workspace:
    return Workspace(nbytes(args[0]) + nbytes(out[1]), "unknown")


def _reduced_loss(args: Sequence[Any], _out: Any) -> Workspace | None:
    return Workspace(nbytes(args[0]), "formula") if len(args) < 3 or args[2] else None


def _unknown(_args: Sequence[Any], _out: Any) -> Workspace:
    return Workspace(0, "unknown")


_RULES: Mapping[str, _Rule] = MappingProxyType(
    {
        "_scaled_dot_product_flash_attention_backward": _flash_backward,
        "_scaled_dot_product_efficient_attention_backward": _efficient_backward,
        "_scaled_dot_product_cudnn_attention": _unknown,
        "_scaled_dot_product_cudnn_attention_backward": _unknown,
        "embedding_dense_backward": _embedding_backward,
        "index_put": _index_backward,
        "index_put_": _index_backward,
        "_index_put_impl_": _index_backward,
        "sort": _sort,
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
"""Operations whose scratch is worth knowing also where it is nothing."""
