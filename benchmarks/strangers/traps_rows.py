"""Traps of rows: operations along the batch where a left-out dimension, a random key or an index hides it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.strangers.compare import Batch, Subject, loss_by_hand, loss_of_torch
from benchmarks.strangers.hosts import WIDTH, Residual, vectors

Mix = Callable[[torch.Tensor], torch.Tensor]


class Trapped(nn.Module):
    """Two blocks, an operation between them, and a head."""

    def __init__(self, mix: Mix) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(6, WIDTH), Residual())
        self.second = nn.Sequential(Residual(), nn.Linear(WIDTH, 3))
        self.mix = mix

    def forward(self, x):
        h = self.first(x)
        return self.second(h + self.mix(h))


def rank(h: torch.Tensor) -> torch.Tensor:
    """Return every row's rank by its first value."""
    return h[:, 0].argsort().argsort()[:, None].to(h.dtype)


def counts(h: torch.Tensor) -> torch.Tensor:
    """Return how many rows have the same strongest feature."""
    _, inverse, number = torch.unique(h.argmax(-1), return_inverse=True, return_counts=True)
    return number[inverse][:, None].to(h.dtype)


def dead_permutation(h: torch.Tensor) -> torch.Tensor:
    """Compute a permutation that nothing uses."""
    h[h[:, 0].argsort()]
    h[torch.randperm(len(h))]
    return h.tanh()


def dead_sort_of_scores(h: torch.Tensor) -> torch.Tensor:
    """Sort scores whose values nobody reads."""
    values, order = h.sum(-1).sort(descending=True)
    values[order.argsort()]
    return h * 2


def scattered(h: torch.Tensor) -> torch.Tensor:
    """Write rows to the places of other rows."""
    out = torch.zeros_like(h)
    out[h[:, 1].argsort()] = h
    return out


def running_maximum(h: torch.Tensor) -> torch.Tensor:
    """Loop over rows in Python."""
    rows = [h[0]]
    for row in h[1:]:
        rows.append(torch.maximum(rows[-1], row))
    return torch.stack(rows)


def neighbours(h: torch.Tensor) -> torch.Tensor:
    """Average over three rows by a convolution whose length is the batch."""
    weight = torch.full((WIDTH, 1, 3), 1 / 3, dtype=h.dtype)
    return F.conv1d(h.T[None], weight, padding=1, groups=WIDTH)[0].T


def by_random_key(h: torch.Tensor) -> torch.Tensor:
    return h[torch.rand(len(h)).argsort()]


def by_random_key_on_input(h: torch.Tensor) -> torch.Tensor:
    return h[torch.rand_like(h[:, 0]).sort().indices]


def swapped_pairs(h: torch.Tensor) -> torch.Tensor:
    """Swap rows 0 and 1 only; all others stay in place."""
    index = torch.arange(len(h))
    index[0], index[1] = 1, 0
    return h[index]


def last_to_first(h: torch.Tensor) -> torch.Tensor:
    """Only the first row sees another: the last."""
    return torch.cat([h[:1] + h[-1:], h[1:]])


def sample_rows(h: torch.Tensor) -> torch.Tensor:
    """Draw rows with replacement by their norm."""
    return h[torch.multinomial(h.detach().norm(dim=-1) + 0.1, len(h), replacement=True)]


def rarely(h: torch.Tensor) -> torch.Tensor:
    """Rows meet only where a feature is large, which few draws show."""
    return torch.where(h[:, :1] > 2.5, h.flip(0), h)


def rarely_by_index(h: torch.Tensor) -> torch.Tensor:
    """A row reads its neighbour only where a feature is large."""
    index = torch.arange(len(h)) - (h[:, 0] > 2.0).long()
    return h[index]


