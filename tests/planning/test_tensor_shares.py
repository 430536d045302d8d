"""What a tensor-parallel rank has of every node: the interface of the planner, and its own simple rule."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autosplit.errors import InputError
from autosplit.options import Sample
from autosplit.parallel import Parallel, place
from autosplit.planning.parallel.pairs import Pairs, find_pairs, shares_of
from autosplit.planning.parallel.rank import rank_profile, with_gathers
from autosplit.planning.profiled.apply import DataflowIndex
from autosplit.profile.node_costs.combine import profile
from autosplit.profile.shares import Collective, NodeShare, TensorShares
from autosplit.profile.types import Profile
from autosplit.trace.graph import INFO
from autosplit.trace.ladder import trace
from cost_models.registry import device, machine
from cost_models.roofline import Roofline
from tests.planning.llama import Llama

_ROWS = 2


def _recorded(model: nn.Module, *sample: torch.Tensor) -> tuple[DataflowIndex, Profile, Pairs]:
    graph = trace(model, Sample(*sample)).graph
    costs = profile(graph, rows=_ROWS, batch_rows=_ROWS, measure=False, device="H100-SXM5-80GB", kernels="cuda")
    index = DataflowIndex(graph)
    return index, costs, find_pairs(index, costs)


@pytest.fixture(scope="module")
def llama() -> tuple[DataflowIndex, Profile, Pairs]:
    with torch.device("meta"):
        model = Llama(width=64, inner=128, layers=2, heads=8, groups=4).bfloat16()
    return _recorded(model, torch.zeros(4, 16, dtype=torch.int64, device="meta"))


def _modules(nodes: frozenset[torch.fx.Node]) -> set[str]:
    return {node.meta[INFO].module.rpartition(".")[2] for node in nodes}


def test_pairs_of_llama(llama: tuple[DataflowIndex, Profile, Pairs]) -> None:
    """Queries, keys, values, gate and up are columns, what follows them rows; words are sharded in front and behind."""
    _, _, pairs = llama
    assert _modules(pairs.columns) == {"q_proj", "k_proj", "v_proj", "gate", "up", "lm_head"}
    assert _modules(pairs.rows) == {"o_proj", "down"}
    assert _modules(pairs.vocabulary) == {"embed", "lm_head"}
    assert pairs.divisors == (1, 2, 4)


def test_shares_of_llama(llama: tuple[DataflowIndex, Profile, Pairs]) -> None:
    """A rank has its part of products, positions and words; norms are whole; a block waits for eight collectives."""
    index, costs, pairs = llama
    shares = shares_of(pairs, index, 4)
    assert shares.of("layers.0.gate#0").work == shares.of("layers.0.before#0").held == 0.25
    assert shares.states["layers.1.attention.q_proj.weight"] == shares.states["embed.weight"] == 0.25
    assert "layers.0.before.weight" not in shares.states
    block = [share for name, share in shares.nodes.items() if name.startswith("layers.1")]
    kinds = [own.kind for share in block for own in share.forward]
    assert sorted(kinds) == ["all_gather", "all_gather", "reduce_scatter", "reduce_scatter"]
    assert sorted(own.kind for share in block for own in share.backward) == [
        *["all_gather"] * 4,
        *["reduce_scatter"] * 2,
    ]
    held = sum(state.bytes * shares.states.get(name, 1.0) for name, state in costs.state.items() if state.is_parameter)
    whole = sum(state.bytes for state in costs.state.values() if state.is_parameter)
    assert 0.25 * whole < held < 0.28 * whole


def test_a_rank_has_its_part_of_the_work(llama: tuple[DataflowIndex, Profile, Pairs]) -> None:
    """FLOPs and saved bytes of a rank are a quarter of the model's, and what it waits for comes on top of its time."""
    index, costs, pairs = llama
    own = _rank(costs, shares_of(pairs, index, 4), Parallel(tp=4))
    flops = [sum(node.forward_flops for node in each.nodes.values()) for each in (costs, own)]
    assert flops[1] == pytest.approx(flops[0] / 4)
    assert sum(own.nodes["layers.0.down#0"].saved.values()) == sum(costs.nodes["layers.0.down#0"].saved.values()) / 4
    alone = _rank(costs, TensorShares(4, {name: NodeShare(0.25, 0.25) for name in costs.nodes}), Parallel(tp=4))
    assert own.nodes["layers.0.down#0"].forward_s > alone.nodes["layers.0.down#0"].forward_s
    assert own.nodes["layers.0.up#0"].forward_s == alone.nodes["layers.0.up#0"].forward_s


def test_who_finds_placements_need_not_know_who_costs_them(llama: tuple[DataflowIndex, Profile, Pairs]) -> None:
    """A share by name and a collective by kind and value are all that costs ask for: this test pins the interface."""
    _, costs, _ = llama
    gather = Collective("all_gather", "layers.0.before#0")
    shares = TensorShares(2, {"layers.0.gate#0": NodeShare(0.5, 0.5, (gather,), ())}, {"layers.0.gate.weight": 0.5})
    own, placed = _rank(costs, shares, Parallel(tp=2)), place(machine("8xH100-SXM5-80GB"), Parallel(tp=2))
    work_s = own.nodes["layers.0.gate#0"].forward_s
    waits_s = placed.tp.seconds("all_gather", costs.nodes["layers.0.before#0"].output_bytes)
    none = _rank(costs, TensorShares(2, {"layers.0.gate#0": NodeShare(0.5, 0.5)}), Parallel(tp=2))
    assert work_s == pytest.approx(none.nodes["layers.0.gate#0"].forward_s + waits_s)
    assert own.state["layers.0.gate.weight"].elements == costs.state["layers.0.gate.weight"].elements / 2
    assert own.nodes["layers.0.up#0"].forward_flops == costs.nodes["layers.0.up#0"].forward_flops


