"""The one line, ``pipe = autosplit(model, devices=4, chunks=8)``, and the plan for devices that nobody has to have."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn

from autosplit.adapters import check_adapters
from autosplit.checks import (
    BATCH_NORM,
    FEED,
    MACHINE,
    OUTPUTS,
    RESERVE,
    TORCHRUN,
    check_price,
    choose,
    resolve_machine,
)
from autosplit.errors import InputError
from autosplit.options import Options, Sample, resolve_compile, resolve_devices, resolve_lanes, resolve_rng
from autosplit.parallel import Parallel
from autosplit.planning.asked import (
    dealt,
    degrees_of,
    followed,
    generating,
    given_sample,
    in_dtypes,
    of_plan,
    on_machine,
    replicas_asked,
    runnable,
)
from autosplit.planning.explain.explain import answered, assumed
from autosplit.planning.generate import generated
from autosplit.planning.paper import prepare, stand_ins
from autosplit.planning.parallel.search import MeshRequest, plan_mesh
from autosplit.planning.plan.plan import Plan
from autosplit.planning.request import DEFAULT_CHUNKS, chosen
from autosplit.planning.search.make import recosted
from autosplit.runtime.lanes.ambient import without_callers_modes
from autosplit.runtimes import RuntimeName
from autosplit.trace.borrowed.state import attributes, random_state

if TYPE_CHECKING:
    from autosplit.distributed.world import World
    from autosplit.pipelined import PipelinedModule


_DEVICES = 4
_ONE_PROCESS = dict.fromkeys(("weights", "parallelize", "mp_policy", "reduce_dtype", "timeout", "check_inputs"))
_ONE_PROCESS |= {"feed": "all", "outputs": "last", "fsdp_reshard": "never"}
"""The arguments that are for ranks, with their defaults."""
_CHOICES = (
    "chunks",
    "schedule",
    "virtual_stages",
    "recompute",
    "memory_limit",
    "allocator",
    "reserve",
    "optimizer",
    "cut",
    "pinned",
)
"""The arguments that `chosen` takes as they are."""


def autosplit(
    model: nn.Module,
    devices: Any = _DEVICES,
    chunks: int = DEFAULT_CHUNKS,
    *,
    sample: Any = None,
    batch_dims: Any = None,
    schedule: str | Path = "auto",
    virtual_stages: int = 1,
    replicas: Sequence[int] | str | None = None,
    recompute: Any = "auto",
    memory_limit: Any = None,
    reserve: int | float | str | None = RESERVE,
    allocator: str | None = None,
    optimizer: str | int = "adamw",
    precision: str | None = None,
    plan: Plan | str | Path | None = None,
    lanes: str = "auto",
    rng: str = "auto",
    batch_norm: str | None = None,
    compile: bool | str | Mapping[str, Any] = False,
    cut: str = "modules",
    mesh: Any = None,
    parallelize: Any = None,
    fsdp_reshard: str = "never",
    mp_policy: Any = None,
    reduce_dtype: Any = None,
    feed: str = "all",
    outputs: str = "last",
    weights: Any = None,
    timeout: Any = None,
    check_inputs: int | None = None,
) -> PipelinedModule:
    """Split a model over devices and return it as a pipelined ``torch.fx.GraphModule`` with the same state.

    Args:
        model: any module; its code, names and Parameter objects stay as they are.
        devices: a number (CUDA devices where there are any, else CPU lanes), or a list of torch devices, which may
            repeat; unlike ones may change places. "torchrun": this process's, where every one runs this line.
        chunks: how many microbatches to cut a batch into; a smaller batch uses fewer.
        sample: a batch to plan on at once: a tensor, a tuple of positional inputs, a dict of keyword inputs, or a
            `Sample`. None: the pipe plans itself on its first call, on the batch of that call.
        batch_dims: which dimension of each input is the batch: an int, a tuple with an entry per positional input, or a
            dict by name; None in it means no batch dimension. An input that is left out has its batch in its first
            dimension where that has the batch's size: the one named here, or that of the first input.
        schedule: the order of work in `train_step`, and what the plan predicts: "auto" (1f1b or zb_h1), "gpipe",
            "1f1b", "interleaved", "looped_bfs", "zb_h1", "zb_v", "forward" (no backward), or the path of an action
            file: a CSV as `torch.distributed.pipelining` has it, a row per device, with cells such as 0F0.
        virtual_stages: stages per device: 2 or more under interleaved and looped_bfs, 2 under zb_v, else 1; left out,
            what the schedule takes.
        replicas: how many devices each stage has, such as ``[2, 1, 1]``, one stage after the other: they take
            microbatches in turn under 1f1b, and their gradients are summed. Under "torchrun" each is a process. "auto":
            what makes the step shortest. None: one each, or what the ``plan`` has.
        memory_limit: bytes per device that the plan must respect, or text such as "70GiB"; or a list with one for each.
        reserve: what each device keeps free where no limit is given: bytes, text such as "2GiB", or "3%" of the device.
            Plans keep out of it where they can; a peak that reaches into it is borderline.
        allocator: how torch's CUDA allocator is set: "default", "expandable"; None: by PYTORCH_CUDA_ALLOC_CONF.
        optimizer: what keeps state: "adamw", "adam", "momentum", "sgd", "none", "adafactor", "muon", "lion",
            "adamw8bit", "paged_adamw", "paged_adamw8bit", or state bytes per parameter element.
        plan: a `Plan` or the path of a saved one, to be followed instead of planning: its stages, schedule and chunks.
        lanes: "threads": a thread per CPU lane, so that stages run at the same time, forward and backward; "inline":
            the calling thread issues everything; "auto": threads on several CPU lanes, else inline.
        recompute: what a stage does again in its backward so as not to keep it: "never", "always" (all of it),
            "except_last" (as "always", except for the last microbatch of a step), "block" (each of its blocks alone; a
            stage without any is one), or a list with one of these per stage. "auto" is "never", or "block" of a
            model that uses `torch.utils.checkpoint`, and what the memory limit asks for. Gradients are the same bits.
        rng: "plain": random operations draw the plain model's own numbers, bit for bit, and leave torch's generator as
            it does; "counter": each draws from a seed per step, operation and microbatch, the same for every cut;
            "auto": plain on CPU lanes, else counter. What cannot be drawn beforehand is drawn by counter and reported.
        compile: whether `torch.compile` makes the code of the stages, each as one graph: True, one of its modes such as
            "reduce-overhead", or a dict of its arguments (backend, mode, options, dynamic). A stage that it cannot
            follow runs as it is, and the report says why. Numbers are then equal within rounding, not in every bit.
        batch_norm: "micro": a training norm normalises each microbatch by itself, and its running statistics move once
            per step, by all that it saw; "full": it sees the whole batch, as in the plain model, and all that comes
            behind the first one runs once per step, on the last device: exact, at the price of the overlap. None is
            "micro", and the first training call warns of it: outputs, loss and gradients are not the plain model's.
        cut: where the plan's cuts fall: "modules": between modules; inside a repeated block, or between a head and its
            loss, only where the step gets at least 2% shorter or nothing else fits; "operations": anywhere.
        precision: reserved; anything but None is refused.
        mesh: a ``DeviceMesh`` over all processes, as "torchrun" in what is said of it: the ranks along its dimension
            "pp" are one pipeline, of which "dp" has replicas, each called with its own rows. Losses and gradients are
            those of all rows together. Ranks along "tp" share the tensors of a stage.
        parallelize: what replicas share out. None: nothing, each has a copy of the model. "fsdp": parameters,
            gradients and the optimizer's state, by torch's ``fully_shard`` over "dp", or over "dp_replicate" and
            "dp_shard" (HSDP). A function ``(part, mesh) -> part``: it wraps this process's part of the model, a module
            with the model's names, of which repeated blocks then run by their calls (fully_shard, compiling).
        fsdp_reshard: when "fsdp" lets go of parameters that it gathers. "never": at the end of a step. "always": block
            by block, behind its layers in every forward and backward, which also scatters its gradients.
        mp_policy: torch's ``MixedPrecisionPolicy`` for "fsdp": parameters are gathered in its ``param_dtype``, blocks
            cast what they take and give as ``fully_shard`` has it; shards and their gradients stay as the model is.
        reduce_dtype: ``torch.float32``: gradients of bf16 and fp16 parameters are added up in it under "torchrun", over
            microbatches and replicas. None: in the parameter's dtype, or what ``mp_policy`` says.
        feed: which processes are called with the batch under "torchrun": "all": each with the same; "first_last": that
            of the first stage with the inputs, and that of the last with ``target`` and ``loss_fn``.
        outputs: which processes get the output under "torchrun": "last", that of the last stage, others None; or "all".
        weights: where a model on meta, which "torchrun" takes too, gets its values from: a state dict, a safetensors or
            torch file, or the folder of a checkpoint; each process reads its part. None: its modules' own initialisers
            give them, by torch's seed and the names, whatever the cut.
        timeout: seconds, or a ``timedelta``, after which a step hangs under "torchrun" where no process has begun
            anything. None: torch's default for its process groups, 30 minutes on CPUs and 10 on CUDA devices.
        check_inputs: of how many calls of one kind "torchrun" compares the values of one: 1 or True: each, 0 or False:
            none, None: the first three and then every 100th. That the kind is one is compared each time.

    Returns:
        The pipelined module. Calling it gives the model's outputs, transparent to autograd.

    Raises:
        InputError: an argument cannot be used.
        DeviceError: a device cannot be used.
        TraceError: no graph can follow the model.
        InfeasibleError: the memory limit cannot hold.
        PlanError: the plan is of another model.
        ScheduleError: an action file is no legal schedule, or is made for other devices or chunks.
    """
    ways = _named(_ONE_PROCESS, locals())
    choose("precision", precision, (None,))
    pinned = runnable(Plan.load(plan) if isinstance(plan, (str, Path)) else plan)
    world = _world(devices, mesh)
    _check_model(model, world, ways)
    resolved = resolve_devices(devices) if world is None else (world.device,) * world.size
    each, schedule = replicas_asked(replicas, resolved, pinned, virtual_stages, world, ways, schedule, recompute)
    asked = chosen(devices=len(each or resolved), **_named(_CHOICES, locals()))
    options = Options(
        **(asked | {"devices": resolved, "replicas": each, "batch_dims": batch_dims, "processes": world is not None}),
        compile=resolve_compile(compile),
        lanes=resolve_lanes(lanes, resolved) if world is None else "inline",
        hosts=() if world is None else world.hosts,
        rng=resolve_rng(rng, resolved),
        batch_norm=choose("batch_norm", batch_norm, (None, *BATCH_NORM)),
    )
    return _piped(model, options, pinned, sample, world, mesh, ways)


def _named(names: Iterable[str], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return some of a function's arguments, by their names."""
    return {name: values[name] for name in names}


