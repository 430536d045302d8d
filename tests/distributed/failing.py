"""What the ranks of the tests of failures do: a pipeline by hand, in which one of them fails."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import time
from timeit import repeat

import torch
import torch.distributed as dist

from autosplit.distributed import board
from autosplit.distributed import watch as watch_module
from autosplit.distributed.watch import Watch
from autosplit.schedule.action import Action
from tests.distributed.launching import started

MICROBATCHES = 4


def pipeline(
    fault: str = "", culprit: int = -1, limit_s: float = 20.0, steps: int = 1_000_000, close: bool = True
) -> None:
    """All forwards, then all backwards; in step 2 a rank fails in the forward of microbatch 2, or around the step."""
    rank, size = dist.get_rank(), dist.get_world_size()
    watch = Watch(rank, size)
    for step in range(steps):
        fails = fault if (rank, step) == (culprit, 2) else ""
        if fails == "raise outside":
            raise ValueError("no more data")
        if fails == "slow outside":
            time.sleep(2 * limit_s)
        with watch.step(limit_s):
            try:
                for kind, ways in (("F", 1), ("B", -1)):
                    for microbatch in range(MICROBATCHES):
                        run(watch, Action(rank, kind, microbatch), ways, fails)
            except Exception as error:
                watch.failed(error)
                raise
        if step == 1:
            started()
    if fault == "finish" and rank != culprit:
        time.sleep(1.0)
    if close:
        watch.close()


def run(watch: Watch, action: Action, ways: int, fails: str) -> None:
    source, target = action.stage - ways, action.stage + ways
    if 0 <= source < dist.get_world_size():
        watch.doing(action, waits_for=(source,))
        transfer(watch, dist.recv, source)
    watch.doing(action)
    if action[1:] == ("F", 2):
        happen(fails, watch)
    if 0 <= target < dist.get_world_size():
        watch.doing(action, waits_for=(target,))
        transfer(watch, dist.send, target)


def transfer(watch: Watch, way: object, peer: int) -> None:
    try:
        way(torch.zeros(1000), peer)
    except RuntimeError as error:
        raise watch.explain(error) from error


def happen(fault: str, watch: Watch) -> None:
    if fault == "raise":
        raise ValueError("a bad row")
    if fault == "raise and go on":
        try:
            raise ValueError("a bad row")
        except ValueError as error:
            watch.failed(error)
            time.sleep(1000)
    if fault == "hang":
        dist.group.WORLD.get_group_store().wait(["what nobody sets"])
    if fault in ("stop", "freeze"):
        time.sleep(0.6)  # two heartbeats of this action
    if fault == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if fault == "freeze":
        ctypes.PyDLL(None).sleep(1000)  # the interpreter's lock is held
    if fault == "deadlock":
        watch.doing("a receive", waits_for=(0,))
        transfer(watch, dist.recv, 0)
    if fault == "leave":
        watch.close()
        time.sleep(10)
        os._exit(0)


def cost() -> None:
    watch = Watch(0, 1)
    action = Action(0, "F", 0)
    calls = 1000
    seconds = min(repeat(lambda: watch.doing(action, waits_for=(1,)), number=calls, repeat=50)) / calls
    assert seconds < 2e-6
    watch.close()


def lost_connection() -> None:
    watch = Watch(dist.get_rank(), dist.get_world_size())
    if dist.get_rank() == 0:
        with watch.step(20.0):
            raise watch.explain(RuntimeError("Connection closed by peer"))
    time.sleep(1000)


def explained() -> None:
    watch = Watch(dist.get_rank(), dist.get_world_size())
    if dist.get_rank() == 1:
        time.sleep(1000)
    begin = time.monotonic()
    signal.pidfd_send_signal(watch._handles[1], signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGTERM)  # as torchrun does
    error = watch.explain(RuntimeError("Connection closed by peer"))
    assert time.monotonic() - begin >= 1.0  # the culprit ends first
    raise error


def in_a_wait_of_ones_own() -> None:
    """Rank 1 is killed while the others wait for it in a receive that the watch does not know."""
    board.machine = lambda: f"machine {dist.get_rank()}"  # nobody knows at once
    Watch(dist.get_rank(), dist.get_world_size())
    started()
    if dist.get_rank() == 1:
        time.sleep(1000)
    dist.recv(torch.zeros(1), 1)


def terminated_in_a_wait() -> None:
    """Rank 1, with its second watch, gets SIGTERM while it waits in gloo, where no handler of Python's runs."""
    Watch(dist.get_rank(), dist.get_world_size()).close()
    Watch(dist.get_rank(), dist.get_world_size())
    started()
    if dist.get_rank() == 0:
        time.sleep(1000)
    dist.recv(torch.zeros(1), 0)


def terminated_child() -> None:
    """Rank 0 forks a process, which gets SIGTERM, and goes on until long after."""
    watch = Watch(dist.get_rank(), dist.get_world_size())
    if dist.get_rank() == 0:
        child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(1000,))
        child.start()
        time.sleep(0.5)
        child.terminate()
        child.join()
        time.sleep(3.0)
    dist.barrier()
    watch.close()


def one_works_long() -> None:
    """Rank 1 works for longer than the limit, while rank 0 moves."""
    watch = Watch(dist.get_rank(), dist.get_world_size())
    with watch.step(1.0):
        for _ in range(1 if dist.get_rank() == 1 else 12):
            watch.doing("an action")
            time.sleep(3.0 if dist.get_rank() == 1 else 0.25)
    watch.close()


def end_early() -> None:
    """Rank 1 finishes while rank 0 waits for it outside a step."""
    watch = Watch(dist.get_rank(), dist.get_world_size())
    if dist.get_rank() == 0:
        watch.doing("a receive", waits_for=(1,))
        transfer(watch, dist.recv, 1)


def alone() -> None:
    watch = Watch(0, 1)
    with watch.step(0.1):
        watch.failed(ValueError("a bad row"))
    watch.close()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    time.sleep(10)  # longer than a process lives whose failure others know


def twice() -> None:
    """A rank's second watch knows nothing of what its first one said."""
    pipeline(steps=2)
    pipeline("raise", 1)


def apart(function: str) -> None:
    """As if every rank ran on a machine of its own."""
    board.machine = lambda: f"machine {dist.get_rank()}"
    if function == "kill":
        pipeline()
    else:
        pipeline(function, 1)


def first_time() -> None:
    """Fails, and after torchrun's restart not."""
    again = os.environ["TORCHELASTIC_RESTART_COUNT"] != "0"
    pipeline("" if again else "raise", 1, steps=3)


def not_all() -> None:
    watch_module._START_S = 0.5
    if dist.get_rank() == 0:
        Watch(0, 2)
    time.sleep(2.0)
