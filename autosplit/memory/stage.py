"""Bytes of stages over a step by additive formulas: cheap enough to be asked inside the partition search."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from autosplit.memory.pieces import Piece, Recompute, StageTraces, Variant, variant_of
from autosplit.schedule.action import Kind, Schedule


@dataclass(frozen=True)
class StageBytes:
    """The parts of a stage's peak: what stays, what microbatches in flight hold, the worst node's transient."""

    static_bytes: int
    resident_bytes: int
    """Held from a microbatch's forward to its backward, per microbatch."""
    in_flight: int
    transient_bytes: int

    @property
    def activation_bytes(self) -> int:
        """Bytes of all microbatches in flight."""
        return self.in_flight * self.resident_bytes

    @property
    def peak_bytes(self) -> int:
        """The most bytes that live at one moment of the step."""
        return self.static_bytes + self.activation_bytes + self.transient_bytes


def stage_bytes(*, static_bytes: int, resident_bytes: int, in_flight: int, transients: Iterable[int]) -> StageBytes:
    """Return a stage's bytes: ``peak = static + in_flight * resident + max(transient)``.

    The formula matched an op-by-op replay of GPipe and 1F1B when the backward transient of a node counts its
    cotangents and one gradient that has not been accumulated yet, and ``static_bytes`` the gradients.
    """
    return StageBytes(
        static_bytes=static_bytes,
        resident_bytes=resident_bytes,
        in_flight=in_flight,
        transient_bytes=max(transients, default=0),
    )


def trace_bytes(
    traces: StageTraces, *, static_bytes: int, in_flight: int, microbatches: int, gradients_held: bool = False
) -> StageBytes:
    """Return a stage's bytes under GPipe or 1F1B, alone on its device, every microbatch treated alike.

    With N in flight, R left by a forward, G all gradients, and what a forward (F), the first backward (B0) and a later
    one (B) take above what lives when they begin, the peak above the static bytes is the largest of

    ```
        (N - 1) R + F  (+ G where N < microbatches: then backwards came before)
         N      R + B0                           finds no gradients, makes them
        (N or N - 1) R + G + B                   N where N < microbatches: a forward came between
    ```

    which is exact, and so grows with N and with every size. ``static_bytes`` counts the gradients where they are held
    when the step begins; G is then 0, and the three lines are ``static + N R + max(F - R, B)``.
    """
    if traces.recompute == "except_last":
        raise ValueError("under recompute='except_last' microbatches differ; use lane_bytes")
    pieces = traces.pieces[traces.variant(last=False)]
    gradients = 0 if gradients_held else sum(traces.gradients)
    begun, later = pieces.piece("F", first=True, fresh=True), pieces.piece("F", first=False, fresh=False)
    first = pieces.piece("B", first=True, fresh=not gradients_held)
    resident = later.left.get("activations", 0)
    casts = begun.left.get("casts", 0)
    after = gradients + casts + first.left.get("casts", 0)
    steady = in_flight < microbatches
    peaks = [in_flight * resident + casts + first.peak_bytes]
    if microbatches == 1:
        peaks.append(begun.peak_bytes)
    else:
        held = in_flight if steady else in_flight - 1
        peaks.append((in_flight - 1) * resident + (after if steady else casts) + later.peak_bytes)
        peaks.append(held * resident + after + pieces.piece("B", first=False, fresh=False).peak_bytes)
    return StageBytes(static_bytes, resident, in_flight, max(peaks) - in_flight * resident)


class Part(NamedTuple):
    """Something that a stage holds between actions.

    Per microbatch ``saved``, what its forward left, and ``waiting``, what its I left to W. Once or not at all
    ``whole_batch``, and what the first microbatch's F, B, I and W left for the rest of the step: casts and gradients.
    """

    stage: int
    variant: Variant
    what: Literal["saved", "waiting", "whole_batch", "F", "B", "I", "W"]


@dataclass(frozen=True)
class Load:
    """What a device holds, in counts, when a kind of action begins; ``first``: of microbatch 0."""

    kind: Kind
    stage: int
    variant: Variant
    first: bool
    counts: Mapping[Part, int]


