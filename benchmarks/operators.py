"""Does a stage run the plain model's operators? ``python -m benchmarks.operators [--group GROUP] [--only NAME]``.

    plain     the model's forward on one microbatch, times their number       operators and arguments, counted
    pipe      one forward of the batch, equal microbatches, inline lanes      the same
    extra     what the pipe runs more of: nothing but HANDLING, or on the whole batch what plain runs per microbatch
    missing   what the pipe runs less of: at most what a pipe runs once per step instead of once per microbatch

Arguments are compared with the sizes of tensors and the numbers among them, so that equal counts mean the same kernels
on the same shapes. An operator that runs once per step on the whole batch is compared without sizes.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from autosplit import Sample, autosplit
from autosplit.trace.inputs.inputs import flatten

MICROBATCHES = 3
HANDLING = frozenset(
    # cuts a batch into microbatches, hands values from cell to cell and merges them
    "detach alias view slice split split_with_sizes narrow cat clone _to_copy unbind "
    # takes a loss apart: values per row in the stages, their sum over the batch once per step
    "ne sum squeeze stack select div mean".split()
)
"""What a pipe runs beside the model's own operators."""
READS = frozenset("_local_scalar_dense is_nonzero equal item lift_fresh".split())
"""What reads a value, as a guard does once per call, or makes a constant, which a recording holds."""
ONCE = frozenset("ones zeros full empty new_ones new_zeros new_full new_empty".split())
"""What makes a constant: once per step, not once per microbatch, and ``x.new_ones`` is recorded as ``ones``."""
Counts = Counter[tuple[str, str]]


class Operators(TorchDispatchMode):
    """Counts the operators that run, each with its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counts = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.counts[str(func), repr(_argument((args, sorted(kwargs.items()))))] += 1
        return func(*args, **kwargs)


@dataclass(frozen=True)
class Difference:
    """What a pipe runs that the plain model does not, and what it does not run, by operator."""

    extra: dict[str, int]
    missing: dict[str, int]

    @property
    def equal(self) -> bool:
        """Whether the pipe runs the plain model's operators."""
        return not self.extra and not self.missing


def repeated(model: nn.Module, sample: Sample, *, batch_dims: Any = None) -> Sample:
    """Return a batch of MICROBATCHES times a sample's rows: what values decide is then the same in each microbatch."""
    flat = flatten(model, sample, batch_dims)
    pairs = zip(flat.leaves, flat.batch_dims, strict=True)
    args, kwargs = flat.rebuild([leaf if dim is None else torch.cat([leaf] * MICROBATCHES, dim) for leaf, dim in pairs])
    return Sample(*args, **kwargs)


def compared(model: nn.Module, pipe: nn.Module, sample: Sample, batch: Sample) -> Difference:
    """Run the plain model on one microbatch and the pipe on the whole batch; return how they differ.

    The pipe was called with the batch before, and has inline lanes.
    """
    plain, piped = Operators(), Operators()
    with plain:
        model(*sample.args, **sample.kwargs)
    with piped:
        pipe(*batch.args, **batch.kwargs)
    return difference(Counter({key: MICROBATCHES * count for key, count in plain.counts.items()}), piped.counts)


def difference(plain: Counts, piped: Counts) -> Difference:
    """Return how the operators of a pipe differ from those of plain runs on each microbatch."""
    extra, missing = piped - plain, plain - piped
    left = _without_sizes(missing)
    for key in list(extra):
        like = (key[0], _bare(key[1]))
        if left[like] >= MICROBATCHES * extra[key]:  # on the whole batch at once
            left[like] -= MICROBATCHES * extra[key]
            del extra[key]
    left -= _without_sizes({key: n for key, n in missing.items() if MICROBATCHES * piped[key] >= plain[key]})  # shared
    more: Counter[str] = Counter()
    for (name, _), count in extra.items():
        if _base(name) not in HANDLING | ONCE:
            more[name] += count
    less: Counter[str] = Counter()
    for (name, _), count in (+left).items():
        if _base(name) not in HANDLING | READS | ONCE:
            less[name] += count
    return Difference(dict(more), dict(less))


def _base(name: str) -> str:
    return name.partition("aten.")[2].partition(".")[0]


def _without_sizes(counts: Any) -> Counts:
    found: Counts = Counter()
    for (name, arguments), count in counts.items():
        found[name, _bare(arguments)] += count
    return found


def _bare(arguments: str) -> str:
    return "".join(char for char in arguments if not char.isdigit())


def _argument(value: Any) -> Any:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, (list, tuple)):
        return [_argument(part) for part in value]
    return value if isinstance(value, (int, float, bool, str, type(None))) else str(value)


def measure(case: Any) -> dict[str, Any]:
    """Return what the table has to say about one case of the zoo."""
    from benchmarks.zoo.case import Shape

    torch.manual_seed(0)
    training = "train" in case.checks
    model = case.build().train(training)
    given = case.inputs(Shape(rows=2))
    sample = Sample(*given.args, **given.kwargs)
    batch = repeated(model, sample, batch_dims=case.batch_dims)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pipe = autosplit(
            model,
            devices=case.devices,
            chunks=MICROBATCHES,
            sample=batch,
            batch_dims=case.batch_dims,
            lanes="inline",
            schedule="gpipe",
            recompute="never",
        )
        pipe(*batch.args, **batch.kwargs)
        found = compared(model, pipe, sample, batch)
    plan = pipe.plan
    assert plan is not None
    return {
        "name": case.name,
        "group": case.group,
        "rung": plan.rung,
        "microbatches": len(plan.microbatch_rows),
        "extra": found.extra,
        "missing": found.missing,
        "answer": True,
        "checks": {},
    }


def main() -> None:
    """Compare the zoo's models that were asked for, and print a line for each."""
    from benchmarks.zoo.catalog import GROUPS, cases
    from benchmarks.zoo.runner import Limits, run_all

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], metavar="NAME")
    parser.add_argument("--group", action="append", default=[], choices=GROUPS)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=180.0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    chosen = [case for case in cases(tuple(options.group)) if not options.only or case.name in options.only]
    results = []
    for result in run_all(chosen, jobs=options.jobs, limits=Limits(options.seconds), measure=measure):
        results.append(result)
        print(f"{verdict(result):12} {result['group']}/{result['name']} {_text(result)}", flush=True)
        if options.json:
            options.json.write_text(json.dumps(results, indent=1))
    counts = Counter(map(verdict, results))
    print(", ".join(f"{count} {text}" for text, count in counts.most_common()))


def verdict(result: dict[str, Any]) -> str:
    """Return a result in a word."""
    if not result["answer"]:
        return "no answer"
    if result["rung"] != "recorded":
        return "own Python"
    return "differs" if result["extra"] or result["missing"] else "equal"


def _text(result: dict[str, Any]) -> str:
    if not result["answer"]:
        return str(result["error"]["text"])[:200]
    parts = [f"{kind}: {result[kind]}" for kind in ("extra", "missing") if result[kind]]
    return "; ".join(parts) if result["rung"] == "recorded" else ""


if __name__ == "__main__":
    main()
