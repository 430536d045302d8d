"""How much of a schedule's ideal the lanes reach, on stages that do nothing but sleep.

    python -m benchmarks.overlap [--json FILE] [--repeats 5] [--only CONTENDER ...] [--lanes 2 4 8] [--chunks 4 8 32]
                                 [--virtual-lanes 2 4]

A stage sleeps 5 ms in its forward and 10 ms in its backward for each microbatch, so neither cores nor memory limit how
many stages run at once; what is missing from the ideal is the runtime's. Every stage has a device of its own; under
interleaved, looped_bfs and zb_v a device has two (``v=2``). Where a schedule splits the backward, all of it is the
input's part: a sleep is no product of matrices, whose weights' part could wait.

    nominal    stages x microbatches x 15 ms, what a single thread would need
    speed-up   nominal over the measured median
    ideal      nominal over the length of the simulated schedule; of gpipe and 1f1b on S lanes M·S / (M+S-1)
    share      speed-up over ideal; asked of threads: 97%
    over hand  measured median of a plain loop over microbatches, on one thread, over the contender's; in brackets
               its share of the ideal

Sleeps overshoot, and that counts against the speed-up; what the overshoot alone costs is printed first. So does the
work around a sleep, on a core that was idle until then, which the plain loop has to do as well. What the machine
itself allows is the share of ``sleeps gpipe`` and ``sleeps 1f1b``: the schedule's sleeps and the waits between its
lanes on bare threads, no tensor and no autosplit.

With ``--exact-sleep`` (the default) every contender's sleeps ask Linux for a timer slack of 1 ns in place of 50 µs,
which makes them truer to their nominal time and never shorter. torchgpipe, where it is installed, runs as its
documentation says: it has one thread for each distinct device, and there is one CPU.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import gc
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autosplit import autosplit
from autosplit.schedule.action import Action, Schedule
from autosplit.schedule.catalog import build
from autosplit.schedule.simulate import simulate
from benchmarks import pairs

ASKED = 0.97
WIDTH = 4
CALL, PEER, HAND = "call", "torchgpipe", "hand loop"
LANES = ("threads", "inline")
SINGLE, VIRTUAL = ("gpipe", "1f1b", "zb_h1"), ("interleaved", "looped_bfs", "zb_v")
"""The schedules of one stage on a device, and of two."""
HOW = (CALL, *SINGLE, *VIRTUAL)
"""``loss_fn(pipe(x), y).backward()``, which schedules as gpipe does, or `train_step` in a schedule."""
CONTENDERS = {f"{lanes} {how}": (lanes, how) for lanes in LANES for how in HOW}
LIMITS = {f"sleeps {schedule}": schedule for schedule in ("gpipe", "1f1b", "interleaved", "looped_bfs")}
NAMES = (*CONTENDERS, *LIMITS, PEER, HAND)
DEFAULT = (*(f"threads {how}" for how in HOW), *LIMITS, f"inline {CALL}", PEER, HAND)
OVERLAPPING = ("threads", "sleeps")
_PR_SET_TIMERSLACK = 29


@dataclass(frozen=True)
class Sleeps:
    """How long one stage sleeps for one microbatch, and whether its thread's timer slack is taken away."""

    forward_s: float
    backward_s: float
    exact: bool

    @property
    def cell_s(self) -> float:
        """Nominal seconds of one stage's forward and backward of one microbatch."""
        return self.forward_s + self.backward_s


