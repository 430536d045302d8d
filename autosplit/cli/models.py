"""A model and its inputs from what the command line names."""

from __future__ import annotations

import contextlib
import difflib
import functools
import importlib
import importlib.util
import inspect
import json
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from autosplit.cli import hf
from autosplit.cli.caret import pointed
from autosplit.cli.causes import with_cause
from autosplit.cli.common import MODEL_FORM
from autosplit.cli.inputs import (
    CONFIG_PREFIX,
    INPUT_FORM,
    INPUT_FORMS,
    Constant,
    InputSpec,
    ModelSpec,
    TensorForm,
    check_target,
)
from autosplit.cli.places import nested
from autosplit.cli.streams import tell
from autosplit.errors import InputError
from autosplit.options import Sample
from autosplit.progress import phase

_MOST_LINES, _MOST_CHARACTERS = 4, 600
"""How much of the message of somebody else's error is shown."""
_NEAR = 0.8
"""How alike two names are of which one is taken to be misspelt, as `difflib` counts."""


def make_model(spec: ModelSpec, *, blank: bool = False) -> nn.Module:
    """Return the model that the command line names, from its seed and in its mode; ``blank`` as in `load_model`."""
    torch.manual_seed(spec.seed)
    with phase("making the model"):
        model = load_model(spec.target, kwargs=spec.kwargs, blank=blank)
    return model if spec.train is None else model.train(spec.train)


def make_sample(spec: ModelSpec, *, model: nn.Module, rows: int, say: bool = True) -> Any:
    """Return the inputs that the command line gives, else those that a config describes or the model brings.

    ``rows`` is the batch of a config's inputs where none is given; ``say``: which they are goes to stderr. InputError:
    none are known.
    """
    specs = spec.inputs
    if spec.is_config and not spec.gives_tensors:
        sizes, named = spec.sizes, {each.place.name for each in specs}
        described = hf.default_inputs(model, batch=sizes.batch or rows, sequence=sizes.sequence, labels=sizes.labels)
        described = [each for each in described if each.place.name not in named]
        said, has_labels = " ".join(map(str, described)), any(each.place.name == "labels" for each in described)
        specs = (*described, *specs)
        others = "--batch, --sequence, --no-labels" if has_labels else "--batch, --sequence"
        if say:
            tell(f"inputs, from the config: {said} ({others} or --input make others)")
    sample = build_sample(specs, model=model, seed=spec.seed)
    if sample is None:
        sample = _brought(model)
    if sample is None:
        raise no_inputs(model)
    return sample


def _brought(model: nn.Module) -> Sample | None:
    """Return the inputs that the model brings, if it does; InputError where its forward cannot be called with them."""
    own = _carried(model)
    if own is None:
        return None
    try:
        sample = Sample.of(own)
        inspect.signature(model.forward).bind(*sample.args, **sample.kwargs)
    except (InputError, TypeError) as error:
        raise InputError(
            f"{type(model).__name__} brings inputs (example_input_array or dummy_inputs) with which its forward cannot "
            f"be called: {error}; mend them, or give --input {INPUT_FORM}"
        ) from error
    return sample


def _carried(model: nn.Module) -> Any:
    """Return the sample that a model carries: Lightning's ``example_input_array``, transformers' ``dummy_inputs``."""
    own = getattr(model, "example_input_array", None)
    if own is None and type(model).__module__.split(".")[0] == "transformers":
        own = getattr(model, "dummy_inputs", None)
    return torch.as_tensor(own) if isinstance(own, (int, float)) else own


def random_tensor(form: TensorForm, *, generator: torch.Generator) -> torch.Tensor:
    """Return random values: normal for floats, ``[0, limit)`` for integers (limit 2 when none is given), bools."""
    dtype: torch.dtype = getattr(torch, form.dtype)
    if dtype.is_floating_point:
        return torch.randn(form.shape, generator=generator).to(dtype)
    if dtype.is_complex:
        return torch.randn(form.shape, generator=generator, dtype=torch.complex64).to(dtype)
    return torch.randint(2 if form.limit is None else form.limit, form.shape, generator=generator).to(dtype)


def _value(given: TensorForm | Constant, *, generator: torch.Generator, blank: bool) -> Any:
    """Return a constant as it is, or a tensor; a ``blank`` one has no values."""
    if isinstance(given, Constant):
        return given.value
    if blank:
        return torch.empty(given.shape, dtype=getattr(torch, given.dtype), device="meta")
    return random_tensor(given, generator=generator)


def build_sample(specs: Sequence[InputSpec], *, model: nn.Module, seed: int) -> Sample | None:
    """Return seeded random inputs that ``model.forward`` accepts, or None when ``specs`` is empty.

    They are on the meta device where the model is.
    """
    if not specs:
        return None
    generator = torch.Generator().manual_seed(seed)
    blank = any(parameter.is_meta for parameter in model.parameters())
    values = nested([(spec.place, _value(spec.value, generator=generator, blank=blank)) for spec in specs])
    args = [values.pop(name) for name in sorted(filter(str.isdecimal, values), key=int)]
    _check_call(model, args=args, kwargs=values)
    return Sample(*args, **values)


