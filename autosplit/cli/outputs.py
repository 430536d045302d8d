"""The files that commands write about a plan, and the plan on stdout; their paths are tried before the work."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autosplit.checks import not_available
from autosplit.choices import EXPORTS
from autosplit.cli.common import ANSWER_IS_NO, DONE, complete, page_width, plain_warnings
from autosplit.cli.streams import give, tell
from autosplit.errors import AutosplitError, InputError

if TYPE_CHECKING:
    from autosplit.planning.plan import Plan
    from autosplit.planning.timeline import StepTimeline

EXPORT_FORM = "FORM:FILE"
_EXAMPLES = {"torch-csv": "schedule.csv", "torchtitan": "modules.json", "megatron": "layout.txt"}
_MOST_NAME = 200
"""Characters of a file's name that the file beside it, while it is written, has too."""

Trace = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Write the step as a trace (JSON) that Perfetto opens.")
]
Dot = Annotated[Path | None, typer.Option(metavar="FILE", help="Write stages and boundaries as a graph for dot.")]
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


@dataclass(frozen=True)
class Outputs:
    """The files that were asked for: option, path, and what writes the text of a plan. Made by `Outputs.of`."""

    files: tuple[tuple[str, Path], ...] = ()

    @classmethod
    def of(cls, *, exports: Sequence[str] | None = None, **paths: Path | None) -> Outputs:
        """Return the outputs by their options' names (``save=path``); None is no output. ``exports``: FORM:FILE.

        Raises InputError for a path that cannot be written, before the work is done that it is meant for. Nothing is
        made or changed.
        """
        given = [(option, path) for option, path in paths.items() if path is not None]
        given += [(f"export {form}", path) for form, path in map(_export, exports or ())]
        for option, path in given:
            reason = _why_not(path)
            if reason is not None:
                raise InputError(f"--{option} {str(path)!r}: {reason}")
        counts = Counter(path.resolve() for _, path in given)
        same = [(option, path) for option, path in given if counts[path.resolve()] > 1]
        if same:
            names = " and ".join(dict.fromkeys(f"--{option}" for option, _ in same))
            raise InputError(f"{names} name the same file {str(same[0][1])!r}; give each its own")
        return cls(tuple(given))

    def write(self, plan: Plan, *, measured: StepTimeline | None = None) -> AutosplitError | None:
        """Write the files, and name each on stderr; return the error of the first that could not be made.

        ``measured`` is a recorded step, which the page and the trace show too.
        The others are written all the same: making the plan may have taken minutes.
        """
        refusal = None
        with plain_warnings():
            for option, path in self.files:
                try:
                    write_text(option, path, text=_text(plan, option, measured))
                except AutosplitError as error:
                    refusal = refusal or error
        return refusal


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
        from autosplit.report.html import page

        return page(plan, measured=measured)
    if option == "trace":
        from autosplit.report.trace_file import trace_text

        return trace_text(plan, measured)
    if option == "dot":
        from autosplit.report.dot import dot_text

        return dot_text(plan)
    return plan.export(option.removeprefix("export "))


def check_form(*, as_json: bool, as_markdown: bool) -> None:
    """Raise InputError, before the work, where two forms of the answer are asked for."""
    if as_json and as_markdown:
        raise InputError("--json and --markdown are two forms of one answer; give one of them")


def _why_not(path: Path) -> str | None:
    try:
        if path.is_dir():
            return "is a folder; name a file in it"
        if path.exists():
            return None if os.access(path, os.W_OK) else "this file may not be written; choose another"
        folder = path.parent
        if not folder.exists():
            return f"there is no folder {str(folder)!r}; make it first"
        if not folder.is_dir():
            return f"{str(folder)!r} is no folder"
        return None if os.access(folder, os.W_OK | os.X_OK) else f"the folder {str(folder)!r} may not be written"
    except (OSError, ValueError) as error:
        return getattr(error, "strerror", None) or str(error)


def write_text(option: str, path: Path, *, text: str) -> None:
    """Write a file and name it on stderr; what is interrupted leaves the file as it was. InputError: it cannot be."""
    try:
        _replace(path, text)
    except OSError as error:
        raise InputError(f"--{option} {str(path)!r}: {error.strerror}") from error
    tell(f"wrote {path}")


def _replace(path: Path, text: str) -> None:
    """Write beside a file and then take its place; what is no plain file, or lies in a locked folder, as it is."""
    target = path.resolve()
    plain = not target.exists() or target.is_file()
    if not plain or not os.access(target.parent, os.W_OK | os.X_OK):
        path.write_text(text, encoding="utf-8", newline="")
        return
    beside = target.with_name(f".{target.name[:_MOST_NAME]}.{os.getpid()}")
    try:
        beside.write_text(text, encoding="utf-8", newline="")
        if target.exists():
            shutil.copymode(target, beside)
        beside.replace(target)
    finally:
        beside.unlink(missing_ok=True)


def answered(
    plan: Plan, outputs: Outputs, *, as_json: bool, as_markdown: bool, measured: StepTimeline | None = None
) -> int:
    """Write what was asked for and print the plan; what cannot be written is raised when all else has been."""
    refusal = outputs.write(plan, measured=measured)
    code = print_plan(plan, as_json=as_json, as_markdown=as_markdown, measured=measured)
    if refusal is not None:
        raise refusal
    return code


def print_plan(plan: Plan, *, as_json: bool, as_markdown: bool = False, measured: StepTimeline | None = None) -> int:
    """Print a plan on stdout and return the exit code: 1 when it does not fit."""
    from autosplit.report.json_text import render_json
    from autosplit.report.markdown import render_markdown
    from autosplit.report.table import render

    if as_json or as_markdown:
        give(render_json(plan, measured=measured) if as_json else render_markdown(plan, measured=measured))
    else:
        give(render(plan, width=page_width(), measured=measured))
    return ANSWER_IS_NO if plan.fits is False else DONE
