"""Ranks of a training are killed at any moment: all end with the cause, and a restart goes on to the same losses."""

from __future__ import annotations

import random
import re
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

from autosplit.distributed.checkpoint import latest, restore
from tests.distributed import dying
from tests.distributed.launching import Ended, Kill, causes, launch, root_cause
from tests.distributed.models import tokens
from tests.distributed.moments import Moment
from tests.distributed.processes import Pool

ENDS_S = 30.0
"""Within so many seconds all ranks have ended."""
AT_WORK = r"in stage \d, (forward|backward), microbatch \d|between actions|outside a step|in \w.*"


def some(*which: int) -> pytest.MarkDecorator:
    """Return a parametrisation by all 20 cases in a campaign, and by some of them in a full run."""
    every = pytest.param(range(20), id="20", marks=pytest.mark.campaign)
    return pytest.mark.parametrize("which", [every, pytest.param(which, id="some", marks=pytest.mark.slow)])


def tell(capfd: pytest.CaptureFixture[str], text: str) -> None:
    """Print figures of a run whatever pytest captures."""
    with capfd.disabled():
        print(f"\n{text}")


# -- all end, with the cause -------------------------------------------------------------------------------------------
def killed(folder: Path, kill: Kill, size: int, *, torchrun: bool) -> Ended:
    """Kill a rank of a training that saves nothing; check how all ended."""
    folder.mkdir()
    run = launch(dying.train, size, folder, 1000, kill=kill, torchrun=torchrun, agent=not torchrun, limit_s=120.0)
    assert not run.left, run
    assert run.codes == [1]
    assert run.seconds < ENDS_S, run
    rank, _ = root_cause(run)
    assert rank == kill.rank, run.stderr
    for text in causes(run).values():
        assert re.fullmatch(f"rank {rank} was killed, last seen ({AT_WORK})", text), text
    return run


@some(3, 14)
def test_kills(tmp_path: Path, capfd: pytest.CaptureFixture[str], which: Sequence[int]) -> None:
    draw = random.Random(21)
    sizes = [2 + n % 2 for n in range(20)]
    kills = [
        Kill(draw.randrange(size), within_s=draw.choice((1.0, 4.0, 8.0)), at_start=n < 10)
        for n, size in enumerate(sizes)
    ]
    with ThreadPoolExecutor(2) as pool:
        runs = list(pool.map(lambda n: killed(tmp_path / str(n), kills[n], sizes[n], torchrun=n == 19), which))
    for n, run in zip(which, runs, strict=True):
        assert kills[n].at_start or set(causes(run)) == set(range(sizes[n])) - {kills[n].rank}
    named = sum(bool(causes(run)) for run in runs)
    tell(
        capfd,
        f"{len(which)} kills: all ended within {max(run.seconds for run in runs):.1f} s, {named} with the last action",
    )


# -- a restart goes on -------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def undisturbed(ranks: Pool, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """The folder of a training that nobody disturbed, by the number of ranks."""
    folders: dict[int, Path] = {}

    def of(size: int) -> Path:
        if size not in folders:
            folders[size] = tmp_path_factory.mktemp("undisturbed")
            ranks(size).run(dying.train, folders[size])
        return folders[size]

    return of


def restarted(
    folder: Path, rank: int, expected: list[tuple[int, str]], *, size: int, ready: int, torchrun: bool
) -> int:
    """Kill a rank once, some time after step ``ready``; return behind which step the training went on."""
    folder.mkdir()
    kill = Kill(rank, within_s=0.6)
    arguments = (folder, dying.STEPS, ready, 0.2)
    run = launch(
        dying.train, size, *arguments, kill=kill, torchrun=torchrun, agent=not torchrun, restarts=1, limit_s=240.0
    )
    assert run.codes == [0], run.stderr
    assert not run.left
    said = causes(run)
    assert set(said) == set(range(size)) - {rank}, run.stderr
    assert all(re.fullmatch(f"rank {rank} was killed, last seen ({AT_WORK})", text) for text in said.values()), said
    first_start, begin = dying.starts(folder)
    assert first_start == 0
    for own in range(size):
        found = dying.losses(folder, own)
        assert set(found) <= set(expected), (found, expected)
        assert found[begin - dying.STEPS :] == expected[begin:]
        assert dying.starts(folder, own) == [0, begin]
    assert begin > ready - dying.EVERY
    return begin


