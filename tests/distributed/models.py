"""Models of several kinds, with their batches and losses, that are trained in one process and in several."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.distributed.training import Training, squares
from tests.equivalence.equality import Batch
from tests.models import decoders
from tests.models.decoders import VOCABULARY, Decoder
from tests.models.named import CASES

WIDTH, WORDS, LENGTH, GROUPED = 8, 11, 6, 16


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Pictures(nn.Module):
    """Convolutions with batch norm, the later ones with a residual."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Conv2d(4 if n else 3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()) for n in range(4)
        )
        self.head = nn.Linear(4, 5)

    def forward(self, value: Tensor) -> Tensor:
        value = self.layers[0](value)
        for layer in list(self.layers)[1:]:
            value = value + layer(value)
        return self.head(value.mean((2, 3)))


class UNet(nn.Module):
    """Convolutions whose early values are used late."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.down = nn.ModuleList(nn.Conv2d(4 if n else 3, 4, 3, padding=1) for n in range(3))
        self.up = nn.ModuleList(nn.Conv2d(8, 4, 3, padding=1) for _ in range(3))

    def forward(self, value: Tensor) -> Tensor:
        seen = []
        for layer in self.down:
            value = torch.relu(layer(value))
            seen.append(value)
        for layer in self.up:
            value = torch.relu(layer(torch.cat((value, seen.pop()), 1)))
        return value


class Block(nn.Module):
    """Attention and a layer, with dropout in both."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.out, self.drop = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2)

    def forward(self, value: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(value)).chunk(3, -1)
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=0.2 * self.training, is_causal=True)
        return value + self.drop(torch.relu(self.out(mixed)))


class TiedGPT(nn.Module):
    """Token embedding and head are one weight; dropout inside."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(16, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        value = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1]))
        for layer in self.layers:
            value = layer(value)
        return self.head(value)


class GroupedBlock(nn.Module):
    """Attention of eight heads over four of keys and values, and a gated layer; dropout everywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(GROUPED) for _ in range(2))
        self.q, self.kv = nn.Linear(GROUPED, GROUPED), nn.Linear(GROUPED, GROUPED, bias=False)
        self.out, self.drop = nn.Linear(GROUPED, GROUPED), nn.Dropout(0.2)
        self.gate_up, self.down = nn.Linear(GROUPED, 64), nn.Linear(32, GROUPED)

    def forward(self, value: Tensor) -> Tensor:
        rows, length, _ = value.shape
        given = self.norms[0](value)
        q = self.q(given).view(rows, length, 8, 2).transpose(1, 2)
        k, v = (t.view(rows, length, 4, 2).transpose(1, 2) for t in self.kv(given).chunk(2, -1))
        k, v = (t.repeat_interleave(2, dim=1) for t in (k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=0.2 * self.training, is_causal=True)
        value = value + self.drop(self.out(mixed.transpose(1, 2).reshape(rows, length, GROUPED)))
        gate, up = self.gate_up(self.norms[1](value)).chunk(2, -1)
        return value + self.down(self.drop(F.silu(gate) * up))


class GroupedGPT(nn.Module):
    """A decoder with grouped-query attention; token embedding and head are one weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(12, GROUPED)
        self.layers = nn.ModuleList(GroupedBlock() for _ in range(4))
        self.norm, self.head = nn.LayerNorm(GROUPED), nn.Linear(GROUPED, 12, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        value = self.tokens(tokens)
        for layer in self.layers:
            value = layer(value)
        return self.head(self.norm(value))


class Relative(nn.Module):
    """A bias with parameters is made once per step, and used by every layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bias = nn.Embedding(9, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, value: Tensor) -> Tensor:
        places = torch.arange(value.shape[1])
        bias = self.bias((places[:, None] - places[None]).clamp(-4, 4) + 4)
        for layer in self.layers:
            value = torch.tanh(layer(value) + torch.einsum("bnd,nmd->bmd", value, bias))
        return value


class ViT(nn.Module):
    """Patches of pictures, a class token, layers of attention, and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.patches, self.token = nn.Conv2d(3, WIDTH, 2, 2), nn.Parameter(torch.randn(1, 1, WIDTH))
        self.places = nn.Parameter(0.1 * torch.randn(1, 10, WIDTH))
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 5)

    def forward(self, value: Tensor) -> Tensor:
        value = self.patches(value).flatten(2).transpose(1, 2)
        value = torch.cat((self.token.expand(len(value), -1, -1), value), 1) + self.places
        for layer in self.layers:
            value = layer(value)
        return self.head(self.norm(value)[:, 0])


class Mixture(nn.Module):
    """Tokens through layers of experts, whose router has no loss of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(WORDS, decoders.WIDTH)
        self.layers = nn.ModuleList(decoders.Experts(softmax_first=True) for _ in range(3))
        self.head = nn.Linear(decoders.WIDTH, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        value = self.tokens(tokens)
        for layer in self.layers:
            value = value + layer(value)[0]
        return self.head(value)


class Recurrent(nn.Module):
    """A recurrent layer behind a pair of others."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, value: Tensor) -> Tensor:
        return self.lstm(self.second(torch.relu(self.first(value))))[0]


class Dropping(nn.Module):
    """Layers with dropout."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3), nn.Tanh()) for _ in range(4))
        )

    def forward(self, value: Tensor) -> Tensor:
        return self.layers(value)


class MixesRows(nn.Module):
    """The last layer sees the whole batch; an earlier stage's value is an output too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, value: Tensor) -> tuple[Tensor, Tensor]:
        for layer in self.layers:
            value = torch.tanh(layer(value))
        return self.head(value - value.mean(0)), value


def flat(rows: int) -> Batch:
    return Batch((torch.randn(rows, WIDTH, generator=_generator(rows)),))


def sequences(rows: int) -> Batch:
    return Batch((torch.randn(rows, LENGTH, WIDTH, generator=_generator(rows)),))


def sequences_of_changing_length(rows: int) -> Batch:
    return Batch((torch.randn(rows, 4 + rows % 3, WIDTH, generator=_generator(rows)),))


def pictures(rows: int) -> Batch:
    return Batch((torch.randn(rows, 3, 6, 6, generator=_generator(rows)),))


def tokens(rows: int) -> Batch:
    return Batch((torch.randint(WORDS, (rows, LENGTH), generator=_generator(rows)),))


def tokens_of_changing_length(rows: int) -> Batch:
    return Batch((torch.randint(WORDS, (rows, 4 + rows % 3), generator=_generator(rows)),))


def labelled(rows: int) -> Batch:
    """Return tokens and labels, of which few count in the first rows."""
    own = torch.randint(VOCABULARY, (rows, 12), generator=_generator(rows))
    counted = torch.arange(12) < torch.arange(1, rows + 1)[:, None] % 12 + 1
    return Batch((own, own.where(counted, -100)))


def next_token(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), target.flatten(), ignore_index=-100)


def few_targets(batch: Batch, step: int) -> Tensor:
    """Return the tokens, without some of the first row's."""
    target = batch.args[0].clone()
    target[0, : 1 + step] = -100
    return target


def classes(batch: Batch, step: int) -> Tensor:
    return (torch.arange(len(batch.args[0])) + step) % 5


def zeros(batch: Batch, step: int) -> Tensor:
    return torch.zeros_like(batch.args[0])


def mixture() -> nn.Module:
    return Decoder(experts="mixtral", layers=2)


def small_mixture() -> nn.Module:
    return Decoder(experts="mixtral", layers=1)


def decoder() -> nn.Module:
    return Decoder(layers=2)


def doubled(output: dict[str, Tensor], _: None = None) -> Tensor:
    """Return a loss that only the whole batch gives: the model's own has a mean over all rows' routing in it."""
    return 2 * output["loss"]


def u_net_target(batch: Batch, step: int) -> Tensor:
    return torch.zeros(len(batch.args[0]), 4, 6, 6)


def half(output: Tensor, target: Tensor) -> Tensor:
    return 0.5 * (output - target).abs().mean()


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))


