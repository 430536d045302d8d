"""A model run by its own Python leaves what the plain one does: outputs, gradients, buffers, counters, random state."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from autosplit import autosplit
from tests.models.own_python import CASES, assert_left_equal, caller, left, pair, seed


@pytest.mark.parametrize(("stages", "training"), [(1, True), (2, False), (4, True), (4, False)])
@pytest.mark.parametrize("name", CASES)
def test_calls_are_the_plain_models(name: str, stages: int, training: bool) -> None:
    case = CASES[name]
    plain, twin, run = pair(case, training=training, stages=stages)
    batches = [case.batch(count, count) for count in (10, 7, 3, 2 if name == "batch norm" else 1, 10)]
    seed(5)
    expected = [left(plain, plain, args) for args in batches]
    seed(5)
    for args, other in zip(batches, expected, strict=True):
        assert_left_equal(left(twin, caller(run), args), other)


def test_under_autocast_the_same_bits_run_after_run() -> None:
    plain, twin, run = pair(CASES["tied"], training=False, stages=3)
    plain.float(), twin.float()
    args = (CASES["tied"].batch(11, 1)[0].float(),)
    with torch.autocast("cpu", torch.bfloat16):
        found = [left(twin, caller(run), args) for _ in range(3)]
        expected, _ = left(plain, plain, args)
    for other in found[1:]:
        assert_left_equal(other, found[0])
    for name, value in found[0][0].outputs.items():  # the gradients here are sums of bfloat16 that nearly cancel
        assert value.dtype == expected.outputs[name].dtype
        assert torch.allclose(value, expected.outputs[name], rtol=3e-2, atol=3e-2)


class Shifted(nn.Module):
    """Writes to its input in a way that no version counter shows."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x.data.add_(1.0)
        return self.layer(x)


class Noisy(Shifted):
    """Draws from a generator that only a closure holds."""

    def __init__(self) -> None:
        super().__init__()
        generator = np.random.RandomState(5)
        self.noise = lambda: torch.from_numpy(generator.standard_normal(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.noise()


class Mixed(nn.Module):
    """Runs one layer with other parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        mixed = {name: 0.5 * (own + getattr(self.second, name)) for name, own in self.first.named_parameters()}
        return torch.func.functional_call(self.first, mixed, (x,))


class Hooked(Shifted):
    """Registers one more hook in every call."""

    def forward(self, x: Tensor) -> Tensor:
        self.layer.register_forward_hook(lambda module, given, output: output * 0.5)
        return self.layer(x)


class Registered(Shifted):
    """Registers a parameter anew in every call."""

    def forward(self, x: Tensor) -> Tensor:
        self.register_parameter("scale", nn.Parameter(torch.ones(4, dtype=torch.float64)))
        return self.layer(x) * self.scale


@pytest.mark.filterwarnings("ignore:.*collapsed", "ignore:.*devices were given")
@pytest.mark.parametrize("kind", [Shifted, Noisy, Mixed, Hooked, Registered])
def test_trial_runs_and_threads_use_nothing_up(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    plain, split_model = kind().double(), kind().double()
    split_model.load_state_dict(plain.state_dict())
    pipe = autosplit(split_model, devices=2, chunks=3)
    for step, rows in enumerate((7, 5, 7, 5)):
        x = torch.randn(rows, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        inputs = [x.clone().requires_grad_() for _ in range(2)]
        with torch.set_grad_enabled(step < 3):
            outputs = [call(each) for call, each in zip((plain, pipe), inputs, strict=True)]
        torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(inputs[1], inputs[0], rtol=0, atol=0)
        if step < 3:
            for output in outputs:
                output.square().mean().backward()
            own = pipe.train_step(
                x.clone(), target=x[:, 0], loss_fn=lambda output, y: (output[:, 0] - y).square().mean()
            )
            torch.testing.assert_close(own, (plain(x.clone())[:, 0] - x[:, 0]).square().mean().detach())
