"""What is known about a device and about a link between two devices, each figure with its source and its status."""

from __future__ import annotations

from reprlib import repr as short_repr
from typing import Annotated, Literal, NamedTuple, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt, ValidationError, model_validator
from pydantic_core import ErrorDetails

from cost_models.work import DType

Status = Literal["measured", "datasheet", "recalled", "prior"]
"""How far a figure can be trusted.

``measured`` on such a device; ``datasheet``: the vendor's figure, read where the source says; ``recalled``: the
vendor's figure from memory, not looked up again; ``prior``: a round number to plan with until something better is
known.
"""

Bandwidth = Annotated[float, Field(ge=1e6, le=1e16)]
"""Bytes per second; the range refuses a figure in GB/s."""

Rate = Annotated[float, Field(ge=1e6, le=1e19)]
"""Operations per second; the range refuses a figure in TFLOP/s."""

Overhead = Annotated[float, Field(ge=0, le=1)]
"""Seconds; the range refuses a figure in microseconds."""

MemoryBytes = Annotated[int, Field(ge=2**20, le=2**60)]
"""Bytes; the range refuses a figure in GiB."""

_SHOWN = 3
"""How many problems of a file are told in full."""

_FP64_SHARE = 1 / 64
"""The fp64 rate over the fp32 rate of GPUs without fp64 units, GA10x and AD10x: the lowest that is sold."""


