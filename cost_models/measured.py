"""Times that were measured, in front of another model for everything that was not."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, PositiveFloat, TypeAdapter, ValidationError

from cost_models.specs import describe
from cost_models.work import CostModel, OpWork


class _Entry(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, defer_build=True)

    work: OpWork
    seconds: PositiveFloat


@dataclass(frozen=True)
class Measured:
    """A table of measured seconds by work; ``fallback`` answers for work that is not in the table."""

    table: Mapping[OpWork, float]
    fallback: CostModel

    def __post_init__(self) -> None:
        for work, seconds in self.table.items():
            if not (math.isfinite(seconds) and seconds > 0):
                raise ValueError(f"{work} took {seconds} s; a measured time is finite and above zero")

    def seconds(self, work: OpWork) -> float:
        """Return the measured time of ``work``, or what the fallback says."""
        measured = self.table.get(work)
        return self.fallback.seconds(work) if measured is None else measured

    def save(self, path: str | Path) -> None:
        """Write the table as JSON, without the fallback."""
        entries = [_Entry(work=work, seconds=seconds) for work, seconds in self.table.items()]
        Path(path).write_bytes(TypeAdapter(list[_Entry]).dump_json(entries, indent=2) + b"\n")

    @classmethod
    def load(cls, path: str | Path, *, fallback: CostModel) -> Measured:
        """Read a table that ``save`` wrote; raises ValueError when the file cannot be read or is no such table."""
        adapter = TypeAdapter(list[_Entry])
        try:
            entries = adapter.validate_json(Path(path).read_bytes())
        except OSError as error:
            raise ValueError(f"cannot read the file {str(path)!r}: {error.strerror}") from error
        except ValidationError as error:
            raise ValueError(f"{str(path)!r} is no table of measured times: {describe(error)}") from error
        return cls(table={entry.work: entry.seconds for entry in entries}, fallback=fallback)