def _check_call(model: nn.Module, *, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    signature = inspect.signature(model.forward)
    named = [p.name for p in signature.parameters.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    takes_any = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    unknown = [name for name in kwargs if name not in named]
    if unknown and not takes_any:
        inside = f", or inside of one that is a dict, {named[0]}.{unknown[0]}=..." if named else ""
        raise InputError(
            f"--input {unknown[0]}: {type(model).__name__}.forward has no input of that name; "
            f"it has {', '.join(named) or 'none'} (or give a position, 0=...{inside})"
        )
    for name in unknown:  # what is misspelt would go where nobody looks at it
        for near in difflib.get_close_matches(name, [own for own in named if own not in kwargs], n=1, cutoff=_NEAR):
            place = f"{type(model).__name__}.forward"
            tell(f"warning: --input {name}: {place} names no such input and takes it as any other; it names {near}")
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise InputError(
            f"{type(model).__name__}.forward{signature} cannot be called with these inputs: {error}; "
            f"give one --input for each, {INPUT_FORMS}"
        ) from error


def load_model(target: str, *, kwargs: Mapping[str, Any] | None = None, blank: bool = False) -> nn.Module:
    """Return the module that ``package.module:factory``, ``file.py:factory`` or ``hf:config.json`` makes.

    ``kwargs`` go to the factory, or take the place of entries of the config. ``blank``: on the meta device, where the
    factory works there; a config's model is made with values only up to `MOST_BYTES`.
    """
    given = dict(kwargs or {})
    if target.startswith(CONFIG_PREFIX):
        return hf.build(target, kwargs=given, blank=blank)
    check_target(target)
    source, _, name = target.rpartition(":")
    module = _import(source)
    if not hasattr(module, name):
        raise InputError(f"{source} has no {name!r}; it has {', '.join(_factories(module)) or 'no factory'}")
    made = getattr(module, name)
    if callable(made) and not isinstance(made, nn.Module):
        _check_factory(made, given, target=target)
        try:
            made = _made(functools.partial(made, **given), blank=blank)
        except (Exception, SystemExit) as error:
            how = f"with --kwargs {json.dumps(given)}" if given else "without arguments"
            raise InputError(f"{target} failed when called {how}: {_told(error, path=_file_of(module))}") from error
    elif given:
        raise InputError(f"{target} is a {type(made).__name__} already and takes no --kwargs; name a factory")
    if not isinstance(made, nn.Module):
        raise InputError(f"{target} gives a {type(made).__name__}, no nn.Module; name a factory that returns the model")
    return made


def load_loss(target: str) -> Callable[..., Any]:
    """Return the loss function that ``package.module:name`` or ``file.py:name`` names; a class of losses is made."""
    source, _, name = target.rpartition(":")
    if not source or not name:
        raise InputError(f"--loss {target!r} names no function; write package.module:name or file.py:name")
    module = _import(source, option="--loss")
    found = getattr(module, name, None)
    if isinstance(found, type):
        found = found()
    if not callable(found):
        raise InputError(f"--loss: {source} has no function {name!r}; it has {', '.join(_factories(module)) or 'none'}")
    return found


def _check_factory(factory: Callable[..., Any], given: Mapping[str, Any], *, target: str) -> None:
    """Raise InputError where a factory does not take what it would be given, and say what it takes."""
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(**given)
    except TypeError as error:
        needed = {
            name: "..."
            for name, parameter in signature.parameters.items()
            if parameter.default is parameter.empty
            and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        }
        way_out = f"give them as --kwargs '{json.dumps(needed)}'" if set(needed) - set(given) else "mend --kwargs"
        unnamed = [
            p.name for p in signature.parameters.values() if p.kind is p.POSITIONAL_ONLY and p.default is p.empty
        ]
        if unnamed:
            way_out = f"--kwargs gives arguments by name, and {unnamed[0]} takes none; name a factory that does"
        raise InputError(f"{target}{signature} cannot be called: {error}; {way_out}") from error


def _made(factory: Callable[[], Any], *, blank: bool) -> Any:
    if blank:
        with contextlib.suppress(Exception), warnings.catch_warnings(), torch.device("meta"):
            warnings.simplefilter("ignore")  # of values that are loaded into nothing
            return factory()
    return factory()


def _import(source: str, *, option: str = "MODEL") -> ModuleType:
    path = Path(source)
    is_file = path.suffix == ".py"
    if is_file and not path.is_file():
        raise InputError(f"{option}: there is no file {source!r}")
    folder = str(path.resolve().parent if is_file else Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        return _import_file(path) if is_file else importlib.import_module(source)
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and not is_file and f"{source}.".startswith(f"{error.name}."):
            raise InputError(
                f"{option}: there is no module {error.name!r}, neither in the working folder nor among the packages of "
                f"this Python; write {MODEL_FORM}"
            ) from error
        raise InputError(f"{option}: importing {source!r} failed: {_told(error, path=folder)}") from error


def _told(error: BaseException, *, path: str) -> str:
    """Return an error of the model's own code in short, with the last place below ``path`` that it came through."""
    if isinstance(error, SyntaxError) and error.filename is not None:
        place = f"{Path(error.filename).name}, line {error.lineno}: {type(error).__name__}: "
        text = (error.text or "").rstrip("\n")
        return place + (pointed(text, max(0, (error.offset or 1) - 1), error.msg) if text else error.msg)
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename.startswith(path)]
    place = f"{Path(frames[-1].filename).name}, line {frames[-1].lineno}: " if frames else ""
    lines = str(error).strip().splitlines()
    text = "\n".join(lines[:_MOST_LINES])[:_MOST_CHARACTERS]
    more = f"{text} ... (--debug shows all)" if text != "\n".join(lines) else text
    if isinstance(error, ImportError) and error.__cause__ is not None:
        more = with_cause(error).partition(": ")[2]
    if isinstance(error, SystemExit):
        more = f"{more}; what a script runs belongs under if __name__ == '__main__'"
    return f"{place}{type(error).__name__}: {more}"


def _file_of(module: ModuleType) -> str:
    file = getattr(module, "__file__", None)
    return str(Path(file).parent) if file else "\0"


def _import_file(path: Path) -> ModuleType:
    # The prefix keeps a file called random.py from taking the place of a module that others import.
    name = f"autosplit_model_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path.resolve())
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
