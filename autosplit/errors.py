"""The errors that autosplit raises: each message gives the fact, the numbers and the way out."""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

OWN = str(Path(__file__).parent) + os.sep
"""What the names of autosplit's own files begin with."""
_LISTED = 3
"""How many entries of a list a message names."""
_KNOWN = "known to all ranks"


class AutosplitError(Exception):
    """Base of every error that autosplit raises on purpose."""


class TraceError(AutosplitError):
    """The model's forward could not be recorded as a graph that is right at every batch size."""


class ProfileError(AutosplitError):
    """The cost of a node could not be determined."""


class InfeasibleError(AutosplitError):
    """No partition satisfies the limits that were given.

    ``smallest_bytes`` is the smallest limit per device that was found to be met, None where memory is not what binds.
    """

    def __init__(self, message: str, *, smallest_bytes: int | None = None) -> None:
        super().__init__(message)
        self.smallest_bytes = smallest_bytes


class PlanError(AutosplitError):
    """A plan cannot be read, or belongs to another model."""


class ScheduleError(AutosplitError):
    """A list of actions is not a legal schedule.

    ``cells`` are lane and position of those that its grid marks.
    """

    def __init__(self, message: str, *, cells: tuple[tuple[int, int], ...] = ()) -> None:
        super().__init__(message)
        self.cells = cells


class CheckpointError(AutosplitError):
    """The files of a checkpoint cannot be written or read."""


class DeviceError(AutosplitError):
    """A device does not exist or cannot be used."""


class InputError(AutosplitError, ValueError):
    """An argument or a batch of inputs cannot be used."""


def as_known(error: BaseException) -> BaseException:
    """Return an error that every rank raises at once."""
    error.__dict__[_KNOWN] = True
    return error


def known_to_all(error: BaseException) -> bool:
    """Tell whether an error was raised on every rank at once."""
    return bool(error.__dict__.get(_KNOWN))


def listed(entries: Iterable[Any], *, most: int = _LISTED) -> str:
    """Return the first entries as text, and how many more there are."""
    texts = [str(entry) for entry in entries]
    more = len(texts) - most
    return (", ".join(texts[:most]) or "none") + (f" and {more} more" if more > 0 else "")


def is_internal(error: Exception) -> bool:
    """Tell whether an exception is a fault of autosplit's own code, which must not be taken for the model's or torch's.

    What torch's C++ raises has no frame of its own, but is a RuntimeError.
    """
    if isinstance(error, (AutosplitError, RuntimeError)):
        return False
    frames = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(frames) and frames[-1].startswith(OWN)


class ForeignSuppressed(AbstractContextManager[None, bool]):
    """Suppresses exceptions of the model's own code or torch's; a fault of autosplit's own code passes."""

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> bool:
        return isinstance(error, Exception) and not is_internal(error)
