"""Plans found from the graph: pairs, attention, experts, what stays whole and why."""

from __future__ import annotations

import operator
from collections import Counter, defaultdict
from itertools import product
from typing import Any

import pytest
import torch
from torch import fx, nn

from autosplit.errors import InputError
from autosplit.options import Sample
from autosplit.tensor.axes import Shard
from autosplit.tensor.plan import TensorPlan, tensor_plan
from autosplit.tensor.ways import REPLICATED
from autosplit.trace.graph import TracedGraph
from autosplit.trace.ladder import trace
from benchmarks.tensor_graph import rank_elements, rank_graph
from tests.tensor.nets import LENGTH, NETS, ROWS, WIDTH, WORDS, Language, Pair, Separate


def planned(model: nn.Module, *, ranks: int = 2, words: bool = False, **options: Any) -> TensorPlan:
    """Plan a model without weights."""
    model = model.to("meta")
    inputs = torch.zeros(ROWS, LENGTH, dtype=torch.int64, device="meta")
    if not words:
        inputs = torch.zeros(ROWS, LENGTH, WIDTH, device="meta")
    return tensor_plan(trace(model, Sample(inputs)).graph, ranks=ranks, rows=ROWS, **options)


_PAIR = {"b.weight": 0, "b.bias": 0, "a.weight": 1, "a.bias": None}


def dims(plan: TensorPlan) -> dict[str, int | None]:
    return {name: p.dim if isinstance(p, Shard) else None for name, p in plan.parameters.items()}


def kinds(plan: TensorPlan) -> list[tuple[str, str]]:
    return [(one.collective.kind, one.collective.phase) for one in plan.collectives]


def test_a_pair_is_sharded_by_columns_and_rows_with_one_sum_each_way() -> None:
    plan = planned(nn.Sequential(Pair(), Pair()), sequence=False)
    assert dims(plan) == {f"{n}.{key}": dim for n in (0, 1) for key, dim in _PAIR.items()}
    assert Counter(kinds(plan)) == {("all_reduce", "forward"): 2, ("all_reduce", "backward"): 1}
    size = ROWS * LENGTH * WIDTH * 4
    assert plan.wire_bytes == 3 * size  # two rings of half the bytes; the first one's input has no gradient
    assert plan.replicated == {}


@pytest.mark.parametrize("length", [6, 5])
def test_between_pairs_ranks_share_positions_where_they_divide(length: int) -> None:
    """Per pair no more is sent than by Megatron-LM: a gather and a scatter each way, and the gather once more.

    Norms save their part of what they take, and products of what is gathered.
    """
    model = nn.Sequential(*(nn.Sequential(nn.LayerNorm(WIDTH), nn.Dropout(), Pair()) for _ in range(3))).to("meta")
    traced = trace(model, Sample(torch.zeros(ROWS, length, WIDTH, device="meta"))).graph
    draws = {info.name for _, info in traced.compute_nodes() if info.random}
    plan = tensor_plan(traced, ranks=2, rows=ROWS, draws=draws)
    size = ROWS * length * WIDTH * 4
    sent = [(c.kind, c.phase) for one in plan.collectives for c in (one.collective,) if c.value_bytes == size]
    if length % 2:
        assert Counter(sent) == {("all_reduce", "forward"): 3, ("all_reduce", "backward"): 2}
        return
    between = dict.fromkeys(product(("all_gather", "reduce_scatter"), ("forward", "backward")), 2)
    last = {("all_reduce", "forward"): 1, ("all_gather", "backward"): 4}  # a sum; weights' gradients gather again
    assert Counter(sent) == between | last
    whole = tensor_plan(traced, ranks=2, rows=ROWS, draws=draws, sequence=False)
    taken = size + 2 * ROWS * length * 4  # what a norm takes, with a mean and a deviation per position
    assert _saved(traced, whole, length) == [taken] * 3 + [size] * 3
    assert _saved(traced, plan, length) == [taken, taken / 2, taken / 2, size, size / 2, size / 2]


