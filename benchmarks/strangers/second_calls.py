"""Transformers whose second call asks for more, at another batch size and length: equal, and the state a copy's.

    python -m benchmarks.strangers.second_calls [--json FILE] [--only REGEX] [--seed N]

The first call is the default one with a backward; the second asks for hidden states, the third for attentions, router
logits and the other setting of the cache, both at other sizes; the fourth is the first again, without gradients. Then
the model itself, back from ``unsplit()``, is asked for its hidden states.
"""

from __future__ import annotations

import re
import sys
import time
import warnings
from typing import Any

import torch
from torch import nn

from autosplit import AutosplitError, autosplit
from benchmarks.strangers.compare import TOLERANCE, Result, described, limited, reading
from benchmarks.strangers.families import ATTENTION, CACHE, FAMILIES, HIDDEN, ROUTER, Family
from benchmarks.strangers.freeze import differences, first_tensor, freeze, module_state
from benchmarks.strangers.run import exit_code, line, options, table, write

SIZES = ((6, 7), (4, 9), (5, 6), (6, 7))


def calls(family: Family) -> list[dict[str, Any]]:
    """Return the keyword arguments of each call."""
    third = {name: True for name in (ATTENTION, ROUTER) if name in family.switches}
    if CACHE in family.switches:
        third[CACHE] = not family.config.get(CACHE, True)
    return [{}, {HIDDEN: True}, third, {}]


def run(family: Family, model: nn.Module, runner: Any, seed: int, seen: list[tuple[str, Any]]) -> list[Any]:
    """Make the calls, write down what they return and leave, and return how the first of them ran."""
    readings: list[Any] = []
    for index, ((rows, length), asked) in enumerate(zip(SIZES, calls(family), strict=True)):
        torch.manual_seed(seed + index)
        batch = family.batch(rows, length)
        with torch.set_grad_enabled(index != 3):
            output = runner(**batch, **asked)
        label = f"call {index}"
        seen.append((f"{label}: output", freeze(output)))
        if index == 0:
            first_tensor(output).square().mean().backward()
        seen.append((f"{label}: modules", module_state(model)))
        readings += [reading(runner)] if runner is not model else []
    return readings


def run_family(name: str, family: Family, seed: int) -> Result:
    """Compare one family."""
    plain, model = family.build().double().train(), family.build().double().train()
    expected: list[tuple[str, Any]] = []
    found: list[tuple[str, Any]] = []
    run(family, plain, plain, seed, expected)
    answer, chunks, share, outcome, error, after = "refused", 0, 0.0, "equal", "", []
    started = time.process_time()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            with limited(600):
                pipe: Any = autosplit(model, devices=2, chunks=3)
                answer, chunks, share = run(family, model, pipe, seed, found)[0]
                after = [("unsplit: output", freeze(pipe.unsplit()(**family.batch(3, 5), **{HIDDEN: True})))]
        except Exception as caused:
            outcome = "refused" if isinstance(caused, AutosplitError) else "raw error"
            error = described(caused)
    cpu_s = round(time.process_time() - started, 2)
    off = next(differences(expected[: len(found)], found, TOLERANCE), "")
    if not off and after:
        torch.manual_seed(seed + 3)
        family.batch(*SIZES[3])
        expected = [("unsplit: output", freeze(plain(**family.batch(3, 5), **{HIDDEN: True})))]
        off = next(differences(expected, after, TOLERANCE), "")
    outcome = "wrong" if off else outcome
    notes = tuple(dict.fromkeys(str(warning.message)[:200] for warning in caught))
    figures = {"answer": answer, "chunks": chunks, "share": share, "cpu_s": cpu_s, "notes": notes}
    return Result(name=name, kind="second call", setup="default", outcome=outcome, off=off, error=error, **figures)


def main() -> int:
    chosen = options(__doc__ or "").parse_args()
    torch.set_num_threads(1)
    results: list[Result] = []
    for name, family in FAMILIES.items():
        if re.search(chosen.only, name):
            results.append(run_family(name, family, chosen.seed))
            print(line(results[-1]), flush=True)
            if chosen.json is not None:
                write(chosen.json, results)
    print(table(results))
    return exit_code(results)


if __name__ == "__main__":
    sys.exit(main())
