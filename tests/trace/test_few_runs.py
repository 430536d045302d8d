"""How often a model's Python runs for a recording, and what these runs tell apart."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autosplit.errors import TraceError
from autosplit.options import Sample
from autosplit.trace.ladder import trace
from autosplit.trace.recording import gather


class Tied(nn.Module):
    """The table is the head; with ``unused`` a third layer holds it that nobody calls."""

    def __init__(self, *, unused: bool = False) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(11, 4), nn.Linear(4, 11, bias=False)
        self.head.weight = self.table.weight
        if unused:
            self.more = nn.Embedding(11, 4)
            self.more.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.table(tokens).tanh())


class UsedOnce(Tied):
    """Holds a parameter twice and uses it once."""

    def forward(self, tokens: Tensor) -> Tensor:
        return self.table(tokens).tanh()


class Rests(nn.Module):
    """Multiplies by the rest of the number of rows."""

    def __init__(self, modulus: int) -> None:
        super().__init__()
        self.layer, self.modulus = nn.Linear(4, 4), modulus

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * (1 + x.shape[0] % self.modulus)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of rows at which the model's Python ran."""
    found: list[int] = []
    plain = gather.run_python

    def run(*args: Any, rows: int, **kwargs: Any) -> Any:
        found.append(rows)
        return plain(*args, rows=rows, **kwargs)

    monkeypatch.setattr(gather, "run_python", run)
    return found


def test_a_leaf_whose_parameter_is_used_once_is_a_leaf(runs: list[int]) -> None:
    found = trace(UsedOnce(), Sample(torch.randint(0, 11, (16, 3))))
    assert runs == [16, 16, 1, 3]
    assert found.gathered.scope.entered == frozenset()
    assert next(node.op for node, _ in found.graph.compute_nodes()) == "call_module"


@pytest.mark.parametrize(
    ("modulus", "rows"), [(m, rows) for rows in (6, 10, 16, 64) for m in range(2, 10) if m <= rows]
)
def test_python_that_takes_a_rest_of_the_rows_is_refused(modulus: int, rows: int) -> None:
    with pytest.raises(TraceError, match="rows"):
        trace(Rests(modulus), Sample(torch.randn(rows, 4)))
