"""A part's values come from files; what cannot be read or initialised is said, and nothing changes."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from autosplit.distributed.checkpoint import TrustedCheckpoint
from autosplit.distributed.materialise import materialise
from autosplit.errors import InputError
from tests.distributed.meta_models import (
    CPU,
    MODELS,
    TiedByApply,
    on_meta,
    same,
    tensors,
    weights_of,
)


def safetensors_of(values: dict[str, Tensor], folder: Path) -> Path:
    save_file({name: value.clone() for name, value in values.items()}, folder / "x.safetensors")
    return folder / "x.safetensors"


def sharded_safetensors_of(values: dict[str, Tensor], folder: Path) -> Path:
    names = list(values)
    files = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in files.items():
        save_file({name: values[name].clone() for name in part}, folder / file)
    save_file({names[0]: torch.zeros(1)}, folder / "not_listed.safetensors")
    weight_map = {name: file for file, part in files.items() for name in part}
    text = json.dumps({"metadata": {}, "weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(text)
    return folder


def folder_of_safetensors_of(values: dict[str, Tensor], folder: Path) -> Path:
    safetensors_of(values, folder).rename(folder / "model.safetensors")
    save_file({next(iter(values)): torch.zeros(1)}, folder / "adapter.safetensors")
    return folder


def loose_safetensors_of(values: dict[str, Tensor], folder: Path) -> Path:
    (folder / sharded_safetensors_of(values, folder) / "not_listed.safetensors").unlink()
    (folder / "model.safetensors.index.json").unlink()
    return folder


def checkpoint_of(values: dict[str, Any], folder: Path) -> TrustedCheckpoint:
    with pytest.warns(UserWarning, match="torch.distributed is"):
        dcp.save(values, checkpoint_id=folder, no_dist=True)
    return TrustedCheckpoint(folder)


def file_of(values: Any, folder: Path) -> Path:
    torch.save(values, folder / "x.pt")
    return folder / "x.pt"


SOURCES: dict[str, Callable[[dict[str, Tensor], Path], Any]] = {
    "state dict": lambda values, folder: values,
    "mapped state dict": lambda values, folder: torch.load(file_of(values, folder), mmap=True),
    "safetensors": safetensors_of,
    "sharded safetensors": sharded_safetensors_of,
    "folder of safetensors": folder_of_safetensors_of,
    "loose safetensors": loose_safetensors_of,
    "checkpoint": checkpoint_of,
    "checkpoint of a model and an optimizer": lambda values, folder: checkpoint_of(
        {"model": values, "optimizer": {"step": torch.ones(1), "state": {"0": torch.ones(2)}}}, folder
    ),
    "file": file_of,
    "file of a training script": lambda values, folder: file_of({"epoch": 3, "model": {"module": values}}, folder),
    "path as a string": lambda values, folder: str(file_of(values, folder)),
}


@pytest.mark.parametrize("source", list(SOURCES))
@pytest.mark.parametrize("model", ["llama", "gpt2", "norms", "weight norm"])
def test_values_are_those_of_the_weights(model, source, tmp_path):
    values = weights_of(MODELS[model]())
    built, weights = tensors(MODELS[model]()), SOURCES[source](values, tmp_path)
    names = random.Random(0).sample(sorted(built), len(built) // 2 + 1)
    part = on_meta(MODELS[model])
    materialise(part, names, device=CPU, weights=weights)
    chosen = {id(tensor) for name, tensor in tensors(part).items() if name in names}
    for name, tensor in tensors(part).items():
        if id(tensor) in chosen:
            assert same(tensor, values.get(name, built[name])), name  # a buffer in no state dict is the constructor's
            assert name not in values or tensor.data_ptr() != values[name].data_ptr()
        else:
            assert tensor.is_meta


def test_only_the_named_tensors_are_read(tmp_path, monkeypatch):
    read: list[str] = []

    class File:
        def __init__(self, path: Path, framework: str) -> None:
            self.file = opened(path, framework)

        def __enter__(self) -> File:
            return self

        def __exit__(self, *error: object) -> None:
            pass

        def __getattr__(self, name: str) -> Any:
            return getattr(self.file, name)

        def get_tensor(self, name: str) -> Tensor:
            read.append(name)
            return self.file.get_tensor(name)

    opened, loaded = safetensors.safe_open, dcp.FileSystemReader.read_data
    values = {
        "0.weight": torch.rand(2, 2),
        "0.bias": torch.rand(2),
        "1.weight": torch.rand(2, 2),
        "1.bias": torch.rand(2),
    }
    monkeypatch.setattr(safetensors, "safe_open", File)
    monkeypatch.setattr(
        dcp.FileSystemReader,
        "read_data",
        lambda self, plan, planner: (
            read.extend(item.dest_index.fqn for item in plan.items) or loaded(self, plan, planner)
        ),
    )
    for source in (safetensors_of, checkpoint_of):
        model = on_meta(lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
        materialise(model, ["1.weight", "0.bias"], device=CPU, weights=source(values, tmp_path))
        assert sorted(read) == ["0.bias", "1.weight"]
        read.clear()


def test_a_tie_needs_one_of_its_names_in_the_weights():
    values = torch.rand(60, 16)
    for name in ("embed.weight", "head.weight"):
        model = on_meta(TiedByApply)
        materialise(model, ["embed.weight"], device=CPU, weights={name: values})
        assert model.embed.weight is model.head.weight
        assert same(model.head.weight, values)


def unchanged(model: nn.Module, before: dict[str, Tensor]) -> bool:
    after = tensors(model)
    return list(after) == list(before) and all(after[name] is before[name] for name in before)


class NoInitialiser(nn.Module):
    def __init__(self, persistent: bool = True) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(4))
        self.register_buffer("angles", torch.arange(4.0), persistent=persistent)
        self.register_buffer("mask", torch.ones(4, 4).tril().bool(), persistent=persistent)


class Half(nn.Linear):
    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.weight[:2] = 1.0
            self.bias.zero_()


class OtherShape(nn.BatchNorm1d):
    def reset_parameters(self) -> None:
        super().reset_parameters()
        self.register_buffer("running_mean", torch.zeros(len(self.running_mean) + 1))


class Failing(nn.Linear):
    def reset_parameters(self) -> None:
        nn.init.zeros_(self.bias)
        if not self.bias.is_meta:
            self.weight.copy_(torch.ones(3, 5))


class Copying(nn.Module):
    """Cannot be initialised in parts: one tensor's values are another's."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.b.weight.copy_(self.a.weight)


