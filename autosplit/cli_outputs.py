"""The files that commands write about a plan, and the plan on stdout; their paths are tried before the work."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autosplit.cli_common import ANSWER_IS_NO, DONE, page_width
from autosplit.errors import InputError

if TYPE_CHECKING:
    from autosplit.planning.plan import Plan

Trace = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Write the step as a trace (JSON) that Perfetto opens.")
]
Dot = Annotated[Path | None, typer.Option(metavar="FILE", help="Write stages and boundaries as a graph for dot.")]
Save = Annotated[Path | None, typer.Option(metavar="FILE", help="Write the plan to this file.")]
Html = Annotated[Path | None, typer.Option(metavar="FILE", help="Write the plan as an HTML page.")]

AsMarkdown = Annotated[bool, typer.Option("--markdown", help="Print markdown instead of a table.")]


def check_outputs(**paths: Path | None) -> None:
    """Raise InputError for a path that cannot be written, before the work is done that it is meant for.

    The keywords are the options' names (``save=path``); None is no output. Nothing is made or changed.
    """
    given = {f"--{option.replace('_', '-')}": path for option, path in paths.items() if path is not None}
    for option, path in given.items():
        reason = _why_not(path)
        if reason is not None:
            raise InputError(f"{option} {str(path)!r}: {reason}")
    counts = Counter(path.resolve() for path in given.values())
    same = [option for option, path in given.items() if counts[path.resolve()] > 1]
    if same:
        raise InputError(f"{' and '.join(same)} name the same file {str(given[same[0]])!r}; give each its own")


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


def write_outputs(
    plan: Plan,
    *,
    save: Path | None = None,
    html: Path | None = None,
    trace: Path | None = None,
    dot: Path | None = None,
) -> None:
    """Write the files that were asked for, and name each on stderr; raise InputError where one cannot be written."""
    if save is not None:
        _write("save", save, text=plan.to_json() + "\n")
    if html is not None:
        from autosplit.report.html import page

        _write("html", html, text=page(plan))
    if trace is not None:
        from autosplit.report.trace_file import trace_text

        _write("trace", trace, text=trace_text(plan))
    if dot is not None:
        from autosplit.report.dot import dot_text

        _write("dot", dot, text=dot_text(plan))


def _write(option: str, path: Path, *, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"--{option} {str(path)!r}: {error.strerror}") from error
    typer.echo(f"wrote {path}", err=True)


def print_plan(plan: Plan, *, as_json: bool, as_markdown: bool = False) -> int:
    """Print a plan on stdout and return the exit code: 1 when it does not fit."""
    from autosplit.report.markdown import render_markdown
    from autosplit.report.table import render

    if as_json or as_markdown:
        typer.echo(plan.to_json() if as_json else render_markdown(plan))
    else:
        typer.echo(render(plan, width=page_width()))
    return ANSWER_IS_NO if plan.fits is False else DONE
