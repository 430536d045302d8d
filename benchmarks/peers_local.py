"""The contenders that run in this process: ours, torchgpipe, and plain loops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from autosplit import autosplit
from benchmarks import pairs
from benchmarks.peers_models import CHUNKS, Down, Made, Up

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


def ours(made: Made, schedule: str) -> Local:
    """Return our step on two lanes, cut where the subject says."""
    model = made.whole()
    given = {"devices": DEVICES, "chunks": CHUNKS, "sample": made.batch, "schedule": schedule, "lanes": "threads"}
    found = autosplit(model, **given).plan
    assert found is not None
    nodes: tuple[list[str], list[str]] = ([], [])
    for name in found.stage_of():
        nodes[int(name.split("#")[0].split(".")[1]) >= made.subject.cut].append(name)
    stages = [stage.model_copy(update={"nodes": tuple(own)}) for stage, own in zip(found.stages, nodes, strict=True)]
    pipe = autosplit(model, **given, plan=found.model_copy(update={"stages": tuple(stages)}))
    loss = made.subject.loss
    step = lambda: pipe.train_step(made.batch, target=made.target, loss_fn=loss, loss_reduction="mean")  # noqa: E731
    return Local(step, made.parameters())


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
