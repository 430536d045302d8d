"""What lanes with streams log in a call: no copy on one card, copies beside the compute, and what they leave out."""

from __future__ import annotations

import pytest
import torch

from tests.runtime.happens_before import Keep, Op, Wait, is_before, problems
from tests.runtime.lane_models import PLACES, ROWS, WIDTH, Chain, Skips, loss
from tests.runtime.recorded_pipe import RecordedPipe

pytestmark = pytest.mark.usefixtures("double")


def operations(run: RecordedPipe, name: str) -> list[Op]:
    return [entry for entry in run.streams.log if isinstance(entry, Op) and entry.name == name]


def test_lanes_of_one_card_wait_and_do_not_copy() -> None:
    run = RecordedPipe(Skips(), *PLACES["one card"])
    run.call(torch.randn(ROWS, WIDTH), loss)
    assert operations(run, "copy") == operations(run, "stage") == []
    waits = [(e.stream, run.streams.recorded_on[e.event]) for e in run.streams.log if isinstance(e, Wait)]
    assert {("compute1", "compute0"), ("compute2", "compute1"), ("compute2", "compute0")} <= set(waits)


def test_copies_overlap_with_the_compute_on_both_sides() -> None:
    run = RecordedPipe(Chain(), ["cuda:0", "cuda:1", "cuda:2"], "cuda:0", chunks=4)
    run.call(torch.randn(ROWS, WIDTH), loss)
    log, layers = run.streams.log, operations(run, "aten::addmm")
    first, middle = ([op for op in layers if op.stream == stream] for stream in ("compute0", "compute1"))
    copies = [op for op in operations(run, "copy") if op.stream == "outbound0"]
    each, own = len(first) // 4, len(middle) // 4
    assert len(first) == 4 * each > 0
    assert len(middle) == 4 * own > 0
    assert len(copies) >= 4
    for microbatch in range(3):
        last, following = first[each * microbatch + each - 1], first[each * (microbatch + 1)]
        assert is_before(log, last, copies[microbatch])
        assert log.index(following) < log.index(copies[microbatch])
        assert not is_before(log, following, copies[microbatch])
    assert log.index(middle[own]) < log.index(copies[2])
    assert not is_before(log, middle[0], copies[2])


@pytest.mark.parametrize("forgotten", [False, True])
def test_outputs_are_held_until_the_caller_has_read_them(forgotten: bool) -> None:
    run = RecordedPipe(Chain(), *PLACES["two cards"])
    run.streams.forget = lambda entry: forgotten and entry.stream.startswith("caller") and isinstance(entry, Keep)
    last = run.lanes[-1]
    with run.recording(), torch.no_grad():
        own = run.streams.put(torch.ones(1), last.device)
        last.wait(last.here().record())
        output = run.pipe(run.put(torch.randn(ROWS, WIDTH)))
        read = output * 1
        del output
        with last.active():
            own + 1
    assert read.shape == (ROWS, WIDTH)
    assert any("caller cuda:1 still uses" in problem for problem in problems(run.streams.log)) == forgotten
