"""Small models with a name, each for one trait that breaks pipelines; ``CASES`` lists them with their inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from tests.equivalence.equality import Batch

WIDTH = 6


class Chain(nn.Sequential):
    """Linear layers in a row."""

    def __init__(self, depth: int = 4, width: int = WIDTH) -> None:
        super().__init__(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(depth)))


class ResidualChain(nn.Module):
    """Each block adds to what it got."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(4))

    def forward(self, value: Tensor) -> Tensor:
        for block in self.blocks:
            value = value + F.gelu(block(value))
        return value


class NestedSkips(nn.Module):
    """A U-Net without the convolutions: the first value meets the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.up = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH) for _ in range(3))

    def forward(self, value: Tensor) -> Tensor:
        skips = []
        for layer in self.down:
            value = torch.tanh(layer(value))
            skips.append(value)
        for layer in self.up:
            value = torch.tanh(layer(torch.cat([value, skips.pop()], dim=1)))
        return value


class Hub(nn.Module):
    """The first value is used by every later layer, several times."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))

    def forward(self, value: Tensor) -> Tensor:
        hub = self.first(value)
        for layer in self.layers:
            value = torch.tanh(layer(value * hub)) + hub * torch.sigmoid(hub)
        return value + hub


class Repeated(nn.Module):
    """One block applied three times between other layers."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.block, self.after = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, value: Tensor) -> Tensor:
        value = self.before(value)
        for _ in range(3):
            value = value + torch.tanh(self.block(value))
        return self.after(value)


class SharedWeight(nn.Module):
    """Two linear layers, at the two ends, with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.last.weight = self.first.weight

    def forward(self, value: Tensor) -> Tensor:
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(value)))))


class Recurrent(nn.Module):
    """An LSTM, batch first or time major; its state has the batch in dimension 1."""

    def __init__(self, *, batch_first: bool) -> None:
        super().__init__()
        self.batch_first = batch_first
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=batch_first)
        self.head = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, sequence: Tensor) -> Tensor:
        output, (hidden, _) = self.lstm(sequence if self.batch_first else sequence.transpose(0, 1))
        last = output[:, -1] if self.batch_first else output[-1]
        return self.head(torch.cat([last, hidden[0]], dim=-1))


class Attention(nn.Module):
    """Self-attention that also returns its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, sequence: Tensor) -> tuple[Tensor, Tensor]:
        value = self.embed(sequence)
        attended, weights = self.attention(value, value, value)
        return self.head(value + attended), weights


def encoder() -> nn.Module:
    """Return a transformer encoder without dropout."""
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)


class Parametrized(nn.Module):
    """Weights that are computed from other parameters at each use."""

    def __init__(self, parametrize: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(parametrize(nn.Linear(WIDTH, WIDTH)) for _ in range(3))

    def forward(self, value: Tensor) -> Tensor:
        for layer in self.layers:
            value = torch.tanh(layer(value))
        return value


class Teacher(nn.Module):
    """Half of the forward runs without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher, self.student, self.head = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, value: Tensor) -> Tensor:
        with torch.no_grad():
            target = torch.tanh(self.teacher(value))
        return self.head(torch.tanh(self.student(value)) * target)


class RoundThrough(torch.autograd.Function):
    """Rounds, and has a gradient of its own: twice the incoming one."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return (value * 8).round() / 8

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient


class OwnFunction(nn.Module):
    """Calls a custom autograd function in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, value: Tensor) -> Tensor:
        return self.after(RoundThrough.apply(torch.tanh(self.before(value))))


@dataclass
class Heads:
    """A dataclass output; ``aux`` may be None."""

    logits: Tensor
    hidden: Tensor
    aux: Tensor | None = None


class TwoHeads(nn.Module):
    """Two outputs in a container of the caller's choice."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.body, self.head = Chain(3), nn.Linear(WIDTH, 3)

    def forward(self, value: Tensor) -> Any:
        hidden = self.body(value)
        logits = self.head(hidden)
        match self.form:
            case "dict":
                return {"logits": logits, "hidden": hidden, "aux": None}
            case "dataclass":
                return Heads(logits, hidden)
        return [logits, (hidden, {"mean": hidden.mean()})]


class Keywords(nn.Module):
    """Keyword-only inputs: a tensor, an optional tensor, numbers and a flag."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(
        self, *, value: Tensor, bias: Tensor | None = None, scale: float = 1.0, power: int = 1, tanh: bool = True
    ) -> Tensor:
        value = self.first(value) * scale
        if bias is not None:
            value = value + bias
        return self.second(torch.tanh(value) if tanh else value).pow(power)


