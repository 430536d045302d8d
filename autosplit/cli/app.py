"""The command line: ``autosplit plan``, ``report``, ``verify``, ``profile``, ... (or ``python -m autosplit``).

Exit codes: 0 done; 1 done, and the answer is no (does not fit, not equal); 2 bad usage or input; 130 interrupted.
Stdout carries the result and nothing else; errors, warnings and whatever the model prints go to stderr.

Modules of commands import torch and the like only when their command runs: help and completion are to be quick.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from autosplit.cli import compare, plan, profile, report, solve
from autosplit.cli.common import (
    ANSWER_IS_NO,
    DONE,
    AsJson,
    PlanOptions,
    Target,
    beside_stdout,
    command,
    complete_device,
    count_of,
    torch_devices,
)
from autosplit.cli.inputs import InputOptions
from autosplit.progress import phase

EXAMPLES = """Examples:

\b
  autosplit plan config.json --devices 8xH100
  autosplit plan nets.py:make --devices 2xL4-24GB --input "x=float32[64,3,224,224]" --html plan.html
  autosplit report nets.py:make --devices 4 --chunks 8 --input "x=float32[8,3,32,32]"
  autosplit devices

Every command has examples of its own: autosplit plan --help. Completion: autosplit --install-completion.

Exit codes: 0 done; 1 done, and the answer is no; 2 bad usage or input; 130 interrupted.
"""
DEVICES_EXAMPLES = """Examples:

\b
  autosplit devices                                    all that is known
  autosplit devices H100-SXM5-80GB                     every figure, and its source
  autosplit devices 2xA100-SXM4-80GB+2xL4-24GB         a machine, and the links inside it
  autosplit devices T4-16GB --json > mine.json         the start of a device file of your own
  autosplit devices mine.json

Exit codes: 0 done; 2 no such device or machine, or a file that describes none.
"""
DIFF_EXAMPLES = """Examples:

\b
  autosplit diff before.json after.json
  autosplit diff before.json after.json --json | jq .moved

Plans are files that --save or plan.save(path) wrote. A module is named once where all of it went the same way.

Exit codes: 0 the plans are equal; 1 they differ; 2 bad usage or input.
"""

VERIFY_EXAMPLES = """Examples:

\b
  autosplit verify nets.py:make --devices 4 --chunks 8 --input "x=float32[8,3,32,32]"
  autosplit verify my.gpt:GPT --devices cpu,cpu --chunks 4 --input "input_ids=int64[4,128]<50257" --json

Exit codes: 0 equal; 1 not equal; 2 bad usage or input.
"""

app = typer.Typer(
    name="autosplit", no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False, epilog=EXAMPLES
)


def main() -> None:
    """Run the command line with the arguments of this process."""
    app(prog_name="autosplit")


@app.callback()
def _commands() -> None:
    """Split a PyTorch model into pipeline stages, and say what they will cost."""


@command
def devices_command(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME]",
            help="A device, a machine such as 8xL4-24GB, or a JSON file.",
            autocompletion=complete_device,
        ),
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Show the devices and machines that plans can be made for, with the source of every figure."""
    from autosplit.cli.device_tables import describe
    from autosplit.errors import DeviceError

    try:
        typer.echo(describe(name, as_json=as_json))
    except ValueError as error:
        raise DeviceError(str(error)) from error
    return DONE


@command
def diff_command(
    before: Annotated[Path, typer.Argument(metavar="A", help="A saved plan.")],
    after: Annotated[Path, typer.Argument(metavar="B", help="Another one.")],
    as_json: AsJson = False,
) -> int:
    """Compare two saved plans: the model, what was chosen, modules that moved, times and memory."""
    with beside_stdout():
        from autosplit.planning.plan.plan import Plan

        diff = Plan.load(before).diff(Plan.load(after))
    typer.echo(json.dumps(asdict(diff)) if as_json else str(diff))
    return ANSWER_IS_NO if diff else DONE


@command
def verify_command(
    model: Target,
    *,
    devices: Annotated[str, typer.Option(help="A number of devices, or torch devices such as cpu,cuda:0.")],
    chunks: Annotated[int, typer.Option(help="Number of microbatches.")],
    inputs: InputOptions,
    options: PlanOptions,
    as_json: AsJson = False,
) -> int:
    """Compare the pipeline with the plain model: outputs, gradients, buffers, in train and in eval mode."""
    spec = inputs.spec(model)
    device_list = torch_devices(devices)
    choices = options.choices(count_of(device_list), chunks=chunks)
    with beside_stdout():
        with phase("importing"):
            from autosplit import verification
            from autosplit.cli.models import make_pipe
        pipe, sample = make_pipe(spec, devices=device_list, **choices)
        result = verification.verify(pipe.unsplit(), pipe, sample)
    typer.echo(result.to_json() if as_json else str(result))
    return DONE if result else ANSWER_IS_NO


app.command("compare", epilog=compare.EXAMPLES)(compare.compare_command)
app.command("devices", epilog=DEVICES_EXAMPLES)(devices_command)
app.command("diff", epilog=DIFF_EXAMPLES)(diff_command)
app.command("plan", epilog=plan.EXAMPLES)(plan.plan_command)
app.command("profile", epilog=profile.EXAMPLES)(profile.profile_command)
app.command("solve", epilog=solve.EXAMPLES)(solve.solve_command)
app.command("report", epilog=report.EXAMPLES)(report.report_command)
app.command("verify", epilog=VERIFY_EXAMPLES)(verify_command)
