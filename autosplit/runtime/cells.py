"""The cells of one step: one stage on one microbatch, each with borders of its own and a backward of its own.

    forward of a cell     detach what comes in ─► stage ─► keep inputs and outputs until the backward
    backward of a cell    gradients of the outputs ─► autograd.grad ─► gradients of what came in, and of the parameters
    or in two parts       input gradient: of what came in; weight gradients: what was put off (put_off.py)

Any thread may run a cell, one after another or at the same time, as long as what it takes is there. What a stage
sums up belongs to its own lane. Contributions add in the order of the stage's backwards, so the order is the same
on any cut.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from autosplit.profile.stage_trace import LARGE_BYTES
from autosplit.runtime.ambient import any_autocast
from autosplit.runtime.border import Border as Border
from autosplit.runtime.differentiate import gradients
from autosplit.runtime.handed import handed
from autosplit.runtime.lanes import Lane
from autosplit.runtime.ops import OUT, Bundle, CallState, Key, enter, leave, take, transfer
from autosplit.runtime.put_off import PutOff, put_off
from autosplit.runtime.step_log import StepLog
from autosplit.runtime.turns import forwards
from autosplit.schedule.action import Action, Schedule
from autosplit.trace.scope import has_module_hooks


@dataclass
class Step:
    """One call of the pipe: what to run, on what, in which schedule.

    ``lowered`` are the pieces (:class:`autosplit.lower.split.Lowered`); ``setup`` and ``ending`` the parts of the
    program before the first cell and behind the last; ``locate`` adds a note to an exception of an action.
    """

    lowered: Any
    setup: Callable[..., Any]
    ending: Callable[..., Any]
    locate: Callable[..., None]
    tensors: list[torch.Tensor]
    rows: int
    lengths: dict[str, int]
    """The lengths for which the recording has symbols, by their names."""
    sizes: tuple[int, ...]
    lanes: tuple[Lane, ...]
    """One lane per stage, and last the caller's device."""
    state: CallState
    planned: Callable[[int], Schedule]
    """Gives the plan's schedule for a number of microbatches."""
    orders: dict[Any, Any]
    """Schedules made ready to run, kept from call to call."""
    log: StepLog | None = field(default=None, kw_only=True)
    """Notes what runs, where somebody asked for that."""

    @property
    def schedule(self) -> Schedule:
        """The plan's schedule for this call's microbatches."""
        count = len(self.sizes)
        return self.once(("schedule", count), lambda: self.planned(count))

    def forwards(self) -> Sequence[Action]:
        """Return the forwards of the schedule in the order in which one thread issues them."""
        return forwards(self.schedule).issue_order

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        """Return what ``make`` made at the first call with this key."""
        if key not in self.orders:
            self.orders[key] = make()
        return self.orders[key]

    def given(self) -> tuple[Any, ...]:
        """Return what the program takes."""
        return (*self.tensors, self.rows, *self.lengths.values(), self.sizes, self.lanes, self.state)

    def start(self) -> Start:
        """Run what comes before the first cell, in the caller's thread and graph."""
        with self.located():
            return Start(*self.setup(*self.given()))

    @contextlib.contextmanager
    def entered(self) -> Iterator[list[Any]]:
        """Order the lanes' work behind the caller's, and at the end the caller's behind theirs.

        Yields a list for the tensors that the caller is going to use.
        """
        *stages, caller = self.lanes
        own = list(dict.fromkeys(stages))
        handed: list[Any] = []
        enter(caller, own)
        try:
            yield handed
        finally:
            leave(caller, own, handed)

    def end(self, start: Start, bundles: Mapping[int, Sequence[Bundle]]) -> Sequence[Any]:
        """Run what comes behind the last cell, on what the stages gave per microbatch; return the flat outputs."""
        with self.located():
            return self.ending(*self.given(), start.kept, bundles)

    @contextlib.contextmanager
    def located(self) -> Iterator[None]:
        """Add a note to an exception that says where in the program it was raised."""
        try:
            yield
        except Exception as error:
            self.locate(error)
            raise


