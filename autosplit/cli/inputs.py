"""``--input`` and ``--kwargs`` as text, with a caret under the place where one cannot be read."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from autosplit.cli.caret import pointed
from autosplit.cli.common import MODEL_FORM
from autosplit.cli.places import MOST_STEPS, POSITION, WORD, Place, Step, in_quotes, nested
from autosplit.errors import InputError

DTYPES = "float32 float64 float16 bfloat16 complex64 complex128 bool int64 int32 int16 int8 uint8".split()
INPUT_FORM = "NAME=dtype[shape], for example x=float32[8,3,32,32] or input_ids=int64[4,128]<50257"
INPUT_FORMS = (
    f"{INPUT_FORM}; batch.mask=bool[8] inside of a dict, pair[0]=float32[8] of a list, pair.0=float32[8] of a tuple; "
    "flag=false for a value that is no tensor"
)
KWARGS_FORM = """a JSON object, for example --kwargs '{"width": 64, "layers": 12}'"""
CONFIG_PREFIX = "hf:"
"""What stands before the path of a transformers config in MODEL."""
_LIMITS = {"int64": 2**63 - 1, "int32": 2**31, "int16": 2**15, "int8": 2**7, "uint8": 2**8}
"""The largest limit of an integer dtype: values lie below it, and one below int64's own is as far as torch draws."""
ROWS_PER_DEVICE = 4
"""The batch of a config's inputs where none is given: enough microbatches of a row to keep a pipeline busy."""
_MOST_SIZE = 2**63 - 1
QUOTES = ('"', "'")
WORDS = {"true": True, "True": True, "false": False, "False": False, "null": None, "None": None}
VALUES = "true, false, null, 0.5, 'text'"
"""What a constant may be, as examples."""


def parse_kwargs(text: str | None) -> dict[str, Any]:
    """Read ``--kwargs``: a JSON object; raises InputError for anything else."""
    try:
        found = json.loads(text) if text is not None else {}
    except json.JSONDecodeError as error:
        raise InputError(
            f"--kwargs cannot be read: {pointed(error.doc, error.pos, error.msg)}\nwrite {KWARGS_FORM}"
        ) from error
    except RecursionError as error:
        raise InputError(f"--kwargs cannot be read: it is nested too deep; write {KWARGS_FORM}") from error
    if not isinstance(found, dict):
        raise InputError(f"--kwargs {text!r} is no object with names; write {KWARGS_FORM}")
    return found


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
class Constant:
    """An input that is no tensor: a bool, a number, a text, or None."""

    value: bool | int | float | str | None

    def __str__(self) -> str:
        if isinstance(self.value, str):
            return in_quotes(self.value)
        return repr(self.value) if type(self.value) in (int, float) else json.dumps(self.value)


@dataclass(frozen=True)
class InputSpec:
    """One ``--input``: its place, and the tensor or the constant that goes there."""

    place: Place
    value: TensorForm | Constant

    def __str__(self) -> str:
        return f"{self.place}={self.value}"

    @classmethod
    def tensor(cls, name: str, dtype: str, shape: tuple[int, ...], limit: int | None = None) -> InputSpec:
        """Return the spec of an argument that is a tensor."""
        return cls(Place(name), TensorForm(dtype, shape, limit))

    @classmethod
    def parse(cls, text: str) -> InputSpec:
        """Read ``x=float32[8,3,32,32]``, ``0=int64[4,128]<50257``, ``batch.mask=bool[8]``, ``flag=false``.

        Raises InputError for anything else.
        """
        return _Reader(text).spec()


