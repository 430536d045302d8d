"""What is told by rule is what torch works out, on the meta device and on fake tensors; all else is left to torch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from autosplit.trace.known_results import _IN_PLACE, _RULES, Results, gives_first, known_results

aten = torch.ops.aten
Call = tuple[Any, tuple[Any, ...], dict[str, Any]]
FORMS: dict[str, Callable[[str], Tensor]] = {
    "plain": lambda device: torch.empty(2, 3, 4, 5, device=device),
    "flat": lambda device: torch.empty(6, device=device),
    "number": lambda device: torch.empty((), device=device),
    "ones": lambda device: torch.empty(2, 1, 1, 5, device=device),
    "one": lambda device: torch.empty(1, 1, device=device),
    "half": lambda device: torch.empty(2, 3, 4, 5, device=device, dtype=torch.bfloat16),
    "whole": lambda device: torch.empty(2, 3, 4, 5, device=device, dtype=torch.int64),
    "turned": lambda device: torch.empty(2, 3, 5, 4, device=device).transpose(2, 3),
    "channels last": lambda device: torch.empty(2, 3, 4, 5, device=device).to(memory_format=torch.channels_last),
    "spread": lambda device: torch.empty(2, 3, 1, 1, device=device).expand(2, 3, 4, 5),
    "spread in front": lambda device: torch.empty(3, 1, 5, device=device).expand(2, 3, 4, 5),
    "part": lambda device: torch.empty(3, 3, 4, 5, device=device)[1:],
    "gaps": lambda device: torch.empty(2, 3, 4, 6, device=device)[..., 1:],
    "none": lambda device: torch.empty(2, 0, 4, 5, device=device),
}
UNARY = "relu gelu silu sigmoid tanh neg exp rsqrt sin cos empty_like zeros_like ones_like".split()
BINARY = "add sub mul div".split()
BACKWARD: dict[str, tuple[Any, ...]] = {
    "threshold_backward": (0,),
    "gelu_backward": (),
    "silu_backward": (),
    "sigmoid_backward": (),
    "tanh_backward": (),
}
REDUCED: tuple[tuple[Any, ...], ...] = (([-1],), ([2, 3], True), ([0],), ([0, 1, 2, 3],), ([],), (None, True))


def elementwise(device: str) -> Iterator[Call]:
    one = {name: form(device) for name, form in FORMS.items()}
    other = {name: form(device) for name, form in FORMS.items()}
    for tensor in one.values():
        yield from ((getattr(aten, name).default, (tensor,), {}) for name in UNARY)
        yield from ((getattr(aten, name).Scalar, (tensor, 3), {}) for name in BINARY)
        yield from ((getattr(aten, name).Tensor, (tensor, number), {}) for name in BINARY for number in (2, 0.5, True))
        yield aten.pow.Tensor_Scalar, (tensor, 2), {}
        yield aten.gelu.default, (tensor,), {"approximate": "tanh"}
        yield aten.empty_like.default, (tensor,), {"dtype": torch.float64, "pin_memory": False}
        yield aten.empty_like.default, (tensor,), {"memory_format": torch.channels_last}
        yield aten.new_zeros.default, (tensor, [4, 1, 2]), {"pin_memory": False}
        yield aten.new_zeros.default, (tensor, [0, 2]), {}
        yield from ((aten.add_.Tensor, (tensor.clone(), number), {}) for number in (1, 0.5, True))
        yield aten.relu_.default, (tensor.clone(),), {}
        yield aten.zero_.default, (tensor.clone(),), {}
    for first, second in itertools.product(one, other):
        pair = one[first], other[second]
        yield from ((getattr(aten, name).Tensor, pair, {}) for name in BINARY)
        yield aten.add.Tensor, pair, {"alpha": 2}
        yield from ((getattr(aten, name).default, (*pair, *more), {}) for name, more in BACKWARD.items())
        yield aten.add_.Tensor, (one[first].clone(), other[second]), {}
        yield aten.mul_.Tensor, (one[first].clone(), other[second]), {}


def shaped(device: str) -> Iterator[Call]:
    for form in FORMS.values():
        tensor = form(device)
        for dims in REDUCED:
            yield aten.sum.dim_IntList, (tensor, *dims), {}
            yield aten.mean.dim, (tensor, *dims), {}
        yield aten.sum.default, (tensor,), {}
        yield aten.sum.default, (tensor,), {"dtype": torch.float64}
        yield aten.mean.default, (tensor,), {}
        for name in ("_softmax", "_log_softmax"):
            yield getattr(aten, name).default, (tensor, -1, False), {}
            yield getattr(aten, f"{name}_backward_data").default, (tensor, tensor.clone(), -1, tensor.dtype), {}
    a, b = torch.empty(4, 6, device=device), torch.empty(6, 2, device=device)
    for left, right in ((a, b), (b.t(), a.t()), (a, b.bfloat16()), (a, a), (a[:0], b), (a[:1], b[:, :1])):
        yield aten.mm.default, (left, right), {}
        for bias in (torch.empty(right.shape[1], device=device), torch.empty(1, device=device)):
            yield aten.addmm.default, (bias, left, right), {}
            yield aten.addmm.default, (bias, left, right), {"beta": 2}
        yield aten.bmm.default, (left.expand(3, -1, -1), right.expand(3, -1, -1)), {}
        yield aten.bmm.default, (left.expand(3, -1, -1), right.expand(2, -1, -1)), {}


CONVOLUTIONS = (
    ((2, 4, 9, 8), (6, 4, 3, 3), [1, 1], [1, 1], [1, 1], 1),
    ((2, 4, 9, 8), (6, 2, 3, 2), [2, 1], [0, 1], [1, 2], 2),
    ((2, 4, 9, 8), (4, 1, 3, 3), [2, 2], [1, 1], [1, 1], 4),
    ((1, 4, 9, 8), (6, 4, 1, 1), [1, 1], [0, 0], [1, 1], 1),
    ((2, 1, 9, 8), (1, 1, 3, 3), [1, 1], [0, 0], [1, 1], 1),
    ((2, 4, 1, 1), (6, 4, 1, 1), [1, 1], [0, 0], [1, 1], 1),
    ((2, 4, 1, 1), (6, 4, 3, 3), [1, 1], [0, 0], [1, 1], 1),
    ((2, 4, 9, 8), (6, 3, 3, 3), [1, 1], [1, 1], [1, 1], 1),
    ((2, 4, 5, 6, 7), (6, 4, 3, 3, 3), [1, 1, 1], [1, 1, 1], [1, 1, 1], 1),
    ((2, 4, 9), (6, 4, 3), [1], [1], [1], 1),
    ((0, 4, 9, 8), (6, 4, 3, 3), [1, 1], [1, 1], [1, 1], 1),
)


def windows(device: str) -> Iterator[Call]:
    for shape, kernel, strides, paddings, dilations, groups in CONVOLUTIONS:
        given, weight = torch.empty(shape, device=device), torch.empty(kernel, device=device)
        forms = [(given, weight), (given.bfloat16(), weight.bfloat16()), (given, weight.double())]
        if len(shape) == 4:
            forms.append((given.to(memory_format=torch.channels_last), weight))
            forms.append((given, weight.to(memory_format=torch.channels_last)))
        for x, w in forms:
            settings = (strides, paddings, dilations, False, [0] * len(strides), groups)
            for bias in (None, torch.empty(kernel[0], device=device, dtype=w.dtype)):
                yield aten.convolution.default, (x, w, bias, *settings), {}
            try:
                out = aten.convolution.default(x, w, None, *settings)
            except RuntimeError:
                continue
            for mask in ([True] * 3, [False, True, False], [True, True, False]):
                yield aten.convolution_backward.default, (out, x, w, [kernel[0]], *settings, mask), {}
    transposed = torch.empty(2, 4, 9, 8, device=device), torch.empty(4, 3, 3, 3, device=device)
    yield aten.convolution.default, (*transposed, None, [1, 1], [1, 1], [1, 1], True, [0, 0], 1), {}
    x = torch.empty(2, 3, 9, 8, device=device)
    settings = ([3, 3],), ([3, 3], [2, 2], [1, 1]), ([2],), ([3, 2], [2, 1], [1, 1], [2, 1]), ([2, 2], [2, 2], [0], [1])
    for given in (x, x.bfloat16(), x.to(memory_format=torch.channels_last), x[:0], x[0], x[:, :, :1]):
        for choice in (*settings, ([2, 2], [2, 2], [0, 0], [1, 1], True)):
            yield aten.max_pool2d_with_indices.default, (given, *choice), {}
            try:
                out, places = aten.max_pool2d_with_indices.default(given, *choice)
            except (RuntimeError, ValueError):
                continue
            full = (*choice, *([], [0, 0], [1, 1], False)[len(choice) - 1 :])
            yield aten.max_pool2d_with_indices_backward.default, (out, given, *full, places), {}


def tokens(device: str) -> Iterator[Call]:
    one = {name: form(device) for name, form in FORMS.items()}
    for tensor in one.values():
        for dtype in (torch.bfloat16, torch.float32, torch.int64, torch.bool, torch.complex64):
            yield aten._to_copy.default, (tensor,), {"dtype": dtype}
        yield aten._to_copy.default, (tensor,), {"dtype": torch.float64, "memory_format": torch.channels_last}
        for other, dim in itertools.product(one.values(), (0, 1, -1, 4)):
            yield aten.cat.default, ([tensor, other], dim), {}
        yield aten.cat.default, ([tensor, tensor, tensor],), {}
    table = torch.empty(7, 3, device=device)
    for places in (torch.empty(2, 5, device=device, dtype=torch.int64), torch.empty((), device=device).int()):
        for own in (table, table.bfloat16(), table.t(), table[0], table.int()):
            yield aten.embedding.default, (own, places), {}
            yield aten.embedding.default, (own, places, 1), {}
    counted = [torch.float32, torch.float64, *([torch.int32, torch.int64] if device == "meta" else [])]
    for own in (torch.empty(6, 2, device=device, dtype=dtype) for dtype in counted):
        yield aten.histc.default, (own, 8, 0, 7), {}
        yield aten.histc.default, (own,), {"bins": 4}
        yield aten.histc.default, (own,), {}
        yield aten.histc.default, (own.t(), 8), {}
    scores, classes = torch.empty(5, 7, device=device), torch.empty(5, device=device, dtype=torch.int64)
    for given in (scores, scores.bfloat16(), scores.t(), scores[0], torch.empty(7, 5, device=device).t(), scores[:4]):
        for weight, kind in itertools.product((None, torch.empty(7, device=device, dtype=given.dtype)), (0, 1, 2)):
            yield aten.nll_loss_forward.default, (given, classes, weight, kind, -100), {}
            one_each = torch.empty(5 if kind == 0 else (), device=device, dtype=given.dtype)
            total = torch.empty((), device=device, dtype=given.dtype)
            yield aten.nll_loss_backward.default, (one_each, given, classes, weight, kind, -100, total), {}


def seen(value: Any) -> Any:
    """Return what can be seen of results: looks, and whether they are memory of their own."""
    if not isinstance(value, Tensor):
        return value
    whole = value.untyped_storage().nbytes() == value.numel() * value.element_size() and not value.storage_offset()
    return tuple(value.shape), value.stride(), value.dtype, whole


def told(results: Results) -> Any:
    parts = [part and (part.shape, part.strides, part.dtype, True) for part in results.parts]
    return parts if results.several else parts[0]


CALLS = (elementwise, shaped, windows, tokens)


@pytest.mark.parametrize("calls", CALLS)
@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_what_is_told_is_what_torch_works_out(calls: Callable[[str], Iterator[Call]], device: str) -> None:
    """The fakes are those of CPU tensors."""
    known, unknown = set(), set()
    with FakeTensorMode(allow_non_fake_inputs=True) if device == "cpu" else torch.device("meta"):
        for func, args, kwargs in calls(device):
            results = known_results(func, args, kwargs)
            same = gives_first(func, args, kwargs)
            (known if results is not None or same else unknown).add(func)
            if results is not None:
                out = func(*args, **kwargs)
                assert told(results) == ([*map(seen, out)] if results.several else seen(out)), (func, args, kwargs)
            if same:
                before = seen(args[0])
                assert func(*args, **kwargs) is args[0]
                assert seen(args[0]) == before
    assert known == unknown | {aten.relu_.default} if calls is elementwise else known == unknown


def test_every_rule_is_tried() -> None:
    tried = {func for calls in CALLS for func, _, _ in calls("meta")}
    norms = {
        aten.native_batch_norm.default,
        aten.native_batch_norm_backward.default,
    }  # in test_norm_looks
    norms.add(aten._grouped_mm.default)  # in test_grouped_products
    assert tried | norms == set(_RULES) | _IN_PLACE


@pytest.mark.parametrize(
    ("one", "other"), [((6, 8), (3, 8, 4)), ((3, 6, 8), (8, 12)), ((6, 9), (9, 4)), ((3, 6, 8), (3, 8, 4))]
)
def test_grouped_products(one: tuple[int, ...], other: tuple[int, ...]) -> None:
    """They are those of the CPU's kernel, for which torch has no rule."""
    along = {(2, 3): 6, (3, 2): 12, (2, 2): 9}.get((len(one), len(other)))
    bounds = None if along is None else torch.tensor([1, 2, along], dtype=torch.int32)
    left, right = torch.randn(one), torch.randn(other)
    if one == (6, 9):
        left = torch.randn(9, 8)[:, :6].t()
    results = known_results(aten._grouped_mm.default, (left, right), {"offs": bounds})
    assert results is not None
    assert told(results)[0] == tuple(torch._grouped_mm(left, right, offs=bounds).shape)
