"""``autosplit devices``: which devices and machines are known, and where each of their figures comes from."""

from __future__ import annotations

from typing import Annotated

import typer

from autosplit.cli.common import DONE, AsJson, Debug, complete_device, exit_code
from autosplit.cli.streams import give

EXAMPLES = """Examples:

\b
  autosplit devices                                    all that is known
  autosplit devices H100-SXM5-80GB                     every figure, and its source
  autosplit devices 2xA100-SXM4-80GB+2xL4-24GB         a machine, and the links inside it
  autosplit devices T4-16GB --json > mine.json         the start of a device file of your own
  autosplit devices mine.json

Exit codes: 0 done; 2 no such device or machine, or a file that describes none.
"""


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
) -> None:
    """Show the devices and machines that plans can be made for, with the source of every figure."""

    def answer() -> int:
        from autosplit.errors import DeviceError
        from autosplit.report.devices import describe

        try:
            give(describe(name, as_json=as_json))
        except ValueError as error:
            raise DeviceError(str(error)) from error
        return DONE

    raise typer.Exit(exit_code(answer, debug=debug))
