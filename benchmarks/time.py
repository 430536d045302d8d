"""Predicted against measured time of forward and backward, by stage: eight families, four stages each.

    python -m benchmarks.time [--families gpt2 unet] [--precision fp32] [--rounds 5] [--calibration FILE]
                              [--device cpu-lane] [--json FILE]

The prediction knows micro-benchmarks only (``autosplit profile --calibrate``; no family is among them): the operations
of a stage come from one run on fake tensors, their times from the calibrated roofline. Every stage is measured alone on
real tensors; the stages of all families take turns, and the median counts. On the CPU that is one thread, in CPU
seconds of that thread, so that other programs disturb little; ``--device`` names the CUDA device of this machine
instead, whose events are then read. A calibration that is made here is spread over the rounds, so that a machine whose
speed drifts meets both alike.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import cost_models
from autosplit.devices import Clock, clock_of
from autosplit.profile.calibrate import Timing, fitted, place_of, time_cases
from autosplit.profile.calibration_cases import cases
from autosplit.profile.lowering import CudaKernels
from autosplit.profile.node_costs.ledger import Ledger
from autosplit.profile.node_costs.shadow import shadow
from autosplit.profile.node_costs.work import work_of
from benchmarks import pairs
from benchmarks.families import Family, families
from cost_models import Calibrated, OpWork, Roofline

STAGES = 4
_CPU = torch.device("cpu")
_ROUGH = Roofline(cost_models.device("cpu-lane"))
"""What balances the cut: any model does, since the cut is part of the question and no part of the answer."""

MEDIAN_ASKED, WORST_ASKED = 0.12, 0.30


class Stage(nn.Module):
    """Some parts of a family's chain in a row; the last stage ends with the loss."""

    def __init__(self, parts: Sequence[nn.Module], loss: Callable[[Tensor], Tensor] | None) -> None:
        super().__init__()
        self.parts, self.loss = nn.ModuleList(parts), loss

    def forward(self, *state: Tensor) -> tuple[Tensor, ...]:
        for part in self.parts:
            result = part(*state)
            state = result if isinstance(result, tuple) else (result,)
        return state if self.loss is None else (self.loss(state[0]),)


@dataclass(frozen=True)
class Alone:
    """One stage, what enters it, and the precision that it runs in."""

    family: str
    number: int
    module: Stage
    inputs: tuple[Tensor, ...]
    precision: str

    def run(self) -> None:
        """Run forward and backward, as on a lane: every floating input gets its gradient."""
        inputs = [tensor.detach().requires_grad_(tensor.is_floating_point()) for tensor in self.inputs]
        with torch.autocast(inputs[0].device.type, torch.bfloat16, enabled=self.precision == "bf16"):
            results = self.module(*inputs)
        targets = [result for result in results if result.requires_grad]
        torch.autograd.backward(targets, [torch.ones_like(target) for target in targets])
        self.module.zero_grad(set_to_none=True)


