"""How each random operation is drawn for the whole batch, and how a microbatch's part takes its place.

Operations are left out whose number of draws depends on values (rejection sampling, random leaky ReLU): see `rule_of`.
What the CPU's kernels do with the numbers of an operation that has tensors among its parameters is done again here, to
the same bits (``aten/src/ATen/native/Distributions.cpp``); tried on torch 2.13.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch

from autosplit.trace.graph import ROWS, NodeClass, TracedNode, evaluate, symbols_in
from autosplit.trace.recording.random_watch import Draw, TensorSpec, named_arguments

Sizes = Mapping[str, int]


class Rule(NamedTuple):
    """``draw(draw, sizes)`` draws for the whole batch; ``give(numbers, args, kwargs)`` is the operation with these."""

    draw: Callable[[Draw, Sizes], torch.Tensor]
    give: Callable[[torch.Tensor, Any, Any], Any]


def rule_of(draw: Draw) -> Rule | None:
    """Return how to draw an operation beforehand; None where that cannot be."""
    name = _name(draw)
    if name == "multinomial":
        named = named_arguments(draw.op, draw.args, dict(draw.kwargs))
        same = draw.args[0].dtype in (torch.float32, torch.float64)
        return _RULES[name] if same and (not named["replacement"] or named["num_samples"] == 1) else None
    if name == "native_dropout" and draw.args[2] is False:
        return None
    return _RULES.get(name)


def is_drawn_beforehand(info: TracedNode) -> bool:
    """Tell whether the numbers of a random node can be drawn for the whole batch before it runs."""
    if info.whole:  # what its Python does depends on values
        return False
    micro = info.node_class is NodeClass.MICRO
    return bool(info.draws) and not any(rule_of(d) is None or (micro and _uneven(d.out)) for d in info.draws or ())


def with_plain_numbers(infos: Iterable[TracedNode]) -> tuple[TracedNode, ...]:
    """Return the random nodes that can have the plain model's numbers; ``infos`` are in model order.

    A node whose draws depend on values can if it runs once, on the whole batch, and so draws by itself. That is after
    all microbatches, so no cell may need later numbers.
    """
    plain, late = [], False
    for info in infos:
        if not info.random:
            continue
        full = info.node_class is NodeClass.FULL
        if full or (is_drawn_beforehand(info) and not late):
            plain.append(info)
        late = late or (full and not is_drawn_beforehand(info))
    return tuple(plain)


def drawn_bytes(info: TracedNode, *, rows: int) -> int:
    """Return the bytes of a random node's numbers, drawn ahead for a batch of ``rows`` rows."""
    count = 0
    for draw in info.draws or ():
        name, like = _name(draw), draw.args[0] if _name(draw) == "multinomial" else draw.out
        held = torch.bool if name in ("bernoulli_.float", "native_dropout") else like.dtype
        if name in ("bernoulli", "bernoulli_.Tensor"):
            held = _wide(draw)
        count += math.prod(evaluate(size, _some(rows)) for size in like.shape) * held.itemsize
    return count


def batch_dim(out: TensorSpec) -> int | None:
    """Return the dimension of a result that depends on the number of rows, or None."""
    return next((dim for dim, size in enumerate(out.shape) if ROWS in symbols_in(size)), None)


def _uneven(out: TensorSpec) -> bool:
    """Tell whether a result is no stack of rows: more than one dimension depends on their number, or not evenly."""
    dims = [size for size in out.shape if ROWS in symbols_in(size)]
    return len(dims) > 1 or any(evaluate(size, _some(0)) for size in dims)


def _some(rows: int) -> Sizes:
    """Return a number of rows, at some lengths."""
    return defaultdict(lambda: 7, {ROWS: rows})


def _name(draw: Draw) -> str:
    return str(draw.op.name()).removeprefix("aten::")


