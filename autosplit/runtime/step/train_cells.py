"""The cells of a training step, in the order of a schedule.

Nothing reaches ``.grad`` before the last action has succeeded; then one backward hands all sums over, so that hooks
fire once. One thread issues the actions in clock order, or every lane's thread works through its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from autosplit.backward import leaves_under
from autosplit.errors import InputError
from autosplit.runtime.loss.outputs import Outputs, with_placeholders
from autosplit.runtime.loss.own_loss import OwnLoss
from autosplit.runtime.loss.parts import Parts
from autosplit.runtime.loss.proof import WholeCheck
from autosplit.runtime.norms import update_statistics
from autosplit.runtime.ops import OUT, rows_along, transfer
from autosplit.runtime.step.cells import Cells, CellState, parameters
from autosplit.runtime.step.leaves import held_back
from autosplit.runtime.step.step import Step
from autosplit.runtime.step.sums import Held, Sums
from autosplit.runtime.transport import Message
from autosplit.schedule.entry import Route
from autosplit.trace.graph import INFO, NodeClass

Loss = OwnLoss | Parts
"""What a microbatch adds to the loss: of all that stages give, by name, or of the model's output."""


def run(step: Step, loss: Any, check: WholeCheck | None) -> TrainCells:
    """Run a step in its schedule and return its cells; nothing reaches ``.grad`` before all has succeeded.

    ``loss`` is what each microbatch adds; ``check`` holds the sum against the loss of the whole batch.
    """
    with torch.inference_mode(False), torch.enable_grad():
        with step.entered() as used:
            if step.log is not None:
                step.log.start(step.lanes, lane=step.lane, rows=step.sizes)
            cells = TrainCells(step, loss, check)
            step.perform(step.schedule, cells, within=cells.hooks_held_back())
            used += cells.results()
        used.clear()
        step.join_losses(cells)
        cells.outcome = step.outcome(cells.total)
        with step.located():
            cells.hand_over()
        step.join_statistics()
        with step.entered():
            for microbatch in range(len(step.sizes)):  # once per call
                update_statistics(step.call(microbatch)[0].state, step.lanes)
        if step.log is not None:
            step.log.finish(cells.outcome)
    return cells


