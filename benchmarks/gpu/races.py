"""Hunts races: random programs whose streams lag at random must give the bits of the same program on one stream.

    python -m benchmarks.gpu.races [--programs 200] [--seed 0] [--only N] [--device cuda:0] [--json FILE]

Every program (:mod:`benchmarks.gpu.race_programs`) runs three times on the lanes that ship:

    one stream    all lanes have the caller's: nothing can overtake anything
    late          each event, wait and copy has a random sleep before and behind it, on the streams that it touches
    pressed       late, and whatever a stream has free is taken at once and filled with NaN
    cramped       every fourth program: pressed, and the process may reserve no more than that took, so that the
                  allocator waits for blocks and gives cached ones back

The same kernels run on the same numbers, so every output, loss, gradient and parameter has the same bits, or a wait or
a lifetime is missing. That the hunt would see it: waits are left out on purpose, and then lifetimes; how many programs
come out wrong is in the figures.

On a CPU, which has no streams, the lanes' threads sleep around every transfer, and ``lanes="inline"`` is what they are
held against. The device's own checker runs a few programs in minutes, each block an allocation of its own:

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python -m benchmarks.gpu.races --programs 5
"""

from __future__ import annotations

import argparse
import contextlib
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from autosplit import recorded, recordings
from autosplit.planning.plan.plan import Plan
from autosplit.runtime import ops, transport
from autosplit.runtime.lanes import lanes
from autosplit.runtime.lanes.lanes import CallerLane, Lane, StreamLane, Streams
from benchmarks.gpu.part import Found, Setting, at_least, at_most
from benchmarks.gpu.race_programs import Case, Model, case_of, pipe_of, run_case

PROGRAMS, SMALL_PROGRAMS = 200, 2
WIDTH = 64
LEFT_OUT = 20
"""So many programs run with waits left out, and as many with lifetimes left out."""
LIMIT_S = 390.0
"""After so long no further program begins: a minute and a half of eight are left for what is left out."""
_CRAMPED = 4
"""Every so many programs one runs in little room."""
_CYCLES = 4_000_000
"""Up to 2 ms. The host needs less to issue what comes behind an event; else a wait that is left out is not missed."""
_SLEEP_S = 2e-3
_BLOCKS = (*range(128, 8 * 128, 128), WIDTH * WIDTH)
"""Elements of what is taken under pressure: microbatches of up to nine rows, and gradients of weights."""


class OneStream(Streams):
    """Streams of which there is one per device: the caller's."""

    def new(self, device: torch.device) -> torch.cuda.Stream:
        """Return the current stream."""
        return self.current(device)


class Late:
    """Other streams, with a disturbance on every stream before an event, behind a wait, and around a copy.

    ``forget`` names methods that do nothing, "wait" or "keep": what lanes would do that left them out.
    """

    def __init__(self, inner: Any, disturb: Callable[[Any], None], *, forget: Sequence[str] = ()) -> None:
        self.inner, self.disturb, self.forget = inner, disturb, tuple(forget)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def event(self, stream: Any) -> Any:
        """Record an event, late."""
        self.disturb(stream)
        return self.inner.event(stream)

    def wait(self, stream: Any, event: Any) -> None:
        """Wait, and be late afterwards."""
        if "wait" not in self.forget:
            self.inner.wait(stream, event)
        self.disturb(stream)

    def copy(self, tensor: Tensor, device: torch.device) -> Tensor:
        """Copy, late, on streams that are late afterwards."""
        ends = [end for end in (self.inner.device(tensor), device) if end.type != "cpu"]
        for end in ends:
            self.disturb(self.inner.current(end))
        copied: Tensor = self.inner.copy(tensor, device)
        for end in ends:
            self.disturb(self.inner.current(end))
        return copied

    def keep(self, tensor: Tensor, stream: Any) -> None:
        """Keep a tensor's memory."""
        if "keep" not in self.forget:
            self.inner.keep(tensor, stream)


def sleeps(chosen: random.Random, *, pressed: bool) -> Callable[[torch.cuda.Stream], None]:
    """Return what makes a stream late; ``pressed``: and takes what its pool has free, and fills it with NaN."""

    def disturb(stream: torch.cuda.Stream) -> None:
        with torch.cuda.stream(stream):
            if chosen.random() < 0.5:
                torch.cuda._sleep(chosen.randrange(_CYCLES))
            if pressed:
                held = [torch.full((n,), torch.nan, device=stream.device) for n in _BLOCKS for _ in range(2)]
                del held

    return disturb


