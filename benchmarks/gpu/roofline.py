"""Time per stage by the calibrated roofline: each family predicted by curves that never saw it.

The curves are fitted to the calibration's small modules and to the operations of all families but the one that is
predicted; its stages, four per family, run alone and their time is read from the device's events. Nothing of a family
is in what predicts it, so a figure here is what a user's own model may expect.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial

import torch
from torch import Tensor

from autosplit.profile.calibrate import Timing, cases_for, fitted, time_cases
from autosplit.profile.calibration_cases import Case, Program
from autosplit.profile.clocks import clock_of
from benchmarks.families import Family, families
from benchmarks.gpu.memory import small_family
from benchmarks.gpu.part import Found, Setting, at_most
from benchmarks.time import Line, measured, stages_of, works_of

MEDIAN_ASKED, WORST_ASKED = 0.08, 0.20
_ROUNDS, _ROUNDS_SMALL = 9, 1
_SMALL_CASES = 4


def run(setting: Setting) -> Found:
    """Run the part."""
    rounds = _ROUNDS_SMALL if setting.small else _ROUNDS
    found = Found(settings={"rounds": rounds, "left out": "the family that is predicted"})
    chosen = list(families().values())
    micro = list(cases_for(setting.device))
    if setting.small:
        one = small_family()
        chosen, micro = [one, replace(one, name="another")], [case for case in micro if case.quick][:_SMALL_CASES]
    timed = partial(time_cases, place=setting.device, quick=setting.small)
    small = timed(micro)
    lines: list[Line] = []
    for precision in ("fp32",) if setting.small else ("fp32", "bf16"):
        with found.going_on(precision):
            lines += _lines(chosen, small, timed, precision, setting, found, rounds=rounds)
        setting.empty()
    if not lines:
        return found
    errors = [abs(line.error) for line in lines]
    found.checks += [
        at_most("time per stage, leave one family out: median error", MEDIAN_ASKED, statistics.median(errors)),
        at_most("time per stage, leave one family out: worst error", WORST_ASKED, max(errors)),
    ]
    return found


def _lines(
    chosen: Sequence[Family],
    small: Sequence[Timing],
    timed: Callable[[Sequence[Case]], list[Timing]],
    precision: str,
    setting: Setting,
    found: Found,
    *,
    rounds: int,
) -> list[Line]:
    """Return predicted beside measured for all stages of all families in one precision; one that fails is left out."""
    stages, works, own = {}, {}, {}
    for family in chosen:
        with found.going_on(f"{family.name}, {precision}"):
            cut = stages_of(family, precision=precision, place=setting.device)
            works[family.name] = [works_of(stage) for stage in cut]
            own[family.name] = timed([case_of(family)])[precision == "bf16" :][:1]
            stages[family.name] = cut
    alone = [stage for cut in stages.values() for stage in cut]
    clock = clock_of(setting.device, threads=1)
    times = dict(zip(map(id, alone), measured(alone, rounds=rounds, clock=clock), strict=True))
    lines = []
    for name, cut in stages.items():
        with found.going_on(f"{name}, {precision}, predicted"):
            model = fitted([*small, *others(own, name)], device=setting.spec)
            for stage, work in zip(cut, works[name], strict=True):
                line = Line(name, precision, stage.number, sum(map(model.seconds, work)), times[id(stage)])
                found.figures.append({**asdict(line), "error": line.error})
                lines.append(line)
    return lines


def others(timings: Mapping[str, Sequence[Timing]], left_out: str) -> list[Timing]:
    """Return what was timed of all families but one."""
    return [timing for name, own in timings.items() if name != left_out for timing in own]


def case_of(family: Family) -> Case:
    """Return a family's training forward as a case to time, by the operation."""

    def build() -> tuple[Program, Sequence[Tensor]]:
        torch.manual_seed(0)
        model, target, inputs = family.make(), family.target(family.rows), family.batch(family.rows)

        def run() -> Tensor:
            return family.loss(model(*inputs), target)

        return run, _used(run, list(model.parameters()))

    return Case(f"family {family.name}", build, low=True)


def _used(run: Callable[[], Tensor], parameters: Sequence[Tensor]) -> list[Tensor]:
    """Return the parameters that a loss depends on: an expert may get nothing."""
    gradients = torch.autograd.grad(run(), parameters, allow_unused=True)
    return [tensor for tensor, gradient in zip(parameters, gradients, strict=True) if gradient is not None]
