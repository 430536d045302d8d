"""``torchgpipe.GPipe`` on top of the pipe: the cut is given by a balance, the rest is :mod:`autosplit`'s."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from autosplit.compat.chain import BalanceError, Layers, SequentialPipe, check_options, check_rows, check_sequential
from autosplit.compat.skip import verify_skippables

_ADVICE = """

How many layers each device should get changes with the model. Have it measured:

  from autosplit.compat.balance import balance_by_time  # was: torchgpipe.balance

  balance = balance_by_time(partitions, model, sample)
  model = GPipe(model, balance, ...)

or let autosplit(model, devices=..., chunks=...) find the cut; then the model needs not be sequential."""


class GPipe(SequentialPipe):
    """A sequential model as a pipeline over several devices, with the signature of ``torchgpipe.GPipe`` 0.0.7.

    ::

        model = GPipe(nn.Sequential(a, b, c, d), balance=[1, 1, 1, 1], chunks=8)
        output = model(input)  # on model.devices[-1]

    The layers are moved to their devices at once; parameters are the same objects under torchgpipe's names
    (``partitions.0.0.weight``). Inputs and outputs are a tensor or a tuple of tensors with the batch first. What runs
    is :attr:`pipe`: a `PipelinedModule`, with its report, program and ``train_step``.

    Args:
        module: an `nn.Sequential`; a layer is never divided.
        balance: how many layers each partition has.
        devices: the devices of the partitions, in order (default: all CUDA devices); further ones are not used.
        chunks: how many microbatches a batch is cut into, of the sizes of ``torch.chunk``.
        checkpoint: what is computed again in the backward to save memory: all microbatches ("always"), all but the
            last ("except_last"), or none ("never"). Outputs and gradients are the same.
        deferred_batch_norm: BatchNorm's running statistics count once per batch instead of once per microbatch.

    Raises:
        TypeError: the module is not sequential, or its skips do not match. ValueError: another argument cannot be
        used. IndexError: there are fewer devices than partitions.
    """

    def __init__(
        self,
        module: nn.Sequential,
        balance: Iterable[int] | None = None,
        *,
        devices: Iterable[torch.device | int | str] | None = None,
        chunks: int = 1,
        checkpoint: str = "except_last",
        deferred_batch_norm: bool = False,
    ) -> None:
        if balance is None:
            raise ValueError(f"balance is required{_ADVICE}")
        chunks, checkpoint = check_options(chunks, checkpoint)
        verify_module(module)
        verify_skippables(module)
        self.balance = list(balance)
        named = range(torch.cuda.device_count()) if devices is None else devices
        places = [torch.device(device) for device in named]
        _check_balance(self.balance, layers=len(module), devices=len(places))
        super().__init__(
            _partitions(module, self.balance),
            places[: len(self.balance)],
            chunks=chunks,
            checkpoint=checkpoint,
            deferred_batch_norm=deferred_batch_norm,
            check=check_tensors,
        )

    def forward(self, input: Any) -> Any:
        """Run a batch.

        Raises TypeError where the input, or what a partition gives, is neither a tensor nor a tuple of tensors, and
        InputError, a ValueError, where tensors have batches of several sizes.
        """
        check_tensors(input)
        if not self.partitions:
            return input
        check_rows(input if isinstance(input, tuple) else (input,))
        output = self.pipe(input)
        return tuple(map(self.at_home, output)) if isinstance(output, tuple) else self.at_home(output)


def check_tensors(value: Any) -> None:
    """Raise TypeError for what is neither a tensor nor a tuple of tensors."""
    for item in value if isinstance(value, tuple) else (value,):
        if not isinstance(item, torch.Tensor):
            raise TypeError(f"expected Tensor, but got {type(item).__name__}")


def verify_module(module: nn.Sequential) -> None:
    """Raise TypeError for what is not sequential, ValueError where layers share parameters or are the same one."""
    check_sequential(module)
    if len(list(module.parameters())) != sum(len(list(child.parameters())) for child in module.children()):
        raise ValueError(
            "module with duplicate parameters in distinct children is not supported; "
            "autosplit(model, devices=..., chunks=...) runs tied parameters"
        )


def _check_balance(balance: list[int], *, layers: int, devices: int) -> None:
    if layers != sum(balance):
        raise BalanceError(
            "module and sum of balance have different length "
            f"(module: {layers}, sum of balance: {sum(balance)}){_ADVICE}"
        )
    if any(count <= 0 for count in balance):
        raise BalanceError(f"all balance numbers must be positive integer (balance: {balance}){_ADVICE}")
    if len(balance) > devices:
        raise IndexError(
            f"too few devices to hold given partitions (devices: {devices}, partitions: {len(balance)}); "
            "a device may repeat: devices=['cpu', 'cpu']"
        )


def _partitions(module: nn.Sequential, balance: list[int]) -> Iterator[Layers]:
    layers = iter(module.named_children())
    for count in balance:
        yield Layers(OrderedDict(next(layers) for _ in range(count)))
