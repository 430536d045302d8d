"""Opaque modules: one in whose own Python something cannot be recorded is one node, the rest stays fine."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F

from autosplit import Sample, autosplit
from autosplit.trace.graph import NodeClass, TracedNode
from autosplit.trace.ladder import Trace, trace
from autosplit.trace.recording.recording import Refusal
from tests.equivalence.equality import LANES, Batch, assert_equal_runs, forward_backward
from tests.models.three_layers import WIDTH, Model, numbers
from tests.pairwise import in_turn

Body = Callable[..., Any]
TAKEN: list[str] = []
"""Which way the branches of a plain model went."""


class Part(nn.Module):
    """One linear layer, a buffer, a Python number, and a forward that a case brings along."""

    seen: Tensor

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.own = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("seen", torch.zeros(WIDTH, dtype=torch.float64))
        self.calls = 0
        self._body = body

    def forward(self, *inputs: Any) -> Any:
        return self._body(self, *inputs)


def host(body: Body, *more: Body, around: Body | None = None) -> Model:
    """Return a model with a part between its layers; ``more`` are parts beside the first."""
    parts = {f"part{index}": partial(Part, each) for index, each in enumerate((body, *more))}
    return Model(around or (lambda m, x: m.c(torch.tanh(m.b(m.part0(torch.tanh(m.a(x))))))), **parts)


def branch(part: Part, x: Tensor) -> Tensor:
    positive = bool(x.mean() > 0)
    TAKEN.append("positive" if positive else "negative")
    return part.own(x) if positive else x - part.own(x).mean(-1, keepdim=True)


def rows(count: int, seed: int) -> Batch:
    return Batch((numbers(count, WIDTH, seed=seed),))


def recorded(model: nn.Module, *args: Tensor) -> Trace:
    return trace(model, Sample(*(value.detach() for value in args)))


def nodes(found: Trace) -> dict[str, TracedNode]:
    return {info.name: info for _, info in found.graph.compute_nodes()}


def equal_on(model: nn.Module, batches: Sequence[Batch], *, seeded: bool = False, **options: Any) -> Any:
    """Assert that a pipe of a copy does what the model does on every batch, one after the other; return the pipe."""
    plain, twin = model, copy.deepcopy(model)
    pipe = autosplit(twin, **{"devices": ["cpu"] * 3, "chunks": 3, **options})
    for number, batch in enumerate(batches):
        runs = []
        for module in (plain, pipe):
            if seeded:
                random.seed(number)
                np.random.seed(number)
                torch.manual_seed(number)
            runs.append(forward_backward(module, batch))
        assert_equal_runs(runs[1], runs[0])
    return pipe


def test_only_the_module_that_reads_a_value_is_one_node() -> None:
    found = recorded(host(branch), numbers(7, WIDTH))
    assert list(found.whole) == ["part0"]
    assert "module 'part0'" in found.whole["part0"]
    assert "test_atoms.py:" in found.whole["part0"]
    assert found.guard is None
    assert list(nodes(found)) == ["a#0", "#0/tanh_0", "part0#0", "b#0", "#0/tanh_1", "c#0"]


@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("chunks", [1, 2, 4])
def test_both_sides_of_a_branch(lanes: str, chunks: int) -> None:
    TAKEN.clear()
    plain = host(branch)
    batches = [rows(count, seed) for seed, count in enumerate((7, 7, 2, 1, 9, 7))]
    for batch in batches:
        plain(*batch.args)
    assert set(TAKEN) == {"positive", "negative"}
    pipe = equal_on(plain, batches, lanes=lanes, chunks=chunks)
    assert pipe.plan.rung == "recorded"
    assert len(pipe.plan.stages) == 3


def test_plan_and_report_name_what_stayed_whole_and_why() -> None:
    pipe = autosplit(host(branch), devices=["cpu"] * 2, chunks=3, sample=numbers(7, WIDTH))
    (line,) = pipe.plan.whole
    assert line.startswith("part0: ")
    text = " ".join(pipe.report().split())
    assert "Whole modules - part0: module 'part0'" in text
    assert "reads a tensor's value in Python, and it depends on a layer" in text


def experts(part: Part, x: Tensor) -> Tensor:
    """Send every row to an expert by ``nonzero``, in a loop over the experts that were hit."""
    chosen = x.argmax(-1) % 3
    hit = F.one_hot(chosen, 3).sum(0).nonzero()
    out = torch.zeros_like(x)
    for expert in hit:
        (index,) = torch.where(chosen == expert[0])
        out.index_add_(0, index, part.own(x[index]) * (1.0 + expert[0]))
    return out


@pytest.mark.parametrize("lanes", LANES)
def test_routing_to_the_experts_that_were_hit_stays_micro(lanes: str) -> None:
    model = host(experts)
    found = nodes(recorded(model, numbers(7, WIDTH)))
    assert {name: info.node_class for name, info in found.items()} == dict.fromkeys(found, NodeClass.MICRO)
    assert "part0#0" in found
    equal_on(model, [rows(count, seed) for seed, count in enumerate((7, 4, 1, 10))], lanes=lanes)


class Deep(nn.Module):
    """Most of a model behind one read."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.one(x))
        return self.two(hidden) if hidden.mean() > 0.4 else self.two(hidden * 2)


