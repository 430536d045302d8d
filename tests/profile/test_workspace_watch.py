"""Scratch of kernels observed with a clock that counts bytes, and used before any rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from autosplit.devices import Timed
from autosplit.profile import measured
from autosplit.profile.measured import measure
from autosplit.profile.node_costs.ledger import Ledger
from autosplit.profile.stage_trace.stage_graph import Stages
from autosplit.profile.stage_trace.stage_trace import How, trace_stage
from autosplit.profile.workspace_watch import WorkspaceWatch
from autosplit.profile.workspaces import Workspace, cuda_workspace, operation_key
from tests.profile.graphs import traced

MIB = 1 << 20


class CountingClock:
    """A device whose convolutions hold 3 MiB beside their results, and whose first product leaves 8 MiB for good.

    What tensors hold is counted by an account of their storages; every look at the clock costs a second.
    """

    warms = True

    def __init__(self) -> None:
        self.account = Ledger(listing=False)
        self.kept = 0
        self.scratch = {"convolution": 3 * MIB, "convolution_backward": 5 * MIB}
        self.calls: list[str] = []
        self.released = 0

    def timed(self, run: Callable[[], Any]) -> Timed:
        before = self.held_bytes()
        with _Names() as names, self.account:
            result = run()
        self.calls += names.seen
        if "addmm" in names.seen and not self.kept:
            self.kept = 8 * MIB
        scratch = max((self.scratch.get(name, 0) for name in names.seen), default=0)
        return Timed(result, 1.0, max(before, self.held_bytes()) + scratch, 0.5)

    def held_bytes(self) -> int:
        return self.account.live_bytes + self.kept

    def release(self) -> None:
        self.released += 1


class _Names(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func._opname)
        return func(*args, **(kwargs or {}))


def watched(run: Callable[[], Any]) -> WorkspaceWatch:
    with WorkspaceWatch(CountingClock()) as watch:
        out = run()
        torch.autograd.backward(out, torch.ones_like(out))
    return watch


def test_what_an_operation_holds_beyond_its_results_is_its_scratch():
    layer, x = nn.Conv2d(3, 8, 3), torch.randn(2, 3, 12, 12, requires_grad=True)
    watch = watched(lambda: layer(x).relu())
    names = {key.partition("(")[0]: count for key, count in watch.scratch.items()}
    assert names == {"convolution": 3 * MIB, "convolution_backward": 5 * MIB}
    (key,) = [key for key in watch.scratch if key.startswith("convolution(")]
    assert key == (
        "convolution(float32[2x3x12x12], float32[8x3x3x3], float32[8], [1, 1], [0, 0], [1, 1], False, [0, 0], 1)"
    )


def test_what_a_library_keeps_from_its_first_call_on_is_no_scratch():
    layer, x = nn.Linear(64, 64), torch.randn(16, 64, requires_grad=True)
    watch = watched(lambda: layer(x))
    assert watch.scratch == {}


def test_a_measured_profile_watches_each_kind_once_and_times_it_warm(monkeypatch):
    """The first run of a kind loads its kernels: it is watched, the second tells how often, and none of both counts."""
    clock = CountingClock()
    monkeypatch.setattr(measured, "clock_of", lambda device, threads: clock)
    monkeypatch.setattr(measured, "_LONG_S", 100.0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 100, 8))
    x = torch.randn(2, 3, 12, 12)
    found = measure(traced(net, x), inputs=[x], rows=2, repeats=4)
    assert found.workspaces is not None
    assert sorted(set(found.workspaces.values())) == [3 * MIB, 5 * MIB]
    assert {node.samples for node in found.nodes.values()} == {4}
    assert clock.calls.count("convolution") >= 6
    assert clock.released == 1, "what was cached for measuring is given back"
    assert all(parameter.grad is None for parameter in net.parameters())


def test_a_cpu_is_not_watched():
    x = torch.randn(2, 4)
    assert measure(traced(nn.Linear(4, 4), x), inputs=[x], rows=2).workspaces is None


def fake_convolution() -> tuple[Any, Any]:
    with FakeTensorMode():
        args = torch.empty(2, 3, 12, 12), torch.empty(8, 3, 3, 3), None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1
        return args, torch.empty(2, 8, 10, 10)


def test_what_was_observed_goes_before_the_rules():
    args, out = fake_convolution()
    key = operation_key("convolution", args, {})
    assert cuda_workspace("convolution", args, {}, out) == Workspace(0, "unknown")
    assert cuda_workspace("convolution", args, {}, out, observed={key: 7 * MIB}) == Workspace(7 * MIB, "measured")
    other = key.replace("2x3x12x12", "4x3x12x12")
    assert cuda_workspace("convolution", args, {}, out, observed={other: 7}) == Workspace(0, "unknown")


def test_the_trace_of_a_stage_holds_what_was_observed_and_its_guess_is_gone():
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
    stage = Stages(traced(net, torch.randn(2, 3, 12, 12))).of()
    args, _ = fake_convolution()
    key = operation_key("convolution", (args[0], args[1], torch.empty(8), *args[3:]), {})
    seen = {key: 64 * MIB}
    plain, observed = (trace_stage(stage, How(2, kernels="cuda", observed=table)) for table in (None, seen))

    def most(trace: Any) -> int:
        return max(count for step in trace.forward for _, count in step.changes)

    assert most(observed) == 64 * MIB > most(plain)
