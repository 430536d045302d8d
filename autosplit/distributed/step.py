"""One call of the pipe on one rank: its own stages, with messages to and from the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from autosplit.distributed.messages import Descriptions, Messages, Sending
from autosplit.distributed.start import RankStart, begin
from autosplit.distributed.world import World
from autosplit.runtime.lanes.threads import backwards
from autosplit.runtime.norms import update_statistics
from autosplit.runtime.ops import OUT, Bundle
from autosplit.runtime.step.cells import Cells, CellState, held_back, parameters
from autosplit.runtime.step.step import Start, Step
from autosplit.runtime.transport import Message, Way
from autosplit.schedule.action import Action, Schedule


@dataclass(kw_only=True)
class RankStep(Step):
    """One call on one rank.

    Attributes:
        world: the ranks.
        ranks: the rank of each stage.
        sending: what is on its way to others, of all steps.
        whole: whether what comes behind the last cell runs: the merges, and what mixes rows.
        loss: what tells steps of the same signature apart: which loss ends them.
    """

    world: World
    ranks: Sequence[int]
    sending: Sending
    whole: bool = False
    loss: Any = None

    @property
    def last(self) -> int:
        """The rank of the last stage."""
        return self.ranks[-1]

    @property
    def stages(self) -> Sequence[int]:
        """The stages of this rank, ascending."""
        return [stage for stage, rank in enumerate(self.ranks) if rank == self.world.rank]

    def order(self, schedule: Schedule) -> Sequence[Action]:
        """Return this rank's actions of a schedule."""
        return schedule.lanes[self.world.rank]

    @property
    def known(self) -> Descriptions:
        """What travels between stages in steps of this kind."""
        lengths = tuple(self.lengths.values())
        kind = "messages", self.sizes, lengths, self.whole, self.loss, torch.is_grad_enabled()
        return self.once(kind, Descriptions)

    def transport(self, *, detached: bool) -> Messages:
        """Return what brings values from stage to stage, also of other ranks."""
        known, sending = self.known, self.sending
        return Messages(self.world, self.ranks, self.lanes, self.log, known=known, sending=sending, detached=detached)

    def start(self) -> RankStart:
        """Run what comes before this rank's first cell."""
        with self.located():
            transport = self.transport(detached=torch.is_grad_enabled())
            return begin(self, transport, self.ranks, ending=self.whole)

    def outcome(self, make: Callable[[], Any]) -> Any:
        """Return on every rank what is made where the last stage runs; its error is raised on every rank."""
        return self.world.share(self.last, make)

    def finish(self) -> None:
        """Wait until all that was sent has arrived, and leave the random numbers where the plain model leaves them."""
        self.sending.wait()
        self.known.complete = True
        if self.state.tape is not None:
            self.state.tape.finish()


