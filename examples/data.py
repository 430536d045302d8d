"""Real data that needs no download: scikit-learn's handwritten digits, and Python's own sources as text."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits  # type: ignore[import-untyped]
from torch import Tensor

TEXT_MODULES = ("argparse.py", "dataclasses.py", "inspect.py", "json/decoder.py", "textwrap.py")


@dataclass(frozen=True)
class Batch:
    """Inputs and the targets that belong to them, rows first."""

    inputs: Tensor
    targets: Tensor

    def to(self, dtype: torch.dtype) -> Batch:
        """Return the batch with its floating-point tensors in another precision."""
        cast = (t.to(dtype) if t.is_floating_point() else t for t in (self.inputs, self.targets))
        return Batch(*cast)


def digits(*, size: int = 32, channels: int = 3) -> Batch:
    """Return all 1797 digits as images [1797, channels, size, size] within [-1, 1], and their labels.

    The 8x8 grey images are enlarged and their one channel repeated, which gives them the shape of CIFAR-10.
    """
    source = load_digits()
    grey = torch.tensor(source.images, dtype=torch.float32).div(8).sub(1)[:, None]
    images = F.interpolate(grey, size=(size, size), mode="bilinear", align_corners=False)
    return Batch(images.repeat(1, channels, 1, 1), torch.tensor(source.target, dtype=torch.int64))


def noisy_segments(*, size: int = 32, noise: float = 0.5, seed: int = 0) -> Batch:
    """Return digits with noise [1797, 1, size, size] and masks that are 1 where the clean digit has ink."""
    clean = digits(size=size, channels=1).inputs
    generator = torch.Generator().manual_seed(seed)
    return Batch(clean + noise * torch.randn(clean.shape, generator=generator), (clean > 0).float())


def batches(data: Batch, *, rows: int, count: int, seed: int = 0) -> Iterator[Batch]:
    """Yield ``count`` batches of ``rows`` rows, in a new random order at each pass over the data."""
    generator = torch.Generator().manual_seed(seed)
    left = torch.empty(0, dtype=torch.int64)
    for _ in range(count):
        if len(left) < rows:
            left = torch.randperm(len(data.inputs), generator=generator)
        chosen, left = left[:rows], left[rows:]
        yield Batch(data.inputs[chosen], data.targets[chosen])


def python_text() -> Tensor:
    """Return the sources of a few modules of the standard library as one row of bytes (int64, 0 to 255)."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = b"".join((folder / name).read_bytes() for name in TEXT_MODULES)
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def text_batches(text: Tensor, *, rows: int, length: int, count: int, seed: int = 0) -> Iterator[Batch]:
    """Yield ``count`` batches of ``rows`` windows of ``length`` bytes; the targets are the bytes that follow."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        starts = torch.randint(len(text) - length, (rows, 1), generator=generator)
        windows = text[starts + torch.arange(length + 1)]
        yield Batch(windows[:, :-1], windows[:, 1:])
