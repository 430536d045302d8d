"""What commands say: the answer on stdout, everything else on stderr, which is best heard but not needed."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any

import typer

from autosplit.errors import InputError


def give(text: str) -> None:
    """Print an answer on stdout; InputError where it takes no more, BrokenPipeError where its reader has left."""
    try:
        typer.echo(text)
    except BrokenPipeError:
        raise
    except OSError as error:
        _to_nowhere(sys.stdout)
        raise InputError(f"the answer could not be written to stdout: {error.strerror}") from error


def tell(text: str) -> None:
    """Say something on stderr; where nobody can hear it, the command goes on all the same."""
    try:
        typer.echo(text, err=True)
    except OSError:
        _to_nowhere(sys.stderr)


def nobody_reads() -> None:
    """Take stdout's reader for gone: Python would complain once more when it flushes at its end."""
    _to_nowhere(sys.stdout)


def answers_a_terminal() -> bool:
    """Tell whether stdout is a terminal; a closed one is none."""
    return sys.stdout is not None and sys.stdout.isatty()


def _to_nowhere(stream: Any) -> None:
    """Let what a stream still holds go where it disturbs nobody."""
    with contextlib.suppress(OSError):  # what stands in for a stream may have no file
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
