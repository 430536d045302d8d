"""What a tensor-parallel rank has of every node: the interface of the planner, and what the tensor plan says."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from autosplit.errors import InputError
from autosplit.options import Sample
from autosplit.parallel import Parallel, place
from autosplit.planning.parallel.placements import shares_of
from autosplit.planning.parallel.rank import rank_profile, with_gathers
from autosplit.profile.node_costs.combine import profile
from autosplit.profile.shares import Collective, NodeShare, TensorShares
from autosplit.profile.types import Profile
from autosplit.tensor.plan import check_sharded, tensor_plan
from autosplit.trace.graph import TracedGraph
from autosplit.trace.ladder import trace
from cost_models.collectives import BESIDE
from cost_models.registry import device, machine
from cost_models.roofline import Roofline
from tests.planning.llama import Llama

_ROWS = 2


def _recorded(model: nn.Module, *sample: torch.Tensor) -> tuple[TracedGraph, Profile]:
    graph = trace(model, Sample(*sample)).graph
    return graph, profile(graph, rows=_ROWS, batch_rows=_ROWS, measure=False, device="H100-SXM5-80GB", kernels="cuda")


def _shares(graph: TracedGraph, ranks: int, *, sequence: bool = False) -> TensorShares:
    return shares_of(tensor_plan(graph, ranks=ranks, rows=_ROWS, latency_bytes=1.0), graph, sequence=sequence)


@pytest.fixture(scope="module")
def llama() -> tuple[TracedGraph, Profile]:
    with torch.device("meta"):
        model = Llama(width=64, inner=128, layers=2, heads=8, groups=4).bfloat16()
    return _recorded(model, torch.zeros(4, 16, dtype=torch.int64, device="meta"))


def _kinds(shares: TensorShares, module: str) -> tuple[list[str], list[str]]:
    own = [share for name, share in shares.nodes.items() if name.startswith(module)]
    forward, backward = (
        [one for share in own for one in share.forward],
        [one for share in own for one in share.backward],
    )
    return sorted(one.kind for one in forward), sorted(one.kind for one in backward)


@pytest.mark.parametrize("sequence", [False, True])
def test_shares_of_llama(llama: tuple[TracedGraph, Profile], *, sequence: bool) -> None:
    """A rank has its part of products, heads, parameters and, between pairs, positions, gathered in both passes."""
    graph, costs = llama
    shares = _shares(graph, 4, sequence=sequence)
    part = NodeShare(0.25, 0.25)
    assert shares.of("layers.1#0/mul_0") == shares.of("layers.1#0/add_0") == part
    assert {share.work for name, share in shares.nodes.items() if "layers.1" in name} == {0.25}
    gathered = {name for name, share in shares.nodes.items() if "layers.1" in name and share.held == 1}
    assert gathered == set()
    assert shares.of("layers.1.up#0").whole == ("" if sequence else "layers.1.behind#0")
    assert shares.of("layers.1.down#0").forward == (Collective("reduce_scatter", "layers.1.down#0"),)
    assert _kinds(shares, "layers.1") == (
        ["all_gather"] * 2 + ["reduce_scatter"] * 2,
        ["all_gather"] * 4 + ["all_reduce"] * (0 if sequence else 2) + ["reduce_scatter"] * 2,
    )  # two norms' scales are summed in every backward, by Megatron-LM once per step
    gathers = {name: share.forward for name, share in shares.nodes.items() if "layers.1" in name and share.forward}
    assert gathers["layers.1.gate#0"] == (Collective("all_gather", "layers.1.behind#0"),)  # where it hides beside work
    head = shares.of("lm_head#0")
    words = [] if sequence else ["lm_head#0"]
    assert (head.work, head.held) == (0.25, 0.25 if sequence else 1)
    assert head.forward == tuple(Collective("all_gather", value) for value in ("norm#0", *words))
    assert shares.states["layers.1.attention.q_proj.weight"] == shares.states["embed.weight"] == 0.25
    assert "layers.0.before.weight" not in shares.states
    held = sum(state.bytes * shares.states.get(name, 1.0) for name, state in costs.state.items() if state.is_parameter)
    every = sum(state.bytes for state in costs.state.values() if state.is_parameter)
    assert 0.25 * every < held < 0.28 * every


def test_a_rank_has_its_part_of_the_work(llama: tuple[TracedGraph, Profile]) -> None:
    """FLOPs and saved bytes of a rank are a quarter of the model's, and what it waits for comes on top of its time."""
    graph, costs = llama
    own = _rank(costs, _shares(graph, 4), Parallel(tp=4))
    flops = [sum(node.forward_flops for node in each.nodes.values()) for each in (costs, own)]
    assert flops[1] == pytest.approx(flops[0] / 4)
    assert sum(own.nodes["layers.0.down#0"].saved.values()) == sum(costs.nodes["layers.0.down#0"].saved.values()) / 4
    alone = _rank(costs, TensorShares({name: NodeShare(0.25, 0.25) for name in costs.nodes}), Parallel(tp=4))
    assert own.nodes["layers.0.down#0"].forward_s > alone.nodes["layers.0.down#0"].forward_s
    assert own.nodes["layers.0.up#0"].forward_s == alone.nodes["layers.0.up#0"].forward_s


