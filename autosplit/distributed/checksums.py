"""Checksums of a checkpoint's bytes, beside them: what a disk or a copy has damaged is not restored.

{".metadata": {"0": 2774539106},                  the whole table
 "__0_0.distcp": {"0": 310923, "1388": ...}}      each value that the table says lies there, by its first byte
"""

from __future__ import annotations

import hashlib
import json
import pickle
import zlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from autosplit.distributed.facts import checksum
from autosplit.distributed.together import sync
from autosplit.errors import CheckpointError
from autosplit.files import write_text

_FILE, _TABLE, _READ_BYTES = "checksums.json", ".metadata", 1 << 18
Checksums = dict[str, dict[int, int]]
"""Checksums by file and offset."""


def checksums_of(folder: Path, results: Sequence[WriteResult]) -> Checksums:
    """Return the checksums of what a rank has written."""
    checksums: Checksums = defaultdict(dict)
    for entry in (result.storage_data for result in results):
        number = _checksum(folder / entry.relative_path, entry.offset, entry.length)
        checksums[entry.relative_path][entry.offset] = number
    return dict(checksums)


def write_checksums(folder: Path, every: Sequence[Checksums]) -> None:
    """Write the checksums of all ranks, and that of the table, to the disk."""
    rows = {name: row for table in every for name, row in table.items()}
    rows[_TABLE] = {0: _checksum(folder / _TABLE, 0, (folder / _TABLE).stat().st_size)}
    write_text(folder / _FILE, json.dumps(rows))
    sync(folder / _FILE)


class CheckedReader(FileSystemReader):
    """Reads a folder of torch.distributed.checkpoint, and verifies checksums if the folder has them.

    Raises CheckpointError for bytes that differ from those that were written.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._folder, path = folder, folder / _FILE
        self._checksums = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the table of what is in which file."""
        self._check(_TABLE, 0, (self._folder / _TABLE).stat().st_size)
        return super().read_metadata(*args, **kwargs)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what a plan asks for."""
        for index in {item.storage_index for item in plan.items}:
            entry = self.storage_data[index]
            self._check(entry.relative_path, entry.offset, entry.length)
        return super().read_data(plan, planner)

    def _check(self, name: str, offset: int, length: int) -> None:
        if self._checksums is None:
            return
        if self._checksums.get(name, {}).get(str(offset)) != _checksum(self._folder / name, offset, length):
            raise CheckpointError(
                f"{self._folder / name} is damaged: {length} bytes from byte {offset} on have not the checksum with "
                "which they were saved; restore another step, or another copy of this one"
            )


def digest_of(value: Any) -> bytes:
    """Return a digest of a value: equal for equal values, however they came to be."""
    if isinstance(value, torch.Tensor):
        data = f"{value.dtype}{list(value.shape)}{checksum([value], devices=True)}".encode()
    elif isinstance(value, Mapping):
        data = b"".join(sorted(digest_of(key) + digest_of(entry) for key, entry in value.items()))
    elif isinstance(value, list | tuple):
        data = b"".join(map(digest_of, value))
    else:
        data = pickle.dumps(value)
    return hashlib.sha256(type(value).__name__.encode() + data).digest()


def _checksum(path: Path, offset: int, length: int) -> int:
    crc = 0
    with path.open("rb") as file:
        file.seek(offset)
        while length > 0 and (data := file.read(min(length, _READ_BYTES))):
            crc, length = zlib.crc32(data, crc), length - len(data)
    return crc
