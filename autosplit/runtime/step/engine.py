"""One training step: which loss each microbatch adds, then the cells in the order of the schedule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn

from autosplit.checks import choose
from autosplit.errors import InputError
from autosplit.runtime.lanes.lanes import Lane
from autosplit.runtime.loss import own_loss
from autosplit.runtime.loss import parts as losses
from autosplit.runtime.loss.outputs import Outputs, split_target, used_outputs
from autosplit.runtime.loss.parts import Counted
from autosplit.runtime.loss.proof import WRITES, Proofs, WholeCheck, prove
from autosplit.runtime.ops import bring
from autosplit.runtime.step import train_cells
from autosplit.runtime.step.step import Step
from autosplit.runtime.step_log import StepLog
from autosplit.trace.borrowed import state
from autosplit.trace.inputs.objects import take_apart, tensors_in
from autosplit.trace.reductions.own_loss import own_loss as loss_of

REDUCTIONS = ("auto", "mean", "sum")
_KIND = "kind"
Found = tuple[train_cells.Loss, WholeCheck | None]
"""What each microbatch adds to the loss, and what holds that against the whole batch."""


def train_step(
    step: Step,
    *,
    target: Any,
    loss_fn: Any,
    reduction: str,
    proofs: Proofs,
    whole: Callable[[], Any],
) -> torch.Tensor:
    """Run forward, loss and backward of a whole batch; see :meth:`PipelinedModule.train_step`.

    ``whole`` runs the ordinary program on the step; it is used where the loss needs the whole batch at once.
    """
    loss = find_loss(step, target=target, loss_fn=loss_fn, reduction=reduction, proofs=proofs, whole=whole)
    if loss is not None:
        return train_cells.run(step, *loss).outcome
    return whole_step(
        whole, target=target, loss_fn=loss_fn, lanes=lambda: step.lanes, why=why_whole(step), log=step.log
    )


def why_whole(step: Step) -> str:
    """Return why a step whose loss is not made in cells runs as one piece."""
    return "the batch gives one microbatch" if len(step.sizes) == 1 else "the loss wants the whole batch at once"


def kind_of(proofs: Proofs, loss_fn: Any) -> Any:
    """Return how a loss was found to add up; None where that is not known yet."""
    return proofs.find(loss_fn, _KIND)


def keep_kind(proofs: Proofs, loss_fn: Any, kind: Any) -> None:
    """Keep how other processes have found a loss to add up."""
    proofs.keep(loss_fn, _KIND, kind)


def find_loss(
    step: Step, *, target: Any, loss_fn: Any, reduction: str, proofs: Proofs, whole: Callable[[], Any]
) -> Found | None:
    """Return what each microbatch adds to the loss of a step; None where only the whole batch gives it.

    ``whole`` runs the ordinary program, where a loss is proved on the batch.
    """
    if loss_fn is None:
        loss = own_loss.in_schedule(step) if step.in_parts else None
        return None if loss is None else (loss, None)
    outputs = Outputs(step)
    target = with_outputs(target, step.lanes)
    targets = split_target(target, step.sizes, outputs=outputs.shapes())
    wants = wants_of(outputs, loss_fn, target, proofs)
    if outputs.by_rows(wants) and step.in_parts and not _has_graph(target):
        return _Loss(step, outputs, loss_fn, target, targets, wants).find(reduction, proofs, whole)
    return None


@dataclass(frozen=True)
class _Loss:
    """The loss of one step; each method returns None where only the whole batch gives it."""

    step: Step
    outputs: Outputs
    loss_fn: Any
    target: Any
    targets: Sequence[Any]
    wants: frozenset[str] | None

    def find(self, reduction: str, proofs: Proofs, whole: Callable[[], Any]) -> Found | None:
        """Return how the losses of microbatches add up: by the caller's word, or as known or proved."""
        if reduction != "auto":
            return self._parts(reduction), None
        return self.known(proofs) if losses.is_known(self.loss_fn) else self.proved(proofs, whole)

    def known(self, proofs: Proofs) -> Found | None:
        """Return torch's own loss where every value of it belongs to one row; asked once for the same shapes."""
        question = "adds up", self.step.sizes, *_shapes(self.outputs, self.target)
        adds_up, counted, of_parts = proofs.find(self.loss_fn, question) or (None, None, ())
        counted = counted or self._count()
        if counted is None:
            return None
        if adds_up is None:
            adds_up = self._in_parts()._adds_up(counted)
            parts = [self._count(m) or () for m in range(len(self.step.sizes))]
            of_parts = losses.plain_divisors(counted, parts)
            proofs.keep(self.loss_fn, question, (adds_up, counted if of_parts else None, of_parts))
        return (self._parts("counted", counted, of_parts), None) if adds_up else None

    def proved(self, proofs: Proofs, whole: Callable[[], Any]) -> Found | None:
        """Return a loss that is proved on this batch or was on an earlier one."""
        kind = proofs.find(self.loss_fn, _KIND)
        if kind is None:
            kinds = _prove(self._in_parts(), whole)
            if kinds is None:
                return None
            counts = "counted" in kinds[0] and self._count()
            known = [kind for kind in kinds if counts or "counted" not in kind]
            kind = proofs.keep(self.loss_fn, _KIND, (known or kinds)[0])
        counted = self._count() if "counted" in kind else ()
        if kind == WRITES or counted is None:
            return None
        parts = self._parts(kind, counted)
        return parts, WholeCheck(parts, self.target)

    def _in_parts(self) -> _Loss:
        """Return the loss of the same rows in at least two microbatches, where there are two rows."""
        if len(self.step.sizes) > 1 or self.step.rows < 2:
            return self
        sizes = (self.step.rows - self.step.rows // 2, self.step.rows // 2)
        targets = split_target(self.target, sizes, outputs=self.outputs.shapes())
        step = replace(self.step, sizes=sizes)
        return replace(self, step=step, outputs=Outputs(step), targets=targets)

    def _parts(self, kind: str, counted: Sequence[Counted] = (), of_parts: Sequence[float] = ()) -> losses.Parts:
        return losses.Parts(kind, self.loss_fn, self.step.sizes, self.targets, counted, self.wants, of_parts)

    def _count(self, microbatch: int | None = None) -> tuple[Counted, ...] | None:
        """Return torch's losses in the loss of a microbatch, or of the whole batch (None)."""
        device = self.step.lanes[-2].device
        target = self.target if microbatch is None else self.targets[microbatch]
        for zeros in (False, True):
            counted = losses.count(self.loss_fn, self.outputs.stand_in(microbatch, zeros=zeros), target, device)
            if counted is not None:
                return counted
        return None

    def _adds_up(self, counted: Sequence[Counted]) -> bool:
        """Tell whether the values of the microbatches are those of the whole batch."""
        parts = [self._count(m) or () for m in range(len(self.targets))]
        return losses.adds_up(counted, [[call.values for call in calls] for calls in parts])


def _shapes(outputs: Outputs, target: Any) -> tuple[Any, ...]:
    tensors = tensors_in(target)
    return tuple((t.shape, t.dtype) for t in tensors), tuple(outputs.shapes())


def wants_of(outputs: Outputs, loss_fn: Any, target: Any, proofs: Proofs) -> frozenset[str] | None:
    """Return which outputs a loss uses; asked once for the same shapes, and the same whole numbers that it holds."""
    if len(outputs.nodes) < 2:
        return None
    question = "wants", proofs.identity(loss_fn, integers=True), *_shapes(outputs, target)
    known = proofs.find(loss_fn, question)
    if known is None:
        known = proofs.keep(loss_fn, question, (used_outputs(loss_fn, outputs, target),))
    wants: frozenset[str] | None = known[0]
    return wants


def _has_graph(target: Any) -> bool:
    """Tell whether a target was computed with gradients: microbatches share its graph, so one backward takes it."""
    return any(isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None for leaf in pytree.tree_leaves(target))


def whole_step(
    whole: Callable[[], Any],
    *,
    target: Any,
    loss_fn: Any,
    lanes: Callable[[], Sequence[Lane]],
    why: str,
    log: StepLog | None = None,
) -> torch.Tensor:
    """Run the loss on the output of the whole batch, and its backward; ``loss_fn`` None: the model's own loss.

    ``lanes`` are the stages' and last the caller's, as they are when ``whole`` has run; ``why`` there are no actions.
    """
    if log is not None:
        log.start(lanes(), whole=why)
    with torch.inference_mode(False), torch.enable_grad():
        value = loss_of_whole(whole(), target, loss_fn, lanes())
        value.backward()
    if log is not None:
        log.finish(value.detach())
    return value.detach()


def loss_of_whole(output: Any, target: Any, loss_fn: Any, lanes: Sequence[Lane]) -> torch.Tensor:
    """Return the loss of the model's output for the whole batch; ``loss_fn`` None: the model's own loss."""
    output = _gathered(output, lanes)
    return loss_of(output) if loss_fn is None else losses.call_loss(loss_fn, output, with_outputs(target, lanes))


def check_loss(target: Any, loss_fn: Any, reduction: str) -> None:
    """Raise InputError for a reduction that there is not, and for a target or a loss without the other."""
    choose("loss_reduction", reduction, REDUCTIONS)
    if loss_fn is not None:
        losses.check_target(loss_fn, target)
        return
    for name, present in (("target", target is not None), ("loss_reduction", reduction != "auto")):
        if present:
            raise InputError(
                f"train_step got {name}= without loss_fn=, a function loss_fn(output, target) that returns a scalar; "
                "the model's own loss takes its labels as inputs of the model"
            )


def with_outputs(target: Any, lanes: Sequence[Lane]) -> Any:
    """Return a target that lies on the caller's device on the last stage's, in the caller's order."""
    *_, last, caller = lanes
    if not (last.asynchronous or caller.asynchronous):
        return target
    with torch.inference_mode(False), torch.enable_grad():
        return bring(target, caller, last.here())


def _gathered(output: Any, lanes: Sequence[Lane]) -> Any:
    """Return the model's output on the last stage's device, in the caller's order; on CPU lanes that is what it is."""
    if not any(lane.asynchronous for lane in lanes):
        return output
    flat, rebuild = take_apart(output)
    target = lanes[-2].here()
    for source in {lane.device: lane.here() for lane in lanes}.values():
        if source.device != target.device:
            flat = bring(flat, source, target)
    return rebuild(flat)


def _prove(loss: _Loss, whole: Callable[[], Any]) -> list[str] | None:
    step = loss.step
    traced = step.lowered.traced
    contents = state.contents(step.tensors if step.lowered.changes_inputs else ())
    with torch.no_grad(), state.borrowed(traced.root), contents:
        output = whole()
    flat, rebuild = take_apart(_gathered(output, step.lanes))
    flat = [_as_leaf(leaf) for leaf in flat]
    output = rebuild(flat)

    def output_of(microbatch: int | None) -> Any:
        if microbatch is None:
            return output
        start = sum(step.sizes[:microbatch])
        leaves = []
        for leaf, dim in zip(flat, traced.batch_outputs, strict=True):
            if dim is None:
                leaves.append(leaf)
            else:
                factor = leaf.shape[dim] // step.rows
                leaves.append(leaf.narrow(dim, start * factor, step.sizes[microbatch] * factor))
        return rebuild(leaves)

    weights = loss.loss_fn.parameters() if isinstance(loss.loss_fn, nn.Module) else ()
    leaves = [leaf for leaf in (*flat, *weights) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    with state.random_state(), state.attributes(functions=[loss.loss_fn]):
        return prove(loss.loss_fn, output_of, loss.target, loss.targets, step.sizes, leaves)


def _as_leaf(value: Any) -> Any:
    """Return an output as a tensor of the same memory whose gradient can be asked for; other values as they are."""
    if not isinstance(value, torch.Tensor) or not (value.is_floating_point() or value.is_complex()):
        return value
    with torch.inference_mode(False):
        return (value.clone() if value.is_inference() else value.detach()).requires_grad_()