@dataclass(frozen=True)
class Case:
    """How many lanes, how many microbatches, and how many stages on each lane."""

    lanes: int
    chunks: int
    virtual: int = 1

    @property
    def stages(self) -> int:
        """Number of stages on all lanes."""
        return self.lanes * self.virtual

    @property
    def title(self) -> str:
        """The case in a few letters."""
        return f"S={self.lanes} M={self.chunks}" + (f" v={self.virtual}" if self.virtual > 1 else "")

    def runs(self, name: str) -> bool:
        """Tell whether a contender has as many stages on a lane."""
        return name == HAND or (_schedule(name) in VIRTUAL) == (self.virtual > 1)

    def schedule(self, name: str) -> Schedule:
        """Return the schedule of that name for this case; looped_bfs is gpipe on lanes of several stages."""
        name = "looped_bfs" if name == "gpipe" and self.virtual > 1 else name
        return build(name, stages=self.stages, microbatches=self.chunks, virtual_stages=self.virtual)

    def nominal_s(self, sleeps: Sleeps) -> float:
        """Return the seconds of all sleeps one after the other."""
        return self.stages * self.chunks * sleeps.cell_s

    def ideal(self, schedule: str, sleeps: Sleeps) -> float:
        """Return the speed-up of a schedule whose actions last exactly their sleeps."""
        times = {"forward_s": sleeps.forward_s, "backward_s": sleeps.backward_s}
        times |= {"input_gradient_s": sleeps.backward_s, "weight_gradient_s": 0.0}
        by_stage = {kind: [seconds] * self.stages for kind, seconds in times.items()}
        return self.nominal_s(sleeps) / simulate(self.schedule(schedule), **by_stage).step_s


@functools.cache
def _set_timer_slack() -> Callable[[int], Any] | None:
    """Return what sets the calling thread's timer slack in nanoseconds; None where it is not Linux's to set."""
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None).prctl
    prctl.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]
    return lambda slack_ns: prctl(_PR_SET_TIMERSLACK, slack_ns, 0, 0, 0)


def sleep(seconds: float, exact: bool) -> None:
    """Sleep at least ``seconds``; with ``exact``, wake as soon after them as the machine can."""
    set_timer_slack = _set_timer_slack() if exact else None
    if set_timer_slack is not None:
        set_timer_slack(1)
    time.sleep(seconds)


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, sleeps: tuple[float, float, bool]) -> torch.Tensor:
        ctx.sleeps = sleeps
        sleep(sleeps[0], sleeps[2])
        return x + weight

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        sleep(ctx.sleeps[1], ctx.sleeps[2])
        return gradients[0], gradients[0], None  # autograd itself sums over the rows where there are several


class SleepingStage(nn.Module):
    """A row of weights is added to every row, after a sleep; the least that can be done, as what is done takes time."""

    def __init__(self, sleeps: Sleeps) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, WIDTH))
        self.sleeps = sleeps.forward_s, sleeps.backward_s, sleeps.exact

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Sleep.apply(x, self.weight, self.sleeps)


def overshoot(seconds: float, *, exact: bool, threads: int, times: int = 20) -> pairs.Spread:
    """Return by how many seconds a sleep is late when several threads sleep over and over."""
    late: list[float] = []

    def measure() -> None:
        for _ in range(times):
            start = time.perf_counter()
            sleep(seconds, exact)
            late.append(time.perf_counter() - start - seconds)

    sleepers = [threading.Thread(target=measure) for _ in range(threads)]
    for sleeper in sleepers:
        sleeper.start()
    for sleeper in sleepers:
        sleeper.join()
    return pairs.Spread.of(late)


def bare(schedule: Schedule, sleeps: Sleeps) -> Callable[[], Any]:
    """Return what sleeps through a schedule, a thread per lane; a semaphore stands for each value that is sent."""
    pool = ThreadPoolExecutor(max_workers=len(schedule.lanes))
    seconds = {"F": sleeps.forward_s, "B": sleeps.backward_s}
    lane_of = schedule.stage_lane

    def step() -> None:
        sent = {action: threading.Semaphore(0) for lane in schedule.lanes for action in lane}

        def run(lane: Sequence[Action]) -> None:
            for action in lane:
                for need in schedule.needs(action):
                    if lane_of[need.stage] != lane_of[action.stage]:
                        sent[need].acquire()
                sleep(seconds[action.kind], sleeps.exact)
                sent[action].release()

        list(pool.map(run, schedule.lanes))

    return step


