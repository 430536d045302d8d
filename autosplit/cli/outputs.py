"""The files that commands write about a plan, and the plan on stdout; their paths are tried before the work."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autosplit.checks import EXPORTS, not_available
from autosplit.cli.common import ANSWER_IS_NO, DONE, complete, page_width, plain_warnings, tell
from autosplit.errors import InputError
from autosplit.files import write_text

if TYPE_CHECKING:
    from autosplit.planning.plan.plan import Plan
    from autosplit.planning.timeline import StepTimeline

EXPORT_FORM = "FORM:FILE"
_EXAMPLES = {"torch-csv": "schedule.csv", "torchtitan": "modules.json", "megatron": "layout.txt"}

Trace = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Write the step as a trace (JSON) that Perfetto opens.")
]
Save = Annotated[Path | None, typer.Option(metavar="FILE", help="Write the plan to this file.")]
Html = Annotated[Path | None, typer.Option(metavar="FILE", help="Write the plan as an HTML page.")]
Exports = Annotated[
    list[str] | None,
    typer.Option(
        "--export",
        metavar=EXPORT_FORM,
        help=f"Write the plan for another tool; FORM is {', '.join(EXPORTS)}. May be given several times.",
        autocompletion=complete(*(f"{form}:" for form in EXPORTS)),
    ),
]

AsMarkdown = Annotated[bool, typer.Option("--markdown", help="Print markdown instead of a table.")]


Outputs = list[tuple[str, Path]]
"""The files that were asked for: the option, and the path."""


def outputs_of(*, exports: Sequence[str] | None = None, **paths: Path | None) -> Outputs:
    """Return the outputs by their options' names (``save=path``); None is no output. ``exports``: FORM:FILE.

    Raises InputError for a path that cannot be written, before the work is done that it is meant for.
    """
    outputs = [(option, path) for option, path in paths.items() if path is not None]
    outputs += [(f"export {form}", path) for form, path in map(_export, exports or ())]
    for option, path in outputs:
        reason = _why_not(path)
        if reason is not None:
            raise InputError(f"--{option} {str(path)!r}: {reason}")
    return outputs


def _export(text: str) -> tuple[str, Path]:
    form, colon, path = text.partition(":")
    if form not in EXPORTS:
        raise InputError(not_available(f"--export {text!r}: the form {form!r}", form, EXPORTS))
    if not colon or not path:
        raise InputError(f"--export {text!r} names no file; write {EXPORT_FORM}, for example {form}:{_EXAMPLES[form]}")
    return form, Path(path)


def _text(plan: Plan, option: str, measured: StepTimeline | None) -> str:
    if option == "save":
        return plan.to_json() + "\n"
    if option == "html":
        from autosplit.report.page import page

        return page(plan, measured=measured)
    if option == "trace":
        from autosplit.report.trace_file import trace_text

        return trace_text(plan, measured)
    return plan.export(option.removeprefix("export "))


def form_of(*, as_json: bool, as_markdown: bool) -> str:
    """Return the form of the answer; InputError, before the work, where two are asked for."""
    if as_json and as_markdown:
        raise InputError("--json and --markdown are two forms of one answer; give one of them")
    return "json" if as_json else "markdown" if as_markdown else "text"


def _why_not(path: Path) -> str | None:
    if path.is_dir():
        return "is a folder; name a file in it"
    if not path.parent.is_dir():
        return f"there is no folder {str(path.parent)!r}; make it first"
    return None if os.access(path if path.exists() else path.parent, os.W_OK) else "may not be written; choose another"


def _write(option: str, path: Path, text: str) -> None:
    try:
        write_text(path, text)
    except OSError as error:
        raise InputError(f"--{option} {str(path)!r}: {error.strerror}") from error
    tell(f"wrote {path}")


def answered(plan: Plan, outputs: Outputs, *, form: str, measured: StepTimeline | None = None) -> int:
    """Write the files that were asked for and print the plan, also where one of them cannot be written.

    ``measured`` is a recorded step, which all of them show too. Returns the exit code: 1 when the plan does not fit.
    """
    from autosplit.report.sections import render

    try:
        with plain_warnings():
            for option, path in outputs:
                _write(option, path, _text(plan, option, measured))
    finally:
        typer.echo(render(plan, form, width=page_width(), measured=measured))
    return ANSWER_IS_NO if plan.fits is False else DONE
