"""A sequential model in partitions: the module that the pipe is made of, and what its wrappers have in common."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, cast

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from autosplit.compat.skip import Key, Skippable
from autosplit.errors import InputError
from autosplit.options import Options, resolve_lanes, resolve_rng
from autosplit.pipelined import PipelinedModule
from autosplit.planning.request import sizes_of

CHECKPOINTS = ("always", "except_last", "never")


class BalanceError(ValueError):
    """A balance does not fit the model."""


class PipeSequential(nn.Sequential):
    """A sequential whose layers take a tuple as their arguments, one by one."""

    def forward(self, *inputs: Any) -> Any:
        """Run the layers one after the other."""
        value: Any = inputs
        for layer in self:
            value = layer(*value) if isinstance(value, tuple) else layer(value)
        return value


class Layers(nn.Sequential):
    """Layers of one stage, which hand a tuple on as one argument; skips come in and go out beside it."""

    spreads: tuple[type, ...] = ()
    """What layers, and the next partition, are given as several arguments."""

    def stashable(self) -> tuple[Key, ...]:
        """Return the keys of what the layers stash for later partitions."""
        return tuple(key for key, times in self._used().items() if times > 0)

    def poppable(self) -> tuple[Key, ...]:
        """Return the keys of what the layers pop of earlier partitions."""
        return tuple(key for key, times in self._used().items() if times < 0)

    def _used(self) -> Counter[Key]:
        layers = [layer for layer in self if isinstance(layer, Skippable)]
        used = Counter(key for layer in layers for key in layer.stashable())
        used.subtract(key for layer in layers for key in layer.poppable())
        return used

    def forward(self, *inputs: Any, skips: tuple[Any, ...] | None = None) -> Any:
        """Run the layers; with ``skips``, in the order of :meth:`poppable`, return also those of :meth:`stashable`."""
        if skips is None:
            return super().forward(*inputs)
        held = dict(zip(self.poppable(), skips, strict=True))
        value: Any = inputs
        for layer in self:
            value = _called(layer, value, held, spread=value is inputs or isinstance(value, self.spreads))
        return value, tuple(held[key] for key in self.stashable())


class PipePartition(Layers, PipeSequential):
    """Layers of one stage, which hand a tuple on as several arguments."""

    spreads = (tuple,)


def _called(layer: nn.Module, value: Any, held: dict[Key, Any], *, spread: bool) -> Any:
    """Run a layer or a partition; what it pops comes from, and what it stashes goes to, the skips that are ``held``."""
    args = tuple(value) if spread else (value,)
    if not isinstance(layer, (Skippable, Layers)):
        return layer(*args)
    popped, stashable = tuple(held.pop(key) for key in layer.poppable()), tuple(layer.stashable())
    if not (popped or stashable):
        return layer(*args)
    output, stashed = layer(*args, skips=popped)
    held.update(zip(stashable, stashed, strict=True))
    return output


class Chain(nn.Module):
    """The partitions one after the other: the model that is pipelined.

    ``check`` is asked about what each partition gives, while the model is recorded.
    """

    def __init__(self, partitions: nn.ModuleList, check: Callable[[Any], None]) -> None:
        super().__init__()
        self.partitions = partitions
        self.check = check

    def forward(self, *inputs: Any) -> Any:
        """Run the partitions; a skip goes directly from the one that stashes it to the one that pops it."""
        value: Any = inputs
        held: dict[Key, Any] = {}
        for partition in cast(Iterable[Layers], self.partitions):
            spread = value is inputs or (bool(partition.spreads) and isinstance(value, (tuple, list)))
            value = _called(partition, value, held, spread=spread)
            self.check(value)
        return value


@dataclass
class _Runs:
    """What runs a model, kept out of its wrapper's own modules."""

    chain: Chain
    pipes: dict[Any, PipelinedModule] = field(default_factory=dict)


