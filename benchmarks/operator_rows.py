"""Torch's database of operators, each along every dimension as the batch: is it run by rows only where it may be?

    python -m benchmarks.operator_rows [--per-operator 6] [--seed 0] [--only NAME ...] [--out FILE]

An operator stands between two products in a module. A sample of the database is called with six rows in one of its
dimensions, with all its arguments, with its keyword arguments left out, or with its integers turned into the batch
dimension. autosplit classifies the module; the truth is tried out: the module runs on all rows and on pieces, for rows
as they are, in another order, equal, shuffled, zero and large; outputs and gradients of the pieces, side by side (and
added up for parameters), must be those of the whole.

    micro, pieces agree      right
    micro, pieces differ     wrong: "micro_but_mixes", which must stay empty
    full, pieces agree       right, but slower than it could be: "full_but_apart"
    outputs equal for all    nothing of a row is in them: "shared"

Gradients that are added up agree up to the rounding of a result's dtype, where a cast made it coarser. An operator with
which plain torch itself kills the process, on pieces as they are here, is listed as "crashed_in_torch".
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import multiprocessing
import random
import sys
import types
import unittest
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from autosplit import Sample
from autosplit.errors import AutosplitError
from autosplit.trace.graph import NodeClass
from autosplit.trace.ladder import trace
from autosplit.trace.rows.probe import probe_rows

ROWS = 6
PIECES = ((1, 2, 3), (3, 3), (2, 4))
_SAMPLES = 12
_LARGEST = 20_000
_TOLERANCE = 1e-9
_ROUNDING = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""What additions in another order may change, as a share of all that is added, by a result's dtype."""
_SECONDS = 120.0
_FORK = multiprocessing.get_context("fork")


def operators() -> list[Any]:
    """Return torch's database; its module asks for a package of which it uses a base class of tests only."""
    sys.modules.setdefault("expecttest", types.SimpleNamespace(TestCase=unittest.TestCase))  # type: ignore[arg-type]
    from torch.testing._internal.common_methods_invocations import op_db

    return list(op_db)


class Around(nn.Module):
    """An operator between two products; tensors without rows are the module's own."""

    def __init__(self, function: Callable[..., Any], spec: Any, leaves: Sequence[Any], batched: Sequence[int]) -> None:
        super().__init__()
        self.function, self.spec, self.batched = function, spec, tuple(batched)
        self.before, self.after = nn.Parameter(torch.tensor(1.25).double()), nn.Parameter(torch.tensor(0.75).double())
        self.plain: list[Any] = []
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor) and index not in batched:
                if leaf.is_floating_point():
                    self.register_parameter(f"own{index}", nn.Parameter(leaf.detach().clone()))
                else:
                    self.register_buffer(f"own{index}", leaf.clone())
            self.plain.append(None if isinstance(leaf, Tensor) else leaf)

    def forward(self, *rows: Tensor) -> tuple[Tensor, ...]:
        given = dict(zip(self.batched, rows, strict=True))
        leaves = [
            given[i] * self.before
            if i in given and given[i].is_floating_point()
            else given.get(i, getattr(self, f"own{i}", leaf))
            for i, leaf in enumerate(self.plain)
        ]
        value, args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        made = [t for t in pytree.tree_leaves(self.function(value, *args, **kwargs)) if isinstance(t, Tensor)]
        return tuple(t * self.after if t.is_floating_point() else t for t in made)


@dataclass(frozen=True)
class Case:
    """One way to call an operator, with the batch in one dimension of some of its tensors."""

    operator: str
    model: Around
    rows: tuple[Tensor, ...]
    dim: int

    def __str__(self) -> str:
        shapes = [tuple(t.shape) for t in self.rows]
        return f"{self.operator} {shapes} batch {self.dim}: {self.model.plain}"


@dataclass(frozen=True)
class Verdict:
    """How a case is run, and whether rows are apart in it: ``micro``, ``full``, ``refused``; True, False."""

    ran: str
    apart: bool
    why: str = ""


@dataclass(frozen=True)
class Judged:
    """A case, as text, and its verdict."""

    operator: str
    case: str
    verdict: Verdict


