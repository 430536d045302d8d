"""What is alive over a microbatch, as changes: the common language of the fake pass, the replay and the allocator.

forward    +x +a +b -a                what a node allocates and frees, in order
backward        +db -b +da … -x       the same ids: a storage that the forward left is freed by the backward
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

Change = tuple[int, int]
"""``(storage, bytes)``: bytes above zero are allocated, below zero freed (the same number, negative)."""


@dataclass(frozen=True, slots=True)
class Step:
    """What one node did in one pass; ``node`` is its stable name, "" for what belongs to none."""

    node: str
    changes: tuple[Change, ...]


@dataclass(frozen=True, slots=True)
class Held:
    """What a node's weight gradient needs when it is made after the input gradient (zero bubble).

    Attributes:
        saved: saved storages that the weight gradient needs.
        cotangent_bytes: the gradient of the node's output, which lives until then.
        gradients: storages of the parameter gradients that it makes: keys of ``StageTrace.gradients``.
    """

    saved: tuple[int, ...]
    cotangent_bytes: int
    gradients: tuple[int, ...]


@dataclass(frozen=True)
class StageTrace:
    """One stage's work on one microbatch under one way to recompute.

    Storage ids are unique within a trace; forward and backward together free all that they allocate but ``gradients``
    and ``kept``.

    Attributes:
        forward: begins with the boundary inputs that arrive (node "").
        backward: of the first microbatch, which finds no gradients. Begins with the cotangents that arrive, ends with
            the release of outputs, inputs and the inputs' gradients, which were sent away (node "").
        backward_later: of any other: every parameter's gradient is made, added in place and freed.
        gradients: storages that ``backward`` leaves: parameter gradients, by the parameter's name.
        kept: other storages that stay until the step ends and are allocated by the first forward only (casts that
            autocast caches), by name.
        split: by node whose weight gradient can wait, what it needs.
        guessed_bytes: the most scratch of one kernel, among what is allocated and freed, that nobody measured.
    """

    forward: tuple[Step, ...]
    backward: tuple[Step, ...]
    backward_later: tuple[Step, ...]
    gradients: Mapping[int, str] = field(default_factory=dict)
    kept: Mapping[int, str] = field(default_factory=dict)
    split: Mapping[str, Held] = field(default_factory=dict)
    guessed_bytes: int = 0
