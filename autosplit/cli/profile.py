"""``autosplit profile MODEL``: what every module costs; ``autosplit profile --calibrate``: what this machine can do."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autosplit.cli import common
from autosplit.cli.inputs import InputOptions
from autosplit.cli.outputs import check_path
from autosplit.errors import InputError
from autosplit.progress import phase

EXAMPLES = """Examples:

\b
  autosplit profile nets.py:make --input "x=float32[8,3,32,32]"
  autosplit profile my.gpt:GPT --input "input_ids=int64[4,128]<50257" --chunks 4 --depth 3
  autosplit profile my.gpt:GPT --input "input_ids=int64[4,128]<50257" --nodes --top 20
  autosplit profile my.gpt:GPT --input "input_ids=int64[4,128]<50257" --device H100-SXM5-80GB
  autosplit profile nets.py:make --input "x=float32[8,3,32,32]" --json > costs.json
  autosplit profile --calibrate --save here.json
  autosplit profile nets.py:make --input "x=float32[8,3,32,32]" --device here.json

Times are measured on the device where the model is, on random inputs. --device with a name of "autosplit devices", a
device file or a calibration asks a cost model instead: the model may then be on the meta device, and no such device
needs to be there.

Exit codes: 0 done; 2 bad usage or input.
"""


@common.command
def profile_command(
    model: Annotated[str | None, typer.Argument(metavar="MODEL", help=common.MODEL_HELP)] = None,
    *,
    inputs: InputOptions,
    options: common.ProfileOptions,
    train: common.Mode = None,
    depth: Annotated[int | None, typer.Option(min=0, help="Module levels (default: what 40 rows hold).")] = None,
    nodes: Annotated[bool, typer.Option("--nodes", help="One row per operation instead of per module.")] = False,
    top: Annotated[int | None, typer.Option(min=1, help="Only the rows that take the most time.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON instead of a table.")] = False,
    calibration: Annotated[bool, typer.Option("--calibrate", help="Measure what this machine's kernels take.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="With --calibrate: fewer and smaller kernels.")] = False,
    save: Annotated[Path | None, typer.Option(help="With --calibrate: the file to write.")] = None,
) -> int:
    """Say what every module of a model costs: times, FLOPs, and the bytes that training it holds."""
    if calibration:
        if save is not None:
            check_path("save", save)
        from autosplit.cli.calibrate import calibrate_here

        calibrate_here(model, device=options.device, quick=quick, save=save)
        return common.DONE
    if save is not None or quick:
        raise InputError("--save and --quick are for --calibrate; a profile is written by --json > FILE")
    if model is None:
        raise InputError("no MODEL is given; name one, or measure this machine: autosplit profile --calibrate")
    spec = inputs.spec(model, train=train)
    with common.beside_stdout():
        with phase("importing"):
            from autosplit.cli.costs import costs_of
            from autosplit.report.costs import render_costs
        costs = costs_of(spec, options)
    text = render_costs(costs, width=common.page_width(), depth=depth, nodes=nodes, top=top)
    typer.echo(costs.model_dump_json(indent=2) if as_json else text)
    return common.DONE