def cases(operator: Any, *, count: int, seed: int) -> Iterator[Case]:
    """Yield up to ``count`` cases of an operator, drawn at random."""
    name = operator.name + ("." + operator.variant_test_name if operator.variant_test_name else "")
    dtype = next((d for d in (torch.float64, torch.int64, torch.bool) if d in operator.dtypes), None)
    if dtype is None:
        return
    torch.manual_seed(seed)
    try:
        samples = list(itertools.islice(operator.sample_inputs("cpu", dtype), _SAMPLES))
    except Exception:
        return
    generator = random.Random(f"{seed} {name}")
    found: list[tuple[Any, int, bool]] = []
    for sample in samples:
        first = next((t for t in pytree.tree_leaves(sample.input) if isinstance(t, Tensor)), None)
        if first is None or first.numel() > _LARGEST or first.layout != torch.strided:
            continue
        calls = [(sample.input, sample.args, sample.kwargs)]
        calls += [(sample.input, sample.args, {})] if sample.kwargs else []
        for dim in range(first.dim()):
            found += [(call, dim, alike) for call in calls for alike in (False, True)]
            found += [(turned, dim, False) for call in calls[:1] if (turned := _along(call, dim)) is not None]
    generator.shuffle(found)
    for call, dim, alike in found[:count]:
        leaves, spec = pytree.tree_flatten(call)
        tensors = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        size = leaves[tensors[0]].shape[dim]
        batched = [i for i in tensors if leaves[i].dim() > dim and leaves[i].shape[dim] == size]
        batched = batched if alike else batched[:1]
        if size and all(leaves[i].layout == torch.strided and not leaves[i].is_complex() for i in batched):
            rows = tuple(probe_rows(leaves[i].detach(), dim, range(ROWS)) for i in batched)
            yield Case(name, Around(operator.op, spec, leaves, batched), rows, dim)


def _along(call: Any, dim: int) -> Any:
    """Return a call whose integer arguments, ``dim`` among them, are the batch dimension; None where it has none."""
    value, args, kwargs = call
    turned = tuple(dim if type(arg) is int else arg for arg in args)
    keywords = {key: dim if key == "dim" else arg for key, arg in kwargs.items()}
    return (value, turned, keywords) if (repr(turned), repr(keywords)) != (repr(args), repr(kwargs)) else None


def judge(case: Case) -> Verdict:
    """Ask autosplit how it runs a case, and try out whether rows are apart."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            traced = trace(case.model, Sample(*case.rows), batch_dims=(case.dim,) * len(case.rows)).graph
    except Exception as error:
        own = isinstance(error, AutosplitError) or _fails(case)
        return Verdict("refused", apart=False, why="" if own else f"{type(error).__name__}: {error}")
    infos = [info for node, info in traced.compute_nodes()]
    if any(info.random for info in infos):
        return Verdict("random", apart=False)
    full = any(info.node_class is NodeClass.FULL for info in infos)
    micro = any(info.node_class is NodeClass.MICRO for info in infos)
    pieces = [sizes for sizes in PIECES if min(sizes) >= traced.min_rows]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        why = next((why for rows in _others(case) if (why := _difference(case, rows, pieces))), "")
    if why and _is_constant(case):
        return Verdict("shared", apart=True)
    return Verdict("full" if full else "micro" if micro else "shared", apart=not why, why=why)


def judged(operator: Any, *, count: int, seed: int) -> list[Judged]:
    """Judge the cases of an operator."""
    return [Judged(case.operator, str(case), judge(case)) for case in cases(operator, count=count, seed=seed)]


def judged_apart(operator: Any, *, count: int, seed: int) -> list[Judged]:
    """Judge the cases of an operator in a process of its own: some of torch's kernels take odd sizes badly."""
    receiver, sender = _FORK.Pipe(duplex=False)
    process = _FORK.Process(target=lambda: sender.send(judged(operator, count=count, seed=seed)), daemon=True)
    process.start()
    sender.close()
    found: list[Judged] = []
    with contextlib.suppress(EOFError):
        found = receiver.recv() if receiver.poll(_SECONDS) else []
    if process.is_alive():
        process.join(1)
        process.kill()
    process.join()
    if found or not process.exitcode:
        return found or [Judged(operator.name, operator.name, Verdict("none", False))]
    plain = _FORK.Process(target=_run_plain, args=(operator, count, seed), daemon=True)
    plain.start()
    plain.join(_SECONDS)
    plain.kill()
    plain.join()
    return [Judged(operator.name, operator.name, Verdict("crashed_in_torch" if plain.exitcode else "crashed", False))]


