"""``autosplit plan MODEL``: plan the training of a model on devices that do not have to be there."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autosplit.adapters import BASES, check_adapters
from autosplit.checks import MACHINE, OFFLOAD, check_price, check_replicas, resolve_machine
from autosplit.cli import common
from autosplit.cli.inputs import ROWS_PER_DEVICE, InputOptions, InputSpec, ModelSpec, wants_labels
from autosplit.cli.outputs import OutputOptions, check_path, write_file
from autosplit.errors import InputError, TraceError
from autosplit.parallel import Parallel, check_mesh
from autosplit.progress import phase

if TYPE_CHECKING:
    from torch import nn

    from autosplit.planning.plan.plan import Plan
    from cost_models import MachineSpec

EXAMPLES = """Examples:

\b
  autosplit plan my.gpt:GPT --input "input_ids=int64[256,1024]<50257"
  autosplit plan my.gpt:GPT --devices 4xL4-24GB --precision amp_bf16 --input "input_ids=int64[64,1024]<50257"
  autosplit plan nets.py:make --devices 2xA100-SXM4-80GB+2xL4-24GB --input "x=float32[64,3,224,224]" --html plan.html
  autosplit plan nets.py:make --devices 2x8xH100-SXM5-80GB --chunks 64 --schedule 1f1b --recompute block \\
                              --optimizer 12 --reserve 2GiB --input "x=float32[512,3,224,224]" --save plan.json
  autosplit plan my.gpt:GPT --devices H100-SXM5-80GB --smallest --input "input_ids=int64[256,1024]<50257"
  autosplit plan my.gpt:GPT --schedule 1f1b --export torch-csv:schedule.csv --export torchtitan:modules.json \\
                            --input "input_ids=int64[256,1024]<50257"
  autosplit plan my.gpt:GPT --devices 2x8xH100-SXM5-80GB --processes --script train.py \\
                            --input "input_ids=int64[64,1024]<50257"
  autosplit plan my.gpt:GPT --devices 64xH100-SXM5-80GB --mesh auto --precision bf16_fp32_master \\
                            --input "input_ids=int64[1024,2048]<50257"
  autosplit plan my.gpt:GPT --devices 8x8xH100-SXM5-80GB --mesh dp=8,tp=2,pp=4 --runtime megatron \\
                            --input "input_ids=int64[1024,2048]<50257"
  autosplit plan config.json --devices 1xL4 --lora r=16,targets=all-linear --base nf4
  autosplit plan hf:config.json --devices 2xL40S --generate 512 --batch 32 --sequence 4096
  autosplit plan my.gpt:GPT --chunks 16 --largest-batch --input "input_ids=int64[16,1024]<50257" --markdown
  autosplit plan nets.py:Detector --input "batch.x=float32[64,3,32,32]" --input "pair[0]=bool[64]" --input "act='relu'"

Nothing is allocated: the model is made on the meta device and the inputs have no values, only where the forward
decides something by values are both made. The inputs have the batch of a step. Devices are those of "autosplit
devices", a machine file, or a list of names or device files with commas between, in pipeline order.

Exit codes: 0 done; 1 done, and the plan does not fit; 2 bad usage or input.
"""
_SMALL_BYTES = 4 * 2**30
"""A model of at most so many bytes is made with values where it cannot be planned without."""

_MIXED = "bf16_fp32_master"
"""What the training of a config's model is planned in where nothing is said."""

