"""Memory that runs out while a model is measured: named, given back, and answered by a cost model."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from autosplit.profile.measured import measure
from autosplit.profile.node_costs.combine import profile
from tests.profile.graphs import Leaf, traced
from tests.profile.test_measured import random_states, state_of

ROOT = Path(__file__).resolve().parents[2]
ROWS = 4


class Greedy(Leaf):
    """Asks the allocator for more than any machine has, once it is told to."""

    hungry = False

    def __init__(self, *, backward: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.in_backward = backward

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if self.hungry and self.in_backward:
            y.register_hook(lambda _: torch.empty(2**55))
        elif self.hungry:
            torch.empty(2**55)
        return y


class Forked(nn.Module):
    """One branch through a greedy layer, one beside it, and the two together."""

    def __init__(self, *, backward: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.greedy = Greedy(backward=backward)
        self.beside = nn.Linear(4, 4)
        self.after = nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.after(self.greedy(x)) + self.beside(x)


@pytest.fixture(params=[False, True], ids=["forward", "backward"])
def hungry(request):
    model = Forked(backward=request.param)
    graph = traced(model, torch.randn(ROWS, 4))
    model.greedy.hungry = True
    return graph


def test_what_memory_runs_out_for_is_named_and_the_rest_is_measured(hungry):
    model, x = hungry.root, torch.randn(ROWS, 4)
    expected, before, draws = copy.deepcopy(model.state_dict()), state_of(model), random_states()
    found = measure(hungry, inputs=[x], rows=ROWS)
    assert set(found.nodes) == {"first", "beside"}
    assert found.out_of_memory == {
        "greedy": "memory ran out on cpu while it was measured (it asked for 131072 TiB)",
        "after": "it needs 'greedy', for which memory ran out on cpu",
        "add": "it needs 'greedy', for which memory ran out on cpu",
    }
    assert state_of(model) == before
    assert random_states() == draws
    assert all(torch.equal(expected[name], tensor) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_cost_model_answers_for_what_memory_runs_out_for(hungry):
    hungry.root.greedy.hungry = False
    fits = profile(hungry, inputs=[torch.randn(ROWS, 4)], rows=ROWS, batch_rows=ROWS)
    assert fits.modelled == {}

    class Hungry(Greedy):
        hungry = True

        def forward(self, x: Tensor) -> Tensor:
            if type(x) is Tensor:
                torch.empty(2**55)
            return self.linear(x)

    hungry.root.greedy.__class__ = Hungry
    with pytest.warns(UserWarning, match=r"greedy: memory ran out on cpu .* after it \(2\); take fewer rows") as caught:
        found = profile(hungry, inputs=[torch.randn(ROWS, 4)], rows=ROWS, batch_rows=ROWS)
    assert len(caught) == 1
    assert list(found.modelled) == ["greedy", "after", "add"]
    assert set(found.times.nodes) == {"first", "beside"}
    assert found.measured
    assert all(node.forward_s > 0 for node in found.nodes.values())
    assert found.nodes["greedy"].forward_flops == fits.nodes["greedy"].forward_flops > 0


LIMITED = """
import resource
import warnings

import torch
from torch import nn

from autosplit.profile.node_costs.combine import profile
from tests.profile.graphs import traced


class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 8)

    def forward(self, x):
        x = self.first(x)
        return self.second(x.unsqueeze(2).expand(-1, -1, 4096).tanh().mean(2)) + self.second(x)


torch.set_num_threads(1)
graph = traced(Wide(), torch.randn(2, 64))
profile(graph, inputs=[torch.randn(2, 64)], rows=2, batch_rows=2)
with open("/proc/self/statm", encoding="ascii") as file:
    used = int(file.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 2**28, -1))
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    found = profile(graph, inputs=[torch.randn(400, 64)], rows=400, batch_rows=400)
print(*found.modelled)
print(*caught[0].message.args)
torch.empty(2**27, dtype=torch.uint8)
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the limit is set from Linux's own count")
@pytest.mark.slow
def test_a_process_that_may_have_no_more_memory():
    run = subprocess.run(
        [sys.executable, "-c", LIMITED], cwd=ROOT, capture_output=True, text=True, check=False, timeout=120
    )
    assert run.returncode == 0, run.stderr
    modelled, warning = run.stdout.splitlines()
    assert modelled == "expand tanh mean second add", "the cotangent of what expand gives is no view"
    assert warning.startswith("expand: memory ran out on cpu while it was measured (it asked for 400 MiB)")
