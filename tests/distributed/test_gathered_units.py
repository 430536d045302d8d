"""fsdp_reshard="always": a rank has its shards, and whole parameters and gradients of two units at most."""

from __future__ import annotations

import math
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from autosplit import autosplit, plan
from autosplit.runtime.step_log import Performed, StepLog
from autosplit.trace.inputs.objects import tensors_in
from tests.distributed.processes import Pool, error_of
from tests.distributed.replicas import mesh_of, replica_of

WIDTH, BLOCKS, CHUNKS = 128, 8, 4
UNIT_BYTES = 4 * WIDTH * WIDTH


class HeldBytes(TorchDispatchMode):
    """Counts the bytes of all storages that operations take or make, for as long as these are there."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, Any] = {}
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        value = func(*args, **(kwargs or {}))
        for tensor in tensors_in((args, kwargs, value)):
            if type(tensor) not in (Tensor, nn.Parameter):
                continue  # it holds plain ones, which come here too
            storage = tensor.untyped_storage()
            self.storages[storage._cdata] = weakref.ref(storage)
        alive = {key: storage for key, reference in self.storages.items() if (storage := reference()) is not None}
        self.storages = {key: self.storages[key] for key in alive}
        self.most = max(self.most, sum(storage.nbytes() for storage in alive.values()))
        return value


class Block(nn.Module):
    """A layer whose weight is almost all that it has."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, value: Tensor) -> Tensor:
        return value + torch.tanh(self.layer(value))


class Pair(nn.Module):
    """Two layers, of whose weights two ranks of tp have half."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.back = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))

    def forward(self, value: Tensor) -> Tensor:
        return value + self.back(torch.tanh(self.wide(value)))


def held(shape: tuple[int, ...], rows: tuple[int, ...], options: dict[str, Any]) -> tuple[int, list[str]]:
    """Return the most bytes that a step holds, and what it logs beside its actions; called in every process.

    Of four steps the least: threads of gloo let go of what they have sent when they come to it.
    """
    torch.manual_seed(0)
    mesh = mesh_of(*shape)
    model = nn.Sequential(*(Pair() if shape[3:] == (2,) else Block() for _ in range(BLOCKS)))
    x = torch.randn(max(rows), WIDTH)
    pipe = autosplit(model, mesh=mesh, chunks=CHUNKS, sample=x, parallelize="fsdp", **options)
    rows_here = x[: rows[replica_of(mesh)]]
    for _ in range(2):
        pipe.train_step(rows_here, target=rows_here, loss_fn=F.mse_loss)
        pipe.zero_grad()
    peaks = []
    for _ in range(4):
        with HeldBytes() as bytes_held:
            pipe.train_step(rows_here, target=rows_here, loss_fn=F.mse_loss)
        peaks.append(bytes_held.most)
        pipe.zero_grad()
    log = StepLog()
    pipe._train_step((rows_here,), {}, rows_here, F.mse_loss, "auto", log)
    return min(peaks), [str(event.entry) for event in log.events if isinstance(event, Performed)]


@pytest.mark.parametrize("recompute", ["never", "block", "always"])
@pytest.mark.parametrize(
    ("shape", "rows"),
    [((1, 2, 1, 1), (4, 3)), ((1, 2, 2, 1), (4, 3)), ((1, 4, 1, 1), (4, 1, 0, 3)), ((1, 2, 1, 2), (4, 3))],
    ids=["dp2", "dp2 x pp2", "dp4", "dp2 x tp2"],
)
def test_a_rank_has_its_shards_and_two_units(ranks: Pool, shape: Any, rows: Any, recompute: str) -> None:
    """Blocks that ranks of tp share are twice as large, so that a rank has as much of one."""
    options = {"fsdp_reshard": "always", "schedule": "1f1b", "recompute": recompute}
    _, replicas, stages, columns = shape
    reports = ranks(math.prod(shape)).run(held, shape, rows, options)
    shards = 2 * BLOCKS // stages * UNIT_BYTES / replicas  # of parameters and gradients
    for peak, _ in reports:
        assert shards + UNIT_BYTES <= peak <= 1.03 * (shards + 4 * UNIT_BYTES)
    for rank in range(stages):
        gathers = [entry for entry in reports[rank * columns][1] if "SHARD" in entry]
        assert gathers == [f"{rank}UNSHARD", f"{rank}RESHARD"] * 2 * CHUNKS


@pytest.mark.parametrize("reshard", ["never", "always"])
def test_a_plan_knows_what_ranks_of_dp_and_tp_hold(ranks: Pool, reshard: str) -> None:
    options: dict[str, Any] = {"fsdp_reshard": reshard, "schedule": "1f1b", "recompute": "never"}
    model = nn.Sequential(*(Pair() for _ in range(BLOCKS)))
    sample = torch.zeros(8, WIDTH)
    asked = {"mesh": {"dp": 2, "tp": 2}, "zero": 3, "chunks": CHUNKS, "optimizer": "none", "loss_fn": F.mse_loss}
    planned = plan(model, "4xcpu-lane", sample=sample, **asked, **options)
    assert str(planned.mesh) == "dp=2, tp=2, pp=1, ZeRO-3" + " by blocks" * (reshard == "always")
    for peak, _ in ranks(4).run(held, (1, 2, 1, 2), (4, 4), options):
        assert 0.98 * peak < planned.stages[0].memory.peak_bytes < 1.15 * peak


def refused() -> list[str]:
    """Return what was not refused as it is to be; called in every process."""
    x = torch.randn(4, WIDTH)
    model = nn.Sequential(*(Block() for _ in range(4)))

    cases = {
        "is for parallelize='fsdp'": {"parallelize": None},
        "leave compile= out": {"compile": True},
        "fsdp_reshard": {"fsdp_reshard": "sometimes"},
    }
    how: dict[str, Any] = {"mesh": mesh_of(2, 1), "sample": x, "parallelize": "fsdp", "fsdp_reshard": "always"}
    return [f"{t}: {said}" for t, o in cases.items() if t not in (said := error_of(autosplit, model, **how | o))]


def test_what_cannot_be_gathered_unit_by_unit_is_refused(ranks: Pool) -> None:
    assert ranks(2).run(refused) == [[]] * 2


class Scaled(nn.Module):
    """Layers with a gain that is computed once per step."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.gains = nn.ParameterList(torch.randn(8) for _ in range(4))

    def forward(self, value: Tensor) -> Tensor:
        for layer, gain in zip(self.layers, self.gains, strict=True):
            value = torch.tanh(layer(value)) * (1 + gain)
        return value


