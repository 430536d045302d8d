"""What two plans differ in: the model, what was chosen, the modules that moved, and what it costs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tabulate import tabulate

from autosplit.planning.plan.record import PlanRecord
from autosplit.units import format_bytes, format_seconds

_SHOWN = 24
"""How many differences of the model, and moved modules, are shown."""
_CHOICES = ("devices", "chunks", "microbatch_rows", "schedule", "virtual_stages", "optimizer", "precision", "machine")
_OF_STAGE = {"lane", "parameters", "recompute", "replicas", "forward_s", "backward_s", "weight_s"}
_COSTS = ("step_s", "bubble", "bottleneck_s", "lower_bound_s", "status", "verdict")


@dataclass(frozen=True)
class Changed:
    """A value of a plan that is another one in the other plan; ``name`` is its field, with dots."""

    name: str
    before: Any
    after: Any


@dataclass(frozen=True)
class Moved:
    """A module, or one node, all of which is in another stage; None is no stage: the plan does not have it."""

    name: str
    nodes: int
    before: int | None
    after: int | None


@dataclass(frozen=True)
class PlanDiff:
    """How one plan differs from another; false where they are equal.

    Attributes:
        model: entries of the fingerprint that differ, in words; empty where both are for the same model.
        moved: what lies in another stage, the largest modules that moved as a whole.
        changed: values that were chosen or predicted, one by one; stages by their number.
        others: fields that differ beside these, by name.
    """

    model: tuple[str, ...]
    moved: tuple[Moved, ...]
    changed: tuple[Changed, ...]
    others: tuple[str, ...]

    def __bool__(self) -> bool:
        return bool(self.model or self.moved or self.changed or self.others)

    def __str__(self) -> str:
        return "\n\n".join(self._sections()) or "the plans are equal"

    def _sections(self) -> Iterator[str]:
        if self.model:
            yield "\n".join(["Another model", *(f"  {text}" for text in self.model[:_SHOWN])]) + _left(self.model)
        if self.moved:
            rows = [[m.name, m.nodes, _stage(m.before), _stage(m.after)] for m in self.moved[:_SHOWN]]
            yield _table(["moved", "nodes", "from", "to"], rows) + _left(self.moved)
        if self.changed:
            rows = [[c.name, *(_text(c.name, value) for value in (c.before, c.after)), _ratio(c)] for c in self.changed]
            yield _table(["changed", "from", "to", ""], rows)
        if self.others:
            yield f"Also different: {', '.join(self.others)}"


def diff(before: PlanRecord, after: PlanRecord) -> PlanDiff:
    """Return the differences that turn ``before`` into ``after``."""
    model = tuple(_models(before, after))
    moved = tuple(_moved(before.stage_of(), after.stage_of()))
    old, new = _figures(before), _figures(after)
    changed = [Changed(n, old[n], new[n]) for n in old if n in new and old[n] != new[n]]
    told = {"fingerprint", "stages", "fits", *_CHOICES, *_COSTS}
    others = [n for n in type(before).model_fields if n not in told and getattr(before, n) != getattr(after, n)]
    result = PlanDiff(model, moved, tuple(changed), tuple(others))
    if not result and before != after:  # the order of nodes in a stage, or a device's name
        return PlanDiff((), (), (), ("stages",))
    return result


def entries_that_differ(planned: Iterable[str], actual: Iterable[str]) -> list[str]:
    """Return, in words, how entries such as ``layer.weight[4, 3]`` of two models differ."""
    before, after = (dict(_split(entry) for entry in entries) for entries in (planned, actual))
    shapes = [f"{n} is {after[n]}, in the plan {before[n]}" for n in before if n in after and before[n] != after[n]]
    absent = [f"{n}{before[n]} is in the plan only" for n in before if n not in after]
    new = [f"{n}{after[n]} is not in the plan" for n in after if n not in before]
    return [*shapes, *absent, *new]


def _split(entry: str) -> tuple[str, str]:
    name, bracket, shape = entry.partition("[")
    return name, bracket + shape


def _models(before: PlanRecord, after: PlanRecord) -> Iterator[str]:
    old, new = before.fingerprint, after.fingerprint
    if old.model != new.model:
        yield f"it is a {new.model}, and was a {old.model}"
    if old.state != new.state:
        yield from entries_that_differ(old.entries, new.entries) or ["its parameters and buffers are others"]
    if old.torch != new.torch:
        yield f"it was planned with torch {new.torch}, and before with {old.torch}"


def _moved(before: dict[str, int], after: dict[str, int]) -> Iterator[Moved]:
    """Yield the largest modules whose nodes all went the same way; where a module's own went several, the nodes."""
    ways = {name: (before.get(name), after.get(name)) for name in dict.fromkeys((*before, *after))}
    below: dict[str, list[str]] = {}
    for name in ways:
        for prefix in prefixes(name):
            below.setdefault(prefix, []).append(name)
    done: set[str] = set()
    for name, (first, then) in ways.items():
        if first == then or name in done:
            continue
        whole = (p for p in prefixes(name) if len({ways[n] for n in below[p]}) == 1)
        largest = next(whole, None)
        nodes = below[largest] if largest is not None else [name]
        done.update(nodes)
        yield Moved(name if largest is None else largest, len(nodes), first, then)


def prefixes(name: str) -> list[str]:
    """Return the modules around a node, the outermost first."""
    path = name.partition("#")[0]
    parts = path.split(".") if path else []
    return [".".join(parts[:count]) for count in range(1, len(parts) + 1)]


def _figures(plan: PlanRecord) -> dict[str, Any]:
    """Return what was chosen and what it costs, by name."""
    figures = {name: getattr(plan, name) for name in _CHOICES} | {"stages": len(plan.stages)}
    for stage in plan.stages:
        fields = stage.model_dump(include=_OF_STAGE) | stage.memory.model_dump()
        figures |= {f"stage {stage.index} {name}": value for name, value in fields.items()}
    return figures | {name: getattr(plan, name) for name in _COSTS}


def _text(name: str, value: Any) -> str:
    if value is None:
        return "-"
    if name.endswith("_s"):
        return format_seconds(value)
    if name.endswith("_bytes"):
        return format_bytes(value)
    if isinstance(value, tuple):
        return _short(", ".join(map(str, value)))
    return _short(f"{value:.4g}" if isinstance(value, float) else str(value))


def _short(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:37]}..."


def _ratio(changed: Changed) -> str:
    """Return by how much a number grew or shrank."""
    old, new = changed.before, changed.after
    numbers = all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in (old, new))
    return f"{new / old - 1:+.1%}" if numbers and old and changed.name.endswith(("_s", "_bytes", "bubble")) else ""


def _stage(number: int | None) -> str:
    return "-" if number is None else f"stage {number}"


def _left(each: Sequence[object]) -> str:
    return f"\nand {len(each) - _SHOWN} more" if len(each) > _SHOWN else ""


def _table(headers: list[str], rows: list[list[Any]]) -> str:
    return tabulate(rows, headers=headers, tablefmt="simple", disable_numparse=True)
