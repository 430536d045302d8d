"""The interfaces of torchgpipe and of the removed ``torch.distributed.pipeline.sync``, on top of the pipe.

Old code runs with its imports changed; see "Coming from torchgpipe or Pipe" in the documentation.
"""

from __future__ import annotations

from autosplit.compat.balance import balance_by_size, balance_by_time
from autosplit.compat.chain import BalanceError, PipeSequential
from autosplit.compat.gpipe import GPipe
from autosplit.compat.pipe import NoChunk, Pipe, WithDevice
from autosplit.compat.skip import Namespace, pop, skippable, stash, verify_skippables
from autosplit.runtime.regions import is_checkpointing, is_recomputing

__all__ = [
    "BalanceError",
    "GPipe",
    "Namespace",
    "NoChunk",
    "Pipe",
    "PipeSequential",
    "WithDevice",
    "balance_by_size",
    "balance_by_time",
    "is_checkpointing",
    "is_recomputing",
    "pop",
    "skippable",
    "stash",
    "verify_skippables",
]
