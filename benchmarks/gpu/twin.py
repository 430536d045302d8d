"""The digital twin: N devices, simulated from stages that were measured alone on one.

For 2, 4 and 8 stages every stage of three cuts runs alone on the card: ours, torchgpipe's ``balance_by_time`` (its own
block partition, on times of the layers measured on the same card), and equal numbers of layers. The cuts take turns,
and a stage that two cuts share has one time. The simulator puts the stages together: 1F1B, four microbatches per stage,
links as the data sheet of the card says. No figure here is of a step that ran: all are simulated, and say so.

    gain     the step of torchgpipe's cut over ours, and the better of all other cuts' that there are
    share    how many times as fast as all stages one after the other, over the bound of the bubble, M N / (M + N - 1)
"""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

import cost_models
from autosplit import PipelinedModule
from autosplit.devices import clock_of
from autosplit.errors import AutosplitError
from autosplit.planning.plan.plan import Plan
from autosplit.planning.timeline import StagesAlone
from autosplit.schedule.action import Kind
from benchmarks import pairs
from benchmarks.gpu.part import Found, Part, Setting, at_least, at_most
from benchmarks.gpu.subjects import Made, Subject, even, published

SHARE_ASKED, WORSE_ASKED = 0.95, 1.0
MICROBATCHES_PER_STAGE = 4
OURS, PEER, EQUAL = "ours", "torchgpipe's balance_by_time", "equal layers"


def run_for(name: str) -> Part:
    """Return the part of one model."""
    return lambda setting: run(setting, name)


def run(setting: Setting, name: str) -> Found:
    """Run the part of one model."""
    subject = published(small=setting.small)[name]
    repeats, counts = (1, (2,)) if setting.small else (3, (2, 4, 8))
    found = Found(settings={"model": subject.shape, "repeats": repeats, "schedule": "1f1b", "simulated": True})
    layers: list[float] = []
    with found.going_on(f"{name}, layers alone"):
        layers = layer_times(subject.make(setting.device, chunks=1), repeats=repeats)
        found.figures.append({"what": "layers alone", "layers": len(layers), "sum_s": sum(layers), "each_s": layers})
    gains: dict[str, list[float]] = {}
    for stages in counts if layers else ():
        with found.going_on(f"{name}, {stages} stages"):
            own = _compare(subject, stages, layers, setting, found, repeats=repeats)
            for what, gain in own.items():
                gains.setdefault(what, []).append(gain)
        setting.empty()
    if gains:
        found.settings["mean_gain"] = {what: statistics.fmean(own) for what, own in gains.items()}
    return found


def _compare(
    subject: Subject, stages: int, layers: Sequence[float], setting: Setting, found: Found, *, repeats: int
) -> dict[str, float]:
    """Simulate every cut into so many stages, add figures and checks, and return our gain over what they name."""
    chunks = MICROBATCHES_PER_STAGE * stages
    made = subject.make(setting.device, chunks=chunks)
    alone = measured(made, stages, layers, setting, found, repeats=repeats)
    figures = {cut: _figure(cut, own, chunks, setting) for cut, own in alone.items()}
    found.figures += figures.values()
    ours = figures.pop(OURS, None)
    if ours is None:
        return {}
    name = f"{subject.name}, {stages} stages, simulated"
    found.checks.append(at_least(f"{name}: speed-up as a share of the bubble bound", SHARE_ASKED, ours["share"]))
    held: dict[str, float] = {cut: own["step_s"] for cut, own in figures.items()}
    if PEER not in held:
        found.missing.append(f"{name}: our step over that of {PEER}")
    against = {cut: seconds for cut, seconds in held.items() if cut == PEER}
    if held:
        against[f"the better of {' and '.join(sorted(held))}"] = min(held.values())
    for cut, seconds in against.items():
        found.checks.append(at_most(f"{name}: our step over that of {cut}", WORSE_ASKED, ours["step_s"] / seconds))
    return {cut: seconds / ours["step_s"] for cut, seconds in against.items()}


