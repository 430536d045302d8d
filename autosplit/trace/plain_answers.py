"""A recording does not look like tracing: a library's Python takes the path that it takes in a plain call.

transformers asks, among other things, ``isinstance(x, torch._subclasses.FakeTensor)`` before it decides on a mask: for
a fake tensor it makes the mask that a tracer can follow, which costs attention its ``is_causal`` and with it its fast
kernels. A recording follows a read of a mask's values by itself, as a guard. So the class of that name says no while a
recording runs, to all code but torch's own. torch's flags for compiling and exporting stay off.

``torch._subclasses`` is private; nothing public says "run as always, on fake tensors". Tried with torch 2.13 and
transformers 5.23, whose questions are ``is_tracing`` and ``is_torchdynamo_compiling`` in ``utils/import_utils.py``.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensor

_TORCH = str(Path(torch.__file__).parent)


class _OfTorchOnly(type(FakeTensor)):  # type: ignore[misc]
    """Answers ``isinstance`` with the truth to torch's own code, with no to any other."""

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, FakeTensor) and sys._getframe(1).f_code.co_filename.startswith(_TORCH)

    def __subclasscheck__(cls, kind: type) -> bool:
        return issubclass(kind, FakeTensor) and sys._getframe(1).f_code.co_filename.startswith(_TORCH)


class _Unseen(FakeTensor, metaclass=_OfTorchOnly):
    """Stands under the name of FakeTensor."""


def as_in_a_plain_call() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which fake tensors are not seen to be fake from outside of torch."""
    return patch.object(torch._subclasses, "FakeTensor", _Unseen)
