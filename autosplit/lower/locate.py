"""Say where in the model an exception inside the pipelined program came from, and what to do where memory ran out."""

from __future__ import annotations

import linecache
import re
from collections.abc import Sequence
from dataclasses import dataclass

from autosplit.devices.clocks import is_out_of_memory
from autosplit.lower.split import Lowered
from autosplit.planning.explain.short_of_memory import short_of_memory
from autosplit.planning.plan.plan import Plan
from autosplit.runtime.lanes.lanes import Lane
from autosplit.schedule.action import Action, describe
from autosplit.trace.graph import INFO

_ASSIGNMENT = re.compile(r"\s*(\w+)(?::.*?)? = ")


@dataclass(frozen=True)
class Locate:
    """Adds notes to an exception of one call: where it was raised, and what to do where that was for want of memory.

    ``lanes`` has one per stage, and may have the caller's behind them; ``sizes`` are the rows of each microbatch.
    """

    lowered: Lowered
    plan: Plan | None
    lanes: Sequence[Lane]
    sizes: Sequence[int]

    def __call__(self, error: BaseException, *, action: Action | None = None) -> None:
        """Add the notes; without an action it is read from the line of the program that failed."""
        found = add_location(error, lowered=self.lowered, action=action)
        if self.plan is not None and is_out_of_memory(error):
            held = None if found is None else self.lanes[found.stage].held_bytes()
            error.add_note(short_of_memory(self.plan, action=found, sizes=self.sizes, held_bytes=held))


def add_location(error: BaseException, *, lowered: Lowered, action: Action | None = None) -> Action | None:
    """Add a note with the action and the recorded operation to an exception of a program, or of one action alone.

    Returns the action, None where it was raised between cells.
    """
    names = {n.name: n.meta[INFO].name for n in lowered.traced.graph.nodes if INFO in n.meta}
    cell = operation = None
    traceback = error.__traceback__
    while traceback is not None:
        filename = traceback.tb_frame.f_code.co_filename
        if "eval_with_key" in filename:
            match = _ASSIGNMENT.match(linecache.getline(filename, traceback.tb_lineno))
            if match is not None:
                cell = match[1] if cell is None else cell
                operation = names.get(match[1], operation)
        traceback = traceback.tb_next
    given, action = action, action or _cell(cell)
    where = f"pipeline step {cell}" if action is None else f"pipeline {describe(action)}"
    if operation is not None:
        module, _, inside = operation.partition("#")
        place = f"module {module!r}" if module else "the model's own forward"
        error.add_note(f"raised in {place} ({operation if inside else module}), {where}")
    elif given is not None:
        error.add_note(f"raised in {where}")
    return action


def _cell(name: str | None) -> Action | None:
    match = re.fullmatch(r"y(\d+)_(\d+)", name or "")
    return Action(int(match[1]), "F", int(match[2])) if match else None
