"""Scratch of the CPU's convolutions: what they hold beside their results, forward and backward.

Where torch hands a convolution to oneDNN, its inputs are copied into the layout of the kernel, and the result back:

    source, weights, destination in blocks of 8 channels (AVX2) ──kernel──► result in blocks ──► plain result

Which kernel takes it is decided here as oneDNN decides it for fp32 (v3.12, ``cpu_convolution_list.cpp`` and the
``init_conf`` of ``jit_avx2_conv_kernel_f32.cpp``, ``jit_avx2_1x1_conv_kernel_f32.cpp``,
``jit_uni_dw_convolution``); the steps are those of ideep's ``conv.hpp`` and torch's ``mkldnn/Conv.cpp``. Where it does
not (bf16 without AVX512), ``ConvolutionMM2d.cpp`` unfolds the input into columns.

``torch._C._select_conv_backend`` is private: torch asks it itself for fake convolutions, in
``_subclasses/fake_impls.py``, and there is no public name. Used in this file only, on torch 2.13.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

import torch

from autosplit.profile.workspaces import Flow, Source, Workspace, nbytes

_ALIGNMENT_BYTES = 128
"""oneDNN books each of a kernel's buffers with room to align it."""

_STRIDED_EXTRA_BYTES = 32_768
"""Beside the padded image, in oneDNN's strided backward kernel (20 to 36 KiB in the probes)."""

_STRIDED_CHANNELS = 16
"""Channels per group from which oneDNN's strided backward kernel takes groups (8 were refused, 16 taken)."""

_CHANNELS_LAST_EXTRA_BYTES = 8_344

_COLUMN_LIMIT_BYTES = 372_736
"""Larger columns are unfolded in parts that fit a core's cache (as measured with 512 KiB)."""


