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

import io
import os
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
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from autosplit.distributed import optimizer_state
from autosplit.distributed.optimizer_state import Optimizers, digest, listed, optimizer_list
from autosplit.errors import AutosplitError, CheckpointError, InputError

T = TypeVar("T")


class Saving:
    """A checkpoint that is being written; ``path`` is its folder when it is complete."""

    def __init__(self, path: Path, written: Future[None] | None, close: Callable[[], None]) -> None:
        self.path, self._written, self._close = path, written, close

    def wait(self) -> None:
        """Wait until it is complete; raise CheckpointError on every rank where one could not write.

        Call it before the next save into the same group, and before ``destroy_process_group``.
        """
        try:
            if self._written is not None:
                self._written.result()
        finally:
            self._close()


def save(
    folder: str | Path,
    step: int,
    part: nn.Module,
    optimizer: Optimizers = None,
    *,
    others: Mapping[str, Any] | None = None,
    wait: bool = True,
    group: Any = None,
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
        group: a gloo group of all ranks that nothing else uses until the checkpoint is complete; a new one by default.

    Raises InputError where the step exists, where two ranks save one key with different values, and where the
    optimizer has state that cannot go to another rank; CheckpointError where files cannot be written. What one rank
    raises is raised on every rank.
    """
    ranks, others = _Ranks.of(group), others or {}
    path = Path(folder) / f"step-{step}"
    with ExitStack() as closing:
        closing.callback(ranks.close)
        ranks.check_same("step", step)
        made = ranks.gather(ranks.run(lambda: _make_folder(path, step) if ranks.rank == 0 else ""))
        # Without copies ahead, for which a thread would use the CUDA streams of device 0.
        planner, writer = _Planner(), FileSystemWriter(path.with_name(made[0]), per_thread_copy_ahead=0)
        plans = ranks.gather(ranks.run(lambda: _plan(planner, writer, part, optimizer_list(optimizer), others)))
        _check_owners(ranks, plans, planner.state_dict | {f"others.{key}": value for key, value in others.items()})
        plans, metadata = planner.create_global_plan(plans)
        plan = planner.finish_plan(writer.prepare_global_plan(plans)[ranks.rank])

        def write() -> None:
            try:
                results = ranks.gather(ranks.run(lambda: writer.write_data(plan, planner).value()))
                ranks.run(lambda: _complete(writer, metadata, results, path) if ranks.rank == 0 else None)
            except CheckpointError:
                shutil.rmtree(writer.path, ignore_errors=True)
                raise

        written = None
        if wait:
            write()
        else:
            ranks.run(lambda: planner.stage(plan))
            pool = ThreadPoolExecutor(1, thread_name_prefix="autosplit checkpoint")
            written = pool.submit(write)
            pool.shutdown(wait=False)
            closing.pop_all()
    return Saving(path, written, ranks.close)


def latest(folder: str | Path) -> int | None:
    """Return the newest complete step of a folder, None where it has none."""
    return max(_steps(Path(folder)), default=None)


def restore(
    folder: str | Path,
    part: nn.Module,
    optimizer: Optimizers = None,
    *,
    step: int | None = None,
    group: Any = None,
) -> dict[str, Any]:
    """Load a checkpoint into this rank's part and optimizer, in place; return ``others``, those of all ranks.

    The number of ranks and their parts may differ from those that saved; each rank reads only what it has. Values take
    the dtypes of the part; tensors of ``others`` are in host memory.

    Args:
        folder: where the checkpoints are.
        part: this rank's part, or the plain model; not on the meta device.
        optimizer: one or several over the part's parameters, grouped as the saved ones were.
        step: which checkpoint; by default the newest complete one that rank 0 sees.
        group: a gloo group of all ranks; a new one by default.

    Raises InputError, before anything is loaded, where there is no such step, where keys are missing or have another
    shape, and where an optimizer is not as the saved one; CheckpointError where files cannot be read. What one rank
    raises is raised on every rank.
    """
    ranks = _Ranks.of(group)
    with ExitStack() as closing:
        closing.callback(ranks.close)
        ranks.check_same("step", step)
        found = ranks.gather(ranks.run(lambda: _existing(Path(folder), step)))
        path, optimizers = Path(folder) / f"step-{found[0]}", optimizer_list(optimizer)
        load, others = ranks.run(lambda: _prepared(path, part, optimizers))
        ranks.run(load)
    return others


# -- ranks -----------------------------------------------------------------------------------------------------------
@dataclass
class _Ranks:
    """The processes that save or restore together; a process alone is rank 0 of 1."""

    rank: int = 0
    size: int = 1
    group: Any = None
    owned: bool = False

    @classmethod
    def of(cls, group: Any) -> _Ranks:
        if not dist.is_available() or not dist.is_initialized() or dist.get_world_size(group) == 1:
            return cls()
        used = dist.new_group(backend="gloo") if group is None else group
        return cls(dist.get_rank(used), dist.get_world_size(used), used, owned=group is None)

    def gather(self, value: T) -> list[T]:
        """Return every rank's value, by rank."""
        values: list[Any] = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value, group=self.group)
        return values

    def run(self, make: Callable[[], T]) -> T:
        """Return what a function returns here; raise on every rank what it raises on one."""
        error: AutosplitError | None = None
        try:
            value = make()
        except AutosplitError as raised:
            error = raised
        except Exception as raised:
            error = CheckpointError(f"rank {self.rank}: {type(raised).__name__}: {raised}")
            error.__cause__ = raised
        for rank, other in enumerate(self.gather(error)):
            if other is not None:
                if error is None or rank != self.rank:
                    error = other
                    error.add_note(f"raised on rank {rank}")
                raise error
        return value

    def check_same(self, what: str, value: Any) -> None:
        first, *rest = self.gather(value)
        for rank, other in enumerate(rest, 1):
            if other != first:
                raise InputError(f"{what} is {first} on rank 0 and {other} on rank {rank}; it has to be the same")

    def close(self) -> None:
        if self.owned:
            self.owned = False
            dist.destroy_process_group(self.group)


