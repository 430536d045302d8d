"""Scratch of a device's kernels observed: what an operation held at its peak beyond what it was given and left.

```
    held before ──┬── results ──┬──
                  │  + scratch  │ ◄─ peak: by the allocator's statistics, one operation at a time
                  └─────────────┴── held after: results, and what a library keeps from its first call on
```

A table of what was observed stands before the rules of `workspaces`, for operations of the very same shapes.
"""

from __future__ import annotations

import datetime
import platform
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from autosplit.devices import Clock
from autosplit.profile.node_costs.ledger import Ledger
from autosplit.profile.workspaces import ALWAYS_OBSERVED, operation_key
from cost_models.calibration import Stamp
from cost_models.registry import identify
from cost_models.workspaces import Workspaces

_ROUNDING_BYTES = 512
"""The allocator's blocks are multiples of this, so that less is no scratch."""


class WorkspaceWatch(Ledger):
    """The mode under which every operation runs alone, and its scratch is noted.

    It enters no storages: nothing of the account is needed. On a device that does not count bytes it notes nothing.

    Attributes:
        scratch: bytes by `operation_key`, of operations that held any and of those that a rule guesses.
        kept_bytes: the most that an operation left beside its results; a large block may be up to 1 MiB too large
            for what it holds, which is in it.
    """

    def __init__(self, clock: Clock) -> None:
        super().__init__(listing=False)
        self.scratch: dict[str, int] = {}
        self.kept_bytes = 0
        self._clock = clock

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation by itself."""
        if func.namespace == "prim" or func.is_view:
            return func(*args, **(kwargs or {}))
        before = self._clock.held_bytes()
        timed = self._clock.timed(lambda: func(*args, **(kwargs or {})))
        after = self._clock.held_bytes()
        if before is None or after is None or timed.peak_bytes is None:
            return timed.result
        scratch = max(0, timed.peak_bytes - max(before, after))
        if scratch >= _ROUNDING_BYTES or func._opname in ALWAYS_OBSERVED:
            key = operation_key(func._opname, args, kwargs or {})
            self.scratch[key] = max(scratch, self.scratch.get(key, 0))
        self.kept_bytes = max(self.kept_bytes, after - before - _made(timed.result, (args, kwargs)))
        return timed.result

    def add(self, other: WorkspaceWatch) -> None:
        """Take over what another one noted."""
        for key, count in other.scratch.items():
            self.scratch[key] = max(count, self.scratch.get(key, 0))
        self.kept_bytes = max(self.kept_bytes, other.kept_bytes)

    def found(self, device: str) -> Workspaces:
        """Return what was noted, with the day and what it depends on; ``device`` is its name in ``cost_models``."""
        return Workspaces(workspace_stamp(device), self.scratch, self.kept_bytes)


def device_name(device: torch.device) -> str:
    """Return a CUDA device's name in ``cost_models``, or the driver's for one that is not known there."""
    driver = torch.cuda.get_device_name(device)
    known = identify(driver)
    return driver if known is None else known.name


def workspace_stamp(device: str) -> Stamp:
    """Return the day, the versions of the libraries, and the settings by which they choose kernels."""
    cudnn, cuda = torch.backends.cudnn, torch.backends.cuda
    settings = {
        "cudnn.benchmark": cudnn.benchmark,
        "cudnn.deterministic": cudnn.deterministic,
        "cudnn.allow_tf32": cudnn.allow_tf32,
        "matmul.allow_tf32": cuda.matmul.allow_tf32,
    }
    versions: Mapping[str, object] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": cudnn.version() if cudnn.is_available() else None,
        **settings,
    }
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    return Stamp(device=device, date=date, versions={name: str(value) for name, value in versions.items()})


def _made(result: Any, given: Any) -> int:
    """Return the bytes of the blocks of the results' storages that were not given."""
    old = {tensor.untyped_storage()._cdata for tensor in _tensors(given)}
    new = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in _tensors(result)}
    return sum(-(-size // _ROUNDING_BYTES) * _ROUNDING_BYTES for key, size in new.items() if key not in old)


def _tensors(value: Any) -> Sequence[torch.Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
