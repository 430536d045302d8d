"""The schedules by name. A new one is a function in `orders` and one line in ``SCHEDULES``.

Everything else asks the schedule itself; how many microbatches its stages hold, for example, is counted on its actions:

| name | devices hold | backward | microbatches held by a stage, with ``d = stages - stage`` |
|---|---|---|---|
| gpipe | one stage | B | all |
| 1f1b | one stage | B | d |
| interleaved | v ≥ 2 stages, looped | B | counted; device r of P holds 2 (P - r - 1) + (v - 1) P + 1 in all |
| looped_bfs | v ≥ 2 stages, looped | B | all |
| zb_h1 | one stage | I, W | P, of which d with everything that the forward saved |
| zb_v | 2 stages, as a V | I, W | d |
| forward | one stage | none | 1 |

Never more than there are microbatches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

from autosplit.errors import ScheduleError
from autosplit.schedule.action import Schedule
from autosplit.schedule.orders import forward_only, gpipe, interleaved, looped_bfs, one_f_one_b, zb_h1, zb_v


@dataclass(frozen=True)
class CatalogEntry:
    """How a schedule is built from stages and microbatches, and how many stages a device may hold.

    ``virtual_stages`` is None where that may be any number from 2 on; ``build`` then takes it as a keyword.
    """

    build: Callable[..., Schedule]
    virtual_stages: int | None = 1


SCHEDULES: Mapping[str, CatalogEntry] = MappingProxyType(
    {
        "gpipe": CatalogEntry(gpipe),
        "1f1b": CatalogEntry(one_f_one_b),
        "interleaved": CatalogEntry(interleaved, virtual_stages=None),
        "looped_bfs": CatalogEntry(looped_bfs, virtual_stages=None),
        "zb_h1": CatalogEntry(zb_h1),
        "zb_v": CatalogEntry(zb_v, virtual_stages=2),
        "forward": CatalogEntry(forward_only),
    }
)


def build(
    name: str, *, stages: int, microbatches: int, virtual_stages: int = 1, replicas: tuple[int, ...] = ()
) -> Schedule:
    """Return the schedule called ``name``.

    ``stages`` counts them all, so there are ``stages / virtual_stages`` devices. ``virtual_stages=1`` stands for what
    the schedule takes when nothing is asked for: 2 under interleaved, looped_bfs and zb_v, whose devices hold several.
    ``replicas`` are those of each stage, under 1f1b; empty: one each. Raises ScheduleError when the stages do not fill
    the devices, or the schedule has no such number per device.
    """
    virtual_stages = stages_per_device(name, virtual_stages)
    if stages % virtual_stages:
        less = stages - stages % virtual_stages
        ways = " or ".join(str(count) for count in (less, less + virtual_stages) if count)
        raise ScheduleError(
            f"{name} puts {virtual_stages} stages on every device, and {stages} is no multiple of {virtual_stages}; "
            f"cut the model into {ways} stages"
        )
    if replicas and name != "1f1b":
        raise ScheduleError(
            f"replicas={list(replicas)} under {name}: replicas take microbatches in turn under 1f1b; give that"
        )
    return _built(name, stages, microbatches, virtual_stages, replicas)


@lru_cache(maxsize=16)
def _built(name: str, stages: int, microbatches: int, virtual_stages: int, replicas: tuple[int, ...]) -> Schedule:
    entry = SCHEDULES[name]
    if replicas:
        return entry.build(stages, microbatches, replicas=replicas)
    if entry.virtual_stages is None:
        return entry.build(stages, microbatches, virtual_stages=virtual_stages)
    return entry.build(stages, microbatches)


def least_per_device(name: str) -> int:
    """Return the fewest stages that a schedule puts on a device."""
    return _entry(name).virtual_stages or 2


def stages_per_device(name: str, virtual_stages: int = 1) -> int:
    """Return how many stages a device holds under a schedule; ``virtual_stages`` means what it means to `build`.

    Raises ScheduleError when the schedule has no such number per device.
    """
    allowed = _entry(name).virtual_stages
    if virtual_stages == 1:
        virtual_stages = least_per_device(name)
    if virtual_stages < 2 if allowed is None else virtual_stages != allowed:
        takes = "2 or more stages" if allowed is None else "1 stage" if allowed == 1 else f"{allowed} stages"
        others = [other for other, entry in SCHEDULES.items() if entry.virtual_stages in (None, virtual_stages)]
        instead = f", or choose {' or '.join(others)}" if virtual_stages > 1 else ""
        raise ScheduleError(f"{name} puts {takes} on a device, not {virtual_stages}; leave virtual_stages out{instead}")
    return virtual_stages


def _entry(name: str) -> CatalogEntry:
    if name not in SCHEDULES:
        raise ScheduleError(f"there is no schedule {name!r}; choose one of {', '.join(map(repr, SCHEDULES))}")
    return SCHEDULES[name]
