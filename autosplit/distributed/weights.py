"""Where weights are read from: names and shapes first, then only the tensors that are asked for."""

from __future__ import annotations

import json
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor, distribute_tensor

from autosplit.distributed.checksums import CheckedReader
from autosplit.errors import InputError
from autosplit.tensor.state import TensorPart


@dataclass(frozen=True)
class Weights:
    """Tensors that can be read.

    ``shapes``: by key. ``read``: copies the tensors of some keys into given ones of the same shapes.
    """

    shapes: Mapping[str, torch.Size]
    read: Callable[[Mapping[str, Tensor]], None]


@dataclass(frozen=True)
class TrustedCheckpoint:
    """A folder that ``torch.distributed.checkpoint`` wrote, as ``weights=``: it holds pickles, which may run any code.

    A folder of safetensors files, which cannot, is named by its path alone.
    """

    path: str | PathLike[str]


def open_weights(weights: Mapping[str, Any] | str | PathLike[str] | TrustedCheckpoint) -> Weights:
    """Open a mapping of tensors or a path, and read the names and shapes of what is there.

    A mapping may be nested, as a training script's checkpoint is: its keys are joined by dots. A path is that of a
    ``.safetensors`` file, of a folder of such files (with ``model.safetensors.index.json``, else ``model.safetensors``,
    else all), or of a file of ``torch.save``, which is mapped into memory and may hold tensors and plain values only.
    None of these runs code; a folder of ``torch.distributed.checkpoint`` can, and is a :class:`TrustedCheckpoint`.
    Raises InputError for what cannot be read.
    """
    if isinstance(weights, Mapping):
        return _mapping(weights)
    path = Path(weights.path if isinstance(weights, TrustedCheckpoint) else weights)
    try:
        if isinstance(weights, TrustedCheckpoint):
            return _checkpoint(path)
        if path.is_dir():
            return _safetensors(_files(path))
        if path.suffix == ".safetensors":
            return _safetensors([path])
        return _mapping(torch.load(path, map_location="cpu", weights_only=True, mmap=True))
    except Exception as error:
        raise InputError(
            f"weights={str(path)!r} cannot be read: {error}; give a mapping of tensors, a .safetensors file or a "
            "folder of them, a file of torch.save, or TrustedCheckpoint(folder) of torch.distributed.checkpoint"
        ) from error


def common_prefix(keys: Collection[str], names: Collection[str]) -> str:
    """Return the prefix of a model's names in a file, such as ``model.``; "" if there is none.

    It is the prefix under which most of ``names`` are found, and "" if no other finds more. Raises InputError if
    several prefixes find equally many.
    """
    counts: Counter[str] = Counter()
    for key in keys:
        parts = key.split(".")
        endings = (".".join(parts[start:]) for start in range(len(parts)))
        counts.update(key.removesuffix(ending) for ending in endings if ending in names)
    best = [prefix for prefix, number in counts.items() if number == max(counts.values())]
    if len(best) > 1 and "" not in best:
        raise InputError(
            f"weights hold {counts[best[0]]} of the model's names under each of {', '.join(map(repr, sorted(best)))}: "
            "give a mapping of the tensors that are meant"
        )
    return "" if not best or "" in best else best[0]


def read_checkpoint(folder: Path, state: dict[str, Any]) -> None:
    """Read a state dict in place, in this process alone, from a folder of torch.distributed.checkpoint."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # each rank reads by itself
            state_dict_loader.load(state, storage_reader=CheckedReader(folder), no_dist=True)
    except CheckpointException as error:  # which is no Exception
        raise error.failures[0][0] from None


def _mapping(weights: Mapping[str, Any]) -> Weights:
    tensors = dict(_flat(weights))

    def read(targets: Mapping[str, Tensor]) -> None:
        for key, target in targets.items():
            _fill(target, tensors[key])

    return Weights({key: tensor.shape for key, tensor in tensors.items()}, read)


def _fill(target: Tensor, value: Tensor) -> None:
    if isinstance(target, DTensor):
        value = distribute_tensor(value, target.device_mesh, target.placements, src_data_rank=None)
    elif isinstance(target, TensorPart):
        value = target.part.of(value)
    target.copy_(value)


def _flat(weights: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    for key, value in weights.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        elif isinstance(value, Tensor) and not value.is_meta:
            yield f"{prefix}{key}", value


def _files(folder: Path) -> list[Path]:
    """Return the safetensors files of a folder that belong together."""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.exists():
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        return [folder / name for name in dict.fromkeys(names)]
    files = [single] if single.exists() else sorted(folder.glob("*.safetensors"))
    if not files and (folder / ".metadata").exists():
        raise InputError(
            "it is of torch.distributed.checkpoint, whose files are pickles and may run any code; give "
            "autosplit.distributed.checkpoint.TrustedCheckpoint(folder) where you trust who wrote it"
        )
    if not files:
        raise InputError("the folder has no .safetensors files")
    return files


def _safetensors(files: Sequence[Path]) -> Weights:
    from safetensors import safe_open

    shapes: dict[str, torch.Size] = {}
    places: dict[str, Path] = {}
    for path in files:
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 (it is no mapping)
                if key in places:
                    raise InputError(f"{key!r} is in {places[key].name} and in {path.name}")
                shapes[key], places[key] = torch.Size(file.get_slice(key).get_shape()), path

    def read(targets: Mapping[str, Tensor]) -> None:
        for key, target in targets.items():
            with safe_open(places[key], framework="pt") as file:  # anew: its pages are resident until it is closed
                _fill(target, file.get_tensor(key))

    return Weights(shapes, read)


def _checkpoint(folder: Path) -> Weights:
    items = CheckedReader(folder).read_metadata().state_dict_metadata
    shapes = {key: item.size for key, item in items.items() if isinstance(item, TensorStorageMetadata)}
    return Weights(shapes, lambda targets: read_checkpoint(folder, dict(targets)))
