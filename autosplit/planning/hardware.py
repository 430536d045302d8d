"""Other hardware that a plan may be changed to: more devices of a kind, and larger ones of the same maker."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast

from cost_models import registry
from cost_models.specs import DeviceSpec

_MOST_DEVICES = 4096
_PER_HOST = 8


def device_counts(name: str, *, more_than: int, per_host: int | None = None) -> Iterator[tuple[int, str]]:
    """Yield how many devices of a kind there may be, and the machine's text: up to one host's, then whole hosts."""
    own = per_host or registry.device(name).peer_group or _PER_HOST
    for count in range(max(1, more_than + 1), own + 1):
        yield count, f"{count}x{name}"
    for hosts in range(max(2, more_than // own + 1), _MOST_DEVICES // own + 1):
        yield hosts * own, f"{hosts}x{own}x{name}"


def larger(present: DeviceSpec) -> Sequence[DeviceSpec]:
    """Return the devices of the same maker with more memory, the smallest first."""
    cuda = not (present.compute_capability or "").startswith("gfx")
    others = (registry.device(name) for name in registry.names())
    fitting = [
        spec
        for spec in others
        if (spec.usable_bytes or 0) > (present.usable_bytes or 0)
        and cuda is not (spec.compute_capability or "").startswith("gfx")
    ]
    return sorted(fitting, key=lambda spec: (cast(int, spec.usable_bytes), spec.name))
