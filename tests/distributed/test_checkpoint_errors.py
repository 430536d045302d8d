"""What cannot be saved or restored is an error on every rank, and changes nothing."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter

from autosplit.distributed.checkpoint import latest, restore, save
from autosplit.distributed.together import new_folder
from autosplit.errors import CheckpointError, InputError
from tests.distributed.parts import Part, Plain, check_same, grouped, my_part, state_of, trained_and_saved
from tests.distributed.processes import error_of


def test_a_step_is_not_overwritten(tmp_path):
    plain = Plain(1)
    save(tmp_path, 3, plain)
    with pytest.raises(InputError, match=r"step-3 exists and is not overwritten; save under another name, or del"):
        save(tmp_path, 3, Plain(2))
    restored = Plain(3)
    restore(tmp_path, restored)
    check_same([state_of(restored)], state_of(plain))


def test_a_save_clears_what_an_ended_process_of_its_step_left_and_nothing_else(tmp_path):
    names = [new_folder(tmp_path / step) for step in ("step-3", "step-30")]
    ended = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    left = names[0].replace(f"-{os.getpid()}-", f"-{int(ended.stdout)}-")
    for name in (left, "step-3.0123abcd.tmp"):  # the other one's process is not known, or of another machine
        (tmp_path / name).mkdir()
    save(tmp_path, 3, Plain(1))
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["step-3", "step-3.0123abcd.tmp", *names])


@pytest.mark.parametrize("place", ["first value", "last byte", "table"])
def test_a_flipped_bit_is_not_restored(tmp_path, place):
    save(tmp_path, 3, Plain(1))
    path = tmp_path / "step-3" / (".metadata" if place == "table" else "__0_0.distcp")
    reader = FileSystemReader(tmp_path / "step-3")
    ends = [entry.offset + entry.length for entry in reader.read_metadata().storage_data.values()]
    data = bytearray(path.read_bytes())
    data[{"first value": min(ends) - 1, "last byte": max(ends) - 1, "table": 40}[place]] ^= 4
    path.write_bytes(data)
    part = Plain(2)
    with pytest.raises(CheckpointError, match=r"is damaged: \d+ bytes from byte \d+ on have not the checksum"):
        restore(tmp_path, part)
    (tmp_path / "step-3" / "checksums.json").unlink()
    if place != "table":
        restore(tmp_path, part)  # as one that was saved without them


def errors_of_different_calls(folder: Path) -> list[str]:
    rank, part = dist.get_rank(), my_part(seed=1)
    save(folder, 1, part)
    save(folder, 2, part)
    lost = Path(f"{folder} of rank {rank}")
    on_meta = my_part(seed=1)
    on_meta.whole.to("meta")
    return [
        error_of(save, folder, 3 + rank, part),
        error_of(restore, folder, part, step=1 + rank),
        error_of(save, lost, 1, part),
        error_of(save, folder, 5, part, others={"loader": lambda: 0} if rank else {"loader": 0}),
        error_of(save, folder, 5, part, torch.optim.SGD(Plain(1).parameters()) if rank else None),
        error_of(restore, folder, on_meta if rank else part, step=1),
    ]


def test_different_calls_are_an_error_on_every_rank(ranks, tmp_path):
    first, second = ranks(2).run(errors_of_different_calls, tmp_path)
    assert first == second
    assert first[0].startswith("InputError: step is 3 on rank 0 and 4 on rank 1")
    assert first[1].startswith("InputError: step is 1 on rank 0 and 2 on rank 1")
    assert "which is not on every rank; save to a disk that all ranks share" in first[2]
    assert first[3].startswith("CheckpointError: rank 1: ")
    assert "lambda" in first[3]
    assert (
        "8 of 8 parameters of the optimizer are not the part's, of shapes [10, 6], [6, 6], [6] and 5 more; make"
        in first[4]
    )
    assert "there is no memory to restore into: second.weight" in first[5]
    assert latest(tmp_path) == 2


class Constant(nn.Module):
    """A buffer with the number of the rank, or the same everywhere."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.register_buffer("value", torch.tensor([value]))


def in_some_order(rank: int) -> dict[str, Any]:
    """Return equal values, made another way on every rank."""
    entries = [("a", [1, {"b": (1.0, "x" * 2)}]), ("c", 0)]
    return dict(entries[:: 1 if rank % 2 else -1])


