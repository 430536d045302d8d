"""Every case in a process of its own, with a time limit and a memory limit.

    parent (torch, autosplit and the group's library imported, nothing run) ──fork──► child: one case ──pipe──► result

A fork costs no imports; nothing that runs in a child reaches the next one.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from benchmarks.zoo.case import Case
from benchmarks.zoo.measure import described, measure, warm_up

_FORK = multiprocessing.get_context("fork")
_POLL_S = 0.5


@dataclass(frozen=True)
class Limits:
    """Seconds and bytes (of address space beyond the parent's) that one case may take."""

    seconds: float = 180.0
    bytes: int = 8 * 2**30


@dataclass
class _Child:
    case: Case
    process: Any
    results: Connection
    started: float


def run_all(
    cases: Sequence[Case], *, jobs: int, limits: Limits, measure: Callable[[Case], dict[str, Any]] = measure
) -> Iterator[dict[str, Any]]:
    """Yield what ``measure`` returns of each case, as it comes, with at most ``jobs`` processes at a time."""
    waiting, running = list(cases), []
    while waiting or running:
        while waiting and len(running) < jobs:
            running.append(_start(waiting.pop(0), limits, measure))
        wait([child.results for child in running], timeout=_POLL_S)
        for child in list(running):
            result = _result(child, limits)
            if result is not None:
                running.remove(child)
                yield result | {"seconds": time.perf_counter() - child.started}


def _start(case: Case, limits: Limits, measure: Callable[[Case], dict[str, Any]]) -> _Child:
    receiver, sender = _FORK.Pipe(duplex=False)
    process = _FORK.Process(target=_child, args=(case, sender, limits, measure), daemon=True)
    process.start()
    sender.close()
    return _Child(case, process, receiver, time.perf_counter())


def _child(case: Case, results: Connection, limits: Limits, measure: Callable[[Case], dict[str, Any]]) -> None:
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        torch.set_num_threads(1)
        taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (taken + limits.bytes, resource.RLIM_INFINITY))
        try:
            warm_up()
            result = measure(case)
        except BaseException as error:
            result = _failed(case, described(error), broken=True)
        results.send(result)
        results.close()


def _result(child: _Child, limits: Limits) -> dict[str, Any] | None:
    if child.results.poll():
        try:
            result = child.results.recv()
        except EOFError:
            child.process.join()
            text = f"the process ended with code {child.process.exitcode} and no result"
            return _failed(child.case, {"type": "Crash", "text": text, "where": []})
        child.process.join(timeout=5)
        if child.process.is_alive():
            child.process.kill()
        return result
    if time.perf_counter() - child.started > limits.seconds:
        child.process.kill()
        child.process.join()
        return _failed(child.case, {"type": "Timeout", "text": f"over {limits.seconds:g} s", "where": []})
    return None


def _failed(case: Case, error: dict[str, Any], *, broken: bool = False) -> dict[str, Any]:
    """Return the result of a case without an answer; ``broken`` says that the zoo's own model does not run."""
    head = {"name": case.name, "group": case.group, "kind": case.kind, "blocks": case.blocks}
    return head | {"answer": False, "checks": {}, "error": error, "broken": broken}
