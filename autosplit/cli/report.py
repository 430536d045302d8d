"""``autosplit report MODEL``: plan a model for the devices of this machine, or take a saved plan, and print it."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autosplit.cli import common
from autosplit.cli.inputs import InputOptions, ModelSpec, is_plan_file, wants_labels
from autosplit.cli.outputs import OutputOptions
from autosplit.errors import InputError
from autosplit.progress import phase

if TYPE_CHECKING:
    import torch

    from autosplit.pipelined import PipelinedModule
    from autosplit.planning.plan.plan import Plan
    from autosplit.planning.timeline import StepTimeline

EXAMPLES = """Examples:

\b
  autosplit report nets.py:make --devices 4 --chunks 8 --input "x=float32[8,3,32,32]"
  autosplit report my.gpt:GPT --devices 2 --chunks 4 --input "input_ids=int64[4,128]<50257"
  autosplit report nets.py:make --devices cpu,cpu --chunks 4 --input "0=float32[8,16]" --json
  autosplit report nets.py:make --devices 4 --chunks 8 --save plan.json --memory-limit 70GiB
  autosplit report nets.py:make --devices 4 --chunks 8 --measure --html plan.html
  autosplit report plan.json --html plan.html --export torchtitan:modules.json

Inputs are random: float32[8,3,32,32] is normal, int64[4,128]<50257 lies in 0 to 50256 (without a limit: 0 or 1),
bool[4,128] is either. Without --input the model's own example_input_array or dummy_inputs is used.
A saved plan is shown as it is: no model is made. --measure trains a step of the model here, with its own loss or the
mean of what it returns, and shows times and peaks beside those that were predicted.

Exit codes: 0 done; 1 done, and the plan does not fit; 2 bad usage or input.
"""


ModelOrPlan = Annotated[
    str, typer.Argument(metavar="MODEL", help=f"{common.MODEL_HELP} Or a saved plan, a .json file.")
]
OwnDevices = Annotated[
    str | None, typer.Option(help="A number of devices, or torch devices such as cpu,cuda:0; a MODEL needs them.")
]
OwnChunks = Annotated[int | None, typer.Option(help="Number of microbatches; a MODEL needs it.")]


Measure = Annotated[bool, typer.Option("--measure", help="Run a training step here, and show it beside the plan.")]


@common.command
def report_command(
    context: typer.Context,
    model: ModelOrPlan,
    *,
    devices: OwnDevices = None,
    chunks: OwnChunks = None,
    inputs: InputOptions,
    options: common.PlanOptions,
    outputs: OutputOptions,
    labels: common.Labels = None,
    train: common.Mode = None,
    measure: Measure = False,
) -> int:
    """Plan a model and print its partition: stages, times, memory, boundaries; or print a saved plan."""
    outputs.check()
    measured = None
    if is_plan_file(model):
        _check_alone(context, model)
        plan = _saved(model)
    else:
        spec = inputs.spec(model, labels=wants_labels(labels, options.schedule), train=train)
        if devices is None or chunks is None:
            raise InputError(f"{model} needs --devices and --chunks: devices such as 4 or cpu,cuda:0, and microbatches")
        device_list = common.torch_devices(devices)
        choices = options.choices(common.count_of(device_list), chunks=chunks)
        if measure and options.schedule == "forward":
            raise InputError("--measure runs a training step, and --schedule forward has none; leave one out")
        with common.beside_stdout():
            plan, measured = _plan(spec, measure=measure, devices=device_list, **choices)
    return outputs.answer(plan, measured)


def _check_alone(context: typer.Context, path: str) -> None:
    """Raise InputError where more is said of a saved plan than how to show it."""
    shows = {"model", "debug", *(field.name for field in fields(OutputOptions))}
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if parameter.name not in shows and source is not None and source.name == "COMMANDLINE":
            raise InputError(
                f"report {path} shows a saved plan as it is, without {parameter.opts[0]}; name the model, and the plan "
                f"by --plan {path}"
            )


def _saved(path: str) -> Plan:
    from autosplit.planning.plan.plan import Plan

    plan = Plan.load(path)
    if plan.edited:
        common.tell(
            "warning: the plan was edited; times and memory are those of before: autosplit plan MODEL --plan "
            f"{path} costs it anew"
        )
    return plan


def _plan(
    spec: ModelSpec, *, measure: bool, devices: int | list[str], **choices: Any
) -> tuple[Plan, StepTimeline | None]:
    """Return the plan, and the step that was measured where that was asked for."""
    with phase("importing"):
        from autosplit.cli.models import make_pipe

    pipe, sample = make_pipe(spec, devices=devices, **choices)
    assert pipe.plan is not None, "a sample was given"
    return pipe.plan, _measured_step(pipe, sample) if measure else None


def _measured_step(pipe: PipelinedModule, inputs: Any) -> StepTimeline:
    """Run a pipe's training step on a sample: once to warm up, once for the times, once for the bytes of CPU lanes.

    The loss is the model's own, else the mean of what it returns. Raises InputError where nothing can be trained.
    """
    from autosplit.options import Sample

    sample = Sample.of(inputs)
    loss: dict[str, Any] = {}
    try:
        pipe.train_step(*sample.args, **sample.kwargs)
    except InputError:  # it returns no loss
        loss = {"loss_fn": _mean_of, "loss_reduction": "mean"}
        pipe.train_step(*sample.args, **loss, **sample.kwargs)
    for memory in (False, True):
        pipe.zero_grad(set_to_none=True)
        pipe.profile_step(*sample.args, memory=memory, **loss, **sample.kwargs)
    pipe.zero_grad(set_to_none=True)
    assert pipe.profiled is not None
    return pipe.profiled


def _mean_of(output: Any) -> torch.Tensor:
    """Return the sum of the means of all that depends on parameters."""
    import torch

    from autosplit.trace.inputs.objects import leaves_of

    leaves = [leaf for leaf in leaves_of(output) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    if not leaves:
        raise InputError("--measure runs a training step, and nothing that the model returns depends on its parameters")
    return sum((leaf.mean() for leaf in leaves[1:]), leaves[0].mean())
