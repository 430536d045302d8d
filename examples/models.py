"""The models of the examples: ordinary ``nn.Module`` code that knows nothing of devices or microbatches."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class ToyModel(nn.Module):
    """Two linear layers with a ReLU between them."""

    def __init__(self, inputs: int = 4, hidden: int = 6, outputs: int = 2) -> None:
        super().__init__()
        self.net1 = nn.Linear(inputs, hidden)
        self.relu = nn.ReLU()
        self.net2 = nn.Linear(hidden, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Map [rows, inputs] to [rows, outputs]."""
        return self.net2(self.relu(self.net1(x)))


class ConvNet(nn.Module):
    """The small CIFAR-10 network whose four parts are conv1, conv2, fc and out; it returns probabilities."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Sequential(nn.Conv2d(3, 6, kernel_size=5), nn.ReLU(), nn.MaxPool2d(kernel_size=2))
        self.conv2 = nn.Sequential(nn.Conv2d(6, 16, kernel_size=5), nn.ReLU(), nn.MaxPool2d(kernel_size=2))
        self.fc = nn.Sequential(nn.Flatten(), nn.Linear(16 * 5 * 5, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU())
        self.out = nn.Sequential(nn.Linear(84, num_classes), nn.Softmax(dim=1))

    def forward(self, x: Tensor) -> Tensor:
        """Map images [rows, 3, 32, 32] to probabilities [rows, num_classes]."""
        return self.out(self.fc(self.conv2(self.conv1(x))))


class Bottleneck(nn.Module):
    """The residual block of ResNet-50 (He et al., 2015): 1x1, 3x3, 1x1 convolutions around a shortcut."""

    expansion = 4

    def __init__(self, inputs: int, width: int, *, stride: int) -> None:
        super().__init__()
        outputs = width * self.expansion
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, outputs, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outputs)
        nn.init.zeros_(self.bn3.weight)
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Module | None = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        """Map [rows, inputs, H, W] to [rows, 4 * width, H / stride, W / stride]."""
        shortcut = x if self.downsample is None else self.downsample(x)
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.relu(self.bn2(self.conv2(x)))
        x = self.bn3(self.conv3(x))
        x += shortcut
        return self.relu(x)


class ResNet(nn.Module):
    """A ResNet of bottleneck blocks; the defaults are ResNet-50.

    Every block starts as its shortcut (the scale of its last batch norm is zero; Goyal et al., 2017, section 5.1).
    """

    def __init__(self, *, num_classes: int = 1000, width: int = 64, blocks: tuple[int, ...] = (3, 4, 6, 3)) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        self.layers = nn.Sequential()
        channels = width
        for index, count in enumerate(blocks):
            layer = nn.Sequential()
            for block in range(count):
                stride = 2 if index and not block else 1
                layer.append(Bottleneck(channels, width * 2**index, stride=stride))
                channels = width * 2**index * Bottleneck.expansion
            self.layers.append(layer)
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(channels, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Map images [rows, 3, H, W] to logits [rows, num_classes]."""
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.avgpool(self.layers(x))
        return self.fc(x.view(x.size(0), -1))


@dataclass(frozen=True)
class GPTConfig:
    """Size of a GPT; the defaults are a small model over bytes."""

    layers: int = 4
    heads: int = 4
    width: int = 64
    vocab: int = 256
    positions: int = 64
    dropout: float = 0.0

    @classmethod
    def gpt2_small(cls) -> GPTConfig:
        """Return the shape of GPT-2-small: 124,439,808 parameters, the tied ones counted once."""
        return cls(layers=12, heads=12, width=768, vocab=50257, positions=1024)


class GPTBlock(nn.Module):
    """Causal self-attention and an MLP, each after a layer norm and around a shortcut."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.dropout = config.dropout
        self.norm1 = nn.LayerNorm(config.width)
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.proj = nn.Linear(config.width, config.width)
        self.norm2 = nn.LayerNorm(config.width)
        self.mlp = nn.Sequential(
            nn.Linear(config.width, 4 * config.width), nn.GELU(), nn.Linear(4 * config.width, config.width)
        )
        self.drop = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Map [rows, length, width] to the same shape."""
        rows, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(rows, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, dropout_p=dropout)
        x = x + self.drop(self.proj(mixed.transpose(1, 2).reshape(rows, length, width)))
        return x + self.drop(self.mlp(self.norm2(x)))


class GPT(nn.Module):
    """A GPT-2 (Radford et al., 2019): learned positions, and a head that is the token table itself."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.wte = nn.Embedding(config.vocab, config.width)
        self.wpe = nn.Embedding(config.positions, config.width)
        self.drop = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(GPTBlock(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab, bias=False)
        self.apply(_initialise)
        self.head.weight = self.wte.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Map token numbers [rows, length] to logits [rows, length, vocab]."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.drop(self.wte(tokens) + self.wpe(positions))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def _initialise(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


class DoubleConv(nn.Sequential):
    """Two 3x3 convolutions, each followed by a group norm and a ReLU."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(
            nn.Conv2d(inputs, outputs, 3, padding=1),
            nn.GroupNorm(4, outputs),
            nn.ReLU(inplace=True),
            nn.Conv2d(outputs, outputs, 3, padding=1),
            nn.GroupNorm(4, outputs),
            nn.ReLU(inplace=True),
        )


class UNet(nn.Module):
    """A U-Net (Ronneberger et al., 2015): what goes down is concatenated again on the way up.

    The widest skip spans the whole network, so no chain of stages can express it.
    """

    def __init__(self, *, inputs: int = 1, outputs: int = 1, widths: tuple[int, ...] = (8, 16, 32)) -> None:
        super().__init__()
        self.down = nn.ModuleList()
        for before, after in zip((inputs, *widths[:-1]), widths, strict=True):
            self.down.append(DoubleConv(before, after))
        self.bottom = DoubleConv(widths[-1], 2 * widths[-1])
        self.raise_size = nn.ModuleList()
        self.up = nn.ModuleList()
        for width in reversed(widths):
            self.raise_size.append(nn.ConvTranspose2d(2 * width, width, 2, stride=2))
            self.up.append(DoubleConv(2 * width, width))
        self.head = nn.Conv2d(widths[0], outputs, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Map images [rows, inputs, H, W] to logits [rows, outputs, H, W]; H and W divisible by 2 per level."""
        skips = []
        for block in self.down:
            x = block(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.bottom(x)
        for raise_size, block in zip(self.raise_size, self.up, strict=True):
            x = block(torch.cat((skips.pop(), raise_size(x)), dim=1))
        return self.head(x)
