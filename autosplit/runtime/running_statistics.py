"""Running statistics of norms: one update per step, over all that a layer saw in it.

    microbatch 0    count, mean, variance ─┐
    microbatch 1    count, mean, variance ─┼─► merged in this order ─► one update, behind the last forward
    microbatch 2    count, mean, variance ─┘

Parts are merged by the formula of Chan, Golub and LeVeque ("Updating formulae and a pairwise algorithm for computing
sample variances", 1979) in float64, and the variance is the unbiased one, so that the first norm of a model gets the
plain model's numbers. A part that comes again, when a region runs again for its backward, is not counted again.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from autosplit.runtime.lanes.lanes import Lane


@dataclass(frozen=True, eq=False)
class Part:
    """What a norm saw in one microbatch: values per channel, and their mean and unbiased variance, [channels] each.

    ``off`` is by how much the mean was rounded, [channels] in float64; None where that is too little to matter.
    """

    count: int
    mean: torch.Tensor
    variance: torch.Tensor
    off: torch.Tensor | None = None


@dataclass(frozen=True, eq=False)
class Moments:
    """Count, mean, and sum of squared distances from the mean."""

    count: int
    mean: torch.Tensor
    squares: torch.Tensor


@dataclass(eq=False)
class Use:
    """One call of a norm in the model's forward: what it updates, and what it saw.

    Attributes:
        running: the running mean and variance, as the model holds them.
        momentum: weight of what was seen; None: the mean over all updates.
        batches: counter of updates, or None.
        averaged: the moments are averages over rows, as instance norm takes them, and are averaged further.
        parts: by microbatch.
    """

    running: tuple[torch.Tensor, torch.Tensor]
    momentum: float | None
    batches: torch.Tensor | None
    averaged: bool = False
    parts: dict[int, Part] = field(default_factory=dict)

    def in_order(self) -> list[Part]:
        """Return the parts of all microbatches, the first one first."""
        return [self.parts[microbatch] for microbatch in sorted(self.parts)]


class Collected:
    """The uses of one call of the pipe, by name; the cells of all lanes add to it.

    All uses of one layer lie in one stage, whose cells run one after the other: for each layer they come in the
    model's order.
    """

    def __init__(self, *, each: bool = False) -> None:
        """Make an empty one; with ``each`` every microbatch is an update of its own, as in the plain model's loop."""
        self.each = each
        self._uses: dict[str, Use] = {}

    def fresh(self) -> Collected:
        """Return an empty one of the same kind."""
        return Collected(each=self.each)

    @property
    def uses(self) -> Mapping[str, Use]:
        """What was added, by name."""
        return self._uses

    def add(self, name: str, microbatch: int, use: Use, part: Part) -> None:
        """Add what a use saw in a microbatch, unless that is known."""
        self._uses.setdefault(name, use).parts.setdefault(microbatch, part)

    @torch.no_grad()
    def update(self, lanes: Sequence[Lane]) -> None:
        """Update what the layers hold, each once per use, on a lane of its device; nothing is kept for a second time.

        torch's own kernels do not count their writes to running statistics as changes in place; nor are these.
        """
        uses, self._uses = list(self._uses.values()), {}
        steps = [[[part] for part in use.in_order()] if self.each else [use.in_order()] for use in uses]
        jobs = [(use, parts) for use, own in zip(uses, steps, strict=True) for parts in own]
        by_device: dict[torch.device, list[tuple[Use, list[Part]]]] = defaultdict(list)
        for use, parts in jobs:
            home = use.running[0]
            by_device[lanes[0].origin(home).device if lanes else home.device].append((use, parts))
        for device, own in by_device.items():
            with _on(device, lanes):
                for (use, _), moments in zip(own, _seen(own), strict=True):
                    _take_in(use, moments)


@contextlib.contextmanager
def _on(device: torch.device, lanes: Sequence[Lane]) -> Iterator[None]:
    """Work on a lane of a device, behind what all lanes of that device were given."""
    own = [lane for lane in lanes if lane.device == device and lane.asynchronous]
    if not own:
        yield
        return
    for other in own[1:]:
        own[0].wait(other.record())
    with own[0].active():
        yield


def _seen(jobs: Sequence[tuple[Use, list[Part]]]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return mean and unbiased variance over all parts of each job; jobs of equal counts are merged side by side."""
    groups: dict[tuple[bool, tuple[int, ...]], list[int]] = defaultdict(list)
    for place, (use, parts) in enumerate(jobs):
        groups[use.averaged, tuple(part.count for part in parts)].append(place)
    found: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for (averaged, counts), places in groups.items():
        columns = zip(*(jobs[place][1] for place in places), strict=True)
        rows = [_joined(count, column, averaged) for count, column in zip(counts, columns, strict=True)]
        total = averages(rows) if averaged else merged(rows)
        variance = total.squares if averaged else total.squares / (total.count - 1)
        widths = [jobs[place][0].running[0].numel() for place in places]
        found.update(zip(places, zip(total.mean.split(widths), variance.split(widths), strict=True), strict=True))
    return [found[place] for place in range(len(jobs))]


def _joined(count: int, parts: Sequence[Part], averaged: bool) -> Moments:
    """Put the parts of several layers side by side, channel by channel, in float64."""
    mean, variance = (torch.cat([part.mean for part in parts]), torch.cat([part.variance for part in parts]))
    mean, variance = mean.double(), variance.double()
    squares = variance if averaged else variance * (count - 1)
    if any(part.off is not None for part in parts):
        off = torch.cat([torch.zeros_like(p.mean, dtype=mean.dtype) if p.off is None else p.off for p in parts])
        mean, squares = mean + off, squares - off * off * count
    return Moments(count, mean, squares)


def merged(parts: Sequence[Moments]) -> Moments:
    """Return the moments of all values of several parts."""
    total = parts[0]
    for part in parts[1:]:
        count, away = total.count + part.count, part.mean - total.mean
        squares = total.squares + part.squares + away * away * (total.count * part.count / count)
        total = Moments(count, total.mean + away * (part.count / count), squares)
    return total


def averages(parts: Sequence[Moments]) -> Moments:
    """Return the mean of several parts' means, and that of their ``squares``, weighted by their counts."""
    total = parts[0]
    for part in parts[1:]:
        count = total.count + part.count
        share = part.count / count
        mean, squares = (
            total.mean + (part.mean - total.mean) * share,
            total.squares + (part.squares - total.squares) * share,
        )
        total = Moments(count, mean, squares)
    return total


def _take_in(use: Use, seen: tuple[torch.Tensor, torch.Tensor]) -> None:
    if use.batches is not None:
        use.batches.add_(1)
    weight: float | torch.Tensor | None = use.momentum
    if weight is None:  # not read by the host, which would wait for the device
        weight = 1.0 if use.batches is None else 1.0 / use.batches.double()
    for running, value in zip(use.running, seen, strict=True):
        running.data.copy_(running.double() * (1 - weight) + value.view_as(running) * weight)
