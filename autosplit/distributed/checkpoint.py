"""Checkpoints of a training over several ranks, in the format of torch.distributed.checkpoint (DCP).

    folder/
        step-100/                complete: renamed when the files of every rank were on the disk
            .metadata            DCP's table of what is in which file
            __0_0.distcp         the values of rank 0; __1_0.distcp those of rank 1, ...
        step-200.5f0c91a2.tmp/   being written, or left by a save that was interrupted; never read

    {"model": {"fc.weight": ...},                        part.state_dict(): names of the plain model
     "optimizer": {"state.fc.weight.exp_avg": ...},      by parameter, see optimizer_state.py
     "others": {"scheduler": ...}}                       the bytes that torch.save writes

Every value has one name and one owner, so that a checkpoint depends neither on the number of ranks nor on the cut, and
``torch.distributed.checkpoint.load`` reads it too. It holds pickles: restore only checkpoints that you trust.

The planners, the writer and the reader are DCP's. Its ``save`` is not used: it keeps one of two values that differ
under one key, raises a BaseException, and hangs where an error cannot be pickled.
"""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import re
import secrets
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItemType
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from autosplit.distributed.optimizer_state import (
    Optimizers,
    flattened,
    optimized_parameters,
    parameter_of,
    state_dicts,
)
from autosplit.distributed.weights import read_checkpoint
from autosplit.errors import AutosplitError, CheckpointError, InputError, listed

T = TypeVar("T")


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
        ranks = closing.enter_context(_Ranks())
        ranks.check_same("step", step)
        temporary, *_ = ranks.run(lambda: _make_folder(path, step) if ranks.rank == 0 else "")
        # Without copies ahead, for which a thread would use the CUDA streams of device 0.
        planner, writer = DefaultSavePlanner(), FileSystemWriter(path.with_name(temporary), per_thread_copy_ahead=0)
        plans = ranks.run(lambda: _plan(planner, writer, _state(part, optimizer, others, copied=not wait)))
        _check_owners(ranks, plans, planner.state_dict | {f"others.{key}": value for key, value in others.items()})
        plans, metadata = planner.create_global_plan(plans)
        plan = planner.finish_plan(writer.prepare_global_plan(plans)[ranks.rank])

        def write() -> None:
            try:
                results = ranks.run(lambda: writer.write_data(plan, planner).value())
                ranks.run(lambda: _complete(writer, metadata, results, path) if ranks.rank == 0 else None)
            except CheckpointError:
                shutil.rmtree(writer.path, ignore_errors=True)
                raise

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

    Raises InputError, before anything is loaded, where there is no such step, where keys are missing or have another
    shape, and where an optimizer is not as the saved one; CheckpointError where files cannot be read. What one rank
    raises is raised on every rank.
    """
    with _Ranks() as ranks:
        ranks.check_same("step", step)
        found, *_ = ranks.run(lambda: _existing(Path(folder), step))
        restoring = _Restoring(Path(folder) / f"step-{found}", part)
        ranks.run(lambda: restoring.prepare(optimizer))
        ranks.run(restoring.load)
    return restoring.others


# -- ranks -----------------------------------------------------------------------------------------------------------
class _Ranks:
    """The processes that save or restore together, in a group of their own; a process alone is rank 0 of 1."""

    def __init__(self) -> None:
        several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        self._group = dist.new_group(backend="gloo") if several else None
        self.rank, self._size = (dist.get_rank(), dist.get_world_size()) if several else (0, 1)

    def __enter__(self) -> _Ranks:
        return self

    def __exit__(self, *error: object) -> None:
        if self._group is not None:
            dist.destroy_process_group(self._group)

    def run(self, make: Callable[[], T]) -> list[T]:
        """Return what a function returns on every rank, by rank; raise on every rank what it raises on one."""
        value: T | None = None
        error: AutosplitError | None = None
        try:
            value = make()
        except AutosplitError as raised:
            error = raised
        except Exception as raised:
            error = CheckpointError(f"rank {self.rank}: {type(raised).__name__}: {raised}")
            error.__cause__ = raised
        rows: list[Any] = [(value, error)] * self._size
        if self._group is not None:
            dist.all_gather_object(rows, (value, error), group=self._group)
        rows[self.rank] = value, error  # with its traceback
        for rank, (_, other) in enumerate(rows):
            if other is not None:
                if rank != self.rank:
                    other.add_note(f"raised on rank {rank}")
                raise other
        return [value for value, _ in rows]

    def check_same(self, what: str, value: Any) -> None:
        first, *rest = self.run(lambda: value)
        for rank, other in enumerate(rest, 1):
            if other != first:
                raise InputError(f"{what} is {first} on rank 0 and {other} on rank {rank}; it has to be the same")


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


def _make_folder(path: Path, step: Any) -> str:
    """Make the folder to write in and return its name, which is new: no other save can write there."""
    if not isinstance(step, int) or step < 0:
        raise InputError(f"step is {step!r}; it has to be an integer of at least 0")
    if path.exists():
        raise InputError(f"{path} exists and is not overwritten; save another step, or delete it first")
    for left in path.parent.glob(f"{path.name}.*.tmp"):
        shutil.rmtree(left, ignore_errors=True)
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    temporary.mkdir(parents=True)
    return temporary.name


def _complete(writer: FileSystemWriter, metadata: Any, results: list[Any], path: Path) -> None:
    writer.finish(metadata, results)
    _sync(Path(writer.path))
    Path(writer.path).rename(path)
    _sync(path.parent)


def _sync(folder: Path) -> None:
    """Bring the names in a folder to the disk, as DCP's writer does with the files."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# -- saving ----------------------------------------------------------------------------------------------------------
