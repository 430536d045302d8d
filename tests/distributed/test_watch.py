"""A rank that fails ends all ranks within a bounded time, with the first cause, its rank and its action."""

from __future__ import annotations

import re
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.distributed import failing
from tests.distributed.launching import Ended, Kill, causes, launch, root_cause

LIMIT_S = 2.0
"""Of an action, in tests in which one hangs."""
KILLED_S, HUNG_S = 12.0, 15.0
"""Bounds of seconds on a busy machine; an idle one takes 2 and 5."""
FAULT = "in stage {0}, forward, microbatch 2"


def assert_all_end(run: Ended, culprit: int, cause: str, *, within_s: float, size: int = 3) -> None:
    """Every other rank says the same cause, and ends with an error; nobody is left."""
    others = set(range(size)) - {culprit}
    said = causes(run)
    assert others <= set(said), run.stderr
    assert all(re.fullmatch(cause, text) for text in said.values()), said
    assert culprit == 0 or len(set(said.values())) == 1, said  # without a store each says what it last saw of rank 0
    assert not run.left
    assert all(code == 1 for rank, code in enumerate(run.codes) if rank != culprit), run
    assert run.codes[culprit] != 0
    assert run.seconds < within_s


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_raises(rank):
    run = launch(failing.pipeline, 3, "raise", rank)
    assert_all_end(run, rank, f"rank {rank} raised ValueError: a bad row, {FAULT.format(rank)}", within_s=KILLED_S)
    assert rank not in causes(run)
    assert "\nValueError: a bad row" in run.stderr  # its own exception goes on
    message = "autosplit.errors.DeviceError: " + causes(run)[2]
    assert run.stderr.count(message) == 2  # not gloo's "Connection closed"


@pytest.mark.slow
def test_a_rank_that_catches_its_error_and_goes_on():
    run = launch(failing.pipeline, 3, "raise and go on", 1)
    assert_all_end(run, 1, f"rank 1 raised ValueError: a bad row, {FAULT.format(1)}", within_s=KILLED_S + 8)


@pytest.mark.parametrize("rank", range(3))
def test_a_rank_that_is_killed(rank):
    run = launch(failing.pipeline, 3, kill=Kill(rank))
    hosts = ", which hosts the store," if rank == 0 else ""
    action = rf"in stage {rank}, (forward|backward), microbatch \d|between actions|outside a step"
    assert_all_end(run, rank, f"rank {rank}{hosts} was killed, last seen ({action})", within_s=KILLED_S)
    assert run.codes[rank] == -signal.SIGKILL


def test_a_rank_that_gets_sigterm():
    run = launch(failing.pipeline, 3, kill=Kill(1, signal.SIGTERM))
    assert run.codes == [1, -signal.SIGTERM, 1]
    assert all(text.startswith("rank 1 was killed, last seen") for text in causes(run).values())


@pytest.mark.slow
def test_a_rank_that_gets_sigterm_while_it_waits_in_gloo():
    assert_all_end(
        launch(failing.terminated_in_a_wait, 2, kill=Kill(1, signal.SIGTERM)),
        1,
        "rank 1 was killed, last seen outside a step",
        within_s=KILLED_S,
        size=2,
    )


@pytest.mark.slow
def test_ranks_of_other_machines_are_known_by_their_heartbeat_alone():
    cause = rf"rank 1 raised ValueError: a bad row, {FAULT.format(1)}"
    assert_all_end(launch(failing.apart, 3, "raise"), 1, cause, within_s=KILLED_S)
    cause = r"rank 1 was killed or stopped \(no heartbeat for 3 s\), last seen in stage 1, .*"
    assert_all_end(launch(failing.apart, 3, "kill", kill=Kill(1)), 1, cause, within_s=HUNG_S)


def test_a_rank_that_hangs():
    run = launch(failing.pipeline, 3, "hang", 1, LIMIT_S)
    assert_all_end(run, 1, f"rank 1 hangs {FAULT.format(1)} for 2 s", within_s=HUNG_S)
    assert causes(run)[1] == causes(run)[0]