def _run_plain(operator: Any, count: int, seed: int) -> None:
    """Run the cases of an operator without autosplit, forward and backward, on every number of rows."""
    for case in cases(operator, count=count, seed=seed):
        for rows in range(1, ROWS + 1):
            with contextlib.suppress(Exception):
                _run(case.model, [t.narrow(case.dim, 0, rows) for t in case.rows], None)


def _fails(case: Case) -> bool:
    """Tell whether the operator itself fails on some number of rows."""
    try:
        for count in (3, 4, ROWS):
            case.model(*(rows.narrow(case.dim, 0, count) for rows in case.rows))
    except Exception:
        return True
    return False


def _is_constant(case: Case) -> bool:
    """Tell whether the outputs are the same whatever the rows are, and however many."""
    try:
        given = [part for rows in _others(case) for part in (rows, *_split(rows, PIECES[0], case.dim))]
        first, *others = [case.model(*rows) for rows in given]
    except Exception:
        return False
    return all(torch.equal(a, b) for outputs in others for a, b in zip(first, outputs, strict=True))


def _others(case: Case) -> Iterator[tuple[Tensor, ...]]:
    """Yield the rows of a case, and others made of them."""
    yield case.rows
    generator = torch.Generator().manual_seed(0)
    for _ in range(4):
        order = torch.randint(ROWS, (ROWS,), generator=generator)
        yield tuple(rows.index_select(case.dim, order) for rows in case.rows)
    for scale in (-1.0, 0.0, 100.0):
        factors = torch.tensor([1.0, scale, 1.0, scale, scale, 1.0]).double()
        shape = [ROWS if dim == case.dim else 1 for dim in range(case.rows[0].dim())]
        first = case.rows[0]
        yield ((first * factors.reshape(shape)).to(first.dtype), *case.rows[1:])
    for _ in range(3):
        mixed = [t.reshape(-1)[torch.randperm(t.numel(), generator=generator)].reshape(t.shape) for t in case.rows]
        yield tuple(mixed)


def _difference(case: Case, rows: tuple[Tensor, ...], pieces: Sequence[tuple[int, ...]]) -> str:
    """Return how the pieces differ from the whole, or ""; also where the whole fails."""
    try:
        wholes, whole_gradients = _run(case.model, rows, None)
    except Exception:
        return ""
    for sizes in pieces:
        try:
            runs = [case.model(*part) for part in _split(rows, sizes, case.dim)]
            dims: list[Any] = [_grown(whole, [run[i] for run in runs]) for i, whole in enumerate(wholes)]
            if None in dims:
                return "an output has no rows"
            weights = [_weights(whole) for whole in wholes]
            parts = [
                _run(
                    case.model,
                    part,
                    [w.split([r[i].shape[dims[i]] for r in runs], dims[i])[k] for i, w in enumerate(weights)],
                )
                for k, part in enumerate(_split(rows, sizes, case.dim))
            ]
        except Exception as error:
            return f"a piece fails: {type(error).__name__}"
        rounding = _added_rounding(wholes)
        for i, whole in enumerate(wholes):
            if not _close(torch.cat([outputs[i] for outputs, _ in parts], dims[i]), whole):
                return "outputs differ"
        for name, gradient in whole_gradients.items():
            found = [gradients[name] for _, gradients in parts]
            together = torch.cat(found, case.dim) if isinstance(name, int) else torch.stack(found).sum(0)
            if not _close(together, gradient, 0.0 if isinstance(name, int) else rounding):
                return "gradients differ"
    return ""


