"""``autosplit profile --calibrate``: what this machine's kernels take, and a step of its CPU lanes beside them."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import typer
from torch import nn

from autosplit.api import autosplit
from autosplit.cli.common import CPU_LANE, beside_stdout
from autosplit.errors import DeviceError, InputError
from autosplit.pipelined import PipelinedModule
from autosplit.planning.plan.figures import step_amounts
from autosplit.planning.timeline import simulated
from autosplit.profile.calibrate import calibrate, default_path
from autosplit.progress import phase, update
from autosplit.runtime.lanes.ambient import one_intra_op_thread
from autosplit.trace.borrowed.state import random_state
from cost_models.calibration import Calibrated, robust_costs
from cost_models.roofline import Roofline
from cost_models.specs import Source, StepAmounts, StepSpec

_MOST_LANES = 4
_STEPS, _STEPS_QUICK = 9, 3
_FIGURES = ("step_s", "action_s", "gradient_byte_s", "fresh_byte_s", "overlap")
"""Of `StepSpec`, in the order of `StepAmounts`."""


def calibrate_here(model: str | None, *, device: str | None, quick: bool, save: Path | None) -> None:
    """Measure this machine's kernels and steps, and write what was fitted to them."""
    if model is not None:
        raise InputError(f"--calibrate measures this machine, no model; leave {model!r} out, and use the file after it")
    name = CPU_LANE if device is None else device
    path = default_path(name) if save is None else save

    def show(_: str, done: float) -> None:
        update(round(100 * done))

    try:
        with beside_stdout():
            with phase("timing kernels", total=100):
                calibrated = calibrate(name, quick=quick, progress=show)
            if calibrated.fallback.device.memory_bytes is None:
                with phase("timing steps"):
                    calibrated = with_step(calibrated, step_costs(cases(), steps=_STEPS_QUICK if quick else _STEPS))
        calibrated.save(path)
    except ValueError as error:
        raise DeviceError(str(error)) from error
    except OSError as error:
        raise InputError(f"--save {str(path)!r}: {error.strerror}") from error
    typer.echo(f"wrote {path}; use it by --device {path}")


def with_step(calibrated: Calibrated, costs: Mapping[str, float]) -> Calibrated:
    """Return a calibration whose device says what a step takes beside its operations."""
    text = f"{calibrated.stamp.date}: fitted to steps of {_lanes()} lanes whose stages are layers of one kind"
    source = Source(status="measured", text=text)
    step = StepSpec(**costs, sources=dict.fromkeys(costs, source))
    device = calibrated.fallback.device.model_copy(update={"step": step})
    return replace(calibrated, fallback=Roofline(device))


@dataclass(frozen=True)
class StepSample:
    """A step of equal stages: its amounts, and its seconds beyond its actions as they were measured alone."""

    amounts: StepAmounts
    extra_s: float
    step_s: float


def step_costs(chosen: Iterable[StepCase], *, steps: int) -> dict[str, float]:
    """Return the figures of `StepSpec` that explain the median of some steps of each case."""
    with random_state(), one_intra_op_thread(only=True):
        samples = [sample for case in chosen for sample in _samples(case, steps=steps)]
    costs = robust_costs(
        [sample.amounts for sample in samples],
        [sample.extra_s for sample in samples],
        parts_of_s=[sample.step_s for sample in samples],
    )
    return dict(zip(_FIGURES, costs, strict=True))


@dataclass(frozen=True)
class StepCase:
    """Equal stages of layers of one kind, the shape of a microbatch, and how many microbatches."""

    layer: Callable[[], nn.Module]
    layers: int
    shape: tuple[int, ...]
    chunks: int

    def model(self, lanes: int) -> nn.Module:
        """Return a stage for each lane, and a mean behind the last as the loss."""
        return MeanSquare(nn.Sequential(*(self.layer() for _ in range(lanes * self.layers))))


class MeanSquare(nn.Module):
    """Layers, and the mean of their squared output."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the mean."""
        return self.layers(x).square().mean()


def cases() -> Iterator[StepCase]:
    """Yield pipelines in which the lanes' own time, the sums of gradients, or work beside work is the larger part."""
    for chunks in (4, 16, 32):
        yield StepCase(lambda: nn.Linear(16, 16), 1, (2, 16), chunks)
    for chunks in (4, 8):
        yield StepCase(lambda: nn.Linear(1024, 1024), 4, (2, 1024), chunks)
        yield StepCase(lambda: nn.Linear(512, 512), 6, (256, 512), chunks)
        yield StepCase(lambda: nn.Conv2d(32, 32, 3, padding=1), 3, (4, 32, 48, 48), chunks)
        yield StepCase(lambda: nn.Sequential(nn.LayerNorm(512), nn.GELU()), 4, (2048, 512), chunks)


def _lanes() -> int:
    return max(2, min(_MOST_LANES, os.cpu_count() or 1))


def _samples(case: StepCase, *, steps: int) -> Iterator[StepSample]:
    """Yield what steps of equal stages took beyond their actions, under two schedules."""
    rows, *rest = case.shape
    batch = torch.randn(rows * case.chunks, *rest)
    for schedule in ("1f1b", "gpipe"):
        model = case.model(_lanes())
        devices = ["cpu"] * _lanes()
        pipe = autosplit(model, devices, case.chunks, sample=batch, schedule=schedule, lanes="threads")
        measured_s = statistics.median([_step_s(pipe, batch) for _ in range(steps + 2)][2:])
        plan = pipe.plan
        assert plan is not None, "a sample was given"
        amounts = step_amounts(plan.stages, plan.schedule_for(case.chunks), simulated(plan))
        yield StepSample(max(amounts), measured_s - (plan.step_s - plan.overhead_s), measured_s)


def _step_s(pipe: PipelinedModule, batch: torch.Tensor) -> float:
    pipe.zero_grad(set_to_none=True)
    began = time.perf_counter()
    pipe.train_step(batch)
    return time.perf_counter() - began
