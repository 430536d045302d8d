"""The parts of a plan: plain data, frozen, strict."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Seconds = Annotated[float, Field(ge=0, le=1e12)]
"""A time; files come from strangers, and sums of times are to stay numbers."""
Count = Annotated[int, Field(ge=-(2**60), le=2**60)]
"""A number of bytes or things, that a float holds nearly and a table shows."""


class Record(BaseModel):
    """What all parts of a plan are: frozen, and nothing but what is named here."""

    # JSON has no NaN and no infinity: a plan with one would not come back as it was.
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class StageMemory(Record):
    """Bytes of one stage at the moment of the step at which its device holds the most.

    The peak is the device's; the parts of all stages on it add up to that. Gradients are None when the step begins: at
    an early moment some are not there yet.
    """

    parameter_bytes: Count
    buffer_bytes: Count
    gradient_bytes: Count
    optimizer_bytes: Count
    activation_bytes: Count
    transient_bytes: Count
    peak_bytes: Count
    capacity_bytes: Count | None = None
    reserve_bytes: Count = 0
    """What of the capacity is kept free: a peak that reaches into it is borderline."""
    low_bytes: Count | None = None
    """The least that the peak may come out as, where the prediction has a range; likewise ``high_bytes``, the most."""
    high_bytes: Count | None = None


class StagePlan(Record):
    """One stage: its device, the stable names of its nodes in model order, its times per microbatch and its memory."""

    index: Count
    device: str
    lane: Count = Field(default_factory=lambda fields: fields["index"])
    """Index into the plan's devices, each of which is one lane; a file without it has one stage per device."""
    nodes: tuple[str, ...]
    modules: tuple[str, ...]
    """Qualified names of the modules in whose forward the stage's nodes run, in model order."""
    parameters: Count
    """Number of trainable and frozen parameter elements whose home is this stage."""
    forward_s: Seconds
    backward_s: Seconds
    recompute: Literal["never", "always", "except_last", "block"] = "never"
    """What the stage does again in its backward; ``backward_s`` counts that."""
    weight_s: Seconds = 0.0
    """The part of ``backward_s`` that only weight gradients need: W of a backward in two parts."""
    forward_issue_s: Seconds = 0.0
    """How long a host thread takes to issue the kernels of one microbatch's forward; 0 where that is not known."""
    backward_issue_s: Seconds = 0.0
    """Likewise of its backward, with what is done again in it."""
    replicas: Count = 1
    memory: StageMemory


class Boundary(Record):
    """A value that crosses a cut: its producer stage (-1: a model input), its consumer stages, bytes per microbatch."""

    value: str
    producer: Count
    consumers: tuple[Count, ...]
    bytes: Count
    per_step: bool = False
    """Sent once per step (a shared value or a tied parameter), not once per microbatch."""


class Fingerprint(Record):
    """What a plan was made for."""

    model: str
    """Class name of the model."""
    state: str
    """Hash over ``entries``."""
    nodes: str
    """Hash over the stable node names of the recording that was planned."""
    torch: str
    entries: tuple[str, ...] = ()
    """Name and shape of every parameter and buffer, ``layer.weight[4, 3]``, sorted; older files have none."""
    choices: str | None = None
    """Hash over what the plan chose, so that an edit of that shows; older files have none."""


class Transfer(Record):
    """How long one microbatch's values between two stages travel, and their gradients back."""

    producer: Count
    consumer: Count
    forward_s: Seconds
    backward_s: Seconds


class Unit(Record):
    """A run of nodes of one module in model order, the smallest that is moved by hand, and its costs per microbatch.

    ``static_bytes`` are parameters, gradients, buffers and optimizer state; ``kept_bytes`` are what it keeps from its
    forward to its backward without recompute; ``transient_bytes`` live inside it only; ``sent_bytes`` is what crosses a
    cut behind it.
    """

    name: str
    stage: Count
    forward_s: Seconds
    backward_s: Seconds
    weight_s: Seconds
    static_bytes: Count
    kept_bytes: Count
    transient_bytes: Count
    sent_bytes: Count
    block: Count | None = None
    """Units of one number are recomputed together under "block"; None is a block of its own."""


class LaneCurve(Record):
    """What one device holds over a step: at the fullest moment of each of its actions, in order, the bytes by kind.

    Every tuple has one entry per action and a last one for the optimizer's step.
    """

    parameter_bytes: tuple[Count, ...]
    gradient_bytes: tuple[Count, ...]
    optimizer_bytes: tuple[Count, ...]
    activation_bytes: tuple[Count, ...]
    transient_bytes: tuple[Count, ...]


class Alternative(Record):
    """Another plan that the search weighed: what it chose, its step and its largest peak."""

    chunks: Count
    schedule: str
    virtual_stages: Count
    recompute: tuple[str, ...]
    """One entry, or one per stage."""
    step_s: Seconds
    peak_bytes: Count
    """The largest of any device."""
    verdict: Literal["fits", "borderline", "no"]
    replayed: bool
    """Whether the peak was replayed, or is the additive formula's."""


class Change(Record):
    """What would make a plan fit that does not, or fit better, and its price."""

    kind: Literal["recompute", "chunks", "schedule", "devices", "batch", "optimizer", "precision", "device", "pair"]
    text: str
    """What to change, in words and with the numbers: ``recompute="block": 61.2 GiB, the step is 31% longer``."""
    arguments: dict[str, str | int]
    """The arguments of `plan` that say it."""
    step_s: Seconds
    peak_bytes: Count
    verdict: Literal["fits", "borderline", "no"]
    planned: bool = True
    """Whether it was planned anew, or estimated from this plan's units."""
