"""A model and its inputs from what the command line names."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from autosplit.cli import hf
from autosplit.cli.common import count_of, tell
from autosplit.cli.inputs import (
    CONFIG_PREFIX,
    INPUT_FORM,
    INPUT_FORMS,
    KWARGS_FORM,
    MODEL_FORM,
    ROWS_PER_DEVICE,
    InputSpec,
    ModelSpec,
    TensorForm,
    nested,
)
from autosplit.errors import InputError
from autosplit.options import Sample
from autosplit.progress import phase

if TYPE_CHECKING:
    from autosplit.pipelined import PipelinedModule


def make_model(spec: ModelSpec, *, blank: bool = False) -> nn.Module:
    """Return the model that the command line names, from its seed and in its mode; ``blank`` as in `load_model`."""
    torch.manual_seed(spec.seed)
    with phase("making the model"):
        model = load_model(spec.target, kwargs=spec.kwargs, blank=blank)
    return model if spec.train is None else model.train(spec.train)


def input_specs(spec: ModelSpec, *, model: nn.Module, rows: int, say: bool = True) -> tuple[InputSpec, ...]:
    """Return the inputs that the command line gives, else those that a config describes; none where neither does.

    ``rows`` is the batch of a config's inputs where none is given; ``say``: which they are goes to stderr.
    """
    specs = spec.inputs
    if spec.is_config and not spec.gives_tensors:
        named = {each.path for each in specs}
        described = hf.default_inputs(model, batch=spec.batch or rows, sequence=spec.sequence, labels=spec.labels)
        described = [each for each in described if each.path not in named]
        labels = ", --no-labels" if any(each.path == "labels" for each in described) else ""
        specs = (*described, *specs)
        if say:
            text = " ".join(map(str, described))
            tell(f"inputs, from the config: {text} (--batch, --sequence{labels} or --input make others)")
    return specs


def make_sample(spec: ModelSpec, *, model: nn.Module, rows: int) -> Any:
    """Return random values for `input_specs`, or else the model's own sample; raise InputError if it has none."""
    specs = input_specs(spec, model=model, rows=rows)
    sample = build_sample(specs, model=model, seed=spec.seed) if specs else _carried(model)
    if sample is None:
        raise InputError(
            f"no inputs are known for {type(model).__name__}; give --input {INPUT_FORM}, "
            "or give the model an example_input_array or dummy_inputs"
        )
    return sample


def make_pipe(spec: ModelSpec, *, devices: int | list[str], **choices: Any) -> tuple[PipelinedModule, Any]:
    """Return the model as a pipeline over devices of this machine, and the inputs on which it was planned."""
    from autosplit.api import autosplit

    model = make_model(spec)
    sample = make_sample(spec, model=model, rows=ROWS_PER_DEVICE * count_of(devices))
    return autosplit(model, sample=sample, batch_dims=spec.batch_dims, devices=devices, **choices), sample


def _carried(model: nn.Module) -> Sample | None:
    """Return the sample that a model carries: Lightning's ``example_input_array``, transformers' ``dummy_inputs``."""
    carried = getattr(model, "example_input_array", None)
    if carried is None and type(model).__module__.split(".")[0] == "transformers":
        carried = getattr(model, "dummy_inputs", None)
    if carried is None:
        return None
    try:
        sample = Sample.of(torch.as_tensor(carried) if isinstance(carried, (int, float)) else carried)
        _check_call(model, sample)
    except InputError as error:
        name = type(model).__name__
        raise InputError(f"{name} brings inputs (example_input_array or dummy_inputs) of its own: {error}") from error
    return sample


def random_tensor(form: TensorForm, *, generator: torch.Generator) -> torch.Tensor:
    """Return random values: normal for floats, ``[0, limit)`` for integers (limit 2 when none is given), bools."""
    dtype: torch.dtype = getattr(torch, form.dtype)
    if dtype.is_floating_point:
        return torch.randn(form.shape, generator=generator).to(dtype)
    if dtype.is_complex:
        return torch.randn(form.shape, generator=generator, dtype=torch.complex64).to(dtype)
    return torch.randint(2 if form.limit is None else form.limit, form.shape, generator=generator).to(dtype)


