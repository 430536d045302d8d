"""The search over microbatches, schedules and recompute: for each of them the best cut, of all of these the best plan.

A plan that surely fits is better than a borderline one, that better than one that does not fit; among those that fit
the fastest is best, among those that do not the one that comes closest. All configurations are weighed in units by the
additive formula (`sweep`). The fastest, with what it sends once per step, is replayed. Then it waits its turn again:
with its boundaries where cuts may fall, or with as much less room as its devices hold above the formula.

    weighed, the fastest first ─► replay ─► fits: refined ──┬─► still the fastest: done
             ▲                       └────► less room ──────┤
             └──────────────────────────────────────────────┘
"""

from __future__ import annotations

import heapq
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice

from autosplit.errors import InputError
from autosplit.partition.line.search import LineCut, Policy
from autosplit.planning.parallel.update import cut_summed_s
from autosplit.planning.plan.fields import Verdict
from autosplit.planning.plan.plan import Plan
from autosplit.planning.plan.record import Alternative, recompute_of
from autosplit.planning.profiled.apply import assign, cut_sent_s
from autosplit.planning.profiled.between import note_on_inside
from autosplit.planning.profiled.units import units_of
from autosplit.planning.search.finish import Finished, finish, refined
from autosplit.planning.search.sweep import Setup, Sweep
from autosplit.progress import phase, update

_REPLAYS = 10
"""How many cuts are replayed at most before the one that needs the least memory is taken."""
_MIN_MEMORY_CUTS = 4
"""How many of the cuts that need the least memory are replayed where nothing fits."""
_MOVES = 0.95
"""What part of a step is left at least, about, when boundaries are moved: only what may be best so is moved."""
_EXACT = 1.01
"""A replay that is up to so much above the formula bears it out."""
HOPELESS = 1.25
"""What needs so many times its room by the formula is never found to fit by a replay."""
_NEAR = 1.05
"""A peak by the formula is borderline up to so much above the capacity."""


class PlanChoice:
    """The best plan of a search: ``finished`` is its cut, by default what the search still has to find."""

    def __init__(self, search: Search, finished: Finished | None = None) -> None:
        self.sweep, self._search = search.sweep, search
        with phase("searching"):
            self.finished = self._with_room(finished or search.run())

    def _with_room(self, finished: Finished) -> Finished:
        """Return a cut inside modules where that fits and none between them does, else the cut that was found.

        What may fit gives way only to what fits, which the formula has to say before anything is replayed.
        """
        if finished.sure or self.sweep.pieces is None:
            return finished
        fullest = 1.0 if finished.verdict == "borderline" else HOPELESS
        leaner = Search(self.sweep.anywhere()).min_memory_cut(fullest=fullest, first=True)
        return refined(self.sweep, leaner) if leaner is not None and leaner.rank[0] < finished.rank[0] else finished

    @cached_property
    def plan(self) -> Plan:
        """The plan, with the others that are worth a look; warns of what its schedule is not made for."""
        finished = self.finished
        case = finished.writer.case
        if case.warning is not None:
            warnings.warn(case.warning, UserWarning, stacklevel=2)
        plan = finished.writer.plan()
        notes = [self._search.note]
        if pieces := self.sweep.pieces:
            assignment = finished.writer.partition.assignment
            notes.append(note_on_inside(pieces.modules, assignment, longer=finished.longer))
        plan = plan.model_copy(update={"notes": (*plan.notes, *filter(None, notes))})
        limited = self.sweep.memory_limits(case.problem) is not None  # else a smaller peak is worth nothing
        others = self._search.alternatives(besides=plan.alternative) if limited else []
        unit_of = finished.entry.sized.coarse.unit_of
        units = units_of(case, unit_of, finished.writer.partition.assignment)
        shown = _frontier(plan.alternative, others)
        near = [self._search.with_sent(each) for each in shown if each in others]
        return plan.model_copy(update={"frontier": _frontier(plan.alternative, near), "units": units})


@dataclass(frozen=True)
class Candidate:
    """A cut of one configuration, costed by the formula; ``limits`` are the memory limits of its search, if any.

    ``moved``: its boundaries have been moved, too.
    """

    entry: Setup
    policy: Policy
    cut: LineCut
    limits: tuple[float, ...] | None
    moved: bool = False

    @property
    def least_s(self) -> float:
        """About the least that its step takes once its boundaries have been moved."""
        return self.cut.step_s * (1.0 if self.moved else _MOVES)

    @property
    def step_s(self) -> float:
        """The step, with what runs once in it beside the stages."""
        return self.cut.step_s + self.entry.sized.once_s


