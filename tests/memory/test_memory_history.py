"""Recorded allocation histories replayed: hand-made snapshots in torch's format, and those of a naive allocator."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest

from autosplit.errors import InputError
from autosplit.memory.allocator import simulate_allocator
from autosplit.memory.history import changes_of, replay_history
from autosplit.memory.snapshots import Peaks, Pool, history_of
from tests.memory.caching_allocator import KIB, MIB, NaiveDevice

BASE = 0x7F00_0000_0000


def entry(action: str, address: int, size: int, *, stream: int = 0, **more: Any) -> dict[str, Any]:
    return {"action": action, "addr": address, "size": size, "stream": stream, "frames": []} | more


def segment(address: int, size: int, *blocks: tuple[int, int, str], kind: str = "large") -> dict[str, Any]:
    return {
        "address": address,
        "total_size": size,
        "stream": 0,
        "segment_type": kind,
        "blocks": [{"size": s, "requested_size": r, "state": state, "frames": []} for s, r, state in blocks],
    }


def snapshot(segments: list[dict[str, Any]], *entries: dict[str, Any]) -> dict[str, Any]:
    return {"segments": segments, "device_traces": [list(entries)]}


def test_small_and_large_by_hand() -> None:
    """A request of 5 MiB is split off 20, one of 700 bytes off 2; the freed 5 MiB join the rest again."""
    found = replay_history(
        history_of(
            snapshot(
                [
                    segment(BASE, 20 * MIB, (20 * MIB, 0, "inactive")),
                    segment(
                        BASE + 64 * MIB,
                        2 * MIB,
                        (1024, 700, "active_allocated"),
                        (2 * MIB - 1024, 0, "inactive"),
                        kind="small",
                    ),
                ],
                entry("segment_alloc", BASE, 20 * MIB),
                entry("alloc", BASE, 5 * MIB),
                entry("segment_alloc", BASE + 64 * MIB, 2 * MIB),
                entry("alloc", BASE + 64 * MIB, 700),
                entry("snapshot", 0, 0),
                entry("free_requested", BASE, 5 * MIB),
                entry("free_completed", BASE, 5 * MIB),
            ),
            measured=Peaks(5 * MIB + 1024, 22 * MIB, 5 * MIB + 700),
        )
    )
    assert found.exact, found.difference
    assert (found.allocations, found.segments, found.peaks.reserved_bytes) == (2, 2, 22 * MIB)


def test_a_block_that_another_stream_uses_is_free_only_when_that_is_done() -> None:
    """Allocated bytes fall at once; the block is lent again after ``free_completed``: the next request opens more."""
    device = NaiveDevice()
    first = device.malloc(12 * MIB)
    device.record_stream(first, 7)
    device.free(first)
    second = device.malloc(12 * MIB)
    device.streams_are_done()
    third = device.malloc(12 * MIB)
    assert third == first != second
    found = replay_history(history_of(device.snapshot(), measured=Peaks(*device.peaks)))
    assert found.exact, found.difference
    assert (found.peaks.allocated_bytes, found.peaks.reserved_bytes) == (24 * MIB, 24 * MIB)
    early = device.snapshot()
    early["device_traces"][0].insert(3, early["device_traces"][0].pop(5))
    assert "takes a free block" in (replay_history(history_of(early)).difference or "")


def test_streams_and_private_pools_share_nothing() -> None:
    device = NaiveDevice()
    for stream, pool in ((0, (0, 0)), (9, (0, 0)), (9, (0, 3))):
        device.free(device.malloc(3 * MIB, stream=stream, pool=pool))
    history = history_of(device.snapshot())
    found = replay_history(history)
    assert found.exact, found.difference
    assert (found.segments, found.peaks.reserved_bytes, found.peaks.allocated_bytes) == (3, 60 * MIB, 3 * MIB)
    without = device.snapshot()
    for raw in without["device_traces"][0]:
        del raw["pool_id"]
    assert history_of(without).entries == history.entries, "an entry without a pool has that of its segment"
    assert len(list(changes_of(history, pool=Pool(9, (0, 3))))) == 2


def busy(seed: int, *, before: int, entries: int) -> tuple[NaiveDevice, dict[str, Any]]:
    """Some work on three streams and a private pool; what came before the history is in the opening snapshot."""
    draw, device = random.Random(seed), NaiveDevice(seed)
    live: list[int] = []
    opening = device.start()
    for number in range(before + entries):
        if number == before:
            opening = device.start()
        choice = draw.random()
        if choice < 0.02:
            device.empty_cache()
        elif choice < 0.15:
            device.streams_are_done()
        elif choice < 0.5 and live:
            device.free(live.pop(draw.randrange(len(live))))
        else:
            size = draw.choice((300, 512, 40 * KIB, MIB, MIB + 1, 3 * MIB, 9 * MIB, 10 * MIB, 11 * MIB + 5, 37 * MIB))
            stream = draw.choice((0, 0, 0, 11, 22))
            live.append(device.malloc(size, stream=stream, pool=(0, 4) if stream == 22 else (0, 0)))
            if draw.random() < 0.3:
                device.record_stream(live[-1], 33)
    return device, opening


@pytest.mark.parametrize("seed", range(12))
def test_every_block_of_a_busy_device_is_found_again(seed: int) -> None:
    device, opening = busy(seed, before=60 * (seed % 3), entries=300)
    history = history_of(device.snapshot(), opening=opening, measured=Peaks(*device.peaks))
    found = replay_history(history)
    assert found.exact, found.difference
    assert (found.peaks, found.allocations > 100, found.segments > 5) == (Peaks(*device.peaks), True, True)


def test_on_one_stream_the_changes_give_the_simulator_the_same_peaks() -> None:
    draw, device, live = random.Random(5), NaiveDevice(5), []
    for _ in range(200):
        if live and draw.random() < 0.45:
            device.free(live.pop(draw.randrange(len(live))))
        else:
            live.append(device.malloc(draw.choice((700, 90 * KIB, 2 * MIB, 4 * MIB, 12 * MIB))))
    found = simulate_allocator(changes_of(history_of(device.snapshot())))
    assert [found.allocated_peak_bytes, found.reserved_peak_bytes, found.requested_peak_bytes] == device.peaks


def altered(change: Any) -> str:
    device, _ = busy(3, before=0, entries=200)
    changed = copy.deepcopy(device.snapshot())
    change(changed)
    return replay_history(history_of(changed, measured=Peaks(*device.peaks))).difference or ""


def moved(changed: dict[str, Any]) -> None:
    """Put a block somewhere else in its segment, from its allocation to its release."""
    entries = changed["device_traces"][0]
    first = next(e for e in entries if e["action"] == "alloc")
    for entry in [e for e in entries if not e["action"].startswith("segment") and e["addr"] == first["addr"]]:
        entry["addr"] += 512


def twice(changed: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """Return a segment that was opened for nothing, and where: before the first allocation without one of its own."""
    entries = changed["device_traces"][0]
    at = next(n for n, e in enumerate(entries) if n and e["action"] == "alloc" == entries[n - 1]["action"])
    return at, entry("segment_alloc", 1 << 46, 2 * MIB, **{key: entries[at][key] for key in ("stream", "pool_id")})


def test_whatever_differs_is_named() -> None:
    def of(changed: dict[str, Any], action: str, least: int = 0) -> dict[str, Any]:
        return next(e for e in changed["device_traces"][0] if e["action"] == action and e["size"] >= least)

    assert "the device opened one of" in altered(lambda s: of(s, "segment_alloc").update(size=6 * MIB))
    assert "the device opened none" in altered(lambda s: of(s, "alloc").update(stream=44))
    assert "a free block" in altered(lambda s: s["device_traces"][0].insert(*twice(s)))
    assert "by the simulation" in altered(moved)
    assert "at the end the device has" in altered(
        lambda s: s["segments"].append(segment(64, 512, (512, 0, "inactive")))
    )
    assert "at the end the simulation has" in altered(lambda s: s["segments"].pop())
    device, _ = busy(3, before=0, entries=200)
    allocated, *others = device.peaks
    wrong = replay_history(history_of(device.snapshot(), measured=Peaks(allocated + 512, *others)))
    assert wrong.difference == (
        f"the peak of allocated_bytes is {allocated + 512} on the device and {allocated} in the simulation"
    )


def test_a_history_without_its_beginning_is_refused() -> None:
    device, opening = busy(4, before=80, entries=80)
    late = device.snapshot()
    with pytest.raises(InputError, match=r"never (opened|allocated) and .*beginning is missing; record from"):
        replay_history(history_of(late))
    with pytest.raises(InputError, match="beginning is missing"):
        list(changes_of(history_of(late)))
    assert replay_history(history_of(late, opening=opening)).exact
    count = len(late["device_traces"][0])
    with pytest.raises(InputError, match=f"has {count} entries and {count} were kept: its beginning was overwritten"):
        history_of(late, opening=opening, max_entries=count)


def test_what_is_no_snapshot_or_cannot_be_replayed_is_refused() -> None:
    with pytest.raises(InputError, match="'device_traces' is NoneType, a list is expected"):
        history_of({"segments": []})
    with pytest.raises(InputError, match="expandable_segments:False"):
        history_of(snapshot([], entry("segment_map", BASE, 2 * MIB)))
    with pytest.raises(InputError, match="expandable_segments:False"):
        history_of(snapshot([]) | {"allocator_settings": {"expandable_segments": True}})
    with pytest.raises(InputError, match="an entry 'melt', which is not known"):
        history_of(snapshot([], entry("melt", BASE, 1)))
    with pytest.raises(InputError, match="its blocks another number"):
        history_of(snapshot([segment(BASE, MIB, (512, 0, "inactive"))]))
    with pytest.raises(InputError, match="differs by size"):
        history_of(snapshot([]) | {"allocator_settings": {"roundup_power2_divisions": {"256": 1, "512": 4}}})


def test_settings_are_read_from_the_snapshot() -> None:
    settings = {
        "PYTORCH_CUDA_ALLOC_CONF": "large_segment_size_mb:40,max_split_size_mb:64",
        "max_split_size": 64 * MIB,
        "roundup_power2_divisions": {"1": 4, "2": 4},
    }
    options = history_of(snapshot([]) | {"allocator_settings": settings}).options
    assert (options.max_split_bytes, options.large_segment_bytes, options.roundup_power2_divisions) == (
        64 * MIB,
        40 * MIB,
        4,
    )