def _saved(traced: TracedGraph, plan: TensorPlan, length: int) -> list[int]:
    """Return the bytes of activations that a rank's norms save for the backward, and then those of column products."""
    module, saved = rank_graph(traced, plan, rank=0, alone=True), defaultdict[str, int](int)
    names = {n.args[0].name: n.name for n in module.graph.nodes if n.target is operator.getitem}

    class Noting(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            def note(tensor: torch.Tensor) -> torch.Tensor:
                activation = tensor.untyped_storage().data_ptr() not in weights
                saved[names.get(n.name, n.name)] += tensor.numel() * tensor.element_size() * activation
                return tensor

            with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
                return super().run_node(n)

    module = module.to_empty(device="cpu")
    weights = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    Noting(module).run(ROWS, torch.zeros(ROWS, length, WIDTH, requires_grad=True))
    return [saved[f"_{n}_{kind}"] for kind in ("0_0", "2_b_0") for n in range(3)]


def test_halves_of_a_fused_gate_are_cut_each_for_itself() -> None:
    plan = planned(NETS["gated"]())
    assert plan.parameters["0.z.weight"] == Shard(0, ((2, 32),))
    assert plan.parameters["0.y.weight"] == Shard(1, ((1, 32),))


def test_unequal_parts_of_a_fused_attention_are_cut_each_for_itself() -> None:
    plan = planned(NETS["fused attention, fewer key heads"]())
    assert plan.parameters["1.one.weight"] == Shard(0, ((1, 16), (2, 8)))
    assert plan.parameters["1.two.weight"] == Shard(1, ((1, 16),))


def test_keys_of_one_head_stay_whole_while_its_queries_are_sharded() -> None:
    plan = planned(NETS["one key head"](), pins={"1.s.weight": None, "1.t.weight": None})
    assert dims(plan) | {"0.weight": None, "0.bias": None} == {
        "0.weight": None, "0.bias": None, "1.r.weight": 0, "1.s.weight": None, "1.t.weight": None, "1.u.weight": 1
    }  # fmt: skip
    assert set(plan.replicated) == {"1.s.weight", "1.t.weight"}


@pytest.mark.parametrize("name", ["experts", "list of experts"])
def test_experts_are_sharded_inside(name: str) -> None:
    plan = planned(NETS[name]())
    weights = {key: dim for key, dim in dims(plan).items() if key[0] == "1" and "bias" not in key}
    assert {key for key, dim in weights.items() if dim is None} <= {"1.router.weight"}
    assert ("all_reduce", "forward") in kinds(plan)


def test_an_embedding_and_a_head_are_sharded() -> None:
    plan = planned(Language(Pair(), tied=False), words=True)
    found = dims(plan)
    assert found["words.weight"] is not None
    assert found["head.weight"] == 0
    assert ("all_gather", "forward") in kinds(plan)


def test_repeated_blocks_take_over_what_their_template_was_given() -> None:
    few, many = (planned(Language(*(Pair() for _ in range(n)), tied=False), words=True) for n in (3, 9))
    assert {dims(many)[f"parts.{n}.b.weight"] for n in range(9)} == {dims(few)["parts.1.b.weight"]}
    half = ROWS * LENGTH * WIDTH * 4 / 2
    assert many.wire_bytes - few.wire_bytes == 6 * 5 * half  # two moves each way, and a gather again


def test_a_rank_has_its_share_of_what_is_sharded() -> None:
    plan = planned(Language(*(Pair() for _ in range(4)), tied=False), words=True)
    assert rank_elements(plan) <= (1 / 2 + 0.03) * sum(plan.elements.values())


def test_a_degree_that_does_not_divide_heads_names_those_that_do() -> None:
    with pytest.raises(InputError, match=r"tp=3 does not divide 4, by which 1\.r\.weight, .* degrees that do: 1, 2, 4"):
        planned(nn.Sequential(nn.LayerNorm(WIDTH), Separate(4)), ranks=3)


def test_a_layer_that_runs_by_its_own_python_stays_whole_and_is_listed() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)
            self.pair = Pair()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.pair(self.lstm(x)[0])

    model = Counting()
    plan = planned(model)
    assert all(map(operator.is_, model.lstm._flat_weights, model.lstm.parameters()))  # as before
    assert plan.parameters["lstm.weight_ih_l0"] is REPLICATED
    assert "lstm.weight_ih_l0" in plan.replicated
    assert dims(plan)["pair.b.weight"] == 0


def test_a_vocabulary_that_no_degree_divides_is_sharded_another_way() -> None:
    assert WORDS % 5
    plan = planned(Language(Pair(40), tied=False), ranks=5, words=True)
    assert dims(plan)["parts.0.b.weight"] == 0
    assert plan.replicated["head.weight"].startswith("tp=5 does not divide 24")


def test_dropout_between_products_runs_in_parts() -> None:
    """Noise that an operation makes and fills in place is its own: nothing else changes."""
    traced = trace(nn.Sequential(nn.Linear(16, 32), nn.Dropout(), nn.Linear(32, 16)), Sample(torch.zeros(4, 16))).graph
    plan = tensor_plan(traced, ranks=2, rows=ROWS, draws={"1#0"}, latency_bytes=1.0)
    assert {node.name: node.share for node in plan.nodes.values()} == {"0#0": 0.5, "1#0": 0.5, "2#0": 0.5}
