"""Checkpoints of a training over several ranks, in the format of torch.distributed.checkpoint (DCP).

    folder/
        step-100/                complete: renamed when the files of every rank were on the disk
            .metadata            DCP's table of what is in which file
            checksums.json       of the table, and of each value's bytes: what was damaged is not restored
            __0_0.distcp         the values of rank 0; __1_0.distcp those of rank 1, ...
        step-200.*.tmp/          being written, or left by a save that was interrupted; never read

    {"model": {"fc.weight": ...},                        part.state_dict(): names of the plain model
     "optimizer": {"state.fc.weight.exp_avg": ...},      by parameter, see optimizer_state.py
     "others": {"scheduler": ...},                       the bytes that torch.save writes
     "groups": {"empty": ...}}                           options of groups that are empty on all ranks

Every value has one name and one owner, so that a checkpoint depends neither on the number of ranks nor on the cut, and
``torch.distributed.checkpoint.load`` reads it too. Where several ranks have a key, as replicas have, their values have
to be equal, and DCP deals out who writes; shards are DTensors, or parts of tensor parallel ranks, which are saved as
chunks of the whole. It holds pickles: restore only what you trust.

The planners, the writer and the reader are DCP's. Its ``save`` is not used: it keeps one of two values that differ
under one key, raises a BaseException, and hangs where an error cannot be pickled.
"""

from __future__ import annotations

import io
import re
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from autosplit.distributed.checksums import CheckedReader, Checksums, checksums_of, digest_of, write_checksums
from autosplit.distributed.optimizer_state import (
    GroupKey,
    Groups,
    OptimizedParameter,
    Optimizers,
    check_part,
    empty_everywhere,
    fill_empty_groups,
    flattened,
    groups_of,
    optimized_parameters,
    options_of_groups,
    parameter_of,
    state_dicts,
)
from autosplit.distributed.together import Ranks, Shape, check_fits, check_shared, complete, new_folder
from autosplit.distributed.weights import TrustedCheckpoint, read_checkpoint
from autosplit.distributed.whole import load_weights, save_weights
from autosplit.errors import CheckpointError, InputError, listed
from autosplit.tensor.part import PARTS
from autosplit.tensor.state import TensorPart, as_part, without_part

__all__ = ["Saving", "TrustedCheckpoint", "latest", "load_weights", "restore", "save", "save_weights"]


@dataclass(frozen=True)
class Saving:
    """A checkpoint that is being written; ``path`` is its folder when it is complete."""

    path: Path
    _written: Future[None] | None
    _closing: ExitStack

    def wait(self) -> None:
        """Wait until it is complete; raise CheckpointError on every rank where one could not write.

        Call it before the next save, and before ``destroy_process_group``.
        """
        with self._closing:
            if self._written is not None:
                self._written.result()


def save(
    folder: str | Path,
    step: int,
    part: nn.Module,
    optimizer: Optimizers = None,
    *,
    others: Mapping[str, Any] | None = None,
    wait: bool = True,
) -> Saving:
    """Save a training as ``folder/step-N``; every rank calls it with its own part of the model.

    A checkpoint appears as a whole or not at all, and none is overwritten.

    Args:
        folder: where the checkpoints are; on a disk that all ranks share.
        step: the number of this one.
        part: this rank's part: its ``state_dict()`` has names of the plain model, on every rank other ones.
        optimizer: one or several over the part's parameters.
        others: what else belongs to the training: the state of a scheduler, of a gradient scaler, of the data loader,
            of random generators. Keys that several ranks have need equal values, which are saved once; what differs
            from rank to rank, such as random states, needs a key per rank.
        wait: False returns when all values are copied to host memory; training goes on while they are written.

    Raises InputError where the step exists, where two ranks save one key with different values, and where the
    optimizer has state that cannot go to another rank; CheckpointError where files cannot be written. What one rank
    raises is raised on every rank.
    """
    others, path = others or {}, Path(folder) / f"step-{step}"
    with ExitStack() as closing:
        ranks = closing.enter_context(Ranks("saves a checkpoint", path))
        ranks.check_same("step", step)
        temporary, *_ = ranks.run(lambda: _new_folder(path, step) if ranks.rank == 0 else "")
        closing.enter_context(_removed_on_error(path.with_name(temporary)))
        # Without copies ahead, for which a thread would use the CUDA streams of device 0.
        planner, writer = DefaultSavePlanner(), FileSystemWriter(path.with_name(temporary), per_thread_copy_ahead=0)
        empty = empty_everywhere(ranks.run(lambda: groups_of(part, optimizer)))
        groups = {} if ranks.rank else {"empty": _pickled({tuple(key): empty[key] for key in empty})}
        plans = ranks.run(lambda: _plan(planner, writer, _state(part, optimizer, others, groups, copied=not wait)))
        _check_owners(ranks, plans, planner, {f"others.{key}": value for key, value in others.items()})
        plans, metadata = planner.create_global_plan(plans)
        plan = planner.finish_plan(writer.prepare_global_plan(plans)[ranks.rank])

        def write() -> None:
            results = ranks.run(lambda: writer.write_data(plan, planner).value())
            checksums = ranks.run(lambda: checksums_of(Path(writer.path), results[ranks.rank]))
            ranks.run(lambda: _complete(writer, metadata, results, checksums, path) if ranks.rank == 0 else None)

        if wait:
            write()
            return Saving(path, None, ExitStack())
        pool = ThreadPoolExecutor(1, thread_name_prefix="autosplit checkpoint")
        written = pool.submit(write)
        pool.shutdown(wait=False)
        return Saving(path, written, closing.pop_all())


