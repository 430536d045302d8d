"""Whole training steps on one card: one stage beside the plain model, four stages beside a plain loop and torchgpipe.

Every contender has the same model, weights and batch of 8 microbatches, and where it cuts the same cut; its gradients
are held against the plain loop's before it is timed. Ours and its reference take turns, and a reading waits for the
device. torchgpipe recomputes nothing.
`torch.distributed.pipelining` needs a card for each process and is measured by `benchmarks.distributed`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from autosplit import PipelinedModule
from benchmarks import pairs
from benchmarks.gpu.part import Found, Setting, Spread, at_most, beside, differ, ratios
from benchmarks.gpu.subjects import Made, Subject, even, steps

ALONE_ASKED, LOOP_ASKED, PEER_ASKED = 1.01, 1.03, 0.9
STAGES, CHUNKS = 4, 8
TOLERANCE, TOLERANCE_ROUNDED = 1e-4, 0.1
"""By which share of the largest entry gradients may differ: in fp32, and where convolutions or autocast round more."""


def run(setting: Setting) -> Found:
    """Run the part."""
    repeats, calls = (2, 1) if setting.small else (15, 3)
    found = Found(settings={"repeats": repeats, "calls": calls, "stages": STAGES, "chunks": CHUNKS})
    for subject in steps(small=setting.small).values():
        for measure in (_alone, _four):
            with found.going_on(subject.name):
                measure(subject, setting, found, repeats=repeats, calls=calls)
            setting.empty()
    return found


def _alone(subject: Subject, setting: Setting, found: Found, *, repeats: int, calls: int) -> None:
    """One stage and one chunk against the plain model, as a call and as a training step."""
    made = subject.make(setting.device, chunks=1)
    made.plain()
    expected = made.gradients()
    pipe = made.pipe([setting.device])
    for how, step in {"train_step": partial(made.step, pipe), "call": partial(made.call, pipe)}.items():
        same(made, step, expected, f"{subject.name}, one stage, {how}")
        readings = beside(step, made.plain, setting=setting, repeats=repeats, calls=calls)
        spread = note(found, f"{subject.name}, one stage, one chunk: {how} over plain", readings, calls)
        name = f"{subject.name}: one stage, one chunk, {how}: times the plain model's"
        found.checks.append(at_most(name, ALONE_ASKED, spread.median))


def _four(subject: Subject, setting: Setting, found: Found, *, repeats: int, calls: int) -> None:
    """Four stages as stream pairs against a plain loop, and against torchgpipe on the same cut."""
    made = subject.make(setting.device, chunks=CHUNKS)
    made.loop()
    expected = made.gradients()
    balance = even(len(made.model.parts), STAGES)
    pipe = cut_pipe(made, [setting.device] * STAGES, balance)
    ours = partial(made.step, pipe)
    same(made, ours, expected, f"{subject.name}, four stages")
    readings = beside(ours, made.loop, setting=setting, repeats=repeats, calls=calls)
    spread = note(found, f"{subject.name}, {STAGES} stages, {CHUNKS} chunks: 1f1b over a plain loop", readings, calls)
    name = f"{subject.name}: {STAGES} stages as stream pairs, {CHUNKS} chunks: times a plain loop's"
    found.checks.append(at_most(name, LOOP_ASKED, spread.median))
    try:
        step = torchgpipe_step(made, balance)
        same(made, step, expected, f"{subject.name}, torchgpipe")
        readings = beside(ours, step, setting=setting, repeats=repeats, calls=calls)
    except Exception as error:  # whatever a peer cannot do here is a finding
        found.missing.append(f"{subject.name}: torchgpipe: {type(error).__name__}: {error}")
    else:
        spread = note(found, f"{subject.name}, {STAGES} stages: 1f1b over torchgpipe", readings, calls)
        found.checks.append(at_most(f"{subject.name}: {STAGES} stages: times torchgpipe's", PEER_ASKED, spread.median))


def cut_pipe(made: Made, devices: Sequence[Any], balance: Sequence[int]) -> PipelinedModule:
    """Return a pipe whose stages have so many parts each."""
    plan = made.pipe(devices).plan
    assert plan is not None
    return made.pipe(devices, plan=made.cut(plan, balance))


class _Precise(nn.Module):
    """A part in the precision of its model: torchgpipe's threads do not have the caller's."""

    def __init__(self, part: nn.Module, made: Made) -> None:
        super().__init__()
        self.part, self.precision = part, made.precision

    def forward(self, value: Tensor) -> Tensor:
        with self.precision():
            return self.part(value)


def torchgpipe_step(made: Made, balance: Sequence[int]) -> Callable[[], None]:
    """Return torchgpipe's step, without recomputation."""
    peer = pairs.torchgpipe()
    if peer is None:
        raise ModuleNotFoundError(
            "it is not installed: install autosplit's bench extra, or put its wheel on PYTHONPATH"
        )
    model = nn.Sequential(*(_Precise(part, made) for part in made.model.parts))
    devices = [made.device] * len(balance)
    gpipe = peer.GPipe(model, list(balance), devices=devices, chunks=made.chunks, checkpoint="never")
    return partial(made.call, gpipe)


def same(made: Made, step: Callable[[], None], expected: Sequence[Tensor], what: str) -> None:
    """Run a step once and raise ValueError where its gradients are not those expected."""
    step()
    _check(made, made.gradients(), expected, what)


def _check(made: Made, gradients: Sequence[Tensor], expected: Sequence[Tensor], what: str) -> None:
    rounds = made.subject.amp or made.device.type == "cuda"
    off = differ(gradients, expected)
    if not off <= (TOLERANCE_ROUNDED if rounds else TOLERANCE):
        raise ValueError(f"the gradients of {what} are off by {off:.2g} of their largest entry")


def note(found: Found, name: str, readings: pairs.Pairs, calls: int) -> Spread:
    """Add what was read of ours and of its reference, and return how many times as long ours took."""
    spread = ratios(readings)
    ours = Spread.of([r.wall_s / calls for r in readings.ours])
    reference = Spread.of([r.wall_s / calls for r in readings.reference])
    found.figures.append({"what": name, "ours_s": ours, "reference_s": reference, "times": spread})
    return spread
