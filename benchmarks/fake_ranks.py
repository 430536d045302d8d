"""What one rank of many does to join: groups it makes, what it asks of the store, and seconds, at up to 1,024 ranks.

    python -m benchmarks.fake_ranks [--before CHECKOUT] [--json FILE]

torch's fake backend lets one process be any rank of a world: collectives return at once, with this rank's own values.
Of each world the first, a middle and the last rank are measured, each in a process of its own, and the greatest number
is reported. A store in this process stands for the others: it counts requests and the keys that they read, and has the
state of this rank for every other one. Seconds are of one thread's CPU, without any network. ``--before`` measures
another checkout of autosplit beside this one; gloo's groups are fake ones there too.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

LAYOUTS = ((16, 8, 8), (8, 4, 8), (4, 4, 4))
"""dp, pp, tp."""
ASKED_GROUPS = 40
BEATS = 4
SHOWN = (
    "code",
    "ranks",
    "join calls",
    "pairs calls",
    "join_s",
    "pairs_s",
    "meeting_s",
    "join keys read",
    "beat keys read",
)


class CountingStore(dist.Store):
    """A store that counts what is asked of it, and in which all other ranks have written what this one has."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self._rank, self._store = rank, dist.HashStore()
        self.asked, self.beats = Counter[str](), Counter[str]()
        """What the main thread has asked for, and what its other threads have, such as the watch."""

    def _count(self, *, requests: int = 1, keys: int = 0) -> None:
        counts = self.asked if threading.current_thread() is threading.main_thread() else self.beats
        counts.update({"requests": requests, "keys read": keys})

    def _read(self, key: str) -> bytes:
        self._count(requests=0, keys=1)
        if not self._store.check([key]) and self._store.check([own := re.sub(r"\d+$", str(self._rank), key)]):
            key = own
        default = b"" if key.endswith("cause") else b"0"
        return self._store.get(key) if self._store.check([key]) else default

    def set(self, key: str, value: Any) -> None:
        """Write a value."""
        self._count()
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        """Read a value."""
        self._count()
        return self._read(key)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Read values, in one request."""
        self._count()
        return [self._read(key) for key in keys]

    def add(self, key: str, number: int) -> int:
        """Add to a counter."""
        self._count()
        value: int = self._store.add(key, number)
        return value

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Write a value in the place of another."""
        self._count()
        value: bytes = self._store.compare_set(key, expected, desired)
        return value

    def wait(self, keys: list[str], *timeout: Any) -> None:
        """Return at once, as all ranks are there."""
        self._count(keys=len(keys))

    def clone(self) -> CountingStore:
        """Return the same store, as for a connection of its own."""
        return self


def count_groups() -> Counter[str]:
    """Have this process count the groups that it is in, and the calls that make one of any ranks; all are fake."""
    calls, make = Counter[str](), c10d._new_process_group_helper

    def made(size: int, rank: int, ranks: list[int], backend: Any, *args: Any, **kwargs: Any) -> Any:
        group, store = make(size, rank, ranks, dist.Backend("fake"), *args, **kwargs)
        calls["calls"] += 1
        calls["groups"] += group is not dist.GroupMember.NON_GROUP_MEMBER
        return group, store

    c10d._new_process_group_helper = made
    return calls


def chain(ranks: int) -> set[tuple[int, int]]:
    """Return who sends to whom where stages lie around a ring, forward and backward."""
    down = {(rank, (rank + 1) % ranks) for rank in range(ranks)}
    return down | {(b, a) for a, b in down}