@contextlib.contextmanager
def on_streams(streams: Any) -> Iterator[None]:
    """Have all lanes that are made in here, and the caller's, reach the hardware through these streams."""

    def lane(device: torch.device) -> Lane:
        return StreamLane(device, streams) if device.type == "cuda" else Lane()

    def caller(device: torch.device) -> Lane:
        return CallerLane(device, streams) if device.type == "cuda" else Lane()

    with (
        mock.patch.object(recordings, "lane", lane),
        mock.patch.object(recorded, "caller_lane", caller),
        mock.patch.object(lanes, "caller_lane", caller),
    ):
        yield


@contextlib.contextmanager
def slow_transfers(chosen: random.Random) -> Iterator[None]:
    """Let whoever brings a bundle from lane to lane sleep before and behind that."""

    def slow(move: Callable[..., Any]) -> Callable[..., Any]:
        def moved(*given: Any) -> Any:
            time.sleep(_SLEEP_S * chosen.random())
            found = move(*given)
            time.sleep(_SLEEP_S * chosen.random())
            return found

        return moved

    with mock.patch.object(transport, "transfer", slow(ops.transfer)):
        yield


def places(setting: Setting) -> list[list[str]]:
    """Return the lists of devices to choose from, the caller's last."""
    card = str(setting.device)
    if not setting.cuda:
        return [["cpu"] * 3, ["cpu"] * 4]
    found = [
        [card] * 3,
        [card] * 4,
        [card, card, "cpu"],
        ["cpu", card, card],
        [card, "cpu", card],
        ["cpu", card, "cpu"],
    ]
    if torch.cuda.device_count() > 1:
        found += [["cuda:0", "cuda:1", "cuda:0"], ["cuda:1", "cuda:0", "cpu"], ["cuda:0", "cuda:1", "cuda:0", "cuda:0"]]
    return found


@dataclass
class Known:
    """What is known of cases by their numbers: plans, for lanes of each kind, and what came out on one stream."""

    plans: dict[tuple[int, str], Plan] = field(default_factory=dict)
    expected: dict[int, list[Tensor]] = field(default_factory=dict)


def once(case: Case, streams: Any, *, how: str = "inline", known: Known | None = None) -> list[Tensor]:
    """Run a case on streams, from the same weights every time; return all that came out, and the weights.

    ``known`` keeps the case's plan: each run makes its own pipe and lanes, and only the first one searches for the cut.
    """
    torch.manual_seed(case.number)
    model = Model(case, width=WIDTH).train(case.how != "eval")
    *own, caller = (torch.device(place) for place in case.places)
    with on_streams(streams):
        plan = known.plans.get((case.number, how)) if known is not None else None
        pipe = pipe_of(model, case, own, width=WIDTH, lanes=how, plan=plan)
        if known is not None and pipe.plan is not None:
            known.plans[case.number, how] = pipe.plan
        found = run_case(pipe, model, case, width=WIDTH, put=lambda tensor: tensor.to(caller))
        pipe.unsplit()
    return [tensor.cpu() for tensor in (*found, *model.parameters())]


