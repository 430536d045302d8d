"""The sharded parameters of a rank, gathered unit by unit while an action runs: a block, or what lies outside of all.

    turns      unit 0          unit 1          unit 2
    gathered   [ 0 ][ 1 begun ][ 1 ][ 2 begun ][ 2 ]           behind a turn its unit is let go of
    backward   ... behind a turn the gradients that are complete are scattered into sums of shards

Turns of an action are the same on every replica, whatever a backward comes to: a unit that nothing asks for is gathered
in its turn all the same, and where there is no gradient zeros are scattered. So collectives come in one order.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial
from torch.nn import functional as F

from autosplit.backward import dtype_of_sums
from autosplit.distributed.world import World
from autosplit.errors import TraceError
from autosplit.runtime.lower.split import Lowered
from autosplit.runtime.lower.visits import Turn, joined, note_visits
from autosplit.runtime.step.sums import Sums
from autosplit.tensor.part import ShardLayout


class Sharded(NamedTuple):
    """A parameter of which replicas have shards.

    Attributes:
        unit: the number of its unit.
        shard: this replica's shard.
        whole: the parameter that it is gathered to; it has memory while its unit is gathered.
    """

    unit: int
    shard: DTensor
    whole: Tensor


class Units:
    """Gathers the units of a rank one at a time, and adds up shards of their gradients.

    Attributes:
        whole: whether all of them are gathered.
    """

    whole = False

    def __init__(
        self, modules: Sequence[Any], sharded: Mapping[str, Sharded], world: World, dtype: torch.dtype | None
    ) -> None:
        """``modules`` are FSDP2's, a unit each; ``sharded`` are the parameters by all their names.

        Gradients of those that are narrower than ``dtype`` are added up in that.
        """
        self._modules, self._sharded, self._world, self._dtype = modules, sharded, world, dtype
        self._held: set[int] = set()
        self._begun: dict[int, Any] = {}
        self._turns: Sequence[Turn] = ()
        self._at = -1
        self._gradients: Sums | None = None
        self._scattering: list[tuple[list[Sharded], Any]] = []
        self._sums: dict[int, Tensor] = {}
        """Sums of this replica's shards of gradients, by the identity of the shard, flat and padded."""
        self._there: set[int] = set()
        """The shards for which this replica had a gradient."""

    # -- what is gathered ----------------------------------------------------------------------------------------
    @contextmanager
    def gathered(self, names: Iterable[str]) -> Iterator[dict[int, Tensor]]:
        """Have the units of some parameters gathered inside, and others for their turns.

        Returns the parameters that the model has then, by the identity of their shards.
        """
        try:
            with self._holding(sorted({self._sharded[name].unit for name in names if name in self._sharded})):
                for sharded in self._sharded.values():
                    sharded.whole.requires_grad_(sharded.shard.requires_grad)
                yield {id(sharded.shard): sharded.whole for sharded in self._sharded.values()}
        finally:
            self._turns, self._at, self._gradients = (), -1, None
            for unit in list(self._begun):
                self._release(unit)
            self._scattering.clear()
            self._sums.clear()
            self._there.clear()

    @contextmanager
    def all_gathered(self) -> Iterator[None]:
        """Have all units gathered inside; all replicas call it."""
        with self._holding([unit for unit in range(len(self._modules)) if unit not in self._held]):
            self.whole = True
            try:
                yield
            finally:
                self.whole = False

    @contextmanager
    def _holding(self, units: Sequence[int]) -> Iterator[None]:
        for unit in units:
            self._begin(unit)
            self._wait(unit)
        self._held.update(units)
        try:
            yield
        finally:
            self._held.difference_update(units)
            for unit in units:
                self._release(unit)

    def _begin(self, unit: int) -> None:
        if unit not in self._begun:
            with torch.inference_mode(False):  # what is gathered into is trained, too
                self._begun[unit] = self._modules[unit].unshard(async_op=True)

    def _wait(self, unit: int) -> None:
        with torch.inference_mode(False):
            self._world.wait_for("parameters of other replicas", self._begun[unit])

    def _release(self, unit: int) -> None:
        self._wait(unit)
        del self._begun[unit]
        self._modules[unit].reshard()

    # -- the turns of an action ----------------------------------------------------------------------------------
    def turns(self, lowered: Lowered, stage: int, kind: str, *, split: bool) -> list[Turn]:
        """Return the turns of an action of a stage; ``split``: its weight gradients come apart, behind all of them.

        Weight gradients of products want nothing gathered, those of convolutions all of it.
        """
        visits = lowered.visits[stage]
        if kind == "F":
            return self._of_those_not_held(visits.forward())
        complete = [Turn(None, names) for names in reversed(visits.complete())]
        turns = visits.backward() if kind != "W" else []
        if split or kind == "W":
            turns = [Turn(turn.unit) for turn in turns] + (complete if kind != "I" else [])
        return self._of_those_not_held(turns)

    def _of_those_not_held(self, turns: Iterable[Turn]) -> list[Turn]:
        kept = []
        for turn in turns:
            names = tuple(
                name
                for name in turn.complete
                if self._sharded[name].unit not in self._held and self._sharded[name].shard.requires_grad
            )
            if turn.unit not in self._held and (turn.unit is not None or names):
                kept.append(Turn(turn.unit, names))
        return joined(kept)

    def note(self, lowered: Lowered) -> None:
        """Have the graphs of stages say when they read parameters of a unit; raise TraceError where none can."""
        unit_of = {name: sharded.unit for name, sharded in self._sharded.items()}
        for stage, region in enumerate(lowered.stages):
            if stage not in lowered.visits:
                again = lowered.recompute[stage] != "never" and not region.units
                lowered.visits[stage] = note_visits(region, unit_of, self, again=again)
                lowered.codes.pop(stage, None)

    def begin(self, turns: Sequence[Turn], gradients: Sums | None) -> None:
        """Begin to gather the first unit of an action, whose gradients come to some sums; None: it does not run."""
        self._turns, self._at, self._gradients = turns, -1, gradients
        self._ahead()

    def enter(self, unit: int) -> None:
        """Have a unit gathered: the stage is about to read parameters of it."""
        if unit in self._held or (self._at >= 0 and self._turns[self._at].unit == unit):
            return
        while self._at + 1 < len(self._turns):
            self._next()
            if self._turns[self._at].unit == unit:
                return
        raise RuntimeError(f"unit {unit} of the sharded parameters is read out of turn")

    def end(self) -> None:
        """Take the turns that are left; let go of the last unit."""
        while self._at + 1 < len(self._turns):
            self._next()
        self._leave()
        self._turns, self._at, self._gradients = (), -1, None

    def _next(self) -> None:
        self._leave()
        self._at += 1
        if (unit := self._turns[self._at].unit) is not None:
            self._wait(unit)
        self._ahead()

    def _ahead(self) -> None:
        following = self._at + 1
        if following < len(self._turns) and (unit := self._turns[following].unit) is not None:
            self._begin(unit)

    def _leave(self) -> None:
        if self._at < 0 or self._at >= len(self._turns):
            return
        turn = self._turns[self._at]
        if turn.unit is not None:
            self._release(turn.unit)
        if turn.complete:
            sharded = list({id(s.shard): s for s in map(self._sharded.__getitem__, turn.complete)}.values())
            wholes = [each.whole for each in sharded]
            self._scatter(
                sharded, [None] * len(wholes) if self._gradients is None else self._gradients.take_out(wholes)
            )

    def check_fresh(self, unit: int, tensor: Tensor) -> None:
        """Raise TraceError where what was computed with parameters of a unit lies in their memory."""
        memory = tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else 0
        for name, sharded in self._sharded.items():
            if memory and sharded.unit == unit and sharded.whole.untyped_storage().data_ptr() == memory:
                raise TraceError(
                    f"an operation returns a view of the parameter {name!r}, which fsdp_reshard='always' lets go of "
                    "behind its layer; use fsdp_reshard='never'"
                )

    # -- gradients -----------------------------------------------------------------------------------------------
    def _scatter(self, sharded: Sequence[Sharded], gradients: list[Tensor | None]) -> None:
        """Begin to add up gradients over the replicas, each of which gets its shards; the list is empty then."""
        self._add_scattered()
        kinds: dict[torch.dtype, list[tuple[Sharded, Tensor | None]]] = {}
        for each, gradient in zip(sharded, gradients, strict=True):
            kinds.setdefault(dtype_of_sums(each.whole, self._dtype), []).append((each, gradient))
            if gradient is not None:
                self._there.add(id(each.shard))
        gradients.clear()
        for dtype, members in kinds.items():
            shard = members[0][0].shard
            mesh, count = shard.device_mesh, _shards_of(shard)
            rows = [_in_rows(each, gradient, count, dtype) for each, gradient in members]
            flat = DTensor.from_local(torch.cat(rows, 1), mesh, [Partial()] * mesh.ndim, run_check=False)
            local = flat.redistribute(placements=shard.placements, async_op=True).to_local()
            self._scattering.append(([each for each, _ in members], local))

    def _add_scattered(self) -> None:
        """Wait for the sums over the replicas that are under way, and add them to those of other microbatches."""
        for members, local in self._scattering:
            if hasattr(local, "wait"):
                self._world.wait_for("gradients of other replicas", local)
                local = local.wait()
            sizes = [_row_of(each) for each in members]
            for each, values in zip(members, local.view(-1).split(sizes), strict=True):
                if id(each.shard) in self._sums:
                    self._sums[id(each.shard)] += values
                else:
                    dtype = torch.promote_types(values.dtype, each.shard.dtype)
                    self._sums[id(each.shard)] = values.to(dtype, copy=len(members) > 1)
        self._scattering.clear()

    def take_sums(self) -> dict[int, tuple[bool, DTensor]]:
        """Take out the sums, by the identity of the shard, each with whether this replica had a gradient."""
        self._add_scattered()
        sums = {}
        for shard in {id(sharded.shard): sharded.shard for sharded in self._sharded.values()}.values():
            if (total := self._sums.pop(id(shard), None)) is not None:
                local = shard.to_local()
                values = total[: local.numel()].view(local.shape).to(shard.dtype)
                sums[id(shard)] = id(shard) in self._there, ShardLayout.of(shard).around(values)
        self._there.clear()
        return sums

    def held_for(self, lowered: Lowered) -> Collection[str]:
        """Return the names of what a step reads outside of its actions, too: once per step, or behind them."""
        names = set(lowered.layout.read_once())
        if lowered.epilogue is not None:
            names.update(name for name, _ in lowered.epilogue.named_parameters())
        return names


def _shards_of(shard: DTensor) -> int:
    """Return over how many replicas a parameter is spread."""
    return next(
        size for size, placed in zip(shard.device_mesh.shape, shard.placements, strict=True) if placed.is_shard()
    )


def _row_of(sharded: Sharded) -> int:
    """Return how many elements the largest shard of a parameter has."""
    count, whole = _shards_of(sharded.shard), sharded.shard
    return -(-whole.shape[0] // count) * (whole.numel() // whole.shape[0] if whole.shape[0] else 0)


def _in_rows(sharded: Sharded, gradient: Tensor | None, count: int, dtype: torch.dtype) -> Tensor:
    """Return the shards of a gradient one below the other, each as long as the largest; zeros for none."""
    size = _row_of(sharded)
    if gradient is None:
        return sharded.shard.to_local().new_zeros(count, size, dtype=dtype)
    dense = (gradient.to_dense() if gradient.is_sparse else gradient).reshape(-1).to(dtype)
    padding = count * size - dense.numel()
    return (F.pad(dense, (0, padding)) if padding else dense).view(count, size)
