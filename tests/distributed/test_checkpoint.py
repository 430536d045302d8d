"""Checkpoints: any number of ranks to any other, beside the training, in a format that torch reads."""

from __future__ import annotations

import os
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from autosplit.distributed.checkpoint import latest, restore, save
from autosplit.optimizers import MasterWeights
from tests.distributed.parts import (
    OPTIMIZERS,
    Plain,
    check_same,
    my_part,
    restored_and_trained,
    run,
    state_of,
    train,
    trained_and_saved,
    uninterrupted,
)


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 4), (4, 1), (1, 4), (2, 2), (1, 1)])
def test_training_goes_on_exactly_on_other_ranks(ranks, tmp_path, kind, before, after):
    run(ranks, before, trained_and_saved, tmp_path, kind, 3)
    for others in (0, 2):
        found = run(ranks, after, restored_and_trained, tmp_path, kind, 5, others)
        check_same([state for state, _ in found], uninterrupted(kind, 5))
        assert set().union(*(begun for _, begun in found)) <= {3.0}


def sharded(seed: int) -> nn.Module:
    """Return a model, on several ranks with its parameters sharded over them, one unevenly."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3))
    return (
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),))) if dist.is_initialized() else model
    )


def sharded_and_saved(folder: Path) -> None:
    model = sharded(1)
    optimizers = OPTIMIZERS["AdamW, groups"](model)
    train(model, optimizers, range(3))
    save(folder, 3, model, optimizers, wait=False).wait()


def sharded_and_restored(folder: Path) -> dict[str, Any]:
    model = sharded(2)
    optimizers = OPTIMIZERS["AdamW, groups"](model)
    restore(folder, model, optimizers)
    train(model, optimizers, range(3, 5))
    return state_of(model)


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (2, 4)])
def test_shards_of_a_parameter_go_to_other_ranks(ranks, tmp_path, before, after):
    run(ranks, before, sharded_and_saved, tmp_path)
    found = run(ranks, after, sharded_and_restored, tmp_path)
    plain = sharded(1)
    train(plain, OPTIMIZERS["AdamW, groups"](plain), range(5))
    for one in found:
        check_same([one], state_of(plain))


def masters_of_shards(folder: Path, seed: int, done: int, until: int) -> list[list[Any]]:
    """Train by master weights of bf16 parameters, from a checkpoint on where steps are done; return all values."""
    model = sharded(seed).bfloat16()
    optimizer = MasterWeights(torch.optim.AdamW, model.parameters(), lr=1e-3)
    if done:
        restore(folder, model, optimizer)
    train(model, [optimizer], range(done, until))
    if until == 3:
        save(folder, 3, model, optimizer)
    values = [(parameter, optimizer.state[parameter]["master"]) for parameter in model.parameters()]
    return [[getattr(v, "full_tensor", lambda v=v: v)().float().tolist() for v in pair] for pair in values]


def test_master_weights_go_to_other_ranks_without_rounding(ranks, tmp_path):
    run(ranks, 2, masters_of_shards, tmp_path, 1, 0, 3)
    expected = masters_of_shards(tmp_path, 1, 0, 5)
    assert masters_of_shards(tmp_path, 2, 3, 5) == expected
    assert all(found == expected for found in run(ranks, 2, masters_of_shards, tmp_path, 2, 3, 5))


# -- other values ----------------------------------------------------------------------------------------------------
def trained_with_a_scheduler(folder: Path, begin: int, end: int) -> list[Any]:
    """Save with what else belongs to a training, or restore it; draw random numbers afterwards."""
    rank = dist.get_rank()
    part = my_part(seed=1)
    optimizer = torch.optim.SGD(part.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=20)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    torch.manual_seed(rank)
    loader = {"epoch": 0, "order": torch.arange(3), 7: (1, [])}
    if begin:
        others = restore(folder, part, optimizer, step=begin)
        assert set(others) == {"scheduler", "scaler", "loader", "random of rank 0", "random of rank 1"}
        scheduler.load_state_dict(others["scheduler"])
        scaler.load_state_dict(others["scaler"])
        torch.set_rng_state(others[f"random of rank {rank}"])
        loader = others["loader"]
    drawn = [float(torch.rand(())) for _ in range(begin, end)]
    for step in range(begin, end):
        train(part, [optimizer], range(step, step + 1))
        scheduler.step()
        loader["epoch"] += 1
        scaler.update(2.0**step)
    others = {"scheduler": scheduler.state_dict(), "scaler": scaler.state_dict(), "loader": loader}
    save(folder, end, part, optimizer, others={**others, f"random of rank {rank}": torch.get_rng_state()})
    return [state_of(part), repr(others), drawn[-1], float(torch.rand(()))]


def test_schedulers_scalers_random_states_and_loaders_go_on(ranks, tmp_path):
    straight = ranks(2).run(trained_with_a_scheduler, tmp_path / "straight", 0, 6)
    ranks(2).run(trained_with_a_scheduler, tmp_path / "parted", 0, 3)
    parted = ranks(2).run(trained_with_a_scheduler, tmp_path / "parted", 3, 6)
    for one, other in zip(straight, parted, strict=True):
        check_same([other[0]], one[0])
        assert other[1:] == one[1:]
    assert straight[0][3] != straight[1][3]


# -- what is in the folder -------------------------------------------------------------------------------------------
def loaded_by_torch(path: Path, state: dict[str, Any]) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp.load(state, checkpoint_id=path, no_dist=True)
    return state


def test_torch_reads_the_model_and_its_own_flat_optimizer_state(ranks, tmp_path):
    kind = "AdamW, groups"
    ranks(4).run(trained_and_saved, tmp_path, kind, 3)
    plain = Plain(2)
    [optimizer] = OPTIMIZERS[kind](plain)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    state = {"model": plain.state_dict(), "optimizer": get_optimizer_state_dict(plain, optimizer, options=options)}
    loaded_by_torch(tmp_path / "step-3", state)
    plain.load_state_dict(state["model"])
    set_optimizer_state_dict(plain, optimizer, state["optimizer"], options=options)
    train(plain, [optimizer], range(3, 5))
    check_same([state_of(plain)], uninterrupted(kind, 5))


def test_the_folder_holds_complete_steps_and_nothing_else(ranks, tmp_path):
    folder = tmp_path / "new" / "folder"
    assert latest(folder) is None
    for steps in (9, 10):
        ranks(2).run(trained_and_saved, folder, "SGD", steps)
    assert sorted(path.name for path in folder.iterdir()) == ["step-10", "step-9"]
    assert sorted(path.name for path in (folder / "step-9").iterdir()) == [
        ".metadata",
        "__0_0.distcp",
        "__1_0.distcp",
        "checksums.json",
    ]
    for name in ("step-11.0123abcd.tmp", "step-12.tmp", "step-x", "step-13", "other-14"):
        (folder / name).mkdir()
        (folder / name / ("nothing" if name == "step-13" else ".metadata")).touch()
    (folder / "step-15").touch()
    assert latest(folder) == 10
    assert latest(str(folder)) == 10


def test_everything_is_on_the_disk_before_the_checkpoint_appears(tmp_path, monkeypatch):
    order = []
    fsync, rename = os.fsync, Path.rename

    def synced(handle: int) -> None:
        order.append(os.path.basename(os.readlink(f"/proc/self/fd/{handle}")))
        fsync(handle)

    def renamed(path: Path, target: Path) -> Path:
        order.append(f"{path.name} to {target.name}")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "rename", renamed)
    save(tmp_path, 1, Plain(1))
    [temporary] = [name for name in order if name.startswith("step-1.") and name.endswith(".tmp")]
    table = [".metadata.tmp", ".metadata.tmp to .metadata"]
    assert order == ["__0_0.distcp", *table, "checksums.json", temporary, f"{temporary} to step-1", tmp_path.name]


# -- asynchronous ----------------------------------------------------------------------------------------------------
def changed_while_saved(folder: Path, kind: str) -> tuple[int | None, dict[str, Any]]:
    """Start a save, go on training before anything is written, and wait."""
    part = my_part(seed=1)
    optimizers = OPTIMIZERS[kind](part)
    train(part, optimizers, range(3))
    others = {"loader": [3]}
    trained = threading.Event()
    write = FileSystemWriter.write_data

    def written(*args: Any) -> Any:
        assert trained.wait(60)
        return write(*args)

    FileSystemWriter.write_data = written
    try:
        saving = save(folder, 3, part, optimizers, others=others, wait=False)
        saved = state_of(part)
        train(part, optimizers, range(3, 5))
        others["loader"].append(4)
        before = latest(folder)
        trained.set()
        saving.wait()
        saving.wait()
    finally:
        FileSystemWriter.write_data = write
    assert saving.path == folder / "step-3"
    return before, saved


@pytest.mark.parametrize("size", [1, 2])
def test_training_goes_on_while_it_is_saved(ranks, tmp_path, size):
    kind = "AdamW, groups"
    found = run(ranks, size, changed_while_saved, tmp_path, kind)
    assert [before for before, _ in found] == [None] * size
    assert latest(tmp_path) == 3
    plain = Plain(2)
    assert restore(tmp_path, plain) == {"loader": [3]}
    check_same([saved for _, saved in found], state_of(plain))
    check_same([restored_and_trained(tmp_path, kind, 5)[0]], uninterrupted(kind, 5))


@pytest.mark.cuda
@pytest.mark.parametrize("wait", [True, False])
def test_a_checkpoint_of_a_gpu_is_restored_without_one(tmp_path, wait):
    plain = Plain(1).cuda()
    optimizer = torch.optim.AdamW(plain.parameters(), capturable=True)
    for parameter in plain.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    save(tmp_path, 1, plain, optimizer, others={"seen": torch.ones(2, device="cuda")}, wait=wait).wait()
    restored = Plain(2)
    into = torch.optim.AdamW(restored.parameters(), capturable=True)
    assert restore(tmp_path, restored, into)["seen"].device.type == "cpu"
    check_same([state_of(restored)], state_of(plain.cpu()))
    for one, other in zip(restored.parameters(), plain.parameters(), strict=True):
        assert {key: value.tolist() for key, value in into.state[one].items()} == {
            key: value.tolist() for key, value in optimizer.state[other].items()
        }


def memory_of_a_save(folder: Path, wait: bool) -> float:
    """Return the most memory that a rank has while it saves, as a multiple of its part."""
    part, rank, numel = nn.Module(), dist.get_rank(), 8 << 20
    torch.optim.SGD([torch.zeros(1)])
    save(folder, 1, part)
    before = resident("VmRSS")  # when everything is imported
    for name in ("weight", "tied"):
        part.register_parameter(f"{name}_{rank}", next(part.parameters(), nn.Parameter(torch.ones(numel))))
    optimizer = torch.optim.SGD(part.parameters(), lr=0.1, momentum=0.9)
    optimizer.state[next(part.parameters())]["momentum_buffer"] = torch.ones(numel)
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak until now
    save(folder, 2, part, optimizer, wait=wait).wait()
    return (resident("VmHWM") - before) / (2 * 4 * numel)


def resident(name: str) -> int:
    lines = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[name].split()[0]) << 10


@pytest.mark.parametrize(("wait", "multiple"), [(True, 1.1), (False, 2.1)])
def test_a_rank_has_its_part_twice_at_most(ranks, tmp_path, wait, multiple):
    assert max(ranks(2).run(memory_of_a_save, tmp_path, wait)) < multiple