def zero_head() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    nn.init.zeros_(model[1].weight)
    return model


FAULTS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], list[str]]] = {
    "unknown name": (lambda: nn.Linear(2, 2), {"names": ["weight", "wieght"]}, ["wieght", "weight, bias"]),
    "no initialiser": (
        NoInitialiser,
        {},
        [
            "no initialiser",
            "scale (of NoInitialiser), angles (of NoInitialiser), mask (of",
            "init_weights",
            "weights=",
        ],
    ),
    "half an initialiser": (lambda: nn.Sequential(Half(3, 4)), {}, ["no initialiser", "0.weight (of Half) of"]),
    "another shape": (
        lambda: nn.Sequential(OtherShape(4)),
        {},
        ["no initialiser", "0.running_mean (of OtherShape) of"],
    ),
    "no initialiser of a buffer in no checkpoint": (
        lambda: NoInitialiser(persistent=False),
        {"weights": {"fc.weight": torch.ones(4, 4), "fc.bias": torch.ones(4), "scale": torch.ones(4)}},
        ["no initialiser", "angles (of", "mask (of"],
    ),
    "spectral norm": (
        lambda: nn.Sequential(spectral_norm(nn.Linear(3, 3))),
        {},
        ["no initialiser", "0.parametrizations.weight.0._u (of _SpectralNorm)"],
    ),
    "constructor writes": (
        zero_head,
        {},
        ["has written to 1.weight (of Linear) more often", "init_weights", "weights="],
    ),
    "failing": (
        lambda: nn.Sequential(Failing(3, 4)),
        {},
        ["Failing.reset_parameters() of '0' failed with RuntimeError"],
    ),
    "copied from another part": (
        Copying,
        {"names": ["b.weight"]},
        ["Copying.reset_parameters() of 'the model' failed"],
    ),
    "missing": (
        lambda: nn.Linear(2, 2),
        {"weights": {"weight": torch.ones(2, 2), "other": torch.ones(1)}},
        ["no values of bias", "weight, other"],
    ),
    "values on meta": (
        lambda: nn.Linear(2, 2),
        {"weights": on_meta(lambda: nn.Linear(2, 2)).state_dict()},
        ["no values of"],
    ),
    "shape": (
        lambda: nn.Linear(2, 2),
        {"weights": {"weight": torch.ones(2, 3), "bias": torch.ones(2)}},
        ["weight has shape (2, 2) in the model, (2, 3) in weights", "configuration"],
    ),
    "two models": (
        lambda: nn.Linear(2, 2),
        {"weights": {f"{at}.{key}": torch.ones(2) for at in ("ema", "model") for key in ("weight", "bias")}},
        ["2 of the model's names under each of 'ema.', 'model.'"],
    ),
    "no file": (
        lambda: nn.Linear(2, 2),
        {"weights": "nowhere.pt"},
        ["'nowhere.pt' cannot be read: [Errno 2]", "torch.save"],
    ),
    "no weights file": (lambda: nn.Linear(2, 2), {"weights": __file__}, ["test_weights.py' cannot be read"]),
    "empty folder": (lambda: nn.Linear(2, 2), {"weights": ""}, ["the folder has no .safetensors files"]),
}


@pytest.mark.parametrize("fault", list(FAULTS))
def test_faults_are_named_and_nothing_changes(fault, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    build, values, texts = FAULTS[fault]
    model = on_meta(build)
    before, versions = tensors(model), [tensor._version for tensor in tensors(model).values()]
    state = torch.get_rng_state()
    with pytest.raises(InputError) as error:
        materialise(model, **{"names": list(before), "device": CPU, **values})
    assert [text for text in texts if text not in str(error.value)] == []
    assert unchanged(model, before)
    assert [tensor._version for tensor in tensors(model).values()] == versions
    assert torch.equal(torch.get_rng_state(), state)
