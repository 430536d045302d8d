"""A call of the pipe for the whole batch on one rank, and its backward."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from autosplit.distributed.messages import Messages, described
from autosplit.distributed.step import RankStep
from autosplit.runtime.norms import update_statistics
from autosplit.runtime.ops import OUT, Bundle
from autosplit.runtime.step.cells import Cells, parameters
from autosplit.schedule.entry import Route


class WholeCall:
    """A call for the whole batch: forwards of all cells, and what comes behind them on the last stage's rank.

    With gradients on, :meth:`backward` runs the backwards and gives every rank's parameters their gradients.
    """

    def __init__(self, step: RankStep) -> None:
        self.step, step.whole = step, True  # no copy, which would miss what is said of the step later on
        self.cells = Cells(step, step.start(ending=True), parameters(step), detached=torch.is_grad_enabled())
        self.given: dict[Route, Bundle] = {}
        """What comes behind the last cell takes of the stages, on the last stage's rank; leaves with gradients on."""

    @property
    def leaves(self) -> set[int]:
        """What comes behind the last cell takes, by identity."""
        return {id(tensor) for bundle in (self.cells.start.kept, *self.given.values()) for tensor in bundle}

    def _ways(self) -> list[Route]:
        """Return the ways of what stages give the caller."""
        stages, last = self.cells.layout.stages, self.cells.last
        return [
            Route(stage, last, microbatch, loss=True)
            for stage, layout in enumerate(stages)
            for microbatch in range(len(self.step.sizes))
            if layout.sent.get(OUT)
        ]

    def _is_own(self, route: Route) -> bool:
        return self.step.ends(route)[0] == self.step.world.rank

    def forward(self, *, attached: bool = False) -> list[Any] | None:
        """Return the model's flat outputs on the last stage's rank, None elsewhere.

        ``attached``: their backward, by the caller, runs :meth:`backward`.
        """
        step, cells = self.step, self.cells
        with step.entered():
            step.perform(step.forwards, cells)
        step.join_statistics()
        if step.world.rank == step.last:
            self.given = {route: self._taken(route) for route in self._ways()}
            kept, values = self._attached() if attached and cells.detached else (cells.start.kept, self.given)
            bundles = {route.source: [values[w] for w in values if w.source == route.source] for route in values}
            flat: list[Any] | None = list(step.end(replace(cells.start, kept=kept), bundles))
        else:
            for route in filter(self._is_own, self._ways()):
                cells.transport.send(route, cells.cells[route.source, route.microbatch].sent[OUT])
            update_statistics(step.state, step.lanes)
            flat = None
        if (tape := step.state.tape) is not None:
            tape.finish()  # what the caller draws between forward and backward is the same on every rank
            if any(node.draws is None for node in tape.nodes):  # the last stage's rank alone has drawn them
                torch.set_rng_state(step.world.share(step.last, torch.get_rng_state))
        if not cells.detached:
            step.finish()
        return flat

    def _taken(self, route: Route) -> Bundle:
        """Return what a stage gave for a microbatch."""
        if not self._is_own(route):
            return tuple(tensor for tensor in self.cells.transport.recv(route) if tensor is not None)
        bundle = self.cells.cells[route.source, route.microbatch].sent[OUT]
        return tuple(t.detach().requires_grad_(t.requires_grad) for t in bundle) if self.cells.detached else bundle

    def _attached(self) -> tuple[Bundle, dict[Route, Bundle]]:
        """Return what the ending takes, behind one node of the caller's graph."""
        kept = self.cells.start.kept
        leaves = [*kept, *(tensor for bundle in self.given.values() for tensor in bundle)]
        tensors = iter(_Attached.apply(self, leaves, torch.zeros((), requires_grad=True), *leaves))
        return tuple(next(tensors) for _ in kept), {
            route: tuple(next(tensors) for _ in bundle) for route, bundle in self.given.items()
        }

    def everywhere(self, flat: list[Any] | None) -> list[Any]:
        """Return the outputs on every rank; a backward of them runs :meth:`backward`."""
        last, device = self.step.last, self.step.world.device
        outputs = self.step.world.share(last, lambda: [_moved(value, torch.device("cpu")) for value in flat or ()])
        if flat is not None:
            return flat
        outputs = [_moved(value, device) for value in outputs]
        if not self.cells.detached:
            return outputs
        tensors = [v for v in outputs if isinstance(v, torch.Tensor) and v.is_floating_point()]
        attached = iter(_Attached.apply(self, (), torch.zeros((), requires_grad=True), *tensors))
        return [next(attached) if isinstance(v, torch.Tensor) and v.is_floating_point() else v for v in outputs]

    def begin_backward(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Agree on what a backward begins with, as the last stage's rank has it: what travels hangs on that."""
        step, begins = self.step, [None if gradient is None else described(gradient) for gradient in gradients]
        step.known.complete = True  # as for the forward
        step.loss = "backward", step.world.share(step.last, lambda: zlib.crc32(repr(begins).encode()))
        assert isinstance(self.cells.transport, Messages)
        self.cells.transport.follow(step.known)

    def backward(self) -> None:
        """Run the backwards; on the last stage's rank gradients have come to what the stages gave."""
        step, cells = self.step, self.cells
        for route, bundle in self.given.items():
            gradients = [tensor.grad for tensor in bundle]
            if self._is_own(route):
                cells.cells[route.source, route.microbatch].out_gradients = gradients
            else:
                cells.transport.send(route.back, gradients)
        self.given.clear()
        if step.world.rank != step.last:
            for route in filter(self._is_own, self._ways()):
                cells.cells[route.source, route.microbatch].out_gradients = cells.transport.recv(route.back)
        with step.entered():
            step.perform(step.backwards, cells, within=cells.hooks_held_back())
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
        if ctx.call is None:
            raise RuntimeError("a call over several processes can be differentiated once; call the pipe again")
        for leaf, gradient in zip(ctx.leaves, gradients, strict=False):
            leaf.grad = gradient
        call, ctx.call, ctx.leaves = ctx.call, None, ()
        with torch.enable_grad(), call.step.running():
            call.begin_backward(gradients)
            call.backward()
        return (None,) * (3 + len(gradients))
