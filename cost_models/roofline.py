"""The roofline: an operation takes as long as its arithmetic or its memory traffic, whichever is longer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from cost_models.kernels import architecture, attention_share, product_share
from cost_models.specs import DeviceSpec
from cost_models.work import MATRIX_KINDS, OpWork

_ARITHMETIC = {"matmul": 0.75, "conv": 0.6, "attention": 0.6, "attention_backward": 0.45, "recurrent": 0.4}
_MEMORY = {
    "copy": 0.85,
    "elementwise": 0.8,
    "optimizer": 0.8,
    "normalization": 0.7,
    "reduction": 0.7,
    "embedding": 0.5,
    "sort": 0.1,
}


@dataclass(frozen=True)
class Efficiency:
    """The shares of a device's peaks that real kernels reach: priors to plan with, measured on nothing.

    Attributes:
        arithmetic: share of the peak FLOP/s by class of work.
        other_arithmetic: the same for every class that ``arithmetic`` does not name.
        memory: share of the memory bandwidth by class of work.
        other_memory: the same for every class that ``memory`` does not name.
    """

    arithmetic: Mapping[str, float] = field(default_factory=lambda: dict(_ARITHMETIC))
    other_arithmetic: float = 0.5
    memory: Mapping[str, float] = field(default_factory=lambda: dict(_MEMORY))
    other_memory: float = 0.8

    @classmethod
    def of(cls, device: DeviceSpec) -> Efficiency:
        """Return the priors, and instead of them what is known of the device's architecture."""
        known = architecture(device.compute_capability)
        return cls(arithmetic={**_ARITHMETIC, **known.arithmetic}, memory={**_MEMORY, **known.memory})

    def __post_init__(self) -> None:
        shares = {f"arithmetic of {kind}": share for kind, share in self.arithmetic.items()}
        shares |= {f"memory of {kind}": share for kind, share in self.memory.items()}
        shares |= {"other_arithmetic": self.other_arithmetic, "other_memory": self.other_memory}
        wrong = {name: share for name, share in shares.items() if not 0 < share <= 1}
        if wrong:
            raise ValueError(f"efficiencies are shares above 0 and at most 1, got {wrong}")


@dataclass(frozen=True)
class Roofline:
    """Time of an operation from its FLOPs and bytes alone (Williams, Waterman and Patterson, CACM 2009).

    launches · launch_s + max(flops / (peak · efficiency), bytes / (bandwidth · efficiency))

    Of products and attention whose sides are known the efficiency depends on these (`cost_models.kernels`).
    Classes of ``MATRIX_KINDS`` run at the peak of their dtype, the others on the fp32 units, or on the fp64 ones.
    """

    device: DeviceSpec
    efficiency: Efficiency | None = None

    @cached_property
    def shares(self) -> Efficiency:
        """The shares that the model was given, else those of the device's architecture."""
        return self.efficiency or Efficiency.of(self.device)

    def seconds(self, work: OpWork) -> float:
        """Return the time of ``work`` in seconds.

        Raises:
            ValueError: the device has no arithmetic in the dtype of this matrix operation.
        """
        kind, shares = work.base_kind, self.shares
        moved_s = work.bytes / self.device.memory_bandwidth_bytes_per_s / shares.memory.get(kind, shares.other_memory)
        computed_s = 0.0
        if work.flops:
            computed_s = work.flops / self._peak(work, kind) / self._share(work, kind)
        return work.launches * self.device.launch_s + max(computed_s, moved_s)

    def _share(self, work: OpWork, kind: str) -> float:
        """Return the share of the peak that this work reaches: its class's best, and what its sides leave of that."""
        known, sides, count = self.shares.arithmetic, work.sides, self.device.multiprocessors
        best = known.get(f"{kind}.{work.dtype}", known.get(kind, self.shares.other_arithmetic))
        if sides is None or count is None:
            return best
        if kind == "matmul":
            return best * product_share(sides, count)
        widths = (int(name.rpartition(".")[2]) for name in known if name.startswith(f"{kind}."))
        narrowest = min((width for width in widths if width >= sides[3]), default=None)
        return known.get(f"{kind}.{narrowest}", best) * attention_share(sides, count)

    def _peak(self, work: OpWork, kind: str) -> float:
        if kind in MATRIX_KINDS or work.dtype == "fp64":
            return self.device.peak(work.dtype)
        return self.device.peak("fp32")
