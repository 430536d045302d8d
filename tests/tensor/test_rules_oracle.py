"""Every rule for an operator's axes, held against the operator itself, over torch's own database of operators.

    parts change places     results change places in the same way     a rule that overlooks a place, or an order
    other parts are others  the first part of the results stays       a rule that overlooks influence
    one part, others zero   results add up                            a rule that takes an operator for linear

It is what the value probe asks of an operation's rows, asked of every axis that a rule does not block.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import BinaryUfuncInfo, UnaryUfuncInfo
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from autosplit.profile.node_costs.flops import flat_tensors
from autosplit.tensor.axes import Axis, Shard, shard_if_any
from autosplit.tensor.follow import Call, Follower, KernelsAsOne
from autosplit.tensor.rules import rules

SAMPLES, CALLS = 12, 12
"""Of an entry of the database, and of an operator: as many are asked."""
DRAWN = frozenset("rand_like randn_like bernoulli bernoulli_ native_dropout empty_like".split())
"""Draws, whose parts are told elsewhere, and memory as it is."""
ELSEWHERE = frozenset("pointwise attention _grouped_mm _fused_rms_norm".split())
"""What no call of the database has by that name."""
SPELLED = frozenset(
    "contiguous real imag _conj alias reshape _reshape_alias _unsafe_view unsafe_split_with_sizes "
    "linalg_vector_norm".split()
)
"""Other names of what is asked; operators that change their operand in place are such, too."""
OTHERS = frozenset("__getitem__ narrow chunk float nn.functional.pad nn.functional.conv1d nn.functional.conv2d".split())
"""Entries that call operators with rules under other names."""
RULES = rules()


class Calls(TorchDispatchMode):
    """Lists the calls of operators, with copies of their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append((func, *tree_map_only(Tensor, lambda t: t.detach().clone(), (args, kwargs or {}))))
        return func(*args, **(kwargs or {}))


def calls() -> Iterator[tuple[str, Callable[[Sequence[Tensor]], Any], list[Tensor]]]:
    """Yield operators' names, and their calls as functions of tensors, each kind of call once."""
    seen: set[str] = set()
    counts: Counter[str] = Counter()
    for entry in op_db:
        samples = entry.sample_inputs("cpu", torch.float64) if _is_asked(entry) else ()
        for _, sample in zip(range(SAMPLES), samples, strict=False):
            with Calls() as listed:
                entry(sample.input, *sample.args, **sample.kwargs)
            for func, args, kwargs in listed.seen:
                name = func.overloadpacket.__name__
                kind = str((func, tree_map_only(Tensor, lambda t: (t.shape, t.dtype), (args, kwargs))))
                has_rule = name in RULES or torch.Tag.pointwise in func.tags
                if has_rule and kind not in seen and counts[name] < CALLS and not func._schema.is_mutable:
                    counts[name] += 1
                    yield name, partial(_call, func, args, kwargs), [*flat_tensors((args, kwargs))]
                seen.add(kind)


def _is_asked(entry: Any) -> bool:
    names = {entry.name.replace(".", "_"), entry.name.rpartition(".")[2], f"_{entry.name}"}
    elementwise = isinstance(entry, (UnaryUfuncInfo, BinaryUfuncInfo))
    ruled = elementwise or entry.name in OTHERS or not names.isdisjoint(RULES)
    return ruled and entry.supports_dtype(torch.float64, "cpu") and not entry.name.startswith("jiterator")


def _call(func: Any, args: Any, kwargs: Any, tensors: Sequence[Tensor]) -> Any:
    given = iter(tensors)
    args, kwargs = tree_map_only(Tensor, lambda _: next(given), (args, kwargs))
    return func(*args, **kwargs)


def faults(function: Callable[[Sequence[Tensor]], Any], tensors: Sequence[Tensor]) -> Iterator[str]:
    """Yield "" for each axis that a rule gives in parts rightly, else what is wrong."""
    follower = Follower(RULES)
    for tensor in tensors:
        follower.dims(tensor)
    results: list[Tensor] = []
    with follower, KernelsAsOne(follower), suppress(IndexError):  # of a rule for a tensor without dimensions: whole
        results = [*flat_tensors(function(tensors))]
    if not results:
        return
    call = follower.calls[-1]
    blocked = {atom for axis in call.blocked for atom in axis.atoms()}
    atoms = dict.fromkeys(atom for t in tensors for axis in follower.dims(t) for atom in axis.atoms())
    for atom in atoms:
        taken, given = ([shard_if_any(follower.dims(t), atom) for t in side] for side in (tensors, results))
        if atom not in blocked and atom.size > 1 and any(taken):
            yield _fault(function, call, tensors, taken, given, _parts(atom))


