"""Stages made by torch.compile, against the same stages as they are: on small kernels, and on GPT-2.

Both pipes have the same cut, four stages on the one card, and take turns; gradients are held against the plain loop's
first. The first steps, in which code is compiled, are not read. A small run compiles without a compiler of kernels.
"""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

from autosplit.errors import AutosplitError
from benchmarks.gpu import step
from benchmarks.gpu.part import Found, Setting, at_least, beside
from benchmarks.gpu.subjects import Subject, even, kernels, steps

ASKED = 1.15
STAGES, CHUNKS = 4, 8
WARM_UPS = 4


def run(setting: Setting) -> Found:
    """Run the part."""
    found = Found(settings={"stages": STAGES, "chunks": CHUNKS, "warm_ups": WARM_UPS})
    for subject in (*kernels(small=setting.small).values(), steps(small=setting.small)["gpt2"]):
        with found.going_on(f"{subject.name}, compile"):
            _faster(subject, setting, found)
        setting.empty()
    return found


def _faster(subject: Subject, setting: Setting, found: Found) -> None:
    """Compiled stages against stages as they are."""
    repeats, calls = (2, 1) if setting.small else (15, 5)
    asked: Any = {"backend": "eager"} if setting.small else True
    made = subject.make(setting.device, chunks=CHUNKS)
    made.loop()
    expected = made.gradients()
    balance = even(len(made.model.parts), STAGES)
    devices = [setting.device] * STAGES
    eager = partial(made.step, step.cut_pipe(made, devices, balance))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pipe = step.cut_pipe(made, devices, balance, compile=asked)
            quick = partial(made.step, pipe)
            for _ in range(WARM_UPS):
                quick()
            step.same(made, quick, expected, f"{subject.name}, compile={asked}")
    except AutosplitError as error:
        found.missing.append(f"{subject.name}: compile={asked}: {error}")
        return
    lines = [line for line in pipe.report().splitlines() if line.startswith("not compiled")]
    found.missing += [f"{subject.name}: compile={asked}: {line}" for line in lines]
    readings = beside(eager, quick, setting=setting, repeats=repeats, calls=calls)
    times = step.note(found, f"{subject.name}: eager stages over compile={asked}", readings, calls)
    name = f"{subject.name}: compile={asked}: times as fast as eager stages"
    found.checks.append(at_least(name, ASKED, times.median))
