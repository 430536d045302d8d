"""How fast a device of this machine computes: small modules timed by the operation, and a roofline fitted to them.

    each case      forward and backward under the account of work, which times each kernel
    more runs      medians of each operation's kernel time
    plain runs     what the same cases take besides their kernels: the framework's way to them, per operation

One command, one to three minutes on a quiet core: ``autosplit profile --calibrate``.
"""

from __future__ import annotations

import datetime
import os
import platform
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from autosplit.devices import Clock, clock_of
from autosplit.profile.calibration_cases import Case, Program, cases
from autosplit.profile.measured import intra_op_threads
from autosplit.profile.node_costs.ledger import Ledger, Operation
from autosplit.profile.node_costs.work import work_of
from autosplit.trace.borrowed.state import random_state
from cost_models.calibration import Calibrated, Stamp
from cost_models.registry import device as device_spec
from cost_models.specs import DeviceSpec, Source
from cost_models.work import OpWork

Progress = Callable[[str, float], None]
"""Called with the name of the next case and the share of cases that is done."""

_CPU = torch.device("cpu")

_LONG_S = 0.25
"""A case is repeated for about as long as this, and at least twice."""

_MOST, _MOST_QUICK = 9, 3

_SHORT_S = 1e-4
"""Kernels shorter than this tell what the framework adds to each."""


@dataclass(frozen=True)
class TimedSample:
    """The operations of a case that do the same work, and the median of their kernels' seconds."""

    work: OpWork
    seconds: float


@dataclass(frozen=True)
class Timing:
    """One case: its operations, the seconds of the longest, and what each took besides its kernel.

    ``host_s`` is what the host took to issue each of them; 0 where host and device are one.
    """

    name: str
    samples: tuple[TimedSample, ...]
    longest_s: float
    extra_s: float
    host_s: float = 0.0


def calibrate(device: str = "cpu-lane", *, quick: bool = False, progress: Progress | None = None) -> Calibrated:
    """Time this machine's ``device`` and return its roofline fitted to that.

    ``device`` names the ``cost_models`` device, whose roofline answers for what was not timed: a CPU lane, which is one
    thread, or the CUDA device of this machine. ``quick`` takes a third of the cases and fewer repeats. On a CPU the
    times are CPU seconds of the calling thread, so that other programs disturb little; what they take of the machine's
    caches and memory bandwidth still counts.

    Raises:
        ValueError: there is no such device, or it is not in this machine.
    """
    spec = device_spec(device)
    torch_device = place_of(spec)
    chosen = [case for case in cases_for(torch_device) if case.quick or not quick]
    return fitted(time_cases(chosen, device=torch_device, quick=quick, progress=progress), device=spec)


def cases_for(device: torch.device) -> Iterator[Case]:
    """Yield the cases to time on a device; GPUs have larger sizes than CPU cores."""
    yield from cases(gpu=device.type == "cuda")


def fitted(timings: Sequence[Timing], *, device: DeviceSpec) -> Calibrated:
    """Return the roofline of ``device`` fitted to cases that were timed on it, with the day and the versions."""
    samples = [(sample.work, sample.seconds) for timing in timings for sample in timing.samples]
    stamp = _stamp(device.name)
    spec = _with_host(device, timings, date=stamp.date)
    return Calibrated.fit(samples, device=spec, stamp=stamp, issue_s=issue_s(timings))


def _with_host(device: DeviceSpec, timings: Sequence[Timing], *, date: str) -> DeviceSpec:
    """Return the device with the host's time to issue an operation as it was measured, where it was.

    On a CPU lane the host is the device, and what it adds to each operation is the calibration's ``issue_s``.
    """
    host = [timing.host_s for timing in timings if timing.host_s > 0]
    if not host:
        return device
    text = f"{date}: median over {len(host)} cases of the calibration, forward and backward, one thread"
    source = {"issue_s": Source(status="measured", text=text)}
    return device.model_copy(update={"issue_s": statistics.median(host), "sources": {**device.sources, **source}})


