"""Measured times on disk, so that a model that did not change is measured once per device.

    <folder>/3f2a….json      one file per key: what the times depend on, and the times, to be read by people too

A file is written under another name and renamed when it is whole: whoever reads sees all of it or nothing, also when a
writer is killed or several write at once. What cannot be read is measured anew and written again.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from pydantic import BaseModel, ConfigDict, NonNegativeFloat, NonNegativeInt, PositiveInt, ValidationError

from autosplit.profile.identity import device_text, modes, recording_hash, tensor_text
from autosplit.profile.times import MeasuredNode, MeasuredTimes
from autosplit.trace.graph import TracedGraph

VERSION = 1
_PART = ".part"
_STALE_S = 3600.0
"""How old a file is that a killed writer left: nobody takes so long to write one."""


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class ProfileKey(_Record):
    """What measured times depend on: where one of these differs, there is another measurement.

    Attributes:
        modules: the model's children, for people.
        recording: hash of the recording: nodes, targets, arguments, sizes, modules' settings, parameters, own code.
        device: the device, and which piece of hardware it is.
        rows: batch rows of the microbatch.
        inputs: the input tensors' kinds.
        threads: intra-op threads of the CPU.
        count_bytes: whether a CPU's bytes were counted.
        modes: autocast and the backends' switches.
        versions: of torch, autosplit and Python.
    """

    modules: tuple[str, ...]
    recording: str
    device: str
    rows: int
    inputs: tuple[str, ...]
    threads: int
    count_bytes: bool
    modes: dict[str, str]
    versions: dict[str, str]

    @property
    def file_name(self) -> str:
        """The name of the key's file: a hash of everything."""
        return f"{hashlib.sha256(self.model_dump_json().encode()).hexdigest()[:32]}.json"


class _Group(_Record):
    """Nodes that do the same work share their samples."""

    nodes: tuple[str, ...]
    forward_s: NonNegativeFloat
    backward_s: NonNegativeFloat
    forward_range_s: tuple[NonNegativeFloat, NonNegativeFloat]
    backward_range_s: tuple[NonNegativeFloat, NonNegativeFloat]
    samples: PositiveInt
    forward_peak_bytes: NonNegativeInt | None
    backward_peak_bytes: NonNegativeInt | None


class _Entry(_Record):
    version: int
    written: str
    key: ProfileKey
    device: str
    groups: tuple[_Group, ...]


def profile_key(
    traced: TracedGraph,
    *,
    inputs: Sequence[torch.Tensor],
    rows: int,
    threads: int = 1,
    count_bytes: bool = False,
) -> ProfileKey:
    """Return the key of a measurement that `measure` would make with the same arguments, here and now."""
    tensors = (*inputs, *traced.root.parameters(), *traced.root.buffers())
    device = next((tensor.device for tensor in tensors if tensor.device.type != "cpu"), torch.device("cpu"))
    return ProfileKey(
        modules=tuple(name for name, _ in traced.root.named_children()),
        recording=recording_hash(traced, rows=rows),
        device=f"{device}: {device_text(device)}",
        rows=rows,
        inputs=tuple(tensor_text(tensor) for tensor in inputs),
        threads=threads,
        count_bytes=count_bytes,
        modes=modes(),
        versions={"torch": str(torch.__version__), "autosplit": _own_version(), "python": platform.python_version()},
    )


class ProfileCache:
    """Measured times by key, in a folder.

    A folder that cannot be written is no error: there is a warning, and everything is measured.
    """

    def __init__(self, folder: str | Path | None = None, *, entries: int = 200) -> None:
        """Use ``folder`` (None: the platform's own place for caches); keep the newest ``entries`` files."""
        self.folder = default_folder() if folder is None else Path(folder)
        self.entries = entries
        self.hits = 0
        """How often times were found on disk."""

    def times(self, key: ProfileKey, measure: Callable[[], MeasuredTimes]) -> MeasuredTimes:
        """Return the times of ``key``: those on disk, else what ``measure`` returns, kept for the next time.

        What memory ran out for is not kept: there may be more of it the next time.
        """
        found = self.load(key)
        if found is not None:
            self.hits += 1
            return found
        found = measure()
        if found.nodes and not found.out_of_memory:
            self.store(key, found)
        return found

    def load(self, key: ProfileKey) -> MeasuredTimes | None:
        """Return the times on disk, or None; warns of a file that is broken or not this cache's."""
        path = self.folder / key.file_name
        try:
            return _read(path, key)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            warnings.warn(f"{str(path)!r} is of no use ({_reason(error)}): measuring again", UserWarning, stacklevel=2)
            return None

    def store(self, key: ProfileKey, times: MeasuredTimes) -> None:
        """Write the times of ``key``, whole or not at all; warns where that is not possible."""
        groups: dict[MeasuredNode, list[str]] = {}
        for name, node in times.nodes.items():
            groups.setdefault(node, []).append(name)
        entry = _Entry(
            version=VERSION,
            written=datetime.now(UTC).isoformat(timespec="seconds"),
            key=key,
            device=times.device,
            groups=tuple(_Group(nodes=tuple(names), **vars(node)) for node, names in groups.items()),
        )
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            _write(self.folder / key.file_name, entry.model_dump_json(indent=1).encode() + b"\n")
            self._trim()
        except OSError as error:
            warnings.warn(
                f"measured times cannot be kept in {str(self.folder)!r}: {error.strerror}; they are measured again the "
                "next time, or give another folder",
                UserWarning,
                stacklevel=2,
            )

    def _trim(self) -> None:
        """Remove all but the newest entries, and what killed writers left."""
        ages: dict[Path, float] = {}
        for path in self.folder.iterdir():
            with contextlib.suppress(FileNotFoundError):
                ages[path] = path.stat().st_mtime
        whole = sorted((path for path in ages if path.suffix == ".json"), key=lambda path: ages[path], reverse=True)
        left = [path for path in ages if path.suffix == _PART and time.time() - ages[path] > _STALE_S]
        for path in (*whole[self.entries :], *left):
            path.unlink(missing_ok=True)


def default_folder() -> Path:
    """Return the platform's own place for what a user's programs may lose: ``~/.cache/autosplit/profiles`` on Linux."""
    home = Path.home()
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or home / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = home / "Library" / "Caches"
    else:
        given = Path(os.environ.get("XDG_CACHE_HOME", ""))
        base = given if given.is_absolute() else home / ".cache"  # a relative one is to be ignored, says the standard
    return base / "autosplit" / "profiles"


def _write(path: Path, content: bytes) -> None:
    """Write a file so that its name never stands for a part of it."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}-", suffix=_PART)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _read(path: Path, key: ProfileKey) -> MeasuredTimes:
    entry = _Entry.model_validate_json(path.read_bytes())
    if entry.version != VERSION or entry.key != key:
        raise ValueError("it is another version's, or another measurement's")
    nodes: dict[str, MeasuredNode] = {}
    for group in entry.groups:
        node = MeasuredNode(**{field: value for field, value in group if field != "nodes"})
        nodes |= dict.fromkeys(group.nodes, node)
    return MeasuredTimes(nodes, entry.device)


def _reason(error: OSError | ValueError) -> str:
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        return f"{'.'.join(map(str, first['loc'])) or 'the file'}: {first['msg']}"
    return str(error.strerror if isinstance(error, OSError) else error)


def _own_version() -> str:
    try:
        return version("autosplit")
    except PackageNotFoundError:
        return "unknown"