def _parts(axis: Axis) -> int:
    return next(n for n in range(2, axis.size + 1) if axis.size % n == 0)


def _fault(
    function: Callable[[Sequence[Tensor]], Any],
    call: Call,
    tensors: Sequence[Tensor],
    taken: Sequence[Shard | None],
    given: Sequence[Shard | None],
    parts: int,
) -> str:
    def part(tensor: Tensor, shard: Shard | None, number: int) -> Tensor:
        return tensor if shard is None else tensor.index_select(shard.dim, _places(shard, number, parts))

    def of_parts(tensor: Tensor, shard: Shard | None, *numbers: int) -> Tensor:
        """Return a tensor whose parts are others of it; with -1 zeros."""
        result = tensor.clone()
        for place, number in enumerate(numbers if shard is not None else ()):
            new = part(tensor, shard, max(number, 0)) * (number >= 0)
            result.index_copy_(shard.dim, _places(shard, place, parts), new)
        return result

    plain = _run(function, tensors)
    turned = [of_parts(t, s, *range(1, parts), 0) for t, s in zip(tensors, taken, strict=True)]
    expected = [of_parts(t, s, *range(1, parts), 0) for t, s in zip(plain, given, strict=True)]
    if all(given):
        if not _same(_run(function, turned), expected):
            return "results do not change places with the parts"
        beside = _run(function, [of_parts(t, s, *[0] * parts) for t, s in zip(tensors, taken, strict=True)])
        firsts = ([part(t, s, 0) for t, s in zip(side, given, strict=True)] for side in (plain, beside))
        return "" if _same(*firsts) else "a part depends on others"
    if not call.terms:
        return ""  # nobody takes summands of it
    linear, cut = (
        {key for term in call.terms for key in term},
        {id(t) for t, s in zip(tensors, taken, strict=True) if s},
    )
    if not cut <= linear:
        return ""  # nor of an operand that it is not linear in
    sums: list[Tensor] = []
    for number in range(parts):
        alone = [*[-1] * number, number, *[-1] * (parts - number - 1)]
        once = {key for term in call.terms if cut.isdisjoint(term) for key in term if number}
        operands = [t * 0 if id(t) in once else of_parts(t, s, *alone) for t, s in zip(tensors, taken, strict=True)]
        sums = [a + b for a, b in zip(sums, out, strict=True)] if (out := _run(function, operands)) and sums else out
    return "" if _same(sums, plain) else "results are no sum of what parts give"


def _places(shard: Shard, number: int, parts: int) -> Tensor:
    return torch.tensor([place for run in shard.indices(number, parts) for place in run], dtype=torch.long)


def _run(function: Callable[[Sequence[Tensor]], Any], tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.clone() for tensor in flat_tensors(function([tensor.clone() for tensor in tensors]))]


def _same(ones: Sequence[Tensor], twos: Sequence[Tensor]) -> bool:
    return all(
        a.shape == b.shape and torch.allclose(a, b, rtol=1e-9, atol=1e-11, equal_nan=True)
        for a, b in zip(ones, twos, strict=True)
    )


@pytest.mark.filterwarnings("ignore")
def test_rules_say_what_operators_do() -> None:
    wrong, asked = defaultdict[str, set[str]](set), Counter[str]()
    for name, function, tensors in calls():
        for fault in faults(function, tensors) if name not in DRAWN and all(t.numel() for t in tensors) else ():
            asked[name] += 1
            wrong[name] |= {fault} - {""}
    assert {name: faults for name, faults in wrong.items() if faults} == {}
    in_place = {name for name in RULES if name.endswith("_")}
    assert RULES.keys() - asked.keys() <= DRAWN | ELSEWHERE | SPELLED | in_place
    assert sum(asked.values()) > 1500


def _attended(tensors: Sequence[Tensor]) -> Tensor:
    return F.scaled_dot_product_attention(*tensors, enable_gqa=tensors[0].shape[1] != tensors[1].shape[1])


def _normed(tensors: Sequence[Tensor]) -> Any:
    return torch.ops.aten._fused_rms_norm.default(tensors[0], [6], tensors[1], None)


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (_attended, [(2, 4, 6, 8)] * 3),
        (_attended, [(2, 4, 6, 8), *[(2, 2, 6, 8)] * 2]),
        (_attended, [(2, 4, 6, 8)] * 3 + [(2, 4, 6, 6)]),
        (_normed, [(2, 4, 6), (6,)]),
    ],
)
def test_kernels_that_the_database_lacks(
    function: Callable[[Sequence[Tensor]], Any], shapes: Sequence[tuple[int, ...]]
) -> None:
    generator = torch.Generator().manual_seed(0)
    answers = [*faults(function, [torch.randn(shape, generator=generator) for shape in shapes])]
    assert len(answers) >= 2
    assert {*answers} == {""}