TRAININGS = {
    "mlp": Training(mlp, flat, F.mse_loss, zeros),
    "chain": Training(CASES["chain"].build, CASES["chain"].batch, squares),
    "ragged": Training(CASES["chain"].build, CASES["chain"].batch, squares, rows=(9, 3, 13, 6, 1, 4)),
    "skips": Training(UNet, pictures, F.mse_loss, u_net_target),
    "dropout": Training(Dropping, flat, F.mse_loss, zeros),
    "tied gpt with dropout": Training(TiedGPT, tokens, next_token, few_targets),
    "grouped gpt": Training(GroupedGPT, tokens, next_token, few_targets),
    "tied gpt of changing length": Training(
        TiedGPT, tokens_of_changing_length, next_token, few_targets, rows=(9, 8, 10, 9)
    ),
    "batch norm": Training(Pictures, pictures, F.cross_entropy, classes),
    "relative bias": Training(Relative, sequences, half, zeros),
    "relative bias of changing length": Training(
        Relative, sequences_of_changing_length, half, zeros, rows=(9, 8, 10, 9)
    ),
    "rows that mix": Training(MixesRows, flat, squares),
    "own loss": Training(decoder, labelled, None),
    "recurrent": Training(Recurrent, sequences, F.mse_loss, zeros),
    "vit": Training(ViT, pictures, F.cross_entropy, classes),
    "experts": Training(Mixture, tokens, next_token, few_targets),
    "experts with a balance loss": Training(mixture, labelled, None),
    "experts of one layer": Training(small_mixture, labelled, None),
    "experts, loss of the whole batch": Training(mixture, labelled, doubled),
    **{
        name: Training(CASES[name].build, CASES[name].batch, squares)
        for name in ("hub", "shared weight", "lstm time major", "dataclass output", "keyword inputs", "passthrough")
    },
}
LONG = [
    "chain",
    "skips",
    "tied gpt with dropout",
    "experts with a balance loss",
    "batch norm",
    "dropout",
    "ragged",
    "tied gpt of changing length",
]
"""Trainings that are compared over many steps."""
DEAR = {*LONG[2:4], LONG[-1], "own loss", "experts, loss of the whole batch", "lstm time major"}
"""Trainings that take long to record."""