def test_a_block_with_sharded_parameters_waits_for_them(llama: tuple[DataflowIndex, Profile, Pairs]) -> None:
    """Under ZeRO-3 two blocks are whole at a time; a block that is too short to hide its gather takes longer."""
    _, costs, _ = llama
    blocks = {name: int(found[1]) for name in costs.nodes if (found := re.match(r"layers\.(\d+)", name))}
    norm = {"layers.0.before#0": 0}  # too little work to hide a gather
    for own, prefix, count, waits in ((blocks, "layers.0.", 2, False), (norm, "layers.0.before.", 1, True)):
        whole, sharded = (_rank(costs, TensorShares(), Parallel(dp=8, zero=zero), blocks=own) for zero in (1, 3))
        pairs = [(node, whole.nodes[name]) for name, node in sharded.nodes.items()]
        more = [node.forward_transient_bytes - other.forward_transient_bytes for node, other in pairs]
        held = sum(state.bytes for name, state in costs.state.items() if name.startswith(prefix))
        assert list(filter(None, more)) == [2 * held] * count
        assert any(node.forward_s > other.forward_s for node, other in pairs) is waits


def test_products_in_fp8(llama: tuple[DataflowIndex, Profile, Pairs]) -> None:
    """A product of a block runs in fp8 behind a cast, and what only such products save is kept in half the bytes."""
    _, costs, _ = llama
    blocks = {name: 0 for name in costs.nodes if name.startswith("layers")}
    plain, own = (_rank(costs, TensorShares(), Parallel(), blocks=blocks, fp8=fp8) for fp8 in (False, True))
    dtypes = [operation.dtype for operation in own.nodes["layers.0.up#0"].forward_operations]
    assert torch.float8_e4m3fn in dtypes
    assert all(operation.dtype.itemsize > 1 for operation in own.nodes["lm_head#0"].forward_operations)
    halved = {name for name, node in own.nodes.items() if sum(node.outputs.values()) < _held(plain, name)}
    assert "layers.0.before#0" in halved
    assert "layers.0#0/add_0" not in halved
    assert own.nodes["layers.0.up#0"].saved != plain.nodes["layers.0.up#0"].saved


def _held(costs: Profile, name: str) -> int:
    return sum(costs.nodes[name].outputs.values())


class _Gated(nn.Module):
    """A router whose softmax mixes what would be its shards, and a norm over features between two products."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.up, self.down = nn.Linear(32, 4), nn.Linear(32, 64), nn.Linear(64, 32)
        self.first, self.norm, self.second = nn.Linear(32, 64), nn.LayerNorm(64), nn.Linear(64, 32)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        weights = self.router(value).softmax(-1)
        value = value + self.down(F.gelu(self.up(value))) * weights[..., :1]
        result: torch.Tensor = value + self.second(self.norm(self.first(value)))
        return result


def test_what_mixes_features_stays_whole() -> None:
    """Only the pair without a softmax or a norm over its shards is shared."""
    _, _, pairs = _recorded(_Gated(), torch.zeros(4, 8, 32))
    assert _modules(pairs.columns) == {"up"}
    assert _modules(pairs.rows) == {"down"}


def test_without_positions_ranks_sum() -> None:
    """A table of features has no positions to share: a row product is summed, and what lies between pairs is whole."""
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
    index, _, pairs = _recorded(model, torch.zeros(4, 32))
    shares = shares_of(pairs, index, 2)
    assert [own.kind for own in shares.of("2#0").forward] == ["all_reduce"]
    assert [own.kind for own in shares.of("0#0").backward] == ["all_reduce"]
    assert shares.of("2#0").held == 1.0


def test_a_degree_that_does_not_divide(llama: tuple[DataflowIndex, Profile, Pairs]) -> None:
    """The error says what is not divided, and which degrees do."""
    index, _, pairs = llama
    with pytest.raises(InputError, match=r"tp=8 does not divide 4 heads; degrees .*: 1, 2, 4"):
        shares_of(pairs, index, 8)
    index, _, pairs = _recorded(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)), torch.zeros(4, 8))
    with pytest.raises(InputError, match="no pair of products"):
        shares_of(pairs, index, 2)


def _rank(
    costs: Profile, shares: TensorShares, parallel: Parallel, *, blocks: dict[str, int] | None = None, fp8: bool = False
) -> Profile:
    placed, model = place(machine("8x8xH100-SXM5-80GB"), parallel), Roofline(device("H100-SXM5-80GB"))
    part = rank_profile(costs, shares, group=placed.tp, blocks=blocks or {}, model=model, fp8=fp8)
    return with_gathers(part, placed=placed, blocks=blocks or {})