class TrainCells(Cells):
    """The cells of a training step: the last stage's end in a loss."""

    outcome: torch.Tensor
    """The loss of the batch, when all have run."""

    def __init__(self, step: Step, loss: Loss, check: WholeCheck | None) -> None:
        super().__init__(step, step.start(ending=False), self._trained(step), detached=True)
        self.loss = loss
        self.check = check
        self.losses: dict[int, torch.Tensor] = {}
        self.roots: dict[int, torch.Tensor] = {}
        """The loss of each microbatch, until its backward."""
        self._held_back = contextlib.ExitStack()
        """Holds back hooks of leaves while cells run."""
        self.depends = False
        """Whether anything with a gradient stands behind the loss."""
        self.wants = loss.wants
        for stage in self._split_stages():
            for sums in self.replicas(stage):
                sums.ask()
        self.passed = [value for value in self.lowered.outputs if _is_input(value) and self._wanted(value.name)]
        """Inputs that are outputs too."""
        slots = ((stage, self._slots(stage)) for stage in range(self.last + 1))
        self._sources = [(stage, taken) for stage, taken in slots if taken]
        """The stages that give the loss something, and the slots of that."""
        self._outputs = Outputs(step)

    def _trained(self, step: Step) -> Mapping[Held, Sequence[torch.Tensor]]:
        """Return the parameters whose gradients are added up, when the step has started."""
        return parameters(step)

    @contextlib.contextmanager
    def hooks_held_back(self) -> Iterator[None]:
        """Hold back hooks also of leaves that the loss turns out to use: they want the whole gradient."""
        with self._held_back as stack:
            stack.enter_context(super().hooks_held_back())
            yield

    def _split_stages(self) -> set[int]:
        """Return the stages some of whose backwards are split."""
        key = "split", len(self.step.sizes)
        return self.step.once(key, lambda: {action.stage for action in self.step.schedule if action.kind == "I"})

    @property
    def loss_sources(self) -> frozenset[int]:
        """The earlier stages that give the loss something."""
        return frozenset(stage for stage, _ in self._sources if stage != self.last)

    def _wanted(self, name: str) -> bool:
        return self.wants is None or name in self.wants

    def _slots(self, stage: int) -> list[Any]:
        """Return the slots of what a stage gives the loss."""
        return [slot for slot in self.layout.stages[stage].sent.get(OUT, ()) if self._wanted(slot.value)]

    def _leave_out(self, state: CellState, stage: int) -> None:
        """Let go of what a stage gives the caller and the loss does not use."""
        if self.wants is not None and OUT in state.sent:
            pairs = zip(self.layout.stages[stage].sent[OUT], state.sent[OUT], strict=True)
            state.sent = state.sent | {OUT: tuple(t for slot, t in pairs if self._wanted(slot.value))}

    def forward(self, stage: int, microbatch: int) -> CellState:
        """Run a stage on a microbatch, and behind the last one the loss."""
        state = super().forward(stage, microbatch)
        self._leave_out(state, stage)
        if stage == self.last:
            self._lose(state, microbatch)
        elif state.sent.get(OUT):
            self.transport.send(Route(stage, self.last, microbatch, loss=True), state.sent[OUT])
        if stage in self.forward_only:
            state.sent = {}
        return state

    def _lose(self, state: CellState, microbatch: int) -> None:
        """Call the loss of a microbatch."""
        sums = self._sums(self.last, microbatch)
        passed = {value.name: self._input(value, microbatch) for value in self.passed}
        with sums.lane.active():
            computed = self._values(microbatch, state)
            values = passed | computed
            flat: list[Any] = list(values.values())
            output: Any = values
            if not self.loss.takes_values:
                flat = [
                    None if isinstance(value, fx.Node) and not self._wanted(value.name) else _flat(value, values)
                    for value in self.lowered.outputs
                ]
                flat = with_placeholders(self._outputs, flat, microbatch)
                output = self.lowered.traced.unflatten(flat)
            if self.check is not None:
                self.check.keep(flat, microbatch)
            with self.step.losing():
                value = self.roots[microbatch] = self.loss(output, microbatch)
        self.losses[microbatch] = value.detach()
        self.depends |= value.requires_grad
        if free := self._free_leaves(state, sums, list(computed.values()), value):
            self.step.check_free(free)
            self._held_back.enter_context(held_back(free))
            sums.ask_for(free)

    def roots_of(self, state: CellState, stage: int, microbatch: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return what a cell's backward begins at: behind the last stage the loss."""
        if stage != self.last:
            return super().roots_of(state, stage, microbatch)
        value = self.roots.pop(microbatch)
        return ([value], [torch.ones_like(value)]) if value.requires_grad else ([], [])

    def _came_in(self, state: CellState, target: str, stage: int, microbatch: int) -> Message:
        if target != OUT:
            return super()._came_in(state, target, stage, microbatch)
        return self.transport.recv(Route(stage, self.last, microbatch, loss=True).back) if state.sent[OUT] else ()

    def _free_leaves(
        self, state: CellState, sums: Sums, outputs: Sequence[torch.Tensor], value: torch.Tensor
    ) -> list[torch.Tensor]:
        """Return new leaves under the loss that are not the last stage's: the loss's own parameters, for one.

        So are parameters of other stages that the loss looks at itself, as a penalty on weights does, and the batch
        where it is an output too. What stands behind the ``outputs`` of stages is the stages' own.
        """
        leaves = leaves_under(value, outputs)
        if not leaves:
            return []
        known = {
            id(t) for bundle in (*state.leaves.values(), *(each.shared for each in self.sums.values())) for t in bundle
        }
        known |= set(map(id, (*sums.leaves, *sums.free)))
        return [leaf for leaf in leaves if id(leaf) not in known]

    def _values(self, microbatch: int, last: CellState) -> dict[str, torch.Tensor]:
        """Return what stages give for one microbatch, by name; what earlier stages made has a state of its own."""
        values: dict[str, torch.Tensor] = {}
        for stage, slots in self._sources:
            here = stage == self.last
            bundle = last.sent[OUT] if here else self.receive(last, Route(stage, self.last, microbatch, loss=True))
            values.update((slot.value, tensor) for slot, tensor in zip(slots, bundle, strict=True))
        return values

    def _input(self, node: fx.Node, microbatch: int) -> torch.Tensor:
        names = [n.name for n in self.lowered.traced.graph.nodes if n.op == "placeholder" and INFO in n.meta]
        call, number = self.step.call(microbatch)
        tensor = call.tensors[names.index(node.name)]
        piece = rows_along(tensor, call.sizes, node.meta[INFO].tensors[0].batch_dim)[number]
        return transfer((piece,), self.step.lanes[-1], self.step.lane(self.last, microbatch))[0]

    def told(self, microbatch: int) -> list[torch.Tensor]:
        """Return what another process has to know of a microbatch to return the loss of the batch."""
        loss = self.losses[microbatch]
        return [loss] if self.check is None else [loss, *self.check.told(microbatch, loss.device)]

    def hear(self, microbatch: int, told: Sequence[torch.Tensor]) -> None:
        """Take what another process tells of a microbatch."""
        self.losses[microbatch], *rest = told
        if self.check is not None:
            self.check.hear(microbatch, rest, self._outputs)

    def total(self) -> torch.Tensor:
        """Return the loss of the batch; raise InputError where it is not that of the whole batch."""
        if not self.depends:
            raise RuntimeError("the loss does not depend on any parameter that requires a gradient")
        losses = [self.losses[microbatch] for microbatch in range(len(self.step.sizes))]
        total = losses[0]
        for value in losses[1:]:
            total = total + value
        if self.check is not None:
            assert isinstance(self.loss, Parts)
            self.check.compare(self.loss, losses, self.lowered.traced)
        return total

    def results(self) -> list[torch.Tensor | None]:
        """Return what the caller's thread works on when the lanes are done."""
        totals = [total for sums in self.sums.values() for total in sums.totals()]
        kept = self.check.tensors() if self.check is not None else []
        return [*self.losses.values(), *totals, *self.input_gradients.values(), *kept]


def _is_input(value: Any) -> bool:
    info = value.meta.get(INFO) if isinstance(value, fx.Node) else None
    return info is not None and value.op == "placeholder" and info.node_class is NodeClass.MICRO


def _flat(value: Any, values: dict[str, torch.Tensor]) -> Any:
    if not isinstance(value, fx.Node):
        return value
    if value.name in values:
        return values[value.name]
    raise InputError(
        f"train_step cannot hand {value.name!r} of the output to the loss per microbatch: it is no value of the "
        "batch's rows; call pipe(x) and loss.backward() instead"
    )
