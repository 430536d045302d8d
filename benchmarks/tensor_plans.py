"""Tensor-parallel plans found from the graph, beside those that transformers' configurations carry.

    python -m benchmarks.tensor_plans [NAME ...] [--seconds N]

Every configuration with a ``base_model_tp_plan`` that ``results/tensor-plans.json`` lacks, or those named; it stops
after N seconds, and the next call goes on. See :mod:`benchmarks.tensor_runs` for plans that run.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import re
import signal
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import transformers
from torch import nn

from autosplit.tensor.axes import Shard
from autosplit.tensor.plan import TensorPlan, tensor_plan
from autosplit.trace.graph import TracedGraph
from benchmarks.tensor_families import ROWS, families, recorded

RESULTS = Path(__file__).parent / "results" / "tensor-plans.json"
RANKS = 2
_STYLES = {"colwise": -2, "packed_colwise": -2, "colwise_gather_output": -2, "embedding_rowwise": -2}
_STYLES |= {"rowwise": -1, "packed_rowwise": -1, "rowwise_split_input": -1, "embedding_colwise": -1}
"""Which dimension of a weight a style of transformers shards."""
_WHOLE = ("mla_kv_a_proj", "replicate")
"""Styles that leave a weight whole."""
_MOST_S = 40
"""CPU seconds for one configuration."""


def projections(model: nn.Module, table: dict[str, str]) -> Iterator[tuple[str, str, int | None]]:
    """Yield the parameters that entries of a plan are about, their styles and the dimensions that are sharded."""
    for name, parameter in model.named_parameters():
        for pattern, style in table.items():
            regular = re.escape(pattern).replace(r"\*", r"\d+")
            known = style in _STYLES or style in _WHOLE
            if known and parameter.ndim > 1 and re.fullmatch(rf"(.*\.)?{regular}(\.weight)?", name):
                yield name, style, _STYLES[style] % parameter.ndim if style in _STYLES else None
                break


def compared(name: str, kind: type) -> dict[str, Any]:
    """Record and plan a configuration's model, and compare it with the plan that it carries."""
    start = time.process_time()
    model, traced, size = recorded(kind)
    entry = {"name": name, "recorded": size, "recorded_s": round(time.process_time() - start, 2)}
    return entry | beside(model, traced, kind.base_model_tp_plan)  # type: ignore[attr-defined]


def beside(model: nn.Module, traced: TracedGraph, table: dict[str, str]) -> dict[str, Any]:
    """Plan a recording and compare it with a plan by patterns of names."""
    start = time.process_time()
    plan = tensor_plan(traced, ranks=RANKS, rows=ROWS)
    planned_s = round(time.process_time() - start, 2)
    used = _used(traced)
    theirs = {name: (style, dim) for name, style, dim in projections(model, table) if name in used}
    groups: dict[str, list[str]] = {}
    for name, (_, dim) in theirs.items():
        placement = plan.parameters[name]
        if (placement.dim if isinstance(placement, Shard) else None) != dim:
            groups.setdefault(re.sub(r"\d+", "*", name), []).append(name)
    differences = [difference(traced, plan, names, theirs) | {"parameters": key} for key, names in groups.items()]
    sharded = {p for p, placement in plan.parameters.items() if isinstance(placement, Shard)}
    return {
        "nodes": len(traced.graph.nodes),
        "planned_s": planned_s,
        "projections": len(theirs),
        "same": len(theirs) - sum(one["count"] for one in differences),
        "fewer_bytes": sum(one["count"] for one in differences if one["wire_bytes"] <= one["wire_bytes_theirs"]),
        "differences": differences,
        "beyond": dict(Counter(re.sub(r"\d+", "*", name) for name in sharded - set(theirs))),
        "wire_bytes": plan.wire_bytes,
        "collectives": dict(Counter(f"{c.collective.kind} {c.collective.phase}" for c in plan.collectives)),
        "rank_share": rank_share(plan, used),
        "fixed": list(plan.fixed),
    }


