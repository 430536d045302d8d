"""Starts ranks that may die: for tests of failures.

``launch(function, 3, kill=Kill(1))`` runs a function of a module in three new processes of one gloo group, kills rank 1
at a random moment after every rank has called ``started()``, and returns how they ended. ``torchrun=True`` starts them
by torchrun's command, ``agent=True`` by torchrun's agent in a forked process, whose ranks import nothing anew; else
rank 0 hosts the store, as it does under ``torch.multiprocessing``. ``causes(ended)`` is what they said of it,
``root_cause(ended)`` what torchrun did.
"""

from __future__ import annotations

import os
import pickle
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from tests.distributed.processes import FORKS

_ROOT = Path(__file__).resolve().parents[2]
_FOLDER = "AUTOSPLIT_TEST_LAUNCH"


class Kill(NamedTuple):
    """A signal to a rank, between 0 and ``within_s`` seconds after all have started.

    ``at_start``: after the processes were made, before they have met.
    """

    rank: int
    number: int = signal.SIGKILL
    within_s: float = 0.5
    at_start: bool = False


class Ended(NamedTuple):
    """How processes ended.

    Attributes:
        codes: exit codes by rank, negative for a signal; under torchrun only its own.
        seconds: from the kill, or from the moment when all had started, until the last one ended.
        stderr: what all wrote, torchrun too.
        left: processes that still ran when time was out, by rank, or after torchrun, by number; they are killed then.
    """

    codes: list[int | None]
    seconds: float
    stderr: str
    left: list[int]


def started() -> None:
    """Say that this rank is at work, where somebody waits for it."""
    if _FOLDER in os.environ:
        Path(os.environ[_FOLDER], f"started{os.environ['RANK']}").touch()


def causes(run: Ended) -> dict[int, str]:
    return {int(rank): text for rank, text in re.findall(r"autosplit: rank (\d) ends: (.*)", run.stderr)}


def root_cause(run: Ended) -> tuple[int, str]:
    [(rank, text)] = re.findall(r"Root Cause .*?rank +: (\d).*?traceback : (.*?)\n=====", run.stderr, re.DOTALL)
    return int(rank), text