def _world(devices: Any, mesh: Any) -> World | None:
    """Return the processes that torchrun has started, or those of a mesh; None for one process."""
    processes = isinstance(devices, str) and devices == TORCHRUN
    if mesh is None and not processes:
        return None
    if not processes and devices != _DEVICES:
        raise InputError(f"devices={devices!r} and mesh=: a mesh says what the devices are; leave devices out")
    from autosplit.distributed.join import join  # a plan on paper does without the runtime

    return join(mesh)


def _piped(
    model: nn.Module,
    options: Options,
    pinned: Plan | None,
    sample: Any,
    world: World | None,
    mesh: Any,
    ways: dict[str, Any],
) -> PipelinedModule:
    """Return the pipe, or the part of this process; that is planned, so that its parameters are known."""
    if world is None:
        from autosplit.pipelined import PipelinedModule

        pipe = PipelinedModule(model, options, pinned)
    elif sample is None:
        raise InputError("devices='torchrun' needs sample=: a process's parameters must be known before its optimizer")
    else:
        from autosplit.distributed.ranks.parallelize import dtype_of_reductions, parallelizing
        from autosplit.distributed.ranks.pipe import RankPipe

        policy, reshard = ways.pop("mp_policy"), ways.pop("fsdp_reshard")
        dtype = ways["reduce_dtype"] = dtype_of_reductions(ways["reduce_dtype"], policy)
        ways["parallelize"] = parallelizing(ways["parallelize"], mesh, reshard, options.compile, policy, dtype)
        pipe = RankPipe(model, options, pinned, world, **ways)
    if sample is not None:
        pipe.prepare(Sample.of(sample))
    return pipe