def errors_of_two_owners(folder: Path) -> list[str]:
    rank, part = dist.get_rank(), my_part(seed=1)
    return [
        error_of(save, folder, 1, Constant(rank)),
        error_of(save, folder, 1, Constant(rank // 2)),
        error_of(save, folder, 1, nn.Linear(1 + rank // 3, 1)),
        error_of(save, folder, 1, part, others={"random": torch.full((2,), rank)}),
        error_of(save, folder, 1, part, others={"deep": {"a": [1, {"b": (rank,)}]}}),
        error_of(save, folder, 1, Constant(math.nan), others={"same": in_some_order(rank)}),
        error_of(save, folder, 2, part if rank < 3 else nn.Module(), others={"same": rank} if rank == 3 else None),
    ]


def test_one_key_with_different_values_is_an_error_on_every_rank(ranks, tmp_path):
    found = ranks(4).run(errors_of_two_owners, tmp_path)
    assert all(one == found[0] for one in found)
    texts = found[0]
    assert texts[0].startswith(
        "InputError: ranks [0, 1, 2, 3] save different values under one key: model.value; a para"
    )
    assert "needs a key per rank, such as 'random of rank 2'" in texts[0]
    assert texts[1].startswith("InputError: ranks [0, 1, 2, 3] save different values under one key: model.value")
    assert "under one key: model.bias, model.weight" in texts[2]
    assert "under one key: others.random" in texts[3]
    assert "under one key: others.deep" in texts[4]
    assert texts[5:] == ["nothing was raised"] * 2
    constant = Constant(0.0)
    assert restore(tmp_path, constant, step=1) == {"same": {"a": [1, {"b": (1.0, "xx")}], "c": 0}}
    assert constant.value.isnan()
    assert sorted(path.name for path in tmp_path.iterdir() if latest(path) is None) == ["step-1", "step-2"]


def errors_of_other_models(folder: Path) -> list[str]:
    part = my_part(seed=1)
    adam = torch.optim.Adam(part.parameters(), lr=0.1)
    save(folder, 1, part, adam)
    save(folder, 2, part)
    wide = Plain(1, width=7)
    longer = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    before = state_of(part)
    last = dist.get_rank() == 1
    grouped_adam = torch.optim.Adam(grouped(part), lr=0.1)
    texts = [
        error_of(restore, folder, Part(wide, 1, 2) if last else part, step=1),
        error_of(restore, folder, longer if last else part, step=1),
        error_of(restore, folder, part, torch.optim.SGD(part.parameters(), momentum=0.9) if last else adam, step=1),
        error_of(restore, folder, part, adam, step=2),
    ]
    save(folder, 3, part, grouped_adam)
    texts.append(error_of(restore, folder, part, adam, step=3))
    check_same([state_of(part)], before)
    return texts


def test_another_model_or_optimizer_is_an_error_on_every_rank_and_nothing_is_loaded(ranks, tmp_path):
    first, second = ranks(2).run(errors_of_other_models, tmp_path)
    assert first == second
    assert "step-1 is of another model: 'second.weight' has shape (7, 7) here and (6, 6) there" in first[0]
    assert "step-1 is of another model: it has no '0.weight', of shape (1, 1) here; only it has second.we" in first[1]
    assert "was saved with the optimizer Adam and is in one of class SGD; restore with the former" in first[2]
    assert "step-2 does not fit: no optimizer had embed.weight" in first[3]
    assert "'embed.weight' and 'first.bias' are in one parameter group, and were saved with different opt" in first[4]


def in_six_layers(names: str = "layers", layers: int = 6, tied: bool = False) -> nn.Module:
    """Return layers under some name, of which two may be tied."""
    model = nn.Module()
    model.add_module(names, nn.ModuleList(nn.Linear(2, 2) for _ in range(layers)))
    if tied:
        model.get_submodule(names)[1].weight = model.get_submodule(names)[0].weight
    return model


def test_a_model_that_has_more_or_fewer_or_renamed_or_tied_parameters_is_another_one(tmp_path):
    saved = in_six_layers()
    save(tmp_path, 1, saved, torch.optim.SGD(saved.parameters()))
    fewer, renamed, tied = in_six_layers(layers=5), in_six_layers(names="blocks"), in_six_layers(tied=True)
    for other, text in (
        (fewer, r"it has 'layers.5.weight', of shape \(2, 2\), which is not in the model here \(nor layers.5.bias\)"),
        (renamed, r"no 'blocks.0.weight', of shape \(2, 2\) here; only it has layers.0.weight, layers.0.bias, lay"),
        (tied, "'layers.1.weight' was a parameter of its own, and is tied to 'layers.0.weight' here"),
    ):
        before = state_of(other)
        with pytest.raises(InputError, match=text):
            restore(tmp_path, other)
        check_same([state_of(other)], before)


def test_optimizer_state_that_nobody_takes_is_said(tmp_path):
    plain = in_six_layers()
    save(tmp_path, 1, plain, torch.optim.SGD(plain.parameters()))
    with pytest.raises(
        InputError, match=r"no optimizer here has layers.1.weight, layers.1.bias, layers.2.weight and 7 m"
    ):
        restore(tmp_path, plain, torch.optim.SGD(plain.get_submodule("layers.0").parameters()))


def test_groups_that_changed_places_are_refused(tmp_path):
    """A scheduler's state counts groups, and would give each the learning rates of the other."""
    plain = in_six_layers()
    groups = [{"params": list(layer.parameters()), "lr": 0.1**number} for number, layer in enumerate(plain.layers)]
    save(tmp_path, 1, plain, torch.optim.SGD(groups))
    restore(tmp_path, plain, torch.optim.SGD(groups))
    with pytest.raises(
        InputError,
        match=r"'layers.1.bias' was in group 1 and 'layers.0.weight' in group 0, and here they are in 0 and 1",
    ):
        restore(tmp_path, plain, torch.optim.SGD([groups[1], groups[0], *groups[2:]]))


def test_state_that_belongs_to_no_parameter_is_refused(tmp_path):
    plain = nn.Linear(2, 2)
    optimizer = torch.optim.LBFGS(plain.parameters())

    def closure() -> float:
        optimizer.zero_grad()
        loss = plain(torch.ones(1, 2)).square().sum()
        loss.backward()
        return loss.item()

    optimizer.step(closure)
    with pytest.raises(
        InputError, match=r"nested .*state\.weight\.old_dirs.* save optimizer.state_dict\(\) in `others`"
    ):
        save(tmp_path, 1, plain, optimizer)
    save(tmp_path, 1, plain, others={"optimizer": optimizer.state_dict()})
    assert len(restore(tmp_path, plain)["optimizer"]["state"][0]["old_dirs"]) > 0


def errors_of_the_disk(folder: Path) -> list[str]:
    """Fail while data is written, or while the checkpoint is completed, on one rank."""
    part = my_part(seed=1)
    save(folder, 1, part)
    texts = []
    for rank, name in ((1, "write_data"), (0, "finish")):
        for wait in (True, False):
            method = getattr(FileSystemWriter, name)

            def full(*args: Any, method: Any = method, rank: int = rank, **options: Any) -> Any:
                if dist.get_rank() == rank:
                    raise OSError(28, "No space left on device")
                return method(*args, **options)

            setattr(FileSystemWriter, name, full)
            try:
                texts.append(error_of(lambda wait=wait: save(folder, 2, part, wait=wait).wait()))
            finally:
                setattr(FileSystemWriter, name, method)
    return texts


def test_a_full_disk_is_an_error_on_every_rank_and_leaves_nothing(ranks, tmp_path):
    first, second = ranks(2).run(errors_of_the_disk, tmp_path)
    expected = [f"CheckpointError: rank {rank}: OSError: [Errno 28] No space left on device" for rank in (1, 1, 0, 0)]
    assert first == second == expected
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]


def errors_of_files(folder: Path) -> list[str]:
    part = my_part(seed=1)
    return [error_of(restore, folder, part, step=step) for step in (1, 2)]


def test_files_that_cannot_be_read_are_an_error_on_every_rank(ranks, tmp_path):
    for step in (1, 2):
        ranks(2).run(trained_and_saved, tmp_path, "SGD", step)
    (tmp_path / "step-1" / "__1_0.distcp").write_bytes(b"")
    (tmp_path / "step-2" / ".metadata").write_bytes(b"")
    first, second = ranks(2).run(errors_of_files, tmp_path)
    assert first == second
    assert re.match(r"CheckpointError: .*step-1/__1_0.distcp is damaged: \d+ bytes from byte \d+ on", first[0])
    assert re.match(r"CheckpointError: .*step-2/.metadata is damaged", first[1])
    for step in (1, 2):
        (tmp_path / f"step-{step}" / "checksums.json").unlink()
    first, second = ranks(2).run(errors_of_files, tmp_path)
    assert first == second
    assert first[0].startswith("CheckpointError: rank 1: ")
    assert first[1].startswith("CheckpointError: rank 0: EOFError")
