"""Scratch that the kernels of a device were seen to hold beside their results: a dated file per device.

A file that ships lies in ``cost_models/workspaces/<device>.json``; a user's own is given by its path. None ships yet:
nobody measured a GPU for this package.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path

from pydantic import NonNegativeInt, ValidationError

from cost_models.calibration import Stamp
from cost_models.specs import Record, describe

_NAME = re.compile(r"[\w.-]+")


class _File(Record):
    stamp: Stamp
    kept_bytes: NonNegativeInt
    operations: dict[str, NonNegativeInt]


@dataclass(frozen=True, eq=False)
class Workspaces:
    """What was observed of one device's kernels; equal only to itself, so that it can be part of a key.

    Attributes:
        stamp: the device, the day, and the versions of the libraries and their settings: another cuDNN chooses
            other kernels.
        operations: bytes of scratch by operation: its name, and the dtypes and shapes of all that it is given.
        kept_bytes: the most that one operation left behind beside its results: what cuBLAS keeps per handle.
    """

    stamp: Stamp
    operations: Mapping[str, int] = field(default_factory=dict)
    kept_bytes: int = 0

    def joined(self, other: Workspaces) -> Workspaces:
        """Return both, the larger where they differ, with the other's stamp; raises ValueError for another device."""
        if other.stamp.device != self.stamp.device:
            raise ValueError(
                f"these were observed on {self.stamp.device} and on {other.stamp.device}; keep a file per device"
            )
        both = dict(self.operations)
        for operation, count in other.operations.items():
            both[operation] = max(count, both.get(operation, 0))
        return Workspaces(other.stamp, both, max(self.kept_bytes, other.kept_bytes))

    def save(self, path: str | Path) -> None:
        """Write them as JSON; missing folders are made."""
        content = _File(stamp=self.stamp, kept_bytes=self.kept_bytes, operations=dict(sorted(self.operations.items())))
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        written = target.with_name(f"{target.name}.part")
        written.write_text(content.model_dump_json(indent=1) + "\n", encoding="utf-8")
        written.replace(target)

    @classmethod
    def load(cls, path: str | Path) -> Workspaces:
        """Read what ``save`` wrote; raises ValueError where the file cannot be read or holds something else."""
        try:
            return _read(Path(path).read_bytes(), where=str(path))
        except OSError as error:
            raise ValueError(f"cannot read the file {str(path)!r}: {error.strerror}") from error


@cache
def workspaces_of(device: str) -> Workspaces | None:
    """Return what ships of a device, by its name in ``cost_models``; None where nobody observed it."""
    if not _NAME.fullmatch(device):
        return None
    entry = files("cost_models") / "workspaces" / f"{device}.json"
    return _read(entry.read_bytes(), where=f"{device}.json") if entry.is_file() else None


def _read(content: bytes, *, where: str) -> Workspaces:
    try:
        found = _File.model_validate_json(content)
    except ValidationError as error:
        raise ValueError(f"{where!r} holds no observed workspaces: {describe(error)}") from error
    return Workspaces(found.stamp, found.operations, found.kept_bytes)