def latest(folder: str | Path) -> int | None:
    """Return the newest complete step of a folder, None where it has none."""
    return max(_steps(Path(folder)), default=None)


def restore(
    folder: str | Path,
    part: nn.Module,
    optimizer: Optimizers = None,
    *,
    step: int | None = None,
) -> dict[str, Any]:
    """Load a checkpoint into this rank's part and optimizer, in place; return ``others``, those of all ranks.

    The number of ranks and their parts may differ from those that saved; each rank reads only what it has. Values take
    the dtypes of the part; tensors of ``others`` are in host memory.

    Args:
        folder: where the checkpoints are.
        part: this rank's part, or the plain model; not on the meta device.
        optimizer: one or several over the part's parameters, grouped as the saved ones were.
        step: which checkpoint; by default the newest complete one that rank 0 sees.

    Raises InputError, before anything is loaded, where there is no such step, where all ranks' parts together are not
    the model that was saved (the first name that differs, and its shapes), and where the optimizers are not those that
    were saved; CheckpointError where files cannot be read. What one rank raises is raised on every rank.
    """
    with Ranks("restores a checkpoint", folder) as ranks:
        ranks.check_same("step", step)
        number, *_ = ranks.run(lambda: _existing(Path(folder), step))
        restoring = _Restoring(Path(folder) / f"step-{number}", part, optimizer)
        every = ranks.run(restoring.state)
        groups = ranks.run(lambda: restoring.prepare(every))
        ranks.run(lambda: restoring.load(groups))
    return restoring.others


# -- folders ---------------------------------------------------------------------------------------------------------
def _steps(folder: Path) -> list[int]:
    names = [path.parent.name for path in folder.glob("step-*/.metadata")]
    return sorted(int(name.removeprefix("step-")) for name in names if re.fullmatch(r"step-\d+", name))


def _existing(folder: Path, step: int | None) -> int:
    steps = _steps(folder)
    if not steps or step not in (None, *steps):
        asked = "a step" if step is None else f"step {step}"
        raise InputError(f"{folder} has no complete checkpoint of {asked}; it has {listed(steps[::-1])}")
    return steps[-1] if step is None else step


def _new_folder(path: Path, step: Any) -> str:
    if not isinstance(step, int) or isinstance(step, bool) or step < 0:
        raise InputError(f"step is {step!r}; it has to be an integer of at least 0")
    return new_folder(path)


@contextmanager
def _removed_on_error(folder: Path) -> Iterator[None]:
    """Remove a folder after an error that all ranks have; after the end of one, another may yet complete it."""
    try:
        yield
    except (CheckpointError, InputError):
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _complete(
    writer: FileSystemWriter, metadata: Any, results: list[Any], checksums: Sequence[Checksums], path: Path
) -> None:
    folder = Path(writer.path)
    writer.finish(metadata, results)
    write_checksums(folder, checksums)
    complete(folder, path)


