"""``autosplit plan --script FILE``: a program that trains by the plan, in one process or under torchrun."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from autosplit.checks import MASTERS
from autosplit.cli.inputs import CONFIG_PREFIX, InputSpec, ModelSpec, TensorForm, nested
from autosplit.errors import InputError
from autosplit.planning.plan.plan import Plan
from autosplit.units import plural
from cost_models.machines import MachineSpec

_OPTIMIZERS = {"adamw": "AdamW", "adam": "Adam", "adafactor": "Adafactor"}
_BITSANDBYTES = {"lion": "Lion", "adamw8bit": "AdamW8bit", "paged_adamw": "PagedAdamW"}
_BITSANDBYTES |= {"paged_adamw8bit": "PagedAdamW8bit"}
_AUTOCASTS = {"amp_bf16": "bfloat16", "amp_fp16": "float16"}
_DTYPES = {"bf16": "bfloat16", "bf16_fp32_master": "bfloat16", "fp32": "float32", "amp_bf16": "float32"}
_DTYPES |= {"amp_fp16": "float32"}

_SCRIPT = '''\
"""Train {model} over {devices} by a saved plan."""

import contextlib
import os
from pathlib import Path

{packages}import torch{imports}

from autosplit import Sample, autosplit
from autosplit.cli.models import {loaders}{masters}

HERE = Path(__file__).resolve().parent
STEPS = 10


def make_batch():
    """Return random values of the planned sizes, the same in every process; your own batches belong here."""
    return Sample({inputs})


{loss}


def main():
    torch.manual_seed({seed})
    model = load_model({target}, kwargs={kwargs}){mode}
    batch = make_batch()
    pipe = autosplit(model, {where}, plan=HERE / {plan!r}, sample=batch{batch_dims})
    parameters = [parameter for parameter in pipe.parameters() if parameter.requires_grad]
    optimizer = {optimizer}parameters, lr=1e-4{momentum})
    for step in range(STEPS):
        optimizer.zero_grad()
        with {autocast}:
            loss = pipe.train_step(*batch.args, **batch.kwargs, loss_fn=loss_fn{reduction})
        optimizer.step()
        if os.environ.get("RANK", "0") == "0":
            print(f"step {{step}}: loss {{loss.item():.6f}}")


if __name__ == "__main__":
    main()

# Run it with
{commands}
'''
_MESH = "\nfrom torch.distributed.device_mesh import init_device_mesh"
_OWN_LOSS = "loss_fn = None  # the model's own loss"
_NAMED_LOSS = "loss_fn = load_loss({name})"
_WITH_TARGET = '''\
named_loss = load_loss({name})


def loss_fn(output):
    """Return the loss for a target of zeros; your own targets belong here, or into train_step(..., target=)."""
    return named_loss(output, torch.zeros_like(output))'''
_MEAN = '''\
def loss_fn(output):
    """Return the mean of the first output, as planned; your own loss belongs here."""
    while not isinstance(output, torch.Tensor):
        output = next(iter(output.values() if isinstance(output, dict) else output))
    return output.mean()'''


def script_text(
    plan: Plan,
    *,
    path: Path,
    plan_path: Path,
    spec: ModelSpec,
    inputs: Sequence[InputSpec],
    loss: tuple[str, Callable[..., Any]] | None,
    machine: MachineSpec,
) -> str:
    """Return the program: its model, inputs and loss are those that were planned, read beside ``path``.

    ``loss`` is the name on the command line and what it names; ``machine`` says which devices share a host.
    """
    dtype = _DTYPES.get(plan.precision or "")
    if plan.offload:
        raise InputError(f"--script trains on the devices, and {' and '.join(plan.offload)} would lie on the host")
    if plan.mesh is not None and plan.mesh.cp * plan.mesh.ep > 1:
        raise InputError(f"--script trains by autosplit, which runs no ranks of cp or ep, and the plan is {plan.mesh}")
    if plan.optimizer == "muon":
        raise InputError("--script writes one optimizer, and Muon steps matrices alone; plan with --optimizer adamw")
    masters, other = plan.precision in MASTERS, _BITSANDBYTES.get(plan.optimizer)
    optimizer = f"bitsandbytes.optim.{other}" if other else f"torch.optim.{_OPTIMIZERS.get(plan.optimizer, 'SGD')}"
    autocast = _AUTOCASTS.get(plan.precision or "")
    kind = '"cuda" if torch.cuda.is_available() else "cpu"'
    return _SCRIPT.format(
        model=plan.fingerprint.model,
        plan=os.path.relpath(plan_path, path.parent),
        devices=plural(plan.parallel.ranks, "device") + ", a process for each," * plan.processes,
        loaders="load_model" if loss is None else "load_loss, load_model",
        imports="" if plan.mesh is None else _MESH,
        where=_where(plan),
        reduction="" if plan.mesh is None or plan.mesh.dp == 1 else ', loss_reduction="mean"',
        inputs=_call([(each.path, _of_replica(each.value, plan)) for each in inputs], dtype=dtype),
        loss=_loss(plan, loss, folder=path.parent),
        seed=spec.seed,
        target=_beside(spec.target, folder=path.parent),
        kwargs=dict(spec.kwargs),
        mode=("" if spec.train is None else f".train({spec.train})") + (f".to(torch.{dtype})" if dtype else ""),
        batch_dims="" if spec.batch_dims is None else f", batch_dims={spec.batch_dims!r}",
        packages="import bitsandbytes\n" if other else "",
        masters="\nfrom autosplit.optimizers import MasterWeights" * masters,
        optimizer=f"MasterWeights({optimizer}, " if masters else f"{optimizer}(",
        momentum=", momentum=0.9" if plan.optimizer == "momentum" else "",
        autocast=f"torch.autocast({kind}, torch.{autocast})" if autocast else "contextlib.nullcontext()",
        commands="\n".join(f"#     {command}" for command in commands(plan, path.name, machine)),
    )


def _where(plan: Plan) -> str:
    """Return the arguments that say where the pipe runs: devices, or the mesh of all ranks."""
    if plan.mesh is None:
        return f"devices={('torchrun' if plan.processes else len(plan.devices))!r}"
    names = tuple(name for name in plan.mesh.order if getattr(plan.mesh, name) > 1) or ("dp",)
    shape = tuple(getattr(plan.mesh, name) for name in names)
    shards = ', parallelize="fsdp"' if plan.mesh.zero == 3 else ""
    shards += ', fsdp_reshard="always"' if plan.mesh.by_units else ""
    kind = '"cuda" if torch.cuda.is_available() else "cpu"'
    return f"mesh=init_device_mesh({kind}, {shape}, mesh_dim_names={names}){shards}"


def _of_replica(value: Any, plan: Plan) -> Any:
    """Return what a replica of a mesh gets of an input: its part of the rows of the batch."""
    rows = sum(plan.microbatch_rows)
    if plan.mesh is None or not isinstance(value, TensorForm) or value.shape[:1] != (rows * plan.mesh.dp,):
        return value
    return replace(value, shape=(rows, *value.shape[1:]))


def commands(plan: Plan, name: str, machine: MachineSpec) -> list[str]:
    """Return what starts the program: on several hosts each runs its line, from the first host on."""
    if not plan.processes and plan.mesh is None:
        return [f"python {name}"]
    left, counts = plan.parallel.ranks, list[int]()
    for count in machine.host_devices:
        counts += [min(count, left)] if left else []
        left -= min(count, left)
    if len(counts) == 1:
        return [f"torchrun --standalone --nproc-per-node {counts[0]} {name}"]
    each = "torchrun --nnodes {nodes} --node-rank {rank} --nproc-per-node {count} --master-addr $MASTER_ADDR {name}"
    ranks: list[int | str] = list(range(len(counts))) if len(set(counts)) > 1 else ["$NODE_RANK"]
    return [
        each.format(nodes=len(counts), rank=rank, count=count, name=name)
        for rank, count in zip(ranks, counts, strict=False)
    ]


def _beside(target: str, *, folder: Path) -> str:
    """Return a MODEL or a loss as code: files lie where they do from the program's folder."""
    prefix = CONFIG_PREFIX if target.startswith(CONFIG_PREFIX) else ""
    source, colon, name = (target.removeprefix(prefix), "", "") if prefix else target.rpartition(":")
    if not prefix and not source.endswith(".py"):
        return repr(target)
    relative = os.path.relpath(source, folder)
    return f"{prefix!r} + str(HERE / {relative!r})" if prefix else f"str(HERE / {relative!r}) + {colon + name!r}"


