"""Which of unlike devices take part, and in which order: stages follow the model, the devices need not.

The first stage of 1F1B holds the most activations and the last one makes the logits, so which device stands where can
decide what fits and how long a step is. Orders are weighed by the additive formula, with the microbatches that are best
in the caller's order. CPU lanes beside GPUs are the last resort: they take part where the GPUs have no room.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, islice, permutations

from autosplit.planning.profiled.specs import device_specs
from autosplit.planning.search.choose import Search
from autosplit.planning.search.sweep import Sweep

GAIN = 0.01
"""Devices change places where the step gets shorter by at least this part of it."""
_MOST, _SHUFFLED = 24, 6
"""How many orders are weighed at most, and of how many devices any; of more devices like ones stay together."""


def lined_up(sweep: Sweep) -> Search:
    """Return the search with the devices that take part in their best order, and a note where the caller's is another.

    The order is the caller's where that is part of what was asked for, and on machines with islands of devices.
    """
    options, every = sweep.options, range(len(sweep.options.devices))
    gpus = [lane for lane in every if options.devices[lane].type != "cpu"]
    kinds: list[Hashable] = [(spec.name, _rough(options.room_bytes(n))) for n, spec in enumerate(device_specs(options))]
    if len(set(kinds)) < 2 or _is_fixed(sweep):
        return Search(sweep)
    note = ""
    for lanes in (gpus, every) if 0 < len(gpus) < len(every) else (every,):
        weighed = list(_weighed(sweep, lanes, kinds))
        (asked_s, _, search), (step_s, order, _) = weighed[0], min(weighed, key=lambda each: each[0])
        alone = Search(Sweep(sweep.recorded, options.taking(order), sweep.space, rows=sweep.rows))
        if step_s < float("inf") and (len(lanes) == len(every) or alone.run().rank[0] < 3):
            break
    if len(lanes) < len(every):
        idle = ", ".join(options.device_name(lane) for lane in every if lane not in lanes)
        note = f"{idle} stays idle: a CPU is the last resort, and the other devices have room for all"
    if step_s < asked_s * (1 - GAIN):
        search = Search(Sweep(sweep.recorded, options.taking(order), sweep.space, rows=sweep.rows))
        less = "nothing fits" if asked_s == float("inf") else f"a step is {asked_s / step_s - 1:.0%} longer"
        names = ", ".join(f"{lane} ({options.device_name(lane)})" for lane in order)
        note += f"{'; ' * bool(note)}the order of devices is {names}: as they were named {less}, by the formula"
    search.note = note
    return search


def _weighed(
    sweep: Sweep, lanes: Sequence[int], kinds: Sequence[Hashable]
) -> Iterator[tuple[float, tuple[int, ...], Search]]:
    """Yield the search of each order of some devices, the caller's first, with its shortest step by the formula."""
    space = sweep.space
    for order in islice(_orders(lanes, kinds), _MOST):
        space = space if len(order) > 1 else replace(space, schedules=space.schedules[:1])
        search = Search(Sweep(sweep.recorded, sweep.options.taking(order), space, rows=sweep.rows))
        best = search.fastest()
        yield float("inf") if best is None else best.step_s, order, search
        if space is sweep.space and best is not None:
            space = replace(space, chunks=(len(best.entry.sized.case.sizes),))


def _orders(lanes: Sequence[int], kinds: Sequence[Hashable]) -> Iterator[tuple[int, ...]]:
    """Yield orders of devices that are unlike each other, the caller's first."""
    groups = [[lane for lane in lanes if kinds[lane] == kind] for kind in dict.fromkeys(kinds)]
    every = permutations(lanes) if len(lanes) <= _SHUFFLED else (tuple(chain(*each)) for each in permutations(groups))
    known: set[tuple[Hashable, ...]] = set()
    for order in chain([tuple(lanes)], every):
        if (row := tuple(kinds[lane] for lane in order)) not in known:
            known.add(row)
            yield order


def _is_fixed(sweep: Sweep) -> bool:
    options, machine = sweep.options, sweep.options.machine
    fixed = options.processes or options.placed or options.actions or options.replicas != () or options.cut
    islands = machine is not None and (
        len(machine.host_devices) > 1 or machine.links or any(device.peer_group for device in machine.devices)
    )
    return bool(fixed or islands or len(sweep.space.recompute or ()) > 1)


def _rough(room_bytes: int | None) -> str:
    """Return two digits of it: cards of one kind never have the same to the byte."""
    return "" if room_bytes is None else f"{room_bytes:.1e}"
