"""What ranks tell each other, as bytes of one size and as texts that show in what they differ."""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Mapping
from typing import Any

import torch

from autosplit.errors import AutosplitError

BLOCK = 1024
"""Bytes of one rank's value in the first collective, its length among them."""
HEAD = 8
_SHOWN = 300
"""How many characters of a value that differs are shown."""


def packed(value: Any) -> bytes:
    """Return a value as bytes, their number first."""
    data = pickle.dumps(value)
    return len(data).to_bytes(HEAD, "little") + data


def unpacked(text: bytes) -> Any:
    """Return a value from its bytes."""
    return pickle.loads(text[HEAD : end(text)])


def end(text: bytes) -> int:
    """Return where a packed value ends."""
    return HEAD + int.from_bytes(text[:HEAD], "little")


def block(text: bytes, size: int) -> torch.Tensor:
    """Return bytes as a tensor of a size, zeros behind them."""
    return torch.frombuffer(bytearray(text.ljust(size, b"\0")), dtype=torch.uint8)


def first_difference(rows: list[tuple[int, dict[str, int]]]) -> tuple[str, int, int] | None:
    """Return a fact in which a rank differs from the first one that has it, and these two."""
    for name in dict.fromkeys(name for _, facts in rows for name in facts):
        (first, expected), *others = [(number, facts[name]) for number, facts in rows if name in facts]
        other = next((number for number, fact in others if fact != expected), None)
        if other is not None:
            return name, first, other
    return None


def digest(fact: Any) -> int:
    """Return a number for a fact, the same in every process; an int stands for itself."""
    return fact if isinstance(fact, int) else zlib.crc32(text(fact).encode())


def text(fact: Any) -> str:
    """Return a fact as messages show it."""
    return fact if isinstance(fact, str) else repr(fact)


def digests(facts: Mapping[str, Any]) -> dict[str, int]:
    """Return numbers for facts, by name."""
    return {name: digest(fact) for name, fact in facts.items()}


def difference(name: str, first: tuple[int, str], other: tuple[int, str]) -> str:
    """Return in which line the texts of two ranks differ first."""
    here, two = first[1].splitlines(), other[1].splitlines()
    index = next((n for n, (a, b) in enumerate(zip(here, two, strict=False)) if a != b), min(len(here), len(two)))
    left, right = (lines[index][:_SHOWN] if index < len(lines) else "nothing" for lines in (here, two))
    return f"the ranks differ in {name}: rank {first[0]} has {left}, rank {other[0]} has {right}"


def portable(error: BaseException | None) -> BaseException | None:
    """Return an error that another process can read."""
    if error is None:
        return None
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        public = next((kind for kind in type(error).__mro__ if kind.__module__ == AutosplitError.__module__), None)
        return public(str(error)) if public is not None else RuntimeError(f"{type(error).__name__}: {error}")
    return error
