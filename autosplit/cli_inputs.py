"""``--input`` and ``--kwargs`` as text, with a caret under the place where one cannot be read."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from autosplit.cli_common import MODEL_FORM
from autosplit.errors import InputError

DTYPES = "float32 float64 float16 bfloat16 complex64 complex128 bool int64 int32 int16 int8 uint8".split()
INPUT_FORM = "NAME=dtype[shape], for example x=float32[8,3,32,32] or input_ids=int64[4,128]<50257"
KWARGS_FORM = """a JSON object, for example --kwargs '{"width": 64, "layers": 12}'"""
CONFIG_PREFIX = "hf:"
"""What stands before the path of a transformers config in MODEL."""
_LIMITS = {"int64": 2**63 - 1, "int32": 2**31, "int16": 2**15, "int8": 2**7, "uint8": 2**8}
"""The largest limit of an integer dtype: values lie below it, and one below int64's own is as far as torch draws."""
ROWS_PER_DEVICE = 4
"""The batch of a config's inputs where none is given: enough microbatches of a row to keep a pipeline busy."""
_MOST_SIZE = 2**63 - 1
_SHOWN = 60
"""How many characters stand on either side of a caret."""


def pointed(text: str, at: int, reason: str) -> str:
    """Return a reason, and below it the line of ``text`` with a caret under the character ``at``."""
    start = text.rfind("\n", 0, at) + 1
    end = text.find("\n", at)
    line = text[start : len(text) if end < 0 else end]
    first = max(0, at - start - _SHOWN)
    before, after = line[first : at - start], line[at - start : at - start + _SHOWN]
    lead = "..." if first else ""
    return f"{reason}\n  {lead}{_shown(before)}{_shown(after)}\n  {' ' * (len(lead) + _width(before))}^"


def _shown(text: str) -> str:
    """Return text in which a terminal obeys nothing, as wide as `_width` says."""
    return "".join(char if char.isprintable() else "?" for char in text)


def _width(text: str) -> int:
    """Return the columns that text takes: wide characters take two, combining ones none."""
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


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
        return _Reader(text).spec()


class _Reader:
    """Reads one ``--input`` from left to right, and knows the place where that ends."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0

    def spec(self) -> InputSpec:
        """Return what the text says."""
        self.skip()
        name = self.take(r"[^\W\d]\w*|0(?![0-9])|[1-9][0-9]*", "a name or a position is missing, such as x or 0")
        self.take("=", "= is missing after the name")
        start = self.at
        dtype = self.take(r"\w+", "a dtype is missing, such as float32")
        if dtype not in DTYPES:
            self.fail(f"{dtype!r} is no dtype here; valid: {', '.join(DTYPES)}", at=start)
        self.take(r"\[", "[ is missing before the sizes")
        shape = self.sizes()
        limit = self.limit(dtype)
        if self.at < len(self.text):
            self.fail("nothing more may follow")
        return InputSpec(name, dtype, shape, limit)

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
        raise InputError(f"--input cannot be read: {pointed(self.text, place, reason)}\nwrite {INPUT_FORM}")


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
        data = json.loads(path.read_text(encoding="utf-8"))
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
        if given is not None and (found.inputs or not found.is_config):
            reason = "--input gives the sizes" if found.inputs else f"{target} is none; give --input"
            raise InputError(f"{given} is for the inputs that an {CONFIG_PREFIX} config describes; {reason}")
        check_target(target)
        return found