# -- saving ----------------------------------------------------------------------------------------------------------
def _pickled(value: Any) -> bytes:
    torch.save(value, buffer := io.BytesIO())
    return buffer.getvalue()


def _state(
    model: nn.Module, optimizer: Optimizers, others: Mapping[str, Any], groups: Mapping[str, bytes], *, copied: bool
) -> Any:
    """Return all that this rank saves, where asked for copied to host memory, a tied tensor once."""
    state: Any = {
        "model": model.state_dict(),
        "optimizer": flattened(optimized_parameters(model, optimizer)),
        "others": {key: _pickled(value) for key, value in others.items()},
        "groups": groups,
    }
    return _copied(state) if copied else state


def _copied(state: Any) -> Any:
    """Copy a state to host memory."""
    parts = [
        (top, key, value.part)
        for top in ("model", "optimizer")
        for key, value in state[top].items()
        if isinstance(value, TensorPart)
    ]
    stager = DefaultStager(StagingOptions(False, False, False, False))
    for top, key, _ in parts:
        state[top][key] = state[top][key].as_subclass(torch.Tensor)
    state = stager.stage(state)
    stager.close()
    for top, key, shard in parts:
        state[top][key] = as_part(state[top][key], shard)
    return state


def _plan(planner: DefaultSavePlanner, writer: FileSystemWriter, state: dict[str, Any]) -> SavePlan:
    """Say what this rank writes."""
    check_shared(Path(writer.path))
    planner.set_up_planner(state, writer.storage_meta(), is_coordinator=False)
    if spread := [key for key in state["optimizer"] if f"optimizer.{key}" not in planner.state_dict]:
        raise InputError(
            "an optimizer's state cannot go to another rank where it is nested or of no single parameter: "
            f"{listed(spread)}; save optimizer.state_dict() in `others` instead, under a key per rank"
        )
    writer.set_up_storage_writer(False)
    return writer.prepare_local_plan(planner.create_local_plan())


def _check_owners(
    ranks: Ranks, plans: Sequence[SavePlan], planner: DefaultSavePlanner, others: Mapping[str, Any]
) -> None:
    """Raise where two ranks have different values under one key, or of one chunk; DCP would keep one of them."""
    counts = Counter(item.index for plan in plans for item in plan.items)
    shared = [item.index for item in plans[ranks.rank].items if counts[item.index] > 1]

    def digest(index: MetadataIndex) -> bytes:
        return digest_of(others[index.fqn] if index.fqn in others else planner.lookup_object(index))

    digests = ranks.run(lambda: {index: digest(index) for index in shared})
    repeated = dict.fromkeys(index for row in digests for index in row)
    different = [key for key in repeated if len({row[key] for row in digests if key in row}) > 1]
    different.sort(key=lambda index: index.fqn)
    if different:
        owners = [rank for rank, row in enumerate(digests) if different[0] in row]
        names = dict.fromkeys(index.fqn for index in different)
        raise InputError(
            f"ranks {owners} save different values under one key: {listed(names)}; a parameter or buffer has one "
            "owner, and what differs from rank to rank needs a key per rank, such as 'random of rank 2'"
        )


# -- restoring -------------------------------------------------------------------------------------------------------
class _RankState(NamedTuple):
    """What one rank has."""

    shapes: dict[str, Shape]
    optimized: list[str] | None
    """The first names of its optimizers' parameters; None where it gave no optimizer."""


