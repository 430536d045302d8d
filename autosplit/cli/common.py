"""What the commands share: options, a clean stdout, errors as one line, and exit codes. Nothing here imports torch.

0: done; 1: done, and the answer is no (does not fit, not equal); 2: bad usage or input; 130: interrupted.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import re
import shlex
import shutil
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autosplit.checks import ALLOCATORS, CUT, OPTIMIZERS, PRECISIONS, RECOMPUTE, RESERVE, SCHEDULES
from autosplit.cli.inputs import MODEL_FORM
from autosplit.errors import AutosplitError, InfeasibleError, InputError
from autosplit.progress import lines

if TYPE_CHECKING:
    from autosplit.planning.plan.plan import Plan

DONE, ANSWER_IS_NO, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130
MODEL_HELP = f"{MODEL_FORM}: a callable that makes the model, an nn.Module, or a transformers config."

CPU_LANE = "cpu-lane"
"""The device file of one thread of this machine's CPU."""


@dataclass(frozen=True)
class ProfileOptions:
    """The options that say what is profiled, and how."""

    rows: Annotated[int | None, typer.Option(min=1, help="Batch rows of a microbatch (default: the input's).")] = None
    chunks: Annotated[int, typer.Option(min=1, help="Number of microbatches.")] = 1
    device: Annotated[
        str | None, typer.Option(help="cpu or cuda:0 to measure there; a known device or a file to ask a cost model.")
    ] = None
    measure: Annotated[
        bool | None, typer.Option("--measure/--no-measure", help="Measure times, or ask a cost model.")
    ] = None


def complete(*valid: str) -> Callable[[str], list[str]]:
    """Return what a shell asks for the values of an option that begin with what was typed."""

    def names(incomplete: str) -> list[str]:
        return [name for name in valid if name.startswith(incomplete)]

    return names


def complete_device(incomplete: str) -> list[str]:
    """Return the devices and machines that begin with what was typed, also behind a number of them."""
    import cost_models

    count, times, name = incomplete.rpartition("x")
    known = [*cost_models.names(), *cost_models.machine_names()]
    lead = f"{count}{times}" if count.isdecimal() else ""
    return [f"{lead}{each}" for each in known if each.startswith(name if lead else incomplete)]


