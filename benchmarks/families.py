"""The eight families that memory and time are predicted for: small, but built as the real ones are.

    family = families()["gpt2"]
    model, inputs = family.make(), family.batch(family.rows)
    family.loss(model(*inputs), family.target(family.rows)).backward()

A model is a chain of parts (``family.parts``): a stage is some of them in a row. ``family.blocks`` lists the repeated
blocks, which recompute one at a time. Models hold fp32; bf16 is ``torch.autocast`` around forward and loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import family_nets, family_transformers
from benchmarks.family_nets import Bottleneck, DoubleConvolution, Recurrent
from benchmarks.family_transformers import Chain, ExpertBlock, LlamaBlock, PostNormBlock, PreNormBlock

_BLOCKS = (Bottleneck, DoubleConvolution, Recurrent, ExpertBlock, LlamaBlock, PostNormBlock, PreNormBlock)


@dataclass(frozen=True)
class Family:
    """One model, what goes in, and what its results are compared with.

    Attributes:
        name: its key in :func:`families`.
        kind: "transformer", "convolution" or "recurrent".
        rows: batch rows with which a training step takes a second or two on one core.
        make: build the model, with parameters that depend on the random state.
        batch: inputs for the model's forward, which returns logits.
        target: classes that belong to a batch of as many rows.
        loss: the mean cross entropy of logits against a target.
    """

    name: str
    kind: str
    rows: int
    make: Callable[[], Chain]
    batch: Callable[[int], tuple[Tensor, ...]]
    target: Callable[[int], Tensor]
    loss: Callable[[Tensor, Tensor], Tensor]

    def parts(self, model: nn.Module) -> list[nn.Module]:
        """Return the parts of the chain, in order."""
        assert isinstance(model, Chain)
        return list(model.parts)

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        """Return the repeated blocks, in order."""
        return [module for module in model.modules() if isinstance(module, _BLOCKS)]


def families() -> Mapping[str, Family]:
    """Return the families by name."""
    found = (
        _text("gpt2", "transformer", family_transformers.gpt2, words=16384, length=256, rows=2),
        _text("llama", "transformer", family_transformers.llama, words=8192, length=256, rows=2),
        _text("bert", "transformer", family_transformers.bert, words=8192, length=128, rows=8, segments=True),
        _image("vit", "transformer", family_transformers.vit, size=128, rows=4),
        _text("moe", "transformer", family_transformers.mixture, words=8192, length=256, rows=4),
        _image("resnet50", "convolution", family_nets.resnet50, size=128, rows=4),
        _unet(size=128, rows=2),
        _text("lstm", "recurrent", family_nets.lstm, words=8192, length=128, rows=8),
    )
    return {family.name: family for family in found}


def _text(
    name: str, kind: str, make: Callable[[], Chain], *, words: int, length: int, rows: int, segments: bool = False
) -> Family:
    def tokens(count: int) -> Tensor:
        return torch.randint(0, words, (count, length))

    def batch(count: int) -> tuple[Tensor, ...]:
        return (tokens(count), torch.randint(0, 2, (count, length))) if segments else (tokens(count),)

    return Family(name, kind, rows, make, batch, tokens, _loss_by_last)


def _image(name: str, kind: str, make: Callable[[], Chain], *, size: int, rows: int) -> Family:
    return Family(
        name=name,
        kind=kind,
        rows=rows,
        make=make,
        batch=lambda count: (torch.randn(count, 3, size, size),),
        target=lambda count: torch.randint(0, 100, (count,)),
        loss=F.cross_entropy,
    )


def _unet(*, size: int, rows: int) -> Family:
    return Family(
        name="unet",
        kind="convolution",
        rows=rows,
        make=family_nets.unet,
        batch=lambda count: (torch.randn(count, 3, size, size),),
        target=lambda count: torch.randint(0, 21, (count, size, size)),
        loss=F.cross_entropy,
    )


def _loss_by_last(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())
