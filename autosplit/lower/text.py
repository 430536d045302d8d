"""The text of the pipelined program: made readable, and read where a line of it fails.

fx prints every node on a line of its own, with long names and ``x = None`` behind each last use. Here, in the same
text: items are written where they are used, the runtime's words stand alone, last uses are ``del``, and a comment marks
each clock tick. An exception that comes out of a line gets notes: where in the model that is, and what to do where
memory ran out.
"""

from __future__ import annotations

import linecache
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import fx
from torch.fx.graph import CodeGen

from autosplit.devices import is_out_of_memory
from autosplit.lower.split import Lowered
from autosplit.planning.explain.reasons import short_of_memory
from autosplit.planning.plan.plan import Plan
from autosplit.runtime.lanes.lanes import Lane
from autosplit.runtime.norms import update_statistics
from autosplit.runtime.ops import CellContext, fork, merge, record, split, transfer
from autosplit.schedule.action import Action, describe
from autosplit.trace.graph import INFO

WORDS: dict[str, Any] = {
    word.__name__: word for word in (CellContext, fork, merge, record, split, transfer, update_statistics)
}
_LINE = re.compile(r"(?P<name>\w+) = (?P<value>.*?);?(?:  (?P<gone>\w+(?: = \w+)* = None))?")
_ITEM = re.compile(r"(\w+)\[(\d+)\]")
_CELL = re.compile(r"y(\d+)_(\d+)")
_ASSIGNMENT = re.compile(r"\s*(\w+)(?::.*?)? = ")


def readable(graph: fx.Graph) -> None:
    """Give a pipelined program's graph a code generator for readers; what runs is what is printed."""
    taken = {node.name for node in graph.nodes}
    words = tuple(word for word in WORDS if word not in taken)
    graph.set_codegen(_Words(words))
    graph.on_generate_code(lambda _: partial(_rewrite, words))


class _Words(CodeGen):
    """Makes the runtime's functions known under their own short names."""

    def __init__(self, words: tuple[str, ...]) -> None:
        super().__init__()
        self.words = words

    def additional_globals(self) -> list[tuple[str, Any]]:
        """Return the short names; each is an object of its own, since fx gives one name per object."""
        return [(word, partial(WORDS[word])) for word in self.words]


def _rewrite(words: tuple[str, ...], body: list[str]) -> list[str]:
    text = "".join(body)
    for word in words:
        module = WORDS[word].__module__.replace(".", "_")
        text = re.sub(rf"\b{module}_{word}\(", f"{word}(", text)
    return _Inliner(text).lines()


class _Inliner:
    def __init__(self, text: str) -> None:
        self.source = text.split("\n")
        self.uses = Counter(re.findall(r"\bgetitem(?:_\d+)?\b(?! = )", text))
        self.locals: set[str] = set()
        self.items: dict[str, str] = {}
        self.block: list[str] = []
        self.out: list[str] = []
        self.clock = -1

    def lines(self) -> list[str]:
        """Return the rewritten lines."""
        for line in self.source:
            match = _LINE.fullmatch(line)
            if match is None or line.startswith("#"):
                self.block.append(self._inlined(line))
            else:
                self.locals.update((match["gone"] or "").split(" = ")[:-1])
                self._assignment(match["name"], self._inlined(match["value"]))
        return [f"{line}\n" for line in self._with_deletions([*self.out, *self.block])]

    def _assignment(self, name: str, value: str) -> None:
        if re.fullmatch(r"getitem(_\d+)?", name) and self.uses[name] <= 2 and "(" not in value:
            self.items[name] = value
        elif re.fullmatch(r"getitem(_\d+)?", name) and (plain := _ITEM.fullmatch(value)):
            self.items[name] = f"{plain[1]}_{plain[2]}"
            self.locals |= {self.items[name]} if name in self.locals else set()
            self.block.append(f"{self.items[name]} = {value}")
        elif value.startswith("update_statistics("):
            self.block.append(value)
        else:
            self.block.append(f"{name} = {value}")
            cell = _CELL.fullmatch(name)
            if cell is not None:
                self._flush(int(cell[1]) + int(cell[2]))

    def _inlined(self, text: str) -> str:
        return re.sub(r"\bgetitem(_\d+)?\b", lambda m: self.items.get(m[0], m[0]), text)

    def _flush(self, clock: int) -> None:
        """Move the lines up to and including a cell to the output, under a comment when a new tick begins."""
        if clock != self.clock:
            self.clock = clock
            start = next(i for i, line in enumerate(self.block) if re.match(r"y\d+_\d+", line))
            self.block.insert(start, f"# clock {clock}")
        self.out += self.block
        self.block = []

    def _with_deletions(self, lines: list[str]) -> list[str]:
        """Delete every local variable behind its last use, as fx does, so that its memory is free."""
        last: dict[str, int] = {}
        for number, line in enumerate(lines):
            if not line.startswith("#"):
                last.update(dict.fromkeys((n for n in re.findall(r"\b\w+\b", line) if n in self.locals), number))
        gone: dict[int, list[str]] = {}
        for name, number in last.items():
            gone.setdefault(number, []).append(name)
        return [
            f"{line}; del {', '.join(gone[number])}" if number in gone and not line.startswith("return") else line
            for number, line in enumerate(lines)
        ]


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
    match = _CELL.fullmatch(name or "")
    return Action(int(match[1]), "F", int(match[2])) if match else None