def contender(name: str, model: nn.Sequential, case: Case, sleeps: Sleeps) -> Callable[[], Any]:
    """Return one training step of the model, without an optimizer, as ``name`` does it."""
    if name in LIMITS:
        return bare(case.schedule(LIMITS[name]), sleeps)
    batch, target = torch.randn(case.chunks, WIDTH), torch.randn(case.chunks, WIDTH)
    loss_fn = nn.MSELoss()
    if name == HAND:
        return lambda: loss_fn(torch.cat([model(x) for x in batch.tensor_split(case.chunks)]), target).backward()
    if name == PEER:
        peer = pairs.torchgpipe()
        assert peer is not None
        devices = ["cpu"] * case.lanes
        gpipe = peer.GPipe(model, [1] * case.stages, devices=devices, chunks=case.chunks, checkpoint="never")
        return lambda: loss_fn(gpipe(batch), target).backward()
    lanes, how = CONTENDERS[name]
    given = {"devices": ["cpu"] * case.lanes, "chunks": case.chunks, "sample": batch, "lanes": lanes}
    pipe = autosplit(model, **given, schedule=_schedule(name), virtual_stages=case.virtual)
    assert pipe.plan is not None
    cut = [stage.modules for stage in pipe.plan.stages]
    assert cut == [(str(stage),) for stage in range(case.stages)], cut
    if how == CALL:
        return lambda: loss_fn(pipe(batch), target).backward()
    return lambda: pipe.train_step(batch, target=target, loss_fn=loss_fn)


def _schedule(name: str) -> str:
    """Return the schedule whose ideal a contender is held against; what has no other is GPipe's."""
    how = {**LIMITS, **{contender: how for contender, (_, how) in CONTENDERS.items()}}.get(name, CALL)
    return "gpipe" if how == CALL else how


def measure(
    case: Case, names: Sequence[str], sleeps: Sleeps, *, repeats: int, serial_repeats: int
) -> list[dict[str, Any]]:
    """Run the contenders of one case in turn and return a figure for each."""
    gc.collect()  # the pipes of the case before, whose lanes are threads, end here
    torch.manual_seed(0)
    model = nn.Sequential(*(SleepingStage(sleeps) for _ in range(case.stages)))
    contenders = {name: contender(name, model, case, sleeps) for name in names}
    counts = {name: repeats if name.startswith(OVERLAPPING) else min(serial_repeats, repeats) for name in names}
    readings = pairs.interleave(contenders, repeats=counts)
    nominal_s = case.nominal_s(sleeps)
    hand_s = statistics.median(reading.wall_s for reading in readings[HAND]) if HAND in readings else None
    figures = []
    for name in names:
        wall_s = pairs.Spread.of([reading.wall_s for reading in readings[name]])
        ideal = case.ideal(_schedule(name), sleeps)
        speed_up = nominal_s / wall_s.median
        figures.append(
            {
                "case": case.title,
                "lanes": case.lanes,
                "stages": case.stages,
                "chunks": case.chunks,
                "contender": name,
                "repeats": counts[name],
                "nominal_s": nominal_s,
                "wall_s": wall_s,
                "cpu_s": pairs.Spread.of([reading.process_s for reading in readings[name]]),
                "speed_up": speed_up,
                "ideal": ideal,
                "share": speed_up / ideal,
                "over_hand": None if hand_s is None else hand_s / wall_s.median,
            }
        )
    return figures


def row(figure: dict[str, Any]) -> dict[str, str]:
    """Return a figure as a line of the table."""
    return {
        "case": figure["case"],
        "contender": figure["contender"],
        "nominal ms": f"{figure['nominal_s'] * 1e3:.0f}",
        "measured ms [quartiles]": figure["wall_s"].scaled(1e3).text(),
        "speed-up": f"{figure['speed_up']:.2f}x",
        "ideal": f"{figure['ideal']:.2f}x",
        "share": f"{figure['share']:.1%}",
        "over hand": "-" if figure["over_hand"] is None else _over_hand_text(figure),
    }


def _over_hand_text(figure: dict[str, Any]) -> str:
    return f"{figure['over_hand']:.2f}x ({figure['over_hand'] / figure['ideal']:.1%})"


