"""Ranks that share tokens (cp) and experts (ep), on paper: what they hold, send and wait for, by hand counts."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autosplit import InputError, Plan, plan
from autosplit.options import Sample
from autosplit.parallel import Parallel, place
from autosplit.planning.parallel.rank import rank_profile
from autosplit.planning.parallel.tokens import shares_of_experts, shares_of_keys, with_all_keys
from autosplit.profile.node_costs.combine import profile
from autosplit.profile.shares import TensorShares
from autosplit.profile.types import Profile
from autosplit.trace.graph import TracedGraph
from autosplit.trace.ladder import trace
from cost_models.collectives import longer_s
from cost_models.registry import device, machine
from cost_models.roofline import Roofline
from tests.planning.llama import Llama

WIDTH, INNER, EXPERTS, WORDS = 256, 512, 4, 1024


class Experts(nn.Module):
    """Tokens in equal groups, one for each expert, on top of what came in."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (nn.Parameter(torch.empty(EXPERTS, a, b)) for a, b in ((WIDTH, INNER), (INNER, WIDTH)))

    def forward(self, value: Tensor) -> Tensor:
        groups = value.unflatten(1, (EXPERTS, -1))
        return value + (F.relu(groups @ self.up) @ self.down).flatten(1, 2)


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.layers = nn.ModuleList(Experts() for _ in range(4))

    def forward(self, words: Tensor) -> Tensor:
        value = self.embed(words)
        for layer in self.layers:
            value = layer(value)
        result: Tensor = self.head(value)
        return result


def _planned(model: type[nn.Module], tokens: int, mesh: dict[str, int], **choices: Any) -> Plan:
    with torch.device("meta"):
        own = Llama(width=512, inner=1024, layers=4, heads=8, groups=4) if model is Llama else model()
    sample = torch.zeros(16, tokens, dtype=torch.int64, device="meta")
    count = Parallel(**mesh).ranks
    asked = {"precision": "bf16_fp32_master", "recompute": "never", "schedule": "1f1b", "runtime": "megatron"}
    asked |= {"chunks": 2, "zero": 0, "mesh": mesh, "loss_fn": _loss, **choices}
    return plan(own, f"{count}xH100-SXM5-80GB", sample=sample, **asked)


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.float().flatten(0, 1), target.flatten())


def test_ranks_of_cp_hold_their_tokens_and_share_states_as_replicas_do() -> None:
    """Activations are those of rows of half the length; the model's FLOPs, states and rows those of whole ones."""
    own = _planned(Llama, 256, {"dp": 2, "cp": 2, "pp": 2}, zero=1)
    whole = _planned(Llama, 256, {"dp": 4, "pp": 2}, zero=1)
    assert str(own.mesh) == "dp=2, tp=1, pp=2, cp=2, ZeRO-1"
    assert (own.sequence, own.model_flops) == (256, pytest.approx(whole.model_flops))
    assert own.tokens_per_s == pytest.approx(16 * 256 / own.step_s)
    assert own.boundaries[-1].bytes == 4 * 128 * 512 * 2  # rows, tokens, width, bf16
    ranks, short = (
        _planned(Llama, each, {"dp": 2, **cp}, optimizer="none") for each, cp in ((256, {"cp": 2}), (128, {}))
    )
    assert ranks.stages[0].memory.activation_bytes == short.stages[0].memory.activation_bytes > 0
    assert ranks.stages[0].forward_s > short.stages[0].forward_s
    for name in ("parameter_bytes", "optimizer_bytes"):
        held, like = (sum(getattr(stage.memory, name) for stage in each.stages) for each in (own, whole))
        assert held == like
    assert any("autosplit runs no ranks of cp or ep: torchtitan and Megatron-LM do" in note for note in own.notes)
    again = Plan.model_validate_json(own.to_json())
    assert again.mesh == own.mesh
    with torch.device("meta"):
        model = Llama(width=512, inner=1024, layers=4, heads=8, groups=4)
    sample = torch.zeros(16, 256, dtype=torch.int64, device="meta")
    followed = plan(model, sample=sample, plan=again, loss_fn=_loss)
    assert (followed.step_s, followed.stages[0].memory) == (own.step_s, own.stages[0].memory)