class SequentialPipe(nn.Module):
    """What `GPipe` and `Pipe` have in common: a sequential model in partitions, run by a `PipelinedModule`.

    Attributes:
        partitions: the layers, one sequential per stage.
        devices: the device of each partition.
        chunks: how many microbatches a batch is cut into at most.
        checkpoint: what is computed again in the backward: "always", "except_last" or "never".
        norm_counts: what running statistics of norms count as one update: a "step" or a "microbatch".
    """

    def __init__(
        self,
        partitions: Iterable[Layers],
        devices: Sequence[torch.device],
        *,
        chunks: int,
        checkpoint: str,
        deferred_batch_norm: bool,
        check: Callable[[Any], None],
    ) -> None:
        super().__init__()
        self.partitions = nn.ModuleList(partitions)
        self.devices = list(devices)
        self.chunks = chunks
        self.checkpoint = checkpoint
        self.norm_counts = "step" if deferred_batch_norm else "microbatch"
        for partition, device in zip(self.partitions, self.devices, strict=True):
            partition.to(device)
        self.register_load_state_dict_pre_hook(_without_sums)
        self.__dict__["_runs"] = _Runs(Chain(self.partitions, check))

    @property
    def pipe(self) -> PipelinedModule:
        """The pipe that runs calls with tensors only: its ``report()``, ``code``, ``plan`` and ``train_step``."""
        return self.pipe_for(0)

    def pipe_for(self, batch_dims: Any) -> PipelinedModule:
        """Return what runs calls whose inputs have their batch there; all share one plan."""
        runs: _Runs = self.__dict__["_runs"]
        if batch_dims not in runs.pipes:
            options = Options(
                devices=tuple(self.devices),
                chunks=self.chunks,
                schedule="gpipe",
                batch_dims=batch_dims,
                batch_norm="micro",
                recompute=(self.checkpoint,),
                lanes=resolve_lanes("auto", self.devices),
                rng=resolve_rng("auto", self.devices),
                measure=False,
                cut={f"partitions.{index}": index for index in range(len(self.partitions))},
                microbatches="chunk",
                norm_counts=self.norm_counts,
            )
            plan = next((pipe.plan for pipe in runs.pipes.values()), None)
            runs.pipes[batch_dims] = PipelinedModule(runs.chain, options, plan)
        return runs.pipes[batch_dims]

    def microbatches(self, rows: int) -> int:
        """Return how many microbatches a batch of so many rows is cut into."""
        return len(sizes_of(rows, self.chunks, 1, like="chunk"))

    def at_home(self, output: Any) -> Any:
        """Return an output on the last device, also where the last partitions compute nothing."""
        return output.to(self.devices[-1]) if isinstance(output, torch.Tensor) else output

    def train(self, mode: bool = True) -> Any:
        """Set training or eval mode."""
        super().train(mode)
        runs: _Runs = self.__dict__["_runs"]
        for module in (runs.chain, *runs.pipes.values()):
            module.train(mode)
        return self

    def __len__(self) -> int:
        """Return how many layers there are."""
        return sum(1 for _ in self)

    def __getitem__(self, index: int) -> nn.Module:
        """Return a layer by its place in the model."""
        return list(self)[index]

    def __iter__(self) -> Iterator[nn.Module]:
        """Yield the layers."""
        for partition in cast(Iterable[Layers], self.partitions):
            yield from partition

    def cuda(self, device: Any = None) -> NoReturn:
        """Refuse: the partitions lie on their devices."""
        self._refuse()

    def cpu(self) -> NoReturn:
        """Refuse: the partitions lie on their devices."""
        self._refuse()

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Change the dtype; a device, or a tensor that names one, is refused."""
        first = args[0] if args else None
        if {"device", "tensor"} & kwargs.keys() or isinstance(first, (torch.device, int, str, torch.Tensor)):
            self._refuse()
        return super().to(*args, **kwargs)

    def _refuse(self) -> NoReturn:
        raise TypeError(
            "denied to move parameters and buffers, because "
            f"{type(self).__name__} should manage device placement: they lie on {', '.join(map(str, self.devices))}"
        )


def check_rows(tensors: Iterable[torch.Tensor]) -> None:
    """Raise InputError for tensors that are not batches of one size."""
    shapes = [tuple(tensor.shape) for tensor in tensors]
    if len({shape[:1] for shape in shapes}) > 1 or () in shapes:
        raise InputError(
            "inputs are cut into microbatches along their first dimension, which must be of one size: their shapes "
            f"are {', '.join(map(str, map(list, shapes)))}"
        )


def _without_sums(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Drop what deferred batch norms kept of a batch that was under way; it is zero between batches."""
    for path, norm in module.named_modules():
        if isinstance(norm, _BatchNorm):
            for name in ("sum", "sum_squares"):
                state.pop(f"{prefix}{path}.{name}", None)


def check_options(chunks: Any, checkpoint: Any) -> tuple[int, str]:
    """Return ``chunks`` as an int and ``checkpoint`` as a str; raise ValueError for what they cannot be."""
    chunks, checkpoint = int(chunks), str(checkpoint)
    if chunks <= 0:
        raise ValueError(f"number of chunks must be positive integer (chunks: {chunks})")
    if checkpoint not in CHECKPOINTS:
        raise ValueError(f"checkpoint is not one of 'always', 'except_last', or 'never' (checkpoint: {checkpoint!r})")
    return chunks, checkpoint


def check_sequential(module: Any) -> None:
    """Raise TypeError for what is no `nn.Sequential`, ValueError for one that has a layer twice."""
    if not isinstance(module, nn.Sequential):
        raise TypeError(f"module must be nn.Sequential to be partitioned, it is a {type(module).__name__}")
    if len(list(module.named_children())) != len(module):
        raise ValueError("module with duplicate children is not supported")