@pytest.mark.parametrize(("fault", "rank"), [("stop", 2), ("freeze", 1)])
def test_a_rank_without_a_heartbeat_is_killed(fault, rank):
    run = launch(failing.pipeline, 3, fault, rank, LIMIT_S)
    cause = rf"rank {rank} was killed or stopped \(no heartbeat for 2 s\), last seen {FAULT.format(rank)}"
    assert_all_end(run, rank, cause, within_s=HUNG_S)
    assert run.codes[rank] == -signal.SIGKILL


@pytest.mark.slow
def test_a_stopped_rank_that_hosts_the_store():
    run = launch(failing.pipeline, 3, "stop", 0, LIMIT_S)
    for text in causes(run).values():
        assert re.match("rank 0, which hosts the store, was killed", text)
    assert set(causes(run)) == {1, 2}
    assert run.codes == [-signal.SIGKILL, 1, 1]
    assert run.seconds < HUNG_S


def test_ranks_that_wait_for_each_other():
    run = launch(failing.pipeline, 3, "deadlock", 1, LIMIT_S)
    places = "rank 0 in stage 0, backward, microbatch 0; rank 1 in stage 1, forward, microbatch 3(; rank 2 in .*)?"
    assert_all_end(run, 0, f"ranks wait for each other for 2 s: {places}", within_s=HUNG_S)
    assert set(causes(run)) == {0, 1, 2}


def test_waiting_for_a_rank_that_has_finished():
    run = launch(failing.pipeline, 3, "leave", 2, LIMIT_S)
    assert set(causes(run)) == {0, 1}
    assert re.fullmatch("rank 1 in stage 1, .* waits for rank 2, which has finished", causes(run)[0])
    assert run.codes == [1, 1, 0]
    assert not run.left


@pytest.mark.slow
def test_a_process_of_multiprocessing_that_raises_outside_a_step():
    assert_all_end(
        launch(failing.pipeline, 3, "raise outside", 1),
        1,
        "rank 1 raised ValueError: no more data, outside a step",
        within_s=KILLED_S,
    )


def test_a_process_of_multiprocessing_that_ends_too_early():
    run = launch(failing.end_early, 2)
    assert run.codes == [1, 0]
    assert causes(run) == {0: "rank 0 in a receive waits for rank 1, which has finished"}


@pytest.mark.slow
def test_a_connection_lost_in_a_wait_of_the_users_own_is_no_cause():
    cause = r"rank 1 was killed or stopped \(no heartbeat for 3 s\), last seen outside a step"
    assert_all_end(launch(failing.in_a_wait_of_ones_own, 3, kill=Kill(1)), 1, cause, within_s=HUNG_S)


@pytest.mark.slow
def test_a_lost_connection_without_a_cause_is_one():
    run = launch(failing.lost_connection, 2)
    cause = "rank 0 raised RuntimeError: Connection closed by peer, between actions"
    assert_all_end(run, 0, cause, within_s=HUNG_S, size=2)


@pytest.mark.slow
def test_a_lost_connection_is_explained_when_the_culprit_has_ended_despite_sigterm():
    run = launch(failing.explained, 2)
    assert run.codes == [1, -signal.SIGKILL]
    assert run.stderr.splitlines()[-1] == "autosplit.errors.DeviceError: rank 1 was killed, last seen outside a step"


@pytest.mark.parametrize(
    "given",
    [
        (failing.pipeline, 3, "slow outside", 1, LIMIT_S, 4),
        (failing.one_works_long, 2),
        (failing.pipeline, 3, "finish", 0, LIMIT_S, 4),
        (failing.pipeline, 3, "finish", 2, LIMIT_S, 4),
        (failing.terminated_child, 2),
    ],
    ids=["slow outside", "one works long", "finish 0", "finish 2", "terminated child"],
)
def test_no_failure(given):
    run = launch(*given)
    assert set(run.codes) == {0}, run.stderr
    assert run.stderr == ""