class _Restoring:
    """A checkpoint that is being loaded: all but the model's values first."""

    def __init__(self, path: Path, model: nn.Module, optimizer: Optimizers) -> None:
        self._path, self._part, self._optimizer = path, model, optimizer
        self._model: dict[str, Any] = {}
        self._rows: list[OptimizedParameter] = []
        self._loads: dict[Optimizer, dict[str, Any]] = {}
        self._empty: Groups = {}
        self.others: dict[str, Any] = {}

    def state(self) -> _RankState:
        """Return what this rank has."""
        self._model = self._part.state_dict()
        self._rows = optimized_parameters(self._part, self._optimizer)
        meta = [key for key, value in self._model.items() if isinstance(value, torch.Tensor) and value.is_meta]
        if meta:
            raise InputError(f"on the meta device there is no memory to restore into: {listed(meta)}; materialise it")
        planner = DefaultLoadPlanner()
        planner.set_up_planner(self._model)
        shapes = {k: tuple(v.size()) if isinstance(v, torch.Tensor) else None for k, v in planner.state_dict.items()}
        return _RankState(shapes, None if self._optimizer is None else [row.name for row in self._rows])

    def prepare(self, every: Sequence[_RankState]) -> Groups:
        """Read the others and the optimizers' state; return the options of the groups that have parameters here.

        Raises InputError where what all ranks have together is not what was saved.
        """
        saved = CheckedReader(self._path).read_metadata().state_dict_metadata
        kinds = {key.removeprefix("model."): kind for key, kind in saved.items() if key.startswith("model.")}
        shapes = {k: tuple(kind.size) if isinstance(kind, TensorStorageMetadata) else None for k, kind in kinds.items()}
        check_fits(str(self._path), [row.shapes for row in every], shapes)
        self._check_optimized(every, [key.removeprefix("optimizer.") for key in saved])
        rest = _placeholders(saved, {row.name: row.parameter for row in self._rows})
        read_checkpoint(self._path, rest)
        self._loads = state_dicts(self._rows, {key: without_part(value) for key, value in rest["optimizer"].items()})
        self.others = {key: _unpickled(value) for key, value in rest["others"].items()}
        self._empty = {GroupKey(*key): g for row in rest["groups"].values() for key, g in _unpickled(row).items()}
        return options_of_groups(self._loads)

    def _check_optimized(self, every: Sequence[_RankState], saved: Sequence[str]) -> None:
        had = dict.fromkeys(parameter_of(key)[1] for key in saved if key.startswith("param_groups."))
        first: dict[Any, str] = {}
        for name, value in self._part.state_dict(keep_vars=True).items():
            if isinstance(value, nn.Parameter) and first.setdefault(value, name) != name and name in had:
                raise InputError(
                    f"{self._path} is of another model: {name!r} was a parameter of its own, and is tied to "
                    f"{first[value]!r} here"
                )
        if all(row.optimized is None for row in every):
            return
        optimized = dict.fromkeys(name for row in every for name in row.optimized or ())
        new, left = [name for name in optimized if name not in had], [name for name in had if name not in optimized]
        if new or left:
            text = f"no optimizer had {listed(new)}" if new else f"no optimizer here has {listed(left)}"
            raise InputError(
                f"{self._path} does not fit: {text}; restore with the optimizers that were saved, or without any"
            )

    def load(self, groups: Sequence[Groups]) -> None:
        """Load what was prepared, and the model's values; a group without parameters here is as on another rank."""
        fill_empty_groups(self._loads, [self._empty, *groups])
        read_checkpoint(self._path, {"model": self._model})
        self._part.load_state_dict(self._model)
        for optimizer, state in self._loads.items():
            optimizer.load_state_dict(state)


def _placeholders(saved: Mapping[str, Any], parameters: Mapping[str, torch.Tensor]) -> dict[str, dict[str, Any]]:
    """Return what the others and the state of some parameters are read into."""
    rest: dict[str, dict[str, Any]] = {"optimizer": {}, "others": {}, "groups": {}}
    for key, kind in saved.items():
        top, _, name = key.partition(".")
        parameter = parameters.get(parameter_of(name)[1])
        if top in ("others", "groups") or (top == "optimizer" and parameter is not None):
            if not isinstance(kind, TensorStorageMetadata):
                rest[top][name] = None
            elif parameter is not None and parameter in PARTS and kind.size.numel() > 1:
                check_part(name, kind.size, PARTS[parameter].size)
                shard = torch.empty_like(parameter, dtype=kind.properties.dtype, requires_grad=False)
                rest[top][name] = as_part(shard, PARTS[parameter])
            elif isinstance(parameter, DTensor) and kind.size == parameter.shape:
                rest[top][name] = torch.empty_like(parameter, dtype=kind.properties.dtype)  # sharded as the parameter
            else:
                rest[top][name] = torch.empty(kind.size, dtype=kind.properties.dtype)
    return rest


def _unpickled(value: bytes) -> Any:
    return torch.load(io.BytesIO(value), map_location="cpu", weights_only=False)
