"""Graphs on recording streams: every read behind its write, no memory given away too early."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from autosplit.runtime import cells, graph_slot, graphs
from tests.runtime.happens_before import problems
from tests.runtime.lane_models import PLACES, ROWS, WIDTH, Chain, Skips, assert_close
from tests.runtime.recorded_pipe import RecordedPipe
from tests.runtime.recording_graphs import GraphStreams

_ENGINE = torch.autograd.Variable._execution_engine


@contextmanager
def captured_apart(streams: GraphStreams) -> Iterator[None]:
    """Have a slot's own memory lie where its lane does, and what a capture runs be no part of the log."""
    blank = graph_slot._blank

    def placed(tensor: Tensor) -> Tensor:
        return streams.put(blank(tensor), streams.device(tensor))

    def gradients(roots: Any, seeds: Any, wanted: Any, *, keep: bool) -> Any:
        with streams.silent():
            found = _ENGINE.run_backward(
                tuple(roots), tuple(seeds), keep, False, tuple(wanted), allow_unreachable=True, accumulate_grad=False
            )
        known = {id(seed) for seed in seeds}
        for gradient in found:
            if gradient is not None and id(gradient) not in known:
                streams.put(gradient, streams.device(seeds[0]))
        return found

    with (
        mock.patch.object(graph_slot, "_blank", placed),
        mock.patch.object(graph_slot, "gradients", gradients),
        mock.patch.object(graphs, "watched", return_value=False),
    ):
        yield


def steps(place: str, model: nn.Module, count: int = 4, schedule: str = "1f1b") -> RecordedPipe:
    """Run training steps, with an optimizer between them; the numbers are the plain model's."""
    reference = copy.deepcopy(model)
    run = RecordedPipe(model, *PLACES[place], schedule=schedule, streams=GraphStreams(), graphs=True)
    assert isinstance(run.streams, GraphStreams)
    with captured_apart(run.streams):
        for _ in range(count):
            value, target = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
            expected = nn.functional.mse_loss(reference(value), target)
            expected.backward()
            found = run.train(value, target, nn.MSELoss())
            assert_close(found, [expected.detach(), *(p.grad for p in reference.parameters())])
            reference.zero_grad(set_to_none=True)
            with run.recording(), torch.no_grad():
                for parameter in (*model.parameters(), *reference.parameters()):
                    parameter.mul_(0.9)
    assert run.streams.replays
    return run


@pytest.fixture(autouse=True)
def _double() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("place", ["one card", "two cards", "CPU and cards"])
@pytest.mark.parametrize("model", [Chain, Skips])
def test_replays_are_ordered_as_the_stages_are(model: type[nn.Module], place: str) -> None:
    run = steps(place, model())
    assert problems(run.streams.log) == []
    assert run.engine.mismatches == []


@pytest.mark.parametrize("left_out", ["enter", "leave"])
def test_an_order_that_is_left_out_is_found(left_out: str) -> None:
    with mock.patch.object(cells, left_out):
        run = steps("back and forth", Skips(), schedule="gpipe")
    assert any("unordered" in problem for problem in problems(run.streams.log))