PaperDevices = Annotated[
    str,
    typer.Option(
        help="A machine such as 8xH100-SXM5-80GB, a machine file, or names with commas between.",
        autocompletion=common.complete_device,
    ),
]
Smallest = Annotated[bool, typer.Option("--smallest", help="Find the fewest devices of this kind that hold it.")]
LargestBatch = Annotated[bool, typer.Option("--largest-batch", help="Find the largest batch that fits.")]
LargestSequence = Annotated[bool, typer.Option("--largest-sequence", help="Find the longest rows that fit.")]
LargestModel = Annotated[bool, typer.Option("--largest-model", help="Find the most layers of a config that fit.")]
PricePerHour = Annotated[
    str | None,
    typer.Option("--price", metavar="USD/h", help="Per device and hour, such as 2.10/h (default: list prices)."),
]
Loss = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="file.py:function or package.module:function of the output, or it and a target."),
]
Processes = Annotated[
    bool, typer.Option("--processes", help="Plan for one process per device, as torchrun starts them.")
]
Script = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Write a program that trains by the plan (in --save, or beside FILE)."),
]
Mesh = Annotated[
    str | None,
    typer.Option(
        metavar="auto|DEGREES", help="Degrees such as dp=8,tp=2,pp=4 (cp, ep too), or auto; the inputs are all rows."
    ),
]
Zero = Annotated[str, typer.Option(help="What replicas of a mesh shard: 0, 1, 2, 3, or auto.")]
Replicas = Annotated[
    str | None, typer.Option(metavar="auto|LIST", help="Devices of each stage, such as 2,1,1, or auto.")
]
PlanRuntime = Annotated[
    str, typer.Option("--runtime", help="Whose training on a mesh is planned: autosplit, megatron or torchtitan.")
]
FsdpReshard = Annotated[str, typer.Option(help="Of gathered parameters under ZeRO-3: never or always let go of.")]
Offload = Annotated[
    str | None,
    typer.Option(metavar="WHAT", help=f"What lies on the host, on paper: {', '.join(OFFLOAD)}, or both by a comma."),
]
LoraText = Annotated[
    str | None,
    typer.Option("--lora", metavar="TEXT", help="Train adapters alone: r=16,targets=q_proj+v_proj, or all-linear."),
]
Base = Annotated[
    str | None,
    typer.Option(
        help=f"How the frozen linear weights are kept: {', '.join(BASES)}.", autocompletion=common.complete(*BASES)
    ),
]
Network = Annotated[
    str | None, typer.Option(metavar="SPEED", help="Of each host to others: 100Gbit, 8x400Gbit or 12.5GB/s.")
]
Generate = Annotated[
    int | None,
    typer.Option(metavar="TOKENS", help="Plan to make so many tokens behind each prompt; nothing is trained."),
]
PlanChunks = Annotated[str, typer.Option(help="Number of microbatches, or auto.")]


@common.command
def plan_command(
    model: common.Target,
    *,
    devices: PaperDevices = MACHINE,
    chunks: PlanChunks = "auto",
    inputs: InputOptions,
    options: common.PlanOptions,
    outputs: OutputOptions,
    labels: common.Labels = None,
    loss: Loss = None,
    precision: common.Precision = None,
    smallest: Smallest = False,
    largest_batch: LargestBatch = False,
    largest_sequence: LargestSequence = False,
    largest_model: LargestModel = False,
    price: PricePerHour = None,
    train: common.Mode = None,
    processes: Processes = False,
    mesh: Mesh = None,
    zero: Zero = "auto",
    replicas: Replicas = None,
    runtime: PlanRuntime = "autosplit",
    fsdp_reshard: FsdpReshard = "never",
    offload: Offload = None,
    lora: LoraText = None,
    base: Base = None,
    network: Network = None,
    generate: Generate = None,
    script: Script = None,
) -> int:
    """Plan the training of a model on devices that do not have to be there: will it fit, how fast, and what else."""
    outputs.check()
    if generate is not None:
        options, train = _forwards(options), train or False
    wanted = False if loss is not None else wants_labels(labels, options.schedule)
    spec = inputs.spec(model, labels=wanted, train=train)
    frozen = (lora, base) != (None, None)
    pinned = options.pinned
    precision = precision or (None if pinned else default_precision(spec, schedule=options.schedule, frozen=frozen))
    asked = {"smallest": smallest, "largest_batch": largest_batch, "largest_sequence": largest_sequence}
    asked |= {"largest_model": largest_model}
    find = _find([name for name, given in asked.items() if given], pinned=pinned)
    if script is not None:
        _check_script(mesh=mesh, replicas=replicas, runtime=runtime, frozen=frozen, spec=spec)
        kept = precision or (None if pinned is None else pinned.precision)
        outputs = _with_plan(outputs, script=script, spec=spec, schedule=options.schedule, find=find, precision=kept)
    machine = resolve_machine(_devices(devices, pinned), network=network)
    stages, each = _stages(machine, mesh=mesh, replicas=replicas)
    choices = options.choices(stages, chunks=common.number_or_word(chunks), precision=precision, offload=offload)
    choices |= {"mesh": mesh, "zero": common.number_or_word(zero), "replicas": each, "runtime": runtime}
    check_adapters(lora, base, precision, options.schedule)
    choices |= {"fsdp_reshard": fsdp_reshard, "price": check_price(price), "lora": lora, "base": base}
    choices |= {"machine": machine, "loss": loss, "processes": processes, "generate": generate}
    with common.beside_stdout():
        largest = find == "largest_model"
        planned, specs = _largest_model(spec, choices) if largest else _planned(spec, find=find, **choices)
        if script is not None:
            there = _there(machine, planned, mesh=mesh is not None, smallest=smallest)
            _write_script(script, planned, outputs=outputs, spec=spec, inputs=specs, loss=loss, machine=there)
    return outputs.answer(planned)