def differences() -> list[float]:
    """Return by how much shards' gradients differ from the plain model's while layers freeze and thaw."""
    torch.manual_seed(0)
    mesh = mesh_of(2, 1)
    plain, model, x = Scaled().double(), Scaled().double(), torch.randn(8, 8, dtype=torch.float64)
    model.load_state_dict(plain.state_dict())
    pipe = autosplit(model, mesh=mesh, chunks=2, sample=x, parallelize="fsdp", fsdp_reshard="always")
    most = []
    for trained in (True, False, True):
        for either in (plain, model):
            either.layers[1].requires_grad_(trained)
            either.zero_grad()
        F.mse_loss(plain(x), x).backward()
        rows = x.split(4)[replica_of(mesh)]
        pipe.train_step(rows, target=rows, loss_fn=F.mse_loss)
        gradients = {name: parameter.grad for name, parameter in pipe.named_parameters()}
        assert {name for name, gradient in gradients.items() if gradient is None} == {
            name for name, parameter in plain.named_parameters() if not parameter.requires_grad
        }
        pairs = [(gradients[name], p.grad) for name, p in plain.named_parameters() if p.grad is not None]
        most.append(max(float((ours.full_tensor() - theirs).abs().max()) for ours, theirs in pairs))  # type: ignore[union-attr]
    return most


def test_layers_freeze_and_values_of_the_whole_step_are_made_of_parameters(ranks: Pool) -> None:
    for most in ranks(2).run(differences):
        assert max(most) < 1e-14
