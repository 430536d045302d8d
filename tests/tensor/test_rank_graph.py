"""A planned model on two ranks has the outputs and the gradients of the plain one."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from autosplit.options import Sample
from autosplit.planning.profiled.apply import DataflowIndex, assign
from autosplit.tensor.build import rank_recording
from autosplit.tensor.collectives import Sharing, local_part
from autosplit.tensor.plan import tensor_plan
from autosplit.trace.ladder import trace
from benchmarks.tensor_graph import rank_graph
from tests.distributed.processes import Pool
from tests.tensor.nets import NETS, ROWS, batch, net

TOLERANCE = 1e-12


def _difference(one: Tensor, two: Tensor) -> float:
    return float((one - two).abs().max() / one.abs().max().clamp(min=1e-9))


def compared(name: str) -> dict[str, float]:
    """Return how far a rank's outputs and gradients are from the plain model's."""
    model, inputs = net(name), batch(name)
    traced = trace(model, Sample(inputs)).graph
    plan = tensor_plan(traced, ranks=dist.get_world_size(), rows=ROWS, latency_bytes=1.0)
    plain = model(inputs)
    seed = torch.randn_like(plain)
    plain.backward(seed)
    gradients = {n: p.grad for n, p in model.named_parameters(remove_duplicate=False)}
    module = rank_graph(traced, plan)
    (output,) = module(ROWS, inputs)
    for parameter in module.parameters():
        parameter.grad = None
    output.backward(seed)
    found = {"output": _difference(plain, output)}
    for key, parameter in module.named_parameters(remove_duplicate=False):
        whole = gradients[key]
        assert whole is not None
        assert parameter.grad is not None, key
        own = local_part(whole, plan.parameters[key], dist.get_rank(), dist.get_world_size())
        found[key] = _difference(own, parameter.grad)
    assert len(found) == 1 + len(gradients)
    return {key: value for key, value in found.items() if value > TOLERANCE}


@pytest.mark.parametrize("name", NETS)
def test_two_ranks_compute_what_one_process_does(ranks: Pool, name: str) -> None:
    assert ranks(2).run(compared, name) == [{}, {}]


@pytest.mark.parametrize("name", ["one key head", "tied language model"])
def test_nodes_keep_their_stages_where_another_call_has_other_moves(name: str) -> None:
    """Ranks share positions of one length and not of another: what moves there is no reason to raise what takes it."""
    traced, sharing = trace(net(name), Sample(batch(name))).graph, Sharing(0, 2, alone=True)
    plans = (tensor_plan(traced, ranks=2, rows=ROWS, sequence=sequence) for sequence in (True, False))
    before, after = (DataflowIndex(rank_recording(traced, plan, sharing)) for plan in plans)
    names = [[info.name for _, info in index.traced.compute_nodes()] for index in (before, after)]
    assert set(names[1]) - set(names[0])
    for cut in range(1, len(names[0])):
        stages = assign(before, {node: int(number >= cut) for number, node in enumerate(names[0])}, stages=2)
        again = assign(after, stages, stages=2)
        assert [node for node in names[1] if stages.get(node, again[node]) != again[node]] == []
