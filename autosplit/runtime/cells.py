"""The cells of one step: one stage on one microbatch, each with borders of its own and a backward of its own.

    forward of a cell     detach what comes in ─► stage ─► keep inputs and outputs until the backward
    backward of a cell    gradients of the outputs ─► autograd.grad ─► gradients of what came in, and of the parameters

Any thread may run a cell, one after another or at the same time, as long as what it takes is there. What a stage
sums up belongs to its own lane. Contributions add in the order of the stage's backwards, so the order is the same
on any cut.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from autosplit.runtime.ambient import has_module_hooks, is_batched
from autosplit.runtime.differentiate import gradients
from autosplit.runtime.lanes import Lane
from autosplit.runtime.ops import OUT, Bundle, Key, enter, leave, take, transfer
from autosplit.schedule.action import Action

_MANY = 8
"""As many sums are added to in one call; for fewer its price is higher than theirs."""


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
    sizes: tuple[int, ...]
    lanes: tuple[Lane, ...]
    """One lane per stage, and last the caller's device."""
    seed: int | None
    schedule: str
    orders: dict[Any, Any]
    """Schedules made ready to run, kept from call to call."""

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        """Return what ``make`` made at the first call with this key."""
        if key not in self.orders:
            self.orders[key] = make()
        return self.orders[key]

    def start(self) -> Start:
        """Run what comes before the first cell, in the caller's thread and graph."""
        with self.located():
            return Start(*self.setup(*self.tensors, self.rows, self.sizes, self.lanes, self.seed))

    @contextlib.contextmanager
    def entered(self) -> Iterator[list[Any]]:
        """Order the lanes' work behind the caller's, and at the end the caller's behind theirs.

        Yields a list for the tensors that the caller is going to use.
        """
        *own, caller = self.lanes
        handed: list[Any] = []
        enter(caller, own)
        try:
            yield handed
        finally:
            leave(caller, own, handed)

    def end(self, start: Start, bundles: Mapping[int, Sequence[Bundle]]) -> Sequence[Any]:
        """Run what comes behind the last cell, on what the stages gave per microbatch; return the flat outputs."""
        with self.located():
            given = *self.tensors, self.rows, self.sizes, self.lanes, self.seed
            return self.ending(*given, start.kept, bundles)

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


