"""The answer of ``autosplit solve`` as JSON and as a table."""

from __future__ import annotations

from typing import Any

from tabulate import tabulate

from autosplit.errors import InfeasibleError
from autosplit.partition.solve import Partition
from autosplit.partition.workload import Workload
from autosplit.units import format_bytes

_MS_PER_S = 1e3
_NAME_WIDTH = 32


def _ms(seconds: float) -> float:
    """Return the file's unit, without the digits that the way to seconds and back has left."""
    return float(f"{seconds * _MS_PER_S:.12g}")


def answer_json(partition: Partition, *, stages: int, seconds: float) -> dict[str, Any]:
    """Return what a script reads; times other than seconds are in ms, as in the file."""
    empty = stages - partition.stages
    value, bound = _ms(partition.value_s), _ms(partition.lower_bound_s)
    found = {
        "assignment": partition.assignment,
        "bottleneck": _ms(partition.bottleneck_s),
        "lower_bound": bound,
        "status": partition.status,
        "seconds": round(seconds, 6),
        "unit": "ms",
        "objective": partition.objective,
        "gap": value / bound - 1 if bound else None if value else 0.0,
        "loads": [*map(_ms, partition.loads_s), *[0.0] * empty],
        "bytes": [*partition.stage_bytes, *[0] * empty],
    }
    return found | ({"step_time": value} if partition.objective == "step_time" else {})


def refusal_json(error: InfeasibleError, *, objective: str, seconds: float) -> dict[str, Any]:
    """Return what a script reads where no partition fits."""
    return {
        "assignment": None,
        "bottleneck": None,
        "lower_bound": None,
        "status": "infeasible",
        "seconds": round(seconds, 6),
        "unit": "ms",
        "objective": objective,
        "smallest_memory_cap": error.smallest_bytes,
    }


def answer_table(workload: Workload, partition: Partition, *, stages: int, seconds: float) -> str:
    """Return the stages and the proof as a table."""
    members: list[list[int]] = [[] for _ in range(partition.stages)]
    for node, stage in enumerate(partition.assignment):
        members[stage].append(node)
    has_bytes = any(partition.stage_bytes)
    header = ["stage", "nodes", "first", "last", "load"] + ["memory"] * has_bytes
    rows = []
    for stage, own in enumerate(members):
        ends = [f"{node} {_short(workload.works[node].name)}" for node in (own[0], own[-1])] if own else ["-", "-"]
        load = f"{_ms(partition.loads_s[stage]):.6g} ms"
        rows.append([stage, len(own), *ends, load] + [format_bytes(partition.stage_bytes[stage])] * has_bytes)
    align = ("right", "right", "left", "left", "right", "right")[: len(header)]
    table = tabulate(rows, headers=header, tablefmt="simple", disable_numparse=True, colalign=align)
    unused = f"; {stages - partition.stages} more stay empty" if stages > partition.stages else ""
    title = f"{_short(workload.name)}: {len(workload.works)} nodes, {partition.stages} stages{unused}"
    return f"{title}\n\n{table}\n\n{_verdict(partition, seconds=seconds)}"


def _verdict(partition: Partition, *, seconds: float) -> str:
    proof = "optimal: no partition has less"
    if partition.status != "optimal":
        proof = f"none is below {_ms(partition.lower_bound_s):.7g} ms: at most {partition.gap:.2%} above the best"
    rows = [["bottleneck", f"{_ms(partition.bottleneck_s):.7g} ms"], ["solved in", f"{seconds:.2f} s"]]
    if partition.objective == "step_time":
        rows.insert(0, ["step time", f"{_ms(partition.value_s):.7g} ms"])
    rows[0][1] += f", {proof}"
    return tabulate(rows, tablefmt="plain", disable_numparse=True)


def _short(name: str) -> str:
    """Return a name in few characters, none of which a terminal obeys."""
    text = repr(name)[1:-1]
    return text if len(text) <= _NAME_WIDTH else f"{text[: _NAME_WIDTH - 3]}..."
