"""Observes the scratch of a device's kernels: what an operation held at its peak beyond its inputs and results.

```
    held before ──┬── results ──┬──
                  │  + scratch  │ ◄─ peak: by the allocator's statistics, one operation at a time
                  └─────────────┴── held after: results, and what a library keeps from its first call on
```

A table of what was observed stands before the rules of `workspaces`, for operations of the very same shapes.
"""

from __future__ import annotations

from typing import Any

from autosplit.devices import Clock
from autosplit.profile.node_costs.ledger import Ledger
from autosplit.profile.workspaces import ALWAYS_OBSERVED, operation_key

_ROUNDING_BYTES = 512
"""The allocator's blocks are multiples of this, so that less is no scratch."""


class WorkspaceWatch(Ledger):
    """The mode under which every operation runs alone, and its scratch is noted.

    It enters no storages: nothing of the account is needed. On a device that does not count bytes it notes nothing.

    Attributes:
        scratch: bytes by `operation_key`, of operations that held any and of those that a rule guesses.
    """

    def __init__(self, clock: Clock) -> None:
        super().__init__(listing=False)
        self.scratch: dict[str, int] = {}
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
        return timed.result