MIXES: dict[str, Mix] = {
    "argsort of a column": lambda h: h[h[:, 0].argsort()],
    "argsort descending": lambda h: h[h[:, 0].argsort(descending=True)],
    "stable argsort": lambda h: h[h[:, 0].argsort(stable=True)],
    "rank": rank,
    "msort": lambda h: torch.msort(h[:, 0])[:, None],
    "msort of a matrix": torch.msort,
    "sort of a column": lambda h: h[:, 0].sort()[0][:, None],
    "sort of a matrix by rows": lambda h: h.sort(0).values,
    "topk of a column": lambda h: h * h[:, 0].topk(2).values.sum(),
    "kthvalue of a column": lambda h: h - h[:, 0].kthvalue(2).values,
    "median of a column": lambda h: h - h[:, 0].median(),
    "mode of a column": lambda h: h - h[:, 0].round().mode().values,
    "quantile": lambda h: h - h[:, 0].quantile(0.3),
    "cumsum": lambda h: h.cumsum(0),
    "cummax of a column": lambda h: h[:, 0].cummax(0).values[:, None],
    "logcumsumexp": lambda h: h.logcumsumexp(0),
    "diff of a column": lambda h: F.pad(torch.diff(h[:, 0]), (1, 0))[:, None],
    "diff along rows": lambda h: torch.diff(h, dim=0, prepend=h[:1]),
    "normalize along rows": lambda h: F.normalize(h, dim=0),
    "normalize a column": lambda h: F.normalize(h[:, 0], dim=0)[:, None],
    "renorm": lambda h: torch.renorm(h, 2, 1, 0.5),
    "softmax along rows": lambda h: h.softmax(0),
    "softmax of a column": lambda h: h[:, 0].softmax(-1)[:, None],
    "norm of everything": lambda h: h / h.norm(),
    "std of everything": lambda h: h / h.std(),
    "aminmax": lambda h: (h - h.aminmax().min) / 2,
    "flip": lambda h: h.flip(0),
    "roll": lambda h: h.roll(1, 0),
    "roll without dim": lambda h: h.roll(1),
    "flat roll": lambda h: h.flatten().roll(3).view_as(h),
    "scrambled reshape": lambda h: h.reshape(WIDTH, -1).T,
    "tril": lambda h: h.tril(),
    "rot90": lambda h: h.rot90(2),
    "gradient over both dims": lambda h: sum(torch.gradient(h)),
    "fft2": lambda h: torch.fft.fft2(h).real,
    "gram": lambda h: h @ (h.T @ h),
    "cov": lambda h: h @ torch.cov(h.T),
    "attention between rows": lambda h: (h @ h.T).softmax(-1) @ h,
    "cdist": lambda h: torch.cdist(h, h + 0.1).mean(1, keepdim=True),
    "einsum": lambda h: torch.einsum("bi,bj->ij", h, h)[:1] + h,
    "unfold along rows": lambda h: F.pad(h.T, (1, 1)).T.unfold(0, 3, 1).mean(-1),
    "repeat_interleave": lambda h: h.repeat_interleave(2, 0)[: len(h)],
    "as_strided": lambda h: h.contiguous().as_strided(h.shape, (1, h.shape[0])),
    "take_along_dim": lambda h: h.take_along_dim(h.argsort(0), 0),
    "gather reversed": lambda h: h.gather(0, h.argsort(0, descending=True)),
    "searchsorted": lambda h: torch.searchsorted(h[:, 0].detach().sort()[0], h[:, 0].detach())[:, None] * h,
    "unique counts": counts,
    "bincount": lambda h: torch.bincount(h.argmax(-1), minlength=WIDTH).to(h.dtype) * h,
    "batch statistics": lambda h: F.batch_norm(h, None, None, training=True),
    "convolution along rows": neighbours,
    "scatter to other rows": scattered,
    "loop over rows": running_maximum,
    "random key": by_random_key,
    "random key like a column": by_random_key_on_input,
    "randperm": lambda h: h[torch.randperm(len(h))],
    "shuffled halves": lambda h: torch.cat([h[1::2], h[::2]]),
    "swap of two rows": swapped_pairs,
    "first row reads the last": last_to_first,
    "multinomial of rows": sample_rows,
    "where of a flip, rarely": rarely,
    "neighbour by index, rarely": rarely_by_index,
    "mean added": lambda h: h - h.mean(0),
    "mean detached": lambda h: h / (h.detach().std(0) + 1),
    "no grad statistics": lambda h: h - h.detach().amax(0),
    "dead permutation": dead_permutation,
    "dead sort": dead_sort_of_scores,
    "length of the batch": lambda h: h / h.shape[0],
    "position in the batch": lambda h: h * torch.arange(h.shape[0])[:, None],
}


def larger_later(rows: int) -> Batch:
    """Return vectors that are five times as large in the second batch size."""
    (x,), _ = vectors(rows)
    return (x * (5 if rows == 5 else 1),), {}


def subjects() -> list[Subject]:
    """Return a subject for every operation."""
    return [
        Subject(name, "rows", partial(Trapped, mix), larger_later, loss=loss_by_hand if index % 2 else loss_of_torch)
        for index, (name, mix) in enumerate(MIXES.items())
    ]
