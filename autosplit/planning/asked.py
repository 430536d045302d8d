"""What `plan` is asked for, checked together: the sample, the room of devices, stages with replicas, degrees."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autosplit.checks import FIND, FSDP_RESHARD, MACHINE, check_replicas, choose
from autosplit.errors import InputError, PlanError
from autosplit.options import Options, Sample
from autosplit.parallel import Parallel, check_mesh, check_zero, named_degrees
from autosplit.planning.plan.plan import Plan
from autosplit.runtimes import RUNTIMES
from autosplit.units import format_bytes
from cost_models.machines import MachineSpec
from cost_models.registry import spread


def given_sample(model: nn.Module, sample: Any) -> Sample:
    """Return the sample that was given; raise InputError for None."""
    if sample is None:
        raise InputError(
            f"no inputs are known for {type(model).__name__}; give sample=, a batch of the size of a step (meta "
            "tensors will do)"
        )
    return Sample.of(sample)


def check_room(options: Options) -> None:
    """Raise InputError where the reserve leaves nothing of a device."""
    for lane in range(len(options.devices)):
        whole, reserve = options.capacity_bytes(lane), options.reserved_bytes(lane)
        if whole is not None and whole <= reserve:
            raise InputError(
                f"reserve={reserve} ({format_bytes(reserve)}) leaves nothing of the "
                f"{format_bytes(whole)} that {options.device_name(lane)} may use; reserve less"
            )


def dealt(
    replicas: Any, devices: Sequence[Any], *, schedule: Any, recompute: Any, others: Mapping[str, Any]
) -> tuple[tuple[int, ...] | None, Any]:
    """Return the replicas of each stage as `Options` have them, and the schedule: 1f1b where they are given.

    ``devices`` are on paper or there; ``others`` are arguments at whose defaults alone replicas are planned.
    Raises InputError for what they do not go with, and where replicas of a stage would be unlike devices.
    """
    each = check_replicas(replicas, devices=len(devices))
    if replicas is None:
        return each, schedule
    defaults = {"mesh": None, "virtual_stages": 1, "find": "best", "plan": None, "processes": False}
    foreign = [f"{name}=" for name, default in defaults.items() if others.get(name, default) != default]
    foreign += [f"schedule={schedule!r}"] if schedule not in ("auto", "1f1b") else []
    if foreign:
        raise InputError(
            f"replicas={replicas!r} and {foreign[0]}: stages with replicas are planned anew, under 1f1b, each "
            "device with one stage; leave one of them out"
        )
    if each is None and not isinstance(recompute, str):
        raise InputError(
            f"recompute={recompute!r} is for a number of stages, which replicas='auto' chooses; give one word"
        )
    names = (device.type if isinstance(device, torch.device) else device.name for device in devices)
    for stage, count in enumerate([len(devices)] if each is None else each):
        if len(kinds := {next(names) for _ in range(count)}) > 1:
            where = f"stage {stage} has" if each else "replicas='auto' would have"
            raise InputError(
                f"replicas={replicas!r}: {where} replicas on {' and '.join(sorted(kinds))}; give alike devices"
            )
    return (each, schedule) if each is None else (each if max(each) > 1 else (), "1f1b")


def replicas_asked(
    replicas: Any,
    devices: Sequence[torch.device],
    plan: Plan | None,
    virtual_stages: int,
    world: Any,
    ways: Mapping[str, Any],
    schedule: Any,
    recompute: Any,
) -> tuple[tuple[int, ...] | None, Any]:
    """Return the replicas of each stage, those of a plan that is followed, and the schedule.

    ``world`` are the processes, None for one. Raises InputError where these devices or processes cannot run them, or
    do not go with the other arguments.
    """
    if world is not None and (asked := replicas or (plan and plan.replicas)):
        check_processes(asked, {**ways, "a mesh of several pipelines": world.pipelines > 1 or None})
    others = {"plan": plan, "virtual_stages": virtual_stages}
    each, schedule = dealt(replicas, devices, others=others, schedule=schedule, recompute=recompute)
    each = each if plan is None else plan.replicas
    check_loss_device(each, devices)
    return each, schedule


def check_processes(replicas: Any, ways: Mapping[str, Any]) -> None:
    """Raise InputError where processes cannot be replicas of a stage; ``ways``: how they work, None where left out."""
    for name in ("a mesh of several pipelines", "parallelize", "feed"):
        if ways[name] not in (None, "all"):
            raise InputError(
                f"{name} and replicas={replicas!r}: processes that are replicas of a stage have the same batch, in one "
                "pipeline; leave one of them out, or have replicas of all stages by a mesh with a dimension dp"
            )


def check_loss_device(replicas: Sequence[int] | None, devices: Sequence[torch.device]) -> None:
    """Raise InputError where replicas of the last stage, which runs the loss, are not on one device."""
    last = devices[-replicas[-1] :] if replicas else devices[:1]
    if len(set(last)) > 1:
        raise InputError(
            f"the last stage has replicas on {' and '.join(map(str, last))}, and one process runs the loss on one "
            "device; give that stage one replica"
        )


def degrees_of(
    mesh: Any, zero: Any, runtime: Any, reshard: Any, devices: int, *, schedule: Any, find: str, pinned: Plan | None
) -> Parallel | str | None:
    """Return the degrees that are asked for, checked with what else is."""
    schedules = RUNTIMES[choose("runtime", runtime, tuple(RUNTIMES))].schedules
    if schedules and schedule not in ("auto", *schedules):
        raise InputError(
            f"schedule={schedule!r} is none of runtime={runtime!r}, which has {', '.join(schedules)}; give one of "
            "these, or runtime='autosplit'"
        )
    asked, degrees = check_zero(zero), check_mesh(mesh, devices=devices)
    parallel = degrees if isinstance(degrees, Parallel) else Parallel()
    stages = {name: replace(parallel, runtime=name).zero_stages for name in RUNTIMES}
    if asked is not None and asked not in stages[runtime]:
        others = " or ".join(f"runtime={name!r}" for name, there in stages.items() if asked in there)
        raise InputError(
            f"zero={zero} is none of runtime={runtime!r} on a mesh of {degrees}, where it has "
            f"{', '.join(map(str, stages[runtime]))}; give one of these, or {others}"
        )
    always = choose("fsdp_reshard", reshard, FSDP_RESHARD) == "always"
    if always and (degrees is None or runtime != "autosplit" or zero not in (3, "auto")):
        raise InputError(
            f"fsdp_reshard='always' is how runtime='autosplit' gathers on a mesh with zero=3, and mesh={mesh!r}, "
            f"runtime={runtime!r}, zero={zero!r}; give these"
        )
    planned = None if pinned is None else pinned.mesh
    if planned is not None and runtime not in ("autosplit", planned.runtime):
        raise InputError(f"runtime={runtime!r} and a plan for {planned.runtime!r}: leave runtime= out, or plan again")
    if degrees is None and planned is None and runtime != "autosplit":
        raise InputError(f"runtime={runtime!r} is for the ranks of a mesh; give mesh= too (a plan has its own)")
    if degrees is None and zero != "auto":
        raise InputError(f"zero={zero!r} is for the ranks of a mesh; give mesh= too")
    if degrees is not None and (find != "best" or pinned is not None):
        raise InputError("mesh= plans the best for all devices; leave find= and plan= out")
    if planned is not None:
        check_mesh(dict(named_degrees(planned)), devices=devices)
        return planned.parallel
    return degrees


def in_dtypes(
    mesh: Any, zero: Any, runtime: Any, reshard: Any, reduce_dtype: torch.dtype | None, policy: Any, precision: Any
) -> tuple[Any, Parallel]:
    """Return the precision, and how ranks of a mesh gather, add up and shard, in degrees of no meaning.

    ``policy`` is torch's ``MixedPrecisionPolicy`` of fp32 parameters, and sets a precision that is left open. Raises
    InputError for what no rank does.
    """
    precision = "bf16" if precision is None and policy is not None else precision
    ours = mesh is not None and runtime == "autosplit"
    if policy is not None and not (ours and zero == 3 and precision == "bf16" and policy.param_dtype is torch.bfloat16):
        raise InputError(
            f"mp_policy= computes in bf16 by runtime='autosplit' on a mesh with zero=3, and mesh={mesh!r}, "
            f"runtime={runtime!r}, zero={zero!r}, precision={precision!r}, param_dtype={policy.param_dtype}; give these"
        )
    if policy is not None and reduce_dtype is not None:
        raise InputError(f"reduce_dtype={reduce_dtype} and mp_policy=, which has one: leave reduce_dtype= out")
    choose("reduce_dtype", reduce_dtype, (None, torch.float32) if ours else (None,))
    wide = torch.float32 in (reduce_dtype, getattr(policy, "reduce_dtype", None))
    return precision, Parallel(by_units=reshard == "always", sum_bytes=4 * wide, shard_bytes=4 * (policy is not None))


def followed(plan: Plan | str | Path | None, *, find: str, processes: bool) -> Plan | None:
    """Return the plan that is followed; nothing is searched then."""
    choose("find", find, FIND)
    choose("processes", processes, (False, True))
    if plan is not None and find != "best":
        raise InputError(f"find={find!r} searches, plan= is followed as it is; give one of them")
    pinned = Plan.load(plan) if isinstance(plan, (str, Path)) else plan
    if processes and pinned is not None and pinned.replicas:
        raise InputError(f"the plan has stages with {list(pinned.replicas)} replicas; leave processes= out")
    return pinned


def runnable(plan: Plan | None) -> Plan | None:
    """Return a plan for a pipe to follow; raises PlanError for what is planned on paper alone."""
    if plan is None:
        return None
    paper = [*(f"{what} on the host" for what in plan.offload)]
    paper += [f"{name}={n}" for name in ("cp", "ep") if plan.mesh is not None and (n := getattr(plan.mesh, name)) > 1]
    if paper:
        raise PlanError(f"the plan has {' and '.join(paper)}, on paper alone: no pipe runs that; plan again without it")
    return plan


def on_machine(machine: MachineSpec, *, precision: Any, offload: Any, degrees: Parallel | str | None) -> MachineSpec:
    """Return the machine of a plan, for a mesh with groups spread over hosts; InputError for what it cannot do."""
    if offload and any(device.name.startswith("cpu") for device in machine.devices):
        raise InputError(f"offload={offload!r} moves to the host what a CPU has there already; leave it out")
    if precision == "fp8" and (lacking := [device.name for device in machine.devices if "fp8" not in device.dtypes]):
        raise InputError(f"precision='fp8': {lacking[0]} has no such arithmetic; give precision='bf16_fp32_master'")
    if precision == "fp8" and degrees is None:
        raise InputError("precision='fp8' is planned for the ranks of a mesh; give one, such as mesh={'dp': 1}")
    return machine if degrees is None else spread(machine)


def of_plan(pinned: Plan | None, devices: Any, precision: str | None, processes: bool) -> tuple[Any, str | None, bool]:
    """Return devices, precision and processes; those that are not given are the plan's."""
    if pinned is None:
        return devices, precision, processes
    devices = (pinned.machine if devices == MACHINE else None) or devices
    return devices, pinned.precision if precision is None else precision, processes or pinned.processes


def generating(generate: Any, schedule: Any, optimizer: Any, others: Any, find: str) -> tuple[Any, Any]:
    """Return the schedule and the optimizer: where text is generated, forwards alone, and none.

    Raises InputError for no number of tokens, and for what is not planned with it: ``others`` of a pipeline's.
    """
    if generate is None:
        return schedule, optimizer
    if isinstance(generate, bool) or not isinstance(generate, int) or generate < 1:
        raise InputError(f"generate={generate!r}: give the number of new tokens of each row, at least 1")
    if others or find != "best" or schedule not in ("auto", "forward"):
        raise InputError(
            f"generate={generate} plans one pipeline of forwards; leave mesh=, replicas=, plan=, find=, schedule= out"
        )
    return "forward", "none"
