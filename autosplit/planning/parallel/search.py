"""The search over meshes: for each a pipeline's search on what one rank has, the likeliest first.

    degrees x ZeRO stage x microbatch x schedule ─► bound of the step ─► shortest bound first ─► best cut, replayed
                                                                           ▲                          │
                                                                           └─ until no bound is less ─┘

The bound of a mesh counts all work of a rank, evenly spread over its stages, and the least that fills a pipeline: what
is left out by it is at most a hundredth faster than the best that was found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from math import inf
from typing import Any

from autosplit.errors import InputError
from autosplit.options import Options
from autosplit.parallel import Parallel, check_zero, place
from autosplit.planning.explain.reasons import reasons
from autosplit.planning.paper import OnPaper, search_space, stand_ins
from autosplit.planning.parallel.reasons import Weighed, mesh_reasons, simplest
from autosplit.planning.plan.fields import MeshAlternative, MeshDegrees
from autosplit.planning.plan.plan import Plan
from autosplit.planning.profiled.formulate import state_bytes
from autosplit.planning.request import sizes_of
from autosplit.planning.search.choose import PlanChoice, Search
from autosplit.planning.search.finish import Finished
from autosplit.planning.search.sweep import Space
from autosplit.profile.types import Profile
from autosplit.progress import phase
from autosplit.runtimes import RUNTIMES, RuntimeName
from cost_models.machines import MachineSpec

_SIZES = 6
"""How many sizes of microbatches are looked at: 1, 2, 4, ... rows."""
_GAIN = 0.01
"""By how much a mesh must be faster than the best by its bound to be searched."""


@dataclass(frozen=True)
class MeshRequest:
    """What is planned for a mesh.

    Attributes:
        paper: the recorded model.
        machine: all devices.
        choices: what was asked for, as arguments of `Options`, from the number of ``devices`` in a pipeline.
        degrees: those that were given; "auto": the best.
        zero: the ZeRO stage; "auto": the best.
        free_chunks: whether the number of microbatches is open.
        runtime: the runtime that trains, by `RUNTIMES`.
        like: has how autosplit gathers under ZeRO-3, and in what it adds up and shards.
    """

    paper: OnPaper
    machine: MachineSpec
    choices: Callable[..., dict[str, Any]]
    degrees: Parallel | str
    zero: int | str
    free_chunks: bool
    runtime: RuntimeName = "autosplit"
    like: Parallel = field(default_factory=Parallel)

    @property
    def asked(self) -> Parallel | None:
        """The degrees that were given."""
        return self.degrees if isinstance(self.degrees, Parallel) else None

    @property
    def rows(self) -> int:
        """The rows of the global batch."""
        return self.paper.recorded.rows

    def options(self, parallel: Parallel) -> Options:
        """Return the options of one pipeline of a mesh."""
        placed = place(self.machine, parallel)
        choices = self.choices(devices=parallel.pp)
        devices = stand_ins(placed.pipeline)
        return replace(self.paper.options, **choices, devices=devices, machine=placed.pipeline, placed=placed)


def plan_mesh(request: MeshRequest) -> Plan:
    """Return the best plan for a mesh, of all meshes where none is given, with reasons and the other meshes.

    Raises InputError for degrees that do not divide the batch or what ranks would share, or where no mesh is possible.
    """
    search = MeshSearch(request)
    best = search.run()
    plan = PlanChoice(best.search, best.finished).plan
    others = [other for other in search.alternatives() if other.mesh != plan.mesh]
    compared = plan.model_copy(update={"meshes": tuple(others)})
    why = mesh_reasons(compared) if request.asked is None else ()
    return compared.model_copy(update={"reasons": (*why, *reasons(compared))})


class _Mesh:
    """One mesh and what may be chosen in it: the sizes of its microbatches and schedules, by their lower bounds."""

    def __init__(self, request: MeshRequest, parallel: Parallel) -> None:
        self.request, self.parallel, self.options = request, parallel, request.options(parallel)
        self.rows, self.degrees = request.rows // parallel.dp, MeshDegrees(**asdict(parallel))

    @cached_property
    def space(self) -> Space:
        """The whole space of the mesh's pipeline."""
        if not self.request.free_chunks:
            return search_space(self.options, rows=self.rows, free_chunks=False)
        least = self.request.paper.recorded.trace.graph.min_rows
        sizes = [least * 2**power for power in range(_SIZES) if self.rows % (least * 2**power) == 0]
        counts = {self.rows // size for size in sizes} or {1}
        enough = {count for count in counts if count >= self.parallel.pp} or {max(counts)}
        return replace(search_space(self.options, rows=self.rows, free_chunks=False), chunks=tuple(sorted(enough)))

    @cached_property
    def bounds(self) -> dict[tuple[int, tuple[str, int]], float]:
        """The lower bound of a step in each number of microbatches under each schedule."""
        bounds = {}
        for chunks in self.space.chunks:
            each_s = sum(node.forward_s + node.backward_s for node in self._costs(chunks).nodes.values())
            for name, each in self.space.schedules:
                fill, odd = (self.parallel.pp - 1) / each, name == "interleaved" and chunks % self.parallel.pp
                never = odd and self.parallel.rules.in_rounds
                bounds[chunks, (name, each)] = inf if never else (chunks + fill) * each_s / self.parallel.pp
        return bounds

    def _costs(self, chunks: int) -> Profile:
        """Return what a rank does with one microbatch of the whole model."""
        recorded = self.request.paper.recorded
        sizes = sizes_of(self.rows, chunks, recorded.trace.graph.min_rows)
        return recorded.of_rank(recorded.profile(self.options, sizes), self.options)

    @cached_property
    def fullness(self) -> float:
        """What a device holds of states alone, evenly spread, relative to what it has room for."""
        room = self.options.room_bytes(0)
        states = self._costs(self.space.chunks[0]).state.values()
        total = sum(state_bytes(state, self.options).total for state in states)
        return 0.0 if room is None else total / self.parallel.pp / max(room, 1)

    @property
    def bound_s(self) -> float:
        """The least of its bounds."""
        return min(self.bounds.values())


@dataclass(frozen=True)
class _Found:
    """The best cut of a mesh."""

    mesh: _Mesh
    search: Search
    finished: Finished

    @property
    def step_s(self) -> float:
        """The step with its update."""
        return self.finished.step_s + self.finished.writer.update_s

    @property
    def rank(self) -> tuple[float, ...]:
        """The less the better, as `Finished.rank` has it."""
        first, *_ = self.finished.rank
        return first, self.step_s if first < 3 else self.finished.worst


class MeshSearch:
    """Searches the meshes of a request."""

    def __init__(self, request: MeshRequest) -> None:
        self.request = request
        self.weighed: list[_Found] = []
        self.left: list[_Mesh] = []

    def run(self) -> _Found:
        """Return the best mesh; those without a pipeline come first, as they take least to search.

        Meshes whose states alone are more than a device holds come last.
        """
        with phase("searching meshes"):
            meshes = [_Mesh(self.request, parallel) for parallel in self._degrees()]
            if not meshes:
                raise InputError(
                    f"no mesh of {len(self.request.machine)} devices divides the batch of {self.request.rows} rows; "
                    "give another batch, or mesh={'dp': ..., 'tp': ..., 'pp': ...}"
                )
            for mesh in sorted(meshes, key=lambda mesh: (mesh.fullness > 1, mesh.parallel.pp > 1, mesh.bound_s)):
                self._look_at(mesh)
            if not self.weighed:
                counts = sorted({count for mesh in meshes for count in mesh.space.chunks})
                raise InputError(
                    f"runtime={self.request.runtime!r} runs interleaved in rounds of pp microbatches, and pp divides "
                    f"none of chunks={counts}; give chunks= that it divides, or schedule='1f1b'"
                )
        if self.best.rank[0] > 1:
            return self.best
        return self.weighed[simplest([Weighed(e.rank[0], e.step_s, e.mesh.parallel) for e in self.weighed])]

    @property
    def best(self) -> _Found:
        """The best so far."""
        return min(self.weighed, key=lambda entry: entry.rank)

    def _look_at(self, mesh: _Mesh) -> None:
        """Find the best cut of a mesh among what may make a shorter step than the best."""
        enough_s = inf
        if self.weighed and self.best.rank[0] == 0:
            enough_s = self.best.step_s * (1 - _GAIN)
            if mesh.fullness > 1:
                enough_s = 0.0
        elif self.weighed and mesh.fullness > 1 and mesh.fullness > self.best.finished.worst:
            enough_s = 0.0
        slow = frozenset(pair for pair, bound_s in mesh.bounds.items() if bound_s >= enough_s)
        if len(slow) == len(mesh.bounds):
            self.left += [mesh] if mesh.bound_s < inf else []
            return
        space = replace(mesh.space, left_out=slow)
        search = Search(self.request.paper.of(mesh.options).sweep(space, rows=mesh.rows))
        try:
            finished = search.run() if enough_s == inf else search.faster(enough_s)
        except InputError:
            if self.request.asked is not None:
                raise
            return
        if finished is None:
            self.left.append(mesh)
        else:
            self.weighed.append(_Found(mesh, search, finished))

    def _degrees(self) -> Iterator[Parallel]:
        """Yield the meshes that divide the devices, the batch, and what ranks share of tensors."""
        asked, machine, rows = self.request.asked, self.request.machine, self.request.rows
        if asked is not None:
            self._check(asked)
            yield from self._sharded(asked)
            return
        count = len(machine)
        island = sum(machine.island_of(device) == machine.island_of(0) for device in range(count))
        parts = len(set(self.request.paper.recorded.outline.blocks.values())) or count
        for tp in self._tensor_degrees(island):
            for dp in range(1, count // tp + 1):
                pp = count // (tp * dp)
                if tp * dp * pp == count and rows % dp == 0 and pp <= parts:
                    yield from self._sharded(Parallel(dp, tp, pp))

    def _sharded(self, parallel: Parallel) -> Iterator[Parallel]:
        """Yield a mesh with each ZeRO stage that is worth a look: 1 is never slower than 0, and 3 holds the least."""
        asked, parallel = check_zero(self.request.zero), self._by_runtime(parallel)
        there = parallel.zero_stages
        zeros = {1 if 1 in there else 0, 3} if asked is None else {asked}
        for zero in sorted(zeros.intersection(there)) if parallel.replicas > 1 else (0,):
            like = self.request.like
            dtypes: dict[str, Any] = {"sum_bytes": like.sum_bytes, "shard_bytes": like.shard_bytes}
            yield replace(parallel, zero=zero, by_units=like.by_units and zero == 3, **dtypes)

    def _by_runtime(self, parallel: Parallel) -> Parallel:
        runtime = self.request.runtime
        return replace(parallel, runtime=runtime, sequence=RUNTIMES[runtime].sequence and parallel.tp > 1)

    def _tensor_degrees(self, most: int) -> Iterator[int]:
        """Yield how many ranks, of those that divide the devices, may share tensors."""
        count = len(self.request.machine)
        for tp in (tp for tp in range(1, most + 1) if count % tp == 0):
            with suppress(InputError):
                parallel = self._by_runtime(Parallel(tp=tp))
                self.request.paper.recorded.shares(parallel, rng=self.request.paper.options.rng)
                yield tp

    def _check(self, parallel: Parallel) -> None:
        rows = self.request.rows
        if rows % parallel.dp:
            near = [dp for dp in range(1, rows + 1) if rows % dp == 0 and dp <= len(self.request.machine)]
            raise InputError(
                f"dp={parallel.dp} does not divide the batch of {rows} rows; degrees that do: "
                f"{', '.join(map(str, near))}"
            )

    def alternatives(self) -> list[MeshAlternative]:
        """Return every mesh that was weighed, the fastest first; of some only a bound is known."""
        known = [
            MeshAlternative(mesh=entry.mesh.degrees, step_s=entry.step_s, verdict=entry.finished.verdict)
            for entry in self.weighed
        ]
        known += [
            MeshAlternative(
                mesh=mesh.degrees,
                step_s=mesh.bound_s,
                bound=True,
                verdict="no" if mesh.fullness > 1 else None,
            )
            for mesh in self.left
        ]
        return sorted(known, key=lambda other: other.step_s)