def plan(
    model: nn.Module,
    devices: Any = MACHINE,
    chunks: int | str = "auto",
    *,
    sample: Any,
    batch_dims: Any = None,
    loss_fn: Any = None,
    optimizer: str | int = "adamw",
    precision: str | None = None,
    schedule: str | Path = "auto",
    virtual_stages: int = 1,
    replicas: Sequence[int] | str | None = None,
    recompute: Any = "auto",
    memory_limit: Any = None,
    reserve: int | float | str | None = RESERVE,
    allocator: str | None = None,
    cut: str = "modules",
    mesh: Mapping[str, int] | str | None = None,
    zero: int | str = "auto",
    runtime: RuntimeName = "autosplit",
    fsdp_reshard: str = "never",
    mp_policy: Any = None,
    reduce_dtype: Any = None,
    offload: str | Sequence[str] | None = None,
    lora: Any = None,
    base: str | None = None,
    generate: int | None = None,
    find: str = "best",
    plan: Plan | str | Path | None = None,
    processes: bool = False,
    network: str | None = None,
    price: float | str | None = None,
) -> Plan:
    """Plan the training of a model on devices that do not have to be there; nothing is allocated.

    Args:
        model: any module, also one on the meta device; it is left exactly as it was.
        devices: ``"<n>x<name>"`` such as "8xH100-SXM5-80GB" or "2xA100-SXM4-80GB+2xL4-24GB", a machine file, or a list
            of names from `cost_models`; unlike ones of one host may change places.
        chunks: how many microbatches to cut the batch into; "auto": what makes the step shortest and fits.
        sample: a batch of the size of a step: a tensor, a tuple, a dict or a `Sample`, also of meta tensors.
        batch_dims, virtual_stages, optimizer, reserve, allocator, cut: as in `autosplit`.
        loss_fn: ``loss_fn(output)`` or ``loss_fn(output, target)``, counted on the last stage; the target is taken to
            be class indices where these fit, else like the output. None: the first floating output, which is the loss
            of a model that makes one (transformers, given labels), else its mean; a note says so. The command line
            gives models of ``hf:`` labels by itself.
        precision: what the training runs in: "fp32", "amp_bf16", "amp_fp16", "bf16", "bf16_fp32_master" (bf16 weights
            and gradients; fp32 weights count as state of the optimizer), "fp8" (as that, and blocks' products with
            parameters in fp8), or None: as the model is.
        schedule, recompute: as in `autosplit`; "auto" searches.
        replicas: how many devices each stage has, such as ``[2, 1, 1]``: they take microbatches in turn under 1f1b, and
            sum the stage's gradients. "auto": those with which the slowest stage is fastest (PipeDream), where that
            makes the step shorter. None: one each.
        memory_limit: as in `autosplit`; by default what the device has for tensors.
        mesh: how many ranks share the model by data (dp), tensor (tp) and pipeline (pp) parallelism: degrees such as
            ``{"dp": 8, "tp": 2, "pp": 4}``, or "auto": those with the shortest step that fit. "cp" ranks share the
            tokens of each row, and "ep" of those of dp and cp the experts, which autosplit does not run. The sample is
            the global batch; rows, bytes and times of the plan's stages are one rank's. None: a pipeline over all.
        zero: what data-parallel ranks shard of a mesh: 0 nothing, 1 the optimizer's state, 2 gradients too, 3
            parameters too; "auto": what is fastest and fits, of what the runtime has.
        runtime: whose training on a mesh is planned: "autosplit", "megatron" or "torchtitan". They differ in what
            replicas shard, what goes on beside the work, and sequence parallelism: see `autosplit.runtimes`.
        fsdp_reshard: as in `autosplit`, under ``zero=3``. "never": parameters and gradients of a stage are whole for
            a step; "always": those of two of its blocks.
        mp_policy, reduce_dtype: as in `autosplit`, on a mesh of its runtime; a policy in bf16, and under ``zero=3``.
        offload: what lies on the host, on paper alone: "optimizer": Adam's state, which steps there (DeepSpeed's
            CPUAdam); "activations": what repeated blocks save, copied there and back beside their work; or both.
        lora: adapters that are trained in the place of the model, as PEFT's: "r=16,targets=q_proj+v_proj", or
            ``targets=all-linear``; ``alpha=``, ``dropout=`` too. Those there stay.
        base: how the frozen linear weights are kept, but for the head: "nf4" or "int8", as by bitsandbytes.
        generate: how many tokens a model of transformers makes behind the sample's prompts (``plan.generation``).
        find: "best": the best plan for these devices and this batch; or the one for the "smallest" number of these
            devices, for the "largest_batch" (in ``chunks`` microbatches) or "largest_sequence" that surely fits.
        plan: a `Plan` or the path of a saved one, also one that was edited: its cut, schedule and chunks are checked on
            the model and costed for the devices, optimizer and precision that are given, or the plan's own where they
            are left out; nothing is searched.
        processes: plan for one process per device, as ``autosplit(devices="torchrun")`` runs it: each issues its own
            device's kernels, values are sent, messages on their way take memory, and NCCL keeps some of each device.
        network: what each host has to others, such as "400Gbit", shared by its devices; None: the machine's own.
        price: US dollars per device and hour, such as 2.1 or "2.10/h"; None: list prices, where they are known.

    Returns:
        The plan, also where it does not fit: `Plan.verdict` is then "no".

    Raises:
        InputError: an argument cannot be used.
        DeviceError: a device is not known.
        TraceError: no graph can follow the model without values.
        PlanError: the plan is of another model or number of devices, or has a node where it cannot run.
    """
    _check_module(model)
    pinned, usd = followed(plan, find=find, processes=processes), check_price(price)
    devices, precision, processes = of_plan(pinned, devices, precision, processes)
    spec = resolve_machine(devices, network=network)
    schedule, optimizer = generating(generate, schedule, optimizer, mesh or replicas or pinned, find)
    degrees = degrees_of(mesh, zero, runtime, fsdp_reshard, len(spec), schedule=schedule, find=find, pinned=pinned)
    precision, like = in_dtypes(mesh, zero, runtime, fsdp_reshard, reduce_dtype, mp_policy, precision)
    adapters, precision = check_adapters(lora, base, precision, schedule)
    spec = on_machine(spec, precision=precision, offload=offload, degrees=degrees)
    each, schedule = dealt(replicas, spec.devices, schedule=schedule, recompute=recompute, others=locals())
    choices = partial(chosen, precision=precision, offload=offload, **_named(_CHOICES, locals()))
    one = degrees if isinstance(degrees, Parallel) else Parallel(pp=len(each or spec))
    asked = {"replicas": each, "batch_dims": batch_dims, "processes": processes or degrees is not None}
    options = Options(stand_ins(spec), **choices(devices=one.pp), **asked, measure=False, machine=spec)
    with random_state(), attributes(model), torch.inference_mode(False), without_callers_modes():
        if generate is not None:
            return generated(model, given_sample(model, sample), options, adapters, new=generate, chunks=chunks)
        paper = prepare(model, given_sample(model, sample), options, loss_fn=loss_fn, adapters=adapters, context=one.cp)
        meshes = partial(MeshRequest, paper, spec, choices, zero=zero, free_chunks=chunks == "auto")
        request = None if degrees is None else meshes(degrees, runtime=runtime, like=like)
        if pinned is not None:
            best = recosted(paper.recorded, request.options(one) if request else paper.options, pinned)
        else:
            best = plan_mesh(request) if request else answered(paper, free_chunks=chunks == "auto", find=find)
        return assumed(best, paper, price=usd)


