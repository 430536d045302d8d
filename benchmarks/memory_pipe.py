"""The peak of every stage of a real pipe in its training step: predicted by the plan, measured by the allocator.

    python -m benchmarks.memory_pipe [--family gpt2 unet] [--schedule 1f1b] [--recompute never block]
                                     [--stages 4] [--chunks 8] [--json FILE]

The pipe runs as it always does, issued by one thread, but each stage's lane has memory of its own, as a device has:
what comes from another lane is copied. The allocator's own events (``torch.profiler``) are in order, and so are the
actions; a block belongs to the lane whose action, or whose copy, allocated it:

    lane 0   ──[0F0]──────[0F1]────────────[0B0]──      parameters + optimizer state + its own blocks: its peak
    lane 1   ────────[1F0]─────[1F1][1B0]─────────      predicted: plan.stages[1].memory.peak_bytes

Nothing is fitted; the loss is the mean of the output, which is what a plan without a loss assumes. The step of the
optimizer, Adam as plans take it, is part of what is measured, lane by lane: a large embedding's lane may hold the most
there. Optimizer state is counted as the plan counts it, and gradients are None when the step begins.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.profiler import record_function

from autosplit import PipelinedModule, autosplit, recordings
from autosplit.devices import Allocations
from autosplit.runtime.lanes.lanes import Bundle, Lane
from autosplit.runtime.step import train_cells
from autosplit.runtime.step.cells import Cells
from benchmarks import pairs
from benchmarks.families import Family, families

ASKED = 0.03
_MARK = "lane "
_TIED_LANE = 0
"""Where tied parameters lie: these models have embeddings on the first lane."""


class OwnMemory(Lane):
    """A lane on the CPU that holds a copy of its own of what other lanes send."""

    asynchronous = True
    at_work = False
    """Whether a cell runs, not what comes before the first one."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def fetch(self, bundle: Bundle, source: Lane) -> Bundle:
        """Return copies of another lane's tensors.

        The caller's batch lies where it is, and so do parameters: a plan for one device has no copies of tied ones.
        """
        if source is self or not isinstance(source, OwnMemory) or not OwnMemory.at_work:
            return bundle
        with record_function(f"{_MARK}{self.number}"):
            return tuple(tensor.clone() for tensor in bundle)

    def active(self) -> Any:
        """Return what marks what runs here, also before the first action: values that depend on no row."""
        return record_function(f"{_MARK}{self.number}")

    def here(self) -> Lane:
        """Return the caller's lane."""
        return Lane()