# -- folders ---------------------------------------------------------------------------------------------------------
def _steps(folder: Path) -> list[int]:
    names = [path.parent.name for path in folder.glob("step-*/.metadata")]
    return sorted(int(name.removeprefix("step-")) for name in names if re.fullmatch(r"step-\d+", name))


def _existing(folder: Path, step: int | None) -> int:
    steps = _steps(folder)
    if not steps or step not in (None, *steps):
        asked = "a step" if step is None else f"step {step}"
        raise InputError(f"{folder} has no complete checkpoint of {asked}; it has {listed(steps[::-1]) or 'none'}")
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
class _Planner(DefaultSavePlanner):
    """DCP's planner, which can hold copies of what this rank writes."""

    staged: dict[Any, Any] | None = None

    def stage(self, plan: SavePlan) -> None:
        """Copy everything to host memory; a tensor of several names once."""
        staged: dict[Any, Any] = {}
        copies: dict[Any, torch.Tensor] = {}
        for item in plan.items:
            value = self.resolve_data(item)
            if isinstance(value, torch.Tensor):
                place = (value.data_ptr(), value.shape, value.stride(), value.dtype)
                if place not in copies:
                    copies[place] = value.detach().to("cpu", copy=True)
                value = copies[place]
            staged[item.index] = value
        self.staged, self.state_dict = staged, {}

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        return super().resolve_data(write_item) if self.staged is None else self.staged[write_item.index]


def _plan(
    planner: _Planner,
    writer: FileSystemWriter,
    part: nn.Module,
    optimizers: Sequence[Optimizer],
    others: Mapping[str, Any],
) -> SavePlan:
    """Say what this rank has to save."""
    if not Path(writer.path).is_dir():
        raise InputError(f"rank 0 made {writer.path}, which is not on every rank; save to a disk that all ranks share")
    pickled: dict[str, bytes] = {}
    for key, value in others.items():
        torch.save(value, buffer := io.BytesIO())
        pickled[key] = buffer.getvalue()
    state = {"model": part.state_dict(), "optimizer": optimizer_state.flattened(part, optimizers), "others": pickled}
    planner.set_up_planner(state, writer.storage_meta(), is_coordinator=False)
    writer.set_up_storage_writer(False)
    return writer.prepare_local_plan(planner.create_local_plan())


