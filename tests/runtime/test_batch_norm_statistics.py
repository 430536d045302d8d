"""What a norm does with one microbatch, and what becomes of all that it saw: no pipe, or a small one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autosplit.runtime.norms import normalise, update_statistics
from autosplit.runtime.ops import CallState, CellContext

CHANNELS = 3


def values(
    *shape: int, seed: int = 0, mean: float = 2.0, std: float = 3.0, dtype: torch.dtype = torch.float64
) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * std + mean).to(dtype)


def one_by_one(norm: Any, parts: tuple[Tensor, ...], state: CallState, *, name: str = "norm#0") -> list[Tensor]:
    return [normalise(CellContext(state, microbatch), name, norm, part) for microbatch, part in enumerate(parts)]


# -- one microbatch ------------------------------------------------------------------------------------------------
KINDS: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "1d": (lambda: nn.BatchNorm1d(CHANNELS), values(9, CHANNELS)),
    "1d, long": (lambda: nn.BatchNorm1d(CHANNELS), values(9, CHANNELS, 5)),
    "2d": (lambda: nn.BatchNorm2d(CHANNELS), values(9, CHANNELS, 4, 5)),
    "3d": (lambda: nn.BatchNorm3d(CHANNELS), values(9, CHANNELS, 2, 3, 4)),
    "channels last": (
        lambda: nn.BatchNorm2d(CHANNELS),
        values(9, CHANNELS, 4, 5).to(memory_format=torch.channels_last),
    ),
    "no affine": (lambda: nn.BatchNorm1d(CHANNELS, affine=False), values(9, CHANNELS)),
    "cumulative": (lambda: nn.BatchNorm1d(CHANNELS, momentum=None), values(9, CHANNELS)),
    "single process": (lambda: nn.SyncBatchNorm(CHANNELS), values(9, CHANNELS, 4)),
    "instances": (
        lambda: nn.InstanceNorm2d(CHANNELS, affine=True, track_running_stats=True),
        values(9, CHANNELS, 4, 5),
    ),
}


@pytest.mark.parametrize("kind", list(KINDS))
def test_microbatches_have_torchs_own_bits_and_the_statistics_are_the_plain_layers(kind: str) -> None:
    build, value = KINDS[kind]
    norm, plain, alone = build().double(), build().double(), build().double()
    state = CallState(microbatches=4)
    parts = tuple(part.detach().clone().requires_grad_() for part in value.tensor_split(4))
    for got, part in zip(one_by_one(norm, parts, state), parts, strict=True):
        own = part.detach().clone().requires_grad_()
        expected = alone(own)
        assert torch.equal(got, expected)
        weights = torch.arange(1.0, got.numel() + 1, dtype=got.dtype).cos().view_as(got)
        (got * weights).sum().backward()
        (expected * weights).sum().backward()
        assert torch.equal(part.grad, own.grad)
    for parameter, expected in zip(norm.parameters(), alone.parameters(), strict=True):
        assert torch.equal(parameter.grad, expected.grad)
    before = {name: buffer.clone() for name, buffer in build().double().named_buffers()}
    assert all(torch.equal(buffer, before[name]) for name, buffer in norm.named_buffers())
    versions = [buffer._version for buffer in (norm.running_mean, norm.running_var)]
    update_statistics(state, ())
    plain(value)
    for name, buffer in plain.named_buffers():
        torch.testing.assert_close(norm.get_buffer(name), buffer, rtol=1e-13, atol=0)
    assert [buffer._version for buffer in (norm.running_mean, norm.running_var)] == versions


def test_one_value_per_channel_is_torchs_own_error() -> None:
    with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
        normalise(CellContext(CallState(), 0), "norm#0", nn.BatchNorm1d(CHANNELS), torch.ones(1, CHANNELS))


# -- modules that are more than their forward ----------------------------------------------------------------------
class NormAct(nn.BatchNorm1d):
    """A norm with its own Python, as timm's BatchNormAct2d has."""

    def forward(self, value: Tensor) -> Tensor:
        factor = 0.0 if self.momentum is None else self.momentum
        if self.training:
            self.num_batches_tracked.add_(1)
            factor = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        mean, var = self.running_mean, self.running_var
        return F.relu(F.batch_norm(value, mean, var, self.weight, self.bias, self.training, factor, self.eps))


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("kind", [nn.BatchNorm1d, NormAct])
def test_hooks_are_called_and_statistics_are_counted_once_per_use(kind: Any, momentum: float | None) -> None:
    norm, plain = (kind(CHANNELS, momentum=momentum).double() for _ in range(2))
    seen: list[int] = []
    norm.register_forward_hook(lambda module, given, output: seen.append(len(output)))
    counter = norm.num_batches_tracked
    for step in range(2):
        value, state = values(9, CHANNELS, seed=step), CallState(microbatches=2)
        for microbatch, part in enumerate(value.tensor_split(2)):
            for use, given in enumerate((part, part * 2 + 1)):
                normalise(CellContext(state, microbatch), f"norm#{use}", norm, given)
        update_statistics(state, ())
        plain(value)
        plain(value * 2 + 1)
    assert seen == [5, 5, 4, 4] * 2
    assert norm.num_batches_tracked is counter
    for name, buffer in plain.named_buffers():
        torch.testing.assert_close(norm.get_buffer(name), buffer, rtol=1e-13, atol=0)
