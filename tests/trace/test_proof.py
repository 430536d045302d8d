"""A proof that a plan carries: used where all that it was about is the same, and nowhere else."""

from __future__ import annotations

import functools
import subprocess
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autosplit import Plan, autosplit
from autosplit.trace import ladder
from tests.equivalence.equality import Batch, assert_equal_runs, forward_backward
from tests.models.three_layers import Tripled


def gate(value: Tensor) -> Tensor:
    """A function of the model's own file, which its forward calls."""
    return value * 2 if isinstance(value, Tensor) else value


class Net(nn.Module):
    """Two layers whose weight is one, a function of its own file, an attribute and a norm over the batch."""

    def __init__(self, *, mixes: bool = False) -> None:
        super().__init__()
        self.first, self.second, self.drop = nn.Linear(4, 4), nn.Linear(4, 4), nn.Dropout(0.0)
        self.second.weight = self.first.weight
        self.scale, self.mixes = 3.0, mixes

    def forward(self, value: Tensor) -> Tensor:
        value = gate(self.drop(self.first(value))) * self.scale
        return self.second(value + value.mean(0) if self.mixes else value)


class Proving:
    """Counts how often the probe and the check run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ran: list[str] = []
        for name in ("run_probe", "check_recording"):
            monkeypatch.setattr(ladder, name, self.counted(name, getattr(ladder, name)))

    def counted(self, name: str, function: Any) -> Any:
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            self.ran.append(name)
            return function(*args, **kwargs)

        return run


@pytest.fixture
def proving(monkeypatch: pytest.MonkeyPatch) -> Proving:
    return Proving(monkeypatch)


def planned(model: nn.Module, tmp_path: Path) -> Path:
    """The file of a plan for a model of four inputs."""
    pipe = autosplit(model, devices=2, chunks=2, sample=torch.randn(4, 4), lanes="inline")
    assert pipe.plan is not None
    assert len(pipe.plan.proofs) == 1
    pipe.plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == pipe.plan
    return tmp_path / "plan.json"


def call(model: nn.Module, path: Path) -> None:
    """Run a model by a plan, as the model runs."""
    batch = Batch((torch.randn(6, 4),))
    pipe = autosplit(model, devices=2, plan=path, lanes="inline")
    assert_equal_runs(forward_backward(pipe, batch), forward_backward(model, batch), dtype=torch.float32)


@pytest.mark.parametrize("mixes", [False, True], ids=["rows", "mixes"])
def test_what_was_proved_is_not_proved_again(mixes: bool, proving: Proving, tmp_path: Path) -> None:
    path = planned(Net(mixes=mixes), tmp_path)
    assert sorted(set(proving.ran)) == ["check_recording", "run_probe"]
    proving.ran.clear()
    call(Net(mixes=mixes), path)
    assert proving.ran == []
    again = autosplit(Net(mixes=mixes), devices=2, plan=path, sample=torch.randn(4, 4))
    assert again.plan is not None
    assert (again.plan.class_flops["full"] > 0) is mixes


class Other(Net):
    """A child whose forward does the same and says it in other words."""

    def forward(self, value: Tensor) -> Tensor:
        value = gate(self.drop(self.first(value))) * self.scale
        value = value + value.mean(0) if self.mixes else value
        return self.second(value)


def changed(change: Callable[[Net], object]) -> Callable[[], Net]:
    """Return what makes a model that is changed before it is split."""

    def make() -> Net:
        change(model := Net())
        return model

    return make


CHANGES: dict[str, Callable[[], nn.Module]] = {
    "a hook": changed(lambda net: net.first.register_forward_hook(lambda module, args, output: None)),
    "an attribute": changed(lambda net: setattr(net, "scale", 6.0)),
    "frozen": changed(lambda net: net.first.bias.requires_grad_(False)),
    "untied": changed(lambda net: setattr(net.second, "weight", nn.Parameter(net.second.weight.detach().clone()))),
    "an instance's forward": changed(lambda net: vars(net.drop).update(forward=partial(nn.Dropout.forward, net.drop))),
    "other code": Other,
    "another mode": lambda: Net().eval(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_differs_in_anything_is_proved_anew(change: str, proving: Proving, tmp_path: Path) -> None:
    path = planned(Net(), tmp_path)
    proving.ran.clear()
    call(CHANGES[change](), path)
    assert "check_recording" in proving.ran


class Scaled(Net):
    def forward(self, x: Tensor) -> Tensor:
        return Tripled.apply(super().forward(x))


def test_what_cannot_be_told_apart_has_no_proof() -> None:
    class Inside(Net):
        """Another one in each call of this function."""

    for kind in (Inside, Scaled):
        pipe = autosplit(kind(), devices=2, chunks=2, sample=torch.randn(4, 4), lanes="inline")
        assert pipe.plan is not None
        assert pipe.plan.proofs == ()


def test_a_proof_holds_in_another_process(tmp_path: Path) -> None:
    path = planned(Net(), tmp_path)
    code = (
        "import sys, torch; from autosplit import autosplit; from autosplit.trace import ladder;"
        "from tests.trace.test_proof import Net; ladder.check_recording = None;"
        "pipe = autosplit(Net(), devices=2, plan=sys.argv[1], lanes='inline'); pipe(torch.randn(6, 4))"
    )
    with warnings.catch_warnings():
        run = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
