"""The cells of one step: one stage on one microbatch, each with inputs of its own and a backward of its own.

    forward of a cell     detach what comes in ─► stage ─► keep inputs and outputs until the backward
    backward of a cell    gradients of the outputs ─► autograd.grad ─► gradients of what came in, and of the parameters
    or in two parts       input gradient: of what came in; weight gradients: what was put off (autosplit.backward)

Any thread may run a cell as long as what it takes is there: a transport brings it. What a replica of a stage sums up
belongs to its own lane. Contributions add in the order of its backwards, so the order is the same on any cut.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import torch

from autosplit.backward import accumulate, gradients, has_several
from autosplit.runtime.ops import OUT, Bundle, CellContext, transfer
from autosplit.runtime.step.leaves import all_or_nothing, hand, held_back
from autosplit.runtime.step.step import Pairs, Start, Step
from autosplit.runtime.step.sums import Held, Sums, together
from autosplit.runtime.transport import Message
from autosplit.schedule.action import Action
from autosplit.schedule.entry import Entry, Route
from autosplit.trace.inputs.signature import any_autocast
from autosplit.trace.scope import has_module_hooks
from autosplit.weight_gradients import DeferredWeightGrads, Product, located, uses_at, uses_to_defer

_METHODS = {"F": "forward", "B": "backward", "I": "input_gradient", "W": "weight_gradients"}


@dataclass(slots=True)
class CellState:
    """The state of one cell between its forward and its backward."""

    leaves: dict[Route | None, list[torch.Tensor]] = field(default_factory=dict)
    """Detached inputs by the way that they came; those of the batch by None."""
    sent: dict[str, Bundle] = field(default_factory=dict)
    """What the stage gave, by target."""
    out_gradients: Message = ()
    """Gradients of what it gave the caller, where the caller's backward brings them."""
    deferred: list[Product] = field(default_factory=list)
    """What the weight gradients have to make, from the input gradient on."""
    results: list[Any] = field(default_factory=list)
    """Autograd's nodes of what its layers returned, where weight gradients may be put off."""
    late: list[tuple[torch.Tensor, torch.Tensor]] | None = None
    """Leaves and gradients that an input gradient made before its turn: they are added with the weight gradients."""


