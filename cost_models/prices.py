"""What devices cost per hour, on demand, by published lists; each with its source and the day on which it was read.

They are of different shops and change: a plan says which one it took, and takes any other.
"""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter


class ListPrice(BaseModel):
    """One device for an hour, in US dollars without taxes, with its part of the host."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    usd_per_hour: float = Field(gt=0)
    source: str = Field(min_length=1)
    read_on: str = Field(pattern=r"^\d{4}-\d\d-\d\d$")

    def __str__(self) -> str:
        return f"${self.usd_per_hour:.2f} ({self.source}, {self.read_on})"


@cache
def list_prices() -> dict[str, ListPrice]:
    """Return the prices that are known, by the device's name."""
    text = (files("cost_models") / "data" / "prices.json").read_bytes()
    return TypeAdapter(dict[str, ListPrice]).validate_python(json.loads(text))
