"""A plan as other tools take it: torch's schedule, torchtitan's lists of modules, Megatron's layout.

torchtitan (`parallelism.module_fqns_per_model_part`) and Megatron (`--pipeline-model-parallel-layout`) cut between the
blocks of a model: a block that the plan cuts inside goes to the stage that runs most of it, and a warning says so.
"""

from __future__ import annotations

import json
import warnings
from collections import Counter

from autosplit.checks import EXPORTS, not_available
from autosplit.errors import InputError
from autosplit.planning.plan.diff import prefixes
from autosplit.planning.plan.jobs import megatron_job, torchtitan_job
from autosplit.planning.plan.record import PlanRecord
from autosplit.schedule.files import dump_actions

_NAMED = 4


def export(plan: PlanRecord, form: str) -> str:
    """Return the plan in one of ``EXPORTS``; raises InputError for any other, and where a form cannot say the plan."""
    if plan.replicas:
        raise InputError(
            f"export({form!r}): stages have {list(plan.replicas)} replicas, which no export can say; plan without "
            "replicas="
        )
    if plan.offload and form in ("torchtitan-toml", "megatron-args"):
        hosted = " and ".join(plan.offload)
        warnings.warn(f"export({form!r}) does not say that {hosted} lie on the host", UserWarning, stacklevel=3)
    if form == "torch-csv":
        return dump_actions(plan.whole_schedule(plan.chunks))
    if form == "torchtitan":
        return "[\n" + ",\n".join(f"  {json.dumps(names)}" for names in _parts(plan)) + "\n]\n"
    if form == "torchtitan-toml":
        return torchtitan_job(plan, _parts(plan))
    if form == "megatron":
        return _megatron(plan)
    if form == "megatron-args":
        return megatron_job(plan, _megatron(plan) if len(plan.stages) > 1 else "")
    raise InputError(not_available(f"export({form!r})", form, EXPORTS))


def _parts(plan: PlanRecord) -> list[list[str]]:
    """Return the module names of each stage, for torchtitan: as JSON they are a list in TOML and in Python too.

    Names are those of the model: the entries of its lists of modules (``layers.0``), and other modules that have one
    stage each. What runs in a module around them has no name of its own.
    """
    stage_of = _placed(plan)
    return [[name for name, stage in stage_of.items() if stage == s.index] for s in plan.stages]


def _megatron(plan: PlanRecord) -> str:
    """Return the layout: E embedding, t a block, L loss, | between stages."""
    looped = [index % len(plan.devices) for index in range(len(plan.stages))]
    placed = [stage.lane for stage in plan.stages]
    if placed != looped:
        raise InputError(
            f"export('megatron'): schedule {plan.schedule!r} has its stages on lanes {placed}; Megatron's layout goes "
            f"round the devices, {looped}: plan with schedule='1f1b' or 'interleaved'"
        )
    lists: dict[str, list[int]] = {}
    for name, stage in _placed(plan).items():
        prefix, _, number = name.rpartition(".")
        if number.isdecimal():
            lists.setdefault(prefix, []).append(stage)
    if len(lists) != 1:
        names = ", ".join(map(repr, lists)) or "none"
        raise InputError(
            f"export('megatron'): Megatron's layout is of one list of blocks, and the model has {len(lists)} "
            f"({names}); use export('torchtitan'), which names modules"
        )
    [blocks] = lists.values()
    return f"E{'|'.join('t' * blocks.count(stage.index) for stage in plan.stages)}L\n"


def _placed(plan: PlanRecord) -> dict[str, int]:
    """Map whole modules to stages, in model order; warn of blocks that the plan cuts inside."""
    nodes = plan.stage_of()
    owners: dict[str, Counter[int]] = {}
    for name, stage in nodes.items():
        for prefix in prefixes(name):
            owners.setdefault(prefix, Counter())[stage] += 1
    seconds = _unit_seconds(plan)
    holders = {prefix for path in owners if _is_block(path) for prefix in prefixes(path)[:-1]}
    around = {prefix for path in owners for prefix in prefixes(path)[:-1]}
    placed: dict[str, int] = {}
    cut: list[str] = []
    for name in nodes:
        path = _whole(name.partition("#")[0], owners, holders, around)
        if path is None or path in placed:
            continue
        weights = seconds.get(path) or owners[path]
        placed[path] = max(weights, key=lambda stage: (weights[stage], -stage))
        if len(owners[path]) > 1:
            cut.append(f"{path} (stages {', '.join(map(str, sorted(owners[path])))}) goes to stage {placed[path]}")
    if cut:
        more = f", and {len(cut) - _NAMED} more" if len(cut) > _NAMED else ""
        warnings.warn(
            f"the plan cuts inside {len(cut)} module{'s' * (len(cut) > 1)}, which other tools keep whole: "
            f"{'; '.join(cut[:_NAMED])}{more}. Its times and memory are for the cut as it is; autosplit plan --plan "
            "FILE --move MODULE=STAGE tells those of whole modules",
            UserWarning,
            stacklevel=5,
        )
    return placed


def _whole(path: str, owners: dict[str, Counter[int]], holders: set[str], around: set[str]) -> str | None:
    """Return the module to name for a node's: the block that it is in, else the largest of one stage without blocks.

    One that several stages share is named itself where nothing runs in modules inside it, as a norm of several
    operations: left out, its parameters would be nobody's. None for what runs ``around`` modules that have their own
    names.
    """
    around_it = prefixes(path)
    block = next((prefix for prefix in around_it if _is_block(prefix)), None)
    if block is not None:
        return block
    alone = (p for p in around_it if p not in holders and len(owners[p]) == 1)
    return next(alone, path if path and path not in around else None)


def _unit_seconds(plan: PlanRecord) -> dict[str, Counter[int]]:
    """Map modules to the seconds that each stage spends in them; empty where the units are of a cut before an edit."""
    seconds: dict[str, Counter[int]] = {}
    for unit in () if plan.edited else plan.units:
        nanoseconds = round((unit.forward_s + unit.backward_s) * 1e9)
        for prefix in prefixes(unit.name):
            seconds.setdefault(prefix, Counter())[unit.stage] += nanoseconds
    return seconds


def _is_block(path: str) -> bool:
    return path.rpartition(".")[2].isdecimal()