def _state(part: nn.Module, optimizer: Optimizers, others: Mapping[str, Any], *, copied: bool) -> Any:
    """Return all that this rank saves, where asked for copied to host memory, a tied tensor once."""
    pickled: dict[str, bytes] = {}
    for key, value in others.items():
        torch.save(value, buffer := io.BytesIO())
        pickled[key] = buffer.getvalue()
    state: Any = {
        "model": part.state_dict(),
        "optimizer": flattened(optimized_parameters(part, optimizer)),
        "others": pickled,
    }
    if copied:
        stager = DefaultStager(StagingOptions(False, False, False, False))
        state = stager.stage(state)
        stager.close()
    return state


def _plan(planner: DefaultSavePlanner, writer: FileSystemWriter, state: dict[str, Any]) -> SavePlan:
    """Say what this rank writes."""
    if not Path(writer.path).is_dir():
        raise InputError(f"rank 0 made {writer.path}, which is not on every rank; save to a disk that all ranks share")
    planner.set_up_planner(state, writer.storage_meta(), is_coordinator=False)
    if spread := [key for key in state["optimizer"] if f"optimizer.{key}" not in planner.state_dict]:
        raise InputError(
            "an optimizer's state cannot go to another rank where it is nested or of no single parameter: "
            f"{listed(spread)}; save optimizer.state_dict() in `others` instead, under a key per rank"
        )
    writer.set_up_storage_writer(False)
    return writer.prepare_local_plan(planner.create_local_plan())


def _check_owners(ranks: _Ranks, plans: Sequence[SavePlan], values: Mapping[str, Any]) -> None:
    """Raise where two ranks have different values under one key; DCP would keep one of them."""
    items = (item for plan in plans for item in plan.items)
    counts = Counter(item.index.fqn for item in items if item.type != WriteItemType.SHARD)
    repeated = sorted(key for key in counts if counts[key] > 1)
    digests = ranks.run(lambda: {key: _digest(values[key]) for key in repeated if key in values})
    different = [key for key in repeated if len({row[key] for row in digests if key in row}) > 1]
    if different:
        owners = [rank for rank, row in enumerate(digests) if different[0] in row]
        raise InputError(
            f"ranks {owners} save different values under one key: {listed(different)}; a parameter or buffer has one "
            "owner, and what differs from rank to rank needs a key per rank, such as 'random of rank 2'"
        )


def _digest(value: Any) -> bytes:
    """Return a digest of a value: equal for equal values, however they came to be."""
    if isinstance(value, torch.Tensor):
        flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        data = f"{value.dtype}{list(value.shape)}".encode() + flat.numpy().tobytes()
    elif isinstance(value, Mapping):
        data = b"".join(sorted(_digest(key) + _digest(entry) for key, entry in value.items()))
    elif isinstance(value, list | tuple):
        data = b"".join(map(_digest, value))
    else:
        data = pickle.dumps(value)
    return hashlib.sha256(type(value).__name__.encode() + data).digest()


# -- restoring -------------------------------------------------------------------------------------------------------
class _Restoring:
    """A checkpoint that is being loaded: all but the model's values first."""

    def __init__(self, path: Path, part: nn.Module) -> None:
        self._path, self._part = path, part
        self._model: dict[str, Any] = {}
        self._optimizers: dict[Optimizer, dict[str, Any]] = {}
        self.others: dict[str, Any] = {}

    def prepare(self, optimizer: Optimizers) -> None:
        """Read the others and the optimizers' state; raise InputError where something does not fit."""
        self._model = self._part.state_dict()
        meta = [key for key, value in self._model.items() if isinstance(value, torch.Tensor) and value.is_meta]
        if meta:
            raise InputError(f"on the meta device there is no memory to restore into: {listed(meta)}; materialise it")
        metadata = FileSystemReader(self._path).read_metadata()
        rows = optimized_parameters(self._part, optimizer)
        rest = _placeholders(metadata.state_dict_metadata, {row.name: row.parameter for row in rows})
        try:
            planner = DefaultLoadPlanner()
            planner.set_up_planner({"model": self._model}, metadata)
            planner.create_local_plan()
            if new := [row.name for row in rows if f"param_groups.{row.name}.class" not in rest["optimizer"]]:
                raise ValueError(f"no optimizer had {listed(new)}")
        except (RuntimeError, ValueError) as error:
            raise InputError(
                f"{self._path} does not fit: {error}; restore into the model and optimizer that were saved, or without "
                "optimizer"
            ) from error
        read_checkpoint(self._path, rest)
        self._optimizers = state_dicts(rows, rest["optimizer"])
        for key, value in rest["others"].items():
            self.others[key] = torch.load(io.BytesIO(value), map_location="cpu", weights_only=False)

    def load(self) -> None:
        """Load what was prepared, and the model's values."""
        read_checkpoint(self._path, {"model": self._model})
        self._part.load_state_dict(self._model)
        for optimizer, state in self._optimizers.items():
            optimizer.load_state_dict(state)


def _placeholders(saved: Mapping[str, Any], parameters: Mapping[str, torch.Tensor]) -> dict[str, dict[str, Any]]:
    """Return what the others and the state of some parameters are read into."""
    rest: dict[str, dict[str, Any]] = {"optimizer": {}, "others": {}}
    for key, kind in saved.items():
        top, _, name = key.partition(".")
        parameter = parameters.get(parameter_of(name)[1])
        if top == "others" or (top == "optimizer" and parameter is not None):
            if not isinstance(kind, TensorStorageMetadata):
                rest[top][name] = None
            elif isinstance(parameter, DTensor) and kind.size == parameter.shape:
                rest[top][name] = torch.empty_like(parameter, dtype=kind.properties.dtype)  # sharded as the parameter
            else:
                rest[top][name] = torch.empty(kind.size, dtype=kind.properties.dtype)
    return rest
