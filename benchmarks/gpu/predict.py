"""Predictions that can be checked here: written down first, then held against the steps.

    stages as streams on one card     stages measured alone, one after the other on the device they share, or as long as
                                      the host takes to issue them
    the CPU and the card              stages and copies measured alone, a lane each

The file of results holds the predictions, with the time, before the first step is measured; it then holds both.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from autosplit import PipelinedModule
from benchmarks import pairs
from benchmarks.gpu.part import Found, Setting, Spread, at_most
from benchmarks.gpu.step import cut_pipe
from benchmarks.gpu.subjects import Made, Subject, even, mlp, steps

ASKED = 0.05
"""The issue asks for predictions that are written down, and for no number; this one is ours."""
CHUNKS = 8


def run(setting: Setting) -> Found:
    """Run the part."""
    repeats = 2 if setting.small else 15
    found = Found(settings={"repeats": repeats, "chunks": CHUNKS, "asked": ASKED})
    cases = {}
    for name, made, devices, balance in _cases(setting):
        with found.going_on(name):
            cases[name] = _predicted(name, made, devices, balance, setting)
    predictions = [figure for figure, _, _ in cases.values()]
    found.settings["predictions_written"] = setting.write_down({"predictions": predictions})
    found.settings["predictions"] = predictions
    for name, (figure, made, pipe) in cases.items():
        with found.going_on(name):
            readings = [pairs.read(setting.waited(partial(made.step, pipe))) for _ in range(repeats + 2)][2:]
            measured = Spread.of([reading.wall_s for reading in readings])
            error = figure["predicted_s"] / measured.median - 1
            found.figures.append({**figure, "measured_s": measured, "error": error})
            found.checks.append(at_most(f"{name}: predicted against measured step", ASKED, abs(error)))
    return found


def _predicted(
    name: str, made: Made, devices: Sequence[torch.device], balance: Sequence[int], setting: Setting
) -> tuple[dict[str, Any], Made, PipelinedModule]:
    """Return a prediction, and what it is of."""
    pipe = cut_pipe(made, devices, balance)
    with made.precision():
        given: dict[str, Any] = {"target": made.target, "loss_fn": made.subject.loss}
        alone = pipe.profile_stages(made.batch, **given, repeats=1 if setting.small else 5)
    shared = setting.cuda and len(set(devices)) == 1
    step = alone.on_one_device() if shared else alone.step()
    figure = {
        "what": name,
        "predicted_s": step.step_s + alone.once_s,
        "actions_s": step.step_s,
        "once_s": alone.once_s,
        "host_s": step.host_s,
        "cells_s": list(alone.cell_s),
    }
    return figure, made, pipe


def _cases(setting: Setting) -> list[tuple[str, Made, Sequence[torch.device], list[int]]]:
    """Return what is predicted: a name, the model, the stages' devices, and how many parts each stage has."""
    cpu, device = torch.device("cpu"), setting.device
    found = []
    for subject in steps(small=setting.small).values():
        for stages in (2,) if setting.small else (2, 4):
            made = subject.make(device, chunks=CHUNKS)
            name = f"{subject.name}: {stages} stages on {'one card' if setting.cuda else 'threads of the CPU'}"
            found.append((name, made, [device] * stages, even(len(made.model.parts), stages)))
    made = _beside(setting).make(cpu, chunks=CHUNKS)
    name = f"{made.subject.name}: the CPU and {'the card' if setting.cuda else 'the CPU'}"
    return [*found, (name, made, [cpu, device], [1, len(made.model.parts) - 1])]


def _beside(setting: Setting) -> Subject:
    """Return a model whose first layer is a CPU's work."""
    size = {"layers": 3, "width": 8, "rows": 2} if setting.small else {"layers": 65, "width": 2048, "rows": 256}
    shape = f"{size['layers']} x (linear {size['width']}, ReLU), {size['rows']} rows per microbatch"
    return mlp("mlp", shape, **size)
