"""Make the pipelined program read as if a person had written it.

fx prints every node on a line of its own, with long names and ``x = None`` behind each last use. Here, in the same text:
items are written where they are used, the runtime's words stand alone, last uses are ``del``, and a comment marks each
clock tick.
"""

from __future__ import annotations

import re
from collections import Counter
from functools import partial
from typing import Any

from torch import fx
from torch.fx.graph import CodeGen

from autosplit.runtime import ops

WORDS = ("Key", "fork", "merge", "record", "split", "transfer", "wait")
_PREFIX = f"{ops.__name__.replace('.', '_')}_"
_LINE = re.compile(r"(?P<name>\w+) = (?P<value>.*?);?(?:  (?P<gone>\w+(?: = \w+)* = None))?")
_CELL = re.compile(r"y(\d+)_(\d+)")


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
        return [(word, partial(getattr(ops, word))) for word in self.words]


def _rewrite(words: tuple[str, ...], body: list[str]) -> list[str]:
    text = "".join(body)
    for word in words:
        text = re.sub(rf"\b{_PREFIX}{word}\(", f"{word}(", text)
    return _Inliner(text).lines()


class _Inliner:
    def __init__(self, text: str) -> None:
        self.source = text.split("\n")
        self.uses = Counter(re.findall(r"\bgetitem(?:_\d+)?\b(?! = )", text))
        self.items: dict[str, str] = {}
        self.gone: dict[str, list[str]] = {}
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
                self._assignment(
                    match["name"], match["value"], match["gone"].split(" = ")[:-1] if match["gone"] else []
                )
        return [f"{line}\n" for line in (*self.out, *self.block)]

    def _assignment(self, name: str, value: str, gone: list[str]) -> None:
        inside = [n for n in re.findall(r"\w+", value) if n in self.items]
        gone = [n for n in (*(g for item in inside for g in self.gone[item]), *gone) if n not in self.items]
        value = self._inlined(value)
        if re.fullmatch(r"getitem(_\d+)?", name) and self.uses[name] <= 1:
            self.items[name], self.gone[name] = value, gone
        elif value.startswith("wait("):
            self._keep(value, [n for n in gone if n != name])
        else:
            self._keep(f"{name} = {value}", gone)
            cell = _CELL.fullmatch(name)
            if cell is not None:
                self._flush(int(cell[1]) + int(cell[2]))

    def _inlined(self, text: str) -> str:
        return re.sub(r"\bgetitem(_\d+)?\b", lambda m: self.items.get(m[0], m[0]), text)

    def _keep(self, line: str, gone: list[str]) -> None:
        self.block.append(f"{line}; del {', '.join(gone)}" if gone else line)

    def _flush(self, clock: int) -> None:
        """Move the lines up to and including a cell to the output, under a comment when a new tick begins."""
        if clock != self.clock:
            self.clock = clock
            start = next(i for i, line in enumerate(self.block) if re.match(r"wait\(|y\d+_\d+", line))
            self.block.insert(start, f"# clock {clock}")
        self.out += self.block
        self.block = []
