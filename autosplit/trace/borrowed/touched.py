"""Which attributes of its modules a model reads or sets while it runs.

What a forward does not touch cannot change what it computes, so it is no part of a call's signature: the trainer that a
module holds, which counts its steps, or a list of losses that a training step fills.

The watch sees reads and writes by name, those that find nothing too, and ``vars(module)``. What the forward reaches in
another way, by a closure or a helper, say, is outside of the modules, also where a module has it too. A weight that a
hook computes anew before the forward reads it does not count.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

from torch import nn

from autosplit.trace.borrowed.holders import Place
from autosplit.trace.inputs.objects import is_computed
from autosplit.trace.recording.recording import is_foreign


@contextlib.contextmanager
def touched(model: nn.Module) -> Iterator[set[Place]]:
    """Yield a set of the places where attributes of the model's modules are read or set inside.

    The place (path, "") is all attributes of a module: code that asks for its ``__dict__`` may go through them.
    """
    paths = {id(module): path for path, module in model.named_modules()}
    read, write, delete = nn.Module.__getattribute__, nn.Module.__setattr__, nn.Module.__delattr__
    found: set[Place] = set()
    made: set[tuple[int, str]] = set()
    """What a hook computed before anybody read it."""

    def note(module: nn.Module, name: str) -> None:
        if (path := paths.get(id(module))) is not None and (id(module), name) not in made:
            found.add((path, name))

    def get(module: nn.Module, name: str) -> Any:
        if name == "__getstate__" or (name == "__dict__" and not _looks_up(sys._getframe(1).f_code.co_filename)):
            note(module, "")
        elif name != "__dict__":
            note(module, name)
        return read(module, name)

    def set_(module: nn.Module, name: str, value: Any) -> None:
        if is_computed(module, name, value) and (paths.get(id(module)), name) not in found:
            made.add((id(module), name))
        note(module, name)
        write(module, name, value)

    def delete_(module: nn.Module, name: str) -> None:
        note(module, name)
        delete(module, name)

    with (
        patch.object(nn.Module, "__getattribute__", get),
        patch.object(nn.Module, "__setattr__", set_),
        patch.object(nn.Module, "__delattr__", delete_),
    ):
        for path, module in model.named_modules():
            own: Any = type(module).__getattribute__
            if own is not get:  # it may ask ``object`` itself
                found.add((path, ""))
        yield found


def _looks_up(file: str) -> bool:
    """Tell whether code that asks for a module's ``__dict__`` looks up single names in it, as torch's does.

    Code without a file may be the user's own: from a notebook, or from standard input.
    """
    return is_foreign(file) and not file.startswith("<")