def rank_share(plan: TensorPlan, used: set[str]) -> float:
    """Return the share of the parameters that are used that a rank holds."""
    held = sum(plan.elements[n] / (RANKS if isinstance(plan.parameters[n], Shard) else 1) for n in used)
    return held / sum(plan.elements[name] for name in used)


def _used(traced: TracedGraph) -> set[str]:
    """Return the parameters that the recording takes; experts for images are not among a text's."""
    used: set[str] = set()
    for node in traced.graph.nodes:
        target = str(node.target)
        if node.op == "get_attr":
            used.add(target)
        elif node.op == "call_module":
            used |= {f"{target}.{name}" for name, _ in traced.root.get_submodule(target).named_parameters()}
    return used & {name for name, _ in traced.root.named_parameters(remove_duplicate=False)}


def difference(
    traced: TracedGraph, plan: TensorPlan, names: list[str], theirs: dict[str, tuple[str, int | None]]
) -> dict[str, Any]:
    """Return the bytes on the wire where one projection of all blocks lies as we have it, and as they do."""
    pinned = tensor_plan(traced, ranks=RANKS, rows=ROWS, pins={name: theirs[name][1] for name in names})
    followed = all(
        (placement.dim if isinstance(placement := pinned.parameters[name], Shard) else None) == theirs[name][1]
        for name in names
    )
    return {
        "count": len(names),
        "style": theirs[names[0]][0],
        "ours": str(plan.parameters[names[0]]),
        "why": plan.replicated.get(names[0], ""),
        "wire_bytes": plan.wire_bytes,
        "wire_bytes_theirs": pinned.wire_bytes if followed else 0.0,
    }


def main() -> None:
    """Compare what is asked for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*")
    parser.add_argument("--seconds", type=float, default=1e9)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    done = {entry["name"] for entry in known.get("plans", ())}
    end = time.monotonic() + arguments.seconds
    signal.signal(signal.SIGPROF, _too_long)
    for name, kind in families().items():
        if name not in arguments.names if arguments.names else name in done:
            continue
        if time.monotonic() > end:
            break
        signal.setitimer(signal.ITIMER_PROF, _MOST_S)
        try:
            entry = compared(name, kind)
        except (Exception, TooLong) as error:  # what is not made or recorded is listed with its reason
            entry = {"name": name, "error": f"{type(error).__name__}: {str(error)[:600]}"}
        signal.setitimer(signal.ITIMER_PROF, 0)
        print({key: value for key, value in entry.items() if key in _SHOWN}, flush=True)
        write("plans", entry)


_SHOWN = ("name", "same", "projections", "fewer_bytes", "differences", "error", "rank_share", "recorded_s", "planned_s")


class TooLong(BaseException):
    """A configuration takes too long; nothing that handles errors of a recording may handle this."""


def _too_long(*_: Any) -> None:
    raise TooLong(f"more than {_MOST_S} s of one core")


def write(what: str, entry: dict[str, Any]) -> None:
    """Put one entry into the results, in the place of an older one."""
    with RESULTS.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        entries = {one["name"]: one for one in (*known.get(what, ()), entry)}
        known[what] = [entries[name] for name in sorted(entries)]
        known["summary"] = summary(known)
        RESULTS.write_text(json.dumps(known, indent=1) + "\n")
    RESULTS.with_suffix(".lock").unlink(missing_ok=True)


def summary(results: dict[str, Any]) -> dict[str, Any]:
    """Return what was asked beside what was measured."""
    done = [one for one in results.get("plans", ()) if one.get("projections")]
    count = sum(one["projections"] for one in done)
    good = sum(one["same"] + one["fewer_bytes"] for one in done)
    equal = [one for one in results.get("runs", ()) if one.get("float64", 1) <= 1e-12]
    return {
        "configurations": {"asked": 100, "measured": len(done)},
        "projections": count,
        "same_or_fewer_bytes": {"asked": 0.98, "measured": round(good / max(count, 1), 4)},
        "same": sum(one["same"] for one in done),
        "rank_share": {"asked": 1 / RANKS + 0.03, "measured": max((one["rank_share"] for one in done), default=None)},
        "runs": {"asked": 20, "measured": len(equal), "of": len(results.get("runs", ()))},
    }


if __name__ == "__main__":
    main()