class _Reader:
    """Reads one ``--input`` from left to right, and knows the place where that ends."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0

    def spec(self) -> InputSpec:
        """Return what the text says."""
        self.skip()
        name = self.take(f"{WORD}|{POSITION}", "a name or a position is missing, such as x or 0")
        steps: list[Step] = []
        while self.peek() in (".", "["):
            if len(steps) == MOST_STEPS:
                self.fail(f"no place lies deeper than {MOST_STEPS} steps")
            steps.append(self.step())
        self.take("=", "= is missing after the name")
        value = self.value()
        self.skip()
        if self.at < len(self.text):
            self.fail("nothing more may follow")
        return InputSpec(Place(name, tuple(steps)), value)

    def step(self) -> Step:
        """Read ``.mask``, ``.0``, ``[0]`` or ``["a key"]``."""
        if self.take(r"[.\[]", "") == ".":
            key = self.take(f"{WORD}|{POSITION}", "a key or a position is missing behind the dot, such as .mask or .0")
            return Step("tuple", int(key)) if key.isdecimal() else Step("dict", key)
        if self.peek() in QUOTES:
            found = Step("dict", self.quoted())
        else:
            missing = "a position or a key in quotes is missing, such as [0] or ['mask']"
            found = Step("list", int(self.take(POSITION, missing)))
        self.take(r"\]", "] is missing behind a position or a key")
        return found

    def value(self) -> TensorForm | Constant:
        """Read what stands behind the equals sign."""
        if self.peek() in QUOTES:
            return Constant(self.quoted())
        if re.compile(r"[-+.0-9]").match(self.text, self.at):
            return Constant(self.number())
        start = self.at
        word = self.take(r"\w+", f"a dtype is missing, such as float32, or a value: {VALUES}")
        if word in WORDS:
            return Constant(WORDS[word])
        if word not in DTYPES:
            self.fail(f"{word!r} is no dtype here; valid: {', '.join(DTYPES)}; or a value: {VALUES}", at=start)
        self.take(r"\[", "[ is missing before the sizes")
        return TensorForm(word, self.sizes(), self.limit(word))

    def quoted(self) -> str:
        """Read a text and the quotes around it."""
        quote = self.take("[\"']", "")
        text = self.take(f"[^{quote}]*", "")
        self.take(quote, "the closing quote is missing")
        return text

    def number(self) -> int | float:
        """Read a number, an int where it is written as one."""
        start, whole = self.at, r"[-+]?[0-9]{1,30}(?![\w.])"
        if re.compile(whole).match(self.text, start):
            return int(self.take(whole, ""))
        form = r"[-+]?(?:[0-9]{1,30}\.?[0-9]{0,30}|\.[0-9]{1,30})(?:[eE][-+]?[0-9]{1,4})?(?![\w.])"
        found = float(self.take(form, "this is no number, such as 2, -0.5 or 1e-5"))
        if math.isinf(found):
            self.fail("no number is as large", at=start)
        return found

    def sizes(self) -> tuple[int, ...]:
        """Read the sizes up to and with the closing bracket."""
        self.skip()
        found: list[int] = []
        while found or self.peek() != "]":
            start = self.at
            found.append(int(self.take("[0-9]{1,30}", "a size is missing, a number such as 8", spaces=True)))
            if found[-1] > _MOST_SIZE:
                self.fail("no tensor is as large", at=start)
            if self.peek() != ",":
                break
            self.take(",", "", spaces=True)
        self.take(r"\]", ", or ] is missing")
        return tuple(found)

    def limit(self, dtype: str) -> int | None:
        """Read ``<50257`` and the spaces after it, where there is one."""
        self.skip()
        if self.peek() != "<":
            return None
        start = self.at
        self.take("<", "")
        limit = int(self.take("[0-9]{1,30}", "a limit is missing, a number such as 50257", spaces=True))
        if dtype not in _LIMITS:
            self.fail(f"<{limit} is for integers, {dtype} takes no limit", at=start)
        if not 1 <= limit <= _LIMITS[dtype]:
            self.fail(f"the limit of {dtype} is between 1 and {_LIMITS[dtype]}", at=start)
        return limit

    def peek(self) -> str:
        """Return the next character, "" at the end."""
        return self.text[self.at : self.at + 1]

    def skip(self) -> None:
        """Pass over spaces."""
        self.at += len(self.text[self.at :]) - len(self.text[self.at :].lstrip())

    def take(self, form: str, missing: str, *, spaces: bool = False) -> str:
        """Read what has a form, and the spaces after it where these may be; fail where it does not stand there."""
        match = re.compile(form).match(self.text, self.at)
        if match is None:
            self.fail(missing)
        self.at = match.end()
        if spaces:
            self.skip()
        return match[0]

    def fail(self, reason: str, *, at: int | None = None) -> NoReturn:
        """Raise the error that points at a place, the present one where none is given."""
        place = self.at if at is None else at
        raise InputError(f"--input cannot be read: {pointed(self.text, place, reason)}\nwrite {INPUT_FORMS}")


def check_target(target: str) -> None:
    """Raise InputError for a MODEL that names no factory, or a file that is not there or holds no config."""
    if target.startswith(CONFIG_PREFIX):
        read_config(target)
        return
    source, _, name = target.rpartition(":")
    if not source or not name:
        saved = f"; a saved plan is shown by: autosplit report {target}" if is_plan_file(target) else ""
        raise InputError(f"MODEL {target!r} names no factory; write {MODEL_FORM}{saved}")
    if source.endswith(".py") and not Path(source).is_file():
        raise InputError(f"MODEL: there is no file {source!r}; write {MODEL_FORM}")


def wants_labels(asked: bool | None, schedule: str) -> bool | None:
    """Return whether inputs get labels where a training is planned: none under a schedule without a backward."""
    return False if asked is None and schedule == "forward" else asked


def is_plan_file(target: str) -> bool:
    """Tell whether MODEL is the file of a saved plan."""
    return target.endswith(".json") and not target.startswith(CONFIG_PREFIX)


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
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        raise InputError(f"{target} is no JSON, {place}: {pointed(error.doc, error.pos, error.msg)}") from error
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
class ConfigInputs:
    """What is asked of the inputs that a config describes; None: what suits it."""

    batch: int | None = None
    sequence: int | None = None
    labels: bool | None = False
    """Whether they have labels, from which the model makes its loss; None: where it takes them."""

    def given(self) -> str | None:
        """Return the first option that asks for something."""
        asked = {"--batch": self.batch, "--sequence": self.sequence, "--labels": self.labels or None}
        return next((option for option, value in asked.items() if value is not None), None)


@dataclass(frozen=True)
class ModelSpec:
    """What the command line says of a model and its inputs."""

    target: str
    inputs: tuple[InputSpec, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    sizes: ConfigInputs = ConfigInputs()
    seed: int = 0
    train: bool | None = None

    @property
    def is_config(self) -> bool:
        """Tell whether the model comes from a config file, which describes its inputs too."""
        return self.target.startswith(CONFIG_PREFIX)

    @property
    def gives_tensors(self) -> bool:
        """Tell whether the inputs that were given are more than constants beside others."""
        return any(isinstance(spec.value, TensorForm) for spec in self.inputs)

    @classmethod
    def parse(
        cls,
        target: str,
        *,
        inputs: Sequence[str] | None,
        kwargs: str | None,
        sizes: ConfigInputs,
        seed: int,
        train: bool | None = None,
    ) -> ModelSpec:
        """Read the texts of the options; raises InputError for what cannot be read or does not go together."""
        specs = tuple(InputSpec.parse(text) for text in inputs or ())
        found, given = cls(target, specs, parse_kwargs(kwargs), sizes, seed, train), sizes.given()
        nested([(each.place, each.value) for each in specs])
        if given is not None and (found.gives_tensors or not found.is_config):
            reason = "--input gives the sizes" if found.gives_tensors else f"{target} is none; give --input"
            raise InputError(f"{given} is for the inputs that an {CONFIG_PREFIX} config describes; {reason}")
        check_target(target)
        return found