Target = Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP)]
Labels = Annotated[
    bool | None,
    typer.Option("--labels/--no-labels", help="Labels for a config's model, to make its loss (default: if it can)."),
]
Precision = Annotated[
    str | None,
    typer.Option(help=f"{', '.join(PRECISIONS)} (default: as the model is).", autocompletion=complete(*PRECISIONS)),
]
Mode = Annotated[bool | None, typer.Option("--train/--eval", help="Mode of the model (default: as made).")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


@dataclass(frozen=True)
class PlanOptions:
    """The options that say what is chosen of a plan."""

    schedule: Annotated[
        str, typer.Option(help=f"{', '.join(SCHEDULES)}, or an action file.", autocompletion=complete(*SCHEDULES))
    ] = "auto"
    virtual_stages: Annotated[int, typer.Option(help="Stages per device (default: what the schedule takes).")] = 1
    recompute: Annotated[
        str,
        typer.Option(
            help=f"auto, one of {', '.join(RECOMPUTE)}, or one of these per stage, with commas between.",
            autocompletion=complete("auto", *RECOMPUTE),
        ),
    ] = "auto"
    optimizer: Annotated[
        str,
        typer.Option(
            help=f"{', '.join(OPTIMIZERS)}, or bytes per parameter element.",
            autocompletion=complete(*OPTIMIZERS),
        ),
    ] = "adamw"
    memory_limit: Annotated[
        str | None, typer.Option(metavar="BYTES", help="What a device may use (70GiB), or each (24GiB,12GiB).")
    ] = None
    reserve: Annotated[
        str, typer.Option(metavar="BYTES", help="What to leave free on a device, such as 2GiB or 3%.")
    ] = RESERVE
    allocator: Annotated[
        str | None,
        typer.Option(
            help=f"Setting of torch's CUDA allocator: {', '.join(ALLOCATORS)} (default: PYTORCH_CUDA_ALLOC_CONF's).",
            autocompletion=complete(*ALLOCATORS),
        ),
    ] = None
    cut: Annotated[str, typer.Option(help=f"Where cuts fall: {', '.join(CUT)}.", autocompletion=complete(*CUT))] = (
        "modules"
    )
    plan: Annotated[Path | None, typer.Option(help="Use this saved plan instead of a new one.")] = None
    move: Annotated[
        list[str] | None,
        typer.Option(
            "--move", metavar="MODULE=STAGE", help="With --plan: put a module in another stage, and cost that."
        ),
    ] = None

    @cached_property
    def pinned(self) -> Plan | None:
        """The plan of ``--plan`` with the modules of ``--move`` where they are to go; None without one."""
        if self.plan is None:
            if self.move:
                raise InputError(f"--move {self.move[0]!r} needs --plan FILE, the saved plan that is changed")
            return None
        from autosplit.planning.plan.plan import Plan

        moves = parse_moves(self.move or [])
        plan = Plan.load(self.plan)
        return plan.move(moves) if moves else plan

    def choices(self, devices: int, **more: Any) -> dict[str, Any]:
        """Return the arguments of `autosplit` and `plan` for so many devices, with ``more`` of them.

        Raises an error, before torch is imported and the model made, for a choice that these devices cannot have.
        """
        from autosplit.planning.request import chosen

        recompute = words(self.recompute)
        asked: dict[str, Any] = {
            "schedule": self.schedule,
            "virtual_stages": self.virtual_stages,
            "recompute": recompute if len(recompute) > 1 else recompute[0],
            "optimizer": number_or_word(self.optimizer),
            "memory_limit": self.memory_limit,
            "reserve": self.reserve,
            "allocator": self.allocator,
            "cut": self.cut,
        }
        chosen(devices=devices, pinned=self.pinned, **asked, **more)
        return {"plan": self.pinned, **asked, **more}


def number_or_word(text: str) -> int | str:
    """Return the number that a text spells, or else the text."""
    return int(text) if text.isdecimal() else text


def words(text: str) -> list[str]:
    """Return what stands between commas."""
    return [item.strip() for item in text.split(",")]


def torch_devices(text: str) -> int | list[str]:
    """Return a number of devices, or their names; whether they are there torch knows."""
    return int(text) if text.isdecimal() else words(text)


def count_of(devices: int | list[str]) -> int:
    """Return how many devices were named."""
    return devices if isinstance(devices, int) else len(devices)


def parse_moves(texts: list[str]) -> dict[str, int]:
    """Read ``decoder.3=1``: a module or node, and the stage that it goes to; raises InputError for anything else."""
    moves: dict[str, int] = {}
    for text in texts:
        match = re.fullmatch(r"\s*(\S.*?)\s*=\s*([0-9]{1,6})\s*", text)
        if match is None:
            raise InputError(f"--move {text[:60]!r} cannot be read; write MODULE=STAGE, for example decoder.3=1")
        if match[1] in moves:
            raise InputError(f"--move {match[1]} is given twice; move a module once")
        moves[match[1]] = int(match[2])
    return moves


def on_terminal() -> bool:
    """Tell whether stdout is a terminal and not closed."""
    return sys.stdout is not None and sys.stdout.isatty()


def page_width() -> int | None:
    """Return the terminal's width, or None when stdout is a file or a pipe: what lands there is always the same."""
    return shutil.get_terminal_size().columns if on_terminal() else None


def typed() -> str | None:
    """Return the command as it was typed, where this process is ``autosplit plan`` and nothing else."""
    is_plan = Path(sys.argv[0]).name in ("autosplit", "__main__.py") and sys.argv[1:2] == ["plan"]
    return f"autosplit {shlex.join(sys.argv[1:])}" if is_plan else None


def tell(text: str) -> None:
    """Say something on stderr; stdout has the answer and nothing else."""
    typer.echo(text, err=True)


@contextlib.contextmanager
def beside_stdout() -> Iterator[None]:
    """Send what models print to stderr, and warnings with it, each as one line; show progress there."""
    with contextlib.redirect_stdout(sys.stderr), plain_warnings(), lines():
        yield


@contextlib.contextmanager
def plain_warnings() -> Iterator[None]:
    """Write warnings to stderr as one line each, without the place in the code that they come from."""

    def show(message: Warning | str, *_: object, **__: object) -> None:
        tell(f"warning: {' '.join(str(message).split())}")

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield


def command(answer: Callable[..., int]) -> Callable[..., None]:
    """Return a command that ends with the exit code that ``answer`` returns; an error is one message on stderr.

    A parameter of ``answer`` that is a dataclass stands for the options that are its fields. Every command has --debug.
    """
    parameters = inspect.signature(answer, eval_str=True).parameters
    groups: dict[str, Any] = {name: p.annotation for name, p in parameters.items() if is_dataclass(p.annotation)}

    @functools.wraps(answer)
    def run(**options: Any) -> None:
        debug = options.pop("debug")
        try:
            built = {name: kind(**{f.name: options.pop(f.name) for f in fields(kind)}) for name, kind in groups.items()}
            code = answer(**built, **options)
        except BrokenPipeError:
            raise  # typer ends without a word: who reads has what it wanted, as head does
        except (Exception, KeyboardInterrupt, SystemExit) as error:
            if debug:
                traceback.print_exc()
            code, text = _said(error)
            tell(text)
        raise typer.Exit(code)

    flat: list[inspect.Parameter] = []
    for name, parameter in parameters.items():
        inside = inspect.signature(groups[name], eval_str=True).parameters.values() if name in groups else [parameter]
        flat += (each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in inside)
    flat.append(inspect.Parameter("debug", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Debug))
    run.__signature__ = inspect.Signature(flat)  # type: ignore[attr-defined]  # what typer reads
    return run


def _said(error: BaseException) -> tuple[int, str]:
    """Return the exit code of an error, and what is said of it."""
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED, "interrupted"
    if isinstance(error, AutosplitError):
        return ANSWER_IS_NO if isinstance(error, InfeasibleError) else BAD_INPUT, f"error: {error}"
    hint = f"({type(error).__name__}{_place(error)}; --debug shows the traceback)"
    if isinstance(error, SystemExit):
        hint += "; what a script runs belongs under if __name__ == '__main__'"
    return BAD_INPUT, f"error: {error}{caused_by(error)} {hint}"


def caused_by(error: BaseException) -> str:
    """Return the first of the errors that led to one: transformers and others import their parts late; "" for none."""
    cause = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    return "" if cause is error else f" (caused by {type(cause).__name__}: {cause})"


def _place(error: BaseException) -> str:
    """Return the innermost line of code that an error came through outside of autosplit, torch and Python's library.

    That is the line of the model's own forward, or of the package that the model is from; "" where there is none.
    """
    torch = getattr(sys.modules.get("torch"), "__file__", None)
    excluded = ("<", f"{Path(__file__).parents[1]}{os.sep}", *([f"{Path(torch).parent}{os.sep}"] if torch else ()))
    library = f"{Path(os.__file__).parent}{os.sep}"
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(excluded)
        and (not frame.filename.startswith(library) or "-packages" in frame.filename)
    ]
    return f" at {frames[-1].filename}:{frames[-1].lineno}, in {frames[-1].name}" if frames else ""