def test_an_atom_that_would_hide_the_model_is_refused_and_runs_by_its_own_python() -> None:
    around: Body = lambda m, x: m.c(m.deep(m.a(x)))  # noqa: E731
    model = Model(around, deep=Deep)
    with pytest.raises(
        Refusal, match=r"module 'deep' would stay whole and holds \d\d% of the parameters: module 'deep'"
    ):
        recorded(model, numbers(7, WIDTH))
    batches = [
        Batch((numbers(count, WIDTH, seed=seed, scale=scale),))
        for seed, count, scale in ((0, 7, 0.1), (1, 7, 5.0), (2, 3, 1.0))
    ]
    pipe = equal_on(model, batches)
    assert pipe.plan.rung == "module tree"
    assert pipe.plan.whole == ()


def test_what_reads_real_values_alone_is_watched_as_it_runs() -> None:
    def reads_real_values(model: Model, x: Tensor) -> Tensor:
        """As transformers' masks, which look for packed sequences where nothing traces."""
        x = torch.tanh(model.a(x))
        if not isinstance(x, FakeTensor) and bool((x > 9).all()):
            x = x * 2
        return model.c(model.part0(x))

    pipe = equal_on(host(hits, around=reads_real_values), [rows(7, 0), rows(5, 1)])
    assert pipe.plan.rung != "module tree"


@dataclass(frozen=True)
class Case:
    """The body of an opaque module, and what is asked of its node."""

    body: Body
    around: Body | None = None
    node: dict[str, Any] = field(default_factory=dict)


def writes_a_buffer(part: Part, x: Tensor) -> Tensor:
    part.seen.add_(x.detach().abs().sum(0))
    return part.own(x) * (2.0 if part.seen.sum().item() > 20 else 1.0)


def assigns_a_buffer(part: Part, x: Tensor) -> Tensor:
    part.seen = part.seen * 0.9 + x.detach().mean(0)
    return part.own(x) * (2.0 if x.mean() > 0 else 1.0)


def hits(part: Part, x: Tensor) -> Tensor:
    """Do something to the rows that ``nonzero`` picks: another number of rows for every batch."""
    picked = (x.sum(-1) > 0).nonzero()[:, 0]
    return part.own(x).index_add(0, picked, x[picked])


def draws_in_python(part: Part, x: Tensor) -> Tensor:
    return hits(part, x) if random.random() < 0.5 else hits(part, x) * np.random.rand()


def counts_calls(part: Part, x: Tensor) -> Tensor:
    part.calls += 1
    return hits(part, x) * part.calls


def returns_its_input(part: Part, x: Tensor) -> tuple[Tensor, Tensor]:
    return (x, part.own(x)) if x.mean() > 0 else (x, x * part.own(x))


def returns_a_view(part: Part, x: Tensor) -> tuple[Tensor, Tensor]:
    return x[:, :3], part.own(x) * (1 if x.mean() > 0 else -1)


def changes_its_input(part: Part, x: Tensor) -> Tensor:
    x.mul_(2.0 if x.mean() > 0 else 3.0)
    return part.own(x)


def nested(part: Part, x: Tensor) -> dict[str, Any]:
    return {"pair": (part.own(x), [x * 2]), "word": "none", "sign": x.sum() * (1 if x.mean() > 0 else -1)}


def sizes_as_a_list(part: Part, x: Tensor) -> Tensor:
    lengths = (x.argmax(-1) % 3 + 1).tolist()
    return torch.stack([part.own(row[:length].sum() + row) for row, length in zip(x, lengths, strict=True)])


def takes_numpy(part: Part, x: Tensor) -> Tensor:
    return part.own(x) * float(np.abs(x.detach().numpy()).mean())