def _stages(machine: MachineSpec, *, mesh: str | None, replicas: str | None) -> tuple[int, Any]:
    """Return how many places a pipeline has for stages, and the replicas of each as `plan` takes them."""
    degrees = check_mesh(mesh, devices=len(machine))
    each = replicas if replicas in (None, "auto") else [common.number_or_word(word) for word in common.words(replicas)]
    if isinstance(degrees, Parallel):
        return degrees.pp, each
    return len(check_replicas(each, devices=len(machine)) or machine), each


def _there(machine: MachineSpec, plan: Plan, *, mesh: bool, smallest: bool) -> MachineSpec:
    """Return the machine that a plan is for: the fewest devices that were found, or those that were given."""
    from cost_models.registry import spread

    return resolve_machine(plan.machine) if smallest else spread(machine) if mesh else machine


def _largest_model(spec: ModelSpec, choices: dict[str, Any]) -> tuple[Plan, Sequence[InputSpec]]:
    from autosplit.cli.family import largest_model

    return largest_model(spec, lambda each: _planned(each, **choices)[0]), ()


def default_precision(spec: ModelSpec, *, schedule: str, frozen: bool = False) -> str | None:
    """Return the precision in which a config's model is trained where nothing is said, and say so; else None."""
    if not spec.is_config or schedule == "forward":
        return None
    precision, means = ("bf16", "the frozen base") if frozen else (_MIXED, "bf16 with fp32 copies of the weights")
    common.tell(f"precision: {precision}, {means} (--precision chooses another)")
    return precision


def _check_script(*, mesh: str | None, replicas: str | None, runtime: str, frozen: bool, spec: ModelSpec) -> None:
    """Raise InputError for what no program is written for."""
    if frozen:
        raise InputError("--script adds no adapters; plan without --script, and add them by peft before autosplit()")
    if replicas is not None:
        raise InputError("--script writes no stages with replicas; leave --replicas or --script out")
    if mesh is not None and runtime != "autosplit":
        raise InputError(f"--script trains by autosplit, and --runtime plans {runtime}; use --export for that")
    if mesh is not None and spec.batch_dims is not None:
        raise InputError("--script cuts a mesh's batch along the first dimension; leave --batch-dims or --mesh out")


def _forwards(options: common.PlanOptions) -> common.PlanOptions:
    return replace(options, schedule="forward") if options.schedule == "auto" else options


