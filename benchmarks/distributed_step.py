"""What `benchmarks.distributed` reads in every rank: a step by torch's engine and by ours, and the cells alone.

rank 0   barrier │ step ......... │ gather     barrier │ step ... │ gather      the slowest rank's seconds are the
rank 1   barrier │    step ...... │ gather     barrier │ step ..  │ gather      step's
                   contender A                   contender B
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import ScheduleInterleavedZeroBubble

from autosplit import autosplit
from benchmarks import pairs
from benchmarks.peers_models import CHUNKS, Made, Stage, Subject

EMPTY = "empty"
SCHEDULES = ("1f1b", "gpipe", "zb_h1")
TOLERANCE = 1e-4
"""By which share of it losses in float32 may differ."""
_LR = 1e-3


class Torch:
    """This rank's stage under one of torch's schedules; ``cut`` has the number of the first part of every stage.

    A step begins without gradients; it is read, and then ``optimizer`` updates what it trains.
    """

    def __init__(self, made: Made, cut: Sequence[int], schedule: str) -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        module = stage_of(made, cut, rank)
        stage = PipelineStage(module, rank, size, torch.device("cpu"))
        loss = made.subject.loss
        self.schedule: Any
        if schedule == "zb_h1":
            self.schedule = ScheduleInterleavedZeroBubble([stage], CHUNKS, loss_fn=loss)
        else:
            self.schedule = (ScheduleGPipe if schedule == "gpipe" else Schedule1F1B)(stage, CHUNKS, loss_fn=loss)
        self.given = (made.batch,) if rank == 0 else ()
        self.target = made.target if rank == size - 1 else None
        self.losses: list[Tensor] = []
        self.optimizer = torch.optim.SGD(module.parameters(), lr=_LR)

    def step(self) -> None:
        """Run a step."""
        self.optimizer.zero_grad()
        self.schedule.step(*self.given, target=self.target, losses=self.losses, return_outputs=False)

    def loss(self) -> float | None:
        """Return the last step's loss on the last rank, None elsewhere."""
        return torch.stack(self.losses).mean().item() if self.losses else None


class Ours:
    """This rank's pipe, likewise."""

    def __init__(self, made: Made, schedule: str) -> None:
        self.made = made
        self.pipe: Any = autosplit(
            made.whole(), devices="torchrun", chunks=CHUNKS, sample=made.batch, schedule=schedule
        )
        self.optimizer = torch.optim.SGD(self.pipe.parameters(), lr=_LR)

    def step(self) -> None:
        """Run a step."""
        self.optimizer.zero_grad()
        loss_fn = self.made.subject.loss
        self.last = self.pipe.train_step(
            self.made.batch, target=self.made.target, loss_fn=loss_fn, loss_reduction="mean"
        )

    def loss(self) -> float:
        """Return the last step's loss."""
        return self.last.item()


class Scale(nn.Module):
    """An empty cell: what it passes on, times a number."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def empty(message_bytes: int) -> Subject:
    """Return a chain of empty cells, one per rank, that send so many bytes per microbatch."""
    shape = (CHUNKS, message_bytes // 4)
    return Subject(
        name=EMPTY,
        shape=f"a multiplication per rank, messages of {message_bytes} bytes",
        parts=lambda: [Scale() for _ in range(dist.get_world_size())],
        cut=1,
        batch=lambda: torch.randn(shape),
        target=lambda: torch.randn(shape),
        loss=F.mse_loss,
    )


def cuts(parts: int, ranks: int) -> list[tuple[int, ...]]:
    """Return every cut of so many parts into a stage per rank, as the first part of each stage."""
    return [(0, *inner) for inner in itertools.combinations(range(1, parts), ranks - 1)]


def stage_of(made: Made, cut: Sequence[int], rank: int) -> Stage:
    """Return the parts of one stage."""
    ends = (*cut[1:], len(made.parts))
    return Stage(made.parts[cut[rank] : ends[rank]], last=rank == len(cut) - 1)


def everywhere(value: Any) -> list[Any]:
    """Return what every rank has, by rank."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def read(
    contenders: Mapping[str, Torch | Ours], *, rounds: int, calls: int = 1, train: bool = True
) -> dict[str, list[pairs.Reading]]:
    """Read all contenders in rounds, after one that is not counted; ``train`` updates parameters between steps.

    Each reading has the most seconds of a rank, on each clock. Raises ValueError where losses of a round differ.
    """
    found: dict[str, list[pairs.Reading]] = {name: [] for name in contenders}
    for turn in range(rounds + 1):
        losses = {}
        for name in pairs.rotated(list(contenders), turn):
            contender = contenders[name]
            dist.barrier()
            reading = pairs.read(contender.step, calls=calls if turn else 1)
            every = everywhere((reading.wall_s, reading.process_s, reading.thread_s, contender.loss()))
            *clocks, ends = zip(*every, strict=True)
            losses[name] = ends[-1]
            if turn:
                found[name].append(pairs.Reading(*map(max, clocks)))
            if train:
                contender.optimizer.step()
        low, high = min(losses.values()), max(losses.values())
        if not high - low <= TOLERANCE * abs(low):
            raise ValueError(f"the losses of round {turn} differ: {losses}")
    return found


