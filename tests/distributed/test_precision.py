"""Sums in float32 of bf16 gradients, and FSDP2's MixedPrecisionPolicy: the numbers of torch, written out or its own."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from autosplit import autosplit
from autosplit.errors import AutosplitError
from tests.distributed.processes import Pool, error_of
from tests.distributed.replicas import mesh_of, replica_of

WIDTH, CHUNKS, ROWS = 16, 3, 6
BF16 = torch.bfloat16


class Block(nn.Module):
    """A layer with a buffer, which stays in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("gain", torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, value: Tensor, shift: Tensor) -> Tensor:
        return value + torch.tanh(self.layer(self.norm(value)) + shift) * self.gain.to(value.dtype)


class Net(nn.Module):
    """Blocks that take an fp32 value too, between layers of one weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("shift", torch.linspace(-1, 1, WIDTH))

    def forward(self, value: Tensor) -> Tensor:
        value = self.first(value)
        for block in self.blocks:
            value = block(value, self.shift)
        return self.last(value.to(self.last.weight.dtype)) * self.scale


class Tied(Net):
    def __init__(self) -> None:
        super().__init__()
        self.last.weight = self.first.weight


def squares(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output, target, reduction="sum")


def batch(step: int, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(step)
    return torch.randn(2, ROWS, WIDTH).to(dtype)


def microbatches(values: Tensor, replica: int) -> Iterator[Any]:
    """Yield inputs and targets of the microbatches of one of two replicas."""
    inputs, target = (value.chunk(2)[replica].tensor_split(CHUNKS) for value in values)
    return zip(inputs, target, strict=True)


def in_bf16(kind: type[Net]) -> Net:
    model = kind().to(BF16)
    model.scale.data = model.scale.data.float()
    return model


def summed(kind: type[Net], dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the gradients of both replicas' rows, of which each microbatch has its own, added up in a dtype."""
    model, totals = in_bf16(kind), dict[str, Tensor]()
    for replica in range(2):
        sums = dict[str, Tensor]()
        for value, target in microbatches(batch(0, BF16), replica):
            squares(model(value), target).backward()
            for name, parameter in model.named_parameters():
                gradient = parameter.grad.to(dtype)
                sums[name] = sums[name] + gradient if name in sums else gradient
                parameter.grad = None
        totals = {name: totals[name] + total if totals else total for name, total in sums.items()}
    return {name: total.to(model.get_parameter(name).dtype) for name, total in totals.items()}


def reduced(kind: type[Net], shape: tuple[int, ...], options: dict[str, Any]) -> list[tuple[str, float, bool]]:
    """Return how far gradients are from sums in float32, and whether they are those bits; called in every process."""
    mesh = mesh_of(*shape)
    values, replica = batch(0, BF16).chunk(2, 1), replica_of(mesh)
    pipe = autosplit(in_bf16(kind), mesh=mesh, chunks=CHUNKS, sample=values[0][0], **options)
    for _ in range(2):
        pipe.zero_grad()
        pipe.train_step(values[replica][0], target=values[replica][1], loss_fn=squares)
    expected, found = summed(kind, torch.float32), []
    for name, parameter in pipe.named_parameters():
        gradient = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
        assert gradient.dtype == parameter.dtype
        error = (gradient - expected[name]).float().norm() / expected[name].float().norm()
        found.append((name, error.item(), torch.equal(gradient, expected[name])))
    return found


HOW: dict[str, dict[str, Any]] = {
    "dp": {},
    "dp, split backwards": {"schedule": "zb_h1"},
    "fsdp": {"parallelize": "fsdp"},
    "fsdp by units": {"parallelize": "fsdp", "fsdp_reshard": "always"},
}


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("shape", [(2, 1), (2, 2)], ids=["dp2", "dp2 x pp2"])
def test_gradients_are_added_up_in_float32(ranks: Pool, shape: tuple[int, ...], how: str) -> None:
    options = {"reduce_dtype": torch.float32, "batch_dims": 0, **HOW[how]}
    for found in ranks(shape[0] * shape[1]).run(reduced, Net, shape, options):
        wrong = [(name, error) for name, error, same in found if not (same or ("units" in how and error < 4e-3))]
        assert wrong == []


def test_sums_of_a_tied_parameter_are_in_float32_too(ranks: Pool) -> None:
    """Its uses lie on two ranks, which add what they have in bf16."""
    for found in ranks(4).run(reduced, Tied, (2, 2), {"reduce_dtype": torch.float32}):
        assert all(error < 4e-3 for _, error, _ in found)
    without = ranks(4).run(reduced, Net, (2, 2), {})
    assert not all(same for found in without for _, _, same in found)


# -- FSDP2's policy ----------------------------------------------------------------------------------------------------
POLICIES = {
    "sums in fp32": MixedPrecisionPolicy(BF16, torch.float32, torch.float32),
    "bf16 but for shards": MixedPrecisionPolicy(BF16),
    "inputs as they are": MixedPrecisionPolicy(BF16, torch.float32, cast_forward_inputs=False),
}


def torchs(mesh: Any, policy: MixedPrecisionPolicy) -> nn.Module:
    """Return the model as torch shards it."""
    model, dp = Net(), mesh["dp"]
    for block in model.blocks:
        fully_shard(block, mesh=dp, mp_policy=policy)
    fully_shard(model, mesh=dp, mp_policy=policy, ignored_params={model.scale})
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return model


