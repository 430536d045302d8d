"""A rank that is killed while it saves leaves the checkpoint before, or the whole new one."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from autosplit.distributed.checkpoint import latest, restore, save
from tests.distributed.moments import Moment, Watch
from tests.distributed.parts import OPTIMIZERS, Plain, check_same, my_part, state_of, train, uninterrupted
from tests.distributed.processes import FORKS


def killed_while_saving(rank: int, size: int, folder: Path, moment: Moment, wait: bool) -> None:
    """Save three checkpoints; one rank does not survive the third. The first makes what is made once."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    part = my_part(seed=1)
    optimizers = OPTIMIZERS["AdamW, groups"](part)
    watch = Watch()
    for step in (1, 2, 3):
        train(part, optimizers, range(step - 1, step))
        if step == 3 and rank == moment.rank:
            watch.arm(moment)
        watch.save(folder, step, part, optimizers, wait=wait)
    os._exit(0)


def saved_until_killed(folder: Path, moment: Moment, *, wait: bool, size: int = 3) -> int:
    """Return the newest step after a kill, which has to be whole; training goes on from there."""
    processes = [
        FORKS.Process(target=killed_while_saving, args=(rank, size, folder, moment, wait)) for rank in range(size)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(100)
        process.kill()
        process.join()
    assert processes[moment.rank].exitcode == -signal.SIGKILL
    step = latest(folder)
    plain = Plain(2)
    optimizers = OPTIMIZERS["AdamW, groups"](plain)
    restore(folder, plain, optimizers)
    train(plain, optimizers, range(step, 4))
    check_same([state_of(plain)], uninterrupted("AdamW, groups", 4))
    for again in range(step + 1, 5):
        save(folder, again, plain)
    assert [path.name for path in sorted(folder.glob("step-*"))] == ["step-1", "step-2", "step-3", "step-4"]
    return step


@pytest.mark.parametrize(
    ("moment", "wait", "newest"),
    [
        (Moment(2, event="c_call", function="fsync"), True, 2),  # its own file is not on the disk
        (Moment(0, event="c_call", function="rename", count=2), False, 2),  # the first completes DCP's table
        (Moment(0, event="c_return", function="rename", count=2), True, 3),
    ],
)
def test_a_kill_leaves_the_checkpoint_before_or_the_whole_new_one(tmp_path, moment, wait, newest):
    assert saved_until_killed(tmp_path, moment, wait=wait) == newest


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_a_kill_at_any_moment_leaves_a_checkpoint(tmp_path, seed):
    draw = random.Random(seed)
    moment = Moment(draw.randrange(3), share=0.98 * draw.random())
    assert saved_until_killed(tmp_path, moment, wait=seed % 2 == 0) in (2, 3)