class Record(BaseModel):
    """Frozen data that refuses fields it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, defer_build=True)


def describe(error: ValidationError) -> str:
    """Return what a validation found: field, value and what is wrong of the first problems, and how many there are."""
    problems = error.errors(include_url=False)
    count = len(problems)
    return f"{'; '.join(map(_problem, problems[:_SHOWN]))} ({count} problem{'s' * (count > 1)} in all)"


def _problem(problem: ErrorDetails) -> str:
    where = ".".join(str(key) for key in problem["loc"] if key != "[key]") or "the whole"
    if problem["type"] in ("missing", "json_invalid", "value_error"):  # the value would be all that stands around
        return f"{where}: {problem['msg']}"
    return f"{where} is {short_repr(problem['input'])}: {problem['msg']}"


class Source(Record):
    """Where a figure comes from."""

    status: Status
    text: str = Field(min_length=1)


class Spec(Record):
    """A set of figures and a source for each.

    A key of ``sources`` is the name of a field, or ``field.entry`` where the entries of one field differ.
    """

    sources: dict[str, Source]

    @model_validator(mode="after")
    def _every_figure_has_a_source(self) -> Self:
        figures = self.figures()
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

    def figure(self, name: str) -> float | int | str:
        """Return the value of a figure, one of ``figures()``."""
        field, _, entry = name.partition(".")
        value: float | int | str = getattr(self, field)[entry] if entry else getattr(self, field)
        return value

    def figures(self) -> list[str]:
        """Return the name of every figure that needs a source: all that is known but names and notes."""
        names = []
        for name, value in self:
            if isinstance(value, dict) and name != "sources":
                names += [f"{name}.{entry}" for entry in value]
            elif isinstance(value, (int, float, str)) and name not in ("name", "notes"):
                names.append(name)
        return names

    def _source_key(self, figure: str) -> str:
        return figure if figure in self.sources else figure.partition(".")[0]


class LinkSpec(Spec):
    """A way from one device to another: a transfer takes its latency plus its bytes over its bandwidth.

    ``bandwidth_bytes_per_s`` is that of one direction between one pair of devices. Two devices use a peer link only
    when its ``name`` is the same at both ends.
    """

    name: str = Field(min_length=1)
    bandwidth_bytes_per_s: Bandwidth
    latency_s: Overhead

    def transfer_s(self, byte_count: int) -> float:
        """Return the seconds that one transfer of ``byte_count`` bytes takes."""
        return self.latency_s + byte_count / self.bandwidth_bytes_per_s


class StepSpec(Spec):
    """What a training step takes beside its operations, on lanes of one host.

    Attributes:
        step_s: once per step: set-up, waking the lanes, handing the gradients over.
        action_s: each action of a lane: taking its inputs, handing its results on.
        gradient_byte_s: each byte of a parameter's gradient that a microbatch adds to the sum.
        fresh_byte_s: each byte that microbatches in flight hold at most: memory that the system hands out anew.
        overlap: the share by which work takes longer while the other lanes work too, on the memory that they share.
    """

    step_s: Overhead
    action_s: Overhead
    gradient_byte_s: Overhead
    fresh_byte_s: Overhead
    overlap: Annotated[float, Field(ge=0, le=8)]

    def seconds(self, amounts: StepAmounts) -> float:
        """Return what a step of these amounts takes beside its operations."""
        costs = (self.step_s, self.action_s, self.gradient_byte_s, self.fresh_byte_s, self.overlap)
        return sum(cost * amount for cost, amount in zip(costs, amounts, strict=True))


class StepAmounts(NamedTuple):
    """What `StepSpec` has a cost for, of one step.

    Attributes:
        steps: 1.
        actions: of the lane that has the most.
        gradient_bytes: that microbatches add to sums, of the lane that adds the most.
        held_bytes: the most that microbatches in flight hold on the lane that holds the most.
        overlapped_s: how long that lane works while the others do.
    """

    steps: int
    actions: int
    gradient_bytes: int
    held_bytes: int
    overlapped_s: float


class DeviceSpec(Spec):
    """One device: its memory, its arithmetic, and the links that leave it.

    Attributes:
        driver_names: what the driver calls such a device, as ``torch.cuda.get_device_name`` returns it.
        memory_bytes: the total that the driver's tool prints; None when it depends on the machine (a CPU lane).
        reserve_bytes: the part of it that no tensor can have: what the driver keeps, and the context of one process.
        memory_bandwidth_bytes_per_s: reads and writes together.
        peak_flops_per_s: dense peak of each arithmetic that the device has hardware for, ``fp32`` always among them;
            matrix units where it has them.
        emulated_flops_per_s: rate of each arithmetic that it runs without hardware for it, by conversion.
        launch_s: what every kernel costs on the device besides its work.
        issue_s: the host's time to issue one kernel; it passes while the device works, and limits it when it is longer.
        host_link: the way to the host's memory.
        peer_link: a direct way to devices of its kind, or None when transfers go through the host.
        peer_group: how many neighbours share the peer link, the device included; None for all of its host.
        step: what a training step takes beside its operations; None where that is not known.
        compute_capability: CUDA's, such as ``9.0``, or AMD's architecture, such as ``gfx942``.
        multiprocessors: CUDA's multiprocessors or AMD's compute units.
        notes: what else a reader should know.
    """

    name: str = Field(min_length=1)
    driver_names: tuple[str, ...] = ()
    memory_bytes: MemoryBytes | None
    reserve_bytes: NonNegativeInt
    memory_bandwidth_bytes_per_s: Bandwidth
    peak_flops_per_s: dict[DType, Rate]
    emulated_flops_per_s: dict[DType, Rate] = {}
    launch_s: Overhead
    issue_s: Overhead
    host_link: LinkSpec
    peer_link: LinkSpec | None = None
    peer_group: Annotated[int, Field(ge=2)] | None = None
    step: StepSpec | None = None
    compute_capability: str | None = None
    multiprocessors: PositiveInt | None = None
    notes: str = ""

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if "fp32" not in self.peak_flops_per_s:
            raise ValueError("peak_flops_per_s has no fp32, in which int and tf32 run where they have no rate")
        both = [dtype for dtype in self.emulated_flops_per_s if dtype in self.peak_flops_per_s]
        if both:
            raise ValueError(f"{', '.join(both)} stands under peak_flops_per_s and under emulated_flops_per_s")
        if self.memory_bytes is not None and self.reserve_bytes >= self.memory_bytes:
            raise ValueError(f"reserve_bytes is {self.reserve_bytes}, no less than memory_bytes, {self.memory_bytes}")
        if self.peer_group is not None and self.peer_link is None:
            raise ValueError(f"peer_group is {self.peer_group}, but there is no peer_link")
        return self

    @property
    def usable_bytes(self) -> int | None:
        """Memory that tensors can have; None when the device's memory is not known."""
        return None if self.memory_bytes is None else self.memory_bytes - self.reserve_bytes

    @property
    def dtypes(self) -> tuple[DType, ...]:
        """The arithmetic that ``peak`` answers for."""
        return tuple(dtype for dtype in get_args(DType) if self._rate(dtype) is not None)

    def peak(self, dtype: DType) -> float:
        """Return the peak FLOP/s of matrix arithmetic in ``dtype``.

        The hardware's rate, else the emulated one. Without either, ``int`` and ``tf32`` (which allows hardware to round
        fp32, and obliges none) run at the fp32 rate and ``fp64`` at 1/64 of it.

        Raises:
            ValueError: the device has no such arithmetic: bf16, fp16 or fp8 without a rate.
        """
        rate = self._rate(dtype)
        if rate is None:
            emulated = f", and emulates {', '.join(self.emulated_flops_per_s)}" if self.emulated_flops_per_s else ""
            raise ValueError(
                f"{self.name} has no {dtype} arithmetic; it has {', '.join(self.peak_flops_per_s)}{emulated}; choose "
                f"one of these, another device, or a device file with a rate for {dtype} under emulated_flops_per_s"
            )
        return rate

    def _rate(self, dtype: DType) -> float | None:
        rate = self.peak_flops_per_s.get(dtype, self.emulated_flops_per_s.get(dtype))
        if rate is not None:
            return rate
        shares: dict[DType, float] = {"int": 1.0, "tf32": 1.0, "fp64": _FP64_SHARE}
        return shares[dtype] * self.peak_flops_per_s["fp32"] if dtype in shares else None
