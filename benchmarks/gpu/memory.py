"""Peaks predicted without a GPU against the allocator's.

Eight families in fp32 and under bf16 autocast, with and without recompute of their blocks, each a training step with
Adam: the prediction comes from a recording on the meta device, is made before the step runs, and knows nothing of what
was observed on the card.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from benchmarks.families import Family, families
from benchmarks.family_transformers import Chain, ClassHead, Patches, PreNormBlock
from benchmarks.gpu.part import Found, Setting, at_most
from benchmarks.memory_cuda import clear_workspaces, measured_cuda, predicted_cuda
from benchmarks.memory_step import Way, measured_step, predicted_step
from benchmarks.memory_subject import Precision, Recompute, Subject, recorded

MEDIAN_ASKED, WORST_ASKED, RESERVED_ASKED = 0.02, 0.05, 0.08
PRECISIONS: tuple[Precision, ...] = ("fp32", "amp_bf16")
RECOMPUTE: tuple[Recompute, ...] = ("never", "block")


@dataclass(frozen=True)
class Cell:
    """One family in one way: predicted and measured bytes; reserved ones are 0 on a CPU, which reserves nothing."""

    family: str
    precision: str
    recompute: str
    predicted_bytes: int
    measured_bytes: int
    predicted_reserved_bytes: int = 0
    measured_reserved_bytes: int = 0

    @property
    def error(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted_bytes / self.measured_bytes - 1

    @property
    def reserved_error(self) -> float:
        """The same of what is reserved."""
        return self.predicted_reserved_bytes / self.measured_reserved_bytes - 1


def run(setting: Setting) -> Found:
    """Run the part."""
    found = Found(settings={"optimizer": "adam", "steps": 2})
    chosen = [small_family()] if setting.small else list(families().values())
    precisions = PRECISIONS[:1] if setting.small else PRECISIONS
    cells: list[Cell] = []
    for family, precision in itertools.product(chosen, precisions):
        with found.going_on(f"{family.name}, {precision}"):
            subject = recorded(family, precision)
            for recompute in RECOMPUTE:
                with found.going_on(f"{family.name}, {precision}, recompute {recompute}"):
                    cells.append(_cell(subject, Way(precision, recompute, subject.family.rows), setting))
                    found.figures.append(figure(cells[-1], setting))
    if cells:
        found.checks += checks(cells, setting)
    if not setting.cuda:
        found.missing.append("reserved bytes: a CPU has no caching allocator")
    return found


def _cell(subject: Subject, way: Way, setting: Setting) -> Cell:
    """Predict one family in one way, and then measure it."""
    if setting.cuda:
        own = torch.cuda.get_device_capability(setting.device)
        predicted = predicted_cuda(subject, way, optimizer="adam", workspaces=True, capability=own)
        return on_card(subject.family, way, predicted, setting)
    least = predicted_step(subject, way, optimizers=["adam"])["adam"]
    most = measured_step(subject.family, way, optimizers=["adam"])["adam"]
    return Cell(subject.family.name, way.precision, way.recompute, least, most)


def on_card(family: Family, way: Way, predicted: tuple[int, int], setting: Setting) -> Cell:
    """Run the step on the card."""
    with torch.cuda.device(setting.device):
        setting.empty()
        clear_workspaces()
        measured = measured_cuda(family, way, optimizer="adam")
    return Cell(family.name, way.precision, way.recompute, predicted[0], measured[0], predicted[1], measured[1])


def figure(cell: Cell, setting: Setting) -> dict[str, Any]:
    """Return a cell as plain data."""
    kept = asdict(cell) | {"error": cell.error}
    if setting.cuda:
        return kept | {"reserved_error": cell.reserved_error}
    return {name: value for name, value in kept.items() if "reserved" not in name}


def checks(cells: Sequence[Cell], setting: Setting) -> list[Any]:
    """Return what is asked of all cells together."""
    errors = [abs(cell.error) for cell in cells]
    found = [
        at_most("peak allocated, predicted without a GPU: median error", MEDIAN_ASKED, statistics.median(errors)),
        at_most("peak allocated, predicted without a GPU: worst error", WORST_ASKED, max(errors)),
    ]
    if not setting.cuda:
        return found
    reserved = max(abs(cell.reserved_error) for cell in cells)
    return [*found, at_most("peak reserved, predicted without a GPU: worst error", RESERVED_ASKED, reserved)]


def small_family() -> Family:
    """Return what stands for all families in a dry run: two blocks over 16 patches."""

    def make() -> Chain:
        blocks = [PreNormBlock(32, 2, causal=False, dropout=0.0) for _ in range(2)]
        return Chain(Patches(32, 8, 32), *blocks, ClassHead(32, 100))

    return replace(families()["vit"], make=make, batch=lambda count: (torch.randn(count, 3, 32, 32),), rows=2)
