"""From an item of a loader to a minibatch: its inputs and target, a step on its recording, and its loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from autosplit.errors import InputError, TraceError
from autosplit.locate import Locate
from autosplit.options import Options, Sample
from autosplit.planning.request import sizes_of
from autosplit.recorded import FoundCall, Recorded, call_state, lane_of_caller
from autosplit.recordings import Recordings
from autosplit.runtime.lanes.lanes import Lane
from autosplit.runtime.loss import parts
from autosplit.runtime.loss.proof import Proofs, WholeCheck
from autosplit.runtime.ops import CallState
from autosplit.runtime.step import engine
from autosplit.runtime.step.step import Step
from autosplit.runtime.step.sums import Held
from autosplit.runtime.tree import TreeRun
from autosplit.schedule.action import Gradients
from autosplit.stream.lowering import StreamProgram
from autosplit.trace.graph import lengths_in
from autosplit.trace.recording.random_watch import draws_numbers
from autosplit.trace.reductions.own_loss import own_loss as loss_of


@dataclass(kw_only=True)
class StreamStep(Step):
    """One minibatch of a stream.

    Attributes:
        alone: whether it is never more than one microbatch.
        every_lane: the lanes of each stage's replicas.
        first: the number of its first microbatch in the stream.
    """

    alone: bool
    every_lane: Sequence[Sequence[Lane]]
    first: int = 0

    @property
    def stage_lanes(self) -> list[Lane]:
        """All lanes but the caller's."""
        return list(chain(*self.every_lane))

    @property
    def counts(self) -> list[int]:
        """How many replicas each stage has."""
        return [len(lanes) for lanes in self.every_lane]

    @property
    def gradients(self) -> Sequence[Gradients]:
        """All: a parameter may be unfrozen while minibatches are in flight."""
        return ["all" for _ in self.lowered.stages]

    def holder(self, stage: int, microbatch: int) -> Held:
        """Return which of a stage's replicas runs a microbatch: they take those of the stream in turn."""
        return Held(stage, (self.first + microbatch) % len(self.every_lane[stage]))

    def state_of(self, held: Held) -> CallState:
        """Return the state of a replica of a stage, which updates its own norms."""
        return self.apart.setdefault(held, replace(self.state, statistics={}))

    @property
    def in_parts(self) -> bool:
        """Whether the loss is made of parts."""
        return not self.alone

    def check_free(self, leaves: Sequence[torch.Tensor]) -> None:
        """Raise InputError for weights under a loss beside the outputs: they have no version per minibatch."""
        if leaves:
            raise InputError(
                f"the loss uses a tensor of shape {list(leaves[0].shape)} that requires a gradient and is not among "
                "the outputs: parameters of the loss, and of the model where the loss reads them itself, have no "
                "version per minibatch; compute it in the model, or detach it"
            )


class _WholeLoss:
    """The loss of a minibatch that is one microbatch."""

    takes_values, wants = False, None

    def __init__(self, loss_fn: Any, target: Any, *, first: bool) -> None:
        self.loss_fn, self.target, self.first = loss_fn, target, first

    def __call__(self, output: Any, microbatch: int) -> torch.Tensor:
        if self.loss_fn is None:
            return loss_of(output)
        with _NoDraws() if self.first else nullcontext():
            return parts.call_loss(self.loss_fn, output, self.target)


class _NoDraws(TorchDispatchMode):
    """Raises InputError where a loss draws random numbers: lanes share torch's generator with the loader."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags and draws_numbers(func, args, kwargs):
            raise InputError(
                f"the loss draws random numbers ({func.name()}), and lanes draw in no order: other ones each time; "
                "draw in the model, or in the loader"
            )
        return func(*args, **kwargs)


def step_of(call: FoundCall, program: StreamProgram, options: Options, recordings: Recordings) -> StreamStep:
    """Return a call as a step of a stream, with its random numbers."""
    recorded: Any = call.recorded  # it is `checked`
    rows = recorded.kind.rows_in(call.key)
    sizes: tuple[int, ...] = (rows,)
    if not program.alone:
        sizes = sizes_of(rows, options.chunks, recorded.traced.min_rows, like=options.microbatches)
    recordings.check_norms(recorded.traced, sizes)
    lengths = lengths_in(recorded.traced.lengths, [tensor.shape for tensor in call.tensors])
    return StreamStep(
        program.lowered,
        program.setup,
        program.setup,  # never called: a stream's cells have no ending
        Locate(program.lowered, recordings.plan, recorded.lanes, sizes),
        call.tensors,
        rows,
        lengths,
        sizes,
        (*recorded.lanes, lane_of_caller(call.tensors)),
        call_state(program.lowered, options, sizes, lengths, ahead=True),
        recordings.schedule_for,
        program.orders,
        replicas=program.replicas,
        alone=program.alone,
        every_lane=program.lanes,
    )


def loss_in(
    step: StreamStep, loss_fn: Any, target: Any, proofs: Proofs, whole: Callable[[], Any], *, first: bool
) -> tuple[Any, WholeCheck | None]:
    """Return what each microbatch adds to the loss of a minibatch, and what holds the sum against the whole.

    ``whole`` returns the model's output for all of it; ``first``: it is the first minibatch of a stream.
    """
    if step.alone:
        return _WholeLoss(loss_fn, target, first=first), None
    loss = engine.find_loss(step, target=target, loss_fn=loss_fn, reduction="auto", proofs=proofs, whole=whole)
    if loss is None:
        raise InputError(
            "the loss, or an operation of the model that it uses, needs the whole minibatch at once, and "
            "staleness='2bw' cuts it; give staleness='stash' or 'vertical', or chunks=1"
        )
    return loss


def inputs_and_target(item: Any, loss_fn: Any) -> tuple[Sample, Any]:
    """Return the inputs and the target of an item; without a loss function the item is the inputs."""
    pair = isinstance(item, (tuple, list)) and len(item) == 2
    if loss_fn is None:
        inputs, target = item if pair and item[1] is None else (item, None)
    elif pair:
        inputs, target = item
    else:
        raise InputError(
            f"the loader gives a {type(item).__name__}; with loss_fn= an item is (inputs, target), inputs a tensor, a "
            "tuple, a dict or a Sample"
        )
    return Sample.of(tuple(inputs) if isinstance(inputs, list) else inputs), target


def checked(call: FoundCall, recordings: Recordings) -> Recorded:
    """Return a call's recording; raise where a stream cannot run it."""
    recorded = call.recorded
    if isinstance(recorded, TreeRun):
        raise TraceError(f"the model runs by its own Python, which no stream can follow:{recordings.notes()}")
    if recorded.traced.kept or call.python is not None:
        raise TraceError(
            "the model changes Python state in its forward, which no stage can do in the minibatches' order"
        )
    if len(set(map(id, recorded.lanes))) < len(recorded.lanes):
        raise InputError("a stream runs one stage per lane; split with virtual_stages=1")
    if any(tensor.requires_grad for tensor in call.tensors):
        raise InputError("an input requires a gradient; a stream gives gradients to parameters only")
    return recorded
