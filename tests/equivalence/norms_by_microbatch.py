"""What a pipe's training batch norms are to compute, written out: the reference of the tests.

The plain model runs on one microbatch after the other, so that each is normalised by itself, and every norm's inputs
are kept. Then running statistics move once per call of the norm, by the mean and the unbiased variance of all inputs
that the call saw.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn

from tests.equivalence.equality import Batch, Run, forward_backward

NORMS = (nn.modules.batchnorm._NormBase,)


class ByMicrobatch(nn.Module):
    """A model with one batch as input and output, whose norms see a microbatch at a time."""

    def __init__(self, model: nn.Module, parts: int) -> None:
        super().__init__()
        self.model, self.parts = model, parts

    def forward(self, value: Tensor) -> Tensor:
        norms = [m for m in self.model.modules() if isinstance(m, NORMS) and m.training and m.running_mean is not None]
        seen: dict[int, list[list[Tensor]]] = defaultdict(list)
        before = [(m, m._buffers) for m in norms]
        for norm in norms:
            norm._buffers = {name: buffer.clone() for name, buffer in norm._buffers.items()}
        outputs = []
        for part in value.tensor_split(self.parts):
            uses: dict[int, list[Tensor]] = defaultdict(list)
            hooks = [m.register_forward_pre_hook(lambda m, x, u=uses: u[id(m)].append(x[0].detach())) for m in norms]
            outputs.append(self.model(part))
            for hook in hooks:
                hook.remove()
            for module, inputs in uses.items():
                seen[module].append(inputs)
        for norm, buffers in before:
            norm._buffers = buffers
            for inputs_of_use in zip(*seen[id(norm)], strict=True):
                count_once(norm, list(inputs_of_use))
        return torch.cat(outputs)


def count_once(norm: Any, inputs: list[Tensor]) -> None:
    """Move running statistics by all inputs of one call of a norm."""
    value = torch.cat(inputs).double()
    mean, var = _instances(value) if isinstance(norm, nn.modules.instancenorm._InstanceNorm) else _batch(value)
    if isinstance(norm, nn.modules.batchnorm._BatchNorm):
        norm.num_batches_tracked += 1
    weight = 1 / int(norm.num_batches_tracked) if norm.momentum is None else norm.momentum
    norm.running_mean.copy_((1 - weight) * norm.running_mean + weight * mean)
    norm.running_var.copy_((1 - weight) * norm.running_var + weight * var)


def _batch(value: Tensor) -> tuple[Tensor, Tensor]:
    over = [dim for dim in range(value.dim()) if dim != 1]
    return value.mean(over), value.var(over)


def _instances(value: Tensor) -> tuple[Tensor, Tensor]:
    return value.flatten(2).mean(2).mean(0), value.flatten(2).var(2).mean(0)


def run_by_microbatch(model: nn.Module, batch: Batch, *, parts: int, loss: Any = None) -> Run:
    """Run the reference."""
    whole = ByMicrobatch(model, parts)
    run = forward_backward(whole, batch) if loss is None else forward_backward(whole, batch, loss=loss)
    gradients = {name.removeprefix("model."): gradient for name, gradient in run.gradients.items()}
    buffers = {name.removeprefix("model."): buffer for name, buffer in run.buffers.items()}
    return Run(run.outputs, run.loss, gradients, buffers)
