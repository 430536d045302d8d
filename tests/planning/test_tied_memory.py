"""Memory of tied parameters and optimizers in a plan."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from autosplit import InfeasibleError, Plan, autosplit

ROWS, WIDTH, WORDS = 6, 16, 400


class Tied(nn.Module):
    """A table at one end, the same table at the other."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH)
        self.body = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.table.weight

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.body(self.table(words)))


def planned(**options: object) -> Plan:
    plan = autosplit(Tied(), devices=3, chunks=3, sample=torch.arange(ROWS), **options).plan
    assert plan is not None
    return plan


def test_the_copy_of_a_tied_parameter_counts_where_it_is_used():
    plan = planned()
    table = WORDS * WIDTH * 4
    (boundary,) = [b for b in plan.boundaries if b.value == "table.weight"]
    assert (boundary.producer, boundary.consumers, boundary.bytes, boundary.per_step) == (0, (2,), table, True)
    memory = plan.stages[2].memory
    assert memory.parameter_bytes < table
    assert memory.transient_bytes >= table  # the gradient of the second use; on one device the values are not copied
    parts = memory.parameter_bytes + memory.gradient_bytes + memory.optimizer_bytes + memory.buffer_bytes
    assert memory.peak_bytes == parts + memory.activation_bytes + memory.transient_bytes


def test_a_memory_limit_holds_with_the_copies():
    free = max(stage.memory.peak_bytes for stage in planned().stages)
    kept = []
    for limit in range(free, 0, -free // 40):
        try:
            plan = planned(memory_limit=limit)
        except InfeasibleError:
            break
        kept.append(limit)
        assert max(stage.memory.peak_bytes for stage in plan.stages) <= limit
        assert (plan.fits, plan.verdict) == (True, "fits")
    assert kept


@pytest.mark.parametrize(("optimizer", "copies"), [("none", 0), ("sgd", 0), ("momentum", 1), ("adam", 2), ("adamw", 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_optimizer_state_has_the_parameters_dtype(optimizer: str, copies: int, dtype: torch.dtype):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(dtype)
    plan = autosplit(model, devices=2, chunks=2, optimizer=optimizer, sample=torch.zeros(4, 4, dtype=dtype)).plan
    assert plan is not None
    for stage in plan.stages:
        assert stage.memory.optimizer_bytes == copies * stage.memory.parameter_bytes
