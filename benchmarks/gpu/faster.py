"""Stages made faster, against the same stages as they are: CUDA graphs on small kernels, torch.compile on GPT-2.

Both pipes have the same cut, four stages on the one card, and take turns; gradients are held against the plain loop's
first. The first steps, in which code is compiled and graphs are captured, are not read.
"""

from __future__ import annotations

import warnings
from functools import partial

from autosplit.errors import AutosplitError
from benchmarks.gpu import step
from benchmarks.gpu.part import Found, Setting, at_least, beside
from benchmarks.gpu.subjects import Subject, even, kernels, steps

GRAPHS_ASKED, COMPILE_ASKED = 1.3, 1.15
STAGES, CHUNKS = 4, 8
WARM_UPS = 4


def run(setting: Setting) -> Found:
    """Run the part."""
    found = Found(settings={"stages": STAGES, "chunks": CHUNKS, "warm_ups": WARM_UPS})
    for subject in kernels(small=setting.small).values():
        with found.going_on(f"{subject.name}, graphs"):
            _faster(subject, "graphs", GRAPHS_ASKED, setting, found)
        setting.empty()
    if setting.small:
        found.missing.append("compile=True: a small run does not compile, which takes a minute")
    else:
        with found.going_on("gpt2, compile"):
            _faster(steps(small=False)["gpt2"], "compile", COMPILE_ASKED, setting, found)
    return found


def _faster(subject: Subject, option: str, asked: float, setting: Setting, found: Found) -> None:
    """One option against stages without it."""
    repeats, calls = (2, 1) if setting.small else (15, 5)
    made = subject.make(setting.device, chunks=CHUNKS)
    made.loop()
    expected = made.gradients()
    balance = even(len(made.model.parts), STAGES)
    devices = [setting.device] * STAGES
    eager = partial(made.step, step.cut_pipe(made, devices, balance))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pipe = step.cut_pipe(made, devices, balance, **{option: True})
            quick = partial(made.step, pipe)
            for _ in range(WARM_UPS):
                quick()
            step.same(made, quick, expected, f"{subject.name}, {option}=True")
    except AutosplitError as error:
        found.missing.append(f"{subject.name}: {option}=True: {error}")
        return
    lines = [line for line in pipe.report().splitlines() if line.startswith(("not compiled", "graphs: "))]
    notes = [line for line in lines if "not compiled" in line or "no graphs" in line or "not all" in line]
    found.missing += [f"{subject.name}: {option}=True: {line}" for line in notes]
    readings = beside(eager, quick, setting=setting, repeats=repeats, calls=calls)
    times = step.note(found, f"{subject.name}: eager stages over {option}=True", readings, calls)
    name = f"{subject.name}: {option}=True: times as fast as eager stages"
    found.checks.append(at_least(name, asked, times.median))