def best_cut(subject: Subject, schedule: str, *, rounds: int) -> tuple[tuple[int, ...], dict[str, float]]:
    """Time torch's step at every cut; return the fastest one, and the median seconds of all."""
    made = subject.make()
    every = {str(cut): cut for cut in cuts(len(made.parts), dist.get_world_size())}
    if len(every) == 1:
        return next(iter(every.values())), {}
    readings = read({name: Torch(made, cut, schedule) for name, cut in every.items()}, rounds=rounds, train=False)
    seconds = {name: statistics.median(reading.wall_s for reading in own) for name, own in readings.items()}
    return every[min(seconds, key=seconds.__getitem__)], seconds


@dataclass(frozen=True)
class Cells:
    """A microbatch's seconds by stage, each measured alone, and the CPU seconds of all of a step's cells.

    ``message_bytes`` is what the widest boundary sends per microbatch.
    """

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    process_s: tuple[float, ...]
    message_bytes: int


def cells_of(made: Made, cut: Sequence[int], *, repeats: int) -> Cells:
    """Run this rank's cells one after the other while the other ranks run theirs; the medians of the repeats."""
    rank, last = dist.get_rank(), dist.get_rank() == len(cut) - 1
    own, inputs = stage_of(made, cut, rank), _inputs(made, cut, rank)
    targets = made.target.tensor_split(CHUNKS)
    found: list[tuple[float, float, float]] = []
    sent = 0
    for _ in range(repeats + 1):
        dist.barrier()
        forward_s = backward_s = 0.0
        process_s = time.process_time()
        for values, target in zip(inputs, targets, strict=True):
            begun = time.perf_counter()
            outputs = _tuple(own(*values))
            if last:
                outputs = (made.subject.loss(*outputs, target),)
            between = time.perf_counter()
            torch.autograd.backward(outputs, [torch.ones_like(value) for value in outputs])
            forward_s, backward_s = forward_s + between - begun, backward_s + time.perf_counter() - between
            sent = 0 if last else sum(value.numel() * value.element_size() for value in outputs)
        found.append((forward_s / CHUNKS, backward_s / CHUNKS, time.process_time() - process_s))
        own.zero_grad()
    medians = [statistics.median(column) for column in zip(*found[1:], strict=True)]
    forward, backward, process = zip(*everywhere(medians), strict=True)
    return Cells(forward, backward, process, max(everywhere(sent)))


def _inputs(made: Made, cut: Sequence[int], rank: int) -> list[tuple[Tensor, ...]]:
    """Return what every microbatch brings to a stage, with gradients wanted where another stage made it."""
    found = []
    for x in made.batch.tensor_split(CHUNKS):
        values: tuple[Tensor, ...] = (x,)
        with torch.no_grad():
            for earlier in range(rank):
                values = _tuple(stage_of(made, cut, earlier)(*values))
        found.append(tuple(value.requires_grad_(rank > 0) for value in values))
    return found


def _tuple(value: Any) -> tuple[Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)
