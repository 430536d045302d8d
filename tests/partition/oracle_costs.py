"""What a cut costs, counted again from the definitions, for oracles: works of a stage are the bits of one number.

Nothing of the solver or of its checker is used, only the problem itself and the schedules.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from autosplit.partition.problem import Device, Hold, Problem
from autosplit.schedule.catalog import build
from autosplit.schedule.simulate import TransferTime, simulate


@dataclass(frozen=True)
class Option:
    """One stage on one device under one recompute option; ``largest`` is what counts once among a device's stages."""

    load_s: float
    static: int
    held: int
    largest: int
    recomputed_s: float

    @property
    def peak_bytes(self) -> int:
        """The most bytes at one moment when the stage is alone on its device."""
        return self.static + self.held + self.largest


def bits(indices: Sequence[int]) -> int:
    return sum(1 << index for index in set(indices))


def members(mask: int) -> list[int]:
    return [index for index in range(mask.bit_length()) if mask >> index & 1]


@dataclass(frozen=True)
class Rules:
    """The definitions applied to a problem that is cut into ``stages`` stages, empty ones counted."""

    problem: Problem
    stages: int

    @cached_property
    def lane(self) -> tuple[int, ...]:
        """The position in the pipeline of each stage's device."""
        if self.problem.virtual_stages == 1:
            return tuple(range(self.stages))
        return self._schedule.stage_lane

    @cached_property
    def _schedule(self):
        problem = self.problem
        return build(
            problem.schedule,
            stages=self.stages,
            microbatches=problem.microbatches,
            virtual_stages=problem.virtual_stages,
        )

    @cached_property
    def in_flight(self) -> list[int]:
        """How many microbatches each stage holds."""
        held, most = [0] * self.stages, [0] * self.stages
        for action in self._schedule:
            held[action.stage] += {"F": 1, "B": -1, "I": 0, "W": -1}[action.kind]
            most[action.stage] = max(most[action.stage], held[action.stage])
            held[action.stage] -= not self._schedule.has_backward
        return most

    def device(self, stage: int) -> Device:
        """Return the device of a stage, one like all others where the problem has none."""
        return Device() if self.problem.devices is None else self.problem.devices[self.lane[stage]]

    def link(self, position: int) -> float:
        """Return the slower of the links next to a position in the pipeline."""
        links = self.problem.links
        near = [] if links is None else links[max(position - 1, 0) : position + 1]
        return max(near, default=1.0)

    def works(self, inside: int, name: str) -> list:
        return [getattr(work, name) for index, work in enumerate(self.problem.works) if inside >> index & 1]

    def legal(self, assignment: Sequence[int]) -> bool:
        """Tell whether colours stay together and nothing flows back."""
        problem = self.problem
        if any(assignment[tail] > assignment[head] for tail, head in flows(problem)):
            return False
        pairs = {
            (w.colocation_group, stage)
            for w, stage in zip(problem.works, assignment, strict=True)
            if w.colocation_group is not None
        }
        return len({colour for colour, _ in pairs}) == len(pairs)

    def net_s(self, inside: int) -> float:
        """Return the seconds of the nets that the stage cuts."""
        total = 0.0
        for net in self.problem.nets:
            here = [bool(inside >> end & 1) for end in net.consumers]
            if not all(here) if inside >> net.producer & 1 else any(here):
                total += net.forward_s + net.backward_s
        return total

    def tie_s(self, inside: int) -> float:
        """Return the seconds, per step, of the tied parameters that the stage shares with others."""
        users = [(tie, [bool(inside >> user & 1) for user in tie.users]) for tie in self.problem.ties]
        return sum(tie.transfer_s for tie, here in users if any(here) and not all(here))

    def load_s(self, inside: int, *, stage: int, recomputed_s: float) -> float:
        """Return the stage's load per microbatch."""
        slowdown, link = self.device(stage).slowdown, self.link(self.lane[stage])
        seconds = sum(self.works(inside, "forward_s")) + sum(self.works(inside, "backward_s")) + recomputed_s
        return slowdown * seconds + link * (self.net_s(inside) + self.tie_s(inside) / self.problem.microbatches)

    def static(self, inside: int, before: int) -> int:
        """Return the static bytes of a stage, ``before`` being the works of all earlier stages."""
        total = sum(self.works(inside, "static_bytes"))
        for tie in self.problem.ties:
            users = bits(tie.users)
            if users & inside:
                total += tie.copy_bytes if users & before else tie.home_bytes
        return total

    def option(self, name: str, inside: int, *, before: int, stage: int) -> Option:
        """Return what the stage costs under one recompute option."""
        microbatches = self.problem.microbatches
        again = {"never": 0.0, "except_last": (microbatches - 1) / microbatches}.get(name, 1.0)
        goes_back = stage == self.stages - 1 or any(self.works(before | inside, "backward_s"))
        recomputed_s = again * goes_back * sum(self.works(inside, "forward_s"))
        kept = sum(hold.bytes for hold in self.problem.holds if _kept(hold, inside))
        edge = sum(hold.bytes for hold in self.problem.holds if _boundary(hold, inside))
        worst = max(self.works(inside, "transient_bytes"), default=0)
        if name == "never":
            resident, largest = kept, worst
        elif name == "block":
            resident, largest = self._blocks(inside)
        else:
            resident, largest = edge, kept - edge + worst
        return Option(
            load_s=self.load_s(inside, stage=stage, recomputed_s=recomputed_s),
            static=self.static(inside, before),
            held=self.in_flight[stage] * resident,
            largest=largest,
            recomputed_s=recomputed_s,
        )

    def _blocks(self, inside: int) -> tuple[int, int]:
        problem = self.problem
        # A work without a block is a block of its own.
        block = [("own", index) if w.block is None else ("named", w.block) for index, w in enumerate(problem.works)]
        resident = 0
        for hold in problem.holds:
            source = None if hold.producer is None else block[hold.producer]
            ends = [end for end in (*hold.consumers, *hold.savers) if inside >> end & 1]
            enters = any(block[end] != source for end in ends)
            # What a block takes from outside is kept for it to run again.
            taken = any(
                inside >> end & 1 and block[end][0] == "named" and block[end] != source for end in hold.consumers
            )
            if _boundary(hold, inside) or taken or (enters and _kept(hold, inside)):
                resident += hold.bytes
        largest = 0
        for index in members(inside):
            saved = sum(
                hold.bytes
                for hold in problem.holds
                if hold.producer is not None
                and block[hold.producer] == block[index]
                and any(block[saver] == block[index] for saver in hold.savers)
            )
            largest = max(largest, saved + problem.works[index].transient_bytes)
        return resident, largest

    def stage_masks(self, assignment: Sequence[int]) -> list[int]:
        return [bits([w for w, own in enumerate(assignment) if own == stage]) for stage in range(self.stages)]

    def options(self, assignment: Sequence[int], recompute: Sequence[str] | None) -> list[Option] | None:
        """Return what each stage costs, by default with nothing done again; None when a device is too full."""
        masks = self.stage_masks(assignment)
        names = ["never"] * self.stages if recompute is None else recompute
        chosen = [
            self.option(name, masks[stage], before=sum(masks[:stage]), stage=stage) for stage, name in enumerate(names)
        ]
        for own in self._by_device(chosen):
            capacity = self.device(own[0]).capacity_bytes
            peak = sum(chosen[s].static + chosen[s].held for s in own) + max(chosen[s].largest for s in own)
            if capacity is not None and peak > capacity:
                return None
        return chosen

    def _by_device(self, chosen: Sequence[Option]) -> list[list[int]]:
        lanes = range(max(self.lane) + 1)
        return [[stage for stage in range(len(chosen)) if self.lane[stage] == lane] for lane in lanes]

    def bottleneck_s(self, assignment: Sequence[int], recompute: Sequence[str] | None = None) -> float:
        """Return the largest load of a device, infinite when a capacity is exceeded."""
        chosen = self.options(assignment, recompute)
        if chosen is None:
            return math.inf
        return max(sum(chosen[stage].load_s for stage in own) for own in self._by_device(chosen))

    def step_s(self, assignment: Sequence[int], recompute: Sequence[str] | None = None) -> float:
        """Return the length of a simulated step, infinite when a capacity is exceeded."""
        chosen = self.options(assignment, recompute)
        if chosen is None:
            return math.inf
        masks = self.stage_masks(assignment)
        each = [self.device(stage).slowdown for stage in range(self.stages)]
        stages = list(zip(masks, each, chosen, strict=True))
        backward = [k * (sum(self.works(mask, "backward_s")) + own.recomputed_s) for mask, k, own in stages]
        weight = [k * sum(self.works(mask, "weight_s")) for mask, k, _ in stages]
        once = [self.link(at) * self.tie_s(mask) for mask, at in zip(masks, self.lane, strict=True)]
        back = [stage for stage, mask in enumerate(masks) if any(self.works(mask, "backward_s"))]
        first = min(back, default=self.stages - 1) * any(masks[: min(back, default=self.stages - 1)])
        rows = [
            [action for action in lane if action.kind == "F" or action.stage >= first] for lane in self._schedule.lanes
        ]
        timeline = simulate(
            replace(self._schedule, lanes=tuple(map(tuple, rows))),
            forward_s=[k * sum(self.works(mask, "forward_s")) for mask, k, _ in stages],
            backward_s=backward,
            input_gradient_s=[whole - part for whole, part in zip(backward, weight, strict=True)],
            weight_gradient_s=weight,
            transfers=tuple(self._transfers(assignment)),
        )
        return timeline.step_s + max(once)

    def _transfers(self, assignment: Sequence[int]) -> Iterator[TransferTime]:
        for low in range(self.stages):
            for high in range(low + 1, self.stages):
                forward_s = backward_s = 0.0
                for net in self.problem.nets:
                    source, ends = assignment[net.producer], {assignment[end] for end in net.consumers}
                    down, up = source == low and high in ends, source == high and low in ends
                    if net.ordered and down:
                        forward_s, backward_s = forward_s + net.forward_s, backward_s + net.backward_s
                    elif down or up:
                        backward_s += net.forward_s + net.backward_s
                links = self.problem.links or ()
                between = links[min(self.lane[low], self.lane[high]) : max(self.lane[low], self.lane[high])]
                slow = max(between, default=1.0)
                yield TransferTime(low, high, slow * forward_s, slow * backward_s)


def flows(problem: Problem) -> set[tuple[int, int]]:
    """Return the pairs of works of which the second cannot lie in an earlier stage than the first."""
    return {(net.producer, end) for net in problem.nets if net.ordered for end in net.consumers} | set(problem.order)


def _boundary(hold: Hold, inside: int) -> bool:
    here = [bool(inside >> end & 1) for end in hold.consumers]
    if hold.producer is not None and inside >> hold.producer & 1:
        return not all(here)
    return any(here)


def _kept(hold: Hold, inside: int) -> bool:
    return any(inside >> saver & 1 for saver in hold.savers) or _boundary(hold, inside)
