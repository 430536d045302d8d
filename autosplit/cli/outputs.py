"""The files that commands write about a plan, and the plan on stdout; their paths are tried before the work."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autosplit.checks import EXPORTS, not_available
from autosplit.cli.common import ANSWER_IS_NO, DONE, AsJson, complete, page_width, plain_warnings, tell, typed
from autosplit.errors import InputError
from autosplit.files import write_text

if TYPE_CHECKING:
    from autosplit.planning.plan.plan import Plan
    from autosplit.planning.timeline import StepTimeline

EXPORT_FORM = "FORM:FILE"


@dataclass(frozen=True)
class OutputOptions:
    """The options that say which files of a plan are written, and how it is printed."""

    save: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the plan to this file.")] = None
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the plan as an HTML page.")] = None
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the step as a trace (JSON) that Perfetto opens.")
    ] = None
    export: Annotated[
        list[str] | None,
        typer.Option(
            "--export",
            metavar=EXPORT_FORM,
            help=f"Write the plan for another tool; FORM is {', '.join(EXPORTS)}. May be given several times.",
            autocompletion=complete(*(f"{form}:" for form in EXPORTS)),
        ),
    ] = None
    as_json: AsJson = False
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print markdown instead of a table.")] = False

    def check(self) -> None:
        """Raise InputError, before the work, for a path that cannot be written and for two forms of one answer."""
        if self.as_json and self.as_markdown:
            raise InputError("--json and --markdown are two forms of one answer; give one of them")
        for option, path in self._files():
            check_path(option, path)

    def _files(self) -> list[tuple[str, Path]]:
        """Return the files that are asked for: the option, and the path."""
        named = {"save": self.save, "html": self.html, "trace": self.trace}
        exports = [(f"export {form}", path) for form, path in map(_export, self.export or ())]
        return [(option, path) for option, path in named.items() if path is not None] + exports

    def answer(self, plan: Plan, measured: StepTimeline | None = None) -> int:
        """Write the files and print the plan, also where one of them cannot be written.

        ``measured``: a recorded step, which they show too. Returns the exit code: 1 when the plan does not fit.
        """
        from autosplit.report.next_steps import COMMAND
        from autosplit.report.sections import render

        command = typed() or COMMAND
        form = "json" if self.as_json else "markdown" if self.as_markdown else "text"
        try:
            with plain_warnings():
                for option, path in self._files():
                    write_file(option, path, _text(plan, option, measured, command))
        finally:
            typer.echo(render(plan, form, width=page_width(), measured=measured, command=command))
        return ANSWER_IS_NO if plan.fits is False else DONE


def _export(text: str) -> tuple[str, Path]:
    form, colon, path = text.partition(":")
    if form not in EXPORTS:
        raise InputError(not_available(f"--export {text!r}: the form {form!r}", form, EXPORTS))
    if not colon or not path:
        raise InputError(f"--export {text!r} names no file; write {EXPORT_FORM}, for example {form}:{form}.txt")
    return form, Path(path)


def _text(plan: Plan, option: str, measured: StepTimeline | None, command: str) -> str:
    if option == "save":
        return plan.to_json() + "\n"
    if option == "html":
        from autosplit.report.page import page

        return page(plan, measured=measured, command=command)
    if option == "trace":
        from autosplit.report.trace_file import trace_text

        return trace_text(plan, measured)
    return plan.export(option.removeprefix("export "))


def check_path(option: str, path: Path) -> None:
    """Raise InputError for the path of an option that cannot be written."""
    if path.is_dir():
        reason = "is a folder; name a file in it"
    elif not path.parent.is_dir():
        reason = f"there is no folder {str(path.parent)!r}; make it first"
    elif not os.access(path if path.exists() else path.parent, os.W_OK):
        reason = "may not be written; choose another"
    else:
        return
    raise InputError(f"--{option} {str(path)!r}: {reason}")


def write_file(option: str, path: Path, text: str) -> None:
    """Write the file of an option and say so; InputError where that fails."""
    try:
        write_text(path, text)
    except OSError as error:
        raise InputError(f"--{option} {str(path)!r}: {error.strerror}") from error
    tell(f"wrote {path}")
