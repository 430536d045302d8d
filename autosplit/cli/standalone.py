"""``autosplit devices`` and ``autosplit diff A B``: what is known of devices, and what two saved plans differ in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from autosplit.cli.common import ANSWER_IS_NO, DONE, AsJson, Debug, beside_stdout, command, complete_device

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
    debug: Debug = False,
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
    debug: Debug = False,
) -> int:
    """Compare two saved plans: the model, what was chosen, modules that moved, times and memory."""
    with beside_stdout():
        from autosplit.planning.plan.plan import Plan

        found = Plan.load(before).diff(Plan.load(after))
    typer.echo(json.dumps(found.to_dict()) if as_json else str(found))
    return ANSWER_IS_NO if found else DONE
