"""A fake mode that is made when it is needed: nothing imports torch's compiler before, and nothing is held by that."""

from __future__ import annotations

import gc
import subprocess
import sys
import textwrap
import weakref
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from autosplit.profile import gradients as gradients_module
from autosplit.profile.gradients import accumulate, gradients
from autosplit.profile.late_fake import FakeWorld, LateFakeMode, _import_apart
from autosplit.profile.quick_fake import QuickFake

PLANNED = """
    import sys
    import torch
    from torch import nn
    from autosplit import plan
    net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2),
                        nn.Conv2d(8, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d((1, 1)), nn.Flatten(), nn.Linear(8, 4))
    with torch.device("meta"):
        sample = torch.empty(64, 3, 32, 32)
    found = plan(net.to("meta"), devices="2xL4-24GB", sample=sample)
    assert found.verdict == "fits"
    print(sorted({"sympy", "torch._dynamo", "torch._inductor"} & set(sys.modules)))
"""


def test_a_plan_of_a_convolutional_net_does_without_the_compiler() -> None:
    ran = subprocess.run([sys.executable, "-c", textwrap.dedent(PLANNED)], capture_output=True, text=True, check=True)
    assert ran.stdout == "[]\n"


def test_what_comes_down_runs_under_the_mode() -> None:
    mode, quick = LateFakeMode(), QuickFake()
    with FakeWorld(mode, quick):
        assert quick.mode is mode
        assert "_made" not in vars(mode)
        found = torch.arange(3) + torch.empty(3)
    assert quick.mode is None
    assert isinstance(found, FakeTensor)
    assert found.fake_mode is mode
    assert not mode.cache_enabled
    assert mode.allow_non_fake_inputs
    with pytest.raises(AttributeError):
        mode.nothing_of_the_kind  # noqa: B018


def test_an_import_holds_nothing_of_who_needed_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Held:
        pass

    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("here", "apart"):
        (tmp_path / f"imported_{name}.py").write_text("try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    kept = e\n")

    def imported(name: str) -> weakref.ref[Held]:
        held = Held()
        if name == "apart":
            _import_apart("imported_apart")
        else:
            __import__("imported_here")
        return weakref.ref(held)

    gc.collect()
    for name in ("here", "apart"):
        assert (imported(name)() is None) == (name == "apart")
        assert f"imported_{name}" in sys.modules
        monkeypatch.delitem(sys.modules, f"imported_{name}")


@pytest.mark.parametrize("private", [True, False])
def test_gradients_are_those_of_torch(monkeypatch: pytest.MonkeyPatch, *, private: bool) -> None:
    if not private:
        monkeypatch.delattr(torch.autograd.graph, "_engine_run_backward")
        monkeypatch.setattr(gradients_module.torch.autograd, "grad", lambda *given, **_: tuple(given[1]))
        monkeypatch.setattr(gradients_module.torch.autograd, "backward", lambda *given: given[0][0].detach_())
    net, x = nn.Linear(3, 2), torch.ones(4, 3, requires_grad=True)
    unused, ones = torch.ones(1, requires_grad=True), torch.ones(4, 2)
    leaves: list[Tensor] = [x, net.weight, unused]
    found = gradients([net(x)], leaves, [ones])
    if not private:
        assert found == tuple(leaves)
        return
    assert found[2] is None
    for own, expected in zip(found[:2], torch.autograd.grad(net(x), leaves[:2], ones), strict=True):
        assert own is not None
        assert torch.equal(own, expected)
    accumulate([net(x), net(x)], [ones, ones])
    assert torch.equal(net.weight.grad, 2 * found[1])  # type: ignore[arg-type, operator]