@some(4, 7)
def test_restarts(
    tmp_path: Path, undisturbed: Callable[[int], Path], capfd: pytest.CaptureFixture[str], which: Sequence[int]
) -> None:
    draw = random.Random(23)
    expected = {size: dying.losses(undisturbed(size)) for size in (2, 3)}
    assert all([step for step, _ in own] == list(range(1, dying.STEPS + 1)) for own in expected.values())
    kills = [(size, draw.randrange(size), draw.randrange(1, 9)) for size in (2, 3) * 10]

    def run(n: int) -> int:
        size, rank, ready = kills[n]
        return restarted(tmp_path / str(n), rank, expected[size], size=size, ready=ready, torchrun=n == 1)

    with ThreadPoolExecutor(2) as pool:
        begins = sorted(pool.map(run, which))
    tell(capfd, f"{len(which)} restarts went on behind steps {begins} of {dying.STEPS}")


# -- a kill during a save ----------------------------------------------------------------------------------------------
def killed_while_saving(folder: Path, moment: Moment, expected: dict[int, Tensor], *, size: int, wait: bool) -> int:
    """Kill a rank in the third save; return the newest step, which a plain model loads."""
    folder.mkdir()
    run = launch(dying.save_and_die, size, folder, moment, wait, limit_s=120.0)
    assert run.codes[moment.rank] == -signal.SIGKILL, run
    assert not run.left
    assert run.seconds < ENDS_S
    for text in causes(run).values():
        assert re.match(f"rank {moment.rank}(, which hosts the store,)? was killed", text)
    step = latest(folder)
    assert step in (2, 3)
    if wait and step == 2:
        saving = rf"saves a checkpoint {re.escape(str(folder))}/step-3, and another rank has ended meanwhile: rank "
        assert re.search(rf"{saving}{moment.rank}(, which hosts the store,)? was killed", run.stderr), run.stderr
    plain = dying.Tied()
    others = restore(folder, plain, torch.optim.AdamW(plain.parameters()))
    assert others["step"] == step
    assert torch.equal(plain.eval()(*tokens(8).args), expected[step])
    return step


@pytest.fixture(scope="module")
def outputs(ranks: Pool, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Tensor]:
    """What the model gives after every step, in eval mode."""
    found: dict[int, Tensor] = ranks(2).run(dying.outputs, tmp_path_factory.mktemp("outputs"), 3)[-1]
    return found


@pytest.mark.quick
@pytest.mark.parametrize(
    ("moment", "wait", "newest"),
    [
        (Moment(1, event="c_call", function="fsync"), True, 2),  # its own file is not on the disk
        (Moment(0, event="c_call", function="rename", count=2), False, 2),  # the first completes DCP's table
        (Moment(0, event="c_return", function="rename", count=2), True, 3),
    ],
)
def test_a_kill_during_a_save_leaves_a_checkpoint(
    tmp_path: Path, outputs: dict[int, Tensor], moment: Moment, wait: bool, newest: int
) -> None:
    assert killed_while_saving(tmp_path / "run", moment, outputs, size=2, wait=wait) == newest


@some(2, 9)
def test_kills_during_a_save(
    tmp_path: Path, outputs: dict[int, Tensor], capfd: pytest.CaptureFixture[str], which: Sequence[int]
) -> None:
    draw = random.Random(22)
    moments = [Moment(draw.randrange(2), share=0.98 * draw.random()) for _ in range(20)]

    def run(n: int) -> int:
        return killed_while_saving(tmp_path / str(n), moments[n], outputs, size=2, wait=n % 2 == 0)

    with ThreadPoolExecutor(2) as pool:
        steps = list(pool.map(run, which))
    tell(
        capfd,
        f"{len(which)} kills during a save: {steps.count(2)} left the checkpoint before, {steps.count(3)} the new one",
    )
