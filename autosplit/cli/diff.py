"""``autosplit diff A B``: what two saved plans differ in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from autosplit.cli.common import ANSWER_IS_NO, DONE, AsJson, Debug, beside_stdout, exit_code
from autosplit.cli.streams import give

EXAMPLES = """Examples:

\b
  autosplit diff before.json after.json
  autosplit diff before.json after.json --json | jq .moved

Plans are files that --save or plan.save(path) wrote. A module is named once where all of it went the same way.

Exit codes: 0 the plans are equal; 1 they differ; 2 bad usage or input.
"""


def diff_command(
    before: Annotated[Path, typer.Argument(metavar="A", help="A saved plan.")],
    after: Annotated[Path, typer.Argument(metavar="B", help="Another one.")],
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Compare two saved plans: the model, what was chosen, modules that moved, times and memory."""

    def answer() -> int:
        with beside_stdout():
            from autosplit.planning.plan import Plan

            found = Plan.load(before).diff(Plan.load(after))
        give(json.dumps(found.to_dict()) if as_json else str(found))
        return ANSWER_IS_NO if found else DONE

    raise typer.Exit(exit_code(answer, debug=debug))