NUMPY = f"{__file__}:{takes_numpy.__code__.co_firstlineno + 1}"


def draws_in_torch(part: Part, x: Tensor) -> Tensor:
    return part.own(x) * (2.0 if torch.rand(()).item() < 0.5 else 1.0)


SUM: Body = lambda m, x: m.c(sum(m.part0(m.a(x))))  # noqa: E731
VIEW: Body = lambda m, x: (lambda pair: m.c(pair[1]) + pair[0].repeat(1, 2))(m.part0(m.a(x)))  # noqa: E731
AFTER: Body = lambda m, x: (lambda h: m.c(m.part0(h)) + h)(m.a(x))  # noqa: E731
NESTED: Body = lambda m, x: (lambda r: {**r, "head": m.c(r["pair"][0] + r["pair"][1][0])})(m.part0(m.a(x)))  # noqa: E731
CASES = {
    "writes a buffer": Case(writes_a_buffer, node={"writes": ("part0.seen",), "node_class": NodeClass.FULL}),
    "assigns a buffer": Case(assigns_a_buffer, node={"writes": ("part0.seen",), "node_class": NodeClass.FULL}),
    "draws in Python": Case(draws_in_python, node={"whole": "it draws random numbers in Python"}),
    "counts its calls": Case(counts_calls, node={"whole": "it changes the Python attribute 'calls'"}),
    "returns its input": Case(returns_its_input, SUM),
    "returns a view": Case(returns_a_view, VIEW, {"node_class": NodeClass.FULL}),
    "changes its input": Case(changes_its_input, AFTER, {"node_class": NodeClass.FULL}),
    "nested outputs": Case(nested, NESTED, {"node_class": NodeClass.FULL}),
    "sizes as a list": Case(sizes_as_a_list),
    "numpy": Case(
        takes_numpy,
        node={"whole": f"it reads a tensor's value (numpy, {NUMPY})"},
    ),
    "draws in torch": Case(draws_in_torch, node={"random": True, "node_class": NodeClass.FULL}),
}


@pytest.mark.filterwarnings("ignore:.* devices were given")
@in_turn(name=list(CASES), lanes=LANES)
def test_an_atom_is_one_node_and_equals_the_plain_module(name: str, lanes: str) -> None:
    case = CASES[name]
    model = host(case.body, around=case.around)
    found = recorded(copy.deepcopy(model), numbers(7, WIDTH))
    assert list(found.whole) == ["part0"]
    info = nodes(found)["part0#0"]
    assert {key: getattr(info, key) for key in case.node} == case.node
    if name == "draws in torch":
        return
    batches = [rows(count, seed) for seed, count in enumerate((7, 4, 1, 10))]
    pipe = equal_on(model, batches, seeded=True, lanes=lanes)
    assert pipe.plan.rung == "recorded"
    assert pipe.unsplit().part0.calls == model.part0.calls


def loops_over_rows(part: Part, x: Tensor) -> Tensor:
    return torch.stack([part.own(row) for row in x])


def squares_the_rows(part: Part, x: Tensor) -> Tensor:
    return part.own(x) + torch.ones(len(x) ** 2, dtype=x.dtype).sum()


def parity(part: Part, x: Tensor) -> Tensor:
    return F.gelu(part.own(x)) if len(x) % 2 else torch.tanh(part.own(x))


@pytest.mark.parametrize("body", [loops_over_rows, squares_the_rows, parity])
def test_python_that_depends_on_the_number_of_rows_equals_the_plain_module(body: Body) -> None:
    pipe = equal_on(host(body), [rows(count, seed) for seed, count in enumerate((7, 8, 4, 1, 10))])
    if body is not loops_over_rows:
        assert any("part0" in line for line in (*pipe.plan.whole, *pipe.plan.notes))
        assert "part0" in pipe.report()


@pytest.mark.filterwarnings("ignore:.* devices were given")
def test_a_number_out_of_an_atom_makes_the_module_around_it_an_atom() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Part(lambda part, x: (part.own(x), x.mean().item()))

        def forward(self, x: Tensor) -> Tensor:
            value, scale = self.inner(x)
            return value * scale

    model = Model(lambda m, x: m.c(m.outer(m.a(x))), outer=Outer)
    found = recorded(model, numbers(7, WIDTH))
    assert "outer" in found.whole
    assert "outer#0" in nodes(found)
    assert not any(name.startswith("outer.") for name in nodes(found))
    equal_on(model, [rows(count, seed) for seed, count in enumerate((7, 3, 1))])
