"""Every configuration of a space on a coarse problem: microbatches x schedules x what is recomputed.

    recording ─► profile and problem per microbatch size ─► units ─► per schedule: the best cut of the line of units

Peaks are the additive formula's, steps are simulated. Nothing is replayed here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from autosplit.errors import InputError, ScheduleError
from autosplit.options import Options
from autosplit.partition.graph import Graph, base_graph
from autosplit.partition.line.coarse import coarsened, runs
from autosplit.partition.line.line import Line
from autosplit.partition.line.search import LineSearch, Policy, listed
from autosplit.partition.problem import RECOMPUTE, Problem
from autosplit.planning.plan.write import shared_s
from autosplit.planning.profiled.between import Pieces, pieces_of
from autosplit.planning.profiled.formulate import scheduled
from autosplit.planning.profiled.problem import ProfiledProblem, RecordedModel
from autosplit.planning.request import ResolvedSchedule, settle, sizes_of
from autosplit.planning.search.replicas import Sized, best_replicas, once_on_last

_FEW = 4
"""Pieces per device from which on the search looks at no other cuts than between them."""
_UNITS = 320
"""About as many units a model is cut into at most."""


@dataclass(frozen=True)
class Space:
    """What may be chosen: how many microbatches, which schedule with how many stages per device, what is recomputed.

    ``recompute`` is as in `Options`: one entry for all stages, one per stage, or None for what the memory asks for.
    ``left_out`` are pairs of a number of microbatches and a schedule that are not looked at.
    """

    chunks: tuple[int, ...]
    schedules: tuple[tuple[str, int], ...] = (("1f1b", 1),)
    recompute: tuple[str, ...] | None = None
    left_out: frozenset[tuple[int, tuple[str, int]]] = frozenset()


@dataclass(frozen=True)
class Setup:
    """One configuration except for what is recomputed, and the search for its cuts."""

    sized: Sized
    options: Options
    settled: ResolvedSchedule
    problem: Problem
    """That of the units."""

    @cached_property
    def search(self) -> LineSearch:
        """The search; made when it is asked for. Raises ScheduleError."""
        alike = self.problem.works is self.sized.coarse.problem.works
        line = self.sized.line if alike else Line(self.problem)
        return LineSearch(line, self.problem, stages=self.settled.stages)

    @property
    def has_schedule(self) -> bool:
        """Whether the schedule can be built."""
        try:
            return bool(self.search)
        except ScheduleError:
            return False

    @property
    def case(self) -> ProfiledProblem:
        """The whole problem of the configuration."""
        return self.sized.case.under(self.options, self.settled)


class Sweep:
    """The configurations of a space."""

    def __init__(self, recorded: RecordedModel, options: Options, space: Space, *, rows: int) -> None:
        self.recorded, self.options, self.space, self.rows = recorded, options, space, rows
        self._units: tuple[int, ...] | None = None
        self._parts = 0
        self.group_of: tuple[int, ...] = ()
        """Of each work the group that cannot be separated, in an order that may be cut anywhere."""
        self.pieces: Pieces | None = None
        """What lies between two places between modules; None where cuts may fall anywhere."""

    def anywhere(self) -> Sweep:
        """Return the like sweep whose cuts may fall between any operations."""
        options = replace(self.options, cut_between="operations")
        return Sweep(self.recorded, options, self.space, rows=self.rows)

    def entries(self) -> Iterator[Setup]:
        """Yield every configuration that may have a schedule, each pair of sizes and schedule once."""
        every: dict[tuple[int, ...], list[tuple[str, int]]] = {}
        for chunks in self.space.chunks:
            sizes = sizes_of(self.rows, chunks, self.recorded.trace.graph.min_rows, like=self.options.microbatches)
            asked = [each for each in self.space.schedules if (chunks, each) not in self.space.left_out]
            if asked:
                every.setdefault(sizes, []).extend(each for each in asked if each not in every[sizes])
        for sizes, schedules in every.items():
            sized = self._sized(sizes)
            layouts = self._layouts(sized)
            entries = (self._entry(sized, *schedule, replicas) for schedule in schedules for replicas in layouts)
            yield from (entry for entry in entries if entry is not None)

    def _layouts(self, sized: Sized) -> list[tuple[int, ...]]:
        """Return the layouts to try: the replicas of each stage, empty for one each.

        If they are open: one each, the solver's choice, and all devices in one stage. Raises InputError if the given
        ones cannot run operations that mix rows.
        """
        full, devices = self.recorded.outline.full, len(self.options.devices)
        if (asked := self.options.replicas) is None:
            limits = self.memory_limits(sized.case.problem) or [float("inf")]
            best = best_replicas(sized, self.options, recompute=self.space.recompute, limit=limits[0])
            free = devices <= len(sized.case.sizes) and not once_on_last(sized, self.options)
            alone = (devices,) if free else ()
            return list(dict.fromkeys(layout if max(layout, default=1) > 1 else () for layout in ((), best, alone)))
        if asked and asked[-1] > 1 and full:
            raise InputError(
                f"replicas={list(asked)}: {full[0].name!r} mixes the rows of a batch, or changes what they have read, "
                "so it runs once per step, on one device of the last stage; give that stage one replica"
            )
        return [asked]

    def _sized(self, sizes: tuple[int, ...]) -> Sized:
        """Return the model for microbatches of some sizes."""
        options = replace(self.options, chunks=len(sizes))
        case = self.recorded.problem(options, sizes)
        problem = case.problem
        if self._units is None:
            graph = base_graph(problem)
            self.group_of, self._parts = graph.group_of, graph.size
            places = self._module_places(case, graph)
            if places is not None:
                self._parts = len(places) + 1
            self._units = runs(problem, graph, most=self._most(), places=places)
        coarse = coarsened(problem, self._units)
        once_s = shared_s(self.recorded.trace.graph, case.costs)
        return Sized(case, coarse, Line(coarse.problem), once_s)

    def _module_places(self, case: ProfiledProblem, graph: Graph) -> tuple[int, ...] | None:
        """Return where units begin: between modules and at narrow places, None: anywhere, for these are too few."""
        if self.options.cut_between != "modules":
            return None
        self.pieces = pieces_of(case, graph.group_of)
        places = self.pieces.places
        return places if len(places) + 1 >= _FEW * len(self.options.devices) else None

    def _most(self) -> int:
        stages = max(virtual_stages for _, virtual_stages in self.space.schedules) * len(self.options.devices)
        return max(_UNITS, 4 * stages)

    def _entry(self, sized: Sized, schedule: str, virtual_stages: int, replicas: tuple[int, ...]) -> Setup | None:
        if replicas and schedule != "1f1b":
            return None
        as_asked = schedule == self.options.schedule
        options = replace(
            self.options,
            chunks=len(sized.case.sizes),
            schedule=schedule,
            virtual_stages=virtual_stages,
            actions=self.options.actions if as_asked else (),
            recompute=self.space.recompute,
            replicas=replicas,
        )
        try:
            settled = settle(options, parts=self._parts, microbatches=len(sized.case.sizes))
            problem = scheduled(sized.coarse.problem, settled)
            splits = "W" in problem.schedule_of(settled.stages).kinds
            if splits and len(self.space.schedules) > 1 and not sized.case.costs.measured:
                return None  # what a backward in two parts takes is not known
            if settled.warning is not None and self._wide():
                return None
            return Setup(sized, options, settled, problem)
        except ScheduleError:
            if len(self.space.schedules) == 1 and (len(self.space.chunks) == 1 or not replicas):
                raise
            return None

    def _wide(self) -> bool:
        """Tell whether some schedule has work for every device; one with more stages on fewer is then no choice."""
        return any(len(self.options.devices) * each <= self._parts for _, each in self.space.schedules)

    def memory_limits(self, problem: Problem) -> list[float] | None:
        """Return the bytes of each device, None where none has a limit."""
        if problem.capacity_bytes is None:
            return None
        return [float("inf") if limit is None else float(limit) for limit in problem.capacity_bytes]

    def recompute_policies(self, stages: int) -> list[Policy]:
        """Return what stages may recompute, one policy after the other."""
        asked = self.space.recompute
        if asked is not None and len(asked) > 1:
            return [listed(asked[:stages])] if len(asked) >= stages else []
        alone = ((option,) for option in RECOMPUTE if option != "never")
        options = [("never",), RECOMPUTE, *alone] if asked is None else [asked]
        if asked is None and self.recorded.trace.graph.checkpoints:
            options = [("block",), ("always",)]
        return [[each] * stages for each in options]