def build_sample(specs: Sequence[InputSpec], *, model: nn.Module, seed: int) -> Sample:
    """Return seeded random inputs that ``model.forward`` accepts, on the meta device where the model is."""
    generator = torch.Generator().manual_seed(seed)
    blank = any(parameter.is_meta for parameter in model.parameters())

    def value(form: Any) -> Any:
        if not isinstance(form, TensorForm):
            return form
        if blank:
            return torch.empty(form.shape, dtype=getattr(torch, form.dtype), device="meta")
        return random_tensor(form, generator=generator)

    values = nested([(spec.path, value(spec.value)) for spec in specs])
    args = [values.pop(name) for name in sorted(filter(str.isdecimal, values), key=int)]
    sample = Sample(*args, **values)
    _check_call(model, sample)
    return sample


def _check_call(model: nn.Module, sample: Sample) -> None:
    """Raise InputError where a model's forward does not take a sample."""
    signature = inspect.signature(model.forward)
    try:
        signature.bind(*sample.args, **sample.kwargs)
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
    arguments = dict(kwargs or {})
    if target.startswith(CONFIG_PREFIX):
        return hf.build(target, kwargs=arguments, blank=blank)
    model = _named(target, option="MODEL")
    if callable(model) and not isinstance(model, nn.Module):
        model = _called(model, arguments, target=target, blank=blank)
    elif arguments:
        raise InputError(f"{target} is a {type(model).__name__} already and takes no --kwargs; name a factory")
    if not isinstance(model, nn.Module):
        raise InputError(
            f"{target} gives a {type(model).__name__}, no nn.Module; name a factory that returns the model"
        )
    return model


def load_loss(target: str) -> Callable[..., Any]:
    """Return the loss function that ``package.module:name`` or ``file.py:name`` names; a class of losses is made."""
    source, _, name = target.rpartition(":")
    if not source or not name:
        raise InputError(f"--loss {target!r} names no function; write package.module:name or file.py:name")
    loss = _named(target, option="--loss")
    if isinstance(loss, type):
        loss = loss()
    if not callable(loss):
        raise InputError(f"--loss: {target} is a {type(loss).__name__}; name a function")
    return loss


def _called(factory: Callable[..., Any], arguments: Mapping[str, Any], *, target: str, blank: bool) -> Any:
    """Return what a factory makes, on the meta device where ``blank`` and where it works there."""
    signature = inspect.signature(factory)
    try:
        signature.bind(**arguments)
    except TypeError as error:
        raise InputError(
            f"{target}{signature} cannot be called: {error}; give its arguments as --kwargs, {KWARGS_FORM}"
        ) from error
    if blank:
        with contextlib.suppress(Exception), warnings.catch_warnings(), torch.device("meta"):
            warnings.simplefilter("ignore")  # of values that are loaded into nothing
            return factory(**arguments)
    return factory(**arguments)


def _named(target: str, *, option: str) -> Any:
    """Return what ``package.module:name`` or ``file.py:name`` names."""
    source, _, name = target.rpartition(":")
    module = _import(source, option=option)
    if not hasattr(module, name):
        names = sorted(
            key for key, value in vars(module).items() if not key.startswith("_") and _is_model(value, module)
        )
        raise InputError(f"{option}: {source} has no {name!r}; it has {', '.join(names) or 'no factory'}")
    return getattr(module, name)


def _is_model(value: Any, module: ModuleType) -> bool:
    is_local = callable(value) and getattr(value, "__module__", "") == module.__name__
    return is_local or isinstance(value, nn.Module)


def _import(source: str, *, option: str) -> ModuleType:
    path = Path(source)
    is_file = path.suffix == ".py"
    if is_file and not path.is_file():
        raise InputError(f"{option}: there is no file {source!r}")
    folder = str(path.resolve().parent if is_file else Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        return _import_file(path) if is_file else importlib.import_module(source)
    except ModuleNotFoundError as error:
        if is_file or not f"{source}.".startswith(f"{error.name}."):
            raise
        raise InputError(
            f"{option}: there is no module {error.name!r}, neither in the working folder nor among the packages of "
            f"this Python; write {MODEL_FORM}"
        ) from error


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
