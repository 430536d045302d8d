"""Training steps of a pipe; microbatches that the caller cut are calls of their own in one schedule.

    plain loop      for inputs in microbatches: (loss(inputs) / n).backward()
    one schedule    microbatch m: its inputs, lengths, random numbers and loss ─► the sums of the stages ─► .grad, once

Nothing runs once for all of them: shared values, tied parameters and what mixes rows run in the cells of each, as in a
stream (:mod:`autosplit.stream.lowering`). So the numbers are those of the loop, also where rows of one call meet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import Any

import torch

from autosplit.checks import choose
from autosplit.delegation import one_at_a_time
from autosplit.errors import InputError
from autosplit.options import Sample
from autosplit.planning.profiled.apply import DataflowIndex, assign
from autosplit.recorded import PreparedStep, PreparedTree, Recorded, call_state
from autosplit.runtime.lanes.ambient import needs_one_thread
from autosplit.runtime.loss.outputs import Outputs
from autosplit.runtime.loss.parts import call_loss
from autosplit.runtime.lower.once import emit_setup
from autosplit.runtime.lower.split import Lowered, lower, owners
from autosplit.runtime.step import engine, train_cells
from autosplit.runtime.step.step import Start, Step
from autosplit.stream.lowering import in_stages
from autosplit.trace.borrowed.state import random_state_on_refusal
from autosplit.trace.inputs.objects import COUNT
from autosplit.trace.recording.recording import FirstCall
from autosplit.trace.reductions.own_loss import loss_node
from autosplit.trace.reductions.own_loss import own_loss as loss_of
from autosplit.trace.rows.kinds import keeps_statistics


class Training:
    """The part of a pipe that runs training steps."""

    _core: Any
    _prepare: Callable[..., PreparedStep | PreparedTree]
    _train_step: Any
    _is_hooked: Any

    def train_step(
        self,
        *args: Any,
        target: Any = None,
        loss_fn: Any = None,
        loss_reduction: str = "auto",
        microbatches: Sequence[Any] | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Run one training step in the plan's schedule; gradients are added to ``.grad``, the optimizer is left to you.

        Args:
            *args: positional inputs of the model, the whole batch.
            target: any nesting of tensors whose first dimension is the batch, or that are shaped like an output; cut
                as the inputs are. What lies on the batch's device is brought to the last stage's. With
                ``microbatches`` a sequence, one target each.
            loss_fn: ``loss_fn(output, target)`` returns a scalar, or several values with that one first or under
                "loss"; it gets all outputs on the last stage's device, where its own parameters belong. It is called
                several times. None: the model's own loss.
            loss_reduction: "mean" (over rows), "sum", or "auto": exact for torch's losses, also inside a ``loss_fn``,
                proved on the first batch for any other. With ``microbatches`` "mean" is ``sum(losses) / n``, "sum" is
                ``sum(losses)``; "auto" is the sum where ``num_items_in_batch`` is an input, else the mean.
            microbatches: instead of ``args`` the inputs of each microbatch: a tensor, a tuple of positional inputs, a
                dict of keyword inputs, or a `Sample`. Each is a call of its own in one schedule, with the numbers of a
                loop of ``(loss / n).backward()``; rows, lengths and values may differ.
            **kwargs: keyword inputs of the model; with ``microbatches`` those of every one.

        Returns:
            The loss of the whole batch, detached, 0-dim.

        Raises:
            InputError: the loss is neither a mean nor a sum over rows, or the target does not fit the batch; nothing
                was added to any gradient. Microbatches and targets are not as many.
        """
        with random_state_on_refusal():
            if microbatches is None:
                loss: torch.Tensor = self._train_step(args, kwargs, target, loss_fn, loss_reduction)
                return loss
            if args:
                raise InputError("train_step got positional inputs and microbatches=, which has the inputs of each")
            samples = [Sample.of(each) for each in microbatches]
            samples = [Sample(*each.args, **(kwargs | each.kwargs)) for each in samples]
            return torch.stack(self._train_microbatches(samples, target, loss_fn, loss_reduction)).sum()

    @one_at_a_time
    def _train_microbatches(
        self, samples: Sequence[Sample], target: Any, loss_fn: Any, reduction: str
    ) -> list[torch.Tensor]:
        """Train on microbatches, and return what each adds to the loss."""
        targets = [None] * len(samples) if target is None else list(target)
        if not samples or len(targets) != len(samples):
            raise InputError(f"train_step got {len(samples)} microbatches and {len(targets)} targets; give one of each")
        engine.check_loss(targets[0], loss_fn, "auto")
        counted = any(sample.kwargs.get(COUNT) is not None for sample in samples)
        mean = choose("loss_reduction", reduction, engine.REDUCTIONS) == "mean" or (reduction == "auto" and not counted)
        loss = _Loss(loss_fn, len(samples) if mean else 1)
        self._core.recordings.check_backward()
        if (steps := self._calls(samples)) is None:
            calls = zip(samples, targets, strict=True)
            return [self._train_step(sample.args, sample.kwargs, target, loss, "auto") for sample, target in calls]
        losses: dict[int, torch.Tensor] = {}
        for group in _groups(steps):
            members = [steps[number] for number in group]
            joined = _JoinedStep.of(members, None if needs_one_thread() else self._core.threads)
            parts = _Losses(loss, joined, [targets[number] for number in group], self._core.proofs)
            cells = train_cells.run(joined, parts, None)
            losses |= {number: cells.losses[position] for position, number in enumerate(group)}
            for step in members:
                self._core.recordings.leave(step, ())
        return [losses[number] for number in range(len(samples))]

    def _calls(self, samples: Sequence[Sample]) -> list[PreparedStep] | None:
        """Return each microbatch as a step, its random numbers drawn; None where they run one after the other."""
        recordings, random = self._core.recordings, torch.get_rng_state()
        recordings.calls = len(samples)
        cells: list[PreparedStep] = []
        try:
            for step in [self._prepare(sample.args, sample.kwargs, runs=False) for sample in samples]:
                if isinstance(step, PreparedTree) or (in_cells := self._in_cells(step)) is None:
                    break
                cells.append(in_cells)
        except FirstCall:  # it completes the model
            cells = []
        finally:
            recordings.calls = 1
        if len(cells) == len(samples):
            return cells
        torch.set_rng_state(random)  # they draw anew
        return None

    def _in_cells(self, step: PreparedStep) -> PreparedStep | None:
        """Return a call as one microbatch with all that it does in its cells; None where that cannot be.

        It cannot where hooks want the gradients of each call, or a call changes what the next one does.
        """
        recorded, core, parameters = step.recorded, self._core, self._core.model.parameters()
        if self._is_hooked or any(p._backward_hooks or p._post_accumulate_grad_hooks for p in parameters):
            return None
        if step.python is not None or recorded.changes_python or recorded.traced.kept or recorded.replicas:
            return None
        if (lowered := step.once("in cells", lambda: self._lowered(recorded))) is None:
            return None
        setup, sizes, orders = partial(emit_setup, lowered, {}), (step.rows,), step.once("orders in cells", dict)
        state = call_state(lowered, core.options, sizes, step.lengths, ahead=True)
        return replace(step, lowered=lowered, setup=setup, sizes=sizes, state=state, orders=orders)

    def _lowered(self, recorded: Recorded) -> Lowered | None:
        """Lower a recording with all in its stages; None where these would want state on other devices than it is.

        Nor where a call writes state, but for batch norms' statistics, or draws what cannot be drawn beforehand.
        """
        core, traced, devices = self._core, recorded.traced, [lane.device for lane in recorded.lanes]
        nodes = [(info, keeps_statistics(node, traced.root)) for node, info in traced.compute_nodes()]
        if recorded.lowered.off_tape or any(info.whole or (info.rewritten and not norm) for info, norm in nodes):
            return None
        stage_of = assign(DataflowIndex(traced), core.recordings.plan.stage_of(), stages=len(devices))
        again, compiled = recorded.lowered.recompute, core.options.compile
        lowered = lower(*in_stages(traced, stage_of, alone=True), devices, recompute=again, compiled=compiled)
        homes, wanted = (owners(core.model, each) for each in (recorded.lowered, lowered))
        moved = any(devices[homes[name]] != devices[stage] for name, stage in wanted.items())
        return None if moved or lowered.changes_inputs else lowered