def place_of(spec: DeviceSpec) -> torch.device:
    """Return where torch finds a device; one whose memory is the machine's own is the CPU.

    Raises:
        ValueError: this machine does not have the device.
    """
    if spec.memory_bytes is None:
        return torch.device("cpu")
    here = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    if here is None or here not in spec.driver_names:
        seen = "no CUDA device" if here is None else f"a CUDA device that the driver calls {here!r}"
        known = ", ".join(map(repr, spec.driver_names)) or "nothing that is known"
        raise ValueError(
            f"cannot calibrate {spec.name}, which the driver calls {known}: this machine has {seen}; calibrate where "
            'the device is, or "cpu-lane", or list the driver\'s name under driver_names in a device file of your own'
        )
    return torch.device("cuda", torch.cuda.current_device())


def default_path(device: str = "cpu-lane") -> Path:
    """Return where a calibration of ``device`` is kept: in the user's cache folder, as XDG has it."""
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(cache) / "autosplit" / f"calibrated-{Path(device).name.removesuffix('.json')}.json"


def time_cases(
    chosen: Sequence[Case], *, device: torch.device = _CPU, quick: bool = False, progress: Progress | None = None
) -> list[Timing]:
    """Time cases in fp32, and those that ask for it under bf16 autocast too; the CPU with one thread."""
    timings = []
    with random_state(), intra_op_threads(1), torch.inference_mode(False), torch.enable_grad():
        for number, case in enumerate(chosen):
            if progress is not None:
                progress(case.name, number / len(chosen))
            most = _MOST_QUICK if quick else _MOST
            timings.append(_timed(case, device, most=most, low=False))
            if case.low:
                timings.append(_timed(case, device, most=most, low=True))
    return timings


def issue_s(timings: Sequence[Timing]) -> float:
    """Return what an operation costs besides its kernel: the median over the cases with short kernels."""
    extra = [timing.extra_s for timing in timings if timing.longest_s < _SHORT_S]
    return max(0.0, statistics.median(extra)) if extra else 0.0


class _TimedLedger(Ledger):
    """The account of work, with the seconds of each operation's kernel beside it."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.seconds: list[float] = []
        self._clock = clock
        self._last_s = 0.0

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run and time the operation."""
        timed = self._clock.timed(lambda: func(*args, **kwargs))
        self._last_s = timed.seconds
        return timed.result

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run and enter the operation, and note its time if it was one that computes."""
        before = len(self.operations)
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if len(self.operations) > before:
            self.seconds.append(self._last_s)
        return out


def _timed(case: Case, device: torch.device, *, most: int, low: bool) -> Timing:
    with device:
        program, leaves = case.build()
    clock = clock_of(device, threads=1)
    with device, torch.autocast(device.type, torch.bfloat16, enabled=low):
        _run(program, leaves)
        once_s = clock.timed(lambda: _run(program, leaves)).seconds
        repeats = max(2, min(most, int(_LONG_S / max(once_s, 1e-9))))
        whole, runs, host = [once_s], [], []
        operations: list[Operation] = []
        for _ in range(repeats):
            with _TimedLedger(clock) as ledger:
                _run(program, leaves)
            operations = ledger.operations
            runs.append(ledger.seconds)
            again = clock.timed(lambda: _run(program, leaves))
            whole.append(again.seconds)
            host.append(again.issue_s)
    readings: dict[OpWork, list[float]] = {}
    for operation, *times in zip(operations, *runs, strict=True):
        readings.setdefault(work_of(operation), []).append(statistics.median(times))
    samples = [TimedSample(work, statistics.median(times)) for work, times in readings.items() if any(times)]
    extra_s = (min(whole) - min(map(sum, runs))) / len(operations)
    longest_s = max(sample.seconds for sample in samples)
    name, host_s = f"{case.name}, bf16" if low else case.name, statistics.median(host) / len(operations)
    return Timing(name, tuple(samples), longest_s, extra_s, host_s)


def _run(program: Program, leaves: Sequence[torch.Tensor]) -> None:
    result = program()
    torch.autograd.grad(result, leaves, torch.ones_like(result))


def _stamp(device: str) -> Stamp:
    return Stamp(
        device=device,
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        versions={"python": platform.python_version(), "torch": str(torch.__version__)},
        threads=1,
    )