class Words(nn.Module):
    """Integer inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(11, WIDTH, padding_idx=0), nn.Linear(WIDTH, WIDTH)

    def forward(self, words: Tensor) -> Tensor:
        present = (words != 0).unsqueeze(-1)
        return self.head(torch.tanh(self.table(words) * present).sum(dim=1))


class Passthrough(nn.Module):
    """One input comes back as it is, another one is used and comes back."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Chain(3)

    def forward(self, value: Tensor, identity: Tensor, label: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.body(value) + identity, identity, label


class Unused(nn.Module):
    """A layer that nobody calls, and one whose result nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.uncalled, self.ignored, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, value: Tensor) -> Tensor:
        value = torch.tanh(self.used(value))
        self.ignored(value)
        return self.last(value)


class Squeezing(nn.Module):
    """``squeeze()`` drops the batch too when there is one row."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.body = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, WIDTH)

    def forward(self, value: Tensor) -> Tensor:
        gate = torch.sigmoid(self.gate(value).squeeze())
        return torch.tanh(self.body(value)) * gate.unsqueeze(-1).expand(-1, WIDTH)


@dataclass
class Prediction:
    """What a language model returns."""

    logits: Tensor
    loss: Tensor | None = None


class Block(nn.Module):
    """A transformer block with causal attention."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, value: Tensor) -> Tensor:
        rows, length, width = value.shape
        heads = self.qkv(self.norm1(value)).view(rows, length, 3, 2, width // 2).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        value = value + self.out(attended.transpose(1, 2).reshape(rows, length, width))
        return value + self.mlp(self.norm2(value))


class TinyGPT(nn.Module):
    """Embedding and head are one parameter; with labels it computes its own loss."""

    def __init__(self, width: int = 8, words: int = 13, depth: int = 3) -> None:
        super().__init__()
        self.table, self.positions = nn.Embedding(words, width), nn.Embedding(16, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Prediction:
        value = self.table(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            value = block(value)
        logits = self.head(self.norm(value))
        loss = None if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return Prediction(logits, loss)


def numbers(*shape: int, seed: int = 0, gradient: bool = False) -> Tensor:
    """Return normal numbers that depend on shape and seed only."""
    generator = torch.Generator().manual_seed(seed + 31 * sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_(gradient)


def tokens(rows: int, length: int, *, words: int = 13, seed: int = 0) -> Tensor:
    """Return token numbers that depend on shape and seed only."""
    generator = torch.Generator().manual_seed(seed + 31 * rows + length)
    return torch.randint(0, words, (rows, length), generator=generator)


@dataclass(frozen=True)
class Case:
    """A model by name: how to make it, and a batch with a given number of rows."""

    name: str
    make: Callable[[], nn.Module]
    batch: Callable[[int], Batch]
    training: bool = True

    def build(self) -> nn.Module:
        """Return the model in float64, the same numbers every time."""
        with torch.random.fork_rng():
            torch.manual_seed(3)
            return self.make().double().train(self.training)


def flat(rows: int) -> Batch:
    return Batch((numbers(rows, WIDTH, gradient=True),))


def sequence(rows: int) -> Batch:
    return Batch((numbers(rows, 5, WIDTH, gradient=True),))


def _keywords(rows: int) -> Batch:
    bias = numbers(rows, WIDTH, seed=1, gradient=True)
    return Batch(kwargs={"value": numbers(rows, WIDTH), "bias": bias, "scale": 0.5, "power": 2, "tanh": True})


def _scalars(rows: int) -> Batch:
    return Batch(kwargs={"value": numbers(rows, WIDTH), "bias": None, "scale": 1.5, "power": 1, "tanh": False})


def _passthrough(rows: int) -> Batch:
    return Batch((numbers(rows, WIDTH, gradient=True), numbers(rows, WIDTH, seed=1, gradient=True), tokens(rows, 2)))


CASES = {
    case.name: case
    for case in (
        Case("chain", Chain, flat),
        Case("residual chain", ResidualChain, flat),
        Case("nested skips", NestedSkips, flat),
        Case("hub", Hub, flat),
        Case("repeated block", Repeated, flat),
        Case("shared weight", SharedWeight, flat),
        Case("tiny gpt", TinyGPT, lambda rows: Batch((tokens(rows, 6),))),
        Case("lstm batch first", lambda: Recurrent(batch_first=True), sequence),
        Case("lstm time major", lambda: Recurrent(batch_first=False), sequence),
        Case("attention", Attention, sequence),
        Case("encoder", encoder, sequence),
        Case("weight norm", lambda: Parametrized(parametrizations.weight_norm), flat),
        Case("spectral norm", lambda: Parametrized(parametrizations.spectral_norm), flat, training=False),
        Case("no_grad region", Teacher, flat),
        Case("own autograd function", OwnFunction, flat),
        Case("dict output", lambda: TwoHeads("dict"), flat),
        Case("dataclass output", lambda: TwoHeads("dataclass"), flat),
        Case("nested output", lambda: TwoHeads("nested"), flat),
        Case("keyword inputs", Keywords, _keywords),
        Case("scalar and None inputs", Keywords, _scalars),
        Case("integer inputs", Words, lambda rows: Batch((tokens(rows, 4, words=11),))),
        Case("passthrough", Passthrough, _passthrough),
        Case("unused parameters", Unused, flat),
        Case("squeeze", Squeezing, flat),
    )
}
