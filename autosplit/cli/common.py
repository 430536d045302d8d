"""What the commands share: options, a clean stdout, and exit codes. Nothing here imports torch.

0: done; 1: done, and the answer is no (does not fit, not equal); 2: bad usage or input; 130: interrupted;
143: terminated.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from autosplit.choices import CUT, OPTIMIZER_COPIES, PRECISIONS, RECOMPUTE, SCHEDULES
from autosplit.cli.interrupts import Interrupts, go_on
from autosplit.cli.streams import answers_a_terminal, nobody_reads, tell
from autosplit.errors import AutosplitError, DeviceError, InfeasibleError, InputError
from autosplit.progress import phase
from autosplit.progress_lines import bars

if TYPE_CHECKING:
    from autosplit.planning.plan import Plan

Given = TypeVar("Given")
_MOST_DEVICES = 4096
DONE, ANSWER_IS_NO, BAD_INPUT, NO_READER = 0, 1, 2, 141
MODEL_FORM = "package.module:factory, file.py:factory or hf:config.json"
MODEL_HELP = f"{MODEL_FORM}: a callable that makes the model, an nn.Module, or a transformers config."

INPUT_HELP = (
    "One per input. PLACE is a name or a position; batch.mask is inside of a dict, pair[0] of a list, pair.0 of a "
    "tuple. A constant stands as a value: flag=false."
)


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
Inputs = Annotated[list[str] | None, typer.Option("--input", metavar="PLACE=DTYPE[SHAPE]", help=INPUT_HELP)]
Kwargs = Annotated[
    str | None, typer.Option(metavar="JSON", help="Arguments of the factory as a JSON object; entries of a config.")
]
Batch = Annotated[int | None, typer.Option(min=1, help="Rows of a step, for the inputs that a config describes.")]
Sequence = Annotated[
    int | None, typer.Option(min=1, help="Tokens per row, for the inputs that a config describes (at most 4096).")
]
Labels = Annotated[
    bool | None,
    typer.Option("--labels/--no-labels", help="Labels for a config's model, to make its loss (default: if it can)."),
]
Devices = Annotated[str, typer.Option(help="A number of devices, or torch devices such as cpu,cuda:0.")]
Chunks = Annotated[int, typer.Option(help="Number of microbatches.")]
ScheduleName = Annotated[
    str, typer.Option(help=f"{', '.join(SCHEDULES)}, or an action file.", autocompletion=complete(*SCHEDULES))
]
VirtualStages = Annotated[int, typer.Option(help="Stages per device (default: what the schedule takes).")]
Recompute = Annotated[
    str,
    typer.Option(
        help=f"auto, one of {', '.join(RECOMPUTE)}, or one of these per stage, with commas between.",
        autocompletion=complete("auto", *RECOMPUTE),
    ),
]
Optimizer = Annotated[
    str,
    typer.Option(
        help=f"{', '.join(OPTIMIZER_COPIES)}, or bytes per parameter element.",
        autocompletion=complete(*OPTIMIZER_COPIES),
    ),
]
Precision = Annotated[
    str | None,
    typer.Option(help=f"{', '.join(PRECISIONS)} (default: as the model is).", autocompletion=complete(*PRECISIONS)),
]
MemoryLimit = Annotated[str | None, typer.Option(metavar="BYTES", help="What a device may use, such as 70GiB.")]
Reserve = Annotated[str, typer.Option(metavar="BYTES", help="What to leave free on a device, such as 2GiB or 3%.")]
Mode = Annotated[bool | None, typer.Option("--train/--eval", help="Mode of the model (default: as made).")]
PlanFile = Annotated[Path | None, typer.Option(help="Use this saved plan instead of a new one.")]
Moves = Annotated[
    list[str] | None,
    typer.Option("--move", metavar="MODULE=STAGE", help="With --plan: put a module in another stage, and cost that."),
]
Cut = Annotated[str, typer.Option(help=f"Where cuts fall: {', '.join(CUT)}.", autocompletion=complete(*CUT))]
Seed = Annotated[int, typer.Option(help="Seed of the factory and of the inputs.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


def needed(option: str, value: Given | None, form: str) -> Given:
    """Return the value of an option that a model needs; InputError where it was left out."""
    if value is None:
        raise InputError(f"Missing option {option!r}; give {form}")
    return value


def torch_devices(text: str | None) -> int | list[str]:
    """Return a number of devices, or the names between the commas; whether they are there torch knows."""
    form = "a number of devices, or torch devices such as cpu,cuda:0"
    given = needed("--devices", text, form).strip()
    if given.isascii() and given.isdecimal():
        count = int(given)
        if not 1 <= count <= _MOST_DEVICES:
            raise DeviceError(f"devices={count}: give at least one device, and at most {_MOST_DEVICES}")
        return count
    names = [part.strip() for part in given.split(",")]
    for name in names:
        if re.fullmatch(r"(cpu|cuda)(:[0-9]{1,6})?", name) is None:
            paper = "; autosplit plan takes devices that are not there, such as 8xH100-SXM5-80GB"
            raise DeviceError(f"devices={text!r}: {name!r} is no torch device; give {form}{paper}")
    return names


def check_choices(devices: int | list[str], pinned: Plan | None, choices: Mapping[str, Any]) -> None:
    """Raise an error, before torch is imported and the model made, for a choice that these devices cannot have."""
    from autosplit.planning.chosen import chosen

    chosen(devices=devices if isinstance(devices, int) else len(devices), pinned=pinned, **choices)


def recompute_of(text: str) -> str | list[str]:
    """Return one choice for every stage, or the list of choices between the commas."""
    parts = [part.strip() for part in text.split(",")]
    return parts if len(parts) > 1 else parts[0]


def optimizer_of(text: str) -> str | int:
    """Return an optimizer's name, or its state bytes per parameter element."""
    return int(text) if text.isdecimal() else text