@dataclass(frozen=True)
class Peak:
    """One lane's peak in a step."""

    family: str
    schedule: str
    recompute: str
    lane: int
    predicted_bytes: int
    measured_bytes: int

    @property
    def cell(self) -> str:
        """What the peak is of, in words."""
        return f"{self.family} {self.schedule} recompute={self.recompute} lane {self.lane}"

    @property
    def error(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted_bytes / self.measured_bytes - 1


def mean_of(output: Any, target: Any = None) -> Tensor:
    """Return the loss that a plan assumes."""
    return output.mean()


def split(family: Family, *, schedule: str, recompute: str, stages: int, chunks: int) -> PipelinedModule:
    """Return a family's pipe."""
    torch.manual_seed(0)
    return autosplit(
        family.make(), devices=["cpu"] * stages, chunks=chunks, schedule=schedule, recompute=recompute, lanes="inline"
    )


@contextlib.contextmanager
def own_memory() -> Iterator[None]:
    """Give the lanes that are made in here memory of their own."""
    numbers, lane = itertools.count(), recordings.lane
    recordings.lane = lambda device: OwnMemory(next(numbers))  # type: ignore[assignment]
    try:
        yield
    finally:
        recordings.lane = lane


@contextlib.contextmanager
def marked(pipe: PipelinedModule) -> Iterator[None]:
    """Mark in the profiler's events which lane an action belongs to.

    At the step's end gradients are handed over as they are; only those of a tied parameter's uses on several lanes are
    added up there, into memory of the lane where the parameter lies.
    """
    lanes, act, hand_over = pipe._core.recordings.lanes, Cells.act, train_cells.TrainCells.hand_over

    def acting(cells: Cells, action: Any) -> None:
        OwnMemory.at_work = True
        with record_function(f"{_MARK}{lanes[action.stage].number}"):
            act(cells, action)
        OwnMemory.at_work = False

    def handing(cells: Any) -> None:
        with record_function(f"{_MARK}{_TIED_LANE}"):
            hand_over(cells)

    Cells.act, train_cells.TrainCells.hand_over = acting, handing  # type: ignore[method-assign]
    try:
        yield
    finally:
        Cells.act, train_cells.TrainCells.hand_over = act, hand_over  # type: ignore[method-assign]


def measured(pipe: PipelinedModule, batch: tuple[Tensor, ...]) -> list[int]:
    """Return each lane's most bytes above parameters and optimizer state, over one step in the steady state.

    The pipe must not have been called before.
    """
    with own_memory():
        pipe.train_step(*batch, loss_fn=mean_of, loss_reduction="mean")
    optimizers = own_optimizers(pipe)
    for _ in range(2):
        pipe.zero_grad(set_to_none=True)
        pipe.train_step(*batch, loss_fn=mean_of, loss_reduction="mean")
        for optimizer in optimizers.values():
            optimizer.step()
    pipe.zero_grad(set_to_none=True)
    gc.collect()
    with marked(pipe), Allocations() as run:
        pipe.train_step(*batch, loss_fn=mean_of, loss_reduction="mean")
        for lane, optimizer in optimizers.items():
            with record_function(f"{_MARK}{lane}"):
                optimizer.step()
    pipe.zero_grad(set_to_none=True)
    owner = owners(run)
    live, most = {}, {}
    lane_of: dict[int, int | None] = {}
    for place, (block, size) in enumerate(run.changes):
        lane = lane_of.setdefault(block, owner[place])
        if lane is not None:
            live[lane] = live.get(lane, 0) + size
            most[lane] = max(most.get(lane, 0), live[lane])
    return [most.get(lane, 0) for lane in range(max(most) + 1)]


def own_optimizers(pipe: PipelinedModule) -> dict[int, torch.optim.Adam]:
    """Return an optimizer for each lane, of the parameters that lie there; steps change nothing.

    Tied parameters are no stage's own: they lie on the first lane.
    """
    assert pipe.plan is not None
    lane_of = {id(p): s.lane for s, m in zip(pipe.plan.stages, pipe.stages, strict=True) for p in m.parameters()}
    own: dict[int, list[nn.Parameter]] = {}
    for parameter in pipe.parameters():
        if parameter.requires_grad:
            own.setdefault(lane_of.get(id(parameter), _TIED_LANE), []).append(parameter)
    return {lane: torch.optim.Adam(parameters, lr=0.0) for lane, parameters in own.items() if parameters}


def owners(run: Allocations) -> list[int | None]:
    """Return, for each of the allocator's events, the innermost lane that was at work; None between actions."""
    found: list[int | None] = [None] * len(run.changes)
    marks = [operation for operation in run.operations if operation.name.startswith(_MARK)]
    for mark in sorted(marks, key=lambda operation: operation.depth):
        found[mark.first : mark.last] = [int(mark.name.removeprefix(_MARK))] * (mark.last - mark.first)
    return found


def lane_bytes(pipe: PipelinedModule, batch: tuple[Tensor, ...]) -> list[tuple[int, int]]:
    """Return (predicted, measured) peak bytes of every lane; the pipe must not have been called before."""
    own = measured(pipe, batch)
    assert pipe.plan is not None
    found = []
    for number, most in enumerate(own):
        held = [stage.memory for stage in pipe.plan.stages if stage.lane == number]
        static = sum(m.parameter_bytes + m.buffer_bytes + m.optimizer_bytes for m in held)
        found.append((max(m.peak_bytes for m in held), static + most))
    return found


def peaks(family: Family, *, schedule: str, recompute: str, stages: int, chunks: int) -> list[Peak]:
    """Return what the plan says and what the allocator did, lane by lane."""
    pipe = split(family, schedule=schedule, recompute=recompute, stages=stages, chunks=chunks)
    return [
        Peak(family.name, schedule, recompute, number, *both)
        for number, both in enumerate(lane_bytes(pipe, family.batch(chunks)))
    ]


def main(argv: Sequence[str] | None = None) -> None:
    """Print a line per lane and what is asked, and write all figures as JSON."""
    parser = pairs.parser(__doc__)
    parser.add_argument("--family", nargs="*", default=["gpt2", "llama", "resnet50", "unet"])
    parser.add_argument("--schedule", nargs="*", default=["1f1b"])
    parser.add_argument("--recompute", nargs="*", default=["never", "always", "except_last", "block"])
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--chunks", type=int, default=8)
    chosen = parser.parse_args(argv)
    torch.set_num_threads(1)
    found: list[Peak] = []
    for name, schedule, recompute in itertools.product(chosen.family, chosen.schedule, chosen.recompute):
        own = peaks(
            families()[name], schedule=schedule, recompute=recompute, stages=chosen.stages, chunks=chosen.chunks
        )
        for peak in own:
            print(
                f"{name:10} {schedule:12} {recompute:12} lane {peak.lane}  "
                f"{peak.predicted_bytes / 2**20:9.2f} MiB predicted {peak.measured_bytes / 2**20:9.2f} MiB measured "
                f"{peak.error:+.2%}",
                flush=True,
            )
        found += own
    checks = [pairs.at_most(p.cell, ASKED, abs(p.error)) for p in found]
    pairs.conclude(
        chosen.json,
        benchmark="memory_pipe",
        settings={"stages": chosen.stages, "chunks": chosen.chunks, "rows": "1 per microbatch", "threads": 1},
        machine=pairs.facts(),
        figures=[asdict(p) | {"error": p.error} for p in found],
        checks=checks,
    )


if __name__ == "__main__":
    main()
