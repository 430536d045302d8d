"""Say where in the model an exception inside the pipelined program came from."""

from __future__ import annotations

import linecache
import re

from autosplit.lower.split import Lowered
from autosplit.schedule.action import Action, describe
from autosplit.trace.graph import INFO

_ASSIGNMENT = re.compile(r"\s*(\w+)(?::.*?)? = ")


def add_location(error: BaseException, *, lowered: Lowered, action: Action | None = None) -> None:
    """Add a note with the action and the recorded operation to an exception of a program, or of one action alone."""
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
    where = _cell(cell) if action is None else f"pipeline {describe(action)}"
    if operation is not None:
        module, _, inside = operation.partition("#")
        place = f"module {module!r}" if module else "the model's own forward"
        error.add_note(f"raised in {place} ({operation if inside else module}), {where}")
    elif action is not None:
        error.add_note(f"raised in {where}")


def _cell(name: str | None) -> str:
    match = re.fullmatch(r"y(\d+)_(\d+)", name or "")
    return f"pipeline {describe(Action(int(match[1]), 'F', int(match[2])))}" if match else f"pipeline step {name}"
