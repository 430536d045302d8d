"""What Python reads of a model that lies on several ranks: its forward, a loss, who takes the model back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.nn import functional as F

from autosplit import autosplit
from autosplit.distributed.checkpoint import save
from tests.distributed.processes import Pool, error_of

GIVEN: dict[str, Any] = {"target": torch.zeros(8, 8), "loss_fn": F.mse_loss}


def _batch() -> Tensor:
    return torch.randn(8, 8, generator=torch.Generator().manual_seed(0))


def _chain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(8, 8), nn.Dropout(0.1))))


def _pipe(model: nn.Module | None = None, **how: Any) -> Any:
    return autosplit(model or _chain(), devices="torchrun", chunks=4, sample=_batch(), **how)


class _Centred(nn.Module):
    """Mixes rows."""

    def forward(self, value: Tensor) -> Tensor:
        return value - value.mean(0)


class _Scaled(nn.Module):
    """Its Python reads the value of a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.scale = _chain(), nn.Parameter(torch.tensor(2.0))

    def forward(self, value: Tensor) -> Tensor:
        return self.layers(value) * self.scale + float(self.scale)


def python_reads_a_parameter(how: str) -> str:
    """Split a model whose forward reads a parameter, and train it."""
    model = _Scaled()
    model.scale.requires_grad_(how == "trained")
    return error_of(lambda: _pipe(model).train_step(_batch(), **GIVEN))


def other_attribute() -> str:
    """Set what the forward reads on one rank only, and train."""
    pipe = _pipe()
    pipe.train_step(_batch(), **GIVEN)
    pipe.unsplit()[1].p = (0.1, 0.2)[dist.get_rank()]
    return error_of(lambda: pipe.train_step(_batch(), **GIVEN))


def penalty_without_gradients() -> list[str]:
    """Read a weight of another rank in the loss, and its size, under no_grad."""
    pipe = _pipe(model := nn.Sequential(_chain(), _Centred()))

    def sized(output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output, target) / sum(p.numel() for p in model.parameters())

    def reading(output: Tensor, target: Tensor) -> Tensor:
        with torch.no_grad():
            return F.mse_loss(output, target) * next(model.parameters()).data.norm()

    return [
        error_of(lambda loss=loss: pipe.train_step(_batch(), **GIVEN | {"loss_fn": loss}))
        for loss in (sized, reading, sized)
    ]


def taken_back() -> list[bool]:
    """Train, take the model back, train on, split it again."""
    plain, pipe = _chain(), _pipe(model := _chain())
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.1) for module in (plain, pipe)]
    found = []
    for seed in range(3):
        for module, optimizer in zip((plain, pipe), optimizers, strict=True):
            torch.manual_seed(seed)
            optimizer.zero_grad()
            if module is plain:
                F.mse_loss(plain(_batch()), GIVEN["target"]).backward()
            else:
                pipe.train_step(_batch(), **GIVEN)
            optimizer.step()
        same = pipe.unsplit() is model
        pairs = zip(model.parameters(), plain.parameters(), strict=True)
        found.append(same and all(torch.allclose(one, other, atol=1e-6) for one, other in pairs))
    again = _pipe(pipe.unsplit(), outputs="all")
    return [*found, torch.allclose(again.eval_step(_batch()), plain.eval()(_batch()), atol=1e-6)]


def taken_back_in_part() -> str:
    """Take a model back that has no values of other ranks."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    return error_of(lambda: _pipe(model).unsplit())


def saved_beside_a_step(folder: Path) -> str:
    """Save on one rank while the other takes a step."""
    pipe = _pipe()
    pipe.train_step(_batch(), **GIVEN)
    calls = [lambda: save(folder, 1, pipe), lambda: pipe.train_step(_batch(), **GIVEN)]
    return error_of(calls[dist.get_rank()])


def scaled(kind: Any, *, behind: bool) -> list[tuple[float, bool]]:
    """Train with a scaler; one step has an infinite gradient on the first rank alone. Return scales and who stepped.

    The gradient becomes infinite in the backward, or ``behind`` the step.
    """
    pipe, found = _pipe(), []
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    scaler = kind("cpu", init_scale=2.0**12, growth_interval=2)
    scaler.scale(torch.zeros(()))
    first, factor = next(iter(pipe.parameters())), 1.0
    first.register_hook(lambda gradient: gradient * factor)
    for step in range(4):
        optimizer.zero_grad()
        factor = torch.inf if step == 2 and dist.get_rank() == 0 and not behind else 1.0
        pipe.train_step(_batch(), **GIVEN | {"loss_fn": lambda o, t: scaler.scale(F.mse_loss(o, t))})
        before = [parameter.detach().clone() for parameter in pipe.parameters()]
        if step == 2 and dist.get_rank() == 0 and behind:
            first.grad.fill_(torch.inf)
        scaler.step(optimizer)
        scaler.update()
        found.append((scaler.get_scale(), not all(map(torch.equal, before, pipe.parameters()))))
    return found


def test_a_trained_parameter_that_python_reads_is_named(ranks: Pool) -> None:
    for found in ranks(2).run(python_reads_a_parameter, "trained"):
        assert "forward reads the value of 'scale' in Python, and rank 1 alone has it" in found
    assert ranks(2).run(python_reads_a_parameter, "frozen") == ["nothing was raised"] * 2


def test_ranks_whose_python_reads_other_things_are_told_so(ranks: Pool) -> None:
    for found in ranks(2).run(other_attribute):
        assert "rank 1 records a new kind of call, as what its Python reads" in found


def test_a_loss_that_reads_another_ranks_weight_is_refused(ranks: Pool) -> None:
    for before, read, behind in ranks(2).run(penalty_without_gradients):
        assert before == behind == "nothing was raised"
        assert "the loss reads the parameter '0.0.weight', which another rank holds" in read


def test_who_takes_the_model_back_gets_the_values_of_all_ranks(ranks: Pool) -> None:
    assert ranks(2).run(taken_back) == [[True] * 4] * 2
    assert all("has memory for its part" in text for text in ranks(2).run(taken_back_in_part))


def test_a_save_beside_a_step_is_an_error_on_every_rank(ranks: Pool, tmp_path: Path) -> None:
    for found in ranks(2).run(saved_beside_a_step, tmp_path, timeout_s=20.0):
        assert "the ranks make different calls: rank 0 saves a checkpoint, rank 1 takes a step" in found


@pytest.mark.parametrize(("kind", "behind"), [(torch.amp.GradScaler, False), (ShardedGradScaler, True)])
def test_a_scaler_of_several_ranks_skips_the_same_steps(ranks: Pool, kind: Any, behind: bool) -> None:
    for found in ranks(2).run(scaled, kind, behind=behind):
        assert found == [(4096.0, True), (8192.0, True), (4096.0, False), (4096.0, True)]
