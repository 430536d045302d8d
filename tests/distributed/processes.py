"""Processes of one gloo group that run functions of the tests together; they are started once and used by many."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

FORKS = multiprocessing.get_context("forkserver")
"""Starts processes in which torch, and what a first recording imports, are there already."""
FORKS.set_forkserver_preload(
    ["torch._dynamo", "torch.distributed.launcher.api", "autosplit.distributed.ranks", "tests.distributed.dying"]
)


class Ranks:
    """``size`` processes; ``run`` calls a function in all of them at once.

    ``as_nccl``: messages go as NCCL brings them (:mod:`tests.distributed.rendezvous`).
    """

    def __init__(self, size: int, *, as_nccl: bool = False) -> None:
        self.size, self._as_nccl = size, as_nccl
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._started: list[tuple[Any, Connection]] = []

    def run(self, function: Callable[..., Any], *args: Any, timeout_s: float = 120.0, **options: Any) -> list[Any]:
        """Call ``function(*args, **options)`` in every process and return what each returned, by rank.

        The function is one of a module; ranks are told apart by ``torch.distributed.get_rank()``. Raises the first
        rank's error as RuntimeError with its traceback; after an error, or when time is out, all processes end.
        """
        self._start()
        for _, pipe in self._started:
            pipe.send((function, args, options))
        found: list[tuple[bool, Any]] = []
        for rank, (_, pipe) in enumerate(self._started):
            try:
                found.append(pipe.recv() if pipe.poll(timeout_s) else (False, f"rank {rank} gave no answer in time"))
            except (EOFError, ConnectionError):
                found.append((False, f"rank {rank} ended"))
        if not all(right for right, _ in found):
            self.close()
            raise RuntimeError("\n".join(f"rank {n}: {text}" for n, (right, text) in enumerate(found) if not right))
        return [value for _, value in found]

    def _start(self) -> None:
        if self._started:
            return
        self._folder = tempfile.TemporaryDirectory()
        store = Path(self._folder.name) / "store"
        for rank in range(self.size):
            own, other = FORKS.Pipe()
            process = FORKS.Process(
                target=_serve, args=(rank, self.size, str(store), other, self._as_nccl), daemon=True
            )
            process.start()
            self._started.append((process, own))
            other.close()

    def close(self) -> None:
        for process, pipe in self._started:
            pipe.close()
            process.join(1.0)
            process.kill()
            process.join()
        self._started.clear()
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


def _serve(rank: int, size: int, store: str, pipe: Connection, as_nccl: bool) -> None:
    import torch
    import torch.distributed as dist

    from autosplit.distributed.join import _JOINED
    from tests.distributed import rendezvous

    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size))
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    if as_nccl:
        rendezvous.install()
    while True:
        try:
            function, args, options = pipe.recv()
        except (EOFError, ConnectionError):
            for world in _JOINED.values():
                world.watch.close()
            os._exit(0)
        try:
            answer: tuple[bool, Any] = True, function(*args, **options)
        except BaseException:
            answer = False, traceback.format_exc()
        pipe.send(answer)


class Pool:
    """Groups of processes by their number."""

    def __init__(self, *, as_nccl: bool = False) -> None:
        self._groups: dict[int, Ranks] = {}
        self._as_nccl = as_nccl

    def __call__(self, size: int) -> Ranks:
        """Return the group of ``size`` processes."""
        if size not in self._groups:
            self._groups[size] = Ranks(size, as_nccl=self._as_nccl)
        return self._groups[size]

    def close(self) -> None:
        for group in self._groups.values():
            group.close()


def first(found: Sequence[Any]) -> Any:
    (value,) = [one for one in found if one is not None]
    return value


def error_of(call: Callable[..., Any], *args: Any, meet: bool = False, **options: Any) -> str:
    """Return the error that a call raises, with its class; ``meet``: ranks wait for each other behind it."""
    found = "nothing was raised"
    try:
        call(*args, **options)
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
    if meet:
        import torch.distributed as dist

        dist.barrier()
    return found
