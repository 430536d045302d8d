"""MODEL, ``--input``, ``--kwargs`` and ``--batch-dims`` as text; nothing here imports torch."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from autosplit.errors import InputError

MODEL_FORM = "package.module:factory, file.py:factory or config.json"
DTYPES = "float32 float64 float16 bfloat16 complex64 complex128 bool int64 int32 int16 int8 uint8".split()
INPUT_FORM = "NAME=dtype[shape], for example x=float32[8,3,32,32] or input_ids=int64[4,128]<50257"
INPUT_FORMS = (
    f"{INPUT_FORM}; batch.mask=bool[8] inside of a dict, pair[0]=float32[8] of a list, pair.0=float32[8] of a tuple; "
    "flag=false, scale=0.5 or act='relu' for a value that is no tensor"
)
INPUT_HELP = (
    "One per input. PLACE is a name or a position; batch.mask is inside of a dict, pair[0] of a list, pair.0 of a "
    "tuple. A constant stands as a value: flag=false."
)
KWARGS_FORM = """a JSON object, for example --kwargs '{"width": 64, "layers": 12}'"""
BATCH_DIMS_FORM = """a number, a JSON list such as [0, null], or an object such as {"x": 1, "mask": null}"""
CONFIG_PREFIX = "hf:"
"""What may stand before the path of a transformers config in MODEL."""
ROWS_PER_DEVICE = 4
"""The batch of a config's inputs where none is given: enough microbatches of a row to keep a pipeline busy."""

_STEP = r"""\.[^\W\d]\w*|\.\d+|\[\d+\]|\["[^"]*"\]|\['[^']*'\]"""
_SPEC = re.compile(rf"\s*((?:[^\W\d]\w*|\d+)(?:{_STEP})*)=\s*(.*?)\s*", re.DOTALL)
_TENSOR = re.compile(r"(\w+)\s*\[([\d,\s]*)\]\s*(?:<\s*(\d+))?")
_WORDS = {"true": True, "false": False, "null": None}
_LIMITS = {"int64": 2**63 - 1, "int32": 2**31, "int16": 2**15, "int8": 2**7, "uint8": 2**8}
"""The largest limit of an integer dtype: values lie below it."""


@dataclass(frozen=True)
class TensorForm:
    """What a random tensor is like: a dtype, a shape, and for integers the limit below which values lie."""

    dtype: str
    shape: tuple[int, ...]
    limit: int | None = None

    def __str__(self) -> str:
        below = "" if self.limit is None else f"<{self.limit}"
        return f"{self.dtype}[{','.join(map(str, self.shape))}]{below}"


@dataclass(frozen=True)
class InputSpec:
    """One ``--input``: its place in the call, such as ``x``, ``0`` or ``batch.mask``, and what goes there."""

    path: str
    value: TensorForm | bool | int | float | str | None

    def __str__(self) -> str:
        return f"{self.path}={self.value if isinstance(self.value, TensorForm) else repr(self.value)}"

    @classmethod
    def tensor(cls, name: str, dtype: str, shape: tuple[int, ...], limit: int | None = None) -> InputSpec:
        """Return the spec of an argument that is a tensor."""
        return cls(name, TensorForm(dtype, shape, limit))

    @classmethod
    def parse(cls, text: str) -> InputSpec:
        """Read ``x=float32[8,3,32,32]``, ``0=int64[4,128]<50257``, ``batch.mask=bool[8]``, ``flag=false``."""
        match = _SPEC.fullmatch(text)
        if match is None:
            raise InputError(f"--input {text!r} does not begin with a place and =; write {INPUT_FORMS}")
        try:
            return cls(match[1], _value(match[2]))
        except ValueError as error:
            raise InputError(f"--input {text!r} cannot be read: {error}; write {INPUT_FORMS}") from error


def _value(text: str) -> Any:
    """Return the tensor or the constant that a text stands for; ValueError where it is neither."""
    match = _TENSOR.fullmatch(text)
    if match is not None:
        return _tensor(match[1], match[2], match[3])
    if text in _WORDS:
        return _WORDS[text]
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        value = ...
    if not isinstance(value, (bool, int, float, str, type(None))):
        raise ValueError(f"{text!r} is neither dtype[shape] nor a constant")
    return value


