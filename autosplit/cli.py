"""The command line: ``autosplit report``, ``verify``, ``profile``, ``solve``, ``devices`` (or ``python -m autosplit``).

Exit codes: 0 done; 1 done, and the answer is no (does not fit, not equal); 2 bad usage or input. Stdout carries the
result and nothing else; errors, warnings and whatever the model prints go to stderr.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from autosplit import cli_devices, cli_profile, cli_solve
from autosplit.api import autosplit, own_sample
from autosplit.cli_common import (
    ANSWER_IS_NO,
    DONE,
    Debug,
    Inputs,
    InputSpec,
    Seed,
    Target,
    beside_stdout,
    build_sample,
    exit_code,
    load_model,
    no_inputs,
    page_width,
)
from autosplit.errors import InputError
from autosplit.options import OPTIMIZER_COPIES, RECOMPUTE, SCHEDULES
from autosplit.planning.plan import Plan
from autosplit.report import table
from autosplit.verification import verify

EXAMPLES = """Examples:

\b
  autosplit report nets.py:make --devices 4 --chunks 8 --input "x=float32[8,3,32,32]"
  autosplit report my.gpt:GPT --devices 2 --chunks 4 --input "input_ids=int64[4,128]<50257"
  autosplit report nets.py:make --devices cpu,cpu --chunks 4 --input "0=float32[8,16]" --json
  autosplit report nets.py:make --devices 4 --chunks 8 --save plan.json --memory-limit 70GiB

Inputs are random: float32[8,3,32,32] is normal, int64[4,128]<50257 lies in 0 to 50256 (without a limit: 0 or 1),
bool[4,128] is either. Without --input the model's own example_input_array or dummy_inputs is used.

Exit codes: 0 done; 1 done, and the plan does not fit; 2 bad usage or input.
"""

VERIFY_EXAMPLES = """Examples:

\b
  autosplit verify nets.py:make --devices 4 --chunks 8 --input "x=float32[8,3,32,32]"
  autosplit verify my.gpt:GPT --devices cpu,cpu --chunks 4 --input "input_ids=int64[4,128]<50257" --json

Exit codes: 0 equal; 1 not equal; 2 bad usage or input.
"""

app = typer.Typer(
    name="autosplit", add_completion=False, no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False
)


def main() -> None:
    """Run the command line with the arguments of this process."""
    app(prog_name="autosplit")


@app.callback()
def _commands() -> None:
    """Split a PyTorch model into pipeline stages, and say what they will cost."""


app.command(epilog=cli_devices.EXAMPLES)(cli_devices.devices)
app.command("profile", epilog=cli_profile.EXAMPLES)(cli_profile.profile_command)
app.command("solve", epilog=cli_solve.EXAMPLES)(cli_solve.solve_command)

Devices = Annotated[str, typer.Option(help="A number of devices, or torch devices such as cpu,cuda:0.")]
Chunks = Annotated[int, typer.Option(help="Number of microbatches.")]
ScheduleName = Annotated[str, typer.Option(help=f"{', '.join(SCHEDULES)}, or an action file.")]
VirtualStages = Annotated[int, typer.Option(help="Stages per device (default: what the schedule takes).")]
Recompute = Annotated[
    str, typer.Option(help=f"auto, one of {', '.join(RECOMPUTE)}, or one of these per stage, with commas between.")
]
PlanFile = Annotated[Path | None, typer.Option(help="Use this saved plan instead of a new one.")]


@app.command(epilog=EXAMPLES)
def report(
    model: Target,
    devices: Devices,
    chunks: Chunks,
    inputs: Inputs = None,
    schedule: ScheduleName = "auto",
    virtual_stages: VirtualStages = 1,
    recompute: Recompute = "auto",
    optimizer: Annotated[
        str, typer.Option(help=f"{', '.join(OPTIMIZER_COPIES)}, or bytes per parameter element.")
    ] = "adamw",
    memory_limit: Annotated[str | None, typer.Option(help="Bytes per device, such as 70GiB.")] = None,
    train: Annotated[bool | None, typer.Option("--train/--eval", help="Mode of the model (default: as made).")] = None,
    seed: Seed = 0,
    plan: PlanFile = None,
    save: Annotated[Path | None, typer.Option(help="Write the plan to this file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON instead of a table.")] = False,
    debug: Debug = False,
) -> None:
    """Plan a model and print its partition: stages, times, memory, boundaries."""

    def answer() -> int:
        with beside_stdout():
            found = _plan(
                model,
                inputs=[InputSpec.parse(text) for text in inputs or ()],
                seed=seed,
                train=train,
                devices=_devices(devices),
                chunks=chunks,
                schedule=schedule,
                virtual_stages=virtual_stages,
                recompute=_recompute(recompute),
                optimizer=int(optimizer) if optimizer.isdecimal() else optimizer,
                memory_limit=memory_limit,
                plan=plan,
            )
        if save is not None:
            _save(found, path=save)
        typer.echo(found.to_json() if as_json else table.render(found, width=page_width()))
        return ANSWER_IS_NO if found.fits is False else DONE

    raise typer.Exit(exit_code(answer, debug=debug))


@app.command("verify", epilog=VERIFY_EXAMPLES)
def verify_command(
    model: Target,
    devices: Devices,
    chunks: Chunks,
    inputs: Inputs = None,
    schedule: ScheduleName = "auto",
    virtual_stages: VirtualStages = 1,
    recompute: Recompute = "auto",
    seed: Seed = 0,
    plan: PlanFile = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the comparisons as JSON instead of a table.")] = False,
    debug: Debug = False,
) -> None:
    """Compare the pipeline with the plain model: outputs, gradients, buffers, in train and in eval mode."""

    def answer() -> int:
        with beside_stdout():
            torch.manual_seed(seed)
            made = load_model(model)
            sample = build_sample([InputSpec.parse(text) for text in inputs or ()], model=made, seed=seed)
            if sample is None:
                sample = own_sample(made)
            if sample is None:
                raise no_inputs(made)
            pipe = autosplit(
                made,
                _devices(devices),
                chunks,
                sample=sample,
                schedule=schedule,
                virtual_stages=virtual_stages,
                recompute=_recompute(recompute),
                plan=plan,
            )
            found = verify(made, pipe, sample)
        typer.echo(found.to_json() if as_json else str(found))
        return DONE if found else ANSWER_IS_NO

    raise typer.Exit(exit_code(answer, debug=debug))


def _devices(text: str) -> int | list[str]:
    return int(text) if text.strip().isdecimal() else [part.strip() for part in text.split(",")]


def _recompute(text: str) -> str | list[str]:
    parts = [part.strip() for part in text.split(",")]
    return parts if len(parts) > 1 else parts[0]


def _plan(target: str, *, inputs: Sequence[InputSpec], seed: int, train: bool | None, **choices: Any) -> Plan:
    torch.manual_seed(seed)
    model = load_model(target)
    if train is not None:
        model.train(train)
    pipe = autosplit(model, sample=build_sample(inputs, model=model, seed=seed), **choices)
    if pipe.plan is None:
        raise no_inputs(model)
    return pipe.plan


def _save(plan: Plan, *, path: Path) -> None:
    try:
        plan.save(path)
    except OSError as error:
        raise InputError(f"--save {str(path)!r}: {error.strerror}") from error
    typer.echo(f"wrote {path}", err=True)
