"""Sums over replicas begin beside the last backward of a stage, and are those of all rows whatever comes later."""

from __future__ import annotations

import copy
import random
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from autosplit import autosplit
from autosplit.distributed import replicas
from autosplit.distributed.world import World
from autosplit.runtime.step.cells import Cells
from autosplit.schedule.action import Action
from autosplit.schedule.catalog import SCHEDULES, build
from autosplit.schedule.entry import Entry, Receive, Reduce, Reshard, Send, Unshard
from autosplit.schedule.lists import Actions
from autosplit.schedule.order import check_state, with_reductions
from tests.distributed.orders import drawn
from tests.distributed.processes import Pool
from tests.distributed.replicas import mesh_of, replica_of
from tests.properties import examples

WIDTH, ROWS = 8, 16
SHARES = {"even": (8, 8), "ragged": (11, 5), "empty": (16, 0)}


class Net(nn.Module):
    """Layers, the first and the last scaled by a value that is computed once per step."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(8))
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.tanh(self.scale)
        x = self.layers[0](x) * scale
        for layer in self.layers[1:]:
            x = torch.tanh(layer(x))
        return x * scale


def penalised(layers: nn.ModuleList, held: nn.Module) -> Any:
    """Return a loss that reads the parameters of the last layer, where a process has them."""

    def loss(output: Tensor, target: Tensor) -> Tensor:
        here = [own for own in layers[-1].parameters() if any(own is parameter for parameter in held.parameters())]
        return F.mse_loss(output, target) + torch.stack([parameter.square().sum() for parameter in here]).sum()

    return loss


def steps(schedule: str, shares: tuple[int, int], bucket: int) -> tuple[list[float], list[list[str]]]:
    """Return by how much gradients differ from the plain model's in four steps, and what was done in each.

    The loss of the third step reads parameters, too.
    """
    torch.manual_seed(0)
    plain = Net().double()
    model, mesh = copy.deepcopy(plain), mesh_of(2, 2)
    options: dict[str, Any] = {"virtual_stages": 2} if schedule == "interleaved" else {}
    sample = torch.randn(8, WIDTH, dtype=torch.float64)
    pipe = autosplit(model, mesh=mesh, chunks=4, sample=sample, schedule=schedule, **options)
    log: list[list[str]] = []
    begin, act = World.begin_to_add, Cells.act

    def begins(world: World, tensor: Tensor) -> Any:
        log[-1].append("sum")
        return begin(world, tensor)

    def acts(cells: Cells, action: Any) -> None:
        log[-1].append(str(action))
        act(cells, action)
        log[-1].append(f"end of {action}")

    differences = []
    patches = mock.patch.object(World, "begin_to_add", begins), mock.patch.object(Cells, "act", acts)
    with patches[0], patches[1], mock.patch.object(replicas, "BUCKET_BYTES", bucket):
        for step in range(4):
            x, target = torch.randn(2, ROWS, WIDTH, dtype=torch.float64)
            log.append([])
            reads = step == 2 and min(shares) > 0
            loss = penalised(plain.layers, plain) if reads else F.mse_loss
            plain.zero_grad()
            loss(plain(x), target).backward()
            own = (part.split(shares)[replica_of(mesh)] for part in (x, target))
            given: dict[str, Any] = {"loss_fn": F.mse_loss}
            if reads:
                given = {"loss_fn": penalised(model.layers, pipe), "loss_reduction": "mean"}
            pipe.zero_grad()
            pipe.train_step(next(own), target=next(own), **given)
            named = dict(plain.named_parameters())
            found = [(named[name].grad, parameter.grad) for name, parameter in pipe.named_parameters()]
            differences.append(max(float((one - other).abs().max()) for one, other in found))  # type: ignore[operator, union-attr]
    return differences, log


@pytest.mark.parametrize("shares", SHARES)
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb_h1", "file"])
def test_sums_are_those_of_all_rows(ranks: Pool, tmp_path: Path, schedule: str, shares: str) -> None:
    path = tmp_path / "sums.csv"
    if schedule == "file":  # which begins the sums of a rank's first stage first, behind all that it computes
        rows = build("interleaved", stages=4, microbatches=4).texts
        path.write_text("\n".join(",".join((*row, f"{n}REDUCE_GRAD,{n + 2}REDUCE_GRAD")) for n, row in enumerate(rows)))
    name = str(path) if schedule == "file" else schedule
    for differences, log in ranks(4).run(steps, name, SHARES[shares], 1 << 10):
        assert max(differences) < 1e-14
        for done in (log[0], log[1], log[3]) if shares != "empty" else ():
            first, last = done.index("sum"), max(place for place, word in enumerate(done) if word.startswith("end"))
            assert (first < last) == (schedule != "zb_h1"), done


@pytest.mark.parametrize("name", [*SCHEDULES, "shuffled"])
@settings(max_examples=examples(100, few=15))
@given(chance=st.integers(0, 2**32 - 1).map(random.Random))
def test_sums_over_replicas_begin_once_per_stage_in_one_order(name: str, chance: random.Random) -> None:
    case = drawn(name, chance)
    for items in case.lists():
        found = with_reductions(items)
        assert [item for item in found if not isinstance(item, Reduce)] == list(items)
        check_state(found)
        backwards = {item for item in items if isinstance(item, Action) and item.kind != "F"}
        begun = [item.stage for item in found if isinstance(item, Reduce)]
        assert begun == sorted({action.stage for action in backwards}, reverse=True)
        for item in found:
            backwards.discard(item)  # type: ignore[arg-type]
            if isinstance(item, Reduce):
                assert item.stage not in {action.stage for action in backwards}


def wrapping(part: nn.Module, mesh: Any, *, shards: bool) -> nn.Module:
    """Shard a part over its replicas, or leave it as it is."""
    return fully_shard(part, mesh=mesh["dp"]) if shards else part


SHARED: dict[str, tuple[dict[str, Any], set[type[Entry]]]] = {
    "copies": ({}, {Reduce}),
    "never": ({"parallelize": "fsdp"}, {Unshard, Reduce, Reshard}),
    "always": ({"parallelize": "fsdp", "fsdp_reshard": "always"}, {Unshard, Reshard}),
    "a wrapper that shards": ({"parallelize": partial(wrapping, shards=True)}, {Unshard, Reduce, Reshard}),
    "a wrapper that does not": ({"parallelize": partial(wrapping, shards=False)}, {Reduce}),
}
"""What replicas share out, and what their lists have beside actions and messages."""


def profiled(mesh_sizes: tuple[int, ...], schedule: str, shared: str) -> list[str]:
    """Return this rank's lists: of two steps, the first of which describes its messages, and as the plan prints it."""
    torch.manual_seed(0)
    mesh, options = mesh_of(*mesh_sizes), SHARED[shared][0] if mesh_sizes[0] > 1 else {}
    sample = torch.randn(8, WIDTH)
    pipe = autosplit(Net(), mesh=mesh, chunks=4, sample=sample, schedule=schedule, **options)
    runs = [pipe.profile_step(sample, target=sample, loss_fn=F.mse_loss) for _ in range(2)]
    lane, lists = mesh["pp"].get_local_rank(), pipe.plan.actions.check()
    return [str(Actions((each[lane],))) for each in (*(run.actions for run in runs), lists)]


