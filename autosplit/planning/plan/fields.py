"""The kinds of figures that a plan's records have, and what a plan says of meshes and of changes."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from autosplit.parallel import DIMENSIONS, Parallel, named_degrees
from autosplit.runtimes import RuntimeName

Seconds = Annotated[float, Field(ge=0, le=1e12)]
"""A time; files come from strangers, and sums of times are to stay numbers."""
Count = Annotated[int, Field(ge=-(2**60), le=2**60)]
"""A number of bytes or things, that a float holds nearly and a table shows."""
Size = Annotated[int, Field(ge=0, le=2**60)]
"""A number that is never below 0; other counts may be differences."""
Verdict = Literal["fits", "borderline", "no"]
Degree = Annotated[int, Field(ge=1, le=2**20)]
"""How many ranks there are along a dimension of a mesh."""


class FrozenFields(BaseModel):
    """The base of all parts of a plan: frozen data without unknown fields."""

    # JSON has no NaN and no infinity: a plan with one would not come back as it was.
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


CERTAIN = 1.645
"""So many standard deviations around its mean nine of ten normal values lie."""


class MemoryItem(FrozenFields):
    """A part of a device's peak: the least and the most that it may take; below 0 what may be less than replayed."""

    name: str
    low_bytes: Count
    high_bytes: Count
    source: str
    choice: bool = False
    """Whether programs differ in it: it is its least or its most, and not between."""


class MeshDegrees(FrozenFields):
    """How many ranks share the model in each way, and what the data-parallel ones shard."""

    dp: Degree
    tp: Degree
    pp: Degree
    cp: Degree = 1
    ep: Degree = 1
    """Ranks that share the tokens of rows, and those among dp x cp that share experts; no pipe runs either."""
    zero: Annotated[int, Field(ge=0, le=3)] = 0
    """ZeRO stage: 1 the optimizer's state, 2 gradients too, 3 parameters too."""
    sequence: bool = False
    """Megatron-LM's sequence parallelism is assumed of the tensor-parallel ranks, which no pipe runs."""
    runtime: RuntimeName = "megatron"
    """By whose rules it was planned; files without it were by Megatron-LM's, with or without its ``sequence``."""
    by_units: bool = False
    """Whether autosplit's ZeRO-3 gathers block by block in every action (``fsdp_reshard="always"``)."""
    sum_bytes: int = 0
    shard_bytes: int = 0
    """The least bytes of an element of sums of gradients (``reduce_dtype=``) and of shards (``mp_policy=``)."""
    order: tuple[str, ...] = DIMENSIONS
    """The dimensions from the outermost to the innermost, whose ranks are neighbours."""

    @property
    def parallel(self) -> Parallel:
        """They as what is planned for."""
        return Parallel(**self.model_dump(exclude={"order"}))

    def __str__(self) -> str:
        shards = f", ZeRO-{self.zero}{' by blocks' if self.by_units else ''}" if self.zero else ""
        sequence = ", sequence parallel" if self.sequence else ""
        degrees = ", ".join(f"{name}={degree}" for name, degree in named_degrees(self))
        return f"{degrees}{shards}{sequence}"


class MeshAlternative(FrozenFields):
    """The best plan found for other degrees, by its figures; of those that were not searched, a lower bound."""

    mesh: MeshDegrees
    step_s: Seconds
    verdict: Verdict | None
    """None: not searched. Of a bound "no": what it holds of states alone is more than a device has."""
    bound: bool = Field(default_factory=lambda fields: fields["verdict"] is None)
    """Whether ``step_s`` is no plan's, but a lower bound of all plans for these degrees; older files say it of some."""


class LaneCurve(FrozenFields):
    """What one device holds over a step: at the fullest moment of each of its actions, in order, the bytes by kind.

    Every tuple has one entry per action and a last one for the optimizer's step.
    """

    parameter_bytes: tuple[Count, ...]
    gradient_bytes: tuple[Count, ...]
    optimizer_bytes: tuple[Count, ...]
    activation_bytes: tuple[Count, ...]
    transient_bytes: tuple[Count, ...]

    @property
    def kinds(self) -> tuple[tuple[int, ...], ...]:
        """The bytes by kind, from what stays to what passes."""
        return tuple(values for _, values in self)


class Price(FrozenFields):
    """What the devices of a plan cost, in US dollars."""

    usd_per_hour: Annotated[float, Field(gt=0)]
    """Of all devices, of a mesh all ranks'."""
    source: str
    """Whose price it is, and of which day."""
    usd_per_billion_tokens: Annotated[float, Field(gt=0)] | None = None
    """Of a billion tokens in steps like the plan's; None where rows have no tokens."""


class Sensitivity(FrozenFields):
    """How much longer the step is where something is slower."""

    what: str
    ratio: Annotated[float, Field(gt=0)]
    """The step then over the plan's."""


class Change(FrozenFields):
    """What would make a plan fit that does not, or fit better, and its price."""

    kind: Literal["recompute", "chunks", "schedule", "devices", "batch", "optimizer", "precision", "device", "pair"]
    text: str
    """What to change, in words and with the numbers: ``recompute="block": 61.2 GiB, the step is 31% longer``."""
    arguments: dict[str, str | int]
    """The arguments of `plan` that say it."""
    step_s: Seconds
    peak_bytes: Size
    verdict: Verdict
    planned: bool = False
    """Whether it was planned anew, as some are in older files; else its figures are estimates."""


class Generation(FrozenFields):
    """What generating text takes, beside a plan that reads the prompts: of a batch in as many groups as there are.

    Attributes:
        prompt, new: tokens of each row, given and made.
        cache_bytes: what the last token has of all rows, by stage; buffers of the stage.
        decode_s: from one token of all rows to the next, half of the new ones made.
        throughput_s, latency_s: that in as many groups as there are stages, at least, and as one group, of which one
            lane works at a time. None: in older files.
        issue_s: how long the host issues the kernels of that one by one, as it does without CUDA graphs.
        largest_batch, largest_prompt: about what fits of one, the other as it is; 0: nothing. None: no limit is known.
    """

    prompt: Size
    new: Size
    groups: Size
    cache_bytes: tuple[Size, ...]
    decode_s: Seconds
    throughput_s: Seconds | None = None
    latency_s: Seconds | None = None
    issue_s: Seconds
    largest_batch: Size | None
    largest_prompt: Size | None