@dataclass(frozen=True)
class Start:
    """What the cells begin with.

    Attributes:
        inputs: per stage that takes any, its microbatches of the batch.
        shared: per stage that takes any, its shared values and tied parameters.
        kept: what the ending wants of the values that the setup made.
    """

    inputs: dict[int, Sequence[Bundle]]
    shared: dict[int, Bundle]
    kept: Bundle


class Cells:
    """Runs forwards and backwards of one step's cells and adds up the gradients.

    With ``detached=False`` values go from cell to cell as they are: nothing is kept for :meth:`backward`, and autograd,
    where it is on, sees the whole graph.
    """

    def __init__(self, step: Step, start: Start, *, detached: bool) -> None:
        self.step = step
        self.start = start
        self.detached = detached
        self.keep = False
        """Whether backwards leave the cells' graphs for another backward."""
        self.lowered = step.lowered
        self.layout = self.lowered.layout
        self.last = len(self.lowered.stages) - 1
        self.cells: dict[tuple[int, int], Border] = {}
        self.given = {s: _detached(bundle) if detached else bundle for s, bundle in start.shared.items()}
        self.parameters = [[p for p in stage.parameters() if p.requires_grad] for stage in self.lowered.stages]
        self.aliased = detached and (has_module_hooks() or any_autocast())
        self.clear()

    def clear(self) -> None:
        """Forget gradients: of parameters, shared values, inputs, and of what cells sent."""
        self.summed = [
            [leaf for leaf in (*self.given.get(stage, ()), *own) if leaf.requires_grad]
            for stage, own in enumerate(self.parameters)
        ]
        """By stage, the leaves whose gradient is a sum over microbatches: shared values, tied and own parameters."""
        self.totals: list[dict[int, torch.Tensor]] = [{} for _ in self.summed]
        """By stage, the sums so far by the leaf's identity."""
        self.apart: set[int] = set()
        """Leaves, by identity, that are not the lane's own: autograd may add their gradients on another stream."""
        self.own: list[set[int]] = [set() for _ in self.summed]
        """By stage, the leaves, by identity, whose sum is memory that nothing else uses."""
        self.added = [0 for _ in self.summed]
        """By stage, how many microbatches were added, but for what was put off."""
        self.input_gradients: dict[tuple[int, int, int], torch.Tensor] = {}
        """By stage, microbatch and position in the stage's bundle of inputs."""
        for border in self.cells.values():
            border.gradients.clear()

    def act(self, action: Action) -> None:
        """Perform an action; an exception gets a note that says where it happened."""
        log = self.step.log
        try:
            if log is not None:
                log.begins(action)
            perform = {"F": self.forward, "B": self.backward, "I": self.input_gradient, "W": self.weight_gradients}
            perform[action.kind](action.stage, action.microbatch)
            if log is not None:
                log.ends(action)
        except BaseException as error:
            self.step.locate(error, action=action)
            raise

    def forward(self, stage: int, microbatch: int) -> Border:
        """Run a stage on a microbatch; what it sends lies in the border that is returned."""
        layout, lane = self.layout.stages[stage], self.step.lanes[stage]
        border = self.cells[stage, microbatch] = Border()
        given: dict[str, Any] = {**self.step.lengths, "rows": self.step.sizes[microbatch]}
        given["shared"] = self._passed(self.given.get(stage))
        given["key"] = Key(self.step.state, microbatch)
        with lane.active():
            if layout.inputs:
                given["inputs"] = self._passed(self._inputs(border, stage, microbatch))
            for source in layout.received:
                given[f"from{source}"] = self._passed(self.received(border, source, stage, microbatch))
            if self.step.log is not None:  # on the lane itself it begins when that is there
                self.step.log.begins(Action(stage, "F", microbatch))
            run = self.lowered.cell(stage, last=microbatch == len(self.step.sizes) - 1)
            border.sent = run(*[given[name] for name in self.lowered.takes[stage]])
        border.done = lane.record()
        return border

    def _passed(self, bundle: Any) -> Any:
        """Return what a stage is given: no leaves where hooks for several gradients would fail on them.

        Nor under autocast, which keeps the casts of leaves, and with them the leaves, until the caller's context ends.
        """
        if not (self.aliased and bundle):
            return bundle
        return [t[...] if t.requires_grad else t for t in bundle]

    def _inputs(self, border: Border, stage: int, microbatch: int) -> Sequence[torch.Tensor]:
        bundle = self.start.inputs[stage][microbatch]
        if not self.detached:
            return bundle
        taken = border.leaves["inputs"] = _detached(bundle)
        return taken

    def received(
        self, border: Border, source: int, stage: int, microbatch: int, name: str | None = None
    ) -> Sequence[torch.Tensor]:
        """Bring a bundle of an earlier stage to a stage; ``name`` is OUT for what the earlier one gives the caller."""
        lanes, cell, key = self.step.lanes, self.cells[source, microbatch], name or str(stage)
        if not self.detached:
            return take(cell.sent.pop(key), lanes[source], cell.done, lanes[stage])
        bundle = cell.sent[key]
        move = partial(take, tuple(t.detach() for t in bundle), lanes[source], cell.done, lanes[stage])
        log, way = self.step.log, (source, stage, microbatch)
        moved = move() if log is None else log.copied(move, *way, backward=False, ready=cell.done)
        leaves = [m.requires_grad_(b.requires_grad) for m, b in zip(moved, bundle, strict=True)]
        border.leaves[f"{name or ''}{source}"] = leaves
        return leaves

    def backward(self, stage: int, microbatch: int) -> None:
        """Run a cell's backward, pass gradients on and add to the sums."""
        self._differentiate(stage, microbatch, whole=True)

    def input_gradient(self, stage: int, microbatch: int) -> None:
        """Run a cell's backward but for the weight gradients that can wait, and free its graph."""
        self._differentiate(stage, microbatch, whole=False)

    def weight_gradients(self, stage: int, microbatch: int) -> None:
        """Make what a cell's input gradient put off, and add it to the sums in a whole backward's order."""
        border, own = self.cells[stage, microbatch], self.own[stage]
        with self.step.lanes[stage].active():
            if border.late is not None:
                for leaf, gradient in border.late:
                    self._add(stage, leaf, gradient)
                border.late, self.added[stage] = None, microbatch + 1
            for product in border.put_off:
                for leaf, gradient in product.gradients():
                    self._add(stage, leaf, gradient)
                    own.add(id(leaf))
        border.put_off = []

    def _add(self, stage: int, leaf: torch.Tensor, gradient: torch.Tensor) -> None:
        """Add to a sum, in place where nothing else uses its memory."""
        totals, key = self.totals[stage], id(leaf)
        if key not in totals:
            totals[key] = gradient
        elif key in self.own[stage]:
            totals[key] += gradient
        else:
            totals[key] = totals[key] + gradient

    def _differentiate(self, stage: int, microbatch: int, *, whole: bool) -> None:
        """Run a cell's backward, whole or but for what can wait.

        What was summed so far is given to autograd as one more gradient of the leaf. Contributions are then added one
        after the other, as in one backward of all cells, also where a cell has several. An input gradient whose turn
        has not come (microbatches add in ascending order) leaves its own to the weight gradients.
        """
        border = self.cells[stage, microbatch]
        in_turn = whole or self.added[stage] == microbatch
        with self.step.lanes[stage].active():
            roots, seeds = self.roots_of(border, stage, microbatch)
            made = self._made(border, stage, microbatch, roots, seeds, whole=whole, in_turn=in_turn)
            if in_turn:
                self._take_totals(stage, made)
        if in_turn:
            self.added[stage] = microbatch + 1
        else:
            border.late = [(leaf, gradient) for leaf, gradient in made if gradient is not None]
        border.gradients.clear()
        if not self.keep:
            border.leaves.clear()
            border.sent = {}

    def _made(
        self, border: Border, stage: int, microbatch: int, roots: Any, seeds: Any, *, whole: bool, in_turn: bool
    ) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        """Run autograd's engine on a cell; send back what goes back, and return what came to each leaf that sums."""
        leaves = [(name, i, t) for name, own in border.leaves.items() for i, t in enumerate(own) if t.requires_grad]
        if not (roots and (leaves or self.summed[stage])):
            return []
        later = PutOff() if whole else self._put_off(roots, stage, microbatch)
        summed = [leaf for leaf in self.summed[stage] if id(leaf) not in later.leaves]
        if in_turn:
            self._hold(stage, summed, roots, seeds)
        found = iter(gradients(roots, seeds, [*(t for *_, t in leaves), *summed, *later.edges], keep=self.keep))
        for (name, position, _), gradient in zip(leaves, found, strict=False):
            if gradient is not None:
                self.send_back(stage, microbatch, name, position, gradient)
        made = list(zip(summed, found, strict=False))
        later.catch(found)
        border.put_off = later.products
        return made

    def _take_totals(self, stage: int, made: Iterable[tuple[torch.Tensor, torch.Tensor | None]]) -> None:
        """Keep the sums that a backward gives; what was no part of it is added."""
        totals = self.totals[stage]
        for leaf, total in made:
            if total is not None:
                before = totals.get(id(leaf)) if id(leaf) in self.apart else None
                totals[id(leaf)] = total if before is None else before + total

    def _hold(self, stage: int, summed: Iterable[torch.Tensor], roots: list[Any], seeds: list[torch.Tensor]) -> None:
        """Add what was summed so far to what a backward begins at; large sums so that they are added to in place."""
        totals = self.totals[stage]
        held = [leaf for leaf in summed if id(leaf) in totals and id(leaf) not in self.apart]
        large = [leaf for leaf in held if leaf.numel() * leaf.element_size() >= LARGE_BYTES]
        small = [leaf for leaf in held if leaf.numel() * leaf.element_size() < LARGE_BYTES]
        roots += small
        seeds += [totals[id(leaf)] for leaf in small]
        if large:
            root = handed(large, [totals.pop(id(leaf)) for leaf in large])
            roots.append(root)
            seeds.append(root.detach())

    def _put_off(self, roots: Sequence[torch.Tensor], stage: int, microbatch: int) -> PutOff:
        """Find what can wait: nothing where the forward runs again, which saves what it needs for one backward only."""
        last = microbatch == len(self.step.sizes) - 1
        if self.lowered.runs_again(stage, last=last) or self.lowered.stages[stage].units:
            return PutOff()
        return put_off(roots, {id(leaf) for leaf in self.summed[stage]} - self.apart)

    def roots_of(self, border: Border, stage: int, microbatch: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return what a cell's backward begins at, and the gradients that came in for it."""
        roots: list[torch.Tensor] = []
        seeds: list[torch.Tensor] = []
        for target, bundle in border.sent.items():
            came_in = border.gradients.get(target)
            for tensor, gradient in zip(bundle, came_in, strict=True) if came_in else ():
                if gradient is not None and tensor.requires_grad:
                    roots.append(tensor)
                    seeds.append(gradient)
        return roots, seeds

    def send_back(self, stage: int, microbatch: int, name: str, position: int, gradient: torch.Tensor) -> None:
        """Bring the gradient of what came in by a bundle to the cell that sent it; that of an input is kept."""
        if name == "inputs":
            self.input_gradients[stage, microbatch, position] = gradient
            return
        target = OUT if name.startswith(OUT) else str(stage)
        source = int(name.removeprefix(OUT))
        lanes = self.step.lanes
        move, log, way = partial(transfer, (gradient,), lanes[stage], lanes[source]), self.step.log, (stage, source)
        if log is None:
            (moved,) = move()
        else:
            (moved,) = log.copied(move, *way, microbatch, backward=True, ready=lanes[stage].record())
        border = self.cells[source, microbatch]
        border.gradients.setdefault(target, [None] * len(border.sent[target]))[position] = moved


@contextlib.contextmanager
def held_back(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Hold back the hooks of tensors while cells run: they want the whole gradient, once."""
    held = [(hooks, dict(hooks)) for hooks in (tensor._backward_hooks for tensor in tensors) if hooks]
    try:
        for hooks, _ in held:
            hooks.clear()
        yield
    finally:
        for hooks, own in held:
            hooks.update(own)


def _detached(bundle: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in bundle]
