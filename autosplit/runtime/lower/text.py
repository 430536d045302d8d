"""The text of the pipelined program, made readable.

fx prints every node on a line of its own, with long names and ``x = None`` behind each last use. Here, in the same
text: items are written where they are used, the runtime's words stand alone, last uses are ``del``, and a comment marks
each clock tick.
"""

from __future__ import annotations

import re
from collections import Counter
from functools import partial
from typing import Any

from torch import fx
from torch.fx.graph import CodeGen

from autosplit.runtime.norms import update_statistics
from autosplit.runtime.ops import CellContext, fork, merge, record, split, transfer

WORDS: dict[str, Any] = {
    word.__name__: word for word in (CellContext, fork, merge, record, split, transfer, update_statistics)
}
_LINE = re.compile(r"(?P<name>\w+) = (?P<value>.*?);?(?:  (?P<gone>\w+(?: = \w+)* = None))?")
_ITEM = re.compile(r"(\w+)\[(\d+)\]")
CELL = re.compile(r"y(\d+)_(\d+)")
"""The name of what a stage gives for a microbatch."""


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
            cell = CELL.fullmatch(name)
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
