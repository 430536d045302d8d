"""Autocast on CUDA adds up in float32 what is in bfloat16, also for what autosplit asks of gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from autosplit.runtime.loss.proof import prove


class CudaSums(TorchFunctionMode):
    """Has sums of bfloat16 come out in float32 where nothing else is asked for, as autocast has it on CUDA."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (Tensor.sum, torch.sum) and args[0].dtype == torch.bfloat16 and "dtype" not in kwargs:
            kwargs = {**kwargs, "dtype": torch.float32}
        return func(*args, **kwargs)


@pytest.fixture
def cuda_sums() -> Any:
    with CudaSums():
        yield


@pytest.mark.usefixtures("cuda_sums")
def test_a_loss_in_bfloat16_is_proved() -> None:
    output = torch.randn(8, 4, dtype=torch.bfloat16, requires_grad=True)
    target = torch.randn(8, 4, dtype=torch.bfloat16)

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return (output - target).float().abs().pow(1.5).mean()

    def rows(microbatch: int | None) -> Tensor:
        return output if microbatch is None else output[4 * microbatch : 4 * microbatch + 4]

    assert prove(loss_fn, rows, target, [target[:4], target[4:]], [4, 4], [output]) == ["mean"]
