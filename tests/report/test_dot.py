"""The graph of a plan: legal DOT, whatever names are in it, and the plan's own stages and bytes."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings

from autosplit.planning.plan import Plan
from autosplit.report.dot import dot_text
from tests.planning.test_plan_file import a_plan, plans

_TOKEN = re.compile(r'\s*("(?:[^"\\]|\\.)*"|->|[{}\[\];,=]|[A-Za-z_][A-Za-z_0-9]*|-?[0-9.]+)', re.DOTALL)
_ID = re.compile(r'"(?:[^"\\]|\\.)*"|[A-Za-z_][A-Za-z_0-9]*|-?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)', re.DOTALL)


class Parser:
    """Reads what is used of the language: digraph, subgraph, nodes, edges and their attributes."""

    def __init__(self, text: str) -> None:
        self.tokens = list(self._tokens(text))
        self.place = 0
        self.clusters: dict[str, list[str]] = {}
        self.edges: list[tuple[list[str], dict[str, str]]] = []
        self.cluster: str | None = None
        self.take("digraph")
        self.name()
        self.block()
        assert self.place == len(self.tokens)

    def _tokens(self, text: str) -> Iterator[str]:
        place = 0
        while text[place:].strip():
            match = _TOKEN.match(text, place)
            assert match is not None, text[place : place + 40]
            yield match[1]
            place = match.end()

    def take(self, token: str) -> None:
        assert self.tokens[self.place] == token, self.tokens[self.place]
        self.place += 1

    def name(self) -> str:
        token = self.tokens[self.place]
        assert _ID.fullmatch(token), token
        self.place += 1
        return token

    def block(self) -> None:
        self.take("{")
        while self.tokens[self.place] != "}":
            self.statement()
        self.take("}")

    def statement(self) -> None:
        if self.tokens[self.place] == "subgraph":
            self.take("subgraph")
            self.cluster = self.name()
            self.clusters[self.cluster] = []
            self.block()
            self.cluster = None
            return
        names = [self.name()]
        if self.tokens[self.place] == "=":
            self.take("=")
            self.name()
        else:
            while self.tokens[self.place] == "->":
                self.take("->")
                names.append(self.name())
            attributes = self.attributes()
            if len(names) > 1:
                self.edges.append((names, attributes))
            elif self.cluster is not None:
                self.clusters[self.cluster].append(names[0])
        self.take(";")

    def attributes(self) -> dict[str, str]:
        found = {}
        self.take("[")
        while self.tokens[self.place] != "]":
            name = self.name()
            self.take("=")
            found[name] = self.name()
            if self.tokens[self.place] == ",":
                self.take(",")
        self.take("]")
        return found


def check(plan: Plan) -> Parser:
    """Check that the graph parses, that edges join nodes that are there, and that their clusters are theirs."""
    found = Parser(dot_text(plan))
    assert list(found.clusters) == [f"cluster_{stage.index}" for stage in plan.stages]
    home = {node: cluster for cluster, nodes in found.clusters.items() for node in nodes}
    assert all(found.clusters.values())
    for names, attributes in found.edges:
        assert all(name in home or name == "inputs" for name in names)
        if "lhead" in attributes:
            assert home[names[-1]] == attributes["lhead"]
            assert attributes.get("ltail") == home.get(names[0])
    ways = {(b.producer, c, b.per_step) for b in plan.boundaries for c in b.consumers}
    assert len([1 for _, attributes in found.edges if "lhead" in attributes]) == len(ways)
    return found


@settings(max_examples=40)
@given(plan=plans())
def test_any_plan_is_a_graph(plan: Plan) -> None:
    check(plan)


def boundaries(*given: tuple[str, int, int, int, bool]) -> list[dict[str, Any]]:
    return [{"value": v, "producer": p, "consumers": [c], "bytes": b, "per_step": s} for v, p, c, b, s in given]


def odd_plan() -> Plan:
    """Names that a quoted string must not end at, more values than an edge names, and inputs."""
    given = [('a"]; }', 0, 1, 2**20, False), ("b\\", 0, 1, 2**20, False), ("new\nline\x1b[31m", -1, 1, 8, False)]
    given += [(f"v{number}", 0, 1, 2**20, False) for number in range(4)] + [("tied", 0, 1, 2**30, True)]
    fields = a_plan() | {"boundaries": boundaries(*given)}
    fields["stages"][0]["modules"] = ["h.0", "h.1", "h.2", 'x"y']
    fields["stages"][1]["modules"] = ["h.3.a"]
    fields["fingerprint"]["model"] = "Nät→\\N"
    return Plan.model_validate(fields)


def test_names_cannot_break_out_and_bytes_add_up() -> None:
    found = check(odd_plan())
    labels = {(names[0], attributes.get("style")): attributes["label"] for names, attributes in found.edges[1:]}
    values, tied = labels["stage0_1", None], labels["stage0_1", "dashed"]
    assert values.startswith('"6.00 MiB\\na\\"]; }\\nb\\\\')
    assert values.endswith('and 3 more"')
    assert tied == '"1.00 GiB\\ntied"'
    assert "\x1b" not in dot_text(odd_plan())


def test_numbered_modules_are_one_box() -> None:
    assert check(odd_plan()).clusters["cluster_0"] == ["stage0_0", "stage0_1"]
    assert '[label="h.0-h.2"]' in dot_text(odd_plan())


@pytest.mark.skipif(shutil.which("dot") is None, reason="graphviz is not installed")
def test_graphviz_draws_it() -> None:
    drawn = subprocess.run(["dot", "-Tsvg"], input=dot_text(odd_plan()), capture_output=True, text=True, check=True)
    assert "stage 1 on cpu" in drawn.stdout
    assert not drawn.stderr