@dataclass(frozen=True)
class _Convolution:
    """A convolution from ``source`` to ``destination`` channels; a transposed one is seen from its result."""

    batch: int
    source: int
    destination: int
    groups: int
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    source_space: tuple[int, ...]
    destination_space: tuple[int, ...]
    item_bytes: int

    @property
    def taps(self) -> int:
        return prod(self.kernel)

    @property
    def source_bytes(self) -> int:
        return self.batch * self.source * prod(self.source_space) * self.item_bytes

    @property
    def destination_bytes(self) -> int:
        return self.batch * self.destination * prod(self.destination_space) * self.item_bytes

    @property
    def weight_bytes(self) -> int:
        return self.destination * self.source // self.groups * self.taps * self.item_bytes

    @property
    def columns_bytes(self) -> int:
        """The unfolded source of one group and one sample."""
        return self.source // self.groups * self.taps * prod(self.destination_space) * self.item_bytes

    @property
    def strided(self) -> bool:
        return any(step > 1 for step in self.stride)

    @property
    def depthwise(self) -> bool:
        return self.groups == self.source == self.destination and self.groups > 1

    @property
    def pointwise(self) -> bool:
        even = not any(size % step for size, step in zip(self.source_space, self.stride, strict=True))
        return self.taps == 1 and not any(self.padding) and self.groups == 1 and even

    @property
    def unpadded_groups(self) -> bool:
        """Several groups whose channels do not fill blocks: the blocked kernels refuse them."""
        block = _block()
        return self.groups > 1 and bool(
            (self.source // self.groups) % block or (self.destination // self.groups) % block
        )


@cache
def _block() -> int:
    return 16 if "AVX512" in torch.backends.cpu.get_cpu_capability() else 8


def _up(channels: int) -> int:
    return -(-channels // _block()) * _block()


def convolution(args: Sequence[Any], out: Any) -> Workspace:
    """Return the scratch of ``aten.convolution``."""
    source, weight, bias, stride, padding, dilation, transposed, output_padding, groups = args[:9]
    backend = _backend(source, weight, bias, stride, padding, dilation, transposed, output_padding, groups, None)
    flow = Flow()
    if not _channels_last(source, weight):
        flow.take(nbytes(source) * (not source.is_contiguous()))
        flow.take(nbytes(weight) * (not weight.is_contiguous()))
    shape = _shape(
        out if transposed else source, source if transposed else out, weight, stride, padding, dilation, groups
    )
    if not backend.startswith(("Mkldnn", "Slow2d", "SlowTranspose2d")):
        return Workspace(shape.columns_bytes if backend.startswith("Slow") else 0, "unknown")
    if not backend.startswith("Mkldnn"):
        _slow_forward(flow, shape, transposed=transposed)
    elif _channels_last(source, weight):
        flow.estimate(nbytes(out) + (1 + (shape.taps > 1)) * nbytes(weight) + _CHANNELS_LAST_EXTRA_BYTES)
    elif transposed:
        _data_pass(flow, shape, bias=bias is not None)
    else:
        _forward_pass(flow, shape, bias=bias is not None)
    return _found(flow, backend, nbytes(out))


def convolution_backward(args: Sequence[Any], out: Sequence[Any]) -> Workspace:
    """Return the scratch of ``aten.convolution_backward``."""
    cotangent, source, weight, bias, stride, padding, dilation, transposed, output_padding, groups, mask = args[:11]
    backend = _backend(source, weight, None, stride, padding, dilation, transposed, output_padding, groups, bias)
    results = sum(nbytes(tensor) for tensor in out if tensor is not None)
    ends = (cotangent, source) if transposed else (source, cotangent)
    shape = _shape(*ends, weight, stride, padding, dilation, groups)
    if not backend.startswith(("Mkldnn", "Slow2d", "SlowTranspose2d")):
        return Workspace(shape.columns_bytes if backend.startswith("Slow") else 0, "unknown")
    flow = Flow()
    last = _channels_last(source, weight)
    for tensor in (cotangent, source, weight):
        contiguous = tensor.is_contiguous(memory_format=torch.channels_last) if last else tensor.is_contiguous()
        flow.take(nbytes(tensor) * (not contiguous))
    if not backend.startswith("Mkldnn"):
        _slow_backward(flow, shape, mask, cotangent, transposed=transposed)
    elif last:
        held = nbytes(out[0])
        scratch = _strided_scratch(shape) if shape.strided else _CHANNELS_LAST_EXTRA_BYTES
        flow.estimate(held + nbytes(weight) + scratch)
        flow.estimate(held + 3 * nbytes(weight))
    else:
        if mask[0]:
            flow.take(-_backward_source(flow, shape, transposed=transposed) + nbytes(out[0]))
        if mask[1] or mask[2]:
            _weights_pass(flow, shape, biases=nbytes(out[2]) * mask[2])
    return _found(flow, backend, results)


def _backward_source(flow: Flow, shape: _Convolution, *, transposed: bool) -> int:
    """Run the pass that makes the gradient of the convolution's input; return what it left: that gradient."""
    before = flow.live
    if transposed:
        _forward_pass(flow, shape, bias=False)
    else:
        _data_pass(flow, shape, bias=False)
    return flow.live - before


def _found(flow: Flow, backend: str, results: int) -> Workspace:
    source: Source = "measured" if flow.estimated else "formula"
    if backend.startswith("Mkldnn") and _block() != 8:
        source = "unknown"
    return Workspace(max(0, flow.peak - results), source)


def _backend(
    source: Any, weight: Any, bias: Any, stride: Any, padding: Any, dilation: Any, transposed: bool, *rest: Any
) -> str:
    output_padding, groups, bias_sizes = rest
    chosen = torch._C._select_conv_backend(
        source, weight, bias, stride, padding, dilation, transposed, output_padding, groups, bias_sizes
    )
    name = str(chosen).removeprefix("_ConvBackend.")
    return "MkldnnTranspose" if name == "???" and transposed and source.dtype == torch.float32 else name


def _channels_last(source: Any, weight: Any) -> bool:
    if source.dim() not in (4, 5):
        return False
    form = torch.channels_last if source.dim() == 4 else torch.channels_last_3d
    return any(t.is_contiguous(memory_format=form) and not t.is_contiguous() for t in (source, weight))


def _shape(
    source: Any, destination: Any, weight: Any, stride: Any, padding: Any, dilation: Any, groups: int
) -> _Convolution:
    space = source.dim() - 2

    def each(values: Any) -> tuple[int, ...]:
        return tuple(values) * (space if len(values) == 1 else 1)

    return _Convolution(
        batch=source.shape[0],
        source=source.shape[1],
        destination=destination.shape[1],
        groups=groups,
        kernel=tuple(weight.shape[2:]),
        stride=each(stride),
        padding=each(padding),
        dilation=each(dilation),
        source_space=tuple(source.shape[2:]),
        destination_space=tuple(destination.shape[2:]),
        item_bytes=source.element_size(),
    )


def _blocked(shape: _Convolution, channels: int, space: Sequence[int]) -> int:
    fill = _up(channels) if shape.groups == 1 or shape.depthwise else channels
    return shape.batch * fill * prod(space) * shape.item_bytes


def _blocked_weight(shape: _Convolution, source: int) -> int:
    if shape.depthwise:
        return _up(shape.groups) * shape.taps * shape.item_bytes
    if shape.groups > 1:
        return shape.weight_bytes
    return source * _up(shape.destination) * shape.taps * shape.item_bytes


def _padded_bias(shape: _Convolution) -> int:
    ragged = (shape.groups == 1 or shape.depthwise) and shape.destination % _block()
    return _up(shape.destination) * 4 + _ALIGNMENT_BYTES if ragged else 0


def _forward_pass(flow: Flow, shape: _Convolution, *, bias: bool) -> None:
    """Source and weights in, destination out."""
    plain = shape.destination_bytes
    if not shape.depthwise and not shape.pointwise and not _direct(shape):
        made = plain
        flow.take(made)
        hold = flow.spike if shape.columns_bytes <= _COLUMN_LIMIT_BYTES else flow.estimate
        hold(min(shape.columns_bytes, _COLUMN_LIMIT_BYTES) * torch.get_num_threads() + _ALIGNMENT_BYTES)
    else:
        flat = not shape.depthwise and not shape.pointwise and shape.source // shape.groups < _block()
        source = 0 if flat else _blocked(shape, shape.source, shape.source_space)
        weight = _blocked_weight(shape, shape.source if flat else _up(shape.source))
        made = _blocked(shape, shape.destination, shape.destination_space)
        scratch = _padded_bias(shape) if bias else 0
        if shape.pointwise and shape.strided:
            image = shape.source * prod(shape.destination_space) * shape.item_bytes
            scratch += image * torch.get_num_threads() + _ALIGNMENT_BYTES
        with flow.during(scratch, source, weight):
            flow.take(made)
    flow.take(plain)
    flow.take(-made)


def _data_pass(flow: Flow, shape: _Convolution, *, bias: bool) -> None:
    """Destination's gradient and weights in, source's gradient out; with ``bias``: a transposed convolution."""
    plain = shape.source_bytes
    wide = shape.groups == 1 or shape.destination // shape.groups >= _STRIDED_CHANNELS
    strided = shape.strided and not shape.depthwise and wide
    ragged = shape.unpadded_groups and not shape.depthwise and not strided
    dilated = any(step > 1 for step in shape.dilation)
    if ragged or (dilated and shape.strided):
        flow.take(plain)
        flow.spike(shape.columns_bytes * torch.get_num_threads() + _ALIGNMENT_BYTES)
        flow.take(plain)
        flow.take(-plain)
    elif strided:
        scratch = _strided_scratch(shape)
        weight = shape.destination * _up(shape.source // shape.groups) * shape.taps * shape.item_bytes
        with flow.during(shape.destination_bytes, weight):
            flow.take(plain)
            flow.estimate(scratch)
        flow.take(2 * plain)
        flow.take(-2 * plain)
    else:
        made = _blocked(shape, shape.source, shape.source_space)
        weight = _blocked_weight(shape, _up(shape.source))
        summed = made + _ALIGNMENT_BYTES if bias else 0
        with flow.during(_blocked(shape, shape.destination, shape.destination_space), weight, summed):
            flow.take(made)
        flow.take(plain)
        flow.take(-made)


def _strided_scratch(shape: _Convolution) -> int:
    """The padded destination of one sample per thread, in oneDNN's strided backward kernel."""
    sizes = zip(shape.destination_space, shape.kernel, shape.stride, strict=True)
    image = prod(size + (width - 1) // step for size, width, step in sizes)
    image *= shape.destination // shape.groups * shape.item_bytes
    return image * torch.get_num_threads() + (_STRIDED_EXTRA_BYTES if shape.taps > 1 else 20_504)


def _weights_pass(flow: Flow, shape: _Convolution, *, biases: int) -> None:
    """Source and destination's gradient in, the weights' and the bias's (of ``biases`` bytes) gradients out."""
    padding = _padded_bias(shape) * bool(biases) * (not shape.depthwise)
    threads = torch.get_num_threads()
    if not _direct_weights(shape):
        made = shape.weight_bytes
        flow.take(made)
        with flow.during((shape.columns_bytes + 4 * made) * threads + 2 * _ALIGNMENT_BYTES):
            flow.take(biases)
    else:
        flat = shape.source // shape.groups == 3 and not shape.pointwise
        made = _blocked_weight(shape, shape.source if flat else _up(shape.source))
        source = 0 if flat else _blocked(shape, shape.source, shape.source_space)
        with flow.during(_blocked(shape, shape.destination, shape.destination_space), source):
            flow.take(made)
            if shape.pointwise:
                _pointwise_scratch(flow, shape, made, padding)
            flow.take(biases)
            flow.spike(padding)
    flow.take(biases + shape.weight_bytes)
    flow.take(-biases - made)


def _pointwise_scratch(flow: Flow, shape: _Convolution, made: int, padding: int) -> None:
    """The image without the skipped pixels, and each thread's part of the weights' gradient."""
    threads = torch.get_num_threads()
    image = min(_up(shape.source), 64) * prod(shape.destination_space) * shape.item_bytes + _ALIGNMENT_BYTES
    scratch = image * threads * shape.strided + padding
    if threads > 1 and min(shape.source, shape.destination) <= 64:  # more channels: each thread has its own weights
        flow.estimate(scratch + made * threads + 8192 + _ALIGNMENT_BYTES)
    else:
        flow.spike(scratch)


def _direct(shape: _Convolution) -> bool:
    """Whether ``jit_avx2_conv_fwd_kernel_f32_t::init_conf`` takes it."""
    wide = shape.kernel[-1] > 7 and any(shape.padding) and shape.strided
    return not shape.unpadded_groups and shape.padding[-1] <= 3 and not wide


def _direct_weights(shape: _Convolution) -> bool:
    """Whether a blocked kernel makes the weights' gradient (``jit_avx2_conv_bwd_weights_kernel_f32_t::init_conf``)."""
    if shape.depthwise:
        return max(shape.stride) <= max(shape.kernel) <= 3
    if shape.pointwise:
        return True
    heights = zip(shape.kernel, shape.source_space, shape.padding, strict=True)
    fits = all(width <= size and pad < width for width, size, pad in heights)
    undilated = all(step == 1 for step in shape.dilation)
    return not shape.unpadded_groups and undilated and fits and shape.kernel[-1] < 14


def _slow_forward(flow: Flow, shape: _Convolution, *, transposed: bool) -> None:
    if transposed:
        flow.take(shape.source_bytes)
        flow.spike(shape.batch * shape.columns_bytes * shape.groups)
        return
    columns = _columns(shape)
    if shape.groups == 1:
        with flow.during(columns):
            flow.take(shape.destination_bytes)
        return
    for _ in range(shape.groups):
        with flow.during(shape.source_bytes // shape.groups * (shape.batch > 1), columns):
            flow.take(shape.destination_bytes // shape.groups)
    flow.take(shape.destination_bytes)
    flow.take(-shape.destination_bytes)


def _columns(shape: _Convolution) -> int:
    plain = shape.taps == 1 and not shape.strided and not any(shape.padding)
    return 0 if plain else shape.batch * shape.columns_bytes


def _slow_backward(
    flow: Flow, shape: _Convolution, mask: Sequence[bool], cotangent: torch.Tensor, *, transposed: bool
) -> None:
    """One group after the other; the bias's gradient is a sum in fp32, for which the cotangent is copied."""
    result = (shape.destination_bytes if transposed else shape.source_bytes) // shape.groups
    biased = (shape.source if transposed else shape.destination) // shape.groups * shape.item_bytes
    columns = _columns(shape) // (shape.batch if transposed else 1)
    half = biased > shape.item_bytes == 2
    sliced = (
        0 if shape.groups == 1 or shape.batch == 1 else (shape.source_bytes + shape.destination_bytes) // shape.groups
    )
    for _ in range(shape.groups):
        with flow.during(sliced):
            if mask[0]:
                flow.take(result)
                flow.spike(columns * transposed)
            if mask[2]:
                flow.take(biased)
                flow.spike((2 * biased + 2 * nbytes(cotangent) // shape.groups) * half)
            if mask[1]:
                flow.take(shape.weight_bytes // shape.groups)
                flow.spike(columns)
    if shape.groups > 1:
        flow.take(flow.live)