class Search:
    """The candidates of a search, and those that were replayed."""

    def __init__(self, sweep: Sweep) -> None:
        self.sweep, self.note, self.weighed_s = sweep, "", 0.0
        self.candidates: list[Candidate] = []
        self.finished: list[Finished] = []
        self.above: dict[frozenset[str], float] = {}
        self.cut_of: dict[Alternative, tuple[Setup, LineCut]] = {}
        self.sent: dict[tuple[int, LineCut], float] = {}

    @cached_property
    def entries(self) -> list[Setup]:
        """Every configuration whose schedule can be built."""
        return [entry for entry in self.sweep.entries() if entry.has_schedule]

    def weigh(self, enough_s: float = float("inf")) -> None:
        """Find the best cuts of every configuration by the formula; raises InputError where none can be built.

        A policy whose cut takes ``enough_s`` even without limits is left out.
        """
        for done, entry in enumerate(self.entries if enough_s > self.weighed_s else ()):
            update(done, len(self.entries))
            self.candidates += self._cuts(entry, enough_s)
        self.weighed_s = enough_s
        if not self.entries:
            raise InputError(
                f"none of {len(self.sweep.space.chunks) * len(self.sweep.space.schedules)} combinations of chunks and "
                "schedules can be built; give others"
            )

    def _cuts(self, entry: Setup, enough_s: float) -> list[Candidate]:
        """Return the best cut of a configuration for each policy to recompute, until one fits without limits."""
        limits = self.sweep.memory_limits(entry.problem)
        cuts: list[Candidate] = []
        for policy in self.sweep.recompute_policies(entry.settled.stages):
            free = entry.search.fastest(policy, move=False)
            assert free is not None, "without limits every line of enough units can be cut"
            if _MOVES * free.step_s >= enough_s:
                continue
            cuts.append(Candidate(entry, policy, free, None))
            if self._fits(cuts[-1]):
                break
            if limits is not None and (held := entry.search.fastest(policy, limits, move=False)) is not None:
                cuts.append(Candidate(entry, policy, held, tuple(limits)))
        return cuts

    def _fits(self, candidate: Candidate, *, above: float = 1.0) -> bool:
        """Tell whether a cut that needs so many times what the formula says keeps the devices' limits."""
        limits = self.sweep.memory_limits(candidate.entry.problem)
        return limits is None or _within((above * held for held in candidate.cut.device_bytes), limits)

    def run(self) -> Finished:
        """Return the best plan that certainly fits by its replay; else one predicted to fit, or the closest."""
        best = self.faster(float("inf"))
        if best is None or not best.sure:
            self._replay_min_memory_cuts()
            return refined(self.sweep, min(self.finished, key=lambda each: each.rank))
        return best

    def faster(self, enough_s: float) -> Finished | None:
        """Return the best, refined, that surely fits of what takes less than ``enough_s`` by the formula.

        Else the best that was replayed, if anything was.
        """
        self.weigh(enough_s)
        fitting = [(each.least_s, number, each) for number, each in enumerate(self.candidates) if self._fits(each)]
        heap: list[tuple[float, int, Candidate | Finished]] = [each for each in fitting if each[0] < enough_s]
        heapq.heapify(heap)
        known: set[tuple[int, LineCut]] = set()
        turns = 0
        while heap and len(self.finished) < _REPLAYS:
            turns += 1
            step_s, number, best = heapq.heappop(heap)
            if isinstance(best, Finished):
                return best
            if not best.moved:
                best = self._moved(best)
                if best.cut.step_s < enough_s:
                    heapq.heappush(heap, (best.cut.step_s, number, best))
                continue
            whole_s = best.cut.step_s + self._sent_s(best.entry, best.cut)
            if whole_s > step_s:
                heapq.heappush(heap, (whole_s, number, best))
                continue
            over = self._over(best)
            if over is None:
                if (id(best.entry), best.cut) in known:
                    continue
                known.add((id(best.entry), best.cut))
                finished = self._finish(best.entry, best.cut)
                if finished.sure:
                    finished = self.finished[-1] = refined(self.sweep, finished)
                    whole_s = finished.writer.partition.value_s + self._sent_s(best.entry, best.cut)
                    heapq.heappush(heap, (whole_s, number, finished))
                    continue
                over = [high - held for high, held in zip(finished.highs, best.cut.device_bytes, strict=True)]
            for number, following in enumerate(self._less_room(best, over)):
                if following.least_s < enough_s:
                    heapq.heappush(heap, (following.least_s, len(self.candidates) + 10 * turns + number, following))
        return min(self.finished, key=lambda each: each.rank, default=None)

    def fastest(self) -> Candidate | None:
        """Return the fastest cut that keeps the limits by the formula, and as much above it as replays came out."""
        self.weigh()
        fitting = (each for each in self.candidates if self._fits(each, above=max(self.above.values(), default=1.0)))
        best = min(fitting, key=lambda each: each.step_s, default=None)
        return None if best is None else self._moved(best)

    def _moved(self, candidate: Candidate) -> Candidate:
        """Return a candidate with its boundaries moved while its step gets shorter, within its limits."""
        limits = candidate.limits or self.sweep.memory_limits(candidate.entry.problem)
        cut = candidate.entry.search.moved_on(candidate.cut, candidate.policy, limits)
        return replace(candidate, cut=cut, moved=True)

    def min_memory_cut(self, *, fullest: float = float("inf"), first: bool = False) -> Finished | None:
        """Return the best of a few of the cuts that need the least memory when they are replayed.

        ``first``: or the first that may fit. None without any whose fullest device holds at most ``fullest`` of its
        limit by the formula.
        """
        self._replay_min_memory_cuts(fullest, first=first)
        return min(self.finished, key=lambda each: each.rank, default=None)

    def _finish(self, entry: Setup, cut: LineCut) -> Finished:
        """Replay a cut, and keep by how much at least cuts of its kind come out above the formula."""
        finished = finish(self.sweep, entry, cut)
        self.finished.append(finished)
        if self.sweep.memory_limits(entry.problem) is not None:
            pairs = zip(finished.highs, cut.device_bytes, strict=True)
            above = min(high / max(held, 1) for high, held in pairs)
            kind = frozenset(cut.recompute)
            self.above[kind] = min(above, self.above.get(kind, above))
        return finished

    def _over(self, candidate: Candidate) -> list[float] | None:
        """Return by how much devices will be above the formula; None where only a replay can tell whether that fits."""
        limits = self.sweep.memory_limits(candidate.entry.problem)
        above = self.above.get(frozenset(candidate.cut.recompute), 1.0) - 1.0
        expected = [held * (1.0 + above) for held in candidate.cut.device_bytes]
        if limits is None or _within(expected, [limit * (1 + 1e-9) for limit in limits]):
            return None
        return [held * above for held in candidate.cut.device_bytes]

    def _less_room(self, candidate: Candidate, over: Sequence[float]) -> Iterator[Candidate]:
        """Yield the next cuts of a configuration, with the room reduced by what the replay found above the formula.

        All recompute policies are tried if nothing was recomputed, otherwise the same policy.
        """
        limits = self.sweep.memory_limits(candidate.entry.problem)
        assert limits is not None, "what is over a limit has one"
        room = [*(limit - more for limit, more in zip(limits, over, strict=False)), *limits[len(over) :]]
        if candidate.limits is not None:
            before = zip(room, candidate.limits, limits, strict=True)
            room = [min(left, last) if left < limit else left for left, last, limit in before]
        if min(room) <= 0 or tuple(room) == candidate.limits:
            return
        free = all(set(options) == {"never"} for options in candidate.policy)
        for policy in self.sweep.recompute_policies(candidate.entry.settled.stages) if free else (candidate.policy,):
            cut = candidate.entry.search.fastest(policy, room, near=candidate.cut, move=False)
            if cut is None and policy == candidate.policy:  # what replays found of other cuts is not exact
                cut = candidate.entry.search.min_memory_cut(policy, limits)
            if cut is not None:
                yield Candidate(candidate.entry, policy, cut, tuple(room))

    def _replay_min_memory_cuts(self, fullest: float = float("inf"), *, first: bool = False) -> None:
        """Replay a few of the cuts of all configurations that need the least memory: one comes closest to fitting.

        What is fuller than a cut whose replay bore the formula out is left out: by anything at all where it is not
        faster, else by more than the formula is worth.
        """
        cuts = []
        for index, entry in enumerate(self.entries):
            limits = self.sweep.memory_limits(entry.problem)
            assert limits is not None, "without limits everything fits"
            for policy in self.sweep.recompute_policies(entry.settled.stages):
                cut = entry.search.min_memory_cut(policy, limits)
                self.candidates.append(Candidate(entry, policy, cut, None))
                over = max(held / max(limit, 1.0) for held, limit in zip(cut.device_bytes, limits, strict=False))
                cuts.append((over * self.above.get(frozenset(cut.recompute), 1.0), cut.step_s, index, cut))
        tried: dict[tuple[int, LineCut], tuple[float, Finished]] = {}
        cuts.sort(key=lambda each: each[:3])
        # A stage that runs again holds its gradients apart, which the formula leaves out.
        plain = (each for each in cuts if set(each[-1].recompute) == {"never"} and each[0] < HOPELESS * cuts[0][0])
        for over, step_s, index, cut in (*cuts[:1], *islice(plain, 1), *cuts[1:]):
            if over > fullest:
                continue
            beaten = (
                ratio * (1.0 if each.cut.step_s <= step_s else _EXACT) <= over and each.worst <= _EXACT * ratio
                for ratio, each in tried.values()
            )
            if (index, cut) not in tried and not any(beaten):
                tried[index, cut] = over, self._finish(self.entries[index], cut)
            if len(tried) == _MIN_MEMORY_CUTS or (first and any(each.verdict != "no" for _, each in tried.values())):
                break

    def alternatives(self, besides: Alternative) -> list[Alternative]:
        """Return the weighed alternatives, as the plan's file has them, without one; replayed ones with their peaks."""
        replayed = [
            self._alternative(each.entry, each.cut, each.writer.partition.value_s, each.peaks, each.verdict)
            for each in self.finished
        ]
        replayed = [each for each in replayed if each.choice != besides.choice]
        known = {besides.choice, *(each.choice for each in replayed)}
        weighed = (
            self._alternative(each.entry, each.cut, each.cut.step_s, each.cut.device_bytes) for each in self.candidates
        )
        return [*replayed, *(each for each in weighed if each.choice not in known)]

    def with_sent(self, each: Alternative) -> Alternative:
        """Return what was weighed with what its cut sends once per step, which a plan's step has in it too."""
        return each.model_copy(update={"step_s": each.step_s + self._sent_s(*self.cut_of[each])})

    def _sent_s(self, entry: Setup, cut: LineCut) -> float:
        """Return how long a cut's values that all microbatches share travel, and its replicas sum their gradients."""
        if (id(entry), cut) not in self.sent:
            sized, index = entry.sized, entry.sized.case.index
            pairs = zip(sized.case.names, sized.coarse.assignment(cut.bounds), strict=True)
            solved = {name: stage for names, stage in pairs for name in names}
            stage_of = assign(index, solved, stages=entry.settled.stages)
            summed_s = cut_summed_s(entry.search.model.schedule, sized.case.costs, stage_of, entry.options)
            self.sent[id(entry), cut] = summed_s + cut_sent_s(index, sized.case.costs, stage_of, entry.options)
        return self.sent[id(entry), cut]

    def _alternative(
        self,
        entry: Setup,
        cut: LineCut,
        step_s: float,
        held: Sequence[int],
        replayed: Verdict | None = None,
    ) -> Alternative:
        """``replayed`` is the verdict of a replay; without one the formula's peaks are held against the limits.

        They count as much above the formula as replays of cuts of their kind came out at least.
        """
        limits = self.sweep.memory_limits(entry.problem)
        above = self.above.get(frozenset(cut.recompute), 1.0)
        expected = [above * size for size in held]
        fits = limits is not None and _within(expected, limits)
        near = limits is None or _within(expected, [limit * _NEAR for limit in limits])
        alternative = Alternative(
            chunks=entry.options.chunks,
            schedule=entry.settled.schedule,
            virtual_stages=entry.settled.virtual_stages,
            replicas=entry.options.replicas or (),
            recompute=recompute_of(cut.recompute),
            step_s=step_s + entry.sized.once_s,
            peak_bytes=max(held),
            verdict=replayed or ("fits" if fits else "borderline" if near else "no"),
            replayed=replayed is not None,
        )
        self.cut_of[alternative] = entry, cut
        return alternative