@pytest.mark.slow
def test_a_second_watch_starts_anew():
    run = launch(failing.twice, 2)
    assert_all_end(run, 1, f"rank 1 raised ValueError: a bad row, {FAULT.format(1)}", within_s=KILLED_S, size=2)


@pytest.mark.parametrize("function", [failing.alone, failing.cost])
def test_one_rank(function):
    run = launch(function, 1)
    assert run.codes == [0], run.stderr


def test_a_rank_without_a_watch():
    run = launch(failing.not_all, 2)
    assert run.codes == [1, 0]
    assert "DeviceError: rank 1 has not made the pipe within 0.5 s; every rank must" in run.stderr


def test_a_watch_over_a_store_in_a_file(ranks):
    ranks(2).run(failing.pipeline, "", -1, LIMIT_S, 1)


@pytest.mark.slow
def test_torchrun_reports_a_rank_that_is_killed():
    run = launch(failing.pipeline, 2, kill=Kill(1), torchrun=True)
    assert not run.left
    assert re.match("rank 1 was killed, last seen ", causes(run)[0])
    assert root_cause(run)[0] == 1
    assert run.seconds < HUNG_S


@pytest.mark.slow
def test_torchrun_reports_an_exception_outside_a_step():
    run = launch(failing.pipeline, 2, "raise outside", 1, torchrun=True)
    rank, text = root_cause(run)
    assert rank == 1
    assert text.splitlines()[0].startswith("Traceback")
    assert text.splitlines()[-1].strip() == "rank 1 raised ValueError: no more data, outside a step"
    assert causes(run) == {0: "rank 1 raised ValueError: no more data, outside a step"}
    assert not run.left


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["raise", "hang", "stop"])
def test_torchrun_reports_faults(fault):
    script = fault == "raise"  # of a function that raises an agent reports the exception itself
    run = launch(failing.pipeline, 3, fault, 2, LIMIT_S, torchrun=script, agent=not script)
    rank, text = root_cause(run)
    assert rank == 2
    assert FAULT.format(2) in text
    assert not run.left


@pytest.mark.slow
def test_a_script_that_ends_without_closing_is_no_failure():
    run = launch(failing.pipeline, 2, "", -1, LIMIT_S, 3, False, torchrun=True)
    assert run.codes == [0], run.stderr
    assert "autosplit" not in run.stderr


@pytest.mark.campaign
def test_no_end_is_taken_for_a_failure():
    with ThreadPoolExecutor(8) as pool:
        culprits = [n % 3 for n in range(30)]
        runs = list(pool.map(lambda rank: launch(failing.pipeline, 3, "finish", rank, LIMIT_S, 3), culprits))
    for run in runs:
        assert run.codes == [0, 0, 0], run.stderr
        assert run.stderr == ""


@pytest.mark.slow
def test_a_restart_knows_nothing_of_the_failure():
    run = launch(failing.first_time, 2, agent=True, restarts=1)
    assert run.codes == [0], run.stderr
    assert causes(run) == {0: f"rank 1 raised ValueError: a bad row, {FAULT.format(1)}"}


@pytest.mark.campaign
@pytest.mark.parametrize("agent", [False, True])
def test_random_kills(agent):
    with ThreadPoolExecutor(4) as pool:
        ranks = [n % 3 for n in range(6 if agent else 20)]
        runs = list(pool.map(lambda rank: launch(failing.pipeline, 3, kill=Kill(rank), agent=agent), ranks))
    for rank, run in zip(ranks, runs, strict=True):
        assert not run.left
        assert run.seconds < 30.0
        said = causes(run)
        assert set(said) == {0, 1, 2} - {rank}, run.stderr
        assert all(re.match(rf"rank {rank}(, which hosts the store,)? was killed", text) for text in said.values())
        if agent:
            assert root_cause(run)[0] == rank