def _check_module(model: Any) -> None:
    """Raise InputError for what is no model: no module, or a pipeline."""
    if not isinstance(model, nn.Module):
        raise InputError(f"model is a {type(model).__name__}; give a torch.nn.Module")
    if isinstance(model, fx.GraphModule):
        from autosplit.pipelined import PipelinedModule

        if isinstance(model, PipelinedModule):
            raise InputError("the model is a pipeline already; split pipe.unsplit() instead")


def _check_model(model: Any, world: World | None, ways: Mapping[str, Any]) -> None:
    """Raise InputError for what cannot be split: no module, a pipeline, or one without values in one process."""
    _check_module(model)
    choose("feed", ways["feed"], FEED)
    choose("outputs", ways["outputs"], OUTPUTS)
    if names := [name for name, default in _ONE_PROCESS.items() if world is None and ways[name] != default]:
        raise InputError(f"{names[0]}={ways[names[0]]!r} is for devices='torchrun', with a process per device")
    on_meta = next((n for n, t in (*model.named_parameters(), *model.named_buffers()) if t.is_meta), None)
    if on_meta is not None and world is None:
        raise InputError(
            f"{on_meta} is on the meta device and has no values; build the model on a real device, or call "
            "autosplit.initialise(model)"
        )
    if on_meta is None and world is not None and ways["weights"] is not None:
        raise InputError(
            "weights= is for a model on the meta device; this one has values: load_state_dict gives it others"
        )
