"""The roofline: an operation takes as long as its arithmetic or its memory traffic, whichever is longer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from cost_models.specs import DeviceSpec
from cost_models.work import OpWork


@dataclass(frozen=True)
class Efficiency:
    """The shares of a device's peaks that real kernels reach: priors to plan with, measured on nothing.

    Attributes:
        arithmetic: share of the peak FLOP/s by kind of work.
        other_arithmetic: the same for every kind that ``arithmetic`` does not name.
        memory: share of the memory bandwidth.
    """

    arithmetic: Mapping[str, float] = field(default_factory=lambda: {"attention": 0.6, "attention_backward": 0.45})
    other_arithmetic: float = 0.75
    memory: float = 0.8

    def __post_init__(self) -> None:
        shares = {**self.arithmetic, "other_arithmetic": self.other_arithmetic, "memory": self.memory}
        wrong = {name: share for name, share in shares.items() if not 0 < share <= 1}
        if wrong:
            raise ValueError(f"efficiencies are shares above 0 and at most 1, got {wrong}")


@dataclass(frozen=True)
class Roofline:
    """Time of an operation from its FLOPs and bytes alone (Williams, Waterman and Patterson, CACM 2009).

    launches · launch_s + max(flops / (peak · efficiency), bytes / (bandwidth · efficiency))
    """

    device: DeviceSpec
    efficiency: Efficiency = field(default_factory=Efficiency)

    def seconds(self, work: OpWork) -> float:
        """Return the time of ``work`` in seconds."""
        share = self.efficiency.arithmetic.get(work.kind, self.efficiency.other_arithmetic)
        arithmetic_s = work.flops / (self.device.peak(work.dtype) * share)
        memory_s = work.bytes / (self.device.memory_bandwidth_bytes_per_s * self.efficiency.memory)
        return work.launches * self.device.launch_s + max(arithmetic_s, memory_s)