def launch(
    function: Callable[..., None],
    size: int,
    *args: Any,
    kill: Kill | None = None,
    torchrun: bool = False,
    agent: bool = False,
    restarts: int = 0,
    limit_s: float = 60.0,
) -> Ended:
    """Run ``function(*args)`` in ``size`` processes until all have ended, at most ``limit_s`` seconds.

    ``restarts``: how often torchrun starts all ranks again after a failure.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run: _Torchrun | _Agent | _Processes
        if torchrun:
            run = _Torchrun(folder, size, function, args, restarts)
        elif agent:
            run = _Agent(folder, size, function, args, restarts)
        else:
            run = _Processes(folder, size, function, args)
        end = time.monotonic() + limit_s
        try:
            awaited = "pid?" if kill is not None and kill.at_start else "started*"
            while len(list(folder.glob(awaited))) < size and run.running and time.monotonic() < end:
                time.sleep(0.01)
            begin = time.monotonic()
            if kill is not None:
                time.sleep(random.uniform(0.0, kill.within_s))
                os.kill(int((folder / f"pid{kill.rank}").read_text()), kill.number)
                begin = time.monotonic()
            while run.running and time.monotonic() < end:
                time.sleep(0.01)
        finally:
            left = run.end()
        texts = [path.read_text(errors="replace") for path in sorted(folder.glob("stderr*"))]
        return Ended(run.codes, time.monotonic() - begin, "".join(texts), left)


class _Processes:
    """One process per rank, forked from one that has torch; rank 0 hosts the store."""

    def __init__(self, folder: Path, size: int, function: Callable[..., None], args: Sequence[Any]) -> None:
        self._ranks = [FORKS.Process(target=_forked, args=(folder, n, size, function, args)) for n in range(size)]
        for process in self._ranks:
            process.start()

    @property
    def running(self) -> bool:
        return any(process.exitcode is None for process in self._ranks)

    @property
    def codes(self) -> list[int | None]:
        return [process.exitcode for process in self._ranks]

    def end(self) -> list[int]:
        left = [rank for rank, process in enumerate(self._ranks) if process.exitcode is None]
        for process in self._ranks:
            process.kill()
            process.join()
        return left


class _Torchrun:
    """A torchrun of this machine and its ranks."""

    def __init__(
        self, folder: Path, size: int, function: Callable[..., None], args: Sequence[Any], restarts: int
    ) -> None:
        self._folder = folder
        (folder / "call").write_bytes(pickle.dumps((function, args)))
        options = f"-m torch.distributed.run --standalone --nproc-per-node {size} --max-restarts {restarts}".split()
        environment = {**os.environ, _FOLDER: str(folder), "OMP_NUM_THREADS": "1"}
        with open(folder / "stderr", "w") as file:
            self._agent = subprocess.Popen(
                [sys.executable, *options, "-m", __name__], cwd=_ROOT, env=environment, stderr=file
            )

    @property
    def running(self) -> bool:
        return self._agent.poll() is None

    @property
    def codes(self) -> list[int | None]:
        return [self._agent.returncode]

    def end(self) -> list[int]:
        self._agent.kill()
        self._agent.wait()
        return _kill_left(self._folder)


class _Agent:
    """The agent of a torchrun, and its ranks, forked from processes that have torch."""

    def __init__(
        self, folder: Path, size: int, function: Callable[..., None], args: Sequence[Any], restarts: int
    ) -> None:
        self._folder = folder
        self._agent = FORKS.Process(target=_agent, args=(folder, size, function, args, restarts))
        self._agent.start()

    @property
    def running(self) -> bool:
        return self._agent.exitcode is None

    @property
    def codes(self) -> list[int | None]:
        return [self._agent.exitcode]

    def end(self) -> list[int]:
        self._agent.kill()
        self._agent.join()
        return _kill_left(self._folder)


def _kill_left(folder: Path) -> list[int]:
    numbers = [int(line) for path in folder.glob("numbers*") for line in path.read_text().split()]
    left = []
    for number in numbers:
        with suppress(OSError):
            if Path(f"/proc/{number}/cmdline").read_bytes():  # else it has ended, and nobody has asked how
                left.append(number)
                os.kill(number, signal.SIGKILL)
    return left


def _agent(folder: Path, size: int, function: Callable[..., None], args: Sequence[Any], restarts: int) -> None:
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    with open(folder / "stderr", "w") as file:
        os.dup2(file.fileno(), 2)
    os.environ[_FOLDER] = str(folder)
    config = LaunchConfig(
        1, 1, size, max_restarts=restarts, rdzv_backend="c10d", rdzv_endpoint="localhost:0", start_method="fork"
    )
    elastic_launch(config, _of_an_agent)(function, args)


def _of_an_agent(function: Callable[..., None], args: Sequence[Any]) -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)  # not the agent's handlers
    _say_number(Path(os.environ[_FOLDER]))
    _meet()
    _call(function, args)


def _forked(folder: Path, rank: int, size: int, function: Callable[..., None], args: Sequence[Any]) -> None:
    import torch.distributed as dist

    with open(folder / f"stderr{rank}", "w") as file:
        os.dup2(file.fileno(), 2)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size))
    os.environ[_FOLDER] = str(folder)
    _say_number(folder)
    place, new = folder / "port", folder / "port.new"
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, size, is_master=True, wait_for_workers=False)
        new.write_text(str(store.port))
        new.rename(place)
    else:
        while not place.exists():
            time.sleep(0.01)
        store = dist.TCPStore("127.0.0.1", int(place.read_text()), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    _call(function, args)


def _call(function: Callable[..., None], args: Sequence[Any]) -> None:
    import torch

    torch.set_num_threads(1)
    function(*args)


def _meet() -> None:
    """Make the group; a restart may have the store of the attempt before, with addresses of ranks that have ended."""
    import torch.distributed as dist

    store, rank, size = next(dist.rendezvous("env://"))
    store = dist.PrefixStore(os.environ["TORCHELASTIC_RESTART_COUNT"], store)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)


def _say_number(folder: Path) -> None:
    own = folder / f"pid{os.environ['RANK']}"
    own.with_suffix(".new").write_text(str(os.getpid()))
    own.with_suffix(".new").rename(own)
    with open(folder / f"numbers{os.environ['RANK']}", "a") as file:
        file.write(f"{os.getpid()}\n")


if __name__ == "__main__":
    _say_number(Path(os.environ[_FOLDER]))
    _meet()
    _call(*pickle.loads(Path(os.environ[_FOLDER], "call").read_bytes()))
