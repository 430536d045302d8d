"""Hand-written models, each built around one way of mixing rows or of placing the batch."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.zoo.case import Case, Shape, images
from benchmarks.zoo.traps import ALL, LONG, WIDTH, Three, rows_of_width, sequences
from tests.equivalence.equality import Batch


class Expert(nn.Module):
    """One expert of a mixture."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


class Mixture(nn.Module):
    """Top-2 routing with an eager loop over the experts, as transformers' older models had it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4, bias=False)
        self.experts = nn.ModuleList(Expert() for _ in range(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        flat = x.reshape(-1, WIDTH)
        logits = self.gate(flat)
        weights, chosen = logits.softmax(-1).topk(2, dim=-1)
        out = torch.zeros_like(flat)
        for index, expert in enumerate(self.experts):
            rows, slot = torch.where(chosen == index)
            if rows.numel():
                out.index_add_(0, rows, expert(flat[rows]) * weights[rows, slot, None])
        return out.reshape(x.shape), logits


class MoeWithAuxLoss(nn.Module):
    """Six mixture layers and the load-balancing loss over all tokens of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 8)
        self.layers = nn.ModuleList(Mixture() for _ in range(6))

    def through(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the last hidden state and all router logits."""
        hidden, logits = self.first(x), []
        for layer in self.layers:
            mixed, chosen = layer(hidden)
            hidden = hidden + mixed
            logits.append(chosen)
        return hidden, torch.cat(logits)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden, logits = self.through(x)
        shares = logits.softmax(-1)
        routed = F.one_hot(shares.argmax(-1), 4).to(shares.dtype)
        return {"logits": self.head(hidden), "aux_loss": 4 * (routed.mean(0) * shares.mean(0)).sum()}


class MoeDense(MoeWithAuxLoss):
    """The same without the loss: only the routing."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return self.head(self.through(x)[0])


class TimeMajorLoop(nn.Module):
    """A recurrent cell over the time dimension, which comes first."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(WIDTH, WIDTH), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = x.new_zeros(x.shape[1], WIDTH)
        steps = []
        for step in x:
            hidden = self.cell(step, hidden)
            steps.append(hidden)
        return self.head(torch.stack(steps))


class RowLoop(Three):
    """Goes through the batch row by row in Python."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.a(x))
        return self.c(torch.stack([self.b(row) for row in hidden]))


class NumberedRowLoop(Three):
    """Goes through the batch row by row and uses the row's number."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.a(x))
        return self.c(torch.stack([self.b(row) * (1 + 0.1 * index) for index, row in enumerate(hidden)]))


class MultiheadFold(nn.Module):
    """Attention with the heads folded into the batch, batch times heads first, and a relative bias."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.bias = nn.Embedding(64, 4)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        parts = self.qkv(x).reshape(rows, length, 3, 4, 4).permute(2, 0, 3, 1, 4).reshape(3, rows * 4, length, 4)
        query, key, value = parts
        steps = torch.arange(length)
        bias = self.bias((steps[:, None] - steps[None]).clamp(-31, 31) + 31).permute(2, 0, 1)
        scores = torch.baddbmm(bias.repeat(rows, 1, 1), query, key.transpose(1, 2)).softmax(-1)
        mixed = (scores @ value).reshape(rows, 4, length, 4).transpose(1, 2).reshape(rows, length, WIDTH)
        return self.out(mixed)


class BatchNormBeforeTokens(nn.Module):
    """A convolutional stem with batch norm, whose gradient comes back from tokens: transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 4, 3, padding=1)
        self.norm, self.scale = nn.BatchNorm2d(4), nn.Parameter(torch.linspace(0.5, 2.0, 4))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.second(torch.relu(self.first(x))))
        return torch.tanh(hidden.flatten(2).transpose(1, 2) * self.scale)


class DeepLstm(nn.Module):
    """Eight LSTM layers in one module: a leaf that hides the model."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=8, batch_first=True)
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0])


def _time_major(shape: Shape) -> Batch:
    return Batch((torch.randn(shape.length, shape.rows, WIDTH),))


_TABLE: tuple[tuple[str, Callable[[], nn.Module], Callable[[Shape], Batch], tuple[str, ...]], ...] = (
    ("moe_aux_loss", MoeWithAuxLoss, sequences, LONG),
    ("moe_routing", MoeDense, sequences, LONG),
    ("time_major_loop", TimeMajorLoop, _time_major, LONG),
    ("row_loop", RowLoop, rows_of_width, ALL),
    ("row_loop_numbered", NumberedRowLoop, rows_of_width, ALL),
    ("heads_in_batch", MultiheadFold, sequences, LONG),
    ("batch_norm_before_tokens", BatchNormBeforeTokens, images(4), ("eval", "rows")),
    ("deep_lstm", DeepLstm, sequences, LONG),
)
_BLOCKS = {"deep_lstm": 8}
_TOLD = {"time_major_loop": 1}


def cases() -> list[Case]:
    """Return the traps of this file."""
    return [
        Case(
            name, "traps", build, inputs, checks, _BLOCKS.get(name, 0), lambda model: ("head",), "trap", _TOLD.get(name)
        )
        for name, build, inputs, checks in _TABLE
    ]