def test_attention_takes_the_keys_of_all_ranks() -> None:
    """Of 2 x 16 tokens it is done twice; keys and values of both ranks are there, and travel beside one half of it."""
    with torch.device("meta"):
        model = Llama(width=64, inner=128, layers=1, heads=8, groups=4).bfloat16()
    graph, costs = _recorded(model, torch.zeros(4, 16, dtype=torch.int64, device="meta"))
    twice = with_all_keys(costs, 2)
    [name] = [name for name in costs.nodes if "scaled_dot" in name]
    assert twice.nodes[name].forward_flops == 2 * costs.nodes[name].forward_flops
    placed = place(machine("2x8xH100-SXM5-80GB"), Parallel(dp=8, cp=2))
    shares = shares_of_keys(TensorShares(), twice, graph, 2)
    own, alone = (_rank(each, graph, shares, placed) for each, shares in ((twice, shares), (twice, TensorShares())))
    keys = 2 * 4 * 16 * 8 * 2  # rows, groups, tokens, width of a head, bf16
    more = own.nodes[name].forward_transient_bytes - alone.nodes[name].forward_transient_bytes
    assert more == 2 * 2 * keys
    work_s, waits_s = alone.nodes[name].forward_s, 2 * placed.groups["cp"].seconds("all_gather", 2 * keys)
    assert own.nodes[name].forward_s == pytest.approx(work_s + longer_s(waits_s, work_s / 2))
    assert own.nodes[name].backward_s > alone.nodes[name].backward_s


@pytest.mark.parametrize(("zero", "ep_of_parameters", "ep_of_state"), [(0, 2, 2), (1, 2, 4), (3, 4, 4)])
def test_ranks_of_ep_divide_experts(zero: int, ep_of_parameters: int, ep_of_state: int) -> None:
    """Two ranks of four replicas have half of the experts each, and shard these over the two others."""
    own = _planned(Mixture, 128, {"dp": 4, "ep": 2}, zero=zero).stages[0].memory
    dense, experts = 2 * WORDS * WIDTH, 4 * 2 * EXPERTS * WIDTH * INNER
    shards = [4 if zero == 3 else 1, 4 if zero else 1]
    assert own.parameter_bytes == 2 * (dense // shards[0] + experts // ep_of_parameters)
    assert own.optimizer_bytes == 12 * (dense // shards[1] + experts // ep_of_state)
    if zero == 0:
        assert own.gradient_bytes == 2 * (dense + experts // 2)


def test_tokens_travel_to_experts_and_back() -> None:
    """Each layer sends the tokens of a rank away and gets them back, in both passes; half of the experts is summed."""
    with torch.device("meta"):
        graph, costs = _recorded(Mixture().bfloat16(), torch.zeros(2, 64, dtype=torch.int64, device="meta"))
    placed = place(machine("2x8xH100-SXM5-80GB"), Parallel(dp=16, ep=4))
    assert (placed.groups["ep"].islands, placed.groups["edp"].size, placed.groups["edp"].islands) == (1, 4, 2)
    shares = shares_of_experts(TensorShares(), costs, graph, 4)
    own, alone = (_rank(costs, graph, each, placed) for each in (shares, TensorShares()))
    seconds = [sum(node.forward_s for node in each.nodes.values()) for each in (own, alone)]
    sent_s = placed.groups["ep"].seconds("all_to_all", 4 * 2 * 64 * WIDTH * 2)
    assert seconds[0] - seconds[1] == pytest.approx(4 * 2 * sent_s)
    assert own.state["layers.0.up"].bytes == costs.state["layers.0.up"].bytes / 4
    found = [_planned(Mixture, 128, mesh).update_s for mesh in ({"dp": 8}, {"dp": 8, "ep": 4})]
    assert found[1] < found[0]


def test_exports_have_the_degrees() -> None:
    own = _planned(Mixture, 128, {"dp": 4, "ep": 2}, zero=3)
    assert own.mesh is not None
    own = own.model_copy(update={"mesh": own.mesh.model_copy(update={"cp": 2})})
    found = tomllib.loads(own.export("torchtitan-toml"))["parallelism"]
    degrees = [found[f"{name}_degree"] for name in ("data_parallel_shard", "context_parallel", "expert_parallel")]
    assert degrees == [4, 2, 2]
    assert "--context-parallel-size 2 --expert-model-parallel-size 2" in own.export("megatron-args")


def test_what_cannot_be_shared() -> None:
    with pytest.raises(InputError, match="130 tokens are no 4 equal parts"):
        _planned(Llama, 130, {"dp": 2, "cp": 2})
    with pytest.raises(InputError, match="share what torch's scaled_dot_product_attention takes, and the model does"):
        _planned(Mixture, 128, {"dp": 2, "cp": 2})
    with pytest.raises(InputError, match="ep=8 ranks share experts, and the model has 4 of them"):
        _planned(Mixture, 128, {"dp": 8, "ep": 8})
    with pytest.raises(InputError, match="no input is a table of integers"):
        plan(nn.Linear(4, 4), "2xL4-24GB", sample=torch.zeros(8, 4), mesh={"cp": 2})


def _recorded(model: nn.Module, sample: Tensor) -> tuple[TracedGraph, Profile]:
    graph = trace(model, Sample(sample)).graph
    return graph, profile(graph, rows=2, batch_rows=2, measure=False, device="H100-SXM5-80GB", kernels="cuda")


def _rank(costs: Profile, graph: TracedGraph, shares: TensorShares, placed: Any) -> Profile:
    model = Roofline(device("H100-SXM5-80GB"))
    return rank_profile(costs, shares, groups=placed.groups, blocks={}, model=model)