def test_who_finds_placements_need_not_know_who_costs_them(llama: tuple[TracedGraph, Profile]) -> None:
    """A share by name and a collective by kind and value are all that costs ask for: this test pins the interface."""
    _, costs = llama
    gather = Collective("all_gather", "layers.0.before#0")
    shares = TensorShares({"layers.0.gate#0": NodeShare(0.5, 0.5, (gather,), ())}, {"layers.0.gate.weight": 0.5})
    own, placed = _rank(costs, shares, Parallel(tp=2)), place(machine("8xH100-SXM5-80GB"), Parallel(tp=2))
    work_s = own.nodes["layers.0.gate#0"].forward_s
    waits_s = placed.groups["tp"].seconds("all_gather", costs.nodes["layers.0.before#0"].output_bytes)
    none = _rank(costs, TensorShares({"layers.0.gate#0": NodeShare(0.5, 0.5)}), Parallel(tp=2))
    assert work_s == pytest.approx(none.nodes["layers.0.gate#0"].forward_s + waits_s)
    assert own.state["layers.0.gate.weight"].elements == costs.state["layers.0.gate.weight"].elements / 2
    assert own.nodes["layers.0.up#0"].forward_flops == costs.nodes["layers.0.up#0"].forward_flops


def test_a_block_with_sharded_parameters_waits_for_them(llama: tuple[TracedGraph, Profile]) -> None:
    """Under ZeRO-3 two blocks are whole at a time; nothing hides the first gather, and work slows beside the others."""
    _, costs = llama
    blocks = {name: int(found[1]) for name in costs.nodes if (found := re.match(r"layers\.(\d+)", name))}
    norm = {"layers.0.before#0": 0}
    dp = place(machine("8x8xH100-SXM5-80GB"), Parallel(dp=8)).groups["dp"]
    for own, prefix, count in ((blocks, "layers.0.", 2), (norm, "layers.0.before.", 1)):
        whole, sharded = (
            _rank(costs, TensorShares(), Parallel(dp=8, zero=zero, runtime="megatron"), blocks=own) for zero in (1, 3)
        )
        pairs = [(node, whole.nodes[name]) for name, node in sharded.nodes.items()]
        more = [node.forward_transient_bytes - other.forward_transient_bytes for node, other in pairs]
        held = sum(state.bytes for name, state in costs.state.items() if name.startswith(prefix))
        assert list(filter(None, more)) == [2 * held] * count
        gather_s = dp.seconds("all_gather", held)
        waits_s = [node.forward_s - other.forward_s for node, other in pairs if node.name in own]
        assert list(filter(None, waits_s)) == [pytest.approx(gather_s), pytest.approx(BESIDE * gather_s)][:count]
        embedding_s = [node.backward_s - other.backward_s for node, other in pairs if node.name == "embed#0"]
        size = costs.state["embed.weight"].bytes
        assert embedding_s == [pytest.approx(dp.seconds("reduce_scatter", size))]


def test_products_in_fp8(llama: tuple[TracedGraph, Profile]) -> None:
    """A product of a block runs in fp8 behind a cast, and what only such products save is kept in half the bytes."""
    _, costs = llama
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


def test_without_positions_ranks_sum() -> None:
    """A table of features has no positions to share: under sequence parallelism too a row product is summed."""
    graph, _ = _recorded(nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)), torch.zeros(4, 32))
    shares = _shares(graph, 2, sequence=True)
    assert shares.of("2#0") == NodeShare(0.5, 1.0, (Collective("all_reduce", "2#0"),), inner=True)


def test_positions_are_not_shared_where_heads_are_whole(llama: tuple[TracedGraph, Profile]) -> None:
    """More ranks than groups of heads have attention whole: its queries are put together, and positions are not."""
    shares = _shares(llama[0], 8, sequence=True)
    attention = next(share for name, share in shares.nodes.items() if "layers.1.attention#0/scaled_dot" in name)
    assert attention.work == 1


def test_a_parameter_that_ranks_have_whole_is_waited_for() -> None:
    """A norm over features in parts has its scale whole, whose gradient ranks sum: its bytes are the parameter's."""
    model = nn.Sequential(nn.Linear(32, 64), nn.Unflatten(1, (8, 8)), nn.LayerNorm(8), nn.Flatten(), nn.Linear(64, 32))
    graph, costs = _recorded(model, torch.zeros(4, 32))
    shares = _shares(graph, 2)
    assert Collective("all_reduce", "2.weight") in shares.of("2#0").backward
    placed = place(machine("8xH100-SXM5-80GB"), Parallel(tp=2))
    alone = _rank(costs, TensorShares({"2#0": NodeShare(0.5, 0.5)}), Parallel(tp=2)).nodes["2#0"].backward_s
    waits_s = _rank(costs, shares, Parallel(tp=2)).nodes["2#0"].backward_s - alone
    assert waits_s == pytest.approx(
        2 * placed.groups["tp"].seconds("all_reduce", costs.state["2.weight"].bytes), rel=1e-3
    )


def test_a_degree_that_does_not_divide(llama: tuple[TracedGraph, Profile]) -> None:
    """The error says what is not divided, and which degrees do."""
    with pytest.raises(InputError, match=r"tp=3 does not divide 4, by which .*; degrees that do: 1, 2, 4"):
        _shares(llama[0], 3)
    graph, _ = _recorded(nn.Sequential(nn.LayerNorm(8)), torch.zeros(4, 8))
    with pytest.raises(InputError, match="shards no parameter of the model"):
        check_sharded(tensor_plan(graph, ranks=2, rows=_ROWS))


def _rank(
    costs: Profile, shares: TensorShares, parallel: Parallel, *, blocks: dict[str, int] | None = None, fp8: bool = False
) -> Profile:
    placed, model = place(machine("8x8xH100-SXM5-80GB"), parallel), Roofline(device("H100-SXM5-80GB"))
    part = rank_profile(costs, shares, groups=placed.groups, blocks=blocks or {}, model=model, fp8=fp8)
    return with_gathers(part, placed=placed, blocks=blocks or {})
