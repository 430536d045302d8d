"""The contenders that run in this process: ours, torchgpipe, and plain loops; and the bound, from stages run alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from autosplit import autosplit
from autosplit.planning.timeline import StagesAlone
from autosplit.schedule.catalog import build
from benchmarks import pairs
from benchmarks.family_nets import Down, Up
from benchmarks.peers_models import CHUNKS, Made

DEVICES = ["cpu", "cpu"]


@dataclass
class Local:
    """A training step in this process, on one or two intra-op threads of the caller's."""

    run: Callable[[], Any]
    parameters: Sequence[nn.Parameter]
    threads: int = 1

    def read(self) -> pairs.Reading:
        """Run a step that begins without gradients and return its seconds."""
        for parameter in self.parameters:
            parameter.grad = None
        torch.set_num_threads(self.threads)
        try:
            return pairs.read(self.run)
        finally:
            torch.set_num_threads(1)

    def gradients(self) -> list[Tensor]:
        """Return the gradients of the last step."""
        return [parameter.grad for parameter in self.parameters if parameter.grad is not None]

    def close(self) -> None:
        """Let go of what the step holds; threads of its own end with it."""
        self.run = lambda: None


def plain(made: Made, *, threads: int) -> Local:
    """Return a step of the model as it is."""
    model, loss = made.whole(), made.subject.loss
    return Local(lambda: loss(model(made.batch), made.target).backward(), made.parameters(), threads)


def microbatched(made: Made) -> Local:
    """Return a loop over the microbatches on one thread, with a backward for each."""
    model, loss = made.whole(), made.subject.loss

    def run() -> None:
        for x, y in zip(made.batch.tensor_split(CHUNKS), made.target.tensor_split(CHUNKS), strict=True):
            (loss(model(x), y) / CHUNKS).backward()

    return Local(run, made.parameters())


def pipe_of(made: Made, schedule: str) -> Any:
    """Return our pipe on two lanes, cut where the subject says."""
    model = made.whole()
    given = {"devices": DEVICES, "chunks": CHUNKS, "sample": made.batch, "schedule": schedule, "lanes": "threads"}
    found = autosplit(model, **given).plan
    assert found is not None
    nodes: tuple[list[str], list[str]] = ([], [])
    for name in found.stage_of():
        nodes[int(name.split("#")[0].split(".")[1]) >= made.subject.cut].append(name)
    stages = [stage.model_copy(update={"nodes": tuple(own)}) for stage, own in zip(found.stages, nodes, strict=True)]
    return autosplit(model, **given, plan=found.model_copy(update={"stages": tuple(stages)}))


def ours(made: Made, schedule: str) -> Local:
    """Return our step on two lanes."""
    return _steps_of(made, pipe_of(made, schedule))


def default(made: Made) -> Local:
    """Return our step on two lanes with the cut and the schedule that are the default."""
    return _steps_of(made, autosplit(made.whole(), devices=DEVICES, chunks=CHUNKS, sample=made.batch, lanes="threads"))


def _steps_of(made: Made, pipe: Any) -> Local:
    step = lambda: pipe.train_step(  # noqa: E731
        made.batch, target=made.target, loss_fn=made.subject.loss, loss_reduction="mean"
    )
    return Local(step, made.parameters())


@dataclass(frozen=True)
class Cells:
    """The actions of a step, each run alone: with backwards in one piece, and in two."""

    whole: StagesAlone
    split: StagesAlone

    @property
    def split_cost(self) -> float:
        """The input and the weight part of all backwards over the backwards in one piece."""
        parts = sum(sum(self.split.seconds.get(kind, ())) for kind in ("I", "W", "B"))
        return parts / sum(self.whole.seconds["B"])

    def step_s(self, schedule: str) -> float:
        """Return the length of a step of these cells, two lanes, in a schedule; transfers take no time."""
        alone = self.split if schedule == "zb_h1" else self.whole
        actions = build(schedule, stages=alone.schedule.stages, microbatches=CHUNKS)
        return alone.step(actions, link=lambda *_: 0.0).step_s


class Alone:
    """Measures the cells of one model."""

    def __init__(self, made: Made) -> None:
        self.made = made
        self.pipes = [pipe_of(made, schedule) for schedule in ("1f1b", "zb_h1")]

    def measure(self) -> Cells:
        """Run every cell of a step once, one after the other, with backwards in one piece and then in two."""
        given: dict[str, Any] = {"target": self.made.target, "loss_fn": self.made.subject.loss}
        return Cells(*(pipe.profile_stages(self.made.batch, **given, repeats=1) for pipe in self.pipes))


def torchgpipe(made: Made, *, threads: int) -> Local:
    """Return torchgpipe's step; it has one thread for each distinct device, and there is one CPU."""
    peer = pairs.torchgpipe()
    assert peer is not None
    cut = made.subject.cut
    model = nn.Sequential(*_skippable(made.parts))
    balance = [cut, len(made.parts) - cut]
    gpipe = peer.GPipe(model, balance, devices=DEVICES, chunks=CHUNKS, checkpoint="never")
    loss = made.subject.loss
    return Local(lambda: loss(gpipe(made.batch), made.target).backward(), made.parameters(), threads)


def _skippable(parts: Sequence[nn.Module]) -> list[nn.Module]:
    """Return parts whose skips go torchgpipe's own way: stashed on the way down, popped on the way up."""
    if not any(isinstance(part, Down) for part in parts):
        return list(parts)
    from torchgpipe.skip import Namespace, pop, skippable, stash

    @skippable(stash=["skip"])
    class Keep(nn.Module):
        def __init__(self, part: nn.Module) -> None:
            super().__init__()
            self.part = part

        def forward(self, x: Tensor) -> Any:
            result, skip = self.part(x)
            yield stash("skip", skip)
            return result

    @skippable(pop=["skip"])
    class Join(nn.Module):
        def __init__(self, part: nn.Module) -> None:
            super().__init__()
            self.part = part

        def forward(self, x: Tensor) -> Any:
            skip = yield pop("skip")
            return self.part(x, skip)[0]

    class Alone(nn.Module):
        def __init__(self, part: nn.Module) -> None:
            super().__init__()
            self.part = part

        def forward(self, x: Tensor) -> Tensor:
            result = self.part(x)
            return result[0] if isinstance(result, tuple) else result

    kept: list[Any] = []
    found: list[nn.Module] = []
    for part in parts:
        if isinstance(part, Down) and part.keeps:
            kept.append(Namespace())
            found.append(Keep(part).isolate(kept[-1]))
        elif isinstance(part, Up):
            found.append(Join(part).isolate(kept.pop()))
        else:
            found.append(Alone(part))
    return found