def measured(
    made: Made, stages: int, layers: Sequence[float], setting: Setting, found: Found, *, repeats: int
) -> Mapping[str, StagesAlone]:
    """Return every cut's stages, each run alone; a cut that cannot be made is said."""
    devices = [setting.device] * stages
    plan = made.pipe(devices, schedule="1f1b").plan
    assert plan is not None
    cuts: dict[str, Plan | None] = {OURS: plan, EQUAL: made.cut(plan, even(len(layers), stages)), PEER: None}
    if (balance := balance_by_time(layers, stages)) is None:
        found.missing.append(f"{stages} stages: {PEER}: torchgpipe is not installed")
    else:
        cuts[PEER] = made.cut(plan, balance)
    pipes: dict[str, PipelinedModule] = {}
    for name, cut in cuts.items():
        if cut is not None:
            try:
                pipes[name] = made.pipe(devices, plan=cut)
            except AutosplitError as error:
                found.missing.append(f"{stages} stages: {name}: {type(error).__name__}: {error}")
    readings: dict[str, list[StagesAlone]] = {name: [] for name in pipes}
    for turn in range(repeats):
        for name in pairs.rotated(list(pipes), turn):
            with made.precision():
                given: dict[str, Any] = {"target": made.target, "loss_fn": made.subject.loss}
                readings[name].append(pipes[name].profile_stages(made.batch, **given, repeats=1))
    return pooled(readings, {name: [stage.nodes for stage in pipe.plan.stages] for name, pipe in pipes.items()})


def pooled(readings: Mapping[str, Sequence[StagesAlone]], nodes: Mapping[str, Sequence[Any]]) -> dict[str, StagesAlone]:
    """Return each cut's stages with the medians of all readings; a stage that two cuts have has one time in both."""
    times: dict[Any, list[float]] = defaultdict(list)
    for name, found in readings.items():
        for alone in found:
            for what, kinds in (("device", alone.seconds), ("host", alone.issue_s)):
                for kind, own in kinds.items():
                    for stage, seconds in enumerate(own):
                        times[what, kind, nodes[name][stage]].append(seconds)

    def medians(name: str, what: str, kinds: Mapping[Kind, Sequence[float]]) -> dict[Kind, tuple[float, ...]]:
        return {kind: tuple(statistics.median(times[what, kind, own]) for own in nodes[name]) for kind in kinds}

    return {
        name: replace(
            found[-1],
            seconds=medians(name, "device", found[-1].seconds),
            issue_s=medians(name, "host", found[-1].issue_s),
        )
        for name, found in readings.items()
    }


def balance_by_time(layers: Sequence[float], stages: int) -> list[int] | None:
    """Return torchgpipe's own balance of so many layers; None where it is not installed."""
    if pairs.torchgpipe() is None:
        return None
    from torchgpipe.balance import blockpartition

    # Its times are whole microseconds at least; it works on any positive numbers.
    blocks = blockpartition.solve([max(1, round(seconds * 1e9)) for seconds in layers], stages)
    return [len(block) for block in blocks]


def layer_times(made: Made, *, repeats: int) -> list[float]:
    """Return seconds of forward and backward of each layer by itself, as ``balance_by_time`` measures them."""
    clock = clock_of(made.device, threads=1)
    state: tuple[torch.Tensor, ...] = (made.batch,)
    times = []
    for part in made.model.parts:
        readings = []
        for turn in range(repeats + 1):
            taken = [value.detach().requires_grad_(value.is_floating_point()) for value in state]
            with made.precision():
                forward = clock.timed(lambda part=part, taken=taken: part(*taken))
            results = forward.result if isinstance(forward.result, tuple) else (forward.result,)
            wanted = [value for value in results if value.requires_grad]
            ones = [torch.ones_like(value) for value in wanted]
            back = clock.timed(lambda wanted=wanted, ones=ones: torch.autograd.backward(wanted, ones))
            if turn:
                readings.append(forward.seconds + back.seconds)
        times.append(statistics.median(readings))
        state = tuple(value.detach() for value in results)
    made.forget()
    return times


def _figure(cut: str, alone: StagesAlone, chunks: int, setting: Setting) -> dict[str, Any]:
    """Return what a cut comes to on as many devices as it has stages."""
    stages = len(alone.cell_s)
    machine = cost_models.machine(f"{stages}x{setting.spec.name}")
    step = alone.step(link=machine.transfer_s)
    free = alone.step(link=machine.transfer_s, issued=False)
    bound = chunks * stages / (chunks + stages - 1)
    return {
        "what": f"simulated, {stages} stages, {chunks} microbatches: {cut}",
        "step_s": step.step_s,
        "step_with_a_host_each_s": free.step_s,
        "speed_up": alone.serial_s / step.step_s,
        "bound": bound,
        "share": alone.serial_s / step.step_s / bound,
        "host_s": step.host_s,
        "cells_s": list(alone.cell_s),
        "grown_bytes": list(alone.grown_bytes),
        "sent_bytes": list(itertools.chain(*((s.forward_bytes, s.backward_bytes) for s in alone.sent))),
    }
