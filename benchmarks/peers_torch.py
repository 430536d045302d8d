"""torch.distributed.pipelining as a contender: a process with one intra-op thread for each stage, two over gloo here.

    this process     "1f1b" ──┬──► rank 0   first stage ─┐ gloo
                              └──► rank 1   last stage  ─┘        seconds of the slower one ──► reading

The stages are written by hand (``PipelineStage``), so that the cut is the others'; both schedules use the same two
processes, which sleep while others are read.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from benchmarks import pairs
from benchmarks.peers_models import CHUNKS, subjects

SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
_WORLD = 2
_JOIN_S = 20.0
_TIMEOUT_S = 120.0
_GRADIENTS, _STOP = "gradients", "stop"


class Ranks:
    """The processes that run a subject; each makes it for itself."""

    def __init__(self, subject: str) -> None:
        context = processes.get_context("spawn")
        self.folder = tempfile.TemporaryDirectory()
        self.links: list[Connection] = []
        self.own: list[Any] = []
        store = str(Path(self.folder.name) / "store")
        for rank in range(_WORLD):
            here, there = context.Pipe()
            self.own.append(context.Process(target=_work, args=(rank, there, subject, store), daemon=True))
            self.links.append(here)
            self.own[-1].start()
            there.close()

    def ask(self, what: str) -> list[Any]:
        """Have all ranks do something and return what each answers; raises RuntimeError when one cannot."""
        for link in self.links:
            link.send(what)
        answers = []
        for rank, link in enumerate(self.links):
            if not link.poll(_TIMEOUT_S):
                raise RuntimeError(f"rank {rank} does not answer {what!r} within {_TIMEOUT_S:g} s")
            try:
                answers.append(link.recv())
            except EOFError:
                raise RuntimeError(f"rank {rank} died") from None
        failed = [answer for answer in answers if isinstance(answer, str)]
        if failed:
            raise RuntimeError("; ".join(failed))
        return answers

    def close(self) -> None:
        """End all processes; they have one deadline together."""
        for link in self.links:
            with contextlib.suppress(OSError):  # it may have died
                link.send(_STOP)
        end_s = time.monotonic() + _JOIN_S
        for process in self.own:
            process.join(max(0.0, end_s - time.monotonic()))
            process.kill()
        self.folder.cleanup()


@dataclass
class Distributed:
    """One schedule on the ranks, as a contender."""

    ranks: Ranks
    schedule: str

    def read(self) -> pairs.Reading:
        """Run a step that begins without gradients; the slowest rank's seconds, and all ranks' CPU seconds."""
        answers = self.ranks.ask(self.schedule)
        walls, cpus = zip(*answers, strict=True)
        return pairs.Reading(wall_s=max(walls), process_s=sum(cpus), thread_s=0.0)

    def gradients(self) -> list[Tensor]:
        """Return the gradients of the last step, first stage first."""
        return [torch.from_numpy(gradient) for own in self.ranks.ask(_GRADIENTS) for gradient in own]

    def close(self) -> None:
        """Leave the ranks alone: the other schedule may still want them."""


def _work(rank: int, link: Connection, subject: str, store: str) -> None:
    """Answer what the benchmark asks until it says stop."""
    torch.set_num_threads(1)
    try:
        timeout = datetime.timedelta(seconds=_TIMEOUT_S)
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=_WORLD, timeout=timeout)
        made = subjects()[subject].make()
        module = made.stages()[rank]
        steps = {}
        for name, schedule in SCHEDULES.items():
            stage = PipelineStage(module, rank, _WORLD, torch.device("cpu"))
            steps[name] = schedule(stage, CHUNKS, loss_fn=made.subject.loss)
        given: Sequence[Tensor] = (made.batch,) if rank == 0 else ()
        options = {"target": made.target} if rank == _WORLD - 1 else {}
        while (asked := link.recv()) != _STOP:
            if asked == _GRADIENTS:
                link.send([p.grad.numpy() for p in module.parameters() if p.grad is not None])
                continue
            module.zero_grad(set_to_none=True)
            wall, cpu = time.perf_counter(), time.process_time()
            steps[asked].step(*given, **options, return_outputs=False)
            link.send((time.perf_counter() - wall, time.process_time() - cpu))
    except Exception as error:
        link.send(f"rank {rank}: {type(error).__name__}: {error}")
    os._exit(0)  # gloo's threads would wait for a rank that may be gone
