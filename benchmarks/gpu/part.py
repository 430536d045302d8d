"""What the parts of the GPU benchmark share: where they run, what they hand back, and timing on a device."""

from __future__ import annotations

import contextlib
import gc
import math
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

import cost_models
from benchmarks import pairs
from benchmarks.pairs import Check, Spread, at_least, at_most
from cost_models.specs import DeviceSpec

__all__ = ["Check", "Found", "Setting", "Spread", "at_least", "at_most", "differ", "ratios", "settled"]

_NO_SCALE = 1e-3
_DIGITS = 5
"""Significant digits of a figure in a file."""


@dataclass(frozen=True)
class Setting:
    """Where a part runs, and how large.

    Attributes:
        device: the CUDA device that is measured, or the CPU in a dry run.
        small: whether sizes are tiny: seconds on a CPU, figures of nothing.
        path: where the results go; None: nowhere.
    """

    device: torch.device
    small: bool = False
    path: Path | None = None

    @property
    def cuda(self) -> bool:
        """Whether a GPU is measured."""
        return self.device.type == "cuda"

    @property
    def spec(self) -> DeviceSpec:
        """What is known of the device: raises ValueError for a GPU that nobody has described."""
        if not self.cuda:
            return cost_models.device("cpu-lane")
        name = torch.cuda.get_device_name(self.device)
        found = cost_models.identify(name)
        if found is None:
            raise ValueError(f"no file of cost_models/devices has the driver name {name!r}; add one")
        return found

    @property
    def short_name(self) -> str:
        """The device in one word, as files of results are named: ``h200``, ``cpu``."""
        if not self.cuda:
            return "cpu"
        name = torch.cuda.get_device_name(self.device)
        found = cost_models.identify(name)
        return (name if found is None else found.name).replace(" ", "-").split("-")[0].lower()

    def wait(self) -> None:
        """Wait until the device is through with what it was given."""
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def empty(self) -> None:
        """Give back what nobody holds any more, pipes and their lanes too."""
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()

    def waited(self, step: Callable[[], Any], *, calls: int = 1) -> Callable[[], None]:
        """Return what takes some steps one after the other and then waits for the device."""

        def run() -> None:
            for _ in range(calls):
                step()
            self.wait()

        return run


@dataclass
class Found:
    """What a part hands back.

    Attributes:
        save: what writes down how far a part is, wherever `going_on` ends; None: nobody does.
        checks: the numbers that are asked for, with what was measured.
        figures: everything that was measured, as plain data; spreads are written as their quartiles.
        settings: what the figures depend on beside the machine.
        missing: what could not be measured and why, ``"torchgpipe: it is not installed"``.
        failed: what ended in an error of ours; the rest of the part went on.
    """

    save: ClassVar[Callable[[Found], None] | None] = None
    checks: list[Check] = field(default_factory=list)
    figures: list[dict[str, Any]] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    @contextlib.contextmanager
    def going_on(self, what: str) -> Iterator[None]:
        """Note an error of what runs in here, and go on behind it: minutes on a card are not to be lost.

        What was found so far is saved at the end, so that a run that is killed loses what it was at alone.
        """
        try:
            yield
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            text = f"{what}: {type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno})"
            self.failed.append(text)
            print(f"failed: {text}", flush=True)
        finally:
            if Found.save is not None:
                Found.save(self)


Part = Callable[[Setting], Found]


def settled(check: Check) -> Check:
    """Return a check as a file has it: rounded, and ``ok`` read off what stands there."""
    word, _, text = check.asked.partition(" ")
    measured, asked = float(f"{check.measured:.{_DIGITS}g}"), float(text)
    return replace(check, measured=measured, ok={"<=": measured <= asked, ">=": measured >= asked}[word])


def finite(value: Any) -> Any:
    """Return plain data with None for every number that is not finite, as JSON has none of these."""
    if isinstance(value, Spread):
        return finite(asdict(value))
    if isinstance(value, Mapping):
        return {key: finite(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def ratios(readings: pairs.Pairs) -> Spread:
    """Return how many times as long ours took as its reference on the clock, pair by pair."""
    both = zip(readings.ours, readings.reference, strict=True)
    return Spread.of([ours.wall_s / reference.wall_s for ours, reference in both])


def beside(
    ours: Callable[[], Any], reference: Callable[[], Any], *, setting: Setting, repeats: int, calls: int
) -> pairs.Pairs:
    """Read one step beside another in turns; each reading is of ``calls`` steps and the device's end."""
    run, other = setting.waited(ours, calls=calls), setting.waited(reference, calls=calls)
    return pairs.paired({"": run}, {"": other}, repeats=repeats, calls=1, warmups=2)[""]


def differ(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Return the largest difference between two lists of tensors, each over the largest entry of its pair.

    An entry below a thousandth of the largest of all is no scale: gradients that cancel out are rounding alone.
    """
    if len(found) != len(expected):
        raise ValueError(f"{len(found)} gradients, {len(expected)} expected")
    largest = [float(tensor.abs().max()) for tensor in expected]
    floor = _NO_SCALE * max(largest)
    both = zip(found, expected, largest, strict=True)
    return max(float((f - e).abs().max()) / max(own, floor) for f, e, own in both)


def milliseconds(figures: Mapping[str, Any]) -> dict[str, str]:
    """Return a figure as a line of a table: seconds in ms, ratios with three digits, lists left out."""
    shown = {}
    for name, value in figures.items():
        if isinstance(value, Spread):
            shown[name] = value.scaled(1e3).text(2) if name.endswith("_s") else value.text(3)
        elif isinstance(value, float):
            shown[name] = f"{value * 1e3:.3f}" if name.endswith("_s") else f"{value:.4g}"
        elif isinstance(value, (str, int)):
            shown[name] = str(value)
    return {name.replace("_s", " ms") if name.endswith("_s") else name: text for name, text in shown.items()}