def _tensor(dtype: str, shape: str, limit: str | None) -> TensorForm:
    if dtype not in DTYPES:
        raise ValueError(f"{dtype!r} is no dtype here; valid: {', '.join(DTYPES)}")
    sizes = [size.strip() for size in shape.split(",")] if shape.strip() else []
    if not all(size.isdecimal() for size in sizes):
        raise ValueError(f"[{shape}] is no list of sizes")
    if limit is not None and not 1 <= int(limit) <= _LIMITS.get(dtype, 0):
        most = f"the limit of {dtype} is between 1 and {_LIMITS[dtype]}" if dtype in _LIMITS else f"{dtype} takes none"
        raise ValueError(f"<{limit} is no limit for it: {most}")
    return TensorForm(dtype, tuple(map(int, sizes)), None if limit is None else int(limit))


def nested(values: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Return the arguments, by name or position, that values at places make together.

    InputError: a place is given twice, is of two kinds, or the positions in it have gaps.
    """
    arguments: dict[str, list[_At]] = {}
    for path, value in values:
        name, *steps = re.findall(rf"^\w+|{_STEP}", path)
        arguments.setdefault(name, []).append((list(map(_step, steps)), value))
    _check_positions("positions are", [int(name) for name in arguments if name.isdecimal()])
    return {name: _built(name, inside) for name, inside in arguments.items()}


def _step(text: str) -> tuple[type, str | int]:
    """Return what kind of container one step of a place enters, and the key in it."""
    if text.startswith("."):
        return (tuple, int(text[1:])) if text[1:].isdecimal() else (dict, text[1:])
    key = ast.literal_eval(text[1:-1])
    return (list if isinstance(key, int) else dict), key


_At = tuple[list[tuple[type, str | int]], Any]
"""The steps from a place inwards, and the value there."""


def _built(path: str, inside: Sequence[_At]) -> Any:
    """Return the value at a place, or the dict, list or tuple of the values inside of it."""
    if not all(steps for steps, _ in inside):
        if len(inside) > 1:
            raise InputError(f"--input {path} is given twice, or whole and in parts; give every input once")
        return inside[0][1]
    entries: dict[Any, list[_At]] = {}
    for (step, *further), value in inside:
        entries.setdefault(step, []).append((further, value))
    kinds = {kind for kind, _ in entries}
    if len(kinds) > 1:
        names = " and a ".join(sorted(kind.__name__ for kind in kinds))
        raise InputError(f"--input {path} is a {names}; write .name for a dict, [0] for a list, .0 for a tuple")
    values = {key: _built(f"{path}[{key!r}]", further) for (_, key), further in entries.items()}
    kind = kinds.pop()
    if kind is dict:
        return values
    _check_positions(f"{path} has the positions", list(values))
    return kind(values[position] for position in range(len(values)))


def _check_positions(what: str, positions: Sequence[int]) -> None:
    if sorted(positions) != list(range(len(positions))):
        raise InputError(f"--input {what} {sorted(positions)}; number them from 0 without gaps")


def parse_json(option: str, text: str | None, form: str) -> Any:
    """Read an option that is JSON; None where it was not given."""
    try:
        return None if text is None else json.loads(text)
    except ValueError as error:
        raise InputError(f"{option} {text!r} is no JSON: {error}; write {form}") from error


def parse_kwargs(text: str | None) -> dict[str, Any]:
    """Read ``--kwargs``: a JSON object."""
    parsed = parse_json("--kwargs", text, KWARGS_FORM)
    if not isinstance(parsed, dict | None):
        raise InputError(f"--kwargs {text!r} is no object with names; write {KWARGS_FORM}")
    return parsed or {}


def parse_batch_dims(text: str | None) -> Any:
    """Read ``--batch-dims`` as the argument ``batch_dims`` takes it."""
    dims = parse_json("--batch-dims", text, BATCH_DIMS_FORM)
    return tuple(dims) if isinstance(dims, list) else dims


def check_target(target: str) -> None:
    """Raise InputError for a MODEL that names no factory, or a file that is not there or holds no config."""
    if target.startswith(CONFIG_PREFIX):
        read_config(target)
        return
    source, _, name = target.rpartition(":")
    if not source or not name:
        saved = f"; a saved plan is shown by: autosplit report {target}" if is_plan_file(target) else ""
        if saved and not Path(target).is_file():
            raise InputError(f"MODEL: there is no file {target!r}; write {MODEL_FORM}")
        raise InputError(f"MODEL {target!r} names no factory; write {MODEL_FORM}{saved}")
    if source.endswith(".py") and not Path(source).is_file():
        raise InputError(f"MODEL: there is no file {source!r}; write {MODEL_FORM}")


def wants_labels(asked: bool | None, schedule: str) -> bool | None:
    """Return whether inputs get labels where a training is planned: none under a schedule without a backward."""
    return False if asked is None and schedule == "forward" else asked


def is_plan_file(target: str) -> bool:
    """Tell whether MODEL is the file of a saved plan."""
    return target.endswith(".json") and not with_prefix(target).startswith(CONFIG_PREFIX)


def with_prefix(target: str) -> str:
    """Return MODEL with the prefix of a config where it is the path of one, or of its folder."""
    path = Path(target)
    try:
        data = json.loads((path / "config.json" if path.is_dir() else path).read_bytes())
    except (OSError, ValueError, RecursionError):
        return target
    is_config = isinstance(data, dict) and not data.keys().isdisjoint(("model_type", "architectures"))
    return f"{CONFIG_PREFIX}{target}" if is_config else target


def read_config(target: str) -> dict[str, Any]:
    """Return what a config file says, as data; InputError where it cannot be read or is no JSON object."""
    path = Path(target.removeprefix(CONFIG_PREFIX))
    if path.is_dir():
        path = path / "config.json"
    try:
        data = json.loads(path.read_text(encoding="utf-8"), object_hook=_tagged_float)
    except OSError as error:
        raise InputError(
            f"{target}: {error.strerror}: {str(path)!r}; {CONFIG_PREFIX} takes the config.json of a model, from disk"
        ) from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{target} is no JSON: {error}") from error
    if not isinstance(data, dict):
        raise InputError(f"{target} holds a JSON {type(data).__name__}, no config: a config is an object with entries")
    return data


def _tagged_float(entries: dict[str, Any]) -> Any:
    """Return the number that transformers writes as ``{"__float__": "Infinity"}``; any other object as it is."""
    text = entries.get("__float__")
    return float(text) if len(entries) == 1 and text in ("Infinity", "-Infinity", "NaN") else entries


@dataclass(frozen=True)
class ModelSpec:
    """What the command line says of a model and its inputs.

    ``batch``, ``sequence`` and ``labels`` are of the inputs that a config describes; None: what suits it. Labels are
    what the model makes its loss from.
    """

    target: str
    inputs: tuple[InputSpec, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    batch_dims: Any = None
    batch: int | None = None
    sequence: int | None = None
    labels: bool | None = False
    seed: int = 0
    train: bool | None = None

    @property
    def is_config(self) -> bool:
        """Whether the model comes from a config file, which describes its inputs too."""
        return self.target.startswith(CONFIG_PREFIX)

    @property
    def gives_tensors(self) -> bool:
        """Whether the inputs that were given are more than constants beside others."""
        return any(isinstance(spec.value, TensorForm) for spec in self.inputs)


@dataclass(frozen=True)
class InputOptions:
    """The options that say what a model is made from and given."""

    inputs: Annotated[list[str] | None, typer.Option("--input", metavar="PLACE=DTYPE[SHAPE]", help=INPUT_HELP)] = None
    kwargs: Annotated[
        str | None, typer.Option(metavar="JSON", help="Arguments of the factory as a JSON object; entries of a config.")
    ] = None
    batch_dims: Annotated[
        str | None,
        typer.Option(metavar="JSON", help='The batch dimension of the inputs: 1, [0, null], or {"x": 1} (default: 0).'),
    ] = None
    batch: Annotated[
        int | None, typer.Option(min=1, help="Rows of a step, for the inputs that a config describes.")
    ] = None
    sequence: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens per row, for the inputs that a config describes."),
    ] = None
    seed: Annotated[int, typer.Option(help="Seed of the factory and of the inputs.")] = 0

    def spec(self, target: str, *, labels: bool | None = False, train: bool | None = None) -> ModelSpec:
        """Read the texts for a model; raises InputError for what cannot be read or does not go together."""
        target = with_prefix(target)
        spec = ModelSpec(
            target,
            tuple(map(InputSpec.parse, self.inputs or ())),
            parse_kwargs(self.kwargs),
            parse_batch_dims(self.batch_dims),
            self.batch,
            self.sequence,
            labels,
            self.seed,
            train,
        )
        nested([(each.path, each.value) for each in spec.inputs])
        asked = {"--batch": self.batch, "--sequence": self.sequence, "--labels": labels or None}
        option = next((option for option, value in asked.items() if value is not None), None)
        if option is not None and (spec.gives_tensors or not spec.is_config):
            reason = "--input gives the sizes" if spec.gives_tensors else f"{target} is none; give --input"
            raise InputError(f"{option} is for the inputs that an {CONFIG_PREFIX} config describes; {reason}")
        check_target(target)
        return spec
