"""``torch.distributed.pipeline.sync.Pipe``, as torch had it until 2.3, on top of the pipe.

The cut is where the modules' devices change; on the CPU every module is a stage of its own. No RPC framework is needed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from autosplit.compat.chain import PipePartition, SequentialPipe, check_options, check_rows, check_sequential
from autosplit.compat.skip import verify_skippables


class NoChunk:
    """Marks a tensor among a `Pipe`'s inputs that every microbatch is given whole."""

    def __init__(self, inp: torch.Tensor) -> None:
        if not isinstance(inp, torch.Tensor):
            raise TypeError(f"NoChunk only supported for tensors, found: {inp}")
        self.tensor = inp


class WithDevice(nn.Module):
    """Says on which device a module of a `Pipe` is to run; `Pipe` moves it there.

    A module without parameters runs on the CPU unless this says otherwise.
    """

    def __init__(self, module: nn.Module, device: torch.device | int | str) -> None:
        super().__init__()
        self.module = module
        self.device = torch.device(device)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module."""
        return self.module(*args, **kwargs)


class LocalValue:
    """What a `Pipe` returns in the place of an RRef: the output is here already."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def local_value(self) -> Any:
        """Return the output."""
        return self._value

    def to_here(self, timeout: float = -1.0) -> Any:
        """Return the output; there is nothing to wait for."""
        return self._value

    def is_owner(self) -> bool:
        """Tell that the output is in this process."""
        return True

    def backward(self) -> None:
        """Run the backward of an output that is a scalar tensor."""
        self._value.backward()


class Pipe(SequentialPipe):
    """A sequential model as a pipeline, with the signature of the removed ``torch.distributed.pipeline.sync.Pipe``.

    ::

        model = Pipe(nn.Sequential(fc1.cuda(0), fc2.cuda(1)), chunks=8)
        output = model(input).local_value()

    Modules that follow each other on one GPU are a stage, and so is every module on the CPU; parameters keep their
    objects and have Pipe's names (``partitions.0.0.weight``). A tuple that a module returns is passed to the next one
    as several arguments. :attr:`pipe` is the `PipelinedModule` that runs, with its report, program and ``train_step``.

    Args:
        module: an `nn.Sequential` of modules, each with all of its parameters on one device, or of such sequentials.
        chunks: how many microbatches a batch is cut into, of the sizes of ``torch.chunk``.
        checkpoint: what is computed again in the backward to save memory: all microbatches ("always"), all but the
            last ("except_last"), or none ("never"). Outputs and gradients are the same.
        deferred_batch_norm: BatchNorm's running statistics count once per batch instead of once per microbatch.

    Raises:
        TypeError: the module is not sequential, or its skips do not match. ValueError: another argument, or where the
        parameters lie, cannot be used.
    """

    def __init__(
        self, module: nn.Sequential, chunks: int = 1, checkpoint: str = "except_last", deferred_batch_norm: bool = False
    ) -> None:
        chunks, checkpoint = check_options(chunks, checkpoint)
        check_sequential(module)
        verify_skippables(module)
        groups = _groups(module.children())
        _check_shared(groups)
        super().__init__(
            [PipePartition(*layers) for _, layers in groups],
            [device for device, _ in groups],
            chunks=chunks,
            checkpoint=checkpoint,
            deferred_batch_norm=deferred_batch_norm,
            check=_check_some_tensor,
        )

    def forward(self, *inputs: Any) -> LocalValue:
        """Run a batch and return its output as a `LocalValue`.

        Tensors are cut along their first dimension, except for those in `NoChunk`; what is no tensor is given to every
        microbatch as it is, and comes out as a list with an entry per microbatch. Raises TypeError where an input or a
        stage's output has no tensor, ValueError for inputs on another device than the first stage's or in
        batches of several sizes, and RuntimeError for tensors that give different numbers of microbatches.
        """
        values = [entry.tensor if isinstance(entry, NoChunk) else entry for entry in inputs]
        tensors = [entry for entry in values if isinstance(entry, torch.Tensor)]
        if not tensors:
            raise TypeError(f"inputs do not have any tensors: {inputs}")
        if not self.partitions:
            return LocalValue(values[0] if len(values) == 1 else tuple(values))
        if any(tensor.device != self.devices[0] for tensor in tensors):
            places = ", ".join(dict.fromkeys(str(tensor.device) for tensor in tensors))
            raise ValueError(
                f"All inputs should be on the same device as the first partition: they are on {places}, "
                f"it is on {self.devices[0]}"
            )
        count = self._count(inputs)
        dims = tuple(0 if isinstance(entry, torch.Tensor) else None for entry in inputs)
        output = self.pipe_for(dims if None in dims else 0)(*values)
        if isinstance(output, torch.Tensor):
            return LocalValue(self.at_home(output))
        whole = (self.at_home(item) if isinstance(item, torch.Tensor) else [item] * count for item in output)
        return LocalValue(tuple(whole))

    def _count(self, inputs: Iterable[Any]) -> int:
        tensors = [entry for entry in inputs if isinstance(entry, torch.Tensor)]
        rows = [len(entry) for entry in tensors if entry.dim()]
        counts = list(dict.fromkeys(map(self.microbatches, rows)))
        if len(counts) > 1:
            raise RuntimeError(
                f"Found different number of chunks produced for inputs: {counts[0]} and {counts[1]} "
                f"(rows: {rows}); put tensors without a batch into NoChunk"
            )
        check_rows(tensors)
        return counts[0] if counts else self.chunks


def _check_some_tensor(value: Any) -> None:
    parts = value if isinstance(value, (tuple, list)) else (value,)
    if not any(isinstance(item, torch.Tensor) for item in parts):
        raise TypeError(f"No tensors found in batch: {value}")


def _groups(modules: Iterable[nn.Module]) -> list[tuple[torch.device, list[nn.Module]]]:
    """Return the stages: their devices, and the layers that they are made of."""
    groups: list[tuple[torch.device, list[nn.Module]]] = []
    for module in modules:
        device = _device_of(module)
        if isinstance(module, WithDevice):
            module = module.module.to(device)
        if not groups or device.type == "cpu" or groups[-1][0] != device:
            groups.append((device, []))
        groups[-1][1].extend(module.children() if isinstance(module, nn.Sequential) else [module])
    return groups


def _device_of(module: nn.Module) -> torch.device:
    if isinstance(module, WithDevice):
        return module.device
    devices = list(dict.fromkeys(parameter.device for parameter in module.parameters()))
    if len(devices) > 1:
        raise ValueError(
            f"nn.Module: {module}, should have all parameters on a single device, please use .to() to place the module "
            f"on a single device; they are on {', '.join(map(str, devices))}"
        )
    return devices[0] if devices else torch.device("cpu")


def _check_shared(groups: Iterable[tuple[torch.device, list[nn.Module]]]) -> None:
    homes: dict[nn.Parameter, torch.device] = {}
    for device, layers in groups:
        for parameter in nn.ModuleList(layers).parameters():
            if homes.setdefault(parameter, device) != device:
                raise ValueError(
                    "module with duplicate parameters on distinct devices is not supported; "
                    "autosplit(model, devices=..., chunks=...) runs tied parameters"
                )
