"""In what the ranks of a pipe have to agree, as facts that are the same in every process."""

from __future__ import annotations

import platform
import warnings
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autosplit.errors import InputError
from autosplit.options import Options
from autosplit.planning.plan.plan import Plan
from autosplit.runtime.lower.split import Lowered
from autosplit.tensor.part import PARTS
from autosplit.trace.borrowed.blank import has_meta
from autosplit.trace.graph import INFO
from autosplit.trace.inputs.objects import take_apart
from autosplit.trace.inputs.signature import GradAutocastState
from autosplit.version import __version__

BATCH = "the batch's values (give every rank of a pipeline the same batch, or feed='first_last')"
"""What a fact is called that several meetings of ranks compare."""
_MANY_BYTES, _ROW_BYTES = 1 << 16, 512


class StateUse(NamedTuple):
    """The ranks of a stage use, or change, a parameter or buffer."""

    name: str
    ranks: tuple[int, ...]
    changes: bool


def uses_of_state(lowered: Lowered, ranks: Sequence[Sequence[int]]) -> set[StateUse]:
    """Return what stages do with parameters and buffers; ``ranks`` are those of the stages."""
    layout = lowered.layout
    nodes = [(on, node) for on, stage in zip(ranks, layout.stages, strict=True) for node in stage.nodes]
    nodes += [(on, node) for on, prologue in zip(ranks, layout.prologues, strict=True) for node in prologue.nodes]
    infos = [(tuple(on), node.meta[INFO]) for on, node in (*nodes, *((ranks[-1], node) for node in layout.epilogue))]
    used = {StateUse(name, on, changes=False) for on, info in infos for name in info.reads}
    return used | {StateUse(name, on, changes=True) for on, info in infos for name in info.writes}


def state_of_several(uses: Iterable[StateUse]) -> str | None:
    """Return what the ranks of one stage change and those of another one use."""
    ranks: dict[str, set[Sequence[int]]] = {}
    for use in uses:
        ranks.setdefault(use.name, set()).add(use.ranks)
    return min((use.name for use in uses if use.changes and len(ranks[use.name]) > 1), default=None)


def warn_where_apart(lowered: Lowered, owner: Mapping[str, int]) -> None:
    """Warn where a buffer is changed behind all microbatches, on the last rank, and its module is another rank's."""
    changed = {name for node in lowered.layout.epilogue for name in node.meta[INFO].writes} & owner.keys()
    for name, other in product(sorted(changed), sorted(owner)):
        module, path = name.rpartition(".")[0], other.rpartition(".")[0]
        inside = path == module or bool(module and path.startswith(f"{module}."))
        if inside and owner[name] != owner[other]:
            warnings.warn(
                f"{name!r} is changed on the whole batch, on the last rank, and {other!r} of its module on another: "
                "what changes one by the other between steps finds a stale value; add sums over rows in place "
                "(buffer += x.sum(0)), which run beside their module",
                stacklevel=2,
            )
            return


def program_text(lowered: Lowered) -> str:
    """Return what each stage runs, takes and gives: what travels is known by its place in a bundle."""
    layout = lowered.layout
    lines = [str(lowered.epilogue_inputs), str([node.name for node in layout.epilogue])]
    for stage, prologue in zip(layout.stages, layout.prologues, strict=True):
        lines += [f"{prologue.takes} {prologue.gives} {[node.name for node in prologue.nodes]}"]
        lines += [f"{stage.inputs} {stage.shared} {sorted(stage.received.items())} {sorted(stage.sent.items())}"]
        lines += [str([f"{node.name} {node.meta[INFO].name}" for node in stage.nodes])]
    return "\n".join(lines)


