"""Predicted against measured time of a whole training step: five families, three schedules, one lane per core.

    python -m benchmarks.step_seconds [--families gpt2 unet] [--schedules 1f1b] [--rounds 9] [--devices 2] [--json FILE]

The prediction is ``pipe.plan.step_s``: nodes measured alone, one by one, before the first step, and what a step costs
beside its cells by the device's file or this machine's calibration (``autosplit profile --calibrate``); no figure is
fitted on these models. The steps of all families and schedules take turns. Each model ends in its loss, so that the
loss is planned too.

    error    predicted over the middle of the measured interval (its quartiles), less one
    alone    the step composed of every action alone on its lane (`profile_stages`), over the same
"""

from __future__ import annotations

import argparse
import statistics
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from autosplit import autosplit
from benchmarks import pairs
from benchmarks.families import Family, families

NAMES = ("gpt2", "bert", "vit", "resnet50", "unet")
SCHEDULES = ("1f1b", "zb_h1", "gpipe")
CHUNKS = 4
MEDIAN_ASKED, WORST_ASKED = 0.05, 0.10


class WithLoss(nn.Module):
    """A family's model and the loss of its logits against a target."""

    def __init__(self, family: Family) -> None:
        super().__init__()
        self.model, self.loss = family.make(), family.loss

    def forward(self, target: Tensor, *inputs: Tensor) -> Tensor:
        """Return the mean loss."""
        return self.loss(self.model(*inputs), target)


@dataclass(frozen=True)
class Subject:
    """One pipe, its batch, and what its plan says."""

    family: str
    schedule: str
    pipe: Any
    batch: tuple[Tensor, ...]

    @classmethod
    def of(cls, family: Family, schedule: str, *, devices: int) -> Subject:
        """Return the pipe of a family under a schedule, planned on its own batch."""
        torch.manual_seed(0)
        rows = max(CHUNKS, family.rows)
        batch = (family.target(rows), *family.batch(rows))
        pipe = autosplit(WithLoss(family), devices=["cpu"] * devices, chunks=CHUNKS, sample=batch, schedule=schedule)
        return cls(family.name, schedule, pipe, batch)

    def step(self) -> None:
        """Run one step; gradients are gone before the next."""
        self.pipe.zero_grad(set_to_none=True)
        self.pipe.train_step(*self.batch)


def figure(subject: Subject, readings: Sequence[pairs.Reading], *, alone: bool) -> dict[str, Any]:
    """Return what was predicted and measured of one subject."""
    wall = pairs.Spread.of([reading.wall_s for reading in readings])
    middle_s = (wall.low + wall.high) / 2
    predicted_s = subject.pipe.plan.step_s
    found = {
        "family": subject.family,
        "schedule": subject.schedule,
        "predicted_s": predicted_s,
        "measured_s": wall,
        "cpu_s": statistics.median(reading.process_s for reading in readings),
        "error": predicted_s / middle_s - 1,
    }
    if alone:
        composed = subject.pipe.profile_stages(*subject.batch).timeline().step_s
        found["alone"] = composed / middle_s - 1
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print a table, and write the figures where ``--json`` says."""
    options = _parser().parse_args(argv)
    warnings.simplefilter("ignore")
    known = families()
    subjects = {
        f"{name} {schedule}": Subject.of(known[name], schedule, devices=options.devices)
        for name in options.families
        for schedule in options.schedules
    }
    steps = {name: subject.step for name, subject in subjects.items()}
    readings = pairs.interleave(steps, repeats=options.rounds)
    figures = [figure(subject, readings[name], alone=options.alone) for name, subject in subjects.items()]
    errors = [abs(found["error"]) for found in figures]
    checks = [
        pairs.at_most("median |error|", MEDIAN_ASKED, statistics.median(errors)),
        pairs.at_most("worst |error|", WORST_ASKED, max(errors)),
    ]
    machine = pairs.facts()
    print(pairs.facts_text(machine))
    print(pairs.table([_line(found) for found in figures]))
    print(pairs.checks_text(checks))
    if options.json is not None:
        settings = {"chunks": CHUNKS, "devices": options.devices, "rounds": options.rounds}
        pairs.write(
            options.json,
            benchmark="step_seconds",
            settings=settings,
            machine=machine,
            figures=figures,
            checks=checks,
        )


def _line(found: dict[str, Any]) -> dict[str, str]:
    line = {
        "family": found["family"],
        "schedule": found["schedule"],
        "predicted ms": f"{found['predicted_s'] * 1e3:.1f}",
        "measured ms": found["measured_s"].scaled(1e3).text(),
        "CPU ms": f"{found['cpu_s'] * 1e3:.1f}",
        "error": f"{found['error']:+.1%}",
    }
    return line | ({"alone": f"{found['alone']:+.1%}"} if "alone" in found else {})


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", choices=tuple(families()), default=NAMES)
    parser.add_argument("--schedules", nargs="+", choices=SCHEDULES, default=SCHEDULES)
    parser.add_argument("--rounds", type=int, default=9, help="steps per subject")
    parser.add_argument("--devices", type=int, default=2, help="CPU lanes; as many cores should be idle")
    parser.add_argument("--alone", action="store_true", help="measure every action alone, too")
    parser.add_argument("--json", type=Path, help="write the figures here")
    return parser


if __name__ == "__main__":
    main()
