"""What the commands share: a model and its inputs from text, a clean stdout, and exit codes.

0: done; 1: done, and the answer is no (does not fit, not equal); 2: bad usage or input.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import re
import shutil
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import torch
import typer
from torch import nn

from autosplit.errors import AutosplitError, InfeasibleError, InputError
from autosplit.options import Sample

DONE, ANSWER_IS_NO, BAD_INPUT = 0, 1, 2
DTYPES = "float32 float64 float16 bfloat16 complex64 complex128 bool int64 int32 int16 int8 uint8".split()
INPUT_FORM = "NAME=dtype[shape], for example x=float32[8,3,32,32] or input_ids=int64[4,128]<50257"
MODEL_FORM = "package.module:factory or file.py:factory"

MODEL_HELP = f"{MODEL_FORM}: a zero-argument callable or an nn.Module."

Target = Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP)]
Inputs = Annotated[
    list[str] | None, typer.Option("--input", metavar="NAME=DTYPE[SHAPE]", help="One per input; NAME or position.")
]
Seed = Annotated[int, typer.Option(help="Seed of the factory and of the inputs.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


@dataclass(frozen=True)
class InputSpec:
    """One ``--input``: a name or a position, a dtype, a shape, and for integers the limit below which values lie."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    limit: int | None = None

    def __str__(self) -> str:
        below = "" if self.limit is None else f"<{self.limit}"
        return f"{self.name}={self.dtype}[{','.join(map(str, self.shape))}]{below}"

    @classmethod
    def parse(cls, text: str) -> InputSpec:
        """Read ``x=float32[8,3,32,32]``, ``0=int64[4,128]<50257``; raises InputError for anything else."""
        form = r"\s*(?P<name>[^\W\d]\w*|0|[1-9][0-9]*)=(?P<dtype>\w+)\[(?P<shape>[0-9 ,]*)\](?:<(?P<limit>[0-9]+))?\s*"
        match = re.fullmatch(form, text)
        sizes = [size.strip() for size in match["shape"].split(",")] if match and match["shape"].strip() else []
        if match is None or not all(size.isdecimal() for size in sizes):
            raise InputError(f"--input {text!r} cannot be read; write {INPUT_FORM}")
        if match["dtype"] not in DTYPES:
            raise InputError(f"--input {text!r}: {match['dtype']!r} is no dtype here; valid: {', '.join(DTYPES)}")
        spec = cls(
            match["name"], match["dtype"], tuple(map(int, sizes)), int(match["limit"]) if match["limit"] else None
        )
        return spec._checked()

    def _checked(self) -> InputSpec:
        if self.limit is None:
            return self
        if "int" not in self.dtype:
            raise InputError(f"--input {str(self)!r}: <{self.limit} is for integers, {self.dtype} takes no limit")
        largest = min(torch.iinfo(getattr(torch, self.dtype)).max + 1, torch.iinfo(torch.int64).max)
        if not 1 <= self.limit <= largest:
            raise InputError(f"--input {str(self)!r}: the limit of {self.dtype} is between 1 and {largest}")
        return self

    def tensor(self, generator: torch.Generator) -> torch.Tensor:
        """Return random values: normal for floats, ``[0, limit)`` for integers (limit 2 when none is given), bools."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        if dtype.is_floating_point:
            return torch.randn(self.shape, generator=generator).to(dtype)
        if dtype.is_complex:
            return torch.randn(self.shape, generator=generator, dtype=torch.complex64).to(dtype)
        return torch.randint(2 if self.limit is None else self.limit, self.shape, generator=generator).to(dtype)


def build_sample(specs: Sequence[InputSpec], *, model: nn.Module, seed: int) -> Sample | None:
    """Return seeded random inputs that ``model.forward`` accepts, or None when ``specs`` is empty."""
    if not specs:
        return None
    names = [spec.name for spec in specs]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise InputError(f"--input {repeated[0]} is given {names.count(repeated[0])} times; give every input once")
    generator = torch.Generator().manual_seed(seed)
    values = {spec.name: spec.tensor(generator) for spec in specs}
    positions = sorted(int(name) for name in names if name.isdecimal())
    if positions != list(range(len(positions))):
        raise InputError(f"--input positions are {positions}; number them from 0 without gaps")
    args = [values.pop(str(position)) for position in positions]
    _check_call(model, args=args, kwargs=values)
    return Sample(*args, **values)


def _check_call(model: nn.Module, *, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    signature = inspect.signature(model.forward)
    named = [p.name for p in signature.parameters.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    takes_any = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    unknown = [name for name in kwargs if name not in named]
    if unknown and not takes_any:
        raise InputError(
            f"--input {unknown[0]}: {type(model).__name__}.forward has no input of that name; "
            f"it has {', '.join(named) or 'none'} (or give a position, 0=...)"
        )
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise InputError(
            f"{type(model).__name__}.forward{signature} cannot be called with these inputs: {error}; "
            f"give one --input for each, {INPUT_FORM}"
        ) from error


def load_model(target: str) -> nn.Module:
    """Import ``package.module:factory`` or ``file.py:factory`` and return the module that it makes."""
    source, _, name = target.rpartition(":")
    if not source or not name:
        raise InputError(f"MODEL {target!r} names no factory; write {MODEL_FORM}")
    module = _import(source)
    if not hasattr(module, name):
        raise InputError(f"{source} has no {name!r}; it has {', '.join(_factories(module)) or 'no factory'}")
    made = getattr(module, name)
    if callable(made) and not isinstance(made, nn.Module):
        try:
            made = made()
        except Exception as error:
            raise InputError(
                f"{target} failed when called without arguments: {type(error).__name__}: {error}; "
                "a function without parameters that returns the model always works"
            ) from error
    if not isinstance(made, nn.Module):
        raise InputError(f"{target} gives a {type(made).__name__}, no nn.Module; name a factory that returns the model")
    return made


def _import(source: str) -> ModuleType:
    path = Path(source)
    is_file = path.suffix == ".py"
    if is_file and not path.is_file():
        raise InputError(f"MODEL: there is no file {source!r}; write {MODEL_FORM}")
    folder = str(path.resolve().parent if is_file else Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        return _import_file(path) if is_file else importlib.import_module(source)
    except Exception as error:
        raise InputError(f"MODEL: importing {source!r} failed: {type(error).__name__}: {error}") from error


def _import_file(path: Path) -> ModuleType:
    # The prefix keeps a file called random.py from taking the place of a module that others import.
    name = f"autosplit_model_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _factories(module: ModuleType) -> list[str]:
    own = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    return sorted(
        name
        for name, value in own.items()
        if isinstance(value, nn.Module) or (callable(value) and getattr(value, "__module__", "") == module.__name__)
    )


def no_inputs(model: nn.Module) -> InputError:
    """Return the error that says that inputs are missing."""
    return InputError(
        f"no inputs are known for {type(model).__name__}; give --input {INPUT_FORM}, "
        "or give the model an example_input_array or dummy_inputs"
    )


def page_width() -> int | None:
    """Return the terminal's width, or None when stdout is a file or a pipe: what lands there is always the same."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


@contextlib.contextmanager
def beside_stdout() -> Iterator[None]:
    """Send what models print to stderr, and warnings with it, each as one line."""

    def show(message: Warning | str, *_: object, **__: object) -> None:
        typer.echo(f"warning: {' '.join(str(message).split())}", err=True)

    with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
        warnings.showwarning = show
        yield


def exit_code(answer: Callable[[], int], *, debug: bool) -> int:
    """Return what ``answer`` returns; an error becomes one message on stderr and its exit code."""
    try:
        return answer()
    except Exception as error:
        if debug:
            traceback.print_exc()
        known = isinstance(error, AutosplitError)
        hint = "" if known else f" ({type(error).__name__}; --debug shows the traceback)"
        typer.echo(f"error: {error}{hint}", err=True)
        return ANSWER_IS_NO if isinstance(error, InfeasibleError) else BAD_INPUT
