"""A plan as a graph in the DOT language: a cluster per stage, its modules in it, and what crosses the cuts, with bytes.

    autosplit report MODEL ... --dot plan.dot; dot -Tsvg plan.dot > plan.svg

The language: https://graphviz.org/doc/info/lang.html
"""

from __future__ import annotations

from collections.abc import Iterator

from autosplit.planning.plan import Plan
from autosplit.planning.records import Boundary, StagePlan
from autosplit.report.words import covers, summarise_modules
from autosplit.units import format_bytes, format_seconds

_LONGEST = 60
_NAMED = 3
"""How many values an edge names."""


def dot_text(plan: Plan) -> str:
    """Return a plan in the DOT language; bytes of an edge are per microbatch, or per step where the edge is dashed."""
    return "\n".join(_lines(plan)) + "\n"


def _lines(plan: Plan) -> Iterator[str]:
    title = f"{plan.fingerprint.model}: {len(plan.stages)} stages, {plan.schedule}, {plan.chunks} microbatches"
    yield f"digraph {_quoted(plan.fingerprint.model)} {{"
    yield f"  graph [label={_quoted(title)}, labelloc=t, rankdir=LR, compound=true, fontname=sans];"
    yield "  node [shape=box, style=rounded, fontname=sans];"
    yield "  edge [fontname=sans];"
    if any(boundary.producer < 0 for boundary in plan.boundaries):
        yield '  inputs [label="inputs", shape=ellipse];'
    boxes = [_boxes(index, modules) for index, modules in enumerate(covers(plan))]
    for stage, own in zip(plan.stages, boxes, strict=True):
        yield f"  subgraph cluster_{stage.index} {{"
        yield f"    label={_quoted(_stage_label(stage))};"
        for name, text in own.items():
            yield f"    {name} [label={_quoted(text)}];"
        if len(own) > 1:
            yield f"    {' -> '.join(own)} [style=invis];"
        yield "  }"
    yield from _edges(plan, [list(own) for own in boxes])
    yield "}"


def _boxes(stage: int, modules: list[str]) -> dict[str, str]:
    """Return the boxes of a stage and their texts: a box per module, or per run of numbered ones."""
    texts = [summarise_modules([module]) for module in modules]
    runs = summarise_modules(modules).split(", ") if modules else ["-"]
    shown = runs if len(runs) < len(texts) else texts or ["-"]
    return {f"stage{stage}_{place}": _short(text) for place, text in enumerate(shown)}


def _stage_label(stage: StagePlan) -> str:
    again = "" if stage.recompute == "never" else f", recompute {stage.recompute}"
    times = f"{format_seconds(stage.forward_s)} forward, {format_seconds(stage.backward_s)} backward{again}"
    capacity = stage.memory.capacity_bytes
    of = "" if capacity is None else f" of {format_bytes(capacity)}"
    return f"stage {stage.index} on {stage.device}\n{times}\npeak {format_bytes(stage.memory.peak_bytes)}{of}"


def _edges(plan: Plan, boxes: list[list[str]]) -> Iterator[str]:
    """Yield an edge for each pair of stages, with all values that go that way."""
    ways: dict[tuple[int, int, bool], list[Boundary]] = {}
    for boundary in plan.boundaries:
        for consumer in boundary.consumers:
            ways.setdefault((boundary.producer, consumer, boundary.per_step), []).append(boundary)
    for (producer, consumer, per_step), values in sorted(ways.items()):
        total = format_bytes(sum(value.bytes for value in values))
        more = [f"and {len(values) - _NAMED} more"] if len(values) > _NAMED else []
        label = "\n".join([total, *(_short(value.value) for value in values[:_NAMED]), *more])
        tail = "inputs" if producer < 0 else boxes[producer][-1]
        options = [f"label={_quoted(label)}", f"lhead=cluster_{consumer}"]
        options += [] if producer < 0 else [f"ltail=cluster_{producer}"]
        options += ["style=dashed"] if per_step else []
        yield f"  {tail} -> {boxes[consumer][0]} [{', '.join(options)}];"


def _quoted(text: str) -> str:
    """Return a text as a quoted string of the language, without what ends it or a terminal obeys."""
    safe = "".join(c if c.isprintable() or c == "\n" else "?" for c in text)
    return '"' + safe.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."
