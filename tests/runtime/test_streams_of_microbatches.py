"""What lanes with streams log where the microbatches are the caller's own."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.pairwise import in_turn
from tests.runtime.happens_before import problems
from tests.runtime.lane_models import MODELS, ROWS, WIDTH, assert_close
from tests.runtime.recorded_pipe import RecordedPipe
from tests.runtime.test_cuda_step import PLACES, STEP_PLACES, own

pytestmark = pytest.mark.usefixtures("double")

SIZES = (2, 1, 2)


@in_turn(model=MODELS, place=STEP_PLACES)
def test_microbatches_of_the_callers(model: Callable[[], nn.Module], place: str) -> None:
    run = RecordedPipe(made := model(), *PLACES[place], schedule="1f1b")
    plain = copy.deepcopy(made)
    values, targets = (torch.randn(ROWS, WIDTH).split(SIZES) for _ in range(2))
    total = sum(own(plain(value), target) / len(SIZES) for value, target in zip(values, targets, strict=True))
    assert isinstance(total, Tensor)
    total.backward()
    with run.recording():
        loss = run.pipe.train_step(
            microbatches=list(map(run.put, values)), target=list(map(run.put, targets)), loss_fn=own
        )
        found = [loss * 1, *(p.grad * 1 for p in made.parameters() if p.grad is not None)]
    assert_close(found, [total.detach(), *(p.grad for p in plain.parameters() if p.grad is not None)])
    assert problems(run.streams.log) == []
    assert run.engine.mismatches == []
    assert run.recorded.orders["in cells"] is not None
