"""Whole models as safetensors files, as Hugging Face's libraries read and write them, from and into the ranks' parts.

    model/
        model.safetensors                     one file, or shards of at most a size with an index:
        model-00001-of-00003.safetensors      tensors of one rank each, under the names of the plain model
        model.safetensors.index.json          {"metadata": {"total_size": ...}, "weight_map": {"fc.weight": file}}

A tied tensor is written once, under its first name. No rank holds more than its own part and one file.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autosplit.distributed.facts import check_copies, copies_of
from autosplit.distributed.together import Ranks, check_fits, check_shared, complete, new_folder, sync
from autosplit.distributed.weights import Weights, common_prefix, open_weights
from autosplit.errors import InputError, listed
from autosplit.files import write_text
from autosplit.tensor.part import PARTS, size_of
from autosplit.tensor.state import TensorPart, as_part

_FORMAT = {"format": "pt"}
"""The metadata that transformers asks for."""


class _Shard(NamedTuple):
    writer: int
    names: list[str]


class _TensorEntry(NamedTuple):
    """A tensor of a rank: all its names, and its shape."""

    names: list[str]
    shape: tuple[int, ...]

    def found_in(self, keys: Collection[str]) -> str:
        """Return the tensor's name that is among ``keys``, or else its first name."""
        return next((name for name in self.names if name in keys), self.names[0])


def save_weights(path: str | PathLike[str], part: nn.Module, *, max_shard_size: int | str = "5GB") -> None:
    """Save a model's values as safetensors files; every rank calls it with its own part of the model.

    What is written appears as a whole or not at all, and nothing is overwritten. ``from_pretrained`` of transformers
    reads the folder once the model's configuration is there too (``model.config.save_pretrained(path)``).

    Args:
        path: ``x.safetensors`` for one file, else a folder; on a disk that all ranks share.
        part: this rank's part, or the plain model: its ``state_dict()`` has names of the plain model.
        max_shard_size: how large a file of a folder may be, such as ``"5GB"`` or a number of bytes.

    Raises InputError where the path exists, where the state has entries that are no tensors, and where ranks have
    different values of one tensor; CheckpointError where files cannot be written. What one rank raises is raised on
    every rank.
    """
    path = Path(path)
    tensors: dict[str, Tensor] = {}

    def prepare() -> dict[str, int]:
        check_shared(folder)
        tensors.update(_tensors_to_save(part))
        return {name: tensor.size().numel() * tensor.itemsize for name, tensor in tensors.items()}

    with Ranks("saves the whole model", path) as ranks:
        ranks.check_same("path", str(path))
        ranks.check_same("max_shard_size", max_shard_size)
        name, *_ = ranks.run(lambda: new_folder(path) if ranks.rank == 0 else "")
        folder = path.with_name(name)
        try:
            sizes = ranks.run(prepare)
            check_copies(ranks.run(lambda: copies_of((names[0], tensor) for tensor, names in _by_tensor(part))))
            files = ranks.run(lambda: _files(sizes, max_shard_size))[0]
            ranks.run(lambda: _write(folder, files, tensors, ranks.rank))
            ranks.run(lambda: _complete(folder, path, files, sizes) if ranks.rank == 0 else None)
        except Exception:
            shutil.rmtree(folder, ignore_errors=True)
            raise


def load_weights(weights: Mapping[str, Any] | str | PathLike[str], part: nn.Module, *, strict: bool = True) -> None:
    """Copy a model's values from files into this rank's part, in its dtypes; every rank calls it with its own part.

    Args:
        weights: a folder of safetensors files as Hugging Face's libraries write it, or another source that
            :func:`~autosplit.distributed.weights.open_weights` reads. A prefix before all names, such as ``model.``,
            is left out; a tied tensor may be there under any of its names.
        part: this rank's part, or the plain model; not on the meta device.
        strict: False accepts tensors in ``weights`` that the model has not.

    Raises InputError, before anything is loaded, with the first name that is missing or has another shape. What one
    rank raises is raised on every rank.
    """
    loading = _Loading(weights, part)
    with Ranks("loads a whole model") as ranks:
        every = ranks.run(loading.entries)
        ranks.run(lambda: loading.prepare(every, strict))
        ranks.run(loading.load)


# -- saving ----------------------------------------------------------------------------------------------------------
def _by_tensor(model: nn.Module) -> list[tuple[Tensor, list[str]]]:
    """Return the tensors of a part's state, each with all its names."""
    by_id: dict[int, tuple[Tensor, list[str]]] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if isinstance(value, Tensor):
            by_id.setdefault(id(value), (value, []))[1].append(name)
    if meta := [names[0] for value, names in by_id.values() if value.is_meta]:
        raise InputError(f"on the meta device there are no values: {listed(meta)}; materialise them")
    return list(by_id.values())


