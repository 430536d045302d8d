"""A model and its inputs from what the command line names."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from autosplit.cli_common import MODEL_FORM
from autosplit.cli_inputs import INPUT_FORM, InputSpec
from autosplit.errors import InputError
from autosplit.options import Sample


def random_tensor(spec: InputSpec, *, generator: torch.Generator) -> torch.Tensor:
    """Return random values: normal for floats, ``[0, limit)`` for integers (limit 2 when none is given), bools."""
    dtype: torch.dtype = getattr(torch, spec.dtype)
    if dtype.is_floating_point:
        return torch.randn(spec.shape, generator=generator).to(dtype)
    if dtype.is_complex:
        return torch.randn(spec.shape, generator=generator, dtype=torch.complex64).to(dtype)
    return torch.randint(2 if spec.limit is None else spec.limit, spec.shape, generator=generator).to(dtype)


def _blank(spec: InputSpec) -> torch.Tensor:
    return torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device="meta")


def build_sample(specs: Sequence[InputSpec], *, model: nn.Module, seed: int) -> Sample | None:
    """Return seeded random inputs that ``model.forward`` accepts, or None when ``specs`` is empty.

    They are on the meta device where the model is.
    """
    if not specs:
        return None
    names = [spec.name for spec in specs]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise InputError(f"--input {repeated[0]} is given {names.count(repeated[0])} times; give every input once")
    generator = torch.Generator().manual_seed(seed)
    blank = any(parameter.is_meta for parameter in model.parameters())
    values = {spec.name: _blank(spec) if blank else random_tensor(spec, generator=generator) for spec in specs}
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


def load_model(target: str, *, blank: bool = False) -> nn.Module:
    """Import ``package.module:factory`` or ``file.py:factory`` and return the module that it makes.

    ``blank``: on the meta device, where the factory works there.
    """
    source, _, name = target.rpartition(":")
    if not source or not name:
        raise InputError(f"MODEL {target!r} names no factory; write {MODEL_FORM}")
    module = _import(source)
    if not hasattr(module, name):
        raise InputError(f"{source} has no {name!r}; it has {', '.join(_factories(module)) or 'no factory'}")
    made = getattr(module, name)
    if callable(made) and not isinstance(made, nn.Module):
        try:
            made = _made(made, blank=blank)
        except Exception as error:
            raise InputError(
                f"{target} failed when called without arguments: {type(error).__name__}: {error}; "
                "a function without parameters that returns the model always works"
            ) from error
    if not isinstance(made, nn.Module):
        raise InputError(f"{target} gives a {type(made).__name__}, no nn.Module; name a factory that returns the model")
    return made


def _made(factory: Callable[[], Any], *, blank: bool) -> Any:
    if blank:
        with contextlib.suppress(Exception), warnings.catch_warnings(), torch.device("meta"):
            warnings.simplefilter("ignore")  # of values that are loaded into nothing
            return factory()
    return factory()


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
