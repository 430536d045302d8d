"""A roofline fitted to measurements, and times that were measured, in front of another model for all that was not."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt
from pydantic import Field, NonNegativeFloat, PositiveInt, ValidationError, model_validator

from cost_models.roofline import Roofline
from cost_models.specs import DeviceSpec, Record, describe
from cost_models.work import MATRIX_KINDS, CostModel, DType, OpWork

_KNOTS_BYTES = (1 << 20, 1 << 23, 1 << 25, 1 << 26)
"""Sizes from which a further byte may cost more: past a core's cache, the shared one, what an allocator keeps."""

_NOISE_S = 5e-6
"""What a clock's reading may be off by: shorter operations count for less in the fit."""

_FEWEST = 4
"""With fewer measurements than this a class is not fitted."""

_ROUNDS, _TOLERANCE, _EPSILON = 8, 0.15, 1e-10

Array = npt.NDArray[np.float64]


class Curve(Record):
    """Costs of one class of work in one dtype, none of them below zero, so that more work never takes less time.

    Attributes:
        kind: the class, refined or not.
        dtype: its arithmetic.
        launch_s: seconds of each launch.
        flop_s: seconds of each FLOP.
        byte_s: seconds of each byte beyond none, and beyond each entry of ``knots_bytes``; they add up.
        knots_bytes: sizes from which a further byte costs more.
        samples: how many measurements it was fitted to.
        median_error: the median of |fitted / measured - 1| over them.
    """

    kind: str
    dtype: DType
    launch_s: NonNegativeFloat
    flop_s: NonNegativeFloat
    byte_s: tuple[NonNegativeFloat, ...]
    knots_bytes: tuple[PositiveInt, ...]
    samples: PositiveInt
    median_error: NonNegativeFloat

    @model_validator(mode="after")
    def _has_a_cost_for_every_knot(self) -> Self:
        if len(self.byte_s) != len(self.knots_bytes) + 1:
            raise ValueError(
                f"byte_s has {len(self.byte_s)} entries and knots_bytes {len(self.knots_bytes)}; it has one more"
            )
        return self

    def seconds(self, work: OpWork) -> float:
        """Return the time of ``work`` by this curve."""
        costs = (self.launch_s, self.flop_s, *self.byte_s)
        return sum(cost * amount for cost, amount in zip(costs, _amounts(work, self.knots_bytes), strict=True))


class Stamp(Record):
    """What a calibration is true of: the device, the day, the software and the threads that computed."""

    device: str = Field(min_length=1)
    date: str = Field(min_length=1)
    versions: dict[str, str] = Field(default_factory=dict)
    threads: PositiveInt = 1


class _File(Record):
    stamp: Stamp
    device: DeviceSpec
    issue_s: NonNegativeFloat
    curves: tuple[Curve, ...]


@dataclass(frozen=True)
class Calibrated:
    """Measured curves, and the roofline of a device for every class that was not measured.

    Attributes:
        curves: by class and dtype.
        fallback: the roofline for the rest.
        stamp: where and when the measurements were taken.
        issue_s: what each operation costs besides its kernel: the framework's way to it, forward and backward.
    """

    curves: Mapping[tuple[str, DType], Curve]
    fallback: Roofline
    stamp: Stamp
    issue_s: float = 0.0

    @classmethod
    def fit(
        cls, samples: Iterable[tuple[OpWork, float]], *, device: DeviceSpec, stamp: Stamp, issue_s: float = 0.0
    ) -> Calibrated:
        """Return the curves that fit measured times best: least relative errors, outliers weighted down.

        Samples of a refined kind fit a curve of their own, and together with the others of their class the class's.

        Raises:
            ValueError: a measured time is not above zero.
        """
        groups: dict[tuple[str, DType], list[tuple[OpWork, float]]] = {}
        for work, seconds in samples:
            if not 0 < seconds < float("inf"):
                raise ValueError(f"{work} took {seconds} s; a measured time is finite and above zero")
            for kind in dict.fromkeys((work.kind, work.base_kind)):
                groups.setdefault((kind, work.dtype), []).append((work, seconds))
        curves = {key: _fitted(key, group) for key, group in sorted(groups.items()) if len(group) >= _FEWEST}
        return cls(curves=curves, fallback=Roofline(device), stamp=stamp, issue_s=issue_s)

    def seconds(self, work: OpWork) -> float:
        """Return the time of ``work`` in seconds."""
        curve = self._find(work)
        kernel_s = self.fallback.seconds(work) if curve is None else curve.seconds(work)
        return kernel_s + work.launches * self.issue_s

    def _find(self, work: OpWork) -> Curve | None:
        """Return the curve of the kind, else of its class; work that only moves bytes may take another dtype's."""
        dtypes: tuple[DType, ...] = (work.dtype,)
        if work.base_kind not in MATRIX_KINDS:
            dtypes = (work.dtype, "fp32")
        keys = [(kind, dtype) for kind in (work.kind, work.base_kind) for dtype in dtypes]
        return next((self.curves[key] for key in keys if key in self.curves), None)

    def save(self, path: str | Path) -> None:
        """Write the calibration as JSON; missing folders are made."""
        content = _File(
            stamp=self.stamp, device=self.fallback.device, issue_s=self.issue_s, curves=tuple(self.curves.values())
        )
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        written = target.with_name(f"{target.name}.part")
        written.write_text(content.model_dump_json(indent=2) + "\n", encoding="utf-8")
        written.replace(target)

    @classmethod
    def load(cls, path: str | Path) -> Calibrated:
        """Read what ``save`` wrote.

        Raises:
            ValueError: the file cannot be read, or is no calibration.
        """
        try:
            content = _File.model_validate_json(Path(path).read_bytes())
        except OSError as error:
            raise ValueError(
                f"cannot read the calibration {str(path)!r}: {error.strerror}; "
                "make one with autosplit profile --calibrate"
            ) from error
        except ValidationError as error:
            raise ValueError(
                f"{str(path)!r} is no calibration: {describe(error)}; make one with autosplit profile --calibrate"
            ) from error
        curves = {(curve.kind, curve.dtype): curve for curve in content.curves}
        return cls(curves=curves, fallback=Roofline(content.device), stamp=content.stamp, issue_s=content.issue_s)


