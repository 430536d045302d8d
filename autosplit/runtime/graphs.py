"""Which cells run as graphs, and what runs in their place where there are none.

    step 1    every cell as it is: the warm-up, on the streams that a capture takes place on
    step 2    a cell that finds no free slot of its kind captures one; then, as ever after, it replays that
    slots     a stage has as many as it has microbatches in flight: a slot is free when its cell's backward is over

A kind is what shapes the work: sizes, layouts, types, grad mode, autocast, and torch's own settings.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import GradientEdge

from autosplit.runtime.ambient import ThreadState, is_transformed, needs_one_thread, watched
from autosplit.runtime.behind import leaves_behind
from autosplit.runtime.border import Border, check_unchanged, versions
from autosplit.runtime.differentiate import gradients
from autosplit.runtime.graph_slot import Back, Leaf, Own, Slot, explained
from autosplit.runtime.graph_state import Watched
from autosplit.runtime.lanes import CudaLane, Lane
from autosplit.runtime.ops import Key
from autosplit.runtime.put_off import PutOff, put_off
from autosplit.runtime.recompute import spread
from autosplit.trace.calls import Ambient
from autosplit.trace.graph import INFO
from autosplit.trace.scope import has_module_hooks
from autosplit.units import format_bytes

if TYPE_CHECKING:
    from autosplit.runtime.cells import Cells

_KINDS = 4
"""How many kinds of cells of one stage have graphs: each holds memory for good."""


@dataclass
class _Kind:
    born: int
    """The step in which it was met first, which is its warm-up."""
    slots: list[Slot] = field(default_factory=list)


class Lease:
    """Holds a slot for one cell; when nobody holds the lease the slot is free."""

    def __init__(self, slot: Slot) -> None:
        self.slot = slot
        slot.busy = True

    def __del__(self) -> None:
        self.slot.busy = False


class StageGraphs:
    """The graphs of one stage of one recording.

    Attributes:
        reason: why cells ran as they are, apart from the warm-up; "" where none did.
        anew: how often graphs were dropped because the model had changed.
    """

    def __init__(self, lowered: Any, stage: int, lane: Lane) -> None:
        self.lowered, self.stage, self.lane = lowered, stage, lane
        self.kinds: dict[Any, _Kind] = {}
        self.reason = self.failed = ""
        self.anew = 0
        self.own: Own | None = None

    def begin(self) -> None:
        """Look at the model before a step: where it is no longer what the graphs were made of they are dropped."""
        if self.failed or (self.own is not None and self.own.watched.holds()):
            return
        region = self.lowered.stages[self.stage]
        self.anew += bool(self.kinds)
        self.kinds.clear()
        self.own = None
        if not isinstance(self.lane, CudaLane):
            self.failed = f"its device is {self.lane.device}, and graphs are for CUDA devices"
            return
        nodes = self.lowered.layout.stages[self.stage].nodes
        random = tuple(node.meta[INFO].name for node in nodes if node.meta[INFO].random)
        writes = {name for node in nodes for name in node.meta[INFO].writes}
        named = region.root.named_parameters, region.root.named_buffers
        state = itertools.chain.from_iterable(every(remove_duplicate=False) for every in named)
        self.own = Own(self.lane, Watched(region), random, frozenset(id(t) for name, t in state if name in writes))

    def refusal(self, cells: Cells) -> str:
        """Return why no cell of a step may run as a graph, or ""."""
        if self.failed or self.own is None:
            return self.failed
        inputs = bool(cells.layout.stages[self.stage].inputs)
        known = {
            elsewhere(self.own.lane, self.own.watched.tensors): True,
            self.own.watched.reason: bool(self.own.watched.reason),
            "the model changes its inputs in place": inputs and self.lowered.changes_inputs,
            "modules have global hooks": has_module_hooks(),
            "torch looks for anomalies": torch.is_anomaly_enabled(),
            "a mode, a transform or hooks on saved tensors see every operation": watched()
            or is_transformed()
            or needs_one_thread(),
            "its weight gradients come in another order than their microbatches": not _in_order(cells, self.stage),
        }
        return next((reason for reason, holds in known.items() if reason and holds), "")

    def lease(
        self, kind: Any, step: int, run: Callable[..., Any], given: Sequence[Any], *, most: int, grad: bool, again: bool
    ) -> Lease | None:
        """Return a slot for a cell, captured where no one is free; None where the cell has to run as it is."""
        own = self.kinds.get(kind)
        if own is None:
            if len(self.kinds) < _KINDS:
                self.kinds[kind] = _Kind(step)
            else:
                self.reason = f"its cells are of more than {_KINDS} kinds (sizes, types, modes)"
            return None
        if own.born == step:
            return None
        free = next((slot for slot in own.slots if not slot.busy), None)
        if free is None and len(own.slots) >= most:
            self.reason = f"more than {most} of its microbatches are in flight, one step's and another's"
            return None
        if free is None:
            assert self.own is not None, "a stage that may have graphs"
            try:
                with self.own.counted():
                    free = Slot(self.own, run, given, self.lowered.takes[self.stage], grad=grad)
                    free.find_read(again=again, units=bool(self.lowered.stages[self.stage].units))
            except Exception as error:
                self.fail(error)
                return None
            own.slots.append(free)
        return Lease(free)

    def fail(self, error: BaseException) -> None:
        """Have no more graphs from now on; cells under way keep theirs until they are through."""
        self.failed = self.failed or explained(error)
        self.kinds.clear()

    def line(self) -> str:
        """Return what the report says of the stage."""
        slots = [slot for kind in self.kinds.values() for slot in kind.slots]
        reason = self.failed or self.reason
        if not slots:
            return f"stage {self.stage}: no graphs: {reason or 'its first step is the warm-up'}"
        graphs = f"{len(slots)} forwards and {sum(len(slot.backs) for slot in slots)} backwards as graphs"
        held = "" if self.own is None else f", {format_bytes(self.own.held_bytes)} held for good"
        anew = f", made anew {self.anew} times as the model had changed" if self.anew else ""
        return f"stage {self.stage}: {graphs}{held}{anew}" + (f"; not all: {reason}" if reason else "")


class Graphs:
    """The graphs of one recording, stage by stage."""

    def __init__(self, lowered: Any, lanes: Sequence[Lane]) -> None:
        self.stages = [StageGraphs(lowered, stage, lane) for stage, lane in enumerate(lanes)]
        self.steps = 0

    def begin(self, cells: Cells) -> Replays:
        """Return what runs the cells of a step."""
        self.steps += 1
        for stage in self.stages:
            stage.begin()
        return Replays(self, cells)


class Replays:
    """Runs the cells of one step, as graphs where they may be."""

    def __init__(self, graphs: Graphs, cells: Cells) -> None:
        self.graphs, self.number = graphs, graphs.steps
        self.settings, self.state = _settings(), ThreadState.current()
        self.sums: dict[int, torch.Tensor] = {}
        """Sums of gradients that are graphs' own, by identity."""
        self.refused = [stage.refusal(cells) for stage in graphs.stages]
        for stage, reason in zip(graphs.stages, self.refused, strict=True):
            stage.reason = reason or stage.reason

    def forward(
        self, cells: Cells, border: Border, stage: int, microbatch: int, run: Callable[..., Any], *given: Any
    ) -> Any:
        """Run a stage on what a cell is given and return what it sends, by target; ``run`` runs it as it is."""
        last, own = microbatch == len(cells.step.sizes) - 1, self.graphs.stages[stage]
        if self.refused[stage] or own.failed:
            return run(*given)
        away = elsewhere(own.lane, (value for value in spread(given)[0] if isinstance(value, torch.Tensor)))
        if away:
            own.reason = away
            return run(*given)
        grad = cells.detached and torch.is_grad_enabled()
        again = cells.lowered.runs_again(stage, last=last)
        kind = (*map(_kind, given), again, grad, self.settings)
        most = len(cells.step.sizes)
        lease = own.lease(kind, self.number, run, given, most=most, grad=grad, again=again)
        if lease is None:
            return run(*given)
        slot = lease.slot
        outs = slot.forward(given)
        if grad and any(out.requires_grad for out in slot.outs):
            wants = [out.requires_grad for out in slot.outs]
            outs = list(_Leave.apply(torch.zeros((), requires_grad=True), wants, *outs))
            border.lease, border.key = lease, next((value for value in given if isinstance(value, Key)), None)
            border.read, border.settled = versions(slot.read), versions(slot.own.settled())
            border.again = partial(self._again, slot.own.watched, run, given)
            nodes = [out.grad_fn for out in outs]
            border.edges = [None if node is None else GradientEdge(node, i) for i, node in enumerate(nodes)]
        flat = iter(outs)
        return {target: tuple(next(flat) for _ in range(count)) for target, count in slot.bundles.items()}

    def _again(self, watched: Watched, run: Callable[..., Any], given: Sequence[Any]) -> dict[str, Any]:
        """Run a stage as it is once more; buffers that it writes to were written to by the graph."""
        copies = {id(t): t.detach().clone() for t in watched.tensors if not isinstance(t, torch.nn.Parameter)}
        try:
            with torch.inference_mode(False), torch.enable_grad(), self.state.autocast(), watched.replaced(copies):
                found: dict[str, Any] = run(*given)
        finally:
            torch.clear_autocast_cache()
        return found

    def backward(
        self, cells: Cells, border: Border, stage: int, microbatch: int, *, whole: bool
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Run the backward of a cell that ran as a graph; ``whole``: not in two parts.

        Where that cannot be a graph the cell runs again as it is: return what its backward begins at, and with what.
        """
        slot, graphs = border.lease.slot, self.graphs.stages[stage]
        came = self._came_in(cells, border, stage, microbatch)
        if all(seed is None for seed in came):
            return [], []
        check_unchanged(border.read, stage)
        last = microbatch == len(cells.step.sizes) - 1
        again = cells.lowered.runs_again(stage, last=last) or bool(cells.lowered.stages[stage].units)
        finds = None if whole else (lambda roots, leaves: PutOff() if again else put_off(roots, leaves))
        try:
            back = slot.back(came, border.key, finds)
        except Exception as error:
            graphs.fail(error)
            check_unchanged(border.settled, stage)
            assert border.again is not None, "a cell that ran as a graph"
            outs = [tensor for bundle in border.again().values() for tensor in bundle]
            begun = [(out, seed) for out, seed in zip(outs, came, strict=True) if seed is not None]
            return [out for out, _ in begun], [seed for _, seed in begun]
        self._ready(cells, stage, back.leaves, slot.own)
        for name, position, gradient in back.replay(came, border.key):
            cells.send_back(stage, microbatch, name.removeprefix("from"), position, gradient)
        if back.rest is not None:
            border.rest = partial(self._weights, cells, stage, back)
        return [], []

    def _weights(self, cells: Cells, stage: int, back: Back) -> None:
        """Add the weight gradients that a backward put off."""
        self._ready(cells, stage, list(back.late.values()), back.own)
        assert back.rest is not None, "something was put off"
        back.rest()

    def _came_in(self, cells: Cells, border: Border, stage: int, microbatch: int) -> list[torch.Tensor | None]:
        """Return the gradients of a cell's outputs; those of the last stage's are made here, from the loss."""
        roots, seeds = cells.roots_of(border, stage, microbatch)
        edges = [edge for edge in border.edges if edge is not None]
        nodes = [edge.node for edge in edges]
        if all(root.grad_fn in nodes for root in roots):
            found = dict(zip((root.output_nr for root in roots), seeds, strict=True))
            return [found.get(place) for place in range(len(border.edges))]
        reached = {id(leaf) for leaf in leaves_behind(roots, stop=nodes)}
        leaves = [(name, i, t) for name, own in border.leaves.items() for i, t in enumerate(own) if id(t) in reached]
        summed = [leaf for leaf in cells.summed[stage] if id(leaf) in reached]
        cells.hold(stage, summed, roots, seeds)
        ends = [*edges, *(t for *_, t in leaves), *summed]
        found_all = list(gradients(roots, seeds, ends, keep=cells.keep))
        came, rest = iter(found_all[: len(edges)]), found_all[len(edges) :]
        for (name, position, _), gradient in zip(leaves, rest, strict=False):
            if gradient is not None:
                cells.send_back(stage, microbatch, name, position, gradient)
        cells.take_totals(stage, zip(summed, rest[len(leaves) :], strict=True))
        return [None if edge is None else next(came) for edge in border.edges]

    def _ready(self, cells: Cells, stage: int, leaves: Sequence[Leaf], own: Own) -> None:
        """Have the sums that a backward adds to be what was summed so far; where that is nothing, minus zero.

        Minus zero plus a number is that number, to the bit, also for zeros of either sign.
        """
        totals, fresh = cells.totals[stage], []
        for leaf in leaves:
            key = id(cells.given[stage][leaf.key[1]]) if isinstance(leaf.key, tuple) else leaf.key
            total, mine = totals.get(key), own.sums[leaf.key]
            if total is None:
                fresh.append(mine)
            elif total is not mine:
                mine.copy_(total)
            totals[key] = self.sums[id(mine)] = mine
        if fresh:
            torch._foreach_zero_(fresh)
            torch._foreach_neg_(fresh)

    def hand_out(self, cells: Cells) -> None:
        """Put copies in the places of the sums that are the graphs' own: the next step begins them anew."""
        for stage, totals in enumerate(cells.totals):
            with cells.step.lanes[stage].active():
                totals.update({key: total.clone() for key, total in totals.items() if id(total) in self.sums})


class _Leave(torch.autograd.Function):
    """Stands in front of what a graph gave: gradients are taken where they arrive at it, and go no further."""

    @staticmethod
    def forward(ctx: Any, start: torch.Tensor, wants: Sequence[bool], *outs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        left = tuple(out.detach() for out in outs)
        ctx.mark_non_differentiable(*(out for out, wanted in zip(left, wants, strict=True) if not wanted))
        return left

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise RuntimeError("a graph's outputs have no backward of autograd's")


def elsewhere(lane: Any, tensors: Iterable[torch.Tensor]) -> str:
    """Return why no graph of a lane can read some of these tensors, or "": of the CPU's it would have the numbers."""
    places = (lane.streams.device(tensor) for tensor in tensors)
    away = next((place for place in places if place != lane.device), None)
    return "" if away is None else f"it uses a tensor on {away}, and graphs on {lane.device} would not see it change"


def _kind(value: Any) -> Any:
    """Return what a graph has in it of a value that a cell is given."""
    if isinstance(value, Key):
        return None
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype, value.device, value.requires_grad, value.is_leaf
    return tuple(map(_kind, value)) if isinstance(value, (tuple, list)) else value


def _settings() -> tuple[Any, ...]:
    """Return what chooses kernels besides the operands, and is read while operations are issued."""
    backends, sdp = torch.backends, torch.backends.cuda
    return (
        Ambient.current().autocast,
        torch.is_autocast_cache_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        (backends.cudnn.enabled, backends.cudnn.benchmark, backends.cudnn.deterministic),
        (sdp.matmul.fp32_precision, backends.cudnn.fp32_precision),
        (sdp.flash_sdp_enabled(), sdp.mem_efficient_sdp_enabled(), sdp.math_sdp_enabled(), sdp.cudnn_sdp_enabled()),
    )


def _in_order(cells: Cells, stage: int) -> bool:
    """Tell whether a schedule makes a stage's gradients in the order of the microbatches."""

    def ascending() -> bool:
        own = [action.microbatch for action in cells.step.schedule if action.stage == stage and action.kind == "I"]
        return own == sorted(own)

    return bool(cells.step.once(("ascending", stage, len(cells.step.sizes)), ascending))
