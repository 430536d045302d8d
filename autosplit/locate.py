"""Notes on an exception of a call: where in the model it was raised, and what to do where memory ran out."""

from __future__ import annotations

import linecache
import re
from collections.abc import Sequence
from dataclasses import dataclass

from autosplit.devices import is_out_of_memory
from autosplit.planning.explain.reasons import short_of_memory
from autosplit.planning.plan.plan import Plan
from autosplit.runtime.lanes.lanes import Lane
from autosplit.runtime.lower.split import Lowered
from autosplit.runtime.lower.text import CELL
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
        names = {n.name: n.meta[INFO].name for n in self.lowered.traced.graph.nodes if INFO in n.meta}
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
        failed = action or _cell(cell)
        where = f"pipeline step {cell}" if failed is None else f"pipeline {describe(failed)}"
        if operation is not None:
            module, _, inside = operation.partition("#")
            location = f"module {module!r}" if module else "the model's own forward"
            error.add_note(f"raised in {location} ({operation if inside else module}), {where}")
        elif action is not None:
            error.add_note(f"raised in {where}")
        if self.plan is not None and is_out_of_memory(error):
            held = None if failed is None else self.lanes[failed.stage].clock.held_bytes()
            error.add_note(short_of_memory(self.plan, action=failed, sizes=self.sizes, held_bytes=held))


def _cell(name: str | None) -> Action | None:
    match = CELL.fullmatch(name or "")
    return Action(int(match[1]), "F", int(match[2])) if match else None
