"""``autosplit report MODEL``: plan a model for the devices of this machine, or take a saved plan, and print it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from autosplit.choices import RESERVE
from autosplit.cli.common import (
    MODEL_HELP,
    AsJson,
    Batch,
    Cut,
    Debug,
    Inputs,
    Kwargs,
    Labels,
    MemoryLimit,
    Mode,
    Moves,
    Optimizer,
    PlanFile,
    Recompute,
    Reserve,
    ScheduleName,
    Seed,
    Sequence,
    VirtualStages,
    beside_stdout,
    check_choices,
    exit_code,
    importing,
    needed,
    optimizer_of,
    pinned_plan,
    recompute_of,
    torch_devices,
)
from autosplit.cli.inputs import ROWS_PER_DEVICE, ConfigInputs, ModelSpec, is_plan_file, wants_labels
from autosplit.cli.outputs import (
    AsMarkdown,
    Dot,
    Exports,
    Html,
    Outputs,
    Save,
    Trace,
    answered,
    check_form,
)
from autosplit.cli.streams import tell
from autosplit.errors import InputError

if TYPE_CHECKING:
    from autosplit.planning.plan import Plan
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


ModelOrPlan = Annotated[str, typer.Argument(metavar="MODEL", help=f"{MODEL_HELP} Or a saved plan, a .json file.")]
OwnDevices = Annotated[
    str | None, typer.Option(help="A number of devices, or torch devices such as cpu,cuda:0; a MODEL needs them.")
]
OwnChunks = Annotated[int | None, typer.Option(help="Number of microbatches; a MODEL needs it.")]


Measure = Annotated[bool, typer.Option("--measure", help="Run a training step here, and show it beside the plan.")]


def report_command(
    context: typer.Context,
    model: ModelOrPlan,
    devices: OwnDevices = None,
    chunks: OwnChunks = None,
    inputs: Inputs = None,
    kwargs: Kwargs = None,
    batch: Batch = None,
    sequence: Sequence = None,
    labels: Labels = None,
    schedule: ScheduleName = "auto",
    virtual_stages: VirtualStages = 1,
    recompute: Recompute = "auto",
    optimizer: Optimizer = "adamw",
    memory_limit: MemoryLimit = None,
    reserve: Reserve = RESERVE,
    cut: Cut = "modules",
    train: Mode = None,
    seed: Seed = 0,
    measure: Measure = False,
    plan: PlanFile = None,
    move: Moves = None,
    save: Save = None,
    html: Html = None,
    trace: Trace = None,
    dot: Dot = None,
    export: Exports = None,
    as_json: AsJson = False,
    as_markdown: AsMarkdown = False,
    debug: Debug = False,
) -> None:
    """Plan a model and print its partition: stages, times, memory, boundaries; or print a saved plan."""

    def answer() -> int:
        check_form(as_json=as_json, as_markdown=as_markdown)
        outputs = Outputs.of(save=save, html=html, trace=trace, dot=dot, exports=export)
        measured = None
        if is_plan_file(model):
            _check_alone(context, model)
            found = _saved(model)
        else:
            sizes = ConfigInputs(batch, sequence, wants_labels(labels, schedule))
            spec = ModelSpec.parse(model, inputs=inputs, kwargs=kwargs, sizes=sizes, seed=seed, train=train)
            own = torch_devices(devices)
            count = needed("--chunks", chunks, "a number of microbatches")
            order = {"schedule": schedule, "virtual_stages": virtual_stages, "recompute": recompute_of(recompute)}
            room = {"memory_limit": memory_limit, "reserve": reserve, "cut": cut}
            choices = {"chunks": count, "optimizer": optimizer_of(optimizer)} | order | room
            pinned = pinned_plan(plan, move)
            check_choices(own, pinned, choices)
            if measure and schedule == "forward":
                raise InputError("--measure runs a training step, and --schedule forward has none; leave one out")
            with beside_stdout():
                found, measured = _plan(spec, measure=measure, devices=own, plan=pinned, **choices)
        return answered(found, outputs, as_json=as_json, as_markdown=as_markdown, measured=measured)

    raise typer.Exit(exit_code(answer, debug=debug))


def _check_alone(context: typer.Context, path: str) -> None:
    """Raise InputError where more is said of a saved plan than how to show it."""
    shows = ("model", "save", "html", "trace", "dot", "export", "as_json", "as_markdown", "debug")
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if parameter.name not in shows and source is not None and source.name == "COMMANDLINE":
            raise InputError(
                f"report {path} shows a saved plan as it is, without {parameter.opts[0]}; name the model, and the plan "
                f"by --plan {path}"
            )


def _saved(path: str) -> Plan:
    from autosplit.planning.plan import Plan

    found = Plan.load(path)
    if found.edited:
        tell(
            "warning: the plan was edited; times and memory are those of before: autosplit plan MODEL --plan "
            f"{path} costs it anew"
        )
    return found


def _plan(
    spec: ModelSpec, *, measure: bool, devices: int | list[str], **choices: Any
) -> tuple[Plan, StepTimeline | None]:
    """Return the plan, and the step that was measured where that was asked for."""
    with importing():
        from autosplit.api import autosplit
        from autosplit.cli.measure import measured_step
        from autosplit.cli.models import make_model, make_sample, no_inputs

    model = make_model(spec)
    rows = ROWS_PER_DEVICE * (devices if isinstance(devices, int) else len(devices))
    sample = make_sample(spec, model=model, rows=rows)
    pipe = autosplit(model, sample=sample, devices=devices, **choices)
    if pipe.plan is None:
        raise no_inputs(model)
    return pipe.plan, measured_step(pipe, sample) if measure else None