def _check_owners(ranks: _Ranks, plans: Sequence[SavePlan], values: Mapping[str, Any]) -> None:
    """Raise where two ranks have different values under one key; DCP would keep one of them."""
    counts = Counter(key for plan in plans for key in {item.index.fqn for item in plan.items})
    whole = {item.index.fqn for plan in plans for item in plan.items if item.type != WriteItemType.SHARD}
    repeated = sorted(key for key in whole if counts[key] > 1)
    digests = ranks.gather(ranks.run(lambda: {key: digest(values[key]) for key in repeated if key in values}))
    different = [key for key in repeated if len({row[key] for row in digests if key in row}) > 1]
    if different:
        owners = [rank for rank, row in enumerate(digests) if different[0] in row]
        raise InputError(
            f"ranks {owners} save different values under one key: {listed(different)}; a parameter or buffer has one "
            "owner, and what differs from rank to rank needs a key per rank, such as 'random of rank 2'"
        )


# -- restoring -------------------------------------------------------------------------------------------------------
def _prepared(
    path: Path, part: nn.Module, optimizers: Sequence[Optimizer]
) -> tuple[Callable[[], None], dict[str, Any]]:
    """Read all but the model's values; return what loads, and the others. InputError where something does not fit."""
    reader = FileSystemReader(path)
    metadata = reader.read_metadata()
    saved = metadata.state_dict_metadata
    model, rows = part.state_dict(), optimizer_state.optimized_parameters(part, optimizers)
    if meta := [key for key, value in model.items() if isinstance(value, torch.Tensor) and value.is_meta]:
        raise InputError(f"on the meta device there is no memory to restore into: {listed(meta)}; materialise it")

    def planned(state: dict[str, Any]) -> DefaultLoadPlanner:
        planner = DefaultLoadPlanner()
        planner.set_up_planner(state, metadata)
        return planner

    def read(planner: DefaultLoadPlanner) -> None:
        reader.set_up_storage_reader(metadata, True)
        plan = reader.prepare_local_plan(planner.create_local_plan())
        [plan] = reader.prepare_global_plan(planner.create_global_plan([plan]))
        reader.read_data(planner.finish_plan(plan), planner).wait()

    model_planner = planned({"model": model})
    rest = _placeholders(saved, {row.name: row.parameter for row in rows})
    wrong = [text for key, value in model_planner.state_dict.items() if (text := _misfit(key, value, saved.get(key)))]
    wrong += [f"no optimizer had {row.name}" for row in rows if not row.is_in(rest["optimizer"])]
    if wrong:
        raise InputError(
            f"{path} does not fit: {listed(wrong)}; restore into the model and optimizer that were saved, or without "
            "optimizer"
        )
    read(planned(rest))
    states = optimizer_state.state_dicts(rows, rest["optimizer"])

    def load() -> None:
        read(model_planner)
        part.load_state_dict(model)
        for optimizer, state in states.items():
            optimizer.load_state_dict(state)

    return load, {
        key: torch.load(io.BytesIO(value), map_location="cpu", weights_only=False)
        for key, value in rest["others"].items()
    }


def _placeholders(saved: Mapping[str, Any], parameters: Mapping[str, torch.Tensor]) -> dict[str, dict[str, Any]]:
    """Return what the others and the state of some parameters are read into."""
    rest: dict[str, dict[str, Any]] = {"optimizer": {}, "others": {}}
    for key, kind in saved.items():
        top, _, name = key.partition(".")
        parameter = parameters.get(optimizer_state.owner(name)[1])
        if top not in rest or (top == "optimizer" and parameter is None):
            continue
        if not isinstance(kind, TensorStorageMetadata):
            rest[top][name] = None
        elif isinstance(parameter, DTensor) and kind.size == parameter.shape:
            rest[top][name] = torch.empty_like(parameter, dtype=kind.properties.dtype)  # sharded as the parameter
        else:
            rest[top][name] = torch.empty(kind.size, dtype=kind.properties.dtype)
    return rest


def _misfit(key: str, value: Any, kind: Any) -> str | None:
    """Say how a value does not fit what was saved."""
    here = f"shape {list(value.shape)}" if isinstance(value, torch.Tensor) else "no tensor"
    saved = "nothing" if kind is None else "no tensor"
    if isinstance(kind, TensorStorageMetadata):
        saved = f"shape {list(kind.size)}"
    return None if here == saved else f"{key} ({saved} saved, {here} here)"
