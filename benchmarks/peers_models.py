"""The models that runtimes are compared on: each a chain of parts, with the one cut that every runtime gets.

A part takes what the part before it returned; U-Net's hand their skips on behind the value itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import family_nets
from benchmarks.family_transformers import Embedding, PreNormBlock

CHUNKS = 8
MODELS = ("mlp", "conv", "transformer", "gpt2", "unet")


@dataclass(frozen=True)
class Subject:
    """One model, what goes in, and where it is cut.

    Attributes:
        name: its key in :func:`subjects`.
        shape: what it is, in words.
        parts: build the parts; their parameters depend on the random state.
        cut: how many parts are in the first of the two stages.
        batch: make the input.
        target: make what the loss compares with.
        loss: a mean over the rows, as every microbatch has as many of them.
    """

    name: str
    shape: str
    parts: Callable[[], list[nn.Module]]
    cut: int
    batch: Callable[[], Tensor]
    target: Callable[[], Tensor]
    loss: Callable[[Tensor, Tensor], Tensor]

    def make(self) -> Made:
        """Build the model and its batch; they are the same every time and in every process."""
        torch.manual_seed(0)
        parts = self.parts()
        return Made(self, parts, self.batch(), self.target())


@dataclass(frozen=True)
class Made:
    """A subject's parts and data."""

    subject: Subject
    parts: Sequence[nn.Module]
    batch: Tensor
    target: Tensor

    def stages(self) -> tuple[Stage, Stage]:
        """Return the two stages; the last one returns the model's output."""
        cut = self.subject.cut
        return Stage(self.parts[:cut], last=False), Stage(self.parts[cut:], last=True)

    def whole(self) -> Stage:
        """Return the model in one piece."""
        return Stage(self.parts, last=True)

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters in the order of the parts."""
        return [parameter for part in self.parts for parameter in part.parameters()]


class Stage(nn.Module):
    """Parts in a row; all but the last stage return whatever their last part does."""

    def __init__(self, parts: Sequence[nn.Module], *, last: bool) -> None:
        super().__init__()
        self.parts, self.last = nn.ModuleList(parts), last

    def forward(self, *state: Tensor) -> Tensor | tuple[Tensor, ...]:
        for part in self.parts:
            result = part(*state)
            state = result if isinstance(result, tuple) else (result,)
        return state[0] if self.last or len(state) == 1 else state


def _block(channels_in: int, channels_out: int) -> nn.Module:
    """Return U-Net's block without norms: two 3x3 convolutions with ReLU (Ronneberger et al. 2015; padded)."""
    first = nn.Conv2d(channels_in, channels_out, 3, padding=1)
    second = nn.Conv2d(channels_out, channels_out, 3, padding=1)
    return nn.Sequential(first, nn.ReLU(), second, nn.ReLU())


Down, Up = partial(family_nets.Down, block=_block), partial(family_nets.Up, block=_block)


def _mlp() -> list[nn.Module]:
    return [nn.Sequential(nn.Linear(1024, 1024), nn.ReLU()) for _ in range(8)]


def _convolutions() -> list[nn.Module]:
    return [nn.Sequential(nn.Conv2d(64, 64, 3, padding=1), nn.ReLU()) for _ in range(6)]


def _transformer() -> list[nn.Module]:
    return [nn.TransformerEncoderLayer(256, 8, 1024, dropout=0.0, batch_first=True) for _ in range(4)]


def _gpt2() -> list[nn.Module]:
    embedding = Embedding(8192, 768, 1024, norm=False, dropout=0.0)
    blocks = [PreNormBlock(768, 12, causal=True, dropout=0.0) for _ in range(3)]
    return [embedding, *blocks, nn.Sequential(nn.LayerNorm(768), nn.Linear(768, 8192, bias=False))]


def _unet() -> list[nn.Module]:
    widths = (16, 32, 64, 128)
    down = [Down(3 if not i else widths[i - 1], width, pool=i > 0) for i, width in enumerate(widths)]
    bottom = Down(widths[-1], 2 * widths[-1], pool=True, keeps=False)
    return [*down, bottom, *(Up(2 * width, width) for width in reversed(widths)), nn.Conv2d(widths[0], 21, 1)]


def _tiny() -> list[nn.Module]:
    down = [Down(2, 2, pool=False), Down(2, 4, pool=True, keeps=False)]
    return [*down, Up(4, 2), nn.Conv2d(2, 3, 1)]


def _words(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def subjects() -> Mapping[str, Subject]:
    """Return the subjects by name: those of :data:`MODELS`, and "tiny", which takes no time."""
    found = (
        Subject(
            name="tiny",
            shape="U-Net of 1 level and a bottom, 2 and 4 channels; 8 images of 4 x 4",
            parts=_tiny,
            cut=2,
            batch=lambda: torch.randn(8, 2, 4, 4),
            target=lambda: torch.randint(0, 3, (8, 4, 4)),
            loss=F.cross_entropy,
        ),
        Subject(
            name="mlp",
            shape="8 x (linear 1024 -> 1024, ReLU), 1024 rows",
            parts=_mlp,
            cut=4,
            batch=lambda: torch.randn(1024, 1024),
            target=lambda: torch.randn(1024, 1024),
            loss=F.mse_loss,
        ),
        Subject(
            name="conv",
            shape="6 x (3x3 convolution of 64 channels, ReLU), 32 images of 32 x 32",
            parts=_convolutions,
            cut=3,
            batch=lambda: torch.randn(32, 64, 32, 32),
            target=lambda: torch.randn(32, 64, 32, 32),
            loss=F.mse_loss,
        ),
        Subject(
            name="transformer",
            shape="4 x TransformerEncoderLayer(256, 8 heads, 1024), 32 rows of 64",
            parts=_transformer,
            cut=2,
            batch=lambda: torch.randn(32, 64, 256),
            target=lambda: torch.randn(32, 64, 256),
            loss=F.mse_loss,
        ),
        Subject(
            name="gpt2",
            shape="GPT-2-small's width and heads, 3 of its 12 blocks, 8192 of its 50257 words, untied; 8 rows of 96",
            parts=_gpt2,
            cut=3,
            batch=lambda: torch.randint(0, 8192, (8, 96)),
            target=lambda: torch.randint(0, 8192, (8, 96)),
            loss=_words,
        ),
        Subject(
            name="unet",
            shape="U-Net of 4 levels and a bottom, 16 to 256 channels, without norms; 8 images of 128 x 128",
            parts=_unet,
            cut=6,
            batch=lambda: torch.randn(8, 3, 128, 128),
            target=lambda: torch.randint(0, 21, (8, 128, 128)),
            loss=F.cross_entropy,
        ),
    )
    return {subject.name: subject for subject in found}