def measure(layout: Sequence[int], rank: int) -> dict[str, float]:
    """Be one rank: make a mesh, join, open the groups of a pipeline, and let the watch beat."""
    import torch.testing._internal.distributed.fake_pg  # noqa: F401  (the backend)
    from torch.distributed.device_mesh import init_device_mesh

    calls = count_groups()
    from autosplit.distributed.join import join

    dp, pp, tp = layout
    store = CountingStore(rank)
    dist.init_process_group("fake", store=store, rank=rank, world_size=dp * pp * tp)
    found: dict[str, float] = {}

    def note(step: str, run: Callable[[], Any]) -> Any:
        before, asked, start = calls.copy(), store.asked.copy(), time.thread_time()
        value = run()
        found[f"{step}_s"] = round(time.thread_time() - start, 4)
        found.update({f"{step} {what}": calls[what] - before[what] for what in ("calls", "groups")})
        found.update({f"{step} {what}": store.asked[what] - asked[what] for what in ("requests", "keys read")})
        return value

    mesh = note("mesh", lambda: init_device_mesh("cpu", (dp, pp, tp), mesh_dim_names=("dp", "pp", "tp")))
    world = note("join", lambda: join(mesh))
    note("pairs", lambda: world.open(chain(pp)))
    note("meeting", lambda: world.agree("meets", {"a fact": 1}))
    begin, asked = world.watch._beats, store.beats.copy()
    while (beats := world.watch._beats - begin) < BEATS:
        world.watch.doing("an action")
        time.sleep(0.01)
    found |= {f"beat {what}": (store.beats[what] - asked[what]) / beats for what in ("requests", "keys read")}
    return found


def of_layout(layout: Sequence[int], source: Path) -> dict[str, float]:
    """Return the greatest numbers of three ranks, as a checkout of autosplit has them."""
    size = layout[0] * layout[1] * layout[2]
    found: dict[str, float] = {}
    for rank in (0, size // 2 + layout[2] * (layout[1] // 2), size - 1):
        command = [sys.executable, __file__, "--rank", str(rank), "--layout", *map(str, layout)]
        env = os.environ | {"PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
        text = subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout
        for name, value in json.loads(text.splitlines()[-1]).items():
            found[name] = max(found.get(name, 0.0), value)
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument("--before", type=Path, metavar="CHECKOUT", help="measure this checkout too")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--layout", type=int, nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.rank is not None:
        print(json.dumps(measure(options.layout, options.rank)), flush=True)
        os._exit(0)  # a watch would wait for the others
    from benchmarks import pairs

    sources = {"before": options.before} if options.before else {}
    sources["now"] = Path(__file__).resolve().parents[1]
    figures = [
        {"code": code, "ranks": layout[0] * layout[1] * layout[2], "layout": "dp{} pp{} tp{}".format(*layout)}
        | of_layout(layout, source)
        for layout in LAYOUTS
        for code, source in sources.items()
    ]
    now = [own for own in figures if own["code"] == "now"]
    groups = max(own["join groups"] + own["pairs groups"] + own["mesh groups"] for own in now)
    calls = max(own["join calls"] + own["pairs calls"] for own in now)
    checks = [
        pairs.at_most("groups of a rank, the mesh's among them", ASKED_GROUPS, groups),
        pairs.at_most("calls that make them, but for the mesh's", ASKED_GROUPS, calls),
        pairs.at_most(
            "keys that a rank reads at a beat, of those at the fewest ranks", 1.1, _growth(now, "beat keys read")
        ),
        pairs.at_most(
            "keys that a rank reads to join, of those at the fewest ranks", 1.1, _growth(now, "join keys read")
        ),
    ]
    machine = pairs.facts()
    print(pairs.facts_text(machine))
    print(pairs.table([{name: own[name] for name in SHOWN} for own in figures]))
    settings = {"layouts": LAYOUTS, "beats": BEATS}
    pairs.conclude(
        options.json, benchmark="fake ranks", settings=settings, machine=machine, figures=figures, checks=checks
    )


def _growth(figures: Sequence[dict[str, Any]], name: str) -> float:
    """Return a number at the most ranks over that at the fewest."""
    ordered = sorted(figures, key=lambda own: own["ranks"])
    return float(ordered[-1][name] / ordered[0][name])


if __name__ == "__main__":
    main()