def _run(
    model: Around, rows: Sequence[Tensor], weights: Sequence[Tensor] | None
) -> tuple[tuple[Tensor, ...], dict[Any, Tensor]]:
    """Return the outputs, and the gradients by parameter's name or input's number."""
    leaves = [t.detach().clone().requires_grad_(t.is_floating_point()) for t in rows]
    outputs = model(*leaves)
    wanted = {i: leaf for i, leaf in enumerate(leaves) if leaf.requires_grad} | dict(model.named_parameters())
    weights = [_weights(t) for t in outputs] if weights is None else weights
    pairs = [(t, w) for t, w in zip(outputs, weights, strict=True) if t.requires_grad]
    if not pairs:
        return outputs, {}
    found = torch.autograd.grad(
        [t for t, _ in pairs],
        list(wanted.values()),
        [w.to(t) for t, w in pairs],
        allow_unused=True,
        materialize_grads=True,
    )
    return tuple(t.detach() for t in outputs), dict(zip(wanted, (g.to_dense() for g in found), strict=True))


def _weights(tensor: Tensor) -> Tensor:
    return torch.arange(tensor.numel(), dtype=torch.float64).mul(0.7).sin().reshape(tensor.shape)


def _split(rows: Sequence[Tensor], sizes: tuple[int, ...], dim: int) -> list[tuple[Tensor, ...]]:
    return list(zip(*(t.split(sizes, dim) for t in rows), strict=True))


def _grown(whole: Tensor, parts: Sequence[Tensor]) -> int | None:
    """Return the dimension along which the parts make up the whole; None where there is none."""
    for dim, size in enumerate(whole.shape):
        others = [part.shape[:dim] + part.shape[dim + 1 :] for part in parts]
        fit = all(other == whole.shape[:dim] + whole.shape[dim + 1 :] for other in others)
        if fit and sum(part.shape[dim] for part in parts) == size:
            return dim
    return None


def _added_rounding(outputs: Sequence[Tensor]) -> float:
    """Return what a sum over all values of the outputs may be off by in the coarsest of their dtypes."""
    finite = [t[t.isfinite()] for t in outputs if t.dtype in _ROUNDING]
    return max((_ROUNDING[t.dtype] for t in finite), default=0.0) * sum(float(t.double().abs().sum()) for t in finite)


def _close(a: Tensor, b: Tensor, rounding: float = 0.0) -> bool:
    if not (a.is_floating_point() or a.is_complex()):
        return torch.equal(a, b)
    return torch.allclose(a, b, rtol=_TOLERANCE, atol=_TOLERANCE * (1 + _largest(b)) + rounding, equal_nan=True)


def _largest(tensor: Tensor) -> float:
    finite = tensor[tensor.isfinite()].abs()
    return float(finite.max()) if finite.numel() else 0.0


def summary(found: Sequence[Judged]) -> dict[str, Any]:
    """Return the figures of a run."""
    ran = Counter(one.verdict.ran for one in found)
    listed = {
        "micro_but_mixes": [o for o in found if o.verdict.ran == "micro" and not o.verdict.apart],
        "full_but_apart": [o for o in found if o.verdict.ran == "full" and o.verdict.apart],
        "raw_errors": [o for o in found if o.verdict.ran == "refused" and o.verdict.why],
        "crashed": [o for o in found if o.verdict.ran == "crashed"],
        "crashed_in_torch": [o for o in found if o.verdict.ran == "crashed_in_torch"],
    }
    texts = {key: sorted(f"{o.case} {o.verdict.why}".strip() for o in ones) for key, ones in listed.items()}
    return {
        "torch": torch.__version__,
        "operators": len({one.operator for one in found}),
        "cases": sum(count for kind, count in ran.items() if kind not in ("none", "crashed", "crashed_in_torch")),
        **{kind: ran[kind] for kind in ("micro", "full", "shared", "random", "refused")},
        **{key: len(ones) for key, ones in texts.items()},
        "listed": texts,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the fuzz; return 1 where rows are mixed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--per-operator", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", default=())
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    chosen = [operator for operator in operators() if not options.only or operator.name in options.only]
    judged_all = [
        one for operator in chosen for one in judged_apart(operator, count=options.per_operator, seed=options.seed)
    ]
    found = {"per_operator": options.per_operator, "seed": options.seed, **summary(judged_all)}
    print(json.dumps({key: value for key, value in found.items() if key != "listed"}, indent=2))
    if options.out is not None:
        options.out.write_text(json.dumps(found, indent=1) + "\n")
    return int(bool(found["micro_but_mixes"]))


if __name__ == "__main__":
    raise SystemExit(main())
