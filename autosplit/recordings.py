"""The recordings of one model: a bounded cache by call signature, all cut by one plan.

A kind of call that no graph can follow is run by the model's own Python, its modules on the stages of the same plan.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from autosplit.checks import check_backward
from autosplit.collapse import OWN_PYTHON, Collapses
from autosplit.errors import InputError, TraceError, known_to_all
from autosplit.history import History
from autosplit.kept import Kept, Recent
from autosplit.options import Options, Sample
from autosplit.planning.plan.plan import Plan
from autosplit.planning.plan.write import check_plan
from autosplit.planning.profiled.apply import DataflowIndex, assign
from autosplit.planning.profiled.problem import RecordedModel
from autosplit.planning.request import sizes_of
from autosplit.planning.search.make import make_plan, recosted
from autosplit.planning.tree import plan_tree
from autosplit.progress import shown
from autosplit.recorded import Constants, FoundCall, PreparedStep, PythonRuns, Recorded, refusal, tree_of
from autosplit.runtime.lanes.ambient import is_transformed, without_callers_modes
from autosplit.runtime.lanes.lanes import Lane, lane
from autosplit.runtime.lower.replicas import Replicas, replicated
from autosplit.runtime.lower.split import Lowered, lower, place
from autosplit.runtime.tree import TreeRun
from autosplit.schedule.action import Schedule
from autosplit.trace.borrowed.state import RECORDING, attributes
from autosplit.trace.inputs.differences import apart, nearest
from autosplit.trace.inputs.inputs import batch_rows
from autosplit.trace.inputs.lengths import Shapes, without_rows
from autosplit.trace.inputs.objects import as_called, take_apart, tensors_in
from autosplit.trace.inputs.signature import Key, Kind
from autosplit.trace.ladder import Trace, for_all_rows, trace, widen, widen_to_one_row
from autosplit.trace.recording.recording import FirstCall
from autosplit.trace.recording.run import PythonRun

_ATTEMPTS = 3
_VARIANTS = 8
"""How many recordings of one signature are kept that hold for different values."""
_OTHER_PYTHON = "forward's own Python, which changes what it depends on, did something else"


class Recordings:
    """Finds the recording for a call, or makes it; the first one makes the plan.

    Attributes:
        plan: what all recordings are cut by; None before the first one when none was given.
        lanes: the lane of each stage's first replica, the same object for stages of one lane; empty before the first
            recording.
    """

    tree: TreeRun | None = None  # runs what no graph can follow

    def __init__(self, model: nn.Module, options: Options, plan: Plan | None, *, fits: bool) -> None:
        self.model = model
        self.options = options
        self.plan = plan
        self.fits = fits or plan is None  # made for this model, or checked: the model may change after that
        self.lanes: tuple[Lane, ...] = ()
        self._replica_lanes: list[tuple[Lane, ...]] = []  # of each stage's replicas
        self.kept = Kept()
        self.still: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext  # while the model is recorded
        self.made = 0
        """How often the model was recorded anew, for one length or with several as one; checks are not counted."""
        self.first_calls, self.calls = 0, 1  # calls that share a schedule: one
        self._refused: Recent[Any, str] = Recent()
        self._refused_last: Key | None = None  # of the first call of its kind that runs by its own Python, until then
        self._collapses = Collapses(model, options)
        self.check_norms, self.of_group = self._collapses.check_norms, self._collapses.of_group
        self._constants = Constants(options)
        self.python = PythonRuns(model)
        self.history = History(type(model).__name__)

    def share(self, other: Recordings) -> None:
        """Take the plan and the lanes of other recordings of the model, unless there is a plan."""
        if self.plan is None and other.plan is not None:
            self.plan, self.fits, self.lanes, self._replica_lanes = other.plan, True, other.lanes, other._replica_lanes
            self.options = self.options.as_planned(self.plan.devices)

    def schedule_for(self, microbatches: int) -> Schedule:
        """Return the plan's schedule, whole; there is a plan as soon as there is a recording."""
        assert self.plan is not None
        return self.plan.whole_schedule(microbatches)

    def check_backward(self) -> None:
        """Raise ScheduleError when the schedule, planned or asked for, has forwards only."""
        if self.plan is None:
            check_backward(self.options.schedule, self.options.actions)
        else:
            check_backward(self.plan.schedule, self.plan.schedule_rows)

    def check_stream(self) -> None:
        """Raise InputError where a pipe cannot train on a stream."""
        self.check_backward()

    def notes(self) -> str:
        """Return what the report says of stages that were to be compiled."""
        every = (recorded.lowered for variants in self.kept.values() for recorded in variants)
        reasons = {label: reason for lowered in every for label, reason in lowered.uncompiled.items()}
        lines = [f"not compiled: {label}: {reason}" for label, reason in reasons.items()]
        lines += self._collapses.found()
        return "".join(f"\n{line}" for line in lines)

    def _find(self, key: Key, sample: Sample) -> Recorded | TreeRun:
        """Return the recording for a call, or make one; what it changes in Python is not considered."""
        recorded = self._known(key, sample)
        if recorded is not None:
            self.kept.use(key)
            self.history.in_a_row = 0
        elif is_transformed():
            raise InputError(
                "the first call of its kind is made under a transform of torch.func or forward-mode differentiation, "
                "where a model cannot be recorded: call the pipe once without it, with inputs of the same shapes and "
                "in the same mode"
            )
        elif self.tree is not None and key.rest in self._refused:
            self._refused.use(key.rest)
            self.history.in_a_row = 0
            return self.tree
        else:
            with self.still(), RECORDING, self._shown("planning the pipeline of {}", planned=False):
                recorded, why = self._recorded(key, as_called(sample)), self._refused.get(key.rest, "")
                key = self.python.key_of(*take_apart((sample.args, sample.kwargs)))
                self._renew(key, sample)
                if recorded is None:
                    self._refused.use(key.rest)
                    self._collapses.note(why, OWN_PYTHON.format(why))
                    self._refused_last = key
                    return self._tree(sample, why)
                if self.calls == 1:
                    self._collapses.check(key.rest, recorded.traced, recorded.kind.rows_in(key))
        changes = recorded.lowered.changes_inputs
        if changes and (why := refusal(recorded.traced, tensors_in((sample.args, sample.kwargs)), self.model)):
            self._collapses.note(why, OWN_PYTHON.format(why))
            with RECORDING:
                return self._tree(sample, why)
        return recorded

    def _known(self, key: Key, sample: Sample) -> Recorded | None:
        """Return the recording for a call where there is one that is known to hold at its sizes."""
        if (recorded := self.kept.first(key, sample) or self.kept.covering(key, sample)) is not None:
            return recorded
        self._renew(key, sample)
        return self.kept.first(key, sample) or self.kept.covering(key, sample)

    def _recorded(self, key: Key, sample: Sample) -> Recorded | None:
        """Return a new recording for this kind of call; None where no graph can follow it."""
        if key.rest in self._refused:
            return None
        before, started, variants = self.made, time.perf_counter(), self.kept.get(key, ())
        differences = nearest(key, [*(Key(rest, key.shapes) for rest in self._refused), *self.kept][::-1])
        recorded, refused = None, ""
        try:
            recorded = self._found(key, sample)
        except TraceError as error:
            self.first_calls += isinstance(error, FirstCall)
            if known_to_all(error) or (isinstance(error, FirstCall) and self.first_calls <= 2):  # others are refused
                raise
            refused = " ".join((str(error), *(f"({note})" for note in getattr(error, "__notes__", ()))))
            self._refused[key.rest] = refused
        if recorded is None or self.made > before:
            differences = apart(variants[0].values_read, recorded.values_read) if variants and recorded else differences
            self.history.add(differences, time.perf_counter() - started, refused=refused)
        return recorded

    def _renew(self, key: Key, sample: Sample) -> None:
        """Keep what was recorded or refused for this kind of call before more attributes were known to be touched."""
        earlier = {known.rest for known in self.python.earlier_keys(sample)} - {key.rest}
        self.kept.renew(earlier, key)
        for rest in earlier & self._refused.keys():
            self._refused[key.rest] = self._refused.pop(rest)

    def _shown(self, work: str, *, planned: bool) -> AbstractContextManager[None]:
        """Show work on the model where there is a plan yet, or none."""
        return shown(work.format(type(self.model).__name__)) if planned == bool(self.plan) else contextlib.nullcontext()

    def _tree(self, sample: Sample, reason: str) -> TreeRun:
        """Return what runs the model's own Python; plan if there is no plan yet."""
        if self.tree is not None:
            return self.tree
        if self.plan is None:
            self.plan = plan_tree(self.model, sample, self.options, reason=reason)
        self._check_plan(self.plan)
        self._make_lanes(self.plan)
        self.tree = tree_of(self.model, self.plan, self.lanes)
        return self.tree

    def _found(self, key: Key, sample: Sample) -> Recorded:
        """Return a recording for a kind of call that had none: one for another batch size, or a new one."""
        variants = self.kept.get(key, ())
        if (ready := self.kept.first(key, sample)) is not None:
            return ready
        recorded = self._proved(key, sample)
        if recorded is None and len(variants) >= _VARIANTS:
            raise TraceError(
                f"forward reads a tensor's value that was another one in {len(variants)} calls of one kind; no graph "
                "can follow a choice that changes from batch to batch"
            )
        recorded = recorded or self._widened(key, sample)
        if recorded is None:
            recorded = self._record(key, sample)
            recorded.failed_generalizations = self.kept.failed_generalizations(key)
        self.kept.keep(key, recorded)
        return recorded

    def find(self, key: Key, sample: Sample) -> tuple[Recorded | TreeRun, PythonRun | None]:
        """Return the recording for a call of this signature, and what the call changes in Python (None: nothing).

        Where there is none, or its Python did something else, one is made; else the module tree's run is returned.
        """
        recorded = self._find(key, sample)
        if isinstance(recorded, TreeRun) or not (recorded.changes_python or recorded.is_stale(key)):
            return recorded, None
        alike = [each for each in self.kept.alike(key) if each.is_same_but_for_rows(key)]
        others = {id(each): each for each in (recorded, *self.kept.get(key, ()), *alike)}
        variants = [each for each in others.values() if each is recorded or each.holds(key, sample)]
        with self.still(), RECORDING:
            if (chosen := self.python.choose(variants, key, sample)) is not None:
                return chosen
            sample, started = as_called(sample), time.perf_counter()
            try:
                if len(variants) >= _VARIANTS:
                    raise TraceError(f"forward's own Python did other things in {len(variants)} calls of one kind")
                self.kept.keep(key, new := self._record(key, sample))
                if (chosen := self.python.choose([new], key, sample)) is None:
                    raise TraceError("forward's own Python does other things each time it runs")
            except TraceError as refusal:
                self._refused[key.rest] = str(refusal)
                self.history.add((), time.perf_counter() - started, other=_OTHER_PYTHON, refused=str(refusal))
                return self._tree(sample, str(refusal)), None
            self.history.add((), time.perf_counter() - started, other=_OTHER_PYTHON)
        return chosen

    def leave(self, step: PreparedStep | FoundCall, kept: Sequence[torch.Tensor]) -> None:
        """Leave in Python what the model's own call would have left, with the tensors that it would have kept."""
        if not self.python.called() and step.python is None:
            return
        assert isinstance(step.recorded, Recorded)
        with self.still(), RECORDING:
            now = self.python.leave(step.recorded, step.key, step.python, step.sample, kept)
        step.recorded.kind = replace(step.recorded.kind, rest=now.rest)
        self.kept.keep(now, step.recorded)

    def leave_tree(self, sample: Sample) -> None:
        """Leave what the first call of a kind that runs by its own Python has changed out of signatures."""
        if (key := self._refused_last) is not None:
            self._refused_last = None
            now, refused = self.python.without_changes(key, sample).rest, self._refused.get(key.rest)
            if refused is not None:  # else another thread's call has renewed it
                self._refused[now] = refused

    def _widened(self, key: Key, sample: Sample) -> Recorded | None:
        """Return a recording for all lengths, made of the newest one of this kind of call at another length; or None.

        After a few failed attempts, lengths are recorded one by one.
        """
        if self.kept.failed_generalizations(key) >= _ATTEMPTS:
            return None
        for base in self.kept.alike(key):
            kind = base.kind
            if not kind.rows_in(key):
                continue
            with self.python.watched():
                if base.lacks_one_row(key):
                    wide = widen_to_one_row(self.model, base.trace, sample)
                elif lengths := kind.varying(key):
                    before = [shape for shape in kind.shapes if shape is not None]
                    wide = widen(self.model, base.trace, sample, lengths=lengths, before=before)
                else:
                    continue
            self.made += 1
            if wide is not None:
                assert self.plan is not None
                widened = self.kept.replacing(base, self._cut(wide, self.plan, key, kind.shapes))
                return widened if widened.holds(key, sample) else None
            base.failed_generalizations = self.kept.failed_generalizations(key) + 1
            return None
        return None

    def _proved(self, key: Key, sample: Sample) -> Recorded | None:
        """Return a recording made at other sizes that is known, or found by recording once more, to hold at a call's.

        Raises TraceError when one that differs only in its number of rows does not.
        """
        fitting = [each for each in self.kept.alike(key) if each.kind.lengths_in(key) is not None]
        fitting = [each for each in fitting if each.kind.rows_in(key) and each.holds(key, sample)]
        if (recorded := next((each for each in fitting if each.is_same_but_for_rows(key)), None)) is not None:
            if not recorded.changes_python:  # else its own Python runs in every call
                self._check_rows(recorded, key, sample)
            return recorded
        for candidate in fitting:
            if not candidate.lacks_one_row(key):
                with contextlib.suppress(TraceError):  # another one may do, or a new one will
                    self._check(candidate, key, sample)
                    return candidate
        return None

    def _check_rows(self, recorded: Recorded, key: Key, sample: Sample) -> None:
        """Find out for which numbers of rows a recording holds; raise TraceError when not for those of a call."""
        if recorded.trace.domain is None and not recorded.rows_tried:
            recorded.rows_tried = True
            with self.python.watched():
                recorded.trace = replace(recorded.trace, domain=for_all_rows(self.model, recorded.trace, sample))
        if not recorded.covers(key):
            self._check(recorded, key, sample)

    def _check(self, recorded: Recorded, key: Key, sample: Sample) -> None:
        """Run the model's Python once more at a call's sizes; raise TraceError when a recording does not hold there."""
        with self.python.watched():
            recorded.trace.check_rows(self.model, sample, recorded.kind.rows_in(key))

    def _record(self, key: Key, sample: Sample) -> Recorded:
        """Record this kind of call; plan if there is no plan yet; cut the recording by the plan."""
        self._constants.check(key, sample)
        with torch.inference_mode(False), without_callers_modes():
            with attributes(self.model), self._shown("recording {} for another kind of call", planned=True):
                trace = self._planned(key, sample)
            assert self.plan is not None
            return self._cut(trace, self.plan, key)

    def _planned(self, key: Key, sample: Sample) -> Trace:
        """Record this kind of call, and plan if there is no plan yet."""
        with self.python.watched():
            trace = self._trace(sample)
        if trace.graph.asks_grad_mode and not key.rest.modes.grad:
            raise TraceError(
                f"forward asks whether gradients or inference mode are on ({trace.graph.asks_grad_mode}) and is called "
                "without gradients; a recording has them on"
            )
        self.made += 1
        rows = batch_rows(trace.inputs)
        if self.plan is None:
            least, like = trace.graph.min_rows, self.options.microbatches
            sizes = sizes_of(rows * self.calls, self.options.chunks, least, like=like)
            self.plan = make_plan(self.model, self._to_plan(trace), self.options, sizes=sizes)
            self.options = self.options.as_planned(self.plan.devices)
        else:
            self._check_plan(self.plan)
            if not self.kept and self.plan.edited:
                self.plan = recosted(RecordedModel(self.model, self._to_plan(trace)), self.options, self.plan)
        return trace

    def _to_plan(self, trace: Trace) -> Trace:
        """Return what a device runs of a recording, which is what is planned."""
        return trace

    def _trace(self, sample: Sample) -> Trace:
        """Record the model's forward."""
        proofs = () if self.plan is None else self.plan.proofs
        whole_norms = self.options.batch_norm == "full"
        return trace(self.model, sample, batch_dims=self.options.batch_dims, proofs=proofs, whole_norms=whole_norms)

    def _check_plan(self, plan: Plan) -> None:
        """Take the plan's order of devices; raise PlanError where the caller's plan was made for another model."""
        if not self.fits:
            check_plan(plan, self.model, devices=len(self.options.devices))
            self.fits = True
        self.options = self.options.as_planned(plan.devices)

    def _cut(self, trace: Trace, plan: Plan, key: Key, shapes: Shapes | None = None) -> Recorded:
        devices = tuple(self.options.devices[stage.lane] for stage in plan.stages)
        stage_of = assign(DataflowIndex(trace.graph), plan.stage_of(), stages=len(devices))
        again = [stage.recompute for stage in plan.stages]
        lowered = lower(trace.graph, stage_of, devices, recompute=again, compiled=self.options.compile)
        self._make_lanes(plan)
        self._place(lowered, devices)
        replicas = self._replicas(lowered, stage_of)
        dims = trace.inputs.batch_dims
        trace = replace(trace, inputs=replace(trace.inputs, leaves=()))  # the batch itself must not live on
        kind = Kind(key.rest, shapes or without_rows(key.shapes, dims), dims, trace.graph.lengths)
        known = self.python.left_out(trace.gathered.recording.recording.inside)
        return Recorded(trace.graph, lowered, trace, kind, self.lanes, replicas, *known)

    def _replicas(self, lowered: Lowered, stage_of: Mapping[str, int]) -> tuple[Replicas, ...]:
        """Return what runs further replicas of stages."""
        return replicated(lowered, stage_of, self._replica_lanes, compiled=self.options.compile)

    def _make_lanes(self, plan: Plan) -> None:
        """Make the lanes, with the first recording."""
        if not self.lanes:
            lanes = tuple(lane(device) for device in self.options.devices[: len(plan.devices)])
            self._replica_lanes = [lanes[stage.lane : stage.lane + stage.replicas] for stage in plan.stages]
            self.lanes = tuple(first for first, *_ in self._replica_lanes)

    def _place(self, lowered: Lowered, devices: Sequence[torch.device]) -> None:
        """Move the model's state to the devices of the stages."""
        place(self.model, lowered, devices)