def check_lists(ranks: Pool, mesh_sizes: tuple[int, ...], schedule: str, shared: str) -> None:
    """Hold what ranks ran against what their plans print."""
    kinds = SHARED[shared][1] if mesh_sizes[0] > 1 else set()
    for first, second, planned in ranks(4 if mesh_sizes[0] > 1 else 2).run(profiled, mesh_sizes, schedule, shared):
        assert sorted(first.split(",")) == sorted(planned.split(","))
        assert second == planned
        assert {type(entry) for entry in Actions.parse(planned)[0]} - {Action, Send, Receive} == kinds


@pytest.mark.parametrize("schedule", [name for name in SCHEDULES if name != "forward"])
@pytest.mark.parametrize("mesh_sizes", [(1, 2), (2, 2)])
def test_ranks_run_the_list_that_the_plan_prints(ranks: Pool, mesh_sizes: tuple[int, int], schedule: str) -> None:
    check_lists(ranks, mesh_sizes, schedule, "copies")


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb_h1"])
@pytest.mark.parametrize("shared", [name for name in SHARED if name != "copies"])
def test_replicas_with_shards_run_the_list_that_the_plan_prints(ranks: Pool, shared: str, schedule: str) -> None:
    check_lists(ranks, (2, 2), schedule, shared)
