"""What a CUDA device's caching allocator does while something runs, recorded for `replay_history`.

    with Recorder(torch.device("cuda")) as recorder:
        step()
    assert replay_history(recorder.history()).exact

``torch.cuda.memory._record_memory_history`` and ``_snapshot`` have no public names, though torch documents both
(docs.pytorch.org, "Understanding CUDA Memory Usage"); they are used in this file only, as torch 2.11 to 2.15 have them
(read in 2.13; not run on a device yet). Recording costs microseconds per allocation: nothing is timed meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

import torch

from autosplit.errors import InputError
from autosplit.memory.snapshots import History, Peaks, history_of

MOST_ENTRIES = 2_000_000
"""Entries that are kept: some hundred steps of a large model, 200 bytes each without tracebacks."""


class Recorder:
    """Records one device's allocator from entry to exit; a history of the caller's own ends where this one begins."""

    def __init__(self, device: torch.device, *, max_entries: int = MOST_ENTRIES) -> None:
        self._device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        self._max_entries = max_entries
        self._opening: Mapping[str, Any] = {}
        self._closing: Mapping[str, Any] | None = None
        self._peaks: Peaks | None = None

    def __enter__(self) -> Self:
        torch.cuda.synchronize(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        self._opening = torch.cuda.memory._snapshot(self._device)
        torch.cuda.memory._record_memory_history(
            "all", context=None, stacks="python", max_entries=self._max_entries, clear_history=True
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Take the closing snapshot and stop; after an error too, which is what a failed step is looked at for."""
        try:
            torch.cuda.synchronize(self._device)
            stats = torch.cuda.memory_stats(self._device)
            self._peaks = Peaks(
                stats["allocated_bytes.all.peak"],
                stats["reserved_bytes.all.peak"],
                stats.get("requested_bytes.all.peak"),
            )
            self._closing = torch.cuda.memory._snapshot(self._device)
        finally:
            torch.cuda.memory._record_memory_history(None)

    def history(self) -> History:
        """Return what was recorded, with the statistics of the same time.

        Raises InputError before the recording ended, where its beginning was overwritten, and for expandable segments.
        """
        if self._closing is None:
            raise InputError("nothing was recorded yet; ask for the history after the with block")
        return history_of(
            self._closing,
            device=self._device.index,
            opening=self._opening,
            max_entries=self._max_entries,
            measured=self._peaks,
        )
