"""What one stage of a plan holds, the range of its device's peak, and whether a capacity holds that."""

from __future__ import annotations

from statistics import NormalDist, mean

from autosplit.planning.plan.fields import CERTAIN, Count, FrozenFields, MemoryItem, Size, Verdict

NEAR = 1.05
"""A peak without a range that is above its capacity by less than this is borderline."""


class StageMemory(FrozenFields):
    """Bytes of one stage at the moment of the step at which its device holds the most.

    The peak is the device's; the parts of all stages on it add up to that. Gradients are None when the step begins: at
    an early moment some are not there yet.
    """

    parameter_bytes: Size
    buffer_bytes: Size
    gradient_bytes: Size
    optimizer_bytes: Size
    activation_bytes: Count
    transient_bytes: Count
    peak_bytes: Size
    capacity_bytes: Size | None = None
    reserve_bytes: Size = 0
    """What of the capacity is kept free: a peak that reaches into it is borderline."""
    communicator_bytes: Size = 0
    """What NCCL keeps of the device for the process, outside torch's allocator; the capacity is without it."""
    low_bytes: Size | None = None
    """What one peak in twenty is below, where the prediction has a range; one in twenty is above ``high_bytes``."""
    high_bytes: Size | None = None
    items: tuple[MemoryItem, ...] = ()
    """What the range is made of; older files have none."""

    @property
    def verdict(self) -> Verdict | None:
        """Whether the device has the room; None where no capacity is known."""
        low, high = self.low_bytes, self.high_bytes
        return judged(self.peak_bytes, self.capacity_bytes, low=low, high=high, reserve=self.reserve_bytes)

    @property
    def odds(self) -> float | None:
        """The chance that the peak is no more than the capacity; None without a range or a capacity."""
        if self.capacity_bytes is None or self.low_bytes is None or self.high_bytes is None:
            return None
        choices = sum(item.high_bytes - item.low_bytes for item in self.items if item.choice)
        half = max((self.high_bytes - self.low_bytes - choices) / 2, 1.0)
        middles = self.low_bytes + half, self.high_bytes - half
        return round(mean(NormalDist(middle, half / CERTAIN).cdf(self.capacity_bytes) for middle in middles), 3)


def judged(
    peak: int, capacity: int | None, *, low: int | None = None, high: int | None = None, reserve: int = 0
) -> Verdict | None:
    """Return the verdict on a peak; None without a capacity.

    It is borderline where its range reaches into the reserve, or the capacity lies in the range.
    """
    if capacity is None:
        return None
    if low is None or high is None:
        return "fits" if peak <= capacity - reserve else "borderline" if peak <= NEAR * capacity else "no"
    return "fits" if high <= capacity - reserve else "borderline" if low <= capacity else "no"
