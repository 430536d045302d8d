"""The groups of a rank: its neighbours' alone, and the mesh's own ones, whatever else a process has made."""

from __future__ import annotations

import json
import subprocess
import sys
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autosplit.distributed import join as join_module
from autosplit.distributed.join import join
from benchmarks.fake_ranks import ASKED_GROUPS
from tests.distributed.processes import Pool


def test_one_of_1024_ranks() -> None:
    layout = ["--layout", "16", "8", "8"]
    command = [sys.executable, "-m", "benchmarks.fake_ranks", "--rank", "580", *layout]
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
    assert found["mesh groups"] + found["join groups"] + found["pairs groups"] <= ASKED_GROUPS
    assert found["join calls"] + found["pairs calls"] <= ASKED_GROUPS
    assert found["join keys read"] < 10
    assert found["beat keys read"] < 10


def around() -> tuple[int, int, str, bool]:
    """Send each rank's number to the next one of a pipeline 2, 0, 1; return what came, and what its first rank says."""
    number = dist.get_rank()
    if number == 1:  # the names of torch's own groups would differ between neighbours
        dist.new_group([1], use_local_synchronization=True)
    mesh = DeviceMesh("cpu", [[2], [0], [1]], mesh_dim_names=("pp", "dp"))
    world = join(mesh)
    world.open({(0, 1), (1, 2), (2, 0)})
    received = torch.zeros(1, dtype=torch.int64)
    sent = world.isend(torch.tensor([number]), (world.rank + 1) % 3)
    world.irecv(received, (world.rank + 2) % 3).wait()
    sent.wait()
    word = world.told(0, f"rank {number} is the first")
    return world.rank, int(received), word, world.pairs[0, 1] is None


def test_members_alone_make_a_group_in_the_order_of_the_mesh(ranks: Pool) -> None:
    word = "rank 2 is the first"
    assert ranks(3).run(around) == [(1, 2, word, False), (2, 0, word, True), (0, 1, word, False)]


def shared() -> list[bool]:
    """Return whether a rank's groups are those of its mesh, and whether many ranks gather along that in their order."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("dp", "pp", "tp"))
    with mock.patch.object(join_module, "_FEW", 1):
        world = join(mesh)
    groups = {"pp": world.control, "dp": world.across, "tp": world.tensor}
    numbers = world.gather("says its number", dist.get_rank())
    return [mesh.get_group(name) is group for name, group in groups.items()] + [numbers == [0, 1, 2, 3]]


def test_groups_of_a_mesh_are_used(ranks: Pool) -> None:
    assert ranks(4).run(shared) == 4 * [[True] * 4]
