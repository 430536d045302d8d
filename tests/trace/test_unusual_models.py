"""Models of unusual tensors and modules run equal to plain: incomplete ones, sparse buffers, hooks, TorchScript."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autosplit import autosplit
from tests.equivalence.equality import Batch, assert_equal_runs, forward_backward, train_step

WIDTH = 6


class Net(nn.Module):
    """A body between two layers."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.a, self.body, self.b = nn.Linear(WIDTH, WIDTH), body, nn.Linear(WIDTH, 2)
        self.double()

    def forward(self, x: Tensor) -> Any:
        return self.b(self.body(torch.relu(self.a(x))))


def batch(rows: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class MakesParameter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight: nn.Parameter | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.weight is None:
            self.weight = nn.Parameter(torch.randn(x.shape[-1], dtype=x.dtype))
        return x * self.weight


class MakesModule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer: nn.Module | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.layer is None:
            self.layer = nn.Linear(x.shape[-1], WIDTH).to(x)
        return self.layer(x)


class MakesBuffer(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "places"):
            self.register_buffer("places", torch.linspace(0, 1, x.shape[-1], dtype=x.dtype))
        return x + self.places


class Sparse(nn.Module):
    def __init__(self, *, compressed: bool) -> None:
        super().__init__()
        near = torch.eye(WIDTH).roll(1, 0)
        self.register_buffer("near", near.to_sparse_csr() if compressed else near.to_sparse())

    def forward(self, x: Tensor) -> Tensor:
        return x + (self.near @ x.T).T


class Hooks(nn.Module):
    def __init__(self, hook: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.hook = nn.Linear(WIDTH, WIDTH), hook

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        if y.requires_grad:
            y.register_hook(self.hook)
        return torch.tanh(y)


class Scripted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x))


def both(make: Callable[[], nn.Module], *, step: bool = False) -> tuple[nn.Module, Any]:
    """Run three batches on a plain model and on a pipe of an equal one, and compare."""
    modules: list[Any] = []
    for _ in range(2):
        torch.manual_seed(0)
        modules.append(Net(make()))
    plain, pipe = modules[0], autosplit(modules[1], devices=["cpu"] * 2, chunks=3)
    for number, rows in enumerate((7, 7, 5)):
        x, seeded = Batch((batch(rows, number),)), []
        for module in (plain, pipe):
            torch.manual_seed(number)
            if step and module is pipe:
                seeded.append(train_step(module, x, loss_fn=lambda y, _: y.pow(2).mean(), target=torch.zeros(rows)))
            else:
                seeded.append(forward_backward(module, x, **({"loss": lambda y: y.pow(2).mean()} if step else {})))
        expected, actual = seeded
        if step:
            assert torch.allclose(actual.loss, expected.loss, rtol=1e-12)
            assert all(
                torch.allclose(actual.gradients[n], g) for n, g in expected.gradients.items() if "input" not in n
            )
        else:
            for run in seeded:
                run.buffers.update({n: b.to_dense() for n, b in run.buffers.items() if b.layout is not torch.strided})
            assert_equal_runs(actual, expected)
    return plain, pipe


@pytest.mark.parametrize("step", [False, True])
@pytest.mark.parametrize("make", [MakesParameter, MakesModule, MakesBuffer, lambda: nn.LazyLinear(WIDTH)])
def test_a_call_that_completes_the_model_is_its_own_and_the_next_is_planned(
    make: Callable[[], nn.Module], step: bool
) -> None:
    _, pipe = both(make, step=step)
    assert pipe.plan.rung == "recorded"
    assert len(pipe.plan.stages) == 2


@pytest.mark.filterwarnings("ignore:Sparse CSR:UserWarning")
def test_a_sparse_buffer_pipelines_and_a_compressed_one_is_named() -> None:
    assert both(lambda: Sparse(compressed=False))[1].plan.rung == "recorded"
    pipe = both(lambda: Sparse(compressed=True))[1]
    assert pipe.plan.rung == "module tree"
    assert "body.near is a sparse_csr tensor" in " ".join(pipe.report().split())


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_torchscript_with_parameters_runs_by_its_own_python_with_all_gradients() -> None:
    _, pipe = both(lambda: torch.jit.script(Scripted()))
    assert pipe.plan.rung == "module tree"
    assert "module 'body' is TorchScript" in " ".join(pipe.report().split())


def test_a_hook_that_takes_the_batchs_norm_sees_the_whole_batch() -> None:
    both(lambda: Hooks(lambda g: g / (g.norm() + 1e-6)))