@dataclass(frozen=True)
class Line:
    """What was predicted and measured for one stage."""

    family: str
    precision: str
    stage: int
    predicted_s: float
    measured_s: float

    @property
    def error(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted_s / self.measured_s - 1


def works_of(stage: Alone) -> list[OpWork]:
    """Return the operations of a stage's forward and backward, from a run on fake tensors.

    What cuDNN computes on a CUDA device, such as an LSTM, takes a call of its own: cuDNN's reads real addresses.
    """
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        module = shadow(stage.module, replace=mode.from_tensor).module
        assert isinstance(module, Stage)
        inputs = tuple(mode.from_tensor(tensor) for tensor in stage.inputs)
    twin = Alone(stage.family, stage.number, module, inputs, stage.precision)
    lowering = CudaKernels() if inputs[0].device.type == "cuda" else contextlib.nullcontext()
    with mode, lowering, Ledger() as ledger:
        twin.run()
    return [work_of(operation) for operation in ledger.operations]


def stages_of(family: Family, *, precision: str, place: torch.device = _CPU) -> list[Alone]:
    """Return the stages of a family with what enters each: a cut that balances their parts' FLOPs and bytes roughly."""
    torch.manual_seed(0)
    with place:
        parts = family.parts(family.make())
        target, batch = family.target(family.rows), family.batch(family.rows)
    state, weights = batch, []
    for part in parts:
        single = Alone(family.name, 0, Stage([part], None), state, precision)
        weights.append(sum(map(_ROUGH.seconds, works_of(single))))
        state = _after(single)
    state, alone = batch, []
    bounds = [0, *_balanced(weights, STAGES), len(parts)]
    for number, (first, last) in enumerate(itertools.pairwise(bounds)):
        loss = (lambda logits: family.loss(logits, target)) if last == len(parts) else None
        stage = Alone(family.name, number, Stage(parts[first:last], loss), state, precision)
        alone.append(stage)
        state = _after(stage)
    return alone


def _after(stage: Alone) -> tuple[Tensor, ...]:
    with (
        torch.no_grad(),
        torch.autocast(stage.inputs[0].device.type, torch.bfloat16, enabled=stage.precision == "bf16"),
    ):
        return tuple(tensor.detach() for tensor in stage.module(*stage.inputs))


def _balanced(weights: Sequence[float], stages: int) -> list[int]:
    """Return the cuts of a chain whose heaviest stage is lightest."""
    best: dict[tuple[int, int], tuple[float, list[int]]] = {(0, 0): (0.0, [])}
    for used in range(1, stages + 1):
        for end in range(used, len(weights) + 1):
            options = [
                (max(best[used - 1, start][0], sum(weights[start:end])), [*best[used - 1, start][1], start])
                for start in range(used - 1, end)
                if (used - 1, start) in best
            ]
            best[used, end] = min(options)
    return best[stages, len(weights)][1][1:]


def measured(
    stages: Sequence[Alone], *, rounds: int, clock: Clock, before: Callable[[int], None] | None = None
) -> list[float]:
    """Return the median seconds of every stage; they take turns, after a warm-up of each.

    ``before`` is called with the number of each round that counts, before it.
    """
    readings: list[list[float]] = [[] for _ in stages]
    for turn in range(rounds + 1):
        if turn and before is not None:
            before(turn - 1)
        for place, stage in enumerate(stages):
            seconds = clock.timed(stage.run).seconds
            if turn:
                readings[place].append(seconds)
    return [statistics.median(times) for times in readings]


def checks(lines: Sequence[Line]) -> list[pairs.Check]:
    """Return what is asked of all stages together."""
    errors = [abs(line.error) for line in lines]
    return [
        pairs.at_most("median error over all stages", MEDIAN_ASKED, statistics.median(errors)),
        pairs.at_most("worst error over all stages", WORST_ASKED, max(errors)),
    ]


def main(argv: Sequence[str] | None = None) -> None:
    """Print a table, and write all figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", choices=list(families()), default=list(families()))
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cpu-lane", help="a device of cost_models that this machine has")
    parser.add_argument("--calibration", type=Path, help="a file of autosplit profile --calibrate; made here without")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    machine = pairs.facts()
    given = Calibrated.load(arguments.calibration) if arguments.calibration else None
    device = cost_models.device(arguments.device) if given is None else given.fallback.device
    place = place_of(device)
    chosen = [families()[name] for name in arguments.families]
    stages = [stage for family in chosen for stage in stages_of(family, precision=arguments.precision, place=place)]
    works = [works_of(stage) for stage in stages]
    timings: list[Timing] = []

    def calibrate_some(turn: int) -> None:
        if given is None:
            timings.extend(time_cases(list(cases())[turn :: arguments.rounds], device=place))

    clock = clock_of(place, threads=1)
    times = measured(stages, rounds=arguments.rounds, clock=clock, before=calibrate_some)
    model = fitted(timings, device=device) if given is None else given
    lines = [
        Line(stage.family, stage.precision, stage.number, sum(map(model.seconds, found)), seconds)
        for stage, found, seconds in zip(stages, works, times, strict=True)
    ]
    print(f"\n{pairs.facts_text(machine)}\n\n{pairs.table([_shown(line) for line in lines])}\n")
    print(pairs.checks_text(checks(lines)))
    if arguments.json:
        settings = {"rounds": arguments.rounds, "stages": STAGES, "calibrated": model.stamp.model_dump()}
        pairs.write(
            arguments.json,
            benchmark="time",
            settings=settings,
            machine=machine,
            figures=[{**asdict(line), "error": line.error} for line in lines],
            checks=checks(lines),
        )


def _shown(line: Line) -> dict[str, Any]:
    return {
        "family": line.family,
        "precision": line.precision,
        "stage": line.stage,
        "predicted": f"{line.predicted_s * 1e3:.1f} ms",
        "measured": f"{line.measured_s * 1e3:.1f} ms",
        "error": f"{line.error:+.1%}",
    }


if __name__ == "__main__":
    main()