@dataclass(kw_only=True)
class _JoinedStep(PreparedStep):
    """The calls of one recording as the microbatches of one step."""

    each: Sequence[PreparedStep]

    @classmethod
    def of(cls, each: Sequence[PreparedStep], threads: Any) -> _JoinedStep:
        """Join calls; ``threads`` run the lanes."""
        sizes = tuple(step.rows for step in each)
        first, tensors = vars(each[0]), [tensor for step in each for tensor in step.tensors]
        joined = {"tensors": tensors, "rows": sum(sizes), "sizes": sizes, "threads": threads, "each": each}
        return cls(**first | joined | {"locate": replace(first["locate"], sizes=sizes)})

    def call(self, microbatch: int) -> tuple[Step, int]:
        """Return the call of the model that a microbatch is."""
        return self.each[microbatch], 0

    def start(self, *, ending: bool) -> Start:
        """Bring the inputs of all calls to the stages that take them; nothing else comes before the cells."""
        starts = [step.start(ending=ending) for step in self.each]
        return replace(starts[0], inputs={s: [start.inputs[s][0] for start in starts] for s in starts[0].inputs})


@dataclass(frozen=True)
class _Loss:
    """The loss of one microbatch, as its backward begins at it."""

    function: Any
    divisor: int

    def __call__(self, output: Any, target: Any = None) -> torch.Tensor:
        loss = loss_of(output) if self.function is None else call_loss(self.function, output, target)
        return loss if self.divisor == 1 else loss / self.divisor


class _Losses:
    """The losses of microbatches that share a schedule; ``wants`` are the outputs that they use, None: all."""

    takes_values = False
    wants: frozenset[str] | None = None

    def __init__(self, loss: _Loss, step: _JoinedStep, targets: Sequence[Any], proofs: Any) -> None:
        self.loss, self.targets = loss, [engine.with_outputs(target, step.lanes) for target in targets]
        if loss.function is None:
            self.wants = frozenset({step.once("loss", lambda: loss_node(step.lowered.traced)).name})
        elif not hasattr(loss.function, "takes_all"):
            pairs = zip(step.each, self.targets, strict=True)
            uses = [engine.wants_of(Outputs(call), loss.function, target, proofs) for call, target in pairs]
            self.wants = None if None in uses else frozenset().union(*filter(None, uses))

    def __call__(self, output: Any, microbatch: int) -> torch.Tensor:
        return self.loss(output, self.targets[microbatch])


def _groups(steps: Sequence[Step]) -> list[list[int]]:
    """Return which microbatches share a schedule: those of one recording, and only neighbours where order matters."""
    keys = [id(step.lowered) for step in steps]
    if any(step.lowered.counts for step in steps):
        return [list(group) for _, group in groupby(range(len(keys)), keys.__getitem__)]
    return [[number for number, key in enumerate(keys) if key == each] for each in dict.fromkeys(keys)]