def pipe_facts(model: nn.Module, options: Options, plan: Plan | None, **ways: Any) -> dict[str, Any]:
    """Return in what the pipes of all ranks have to agree, as texts: the first line that differs is shown."""
    asked = {field.name: getattr(options, field.name) for field in fields(options) if field.name != "devices"} | ways
    modules = [f"{path or 'the model'}: {type(module).__name__}" for path, module in model.named_modules()]
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    state = [f"{name}: {tensor.dtype}{list(tensor.shape)} {tensor.device.type}" for name, tensor in tensors.items()]
    values = [f"{name}: values with checksum {checksum([tensor])}" for name, tensor in tensors.items()]
    seed = f"{torch.initial_seed()}" if has_meta(model) else "of no use"
    return {
        "their versions": f"torch {torch.__version__}\nautosplit {__version__}\npython {platform.python_version()}",
        "the arguments of autosplit()": "\n".join(f"{name}={value!r}" for name, value in asked.items()),
        "their models": "\n".join((*modules, *state)),
        "the values of their models (seed all alike; what was trained in parts is stale elsewhere)": "\n".join(values),
        "torch.initial_seed(), by which a model on meta gets its values": seed,
        "their plans": "none" if plan is None else plan.to_json(),
    }


def call_text(model: nn.Module, args: Any, kwargs: Any, *, values: bool = True) -> str:
    """Return what a call is, as text that is the same in every process; without ``values`` that of all replicas."""
    leaves, spec = take_apart((args, kwargs))
    lines = [f"inputs {spec}"]
    for leaf in leaves:
        tensor = isinstance(leaf, torch.Tensor)
        shape = (list(leaf.shape) if values else f" of {leaf.dim()} dimensions") if tensor else ""
        other = repr(leaf) if values else type(leaf).__name__
        lines.append(f"{leaf.dtype}{shape} {leaf.requires_grad}" if tensor else other)
    modes = [f"{path or 'the model'}.training={module.training}" for path, module in model.named_modules()]
    wanting = [f"{name}.requires_grad={parameter.requires_grad}" for name, parameter in model.named_parameters()]
    return "\n".join((*lines, f"{GradAutocastState.current()}", *modes, *wanting))


def checksum(tensors: Iterable[torch.Tensor], *, devices: bool = False) -> int:
    """Return a number for the values of tensors; those of accelerators are read where ``devices`` asks for it."""
    crc = 0
    for tensor in tensors:
        here = tensor.device.type == "cpu" or (devices and not tensor.is_meta)
        if hasattr(tensor, "__tensor_flatten__"):  # a quantised weight: its pieces have values
            pieces = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
            crc = zlib.crc32(str(checksum(pieces, devices=devices)).encode(), crc)
        elif here and tensor.layout is torch.strided and tensor.numel():
            flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
            for piece in _condensed(flat):
                crc = zlib.crc32(piece.cpu().numpy().data, crc)
    return crc


def copies_of(state: Iterable[tuple[str, torch.Tensor]]) -> dict[str, int]:
    """Return checksums of a state's tensors, or of the parts and shards that this rank has of them."""
    sums = {}
    for name, tensor in state:
        text = f"{name!r}, part {PARTS[tensor].sharing.rank}" if tensor in PARTS else repr(name)
        if isinstance(tensor, DTensor):
            (chunk,) = tensor.__create_chunk_list__()
            text, tensor = f"{text}, shard from {list(chunk.offsets)}", tensor.to_local()
        sums[text] = checksum([tensor], devices=True)
    return sums


def check_copies(copies: Sequence[Mapping[str, int]]) -> None:
    """Raise InputError where ranks have other values of one tensor; ``copies`` are their checksums by its name."""
    first: dict[str, tuple[int, int]] = {}
    for rank, row in enumerate(copies):
        for name, number in row.items():
            holder, expected = first.setdefault(name, (rank, number))
            if number != expected:
                raise InputError(
                    f"ranks {holder} and {rank} hold copies of {name}, and their values differ: one rank alone has "
                    "changed it; change it alike on both, or load the same state on all ranks"
                )


def _condensed(flat: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield what stands for many bytes: the sums of their words by row and by column of tables, read 4 times faster.

    A value that differs changes both, and so do values that change places.
    """
    many = flat.numel() // _ROW_BYTES * _ROW_BYTES if flat.numel() >= _MANY_BYTES else 0
    if many:
        flat = flat.clone() if flat.storage_offset() % 8 else flat  # words are read where they are aligned
        table = flat[:many].view(torch.int64).view(-1, _ROW_BYTES // 8)
        yield table.sum(0)
        yield from _condensed(table.sum(1).view(torch.uint8))
    yield flat[many:]