@dataclass(slots=True)
class Border:
    """What one cell keeps from its forward to its backward."""

    leaves: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    """Detached inputs by the name of the bundle that they came in."""
    sent: dict[str, Bundle] = field(default_factory=dict)
    done: Any = None
    """The lane's event behind the forward."""
    gradients: dict[str, list[torch.Tensor | None]] = field(default_factory=dict)
    """Gradients of what was sent, by target."""


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
        self.clones = detached and self.lowered.changes_inputs
        self.clear()

    def clear(self) -> None:
        """Forget gradients: of parameters, shared values, inputs, and of what cells sent."""
        self.sums = [Sums(len(own)) for own in self.parameters]
        self.wanting = [[i for i, p in enumerate(own) if p.requires_grad] for own in self.parameters]
        """By stage, the positions of the parameters that still want a gradient."""
        self.given_sums = {stage: Sums(len(bundle)) for stage, bundle in self.given.items()}
        self.input_gradients: dict[tuple[int, int, int], torch.Tensor] = {}
        """By stage, microbatch and position in the stage's bundle of inputs."""
        for border in self.cells.values():
            border.gradients.clear()

    def act(self, action: Action) -> None:
        """Perform an action; an exception gets a note that says where it happened."""
        try:
            if action.kind == "F":
                self.forward(action.stage, action.microbatch)
            else:
                self.backward(action.stage, action.microbatch)
        except BaseException as error:
            self.step.locate(error, action=action)
            raise

    def forward(self, stage: int, microbatch: int) -> Border:
        """Run a stage on a microbatch; what it sends lies in the border that is returned."""
        layout, lane = self.layout.stages[stage], self.step.lanes[stage]
        border = self.cells[stage, microbatch] = Border()
        given: dict[str, Any] = {"rows": self.step.sizes[microbatch], "shared": self._passed(self.given.get(stage))}
        given["key"] = None if self.step.seed is None else Key(self.step.seed, microbatch)
        with lane.active():
            if layout.inputs:
                given["inputs"] = self._passed(self._inputs(border, stage, microbatch))
            for source in layout.received:
                given[f"from{source}"] = self._passed(self.received(border, source, stage, microbatch))
            border.sent = self.lowered.stages[stage](*[given[name] for name in self.lowered.takes[stage]])
        border.done = lane.record()
        return border

    def _passed(self, bundle: Any) -> Any:
        """Return what a stage is given: under global hooks no leaves, on which hooks for several gradients fail."""
        if not (self.detached and bundle and has_module_hooks()):
            return bundle
        return [t[...] if t.requires_grad else t for t in bundle]

    def _inputs(self, border: Border, stage: int, microbatch: int) -> Sequence[torch.Tensor]:
        bundle = self.start.inputs[stage][microbatch]
        if not self.detached:
            return bundle
        taken = border.leaves["inputs"] = _detached(bundle)
        return [t.clone() if t.requires_grad else t for t in taken] if self.clones else taken

    def received(
        self, border: Border, source: int, stage: int, microbatch: int, name: str | None = None
    ) -> Sequence[torch.Tensor]:
        """Bring a bundle of an earlier stage to a stage; ``name`` is OUT for what the earlier one gives the caller."""
        lanes, cell, key = self.step.lanes, self.cells[source, microbatch], name or str(stage)
        if not self.detached:
            return take(cell.sent.pop(key), lanes[source], cell.done, lanes[stage])
        bundle = cell.sent[key]
        moved = take(tuple(tensor.detach() for tensor in bundle), lanes[source], cell.done, lanes[stage])
        leaves = [m.requires_grad_(b.requires_grad) for m, b in zip(moved, bundle, strict=True)]
        border.leaves[f"{name or ''}{source}"] = leaves
        return leaves

    def backward(self, stage: int, microbatch: int) -> None:
        """Run a cell's backward, pass gradients on and add up those of parameters and shared values."""
        border = self.cells[stage, microbatch]
        leaves = [(name, i, t) for name, own in border.leaves.items() for i, t in enumerate(own) if t.requires_grad]
        given = [(i, t) for i, t in enumerate(self.given.get(stage, ())) if t.requires_grad]
        places = self.wanting[stage]
        wanted = [*(t for *_, t in leaves), *(t for _, t in given), *(self.parameters[stage][i] for i in places)]
        with self.step.lanes[stage].active():
            found = self._differentiate(border, stage, wanted, microbatch)
            if found:
                ends = len(leaves), len(leaves) + len(given)
                for (name, position, _), gradient in zip(leaves, found[: ends[0]], strict=True):
                    if gradient is not None:
                        self._send_back(stage, microbatch, name, position, gradient)
                if given:
                    self.given_sums[stage].add(found[ends[0] : ends[1]], [position for position, _ in given])
                self.sums[stage].add(found[ends[1] :], places)
        if not self.keep:
            border.leaves.clear()
            border.sent = {}

    def _differentiate(
        self, border: Border, stage: int, wanted: Sequence[torch.Tensor], microbatch: int
    ) -> Sequence[torch.Tensor | None]:
        """Return the gradients of what is wanted; nothing where no gradient came in."""
        roots: list[torch.Tensor] = []
        seeds: list[torch.Tensor] = []
        for target, bundle in border.sent.items():
            came_in = border.gradients.get(target)
            for tensor, gradient in zip(bundle, came_in, strict=True) if came_in else ():
                if gradient is not None and tensor.requires_grad:
                    roots.append(tensor)
                    seeds.append(gradient)
        if not roots or not wanted:
            return ()
        return gradients(roots, seeds, wanted, keep=self.keep)

    def _send_back(self, stage: int, microbatch: int, name: str, position: int, gradient: torch.Tensor) -> None:
        if name == "inputs":
            self.input_gradients[stage, microbatch, position] = gradient
            return
        target = OUT if name.startswith(OUT) else str(stage)
        source = int(name.removeprefix(OUT))
        lanes = self.step.lanes
        (moved,) = transfer((gradient,), lanes[stage], lanes[source])
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


class Sums:
    """Sums of gradients: the contributions of one lane's cells, in the order of its backwards."""

    def __init__(self, count: int) -> None:
        self.values: list[torch.Tensor | None] = [None] * count
        self._own: set[int] = set()
        """Positions that hold a tensor of our own: the first contribution may still be used elsewhere."""

    def add(self, contributions: Sequence[torch.Tensor | None], positions: Sequence[int] | None = None) -> None:
        """Add contributions, None for nothing; many in one call, for its price and the interpreter lock's."""
        values, own, held = self.values, self._own, []
        for index, contribution in enumerate(contributions):
            if contribution is None:
                continue
            position = index if positions is None else positions[index]
            before = values[position]
            if before is None:
                values[position] = contribution
            elif position in own:
                held.append((before, contribution))
            else:
                values[position] = before + contribution
                own.add(position)
        if len(held) >= _MANY and not is_batched(held[0][1]):
            torch._foreach_add_(*zip(*held, strict=True))
        else:
            for before, contribution in held:
                before.add_(contribution)