def _loss(plan: Plan, loss: tuple[str, Callable[..., Any]] | None, *, folder: Path) -> str:
    if loss is None:
        return _MEAN if any(note.startswith("no loss is given") for note in plan.notes) else _OWN_LOSS
    name, function = loss
    parameters = inspect.signature(getattr(function, "forward", function)).parameters.values()
    needed = [p for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return (_NAMED_LOSS if len(needed) < 2 else _WITH_TARGET).format(name=_beside(name, folder=folder))


def _call(values: Sequence[tuple[str, Any]], *, dtype: str | None) -> str:
    """Return the arguments of a call as code, positional ones first; floats are in ``dtype`` where one is named."""
    arguments = {name: _code(value, dtype) for name, value in nested(values).items()}
    positional = [arguments[name] for name in sorted(filter(str.isdecimal, arguments), key=int)]
    return ", ".join([*positional, *(f"{name}={code}" for name, code in arguments.items() if not name.isdecimal())])


def _code(value: Any, dtype: str | None) -> str:
    if isinstance(value, TensorForm):
        if value.dtype.startswith(("float", "bfloat", "complex")):
            name = dtype if dtype is not None and not value.dtype.startswith("complex") else value.dtype
            return f"torch.randn({value.shape}, dtype=torch.{name})"
        return f"torch.randint({value.limit or 2}, {value.shape}).to(torch.{value.dtype})"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {_code(item, dtype)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(_code(item, dtype) for item in value) + "]"
    if isinstance(value, tuple):
        return "(" + "".join(_code(item, dtype) + ", " for item in value) + ")"
    return repr(value)