def lane_loads(schedule: Schedule, *, device: int, recompute: Mapping[int, Recompute]) -> tuple[Load, ...]:
    """Return the loads of a device that no other load of the same kind of action exceeds in every count.

    Whatever the parts weigh, the device's peak comes at one of these; they depend on the schedule and on how stages
    recompute, not on bytes. A stage of GPipe has all microbatches saved at its first backward and one less at the later
    ones; of 1F1B ``min(microbatches, stages - stage)`` (Narayanan et al. 2021, section 2.2); of ZB-H1 besides up to
    ``stage`` waiting for W (Qi et al. 2023, arXiv 2401.10241, section 2.1).
    """
    counts: Counter[Part] = Counter()
    greatest: dict[tuple[Kind, int, Variant, bool], list[Counter[Part]]] = {}
    actions = schedule.lanes[device]
    keeps = schedule.has_backward
    last = schedule.microbatches - 1
    ends = {action.stage: index for index, action in enumerate(actions)}
    for index, action in enumerate(actions):
        kind, stage, first = action.kind, action.stage, action.microbatch == 0
        variant = variant_of(recompute[stage], last=action.microbatch == last)
        counts[Part(stage, "never", "whole_batch")] = 1
        _keep(greatest.setdefault((kind, stage, variant, first), []), counts)
        if kind == "F":
            counts[Part(stage, variant, "saved")] += keeps
        elif kind == "W":
            counts[Part(stage, variant, "waiting")] -= 1
        else:
            counts[Part(stage, variant, "saved")] -= 1
            counts[Part(stage, variant, "waiting")] += kind == "I"
        if first:
            counts[Part(stage, variant, kind)] = 1
        if ends[stage] == index:
            del counts[Part(stage, "never", "whole_batch")]
    return tuple(Load(*key, kept) for key, loads in greatest.items() for kept in loads)


@dataclass(frozen=True)
class LaneBytes:
    """The parts of a device's peak: what stays, what is held by its stages' microbatches, the worst action on top."""

    static_bytes: int
    held_bytes: int
    transient_bytes: int

    @property
    def peak_bytes(self) -> int:
        """The most bytes that live at one moment of the step."""
        return self.static_bytes + self.held_bytes + self.transient_bytes


def lane_bytes(
    loads: Iterable[Load],
    traces: Mapping[int, StageTraces],
    *,
    static_bytes: int,
    whole_batch_bytes: Mapping[int, int] | None = None,
    gradients_held: bool = False,
    finish_bytes: int = 0,
) -> LaneBytes:
    """Return a device's bytes under any schedule: ``static + max(sum(count * part) + transient)`` over its loads.

    Args:
        loads: `lane_loads` of the schedule; without any backward among them, forwards leave nothing.
        traces: by stage.
        static_bytes: of all the device's stages, without gradients.
        whole_batch_bytes: by stage, values of the whole batch.
        gradients_held: gradients are there when the step begins.
        finish_bytes: peak of clipping and the optimizer's step.
    """
    loads = tuple(loads)
    keeps = any(load.kind != "F" for load in loads)
    weigh = _Scale(traces, whole_batch_bytes or {}, gradients_held=gradients_held)
    stages = {load.stage for load in loads}
    gradients = sum(sum(traces[stage].gradients) for stage in stages) if keeps or gradients_held else 0
    found = [LaneBytes(static_bytes, gradients, finish_bytes)]
    for load in loads:
        held = sum(count * weigh(part) for part, count in load.counts.items())
        fresh = load.first and not gradients_held
        piece = traces[load.stage].pieces[load.variant].piece(load.kind, first=load.first, fresh=fresh, keeps=keeps)
        found.append(LaneBytes(static_bytes, held + (gradients if gradients_held else 0), piece.peak_bytes))
    return max(found, key=lambda entry: entry.peak_bytes)


class _Scale:
    """Weighs parts, each once."""

    def __init__(
        self, traces: Mapping[int, StageTraces], whole_batch_bytes: Mapping[int, int], *, gradients_held: bool
    ) -> None:
        self._traces = traces
        self._whole_batch_bytes = whole_batch_bytes
        self._fresh = not gradients_held
        self._known: dict[Part, int] = {}

    def __call__(self, part: Part) -> int:
        if part not in self._known:
            self._known[part] = self._weigh(part)
        return self._known[part]

    def _weigh(self, part: Part) -> int:
        if part.what == "whole_batch":
            return self._whole_batch_bytes.get(part.stage, 0)
        saved = self._piece(part, "F", first=False).left.get("activations", 0)
        if part.what == "saved":
            return saved
        if part.what == "waiting":
            return saved + self._piece(part, "I", first=False).left.get("activations", 0)
        left = self._piece(part, part.what, first=True).left
        return left.get("gradients", 0) + left.get("casts", 0)

    def _piece(self, part: Part, kind: Kind, *, first: bool) -> Piece:
        return self._traces[part.stage].pieces[part.variant].piece(kind, first=first, fresh=first and self._fresh)


def _keep(loads: list[Counter[Part]], counts: Counter[Part]) -> None:
    """Add counts to those that no others exceed."""
    if any(all(kept[part] >= count for part, count in counts.items()) for kept in loads):
        return
    loads[:] = [kept for kept in loads if any(count > counts[part] for part, count in kept.items())]
    loads.append(Counter(counts))