class Cells:
    """Runs forwards and backwards of one step's cells and adds up the gradients.

    ``parameters`` are those of each replica of each stage, none where no backward follows.
    With ``detached=False`` values go from cell to cell as they are: nothing is kept for :meth:`backward`, and autograd,
    where it is on, sees the whole graph.
    """

    def __init__(
        self, step: Step, start: Start, parameters: Mapping[Held, Sequence[torch.Tensor]], *, detached: bool
    ) -> None:
        self.step = step
        self.transport = start.transport or step.transport(detached=detached)
        self.start = start
        self.detached = detached
        self.keep = False
        """Whether backwards leave the cells' graphs for another backward."""
        self.lowered = step.lowered
        self.layout = self.lowered.layout
        self.last = len(self.lowered.stages) - 1
        self.cells: dict[tuple[int, int], CellState] = {}
        self.forward_only = frozenset(s for s, makes in enumerate(step.gradients) if detached and makes == "none")
        """Stages of which nothing is kept, as no backward follows."""
        self.aliased = detached and (has_module_hooks() or any_autocast())
        self.input_gradients: dict[tuple[int, int, int], torch.Tensor] = {}
        """By stage, microbatch and position in the stage's bundle of inputs."""
        self.sums = {held: self._sums_of(held) for held in step.held}
        for held in step.codes:
            self.sums[held].use(parameters.get(held, ()), step.passing)
        self._replicas = [self.replicas(stage) for stage in range(self.last + 1)]

    def _sums_of(self, held: Held) -> Sums:
        bundle = self.start.shared.get(held.stage, ())
        if bundle and held.replica:
            bundle = transfer(tuple(bundle), self.step.lanes[held.stage], self.step.lane_of(held))
        shared = _detached(bundle) if self.detached else bundle
        attributes, dtype = self.step.attributes(held), self.step.reduce_dtype
        return Sums(held, self.step.codes.get(held), self.step.lane_of(held), shared, attributes, dtype)

    def clear(self) -> None:
        """Forget gradients: of parameters, shared values, inputs, and of what cells sent."""
        for sums in self.sums.values():
            sums.clear()
        self.input_gradients.clear()
        self.transport.clear()
        for state in self.cells.values():
            state.out_gradients = ()

    def _sums(self, stage: int, microbatch: int) -> Sums:
        """Return where the replica of a stage that runs a microbatch adds up."""
        replicas = self._replicas[stage]
        return replicas[0] if len(replicas) == 1 else self.sums[self.step.holder(stage, microbatch)]

    def replicas(self, stage: int) -> list[Sums]:
        """Return what each replica of a stage adds up, in their order."""
        return [sums for held, sums in self.sums.items() if held.stage == stage]

    @contextlib.contextmanager
    def hooks_held_back(self) -> Iterator[None]:
        """Hold back hooks of the parameters that stand for themselves in cells' graphs."""
        with held_back(leaf for sums in self.sums.values() for leaf in sums.read_directly):
            yield

    @property
    def loss_sources(self) -> frozenset[int]:
        """The earlier stages that give a loss something."""
        return frozenset()

    def listed(self, entries: Sequence[Entry]) -> Sequence[Entry]:
        """Return the list of a lane or a rank, of actions and messages, with the entries that passes add for cells."""
        return entries

    def act(self, action: Action) -> None:
        """Perform an action; an exception gets a note that says where it happened."""
        log, (stage, kind, microbatch) = self.step.log, action
        try:
            if log is not None:
                log.begins(action)
            perform = getattr(self, _METHODS[kind])
            if (attributes := self._sums(stage, microbatch).attributes) is None:
                perform(stage, microbatch)
            else:
                with attributes.shared():
                    perform(stage, microbatch)
            if log is not None:
                log.ends(action)
        except BaseException as error:
            self.step.locate(error, action=action)
            raise

    def forward(self, stage: int, microbatch: int) -> CellState:
        """Run a stage on a microbatch and send on what other stages take."""
        sums = self._sums(stage, microbatch)
        state = self.cells[stage, microbatch] = CellState()
        with sums.lane.active():
            values = self._given(state, sums, stage, microbatch)
            if self.step.log is not None:  # on the lane itself it begins when that is there
                self.step.log.begins(Action(stage, "F", microbatch))
            sums.fill(state.results)
            run = self.step.program(sums.held).cell(stage, last=microbatch == len(self.step.sizes) - 1)
            state.sent = run(*values)
        ends = stage in self.forward_only
        if self.detached and not ends:
            others = chain(*state.leaves.values(), sums.shared)
            if self.step.once(("several", sums.held), lambda: has_several(state.sent.values(), sums.leaves, others)):
                self._ask(sums)
        for target in [name for name in state.sent if name != OUT]:
            bundle = state.sent[target] if self.detached and not ends else state.sent.pop(target)
            self.transport.send(Route(stage, int(target), microbatch), _detached(bundle, False) if ends else bundle)
        if ends:
            state.leaves.clear()
        return state

    def _given(self, state: CellState, sums: Sums, stage: int, microbatch: int) -> list[Any]:
        """Return what a stage takes, in its order."""
        values: list[Any] = []
        for name in self.lowered.takes[stage]:
            match name:
                case "rows":
                    values.append(self.step.sizes[microbatch])
                case "key":
                    values.append(self.context(stage, microbatch))
                case "shared":
                    values.append(self._passed(sums.shared))
                case "inputs":
                    values.append(self._passed(self._inputs(state, sums, stage, microbatch)))
                case _ if name in self.step.lengths:
                    values.append(self.step.call(microbatch)[0].lengths[name])
                case _:
                    source = int(name.removeprefix("from"))
                    values.append(self._passed(self.receive(state, Route(source, stage, microbatch))))
        return values

    def _ask(self, sums: Sums) -> None:
        """Ask autograd, which then begins at the sums so far; of what is there for one action only none are kept."""
        if not self.step.passing:
            sums.ask()

    def context(self, stage: int, microbatch: int) -> CellContext:
        """Return where operations of a cell draw and leave what norms see."""
        call, number = self.step.call(microbatch)
        return CellContext(call.state_of(self.step.holder(stage, microbatch)), number)

    def receive(self, state: CellState, route: Route) -> Sequence[torch.Tensor]:
        """Return what another stage sent to a cell."""
        bundle = [tensor for tensor in self.transport.recv(route) if tensor is not None]
        if self.detached:
            state.leaves[route] = bundle
        return bundle

    def _passed(self, bundle: Any) -> Any:
        """Return a stage's inputs: views instead of leaves where hooks or autocast are active.

        Module hooks for several gradients fail on leaves. Autocast caches the casts of leaves, which keeps the leaves
        alive until the caller's context ends.
        """
        if not (self.aliased and bundle):
            return bundle
        return [t[...] if t.requires_grad else t for t in bundle]

    def _inputs(self, state: CellState, sums: Sums, stage: int, microbatch: int) -> Sequence[torch.Tensor]:
        bundle: Sequence[torch.Tensor] = self.start.inputs[stage][microbatch]
        if sums.held.replica:
            bundle = transfer(tuple(bundle), self.step.lanes[stage], sums.lane)
        if not self.detached:
            return bundle
        taken = state.leaves[None] = _detached(bundle)
        return taken

    def backward(self, stage: int, microbatch: int) -> None:
        """Run a cell's backward, pass gradients on and add to the sums."""
        self._differentiate(stage, microbatch, whole=True)

    def input_gradient(self, stage: int, microbatch: int) -> None:
        """Run a cell's backward without the weight gradients that can wait, and free its graph."""
        self._differentiate(stage, microbatch, whole=False)

    def weight_gradients(self, stage: int, microbatch: int) -> None:
        """Compute the weight gradients that the input gradient left, and add them in the order of a whole backward."""
        state, sums = self.cells[stage, microbatch], self._sums(stage, microbatch)
        with sums.lane.active():
            if state.late is not None:
                for leaf, gradient in state.late:
                    sums.add(leaf, gradient)
                state.late, sums.added = None, microbatch + 1
            for product in state.deferred:
                for leaf, gradient in product.gradients():
                    sums.add(leaf, gradient, alone=True)
        state.deferred = []

    def _differentiate(self, stage: int, microbatch: int, *, whole: bool) -> None:
        """Run a cell's backward, whole or without the weight gradients that can wait."""
        state, sums = self.cells[stage, microbatch], self._sums(stage, microbatch)
        with sums.lane.active():
            roots, seeds = self.roots_of(state, stage, microbatch)
            if self.step.log is not None:  # on the lane itself it begins when the gradients are there
                self.step.log.begins(Action(stage, "B" if whole else "I", microbatch))
            if sums.by_engine:
                if roots:
                    accumulate(roots, seeds, keep=self.keep)
                back = [[leaf.grad for leaf in bundle] for bundle in state.leaves.values()]
                for leaf in chain(*state.leaves.values()) if self.keep else ():
                    leaf.grad = None
            else:
                back = self._asked(state, sums, microbatch, roots, seeds, whole=whole)
        for route, message in zip(state.leaves, back, strict=True):
            if route is None:
                for position, gradient in enumerate(message):
                    if gradient is not None:
                        self.input_gradients[stage, microbatch, position] = gradient
            elif route.source not in self.forward_only:
                self.transport.send(route.back, message)
        state.out_gradients = ()
        if not self.keep:
            state.leaves.clear()
            state.results.clear()
            state.sent = {}

    def _asked(
        self,
        state: CellState,
        sums: Sums,
        microbatch: int,
        roots: list[torch.Tensor],
        seeds: list[torch.Tensor],
        *,
        whole: bool,
    ) -> list[list[torch.Tensor | None]]:
        """Ask autograd for a cell's gradients; return those of its inputs, and add the others to the stage's sums.

        Autograd gets the sum so far as one more gradient of the leaf, so that contributions are added one after the
        other, as in a single backward of all cells, also where one cell has several. Microbatches add in ascending
        order: an input gradient (I) that runs before its turn leaves its contributions to the weight gradients (W).
        """
        in_turn = whole or sums.added == microbatch
        leaves = [leaf for leaf in chain(*state.leaves.values()) if leaf.requires_grad]
        back: dict[int, torch.Tensor | None] = {}
        totals: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        if roots and (leaves or sums.leaves):
            later = DeferredWeightGrads() if whole else self._deferred(state, roots, sums, microbatch, leaves)
            put_off = later.leaves
            summed = [leaf for leaf in sums.leaves if leaf.requires_grad and id(leaf) not in put_off]
            if in_turn:
                sums.begin(summed, roots, seeds)
            grads = iter(gradients(roots, seeds, [*leaves, *summed, *later.edges], keep=self.keep))
            back = {id(leaf): gradient for leaf, gradient in zip(leaves, grads, strict=False)}
            totals = list(zip(summed, grads, strict=False))
            later.catch(grads)
            state.deferred = later.products
        if in_turn:
            sums.take(totals)
            sums.added = microbatch + 1
        else:
            state.late = [(leaf, gradient) for leaf, gradient in totals if gradient is not None]
        return [[back.get(id(leaf)) for leaf in bundle] for bundle in state.leaves.values()]

    def _deferred(
        self,
        state: CellState,
        roots: Sequence[torch.Tensor],
        sums: Sums,
        microbatch: int,
        leaves: Sequence[torch.Tensor],
    ) -> DeferredWeightGrads:
        """Return the weight gradients that can wait: none where the forward is recomputed, which serves one backward.

        The graph of a step's first cell is searched; other cells have the same products at the same positions.
        """
        stage, last = sums.held.stage, microbatch == len(self.step.sizes) - 1
        if self.lowered.runs_again(stage, last=last) or self.lowered.stages[stage].units:
            return DeferredWeightGrads()
        uses = uses_at(sums.products, state.results) if sums.products else None
        if uses is None:
            summed = set(map(id, sums.leaves))
            may_wait = summed.difference(map(id, sums.free))
            uses = uses_to_defer(roots, may_wait, summed | set(map(id, leaves)))
            sums.products = located(uses, state.results)
        return DeferredWeightGrads.of(uses)

    def roots_of(self, state: CellState, stage: int, microbatch: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return the tensors that a cell's backward starts from, and their gradients."""
        roots: list[torch.Tensor] = []
        seeds: list[torch.Tensor] = []
        for target, bundle in state.sent.items():
            for tensor, gradient in zip(bundle, self._came_in(state, target, stage, microbatch), strict=True):
                if gradient is not None and tensor.requires_grad:
                    roots.append(tensor)
                    seeds.append(gradient)
        return roots, seeds

    def _came_in(self, state: CellState, target: str, stage: int, microbatch: int) -> Message:
        """Return the gradients of what a cell gave to a target."""
        if target == OUT:
            return state.out_gradients or (None,) * len(state.sent[OUT])
        return self.transport.recv(Route(stage, int(target), microbatch).back)

    @property
    def free(self) -> list[torch.Tensor]:
        """Leaves under the loss that are no stage's."""
        return list({id(leaf): leaf for sums in self.replicas(self.last) for leaf in sums.free}.values())

    def hand_over(self) -> None:
        """Give every leaf its whole gradient: parameters, shared values and inputs, in one backward."""
        by_stage = [self._pairs(stage) for stage in range(len(self.layout.stages))]
        inputs = sorted(self.input_gradients.items(), key=lambda item: item[0])
        step = self.step
        brought = [((s, m, p), step.brought(step.holder(s, m), gradient)) for (s, m, p), gradient in inputs]
        by_stage.append([(self.start.inputs[s][m][p], gradient) for (s, m, p), gradient in brought])
        brought.clear()
        inputs.clear()
        self.input_gradients.clear()
        leaves = [tensor for pairs in by_stage for tensor, _ in pairs] + self.step.tensors
        if self.layout.home:  # of shared values, which parameters may stand behind
            leaves += self.lowered.traced.root.parameters()
        with all_or_nothing(leaves), step.adding_gradients():
            by_engine = all(sums.by_engine for sums in self.sums.values())
            self.start.hand_over(by_stage, partial(hand, lanes=self.step.lanes, alone=by_engine))

    def _pairs(self, stage: int) -> Pairs:
        """Return what belongs to a stage with what its replicas have added up; their sums are empty afterwards."""
        replicas = self._replicas[stage]
        free = self.free if stage == self.last else []
        wholes = (*replicas[0].parameters, *free, *self.start.shared.get(stage, ()))
        totals = self.step.summed(stage, wholes, together(replicas, free, self.step.brought))
        return [(whole, total) for whole, total in zip(wholes, totals, strict=True) if total is not None]


def parameters(step: Step) -> dict[Held, list[torch.Tensor]]:
    """Return the parameters and buffers that require a gradient, of stages that run in this process."""
    by_stage = {}
    for held, code in step.codes.items():
        tensors = {id(t): t for t in (*code.read(), *code.others()) if t is not None and t.requires_grad}
        by_stage[held] = list(tensors.values())
    return by_stage


def _detached(bundle: Sequence[torch.Tensor], wanted: bool = True) -> list[torch.Tensor]:
    return [tensor.detach().requires_grad_(wanted and tensor.requires_grad) for tensor in bundle]