def same(found: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    """Tell whether all bits are equal; NaN is never right."""
    return len(found) == len(expected) and all(map(torch.equal, found, expected))


def variants(setting: Setting, case: Case, known: Known, *, seed: int) -> dict[str, Callable[[], list[Tensor]]]:
    """Return the ways to run a case that must give the bits of the single stream."""
    chosen = random.Random(f"late {seed}/{case.number}")
    if not setting.cuda:

        def threads() -> list[Tensor]:
            with slow_transfers(chosen):
                return once(case, None, how="threads", known=known)

        return {"late": threads}

    def late(*, pressed: bool) -> list[Tensor]:
        return once(case, Late(Streams(), sleeps(chosen, pressed=pressed)), known=known)

    def alone() -> list[Tensor]:
        setting.empty()
        torch.cuda.reset_peak_memory_stats(setting.device)
        return late(pressed=True)

    def in_little_room() -> list[Tensor]:
        with cramped(setting):
            return late(pressed=True)

    if case.number % _CRAMPED:
        return {"late": lambda: late(pressed=False), "pressed": lambda: late(pressed=True)}
    return {"late": lambda: late(pressed=False), "pressed": alone, "cramped": in_little_room}


@contextlib.contextmanager
def cramped(setting: Setting) -> Iterator[None]:
    """Let the process reserve no more of a card than it did at most since its peak was reset."""
    total = torch.cuda.get_device_properties(setting.device).total_memory
    peak = torch.cuda.max_memory_reserved(setting.device)
    setting.empty()
    torch.cuda.set_per_process_memory_fraction(min(1.0, (peak + 1) / total), setting.device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, setting.device)


def left_out(setting: Setting, cases: Sequence[Case], known: Known, what: str, *, seed: int) -> int:
    """Return how many cases come out wrong when lanes leave something out."""
    wrong = 0
    for case in cases:
        chosen = random.Random(f"left out {seed}/{case.number}")
        late = Late(Streams(), sleeps(chosen, pressed=True), forget=[what])
        wrong += not same(once(case, late, known=known), known.expected[case.number])
        setting.wait()
    return wrong


def hunt(setting: Setting, cases: Sequence[Case], known: Known, *, seed: int, limit_s: float = LIMIT_S) -> Found:
    """Run cases in all variants, as many as begin before the limit, and say which differ."""
    found = Found(settings={"seed": seed, "programs": 0, "width": WIDTH})
    figures: dict[str, dict[str, Any]] = {}
    end_s = time.monotonic() + limit_s
    for number, case in enumerate(cases):
        if time.monotonic() >= end_s:
            found.missing.append(f"{len(cases) - number} of {len(cases)} programs: {limit_s:g} s were over")
            break
        with found.going_on(f"program {case}"):
            expected = once(case, OneStream() if setting.cuda else None, known=known)
            for name, run in variants(setting, case, known, seed=seed).items():
                if name not in figures:
                    figures[name] = {"variant": name, "programs": 0, "wrong": 0, "which": []}
                    found.figures.append(figures[name])
                try:
                    right = same(run(), expected)
                except torch.OutOfMemoryError:
                    if name != "cramped":
                        raise
                    found.missing.append(f"program {case}, cramped: what it needed when pressed was not enough")
                    continue
                figures[name]["programs"] += 1
                if not right:
                    figures[name]["wrong"] += 1
                    figures[name]["which"].append(str(case))
            known.expected[case.number] = expected
            found.settings["programs"] += 1
    for name, figure in figures.items():
        found.checks.append(at_most(f"programs that differ from one stream's, {name}", 0, figure["wrong"]))
    if "cramped" in figures:
        found.checks.append(at_least("programs that ran cramped", 1, figures["cramped"]["programs"]))
    return found


def run(setting: Setting, *, programs: int | None = None, seed: int = 0, only: int | None = None) -> Found:
    """Hunt on a device; see the module's text."""
    count = programs if programs is not None else SMALL_PROGRAMS if setting.small else PROGRAMS
    numbers = range(count) if only is None else [only]
    cases = [case_of(number, seed=seed, places=places(setting)) for number in numbers]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a sum has other bits on other numbers of threads
    try:
        known = Known()
        found = hunt(setting, cases, known, seed=seed)
        if setting.cuda and only is None:
            some = [case for case in cases if case.how != "eval" and case.number in known.expected][:LEFT_OUT]
            for what in ("wait", "keep"):
                with found.going_on(f"every {what} left out"):
                    seen = left_out(setting, some, known, what, seed=seed)
                    found.figures.append({"variant": f"every {what} left out", "programs": len(some), "wrong": seen})
                    if what == "wait":
                        found.checks.append(at_least("programs that come out wrong without waits", 1, seen))
    finally:
        torch.set_num_threads(threads)
    if not setting.cuda:
        found.missing.append("streams, lifetimes and pressure on the allocator: a CPU has none")
    if not setting.small and only is None:
        found.checks.append(at_least("programs", PROGRAMS, found.settings["programs"]))
    return found


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description="hunt races with random programs")
    parser.add_argument("--programs", type=int, default=PROGRAMS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="the number of one program to run again")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--json", type=Path)
    return parser


def main() -> None:
    """Hunt by the command line; print the figures and say what differs."""
    chosen = parser().parse_args()
    setting = Setting(torch.device(chosen.device))
    from benchmarks.gpu.run import machine, saving, write

    facts = machine(setting)
    with saving(chosen.json, "races", setting, facts):
        found = run(setting, programs=chosen.programs, seed=chosen.seed, only=chosen.only)
    for figure in found.figures:
        print(figure)
    for check in found.checks:
        print(f"{'ok  ' if check.ok else 'FAIL'} {check.name}: {check.measured:g}, asked {check.asked}")
    if chosen.json is not None:
        write(chosen.json, "races", setting, facts, found)


if __name__ == "__main__":
    main()
