"""Where weights are read from: names and shapes first, then only the tensors that are asked for."""

from __future__ import annotations

import json
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import api, filesystem, metadata, state_dict_loader

from autosplit.errors import InputError

_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Weights:
    """Tensors that can be read.

    ``shapes``: by key. ``read``: copies the tensors of some keys into given ones of the same shapes.
    """

    shapes: Mapping[str, torch.Size]
    read: Callable[[Mapping[str, Tensor]], None]


def open_weights(weights: Mapping[str, Any] | str | PathLike[str]) -> Weights:
    """Open a mapping of tensors or a path, and read the names and shapes of what is there.

    A mapping may be nested, as a training script's checkpoint is: its keys are joined by dots. A path is that of a
    ``.safetensors`` file, of a folder of such files (with ``model.safetensors.index.json``, else ``model.safetensors``,
    else all), of a folder that ``torch.distributed.checkpoint`` wrote, or of a file of ``torch.save``, which is mapped
    into memory and may hold tensors and plain values only. Raises InputError for what cannot be read.
    """
    if isinstance(weights, Mapping):
        return _mapping(weights)
    path = Path(weights)
    try:
        if path.is_dir():
            return _checkpoint(path) if (path / ".metadata").exists() else _safetensors(_files(path))
        if path.suffix == ".safetensors":
            return _safetensors([path])
        return _mapping(torch.load(path, map_location="cpu", weights_only=True, mmap=True))
    except (Exception, api.CheckpointException) as error:
        raise InputError(
            f"weights={str(path)!r} cannot be read: {error}; give a mapping of tensors, a .safetensors file or a "
            "folder of them, a folder of torch.distributed.checkpoint, or a file of torch.save"
        ) from error


def common_prefix(keys: Collection[str], names: Collection[str]) -> str:
    """Return what stands before a model's names in a file: nothing, or for instance ``model.``.

    The prefix under which most of ``names`` are found; nothing where that does as well as others. Raises InputError
    where several others do equally well.
    """
    found: Counter[str] = Counter()
    for key in keys:
        parts = key.split(".")
        found.update(key[: len(key) - len(name)] for name in _endings(parts) if name in names)
    most = max(found.values(), default=0)
    best = sorted(prefix for prefix, number in found.items() if number == most)
    if len(best) > 1 and "" not in best:
        raise InputError(
            f"weights hold {most} of the model's names under each of {', '.join(map(repr, best))}: "
            "give a mapping of the tensors that are meant"
        )
    return "" if not best or "" in best else best[0]


def _endings(parts: Sequence[str]) -> Iterator[str]:
    return (".".join(parts[start:]) for start in range(len(parts)))


def _mapping(weights: Mapping[str, Any]) -> Weights:
    tensors = dict(_flat(weights))
    return Weights({key: tensor.shape for key, tensor in tensors.items()}, partial(_copy, tensors))


def _flat(weights: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    for key, value in weights.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        elif isinstance(value, Tensor) and not value.is_meta:
            yield f"{prefix}{key}", value


def _copy(tensors: Mapping[str, Tensor], targets: Mapping[str, Tensor]) -> None:
    for key, target in targets.items():
        target.copy_(tensors[key])


def _files(folder: Path) -> list[Path]:
    """Return the safetensors files of a folder that belong together."""
    if (folder / _INDEX).exists():
        names = json.loads((folder / _INDEX).read_text(encoding="utf-8"))["weight_map"].values()
        return [folder / name for name in dict.fromkeys(names)]
    single = folder / "model.safetensors"
    files = [single] if single.exists() else sorted(folder.glob("*.safetensors"))
    if not files:
        raise InputError("the folder has neither .safetensors files nor the .metadata of torch.distributed.checkpoint")
    return files


def _safetensors(files: Sequence[Path]) -> Weights:
    shapes: dict[str, torch.Size] = {}
    places: dict[str, Path] = {}
    for path in files:
        with _open_safetensors(path) as file:
            for key in file.keys():  # noqa: SIM118 (it is no mapping)
                if key in places:
                    raise InputError(f"{key!r} is in {places[key].name} and in {path.name}")
                shapes[key], places[key] = torch.Size(file.get_slice(key).get_shape()), path
    return Weights(shapes, partial(_read_safetensors, places))


def _open_safetensors(path: Path) -> Any:
    try:
        from safetensors import safe_open
    except ImportError as error:
        raise InputError("this needs the package safetensors (pip install safetensors)") from error
    return safe_open(path, framework="pt")


def _read_safetensors(places: Mapping[str, Path], targets: Mapping[str, Tensor]) -> None:
    for key, target in targets.items():
        with _open_safetensors(places[key]) as file:  # opened anew, as its pages count as resident until it is closed
            target.copy_(file.get_tensor(key))


def _checkpoint(folder: Path) -> Weights:
    items = filesystem.FileSystemReader(folder).read_metadata().state_dict_metadata
    shapes = {key: item.size for key, item in items.items() if isinstance(item, metadata.TensorStorageMetadata)}
    return Weights(shapes, partial(_read_checkpoint, folder))


def _read_checkpoint(folder: Path, targets: Mapping[str, Tensor]) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # each rank reads by itself
        state_dict_loader.load(dict(targets), storage_reader=filesystem.FileSystemReader(folder), no_dist=True)
