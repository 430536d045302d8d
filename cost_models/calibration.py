"""A roofline fitted to measurements: one line of costs for each class of work and dtype that was measured."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from pydantic import Field, NonNegativeFloat, PositiveInt, ValidationError, model_validator

from cost_models.faults import describe
from cost_models.roofline import Roofline
from cost_models.specs import DeviceSpec, Record
from cost_models.work import MATRIX_KINDS, DType, OpWork

_KNOTS_BYTES = (1 << 20, 1 << 23, 1 << 25, 1 << 26)
"""Sizes from which a further byte may cost more: past a core's cache, the shared one, what an allocator keeps."""

_NOISE_S = 5e-6
"""What a clock's reading may be off by: shorter operations count for less in the fit."""

_FEWEST = 4
"""With fewer measurements than this a class is not fitted."""

_ROUNDS, _TOLERANCE, _EPSILON = 8, 0.15, 1e-10


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
                f"{str(path)!r} is no calibration: {describe(error, schema=_File.model_json_schema())}; "
                "make one with autosplit profile --calibrate"
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
    errors = [abs(_dot(costs, row) / seconds - 1) for row, seconds in zip(rows, times, strict=True)]
    return Curve(
        kind=kind,
        dtype=dtype,
        launch_s=costs[0],
        flop_s=costs[1],
        byte_s=tuple(costs[2:]),
        knots_bytes=knots,
        samples=len(samples),
        median_error=statistics.median(errors),
    )


def robust_costs(
    rows: Sequence[Sequence[float]], times_s: Sequence[float], *, parts_of_s: Sequence[float] | None = None
) -> list[float]:
    """Return non-negative costs of the amounts in ``rows`` that explain the times.

    Least squares of relative errors, repeated with errors above 15% weighted down (Huber, Ann. Math. Stat. 1964).
    Errors are relative to the times, or to ``parts_of_s``, where the times are parts of longer ones.
    """
    scales = [1 / (seconds + _NOISE_S) for seconds in (times_s if parts_of_s is None else parts_of_s)]
    weights = [1.0] * len(rows)
    costs: list[float] = []
    for _ in range(_ROUNDS):
        factors = [scale * weight**0.5 for scale, weight in zip(scales, weights, strict=True)]
        costs = _non_negative(
            [[factor * amount for amount in row] for factor, row in zip(factors, rows, strict=True)],
            [factor * seconds for factor, seconds in zip(factors, times_s, strict=True)],
        )
        errors = [
            abs(_dot(costs, row) - seconds) * scale for row, seconds, scale in zip(rows, times_s, scales, strict=True)
        ]
        weights = [min(1.0, _TOLERANCE / error) if error else 1.0 for error in errors]
    return costs


def _non_negative(rows: Sequence[Sequence[float]], targets: Sequence[float]) -> list[float]:
    """Return the non-negative least-squares solution (Lawson and Hanson, Solving Least Squares Problems, 1974)."""
    columns = list(zip(*rows, strict=True))
    norms = [_dot(column, column) ** 0.5 or 1.0 for column in columns]
    unit = [[value / norm for value in column] for column, norm in zip(columns, norms, strict=True)]
    gram = [[_dot(first, second) for second in unit] for first in unit]
    wanted = [_dot(column, targets) for column in unit]
    found, free = [0.0] * len(unit), set[int]()
    for _ in range(3 * len(unit)):
        slopes = {
            place: wanted[place] - _dot(gram[place], found)
            for place in range(len(unit))
            if place not in free and gram[place][place] > 0
        }
        steepest = max(slopes, key=slopes.__getitem__, default=None)
        if steepest is None or slopes[steepest] <= _EPSILON * max(wanted):
            break
        free.add(steepest)
        found = _walked(found, gram, wanted, free)
    return [value / norm for value, norm in zip(found, norms, strict=True)]


def _walked(
    found: Sequence[float], gram: Sequence[Sequence[float]], wanted: Sequence[float], free: set[int]
) -> list[float]:
    """Return the best point in which only ``free`` places are above zero; drops from it those that would go below."""
    while True:
        places = sorted(free)
        best = dict(
            zip(
                places,
                _solved([[gram[a][b] for b in places] for a in places], [wanted[a] for a in places]),
                strict=False,
            )
        )
        below = [place for place in places if best[place] <= 0]
        if not below:
            return [best.get(place, 0.0) for place in range(len(found))]
        share = min(found[place] / (found[place] - best[place]) if found[place] > 0 else 0.0 for place in below)
        found = [old + share * (best.get(place, 0.0) - old) for place, old in enumerate(found)]
        dropped = min(below, key=lambda place: (found[place], place))
        free.discard(dropped)
        found = [value if place in free else 0.0 for place, value in enumerate(found)]


def _solved(matrix: Sequence[Sequence[float]], right: Sequence[float]) -> list[float]:
    """Return the solution of a symmetric, positive system, by elimination with a ridge that keeps it regular."""
    size = len(matrix)
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    for place in range(size):
        rows[place][place] += _EPSILON
    for place in range(size):
        pivot = max(range(place, size), key=lambda row: abs(rows[row][place]))
        rows[place], rows[pivot] = rows[pivot], rows[place]
        for row in range(place + 1, size):
            factor = rows[row][place] / rows[place][place]
            rows[row] = [a - factor * b for a, b in zip(rows[row], rows[place], strict=True)]
    solution = [0.0] * size
    for place in reversed(range(size)):
        known = _dot(rows[place][place + 1 : size], solution[place + 1 :])
        solution[place] = (rows[place][size] - known) / rows[place][place]
    return solution


def _dot(left: Sequence[float], right: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(left, right, strict=True))
