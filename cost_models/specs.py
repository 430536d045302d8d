"""What is known about a device and about a link between two devices, each figure with its source and its status."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from cost_models.work import DType

Status = Literal["measured", "datasheet", "recalled", "prior"]
"""How far a figure can be trusted.

``measured`` on such a device; ``datasheet``: the vendor's figure, read where the source says; ``recalled``: the
vendor's figure from memory, not looked up again; ``prior``: a round number to plan with until something better is
known.
"""


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Source(_Record):
    """Where a figure comes from."""

    status: Status
    text: str = Field(min_length=1)


class _Spec(_Record, ABC):
    """A set of figures and a source for each.

    A key of ``sources`` is the name of a field, or ``field.entry`` where the entries of one field differ.
    """

    sources: dict[str, Source]

    @model_validator(mode="after")
    def _every_figure_has_a_source(self) -> Self:
        figures = self._figures()
        missing = [figure for figure in figures if self._source_key(figure) not in self.sources]
        if missing:
            raise ValueError(f"no source for {', '.join(missing)}; add it to sources, with status and text")
        unknown = set(self.sources) - {key for figure in figures for key in (figure, figure.partition(".")[0])}
        if unknown:
            raise ValueError(
                f"sources for {', '.join(sorted(unknown))}, but there is no such figure; figures: {', '.join(figures)}"
            )
        return self

    def source(self, figure: str) -> Source:
        """Return where ``figure`` comes from: a field such as ``launch_s``, or an entry: ``peak_flops_per_s.bf16``."""
        return self.sources[self._source_key(figure)]

    @abstractmethod
    def _figures(self) -> list[str]:
        """Return the name of every figure that needs a source."""

    def _source_key(self, figure: str) -> str:
        return figure if figure in self.sources else figure.partition(".")[0]


class LinkSpec(_Spec):
    """A way from one device to another: a transfer takes its latency plus its bytes over its bandwidth.

    ``bandwidth_bytes_per_s`` is that of one direction between one pair of devices. Two devices use a peer link only
    when its ``name`` is the same at both ends.
    """

    name: str
    bandwidth_bytes_per_s: PositiveFloat
    latency_s: NonNegativeFloat

    def transfer_s(self, byte_count: int) -> float:
        """Return the seconds that one transfer of ``byte_count`` bytes takes."""
        return self.latency_s + byte_count / self.bandwidth_bytes_per_s

    def _figures(self) -> list[str]:
        return ["bandwidth_bytes_per_s", "latency_s"]


class DeviceSpec(_Spec):
    """One device: its memory, its arithmetic, and the links that leave it.

    Attributes:
        memory_bytes: what the driver reports as the total; None when it depends on the machine (a CPU lane).
        memory_bandwidth_bytes_per_s: reads and writes together.
        peak_flops_per_s: dense peak of each arithmetic that the device has hardware for, ``fp32`` always among them.
        launch_s: what every kernel costs besides its work.
        host_link: the way to the host's memory.
        peer_link: a direct way to devices of its kind, or None when transfers go through the host.
        notes: what else a reader should know.
    """

    name: str
    memory_bytes: PositiveInt | None
    memory_bandwidth_bytes_per_s: PositiveFloat
    peak_flops_per_s: dict[DType, PositiveFloat]
    launch_s: NonNegativeFloat
    host_link: LinkSpec
    peer_link: LinkSpec | None = None
    notes: str = ""

    @model_validator(mode="after")
    def _has_fp32(self) -> Self:
        if "fp32" not in self.peak_flops_per_s:
            raise ValueError("peak_flops_per_s has no fp32, to which arithmetic without an entry falls back")
        return self

    def peak(self, dtype: DType) -> float:
        """Return the peak FLOP/s in ``dtype``; arithmetic that the device has no figure for runs at the fp32 rate."""
        return self.peak_flops_per_s.get(dtype, self.peak_flops_per_s["fp32"])

    def _figures(self) -> list[str]:
        rates = [f"peak_flops_per_s.{dtype}" for dtype in self.peak_flops_per_s]
        memory = [] if self.memory_bytes is None else ["memory_bytes"]
        return [*memory, "memory_bandwidth_bytes_per_s", *rates, "launch_s"]