def _frontier(chosen: Alternative, others: Sequence[Alternative]) -> tuple[Alternative, ...]:
    """Return what was chosen and of the others those that nothing beats in both step and peak, the fastest first.

    The formula may find another better by a little that a replay would not: what was chosen stays.
    """
    kept: list[Alternative] = []
    for each in sorted((chosen, *others), key=lambda other: (other.step_s, other.peak_bytes)):
        if each is chosen or not kept or each.peak_bytes < kept[-1].peak_bytes:
            kept.append(each)
    beaten = {
        id(each)
        for each in kept
        if each is not chosen
        and ((each.step_s >= chosen.step_s and each.peak_bytes >= chosen.peak_bytes) or _same(each, chosen))
    }
    return tuple(each for each in kept if id(each) not in beaten)


def _same(each: Alternative, chosen: Alternative) -> bool:
    """Tell whether another is no better than what was chosen by more than the formula is worth."""
    return (
        each.verdict == chosen.verdict
        and each.step_s > 0.99 * chosen.step_s
        and (each.peak_bytes > 0.99 * chosen.peak_bytes)
    )


def _within(held: Iterable[float], limits: Iterable[float]) -> bool:
    """Tell whether every device keeps its limit."""
    return all(size <= limit for size, limit in zip(held, limits, strict=False))
