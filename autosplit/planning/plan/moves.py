"""A plan changed by hand: modules moved to other stages, and how a plan knows that its choices are not its own."""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import TypeVar

from autosplit.errors import InputError, PlanError
from autosplit.planning.plan.record import PlanRecord

PlanT = TypeVar("PlanT", bound=PlanRecord)

_NEAR = 3


def parse_moves(texts: Iterable[str]) -> dict[str, int]:
    """Read ``decoder.3=1``: a module or node, and the stage that it goes to; raises InputError for anything else."""
    moves: dict[str, int] = {}
    for text in texts:
        name, equals, stage = text.rpartition("=")
        if not equals or not name.strip() or not (stage.strip().isascii() and stage.strip().isdecimal()):
            raise InputError(f"--move {text!r} cannot be read; write MODULE=STAGE, for example decoder.3=1")
        if len(stage.strip()) > 6:
            raise InputError(f"--move {text[:60]!r}: stage numbers are small")
        if name.strip() in moves:
            raise InputError(f"--move {name.strip()} is given twice; move a module once")
        moves[name.strip()] = int(stage)
    return moves


def choices_of(plan: PlanRecord) -> str:
    """Return a hash over what a plan chose: where each node runs, in which schedule, and what is recomputed."""
    chosen = {
        "stages": [[stage.lane, stage.recompute, sorted(stage.nodes)] for stage in plan.stages],
        "chunks": plan.chunks,
        "microbatch_rows": plan.microbatch_rows,
        "schedule": [plan.schedule, plan.virtual_stages, plan.actions],
    }
    return hashlib.sha256(json.dumps(chosen).encode()).hexdigest()[:16]


def sealed(plan: PlanT) -> PlanT:
    """Return a plan that knows what it chose: a later edit of that shows."""
    return plan.model_copy(update={"fingerprint": plan.fingerprint.model_copy(update={"choices": choices_of(plan)})})


def moved(plan: PlanT, moves: Mapping[str, int]) -> PlanT:
    """Return the plan with modules (``decoder.3``) or nodes (``decoder.3#0/add``) in other stages; see `Plan.move`."""
    stage_of = plan.stage_of()
    for name, target in moves.items():
        nodes = [node for node in stage_of if _lies_in(node, name)]
        if not nodes:
            raise PlanError(f"the plan has no module or node {name!r}{_meant(name, stage_of)}")
        if not 0 <= target < len(plan.stages):
            raise PlanError(f"{name!r} cannot go to stage {target}: there are {len(plan.stages)}, 0 on")
        stage_of.update(dict.fromkeys(nodes, target))
    stages = []
    for stage in plan.stages:
        own = tuple(node for node, index in stage_of.items() if index == stage.index)
        if not own:
            raise PlanError(f"stage {stage.index} would have nothing left; leave every stage at least one module")
        paths = dict.fromkeys(node.partition("#")[0] or plan.fingerprint.model for node in own)
        stages.append(stage.model_copy(update={"nodes": own, "modules": tuple(paths)}))
    return plan.model_copy(update={"stages": tuple(stages)})


def _lies_in(node: str, name: str) -> bool:
    path = node.partition("#")[0]
    return node == name or path == name or path.startswith(f"{name}.")


def _meant(name: str, nodes: Iterable[str]) -> str:
    paths: dict[str, None] = {}
    for node in nodes:
        parts = node.partition("#")[0].split(".")
        paths.update(dict.fromkeys(".".join(parts[:count]) for count in range(1, len(parts) + 1)))
    near = difflib.get_close_matches(name, [*paths, *nodes], n=_NEAR, cutoff=0.5)
    return f"; the nearest: {', '.join(near)}" if near else ""
