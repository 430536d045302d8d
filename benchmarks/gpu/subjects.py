"""The models of the GPU benchmark: chains of parts, so that every peer gets the same model and the same cut."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autosplit import PipelinedModule, autosplit
from autosplit.planning.plan.plan import Plan
from benchmarks.family_transformers import Embedding, PreNormBlock
from benchmarks.peers_models import Stage
from benchmarks.published_models import amoebanet, unet
from examples.models import ResNet


@dataclass(frozen=True)
class Subject:
    """One model, what goes in, and how.

    Attributes:
        name: what it is called in figures and checks.
        shape: what it is, in words.
        parts: build the parts; each takes what the part before it returned.
        batch: inputs of so many rows, on the current default device.
        target: what the loss compares with.
        loss: a mean over the rows.
        rows: rows of one microbatch.
        amp: whether it runs under bf16 autocast.
    """

    name: str
    shape: str
    parts: Callable[[], list[nn.Module]]
    batch: Callable[[int], Tensor]
    target: Callable[[int], Tensor]
    loss: Callable[[Tensor, Tensor], Tensor]
    rows: int
    amp: bool = False

    def make(self, device: torch.device, *, chunks: int) -> Made:
        """Build the model and a batch of so many microbatches on a device, the same every time."""
        torch.manual_seed(0)
        with device:
            parts, rows = self.parts(), self.rows * chunks
            return Made(self, Stage(parts, last=True), self.batch(rows), self.target(rows), chunks)


@dataclass(frozen=True)
class Made:
    """A subject's model and data."""

    subject: Subject
    model: Stage
    batch: Tensor
    target: Tensor
    chunks: int

    @property
    def device(self) -> torch.device:
        """Where the model lies."""
        return self.batch.device

    def precision(self) -> AbstractContextManager[Any]:
        """Return the context that the model runs in."""
        if not self.subject.amp:
            return nullcontext()
        return torch.autocast(self.device.type, torch.bfloat16)

    def forget(self) -> None:
        """Let a step begin without gradients."""
        for parameter in self.model.parameters():
            parameter.grad = None

    def gradients(self) -> list[Tensor]:
        """Return the gradients of the last step."""
        return [p.grad.clone() for p in self.model.parameters() if p.grad is not None]

    def microbatches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the rows of each microbatch and their target."""
        return zip(self.batch.tensor_split(self.chunks), self.target.tensor_split(self.chunks), strict=True)

    # -- steps -------------------------------------------------------------------------------------------------------
    def plain(self) -> None:
        """Run a step of the model as it is on the whole batch."""
        self.forget()
        with self.precision():
            loss = self.subject.loss(self.model(self.batch), self.target)
        loss.backward()

    def loop(self) -> None:
        """Run a plain loop over the microbatches, a backward for each."""
        self.forget()
        for x, y in self.microbatches():
            with self.precision():
                loss = self.subject.loss(self.model(x), y) / self.chunks
            loss.backward()

    def pipe(self, devices: Sequence[Any], *, plan: Plan | None = None, **settings: Any) -> PipelinedModule:
        """Return the model's pipe; a plan is followed."""
        with self.precision():
            return autosplit(self.model, devices=devices, chunks=self.chunks, sample=self.batch, plan=plan, **settings)

    def step(self, pipe: PipelinedModule) -> None:
        """Run a pipe's training step."""
        self.forget()
        with self.precision():
            pipe.train_step(self.batch, target=self.target, loss_fn=self.subject.loss)

    def call(self, pipe: Callable[[Tensor], Tensor]) -> None:
        """Call a pipe, ours or a peer's, then the loss and its backward."""
        self.forget()
        with self.precision():
            loss = self.subject.loss(pipe(self.batch), self.target)
        loss.backward()

    def cut(self, plan: Plan, balance: Sequence[int]) -> Plan:
        """Return a plan with so many parts in each stage in place of its own cut."""
        ends = list(itertools.accumulate(balance))
        nodes: list[list[str]] = [[] for _ in balance]
        for name in plan.stage_of():
            part = int(name.split("#")[0].split(".")[1])
            nodes[next(stage for stage, end in enumerate(ends) if part < end)].append(name)
        stages = [stage.model_copy(update={"nodes": tuple(own)}) for stage, own in zip(plan.stages, nodes, strict=True)]
        return plan.model_copy(update={"stages": tuple(stages)})


def even(parts: int, stages: int) -> list[int]:
    """Return how many of so many parts each stage has when all have as many."""
    return [parts * (stage + 1) // stages - parts * stage // stages for stage in range(stages)]


# -- what they are made of ---------------------------------------------------------------------------------------------
def words(logits: Tensor, target: Tensor) -> Tensor:
    """Return the mean cross entropy over rows and positions."""
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def gpt2(
    name: str, shape: str, *, blocks: int, width: int, heads: int, vocabulary: int, length: int, rows: int, amp: bool
) -> Subject:
    """Return a GPT-2 whose head is not tied to its embedding, as peers need it."""

    def parts() -> list[nn.Module]:
        embedding = Embedding(vocabulary, width, length, norm=False, dropout=0.0)
        own = [PreNormBlock(width, heads, causal=True, dropout=0.0) for _ in range(blocks)]
        return [embedding, *own, nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)]

    def tokens(rows: int) -> Tensor:
        return torch.randint(0, vocabulary, (rows, length))

    return Subject(name, shape, parts, tokens, tokens, words, rows, amp)