def checks_of(figures: Sequence[dict[str, Any]]) -> list[pairs.Check]:
    """Return the share of the ideal that is asked of every contender on threads."""
    return [
        pairs.at_least(f"{f['case']} {f['contender']}, share of the ideal", ASKED, f["share"])
        for f in figures
        if f["contender"].startswith("threads")
    ]


def sleep_report(sleeps: Sleeps, *, threads: int) -> dict[str, Any]:
    """Measure how late sleeps are, with and without slack, and the share of an ideal that the lateness alone leaves."""
    late: dict[str, Any] = {}
    for exact in (False, True):
        forward, backward = (
            overshoot(seconds, exact=exact, threads=threads) for seconds in (sleeps.forward_s, sleeps.backward_s)
        )
        share = sleeps.cell_s / (sleeps.cell_s + forward.median + backward.median)
        late["exact" if exact else "default"] = {"forward_s": forward, "backward_s": backward, "share": share}
    return {"threads": threads, **late}


def sleep_text(report: dict[str, Any]) -> str:
    """Return the lateness of sleeps as a line for each kind of sleep."""
    lines = []
    for kind in ("default", "exact"):
        forward, backward = (report[kind][f"{way}_s"].scaled(1e6).text(0) for way in ("forward", "backward"))
        lines.append(
            f"{kind} sleeps on {report['threads']} threads are late by µs, median [quartiles]: forward {forward}, "
            f"backward {backward}; that alone leaves {report[kind]['share']:.1%}"
        )
    return "\n".join(lines)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the command line's settings."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument("--only", nargs="+", choices=NAMES, default=DEFAULT, metavar="CONTENDER", help=", ".join(NAMES))
    parser.add_argument("--lanes", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--virtual-lanes", type=int, nargs="*", default=[2, 4], help="lanes of two stages each")
    parser.add_argument("--chunks", type=int, nargs="+", default=[4, 8, 32])
    parser.add_argument("--repeats", type=int, default=5, help="of what overlaps")
    parser.add_argument("--serial-repeats", type=int, default=3, help="of all others, which take as long as they sleep")
    parser.add_argument("--forward-ms", type=float, default=5.0)
    parser.add_argument("--backward-ms", type=float, default=10.0)
    parser.add_argument("--exact-sleep", action=argparse.BooleanOptionalAction, default=True)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Print a line per case and contender, then the checks."""
    arguments = parse(argv)
    torch.set_num_threads(1)
    machine = pairs.facts()
    sleeps = Sleeps(arguments.forward_ms / 1e3, arguments.backward_ms / 1e3, arguments.exact_sleep)
    print(pairs.facts_text(machine))
    late = [sleep_report(sleeps, threads=threads) for threads in sorted({1, max(arguments.lanes)})]
    print(*(sleep_text(report) for report in late), sep="\n")
    print(f"sleeps below are {'exact' if sleeps.exact else 'default'} ones, for every contender")
    names = list(arguments.only)
    if PEER in names and pairs.torchgpipe() is None:
        print("torchgpipe is not installed; going on without it")
        names.remove(PEER)
    counts = {"repeats": arguments.repeats, "serial_repeats": arguments.serial_repeats}
    sizes = [(lanes, 1) for lanes in arguments.lanes] + [(lanes, 2) for lanes in arguments.virtual_lanes]
    cases = [Case(lanes, chunks, virtual) for lanes, virtual in sizes for chunks in arguments.chunks]
    figures: list[dict[str, Any]] = []
    for case in cases:
        figures += measure(case, [name for name in names if case.runs(name)], sleeps, **counts)
    print(pairs.table([row(figure) for figure in figures]))
    checks = checks_of(figures)
    print(pairs.checks_text(checks))
    if arguments.json:
        settings = {**asdict(sleeps), "only": names, **counts}
        pairs.write(
            arguments.json,
            benchmark="overlap",
            settings=settings,
            machine={**machine, "sleeps": late},
            figures=figures,
            checks=checks,
        )


if __name__ == "__main__":
    main()