def mixed(shape: tuple[int, ...], name: str, reshard: str) -> list[str]:
    """Return what differs from torch's training; called in every process."""
    mesh, policy, wrong = mesh_of(*shape), POLICIES[name], list[str]()
    replica, cast = replica_of(mesh), policy.cast_forward_inputs
    dtype = torch.float32 if cast else BF16
    plain, sample = torchs(mesh, policy), batch(0, dtype)[0].chunk(2)[0]
    model = Net()
    if not cast:
        for each in (plain, model):
            each.shift.data, each.scale.data = each.shift.data.to(BF16), each.scale.data.to(BF16)
    options: dict[str, Any] = {"parallelize": "fsdp", "fsdp_reshard": reshard, "mp_policy": policy}
    pipe = autosplit(model, mesh=mesh, chunks=CHUNKS, sample=sample, batch_dims=0, **options)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2, foreach=False) for each in (pipe, plain)]
    for step in range(3):
        values = batch(step, dtype)
        pairs = list(microbatches(values, replica))
        for number, (value, target) in enumerate(pairs):
            plain.set_requires_gradient_sync(reshard == "always" or number == len(pairs) - 1)
            output = plain(value)
            squares(output, target.to(output.dtype)).backward()
        torch.distributed.all_reduce(plain.scale.grad, group=mesh["dp"].get_group())
        own, target = (value.chunk(2)[replica] for value in values)
        pipe.train_step(own, target=target.to(output.dtype), loss_fn=squares)
        named = dict(plain.named_parameters())
        for key, parameter in pipe.named_parameters():
            ours, theirs = (getattr(p.grad, "_local_tensor", p.grad) for p in (parameter, named[key]))
            if ours.dtype != parameter.dtype or not torch.equal(ours, theirs):
                wrong.append(f"gradient of {key} in step {step}: {(ours - theirs).abs().max() / theirs.abs().max()}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    state = plain.state_dict()
    for key, value in pipe.state_dict().items():
        ours, theirs = (getattr(v, "_local_tensor", v) for v in (value, state[key]))
        if not torch.equal(ours, theirs) or (isinstance(value, DTensor) and ours.dtype is not torch.float32):
            wrong.append(f"{key} at the end")
    output = pipe.eval_step(sample)
    if output is not None and not torch.equal(output, plain.eval()(sample)):
        wrong.append("the output")
    return wrong


@pytest.mark.parametrize("reshard", ["never", "always"])
@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_means_what_it_means_for_fully_shard(ranks: Pool, name: str, reshard: str) -> None:
    assert ranks(2).run(mixed, (2, 1), name, reshard) == [[]] * 2


def test_a_policy_goes_with_stages(ranks: Pool) -> None:
    assert ranks(4).run(mixed, (2, 2), "sums in fp32", "always") == [[]] * 4


def shared() -> dict[str, float]:
    """Return how far a policy's gradients over dp and tp are from sums of bf16 ones; called in every process."""
    mesh, policy = mesh_of(1, 2, 1, 2), POLICIES["sums in fp32"]
    inputs, target = (value.chunk(2)[replica_of(mesh)] for value in batch(0))
    options: dict[str, Any] = {"parallelize": "fsdp", "fsdp_reshard": "always", "mp_policy": policy}
    pipe = autosplit(Net(), mesh=mesh, chunks=CHUNKS, sample=inputs, batch_dims=0, **options)
    pipe.train_step(inputs, target=target, loss_fn=squares)
    gradients = {name: parameter.grad for name, parameter in pipe.unsplit().named_parameters()}
    expected = summed(Net, torch.float32)
    assert {gradient.dtype for gradient in gradients.values()} == {torch.float32}
    return {n: ((gradients[n] - g.float()).norm() / g.float().norm()).item() for n, g in expected.items()}


def test_a_policy_goes_with_tp(ranks: Pool) -> None:
    """Ranks of tp add up halves of products, rounded to bf16."""
    for found in ranks(4).run(shared):
        assert all(error < 0.02 for error in found.values()), found


def refused() -> list[str]:
    """Return what was not refused as it is to be; called in every process."""
    policy = POLICIES["sums in fp32"]
    cases: dict[str, dict[str, Any]] = {
        "with parallelize=None": {"mp_policy": policy},
        "mp_policy='bf16'": {"mp_policy": "bf16", "parallelize": "fsdp"},
        "give mp_policy alone": {"mp_policy": policy, "parallelize": "fsdp", "reduce_dtype": torch.float32},
        "mp_policy.reduce_dtype=torch.float16": {
            "mp_policy": MixedPrecisionPolicy(BF16, torch.float16),
            "parallelize": "fsdp",
        },
        "valid: None, torch.float32": {"reduce_dtype": BF16},
    }
    how: dict[str, Any] = {"mesh": mesh_of(2, 1), "chunks": 2, "sample": batch(0)[0]}
    return [f"{t}: {said}" for t, o in cases.items() if t not in (said := error_of(autosplit, Net(), **how | o))]


def test_what_a_policy_cannot_be_is_refused(ranks: Pool) -> None:
    assert ranks(2).run(refused) == [[]] * 2


def test_one_process_has_no_replicas() -> None:
    with pytest.raises(AutosplitError, match=r"reduce_dtype=torch.float32 is for devices='torchrun'"):
        autosplit(deepcopy(Net()), devices=["cpu"], reduce_dtype=torch.float32)