class WholeCall:
    """A call for the whole batch: forwards of all cells, and what comes behind them on the last stage's rank.

    With gradients on, :meth:`backward` runs the backwards and gives every rank's parameters their gradients.
    """

    def __init__(self, step: RankStep) -> None:
        self.step = step = replace(step, whole=True)
        self.cells = _CallCells(step, step.start(), parameters(step), detached=torch.is_grad_enabled())
        self.bundles: dict[int, list[Bundle]] = {}

    def forward(self, *, attached: bool = False) -> list[Any] | None:
        """Return the model's flat outputs on the last stage's rank, None elsewhere.

        ``attached``: their backward, by the caller, runs :meth:`backward`.
        """
        step, cells = self.step, self.cells
        with step.entered():
            for action in step.forwards():
                cells.act(action)
        flat = None
        if step.world.rank == step.last:
            self.bundles = {
                stage: [cells.given_out(stage, m) for m in range(len(step.sizes))]
                for stage, layout in enumerate(cells.layout.stages)
                if layout.sent.get(OUT)
            }
            start, bundles = cells.start, self.bundles
            if attached and cells.detached:
                start, bundles = self._attached()
            flat = list(step.end(start, bundles))
        else:
            update_statistics(step.state, step.lanes)
        if not cells.detached:
            step.finish()
        return flat

    def everywhere(self, flat: list[Any] | None) -> list[Any]:
        """Return the outputs on every rank; a backward of them runs :meth:`backward`."""
        last, device = self.step.last, self.step.world.device
        found = self.step.world.share(last, lambda: [_moved(value, torch.device("cpu")) for value in flat or ()])
        if flat is not None:
            return flat
        found = [_moved(value, device) for value in found]
        if not self.cells.detached:
            return found
        tensors = [v for v in found if isinstance(v, torch.Tensor) and v.is_floating_point()]
        made = iter(_Attached.apply(self, (), torch.zeros((), requires_grad=True), *tensors))
        return [next(made) if isinstance(v, torch.Tensor) and v.is_floating_point() else v for v in found]

    def _attached(self) -> tuple[Start, dict[int, list[Bundle]]]:
        """Return what the ending takes, behind one node of the caller's graph."""
        leaves = [*self.cells.start.kept, *(t for own in self.bundles.values() for bundle in own for t in bundle)]
        made = iter(_Attached.apply(self, leaves, torch.zeros((), requires_grad=True), *leaves))
        kept = tuple(next(made) for _ in self.cells.start.kept)
        bundles = {s: [tuple(next(made) for _ in bundle) for bundle in own] for s, own in self.bundles.items()}
        return replace(self.cells.start, kept=kept), bundles

    def backward(self) -> None:
        """Run the backwards; on the last stage's rank gradients have come to what the stages gave."""
        step, cells = self.step, self.cells
        for stage, bundles in self.bundles.items():
            for microbatch, bundle in enumerate(bundles):
                cells.give_back(stage, microbatch, [tensor.grad for tensor in bundle])
        self.bundles.clear()
        with step.entered(), held_back(leaf for own in cells.parameters for leaf in own):
            for action in step.order(backwards(step.schedule)):
                cells.act(action)
        with step.located():
            cells.hand_over()
        step.finish()


def _moved(value: Any, device: torch.device) -> Any:
    return value.detach().to(device) if isinstance(value, torch.Tensor) else value


class _Attached(torch.autograd.Function):
    """Stands in the caller's graph for all cells of a call: its backward is theirs."""

    @staticmethod
    def forward(ctx: Any, call: WholeCall, leaves: Any, trigger: torch.Tensor, *tensors: torch.Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.call, ctx.leaves = call, leaves
        ctx.mark_non_differentiable(*(t for t in tensors if leaves and not t.requires_grad))
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        for leaf, gradient in zip(ctx.leaves, gradients, strict=False):
            leaf.grad = gradient
        call, ctx.call, ctx.leaves = ctx.call, None, ()
        with torch.enable_grad():
            call.backward()
        return (None,) * (3 + len(gradients))


class _CallCells(Cells):
    """The cells of a call: what stages give the caller goes to the last stage's rank."""

    step: RankStep

    def _is_away(self, stage: int) -> bool:
        """Tell whether a stage and the last one are on different ranks."""
        return self.step.ranks[stage] != self.step.last

    def _way(self, stage: int, microbatch: int) -> Way:
        return Way(stage, self.last, microbatch, loss=True)

    def forward(self, stage: int, microbatch: int) -> CellState:
        """Run a stage on a microbatch, and send on what it gives."""
        state = super().forward(stage, microbatch)
        if self._is_away(stage) and state.sent.get(OUT):
            self.transport.send(self._way(stage, microbatch), state.sent[OUT])
        return state

    def given_out(self, stage: int, microbatch: int) -> Bundle:
        """Return what a stage gave for a microbatch, as leaves of a graph of their own."""
        if self._is_away(stage):
            return tuple(t for t in self.transport.recv(self._way(stage, microbatch)) if t is not None)
        own = self.cells[stage, microbatch].sent[OUT]
        return tuple(t.detach().requires_grad_(t.requires_grad) for t in own) if self.detached else own

    def give_back(self, stage: int, microbatch: int, gradients: Message) -> None:
        """Give a stage the gradients of what it gave."""
        if self._is_away(stage):
            self.transport.send(self._way(stage, microbatch).back, gradients)
        else:
            self.cells[stage, microbatch].out_gradients = gradients

    def _came_in(self, state: CellState, target: str, stage: int, microbatch: int) -> Message:
        if target == OUT and self._is_away(stage):
            return self.transport.recv(self._way(stage, microbatch).back)
        return super()._came_in(state, target, stage, microbatch)