def _tensors_to_save(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a part's state by their first names."""
    if others := [name for name, value in model.state_dict().items() if not isinstance(value, Tensor)]:
        raise InputError(f"safetensors hold tensors only, and {listed(others)} are none; use checkpoint.save")
    return {names[0]: as_part(tensor.detach(), PARTS.get(tensor)) for tensor, names in _by_tensor(model)}


def _files(sizes: Sequence[Mapping[str, int]], max_shard_size: int | str) -> dict[str, _Shard]:
    """Return what each file holds and its rank: of those that have an entry, the one that has least to write."""
    from huggingface_hub import split_state_dict_into_shards_factory

    out: list[dict[str, int]] = [{} for _ in sizes]
    for name in dict.fromkeys(name for row in sizes for name in row):
        writer = min((rank for rank, row in enumerate(sizes) if name in row), key=lambda rank: sum(out[rank].values()))
        out[writer][name] = sizes[writer][name]
    files = [
        _Shard(rank, names)
        for rank, row in enumerate(out)
        for names in split_state_dict_into_shards_factory(
            row, get_storage_size=int, filename_pattern="{suffix}", max_shard_size=max_shard_size
        ).filename_to_tensors.values()
        if names
    ]
    numbers = [f"-{number:05d}-of-{len(files):05d}" for number in range(1, len(files) + 1)] if len(files) > 1 else [""]
    return {f"model{number}.safetensors": file for number, file in zip(numbers, files or [_Shard(0, [])], strict=True)}


def _write(folder: Path, files: Mapping[str, _Shard], tensors: Mapping[str, Tensor], rank: int) -> None:
    """Write this rank's files; shards are gathered from ranks that all take part, also where one cannot write."""
    from safetensors.torch import save_file

    failed: Exception | None = None
    for name, (writer, names) in files.items():
        values = {key: _whole(tensors[key], here=writer == rank) for key in names if key in tensors}
        if writer == rank and failed is None:
            try:
                save_file(values, folder / name, _FORMAT)
                sync(folder / name)
            except Exception as error:
                failed = error
    if failed is not None:
        raise failed


def _whole(tensor: Tensor, *, here: bool) -> Tensor:
    """Return all of a tensor on the CPU, in memory that is no other's."""
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    elif isinstance(tensor, TensorPart):
        tensor = tensor.part.whole(tensor)
    if not here:
        return torch.empty(0)
    value = tensor.cpu().contiguous()
    return value.clone() if value.untyped_storage().nbytes() != value.nbytes else value


def _complete(folder: Path, path: Path, files: Mapping[str, _Shard], sizes: Sequence[Mapping[str, int]]) -> None:
    if path.suffix == ".safetensors":
        whole = folder / "model.safetensors"
        if len(files) > 1:
            _merge([folder / name for name in files], whole)
        complete(whole, path)
        shutil.rmtree(folder)
        return
    if len(files) > 1:
        weight_map = {name: file for file, (_, names) in files.items() for name in names}
        total = sum({name: size for row in sizes for name, size in row.items()}.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        write_text(folder / "model.safetensors.index.json", json.dumps(index, indent=2))
    complete(folder, path)


def _merge(files: Sequence[Path], target: Path) -> None:
    """Write one file of several, which are mapped into memory."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    with ExitStack() as opened:
        readers = [opened.enter_context(safe_open(file, framework="pt")) for file in files]
        save_file({key: file.get_tensor(key) for file in readers for key in file.keys()}, target, _FORMAT)  # noqa: SIM118


# -- loading ---------------------------------------------------------------------------------------------------------
class _Loading:
    """Weights that are being loaded into a part."""

    def __init__(self, weights: Any, model: nn.Module) -> None:
        self._weights, self._part = weights, model
        self._source = Weights({}, lambda targets: None)
        self._entries: list[_TensorEntry] = []
        self._keys: dict[str, str] = {}
        """The names of what this rank loads, by their keys in the source."""

    def entries(self) -> list[_TensorEntry]:
        """Open the weights; return the tensors of this rank."""
        self._source = open_weights(self._weights)
        self._entries = [_TensorEntry(names, tuple(size_of(tensor))) for tensor, names in _by_tensor(self._part)]
        return self._entries

    def prepare(self, every: Sequence[Sequence[_TensorEntry]], strict: bool) -> None:
        """Find the key of each tensor; raise InputError where the weights are not the model's."""
        names = {name for row in every for entry in row for name in entry.names}
        prefix = common_prefix(self._source.shapes, names)
        shapes = {key.removeprefix(prefix): s for key, s in self._source.shapes.items() if key.startswith(prefix)}
        matched = [{entry.found_in(shapes): entry.shape for entry in row} for row in every]
        read = {name for row in matched for name in row}
        rest = {name: tuple(s) for name, s in shapes.items() if name in read or (strict and name not in names)}
        check_fits("weights" if isinstance(self._weights, Mapping) else str(self._weights), matched, rest)
        state = self._part.state_dict()
        for entry in self._entries:
            keys = {prefix + name: state[name].dtype for name in entry.names if name in shapes}
            if len(keys) > 1:
                values = {key: torch.empty(self._source.shapes[key], dtype=dtype) for key, dtype in keys.items()}
                self._source.read(values)
                first, *others = values.values()
                if not all(first.equal(other) for other in others):
                    raise InputError(f"{listed(keys)} are different tensors in the weights, and one tied tensor here")
        self._keys = {prefix + name: name for name in state if name in read}

    def load(self) -> None:
        """Load what was prepared."""
        state = self._part.state_dict()
        with torch.no_grad():
            self._source.read({key: state[name] for key, name in self._keys.items()})
        self._part.load_state_dict(state)