def images(
    name: str, shape: str, parts: Callable[[], list[nn.Module]], *, size: int, rows: int, classes: int
) -> Subject:
    """Return a model of images; ``classes`` 0: a map of one number per pixel."""

    def batch(rows: int) -> Tensor:
        return torch.randn(rows, 3, size, size)

    def target(rows: int) -> Tensor:
        return torch.randint(0, classes, (rows,)) if classes else torch.rand(rows, 1, size, size)

    loss = F.cross_entropy if classes else F.binary_cross_entropy_with_logits
    return Subject(name, shape, parts, batch, target, loss, rows)


def mlp(name: str, shape: str, *, layers: int, width: int, rows: int) -> Subject:
    """Return linear layers with ReLU between them."""

    def parts() -> list[nn.Module]:
        return [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(layers)]

    def batch(rows: int) -> Tensor:
        return torch.randn(rows, width)

    return Subject(name, shape, parts, batch, batch, F.mse_loss, rows)


def blocks_of(model: ResNet) -> list[nn.Module]:
    """Return a ResNet as a chain of its blocks."""
    blocks = [block for layer in model.layers for block in layer]
    head = nn.Sequential(model.avgpool, nn.Flatten(), model.fc)
    return [nn.Sequential(model.conv1, model.bn1, model.relu, model.maxpool), *blocks, head]


# -- the subjects ------------------------------------------------------------------------------------------------------
def steps(*, small: bool) -> Mapping[str, Subject]:
    """Return what whole steps are timed on."""
    if small:
        tiny = {"blocks": 1, "width": 16, "heads": 2, "vocabulary": 32, "length": 8, "rows": 1}
        return {"gpt2": gpt2("gpt2", "a tiny GPT-2", **tiny, amp=True)}
    shape = "GPT-2-small, untied, 4 x 1024 tokens per microbatch, bf16 autocast"
    size = {"blocks": 12, "width": 768, "heads": 12, "vocabulary": 50257, "length": 1024, "rows": 4}
    conv = "ResNet-50, 32 images of 224 x 224 per microbatch"
    found = (
        gpt2("gpt2", shape, **size, amp=True),
        images("resnet50", conv, lambda: blocks_of(ResNet()), size=224, rows=32, classes=1000),
        mlp("mlp", "16 x (linear 2048 -> 2048, ReLU), 1024 rows per microbatch", layers=16, width=2048, rows=1024),
    )
    return {subject.name: subject for subject in found}


def published(*, small: bool) -> Mapping[str, Subject]:
    """Return the models of torchgpipe's speed benchmarks, and GPT-2 XL."""
    if small:
        net = images(
            "unet", "U-Net (1, 4)", lambda: _layers(unet(convolutions=1, channels=4)), size=64, rows=1, classes=0
        )
        cells = images("resnet", "ResNet of 4 blocks", lambda: blocks_of(_small_resnet()), size=32, rows=2, classes=7)
        one = images("amoebanet", "no AmoebaNet-D", lambda: blocks_of(_small_resnet()), size=32, rows=2, classes=7)
        tiny = {"blocks": 2, "width": 16, "heads": 2, "vocabulary": 32, "length": 8, "rows": 1, "amp": False}
        return {"unet": net, "amoebanet": one, "resnet": cells, "gpt2": gpt2("gpt2", "a tiny GPT-2", **tiny)}
    name = "GPT-2 XL, untied, 2 x 1024 tokens per microbatch, bf16 autocast"
    size = {"blocks": 48, "width": 1600, "heads": 25, "vocabulary": 50257, "length": 1024, "rows": 2}
    return {
        "unet": images(
            "unet",
            "U-Net (5, 64), 8 images of 192 x 192 per microbatch",
            lambda: _layers(unet(convolutions=5, channels=64)),
            size=192,
            rows=8,
            classes=0,
        ),
        "amoebanet": images(
            "amoebanet",
            "AmoebaNet-D (18, 256), 16 images of 224 x 224 per microbatch",
            lambda: _layers(amoebanet(layers=18, filters=256)),
            size=224,
            rows=16,
            classes=1000,
        ),
        "resnet": images(
            "resnet",
            "ResNet-101, 32 images of 224 x 224 per microbatch",
            lambda: blocks_of(ResNet(blocks=(3, 4, 23, 3))),
            size=224,
            rows=32,
            classes=1000,
        ),
        "gpt2": gpt2("gpt2", name, **size, amp=True),
    }


def _layers(model: nn.Module) -> list[nn.Module]:
    return list(model.layers)  # type: ignore[arg-type]


def _small_resnet() -> ResNet:
    return ResNet(num_classes=7, width=4, blocks=(1, 1, 1, 1))