def _amounts(work: OpWork, knots_bytes: Sequence[int]) -> tuple[float, ...]:
    beyond = (max(0, work.bytes - knot) for knot in knots_bytes)
    return (work.launches, work.flops, work.bytes, *beyond)


def _fitted(key: tuple[str, DType], samples: Sequence[tuple[OpWork, float]]) -> Curve:
    kind, dtype = key
    moves = all(work.flops == 0 for work, _ in samples)
    largest = max(work.bytes for work, _ in samples)
    knots = tuple(knot for knot in _KNOTS_BYTES if moves and 4 * knot < 3 * largest)
    rows = [_amounts(work, knots) for work, _ in samples]
    times = [seconds for _, seconds in samples]
    costs = robust_costs(rows, times)
    errors = np.abs(np.array(rows) @ np.array(costs) / np.array(times) - 1)
    return Curve(
        kind=kind,
        dtype=dtype,
        launch_s=costs[0],
        flop_s=costs[1],
        byte_s=tuple(costs[2:]),
        knots_bytes=knots,
        samples=len(samples),
        median_error=float(np.median(errors)),
    )


def robust_costs(
    rows: Sequence[Sequence[float]], times_s: Sequence[float], *, parts_of_s: Sequence[float] | None = None
) -> list[float]:
    """Return non-negative costs of the amounts in ``rows`` that explain the times.

    Least squares of relative errors, repeated with errors above 15% weighted down (Huber, Ann. Math. Stat. 1964).
    Errors are relative to the times, or to ``parts_of_s``, where the times are parts of longer ones.
    """
    amounts, times = np.array(rows, dtype=float), np.array(times_s, dtype=float)
    scales = 1 / (np.array(times_s if parts_of_s is None else parts_of_s, dtype=float) + _NOISE_S)
    factors = scales
    costs = np.zeros(amounts.shape[1])
    for _ in range(_ROUNDS):
        costs = _non_negative(amounts * factors[:, None], times * factors)
        errors = np.abs(amounts @ costs - times) * scales
        factors = scales * np.sqrt(np.minimum(1.0, _TOLERANCE / np.maximum(errors, _EPSILON)))
    return [float(cost) for cost in costs]


def _non_negative(rows: Array, targets: Array) -> Array:
    """Return the non-negative least-squares solution: the best on any set of columns, of which there are few."""
    norms = np.linalg.norm(rows, axis=0)
    norms[norms == 0] = 1.0
    scaled = rows / norms
    best, least = np.zeros(len(norms)), float(targets @ targets)
    for count in range(1, len(norms) + 1):
        for columns in map(list, combinations(range(len(norms)), count)):
            solution = np.zeros(len(norms))
            solution[columns] = np.linalg.lstsq(scaled[:, columns], targets, rcond=None)[0]
            error = float(np.sum((scaled @ solution - targets) ** 2))
            if error < least and (solution >= 0).all():
                best, least = solution, error
    return best / norms


@dataclass(frozen=True)
class Measured:
    """A table of measured seconds by work; ``fallback`` answers for work that is not in the table."""

    table: Mapping[OpWork, float]
    fallback: CostModel

    def __post_init__(self) -> None:
        for work, seconds in self.table.items():
            if not (math.isfinite(seconds) and seconds > 0):
                raise ValueError(f"{work} took {seconds} s; a measured time is finite and above zero")

    def seconds(self, work: OpWork) -> float:
        """Return the measured time of ``work``, or what the fallback says."""
        measured = self.table.get(work)
        return self.fallback.seconds(work) if measured is None else measured