def pinned_plan(path: Path | None, moves: list[str] | None) -> Plan | None:
    """Return the plan of ``--plan`` with the modules of ``--move`` where they are to go; None without one."""
    if path is None:
        if moves:
            raise InputError(f"--move {moves[0]!r} needs --plan FILE, the saved plan that is changed")
        return None
    from autosplit.planning.moves import parse_moves
    from autosplit.planning.plan import Plan

    found = parse_moves(moves or ())
    plan = Plan.load(path)
    return plan.move(found) if found else plan


def page_width() -> int | None:
    """Return the terminal's width, or None when stdout is a file or a pipe: what lands there is always the same."""
    return shutil.get_terminal_size().columns if answers_a_terminal() else None


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Import torch and the like inside."""
    with phase("importing"):
        yield
    go_on()


@contextlib.contextmanager
def beside_stdout() -> Iterator[None]:
    """Send what models print to stderr, and warnings with it, each as one line; on a terminal show progress there."""
    with contextlib.redirect_stdout(sys.stderr), plain_warnings(), bars():
        yield
        go_on()


@contextlib.contextmanager
def plain_warnings() -> Iterator[None]:
    """Write warnings to stderr as one line each, without the place in the code that they come from."""

    def show(message: Warning | str, *_: object, **__: object) -> None:
        tell(f"warning: {' '.join(str(message).split())}")

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield


def exit_code(answer: Callable[[], int], *, debug: bool) -> int:
    """Return what ``answer`` returns; an error becomes one message on stderr and its exit code."""
    interrupts = Interrupts()
    try:
        with interrupts.heeded():
            return answer()
    except KeyboardInterrupt:
        if debug:
            traceback.print_exc()
        tell(interrupts.word)
        return interrupts.exit_code
    except BrokenPipeError:  # who reads has what it wanted, as head does
        nobody_reads()
        return NO_READER
    except Exception as error:
        if debug:
            traceback.print_exc()
        known = isinstance(error, AutosplitError)
        place = "" if known else _place(error)
        hint = "" if known else f" ({type(error).__name__}{place}; --debug shows the traceback)"
        tell(f"error: {error}{hint}")
        return ANSWER_IS_NO if isinstance(error, InfeasibleError) else BAD_INPUT


def _place(error: BaseException) -> str:
    """Return the innermost line of code that an error came through outside of autosplit, torch and Python's library.

    That is the line of the model's own forward, or of the package that the model is from; "" where there is none.
    """
    own, torch = Path(__file__).parents[1], getattr(sys.modules.get("torch"), "__file__", None)
    packages = tuple(f"{folder}{os.sep}" for folder in (own, torch and Path(torch).parent) if folder)
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((*packages, "<")) and not _of_python(frame.filename)
    ]
    return f" at {frames[-1].filename}:{frames[-1].lineno}, in {frames[-1].name}" if frames else ""


def _of_python(path: str) -> bool:
    """Tell whether a file is of Python's library, below whose folder installed packages may lie too."""
    library = os.path.dirname(os.__file__) + os.sep
    below = path.removeprefix(library).split(os.sep)
    return path.startswith(library) and not {"site-packages", "dist-packages"} & set(below)
