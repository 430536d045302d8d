"""What all processes do together: what one raises, all raise; what they write appears as a whole or not at all."""

from __future__ import annotations

import os
import secrets
import shutil
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from autosplit.distributed.ends import is_lost_connection, machine
from autosplit.distributed.join import meet
from autosplit.errors import AutosplitError, CheckpointError, DeviceError, InputError, listed

T = TypeVar("T")
Shape = tuple[int, ...] | None
"""A tensor's shape; None for what is no tensor."""


class Ranks:
    """The processes that save or load together, in a group of their own; a process alone is rank 0 of 1."""

    def __init__(self, doing: str, what: object = "") -> None:
        """``what`` the ranks save or load is named in the error when one of them ends."""
        self._world, self._doing = meet(doing), f"{doing} {what}".strip()
        several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        self._group = dist.new_group(backend="gloo") if several else None
        self.rank, self._size = (dist.get_rank(), dist.get_world_size()) if several else (0, 1)

    def __enter__(self) -> Ranks:
        if self._world is not None:
            self._world.watch.doing(f"a call that {self._doing}")
        return self

    def __exit__(self, *error: object) -> None:
        if self._world is not None:
            self._world.watch.doing(None)
        if self._group is not None:
            dist.destroy_process_group(self._group)

    def run(self, make: Callable[[], T]) -> list[T]:
        """Return what a function returns on every rank, by rank; raise on every rank what it raises on one."""
        value: T | None = None
        error: AutosplitError | None = None
        try:
            value = make()
        except AutosplitError as raised:
            error = raised
        except Exception as raised:
            error = CheckpointError(f"rank {self.rank}: {type(raised).__name__}: {raised}")
            error.__cause__ = raised
        rows: list[Any] = [(value, error)] * self._size
        if self._group is not None:
            try:
                dist.all_gather_object(rows, (value, error), group=self._group)
            except RuntimeError as raised:
                if not is_lost_connection(raised):
                    raise
                cause = raised if self._world is None else self._world.watch.explain(raised)
                text = f"rank {self.rank} {self._doing}, and another rank has ended meanwhile: {cause}"
                raise DeviceError(text) from raised
        rows[self.rank] = value, error  # with its traceback
        for rank, (_, other) in enumerate(rows):
            if other is not None:
                if rank != self.rank:
                    other.add_note(f"raised on rank {rank}")
                raise other
        return [value for value, _ in rows]

    def check_same(self, what: str, value: Any) -> None:
        """Raise InputError where a value differs between ranks."""
        first, *rest = self.run(lambda: value)
        for rank, other in enumerate(rest, 1):
            if other != first:
                raise InputError(f"{what} is {first} on rank 0 and {other} on rank {rank}; it has to be the same")


def check_fits(what: str, rows: Sequence[Mapping[str, Shape]], saved: Mapping[str, Shape]) -> None:
    """Raise InputError with the first name in which the ranks' parts of a model differ from one that was saved."""
    here = {name: shape for row in rows for name, shape in row.items()}
    only_there = [name for name in saved if name not in here]
    for name, shape in here.items():
        if name not in saved:
            text = f"it has no {name!r}, of shape {_text(shape)} here; only it has {listed(only_there)}"
        elif saved[name] != shape:
            text = f"{name!r} has shape {_text(shape)} here and {_text(saved[name])} there"
        else:
            continue
        raise InputError(f"{what} is of another model: {text}")
    for name in only_there[:1]:
        text = f"it has {name!r}, of shape {_text(saved[name])}, which is not in the model here"
        raise InputError(f"{what} is of another model: {text} (nor {listed(only_there[1:])})")


def _text(shape: Shape) -> str:
    return "no tensor" if shape is None else str(tuple(shape))


def new_folder(path: Path) -> str:
    """Make the folder to write in before it is renamed to ``path``; return its name: no other process writes there.

    What a process of this machine has left there that runs no more is removed; another job may write the others.
    """
    if path.exists():
        raise InputError(f"{path} exists and is not overwritten; save under another name, or delete it first")
    stem = f"{path.name}.{zlib.crc32(machine().encode()):08x}"
    for left in path.parent.glob(f"{stem}-*-*.tmp"):
        if not _runs(left.name.removeprefix(f"{stem}-").partition("-")[0]):
            shutil.rmtree(left, ignore_errors=True)
    temporary = path.with_name(f"{stem}-{os.getpid()}-{secrets.token_hex(4)}.tmp")
    temporary.mkdir(parents=True)
    return temporary.name


def _runs(number: str) -> bool:
    """Tell whether a process of this machine may run: what it has left is not removed."""
    try:
        os.kill(int(number), 0)
    except ProcessLookupError:
        return False
    except (OSError, ValueError):
        pass
    return True


def check_shared(folder: Path) -> None:
    """Raise InputError where a folder that rank 0 made is not there."""
    if not folder.is_dir():
        raise InputError(f"rank 0 made {folder}, which is not on every rank; save to a disk that all ranks share")


def complete(folder: Path, path: Path) -> None:
    """Rename a folder whose files are on the disk."""
    sync(folder)
    folder.rename(path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Bring a file, or the names in a folder, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
