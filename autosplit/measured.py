"""What the caller of a pipe is told of it: the plan's report, and what steps really did beside it."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from autosplit.errors import InputError, PlanError
from autosplit.files import write_text
from autosplit.planning.timeline import StagesAlone, StepTimeline
from autosplit.report.beside import render_json
from autosplit.report.page import page
from autosplit.report.sections import render, render_markdown
from autosplit.report.trace_file import write_trace
from autosplit.runtime.lanes.ambient import one_intra_op_thread
from autosplit.runtime.step_log import StepLog
from autosplit.runtime.timing import lane_memory, least_issue_s, stages_alone, timeline
from autosplit.trace.borrowed.state import left_alone, random_state_on_refusal

if TYPE_CHECKING:
    from autosplit.planning.plan.plan import Plan

FORMS = ("text", "markdown", "json")


class Measured:
    """The part of a pipe that reports: its plan, and the steps that were profiled."""

    if TYPE_CHECKING:

        @property
        def plan(self) -> Plan | None:
            """The plan; None before the first call when no sample was given."""

        _core: Any
        _train_step: Any

    def report(self, form: Literal["text", "markdown", "json"] = "text", *, width: int | None = None) -> str:
        """Return the partition report; what `profile_step` measured stands beside what was predicted.

        Args:
            form: "text" for a terminal, "markdown", or "json": the plan's fields, and "recorded" for what was measured.
            width: columns of a text; None: 120.

        Raises:
            InputError: there is no such form.
        """
        if form not in FORMS:
            raise InputError(f"form={form!r} is none of {', '.join(map(repr, FORMS))}")
        if self.plan is None:
            return "not planned yet: the pipe plans itself on its first call, or give autosplit a sample="
        measured = self._core.measured
        if form == "json":
            return render_json(self.plan, measured=measured)
        if form == "markdown":
            return render_markdown(self.plan, measured=measured)
        return render(self.plan, width=width, measured=measured) + str(self._core.recordings.notes())

    @property
    def profiled(self) -> StepTimeline | None:
        """The times of the step that was profiled last, and the bytes that were counted last; None before."""
        found: StepTimeline | None = self._core.measured
        return found

    def profile_step(
        self,
        *args: Any,
        target: Any = None,
        loss_fn: Any = None,
        loss_reduction: str = "auto",
        memory: bool = False,
        **kwargs: Any,
    ) -> StepTimeline:
        """Run a training step as `train_step` does, to every bit, and return when each action and transfer ran.

        The host waits for all devices before the first action and behind the last. What a kind of step needs the first
        time (recording it, a proof of its loss) is not in the times. :meth:`report`, :meth:`save_trace` and
        :meth:`save_page` put what was found beside the plan.

        CUDA devices tell the most bytes that they held, by their allocator's peak, which is reset. With ``memory`` CPU
        lanes do too: one thread runs them in turn under torch's profiler, and what goes from lane to lane is copied, as
        between devices. The times are then not a step's.
        """
        with random_state_on_refusal(), contextlib.closing(StepLog(allocations=memory)) as log:
            self._train_step(args, kwargs, target, loss_fn, loss_reduction, log)
        found = timeline(log, [stage.lane for stage in self._planned().stages])
        self._core.measured = _together(self._core.measured, found)
        return found

    def profile_stages(
        self,
        *args: Any,
        target: Any = None,
        loss_fn: Any = None,
        loss_reduction: str = "auto",
        repeats: int = 3,
        memory: bool = False,
        **kwargs: Any,
    ) -> StagesAlone:
        """Run a training step's actions each alone on its device, and return what they take.

        One thread issues them in the schedule's order and waits for each; every action runs ``repeats`` times after a
        first time that does not count. From that `StagesAlone` predicts the step: with every lane on a device of its
        own, or all on one. So one device tells what several would do. ``memory`` counts what CPU lanes allocate, in a
        step more; CUDA devices count by themselves. Gradients, buffers and the random state are left as they were.

        Raises:
            InputError: the step does not run action by action, and why; ``repeats`` is below 1.
        """
        if repeats < 1:
            raise InputError(f"repeats={repeats} measures nothing; give 1 or more")
        logs: list[StepLog] = []
        threaded = self._core.options.lanes == "threads"
        with left_alone(self._core.model, (args, kwargs, target, loss_fn)), one_intra_op_thread(only=threaded):
            for number in range(repeats + 1 + memory):
                counts = number > repeats
                log = StepLog(alone=not counts, issue_s=least_issue_s(logs), allocations=counts)
                with contextlib.closing(log):
                    self._train_step(args, kwargs, target, loss_fn, loss_reduction, log)
                logs.append(log)
        if log.whole is not None:
            raise InputError(f"the step does not run action by action, so no stage runs alone: {log.whole}")
        plan = self._planned()
        grown = lane_memory(logs.pop(), [stage.lane for stage in plan.stages]) if memory else ()
        schedule = plan.schedule_for(len(log.rows))
        return stages_alone(logs, schedule, [None if own is None else own.grown_bytes for own in grown])

    def save_trace(self, path: str | Path, measured: StepTimeline | None = None) -> None:
        """Write the plan's step as a file for Perfetto (Chrome's trace format), beside the step that was profiled last.

        Raises OSError, and PlanError where nothing is planned yet.
        """
        write_trace(path, self._planned(), self._shown(measured))

    def save_page(self, path: str | Path, measured: StepTimeline | None = None) -> None:
        """Write the plan as one HTML page that needs nothing but a browser, beside the step that was profiled last.

        Raises OSError, and PlanError where nothing is planned yet.
        """
        write_text(path, page(self._planned(), measured=self._shown(measured)))

    def _planned(self) -> Plan:
        if self.plan is None:
            raise PlanError("there is no plan yet: call the pipe first, or give autosplit a sample=")
        return self.plan

    def _shown(self, measured: StepTimeline | None) -> StepTimeline | None:
        return self._core.measured if measured is None else measured


def _together(before: StepTimeline | None, found: StepTimeline) -> StepTimeline:
    """Return the times of the last step that was timed with the bytes of the last one in which they were counted."""
    if before is None:
        return found
    if not found.timed:
        return replace(before, memory=found.memory) if before.timed else found
    return found if found.memory else replace(found, memory=before.memory)