def _with_plan(
    outputs: OutputOptions, *, script: Path, spec: ModelSpec, schedule: str, find: str, precision: str | None
) -> OutputOptions:
    """Return the outputs with the file of the plan that a program reads; InputError where none can be written."""
    check_path("script", script)
    if precision == "fp8":
        raise InputError(
            "--script writes no training in fp8, for which torch has no modules; write one with --precision bf16, "
            "convert its model by torchao.float8.convert_to_float8_training, or leave --script out"
        )
    if not spec.inputs and not spec.is_config:
        raise InputError("--script writes the inputs that --input gives, and none is given; give one for each input")
    if schedule == "forward":
        raise InputError("--script writes a training, and schedule forward has none; leave one of them out")
    if find.startswith("largest_"):
        what = find.partition("_")[2]
        raise InputError(f"--script trains on the inputs that are given; plan the largest {what} first, then give it")
    named = replace(outputs, save=outputs.save or script.with_suffix(".json"))
    named.check()
    return named


def _write_script(
    script: Path,
    plan: Plan,
    *,
    outputs: OutputOptions,
    spec: ModelSpec,
    inputs: Sequence[InputSpec],
    loss: str | None,
    machine: MachineSpec,
) -> None:
    from autosplit.cli.models import load_loss
    from autosplit.cli.script import script_text

    assert outputs.save is not None
    named = None if loss is None else (loss, load_loss(loss))
    text = script_text(plan, path=script, plan_path=outputs.save, spec=spec, inputs=inputs, loss=named, machine=machine)
    write_file("script", script, text)


def _devices(text: str, pinned: Plan | None) -> str | list[str]:
    """Return the machine that is named; the default gives way to that of a plan."""
    if pinned is not None and pinned.machine is not None and text == MACHINE:
        return pinned.machine
    parts = common.words(text)
    return parts if len(parts) > 1 else parts[0]


def _find(asked: Sequence[str], *, pinned: Plan | None) -> str:
    options = [f"--{name.replace('_', '-')}" for name in asked]
    if len(options) > 1:
        raise InputError(f"{options[0]} and {options[1]} are two questions; ask one of them")
    if pinned is not None and options:
        raise InputError(f"{options[0]} searches, --plan is followed as it is; give one of them")
    return asked[0] if asked else "best"


def _planned(
    spec: ModelSpec, *, machine: MachineSpec, loss: str | None, **choices: Any
) -> tuple[Plan, Sequence[InputSpec]]:
    """Return the plan of a model on meta, and its inputs; a model that cannot be recorded there gets real values."""
    with phase("importing"):
        from autosplit.cli.models import load_loss, make_model

    choices["loss_fn"] = None if loss is None else load_loss(loss)
    model = make_model(spec, blank=True)
    try:
        return _plan_of(model, spec, machine=machine, **choices)
    except TraceError:
        sizes = [parameter.numel() * parameter.element_size() for parameter in model.parameters() if parameter.is_meta]
        if not 0 < sum(sizes) <= _SMALL_BYTES:
            raise
    return _plan_of(make_model(spec), spec, machine=machine, again=True, **choices)


def _plan_of(
    model: nn.Module, spec: ModelSpec, *, machine: MachineSpec, again: bool = False, **choices: Any
) -> tuple[Plan, Sequence[InputSpec]]:
    from autosplit.api import plan
    from autosplit.cli.models import input_specs, make_sample

    rows = ROWS_PER_DEVICE * len(machine)
    inputs = input_specs(spec, model=model, rows=rows, say=not again)
    if choices["generate"] and spec.is_config:  # as generate() of transformers reads a prompt
        inputs = tuple(each for each in inputs if each.path != "decoder_input_ids" or each in spec.inputs)
        if "logits_to_keep" in inspect.signature(model.forward).parameters:
            inputs = (*inputs, InputSpec("logits_to_keep", 1))
    sample = make_sample(replace(spec, inputs=inputs), model=model, rows=rows)
    return plan(model, sample=sample, batch_dims=spec.batch_dims, devices=machine, **choices), inputs
