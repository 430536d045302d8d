"""The bound: cells, each run alone on one thread, and what a schedule of them would take on two lanes.

No runtime is involved: a cell is a stage's forward, with the loss behind the last one, or its backward from a
detached border, with the sums into ``.grad``. Transfers take no time.

Private torch API, ``torch.distributed.pipelining._backward``: the input and the weight part of a backward, as torch's
own zero bubble runs them. Tried on torch 2.13.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from autosplit.schedule.catalog import build
from autosplit.schedule.simulate import simulate
from benchmarks.peers_models import CHUNKS, Made


@dataclass(frozen=True)
class Cells:
    """Seconds of a stage's cells, by stage."""

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    input_gradient_s: tuple[float, ...]
    weight_gradient_s: tuple[float, ...]

    @property
    def split_cost(self) -> float:
        """The input and the weight part of all backwards over the backwards in one piece."""
        return (sum(self.input_gradient_s) + sum(self.weight_gradient_s)) / sum(self.backward_s)

    def step_s(self, schedule: str) -> float:
        """Return the length of a step of these cells, two lanes, in a schedule."""
        actions = build(schedule, stages=len(self.forward_s), microbatches=CHUNKS)
        return simulate(
            actions,
            forward_s=self.forward_s,
            backward_s=self.backward_s,
            input_gradient_s=self.input_gradient_s,
            weight_gradient_s=self.weight_gradient_s,
        ).step_s


def measure(made: Made) -> Cells:
    """Run every cell of a step once, one after the other, with backwards in one piece and then in two."""
    whole = _medians(made, _in_one_piece)
    parts = _medians(made, _in_two_pieces)
    # The first stage's input wants no gradient, so all its backward is the weights' part.
    return replace(
        whole,
        input_gradient_s=(0.0, parts.input_gradient_s[1]),
        weight_gradient_s=(whole.backward_s[0], parts.weight_gradient_s[1]),
    )


Times = dict[tuple[str, int], list[float]]
Outputs = tuple[Tensor, ...]


def _medians(made: Made, backward: Callable[..., None]) -> Cells:
    times: Times = {}
    stages = made.stages()
    for parameter in made.parameters():
        parameter.grad = None
    for x, y in zip(made.batch.tensor_split(CHUNKS), made.target.tensor_split(CHUNKS), strict=True):
        sent = _timed(times, "F", 0, lambda x=x: _tuple(stages[0](x)))
        taken = [value.detach().requires_grad_() for value in sent]
        loss = _timed(times, "F", 1, lambda y=y, taken=taken: made.subject.loss(stages[1](*taken), y) / CHUNKS)
        backward(times, stages, sent, taken, loss)
    medians = {
        kind: tuple(statistics.median(times.get((kind, stage), [0.0])) for stage in range(len(stages)))
        for kind in "FBIW"
    }
    return Cells(medians["F"], medians["B"], medians["I"], medians["W"])


def _timed(times: Times, kind: str, stage: int, work: Callable[[], Any]) -> Any:
    start = time.perf_counter()
    result = work()
    times.setdefault((kind, stage), []).append(time.perf_counter() - start)
    return result


def _tuple(result: Tensor | Outputs) -> Outputs:
    return result if isinstance(result, tuple) else (result,)


def _in_one_piece(times: Times, stages: Any, sent: Outputs, taken: Sequence[Tensor], loss: Tensor) -> None:
    _timed(times, "B", 1, loss.backward)
    _timed(times, "B", 0, lambda: torch.autograd.backward(sent, [value.grad for value in taken]))


def _in_two_pieces(times: Times, stages: Any, sent: Outputs, taken: Sequence[Tensor], loss: Tensor) -> None:
    weights = [parameter for parameter in stages[1].parameters() if parameter.requires_grad]
    _, groups = _timed(times, "I", 1, lambda: stage_backward_input([loss], None, list(taken), iter(weights)))
    _timed(times, "W", 1, lambda: stage_backward_weight(iter(weights), groups))
    torch.autograd.backward(sent, [value.grad for value in taken])


def middle(measured: Sequence[Cells]) -> Cells:
    """Return the median of several measurements, cell by cell."""

    def of(field: str) -> tuple[float, ...]:
        return tuple(map(statistics.median, zip(*(getattr(cells, field) for cells in measured), strict=True)))

    return Cells(of("forward_s"), of("backward_s"), of("input_gradient_s"), of("weight_gradient_s"))