def empty(like: TensorSpec, sizes: Sizes, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return a tensor of a recorded shape and strides, with any contents."""
    shape, strides = ([evaluate(size, sizes) for size in symbolic] for symbolic in (like.shape, like.strides))
    return torch.empty_strided(shape, strides, dtype=dtype or like.dtype)


def _value(value: Any, sizes: Sizes) -> Any:
    if isinstance(value, TensorSpec):
        return empty(value, sizes)
    return [_value(item, sizes) for item in value] if isinstance(value, tuple) else evaluate(value, sizes)


def _call(draw: Draw, sizes: Sizes, first: torch.Tensor | None = None) -> torch.Tensor:
    args = [_value(value, sizes) for value in draw.args]
    kwargs = {key: _value(value, sizes) for key, value in draw.kwargs}
    if any(argument.name == "dtype" for argument in draw.op._schema.arguments):
        kwargs["dtype"] = draw.out.dtype
    if first is not None:
        args[0] = first
    drawn: torch.Tensor = draw.op(*args, **kwargs)
    return drawn


def _fill(numbers: torch.Tensor, args: Any, kwargs: Any) -> torch.Tensor:
    filled: torch.Tensor = args[0].copy_(numbers)
    return filled


# -- operations with tensors among their parameters ----------------------------------------------------------------
def _uniform(draw: Draw, sizes: Sizes) -> torch.Tensor:
    return empty(draw.out, sizes, dtype=_wide(draw)).uniform_()


def _wide(draw: Draw) -> torch.dtype:
    """Return the dtype in which the kernel compares numbers with probabilities."""
    return torch.float64 if draw.args[-1].dtype is torch.float64 else torch.float32


def _below(numbers: torch.Tensor, args: Any, kwargs: Any) -> torch.Tensor:
    return (numbers < args[0]).to(args[0].dtype)


def _deviations(draw: Draw, sizes: Sizes) -> torch.Tensor:
    """Draw normal numbers around nothing; a deviation that is a number is part of the kernel's own arithmetic."""
    std = named_arguments(draw.op, draw.args, dict(draw.kwargs))["std"]
    return empty(draw.out, sizes).normal_(0.0, 1.0 if isinstance(std, TensorSpec) else std)


def _normal(numbers: torch.Tensor, args: Any, kwargs: Any) -> torch.Tensor:
    mean, std = args[0], args[1] if len(args) > 1 else kwargs.get("std", 1.0)
    scaled = numbers.clone()
    return (scaled.mul_(std) if isinstance(std, torch.Tensor) else scaled).add_(mean)


def _choose(numbers: torch.Tensor, args: Any, kwargs: Any) -> torch.Tensor:
    count = args[1] if len(args) > 1 else kwargs["num_samples"]
    share = args[0] / numbers
    return share.argmax(-1, keepdim=True) if count == 1 else share.topk(count)[1]


def _kept(draw: Draw, sizes: Sizes) -> torch.Tensor:
    named = named_arguments(draw.op, draw.args, dict(draw.kwargs))
    return torch.empty(_value(draw.out.shape, sizes), dtype=torch.bool).bernoulli_(1.0 - named["p"])


def _dropout(numbers: torch.Tensor, args: Any, kwargs: Any) -> Any:
    share = 1.0 - args[1]
    return (args[0] * numbers).mul_(1.0 / share if share else 0.0), numbers.clone()


_FILLS = (
    "uniform_ normal_ exponential_ geometric_ cauchy_ log_normal_ random_ random_.from random_.to".split()  # in place
)
_NEWS = (
    "rand randn randint randint.low randperm rand_like randn_like randint_like randint_like.low_dtype "
    "normal.float_float bernoulli.p"
).split()
_RULES: dict[str, Rule] = {
    # Zeros and ones as bool: the kernels take the same numbers for every dtype.
    "bernoulli_.float": Rule(lambda draw, sizes: _call(draw, sizes, empty(draw.out, sizes, dtype=torch.bool)), _fill),
    **dict.fromkeys(_FILLS, Rule(lambda draw, sizes: _call(draw, sizes, empty(draw.out, sizes)), _fill)),
    **dict.fromkeys(_NEWS, Rule(_call, lambda numbers, args, kwargs: numbers.clone())),
    "bernoulli": Rule(_uniform, _below),
    "bernoulli_.Tensor": Rule(_uniform, lambda numbers, args, kwargs: _fill(numbers < args[1], args, kwargs)),
    **dict.fromkeys(("normal.Tensor_float", "normal.float_Tensor", "normal.Tensor_Tensor"), Rule(_deviations, _normal)),
    "multinomial": Rule(lambda draw, sizes: empty(draw.args[0], sizes).exponential_(1.0), _choose),
    "native_dropout": Rule(_kept, _dropout),
}
