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
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from autosplit.trace.borrowed.contents import Place
from autosplit.trace.inputs.objects import is_computed
from autosplit.trace.recording.recording import is_foreign

BACKWARD = ("a backward",)
"""Stands for what is called in a backward: hooks, and functions of the model's own, which no recording holds."""


@contextlib.contextmanager
def touched(model: nn.Module) -> Iterator[Mapping[tuple[str, ...], set[Place]]]:
    """Yield the places where attributes of the model's modules are read or set inside, by who does so.

    That is the paths of the modules that are being called, the outermost first, or `BACKWARD`. The place (path, "") is
    all attributes of a module: code that asks for its ``__dict__`` may go through them.
    """
    paths = {id(module): path for path, module in model.named_modules()}
    yielded: dict[tuple[str, ...], set[Place]] = {}
    read, write, delete = nn.Module.__getattribute__, nn.Module.__setattr__, nn.Module.__delattr__
    call, calling, thread = nn.Module.__call__, tuple[str, ...](), threading.get_ident()
    by_caller: defaultdict[tuple[str, ...], set[tuple[int, str]]] = defaultdict(set)
    computed: set[tuple[int, str]] = set()
    """What a hook computed before anybody read it."""
    here, behind, going_back = by_caller[calling], by_caller[BACKWARD], torch._C._current_graph_task_id

    def note(module: nn.Module, name: str) -> None:  # it runs for every attribute that anybody reads
        (here if going_back() < 0 else behind).add((id(module), name))

    def call_module(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        nonlocal calling, here
        if threading.get_ident() != thread:
            return call(module, *args, **kwargs)
        before, calling = calling, (*calling, paths.get(id(module), ""))
        here = by_caller[calling]
        try:
            return call(module, *args, **kwargs)
        finally:
            calling, here = before, by_caller[before]

    def get(module: nn.Module, name: str) -> Any:
        if name == "__dict__" or name == "__getstate__":
            if name == "__getstate__" or not _looks_up(sys._getframe(1).f_code.co_filename):
                note(module, "")
        else:
            (here if going_back() < 0 else behind).add((id(module), name))
        return read(module, name)

    def set_(module: nn.Module, name: str, value: Any) -> None:
        key = id(module), name
        if is_computed(module, name, value) and not any(key in places for places in by_caller.values()):
            computed.add(key)
        note(module, name)
        write(module, name, value)

    def delete_(module: nn.Module, name: str) -> None:
        note(module, name)
        delete(module, name)

    with (
        patch.object(nn.Module, "__call__", call_module),
        patch.object(nn.Module, "__getattribute__", get),
        patch.object(nn.Module, "__setattr__", set_),
        patch.object(nn.Module, "__delattr__", delete_),
    ):
        for module in model.modules():
            getter: Any = type(module).__getattribute__
            if getter is not get:  # it may ask ``object`` itself
                by_caller[()].add((id(module), ""))
        try:
            yield yielded
        finally:
            for by, places in by_caller.items():
                yielded[by] = {(paths[key], name) for key, name in places - computed if key in paths}


def _looks_up(file: str) -> bool:
    """Tell whether code that asks for a module's ``__dict__`` looks up single names in it, as torch's does.

    Code without a file may be the user's own: from a notebook, or from standard input.
    """
    return is_foreign(file) and not file.startswith("<")
