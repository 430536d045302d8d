"""What ranks that share tensors give, keep and refuse."""

from __future__ import annotations

import copy
import io
import math
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from autosplit import autosplit, initialise
from autosplit.distributed import checkpoint
from autosplit.distributed.ranks import agreement
from tests.distributed.models import WIDTH, GroupedGPT, mlp, tokens
from tests.distributed.processes import Pool, error_of
from tests.distributed.replicas import compare, mesh_of, whole

_error = partial(error_of, meet=True)

ONE = [[8], [5], [8]]


class Mixed(nn.Module):
    """A convolution over groups, which stays whole, behind layers that are sharded."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.groups = nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH)

    def forward(self, value: Tensor) -> Tensor:
        return self.groups(self.second(torch.relu(self.first(value))).transpose(1, 2))


class Centred(nn.Module):
    """Layers whose outputs are centred over the batch, so that a loss is one of the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp()

    def forward(self, x: Tensor) -> Tensor:
        y = self.layers(x)
        return y - y.mean(0)


class Counting(nn.Module):
    """Counts its calls in Python, all of them or those in eval mode."""

    def __init__(self, *, training: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.calls, self.counted = 0, training

    def forward(self, value: Tensor) -> Tensor:
        if self.counted or not self.training:
            self.calls += 1
        return self.second(torch.relu(self.first(value)))


def _split(model: nn.Module, *sample: Tensor, shards: bool = False, **how: Any) -> Any:
    """Return a pipe over tp, or over dp and tp, whose replicas share out what ranks have."""
    mesh = mesh_of(1, 2, 1, 2) if shards else init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    return autosplit(model, mesh=mesh, chunks=2, sample=sample, parallelize="fsdp" if shards else None, **how)


def _values(*shape: int) -> Tensor:
    return torch.randn(*shape, WIDTH, generator=torch.Generator().manual_seed(1))


# -- what they give ----------------------------------------------------------------------------------------------------
def outputs() -> list[bool]:
    """Call the pipe, also with other numbers of rows, and in a mode of its own."""
    sample, plain = tokens(4).args[0], GroupedGPT().eval()
    pipe = _split(GroupedGPT(), sample)
    found = [torch.allclose(pipe.eval_step(given), plain(given), atol=1e-6) for given in (sample, tokens(7).args[0])]
    return [*found, torch.allclose(pipe.eval()(sample[:, :4]), plain(sample[:, :4]), atol=1e-6)]


def kept_whole() -> list[bool]:
    """Ask what was sharded, and what was not."""
    model = Mixed()
    pipe = _split(model, _values(4, 3))
    report, state = pipe.report(), pipe.state_dict()
    found = ["whole on all 2 ranks of tp: groups.weight: " in report, "first.weight: " not in report]
    found.append(list(state["first.weight"].shape) == [16, WIDTH])
    return [*found, all(p is q for p, q in zip(pipe.parameters(), model.parameters(), strict=True))]


def states(*, shards: bool = False) -> list[bool]:
    """Bring states there and back, and take the model back."""
    plain = GroupedGPT()
    model = copy.deepcopy(plain)
    pipe = _split(model, tokens(4).args[0], shards=shards)
    torch.save(pipe.state_dict(), data := io.BytesIO())
    data.seek(0)
    own = copy.deepcopy(pipe.state_dict())
    other = {name: value + 1 for name, value in plain.state_dict().items()}
    pipe.load_state_dict(other)
    found = [all(torch.equal(value, other[name]) for name, value in whole(pipe.state_dict()).items())]
    for back in (torch.load(data), own, plain.state_dict()):
        pipe.load_state_dict(other)
        pipe.load_state_dict(back)
        found.append(all(torch.equal(v, plain.state_dict()[name]) for name, v in whole(pipe.state_dict()).items()))
    pipe.load_state_dict(other, assign=not shards)
    restored = pipe.unsplit().state_dict()
    return [*found, all(torch.equal(value, other[name]) for name, value in restored.items())]


def on_meta(*, shards: bool = False) -> list[bool]:
    """Give a model on meta its values, of which a rank keeps its part."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, WIDTH))
    right = initialise(copy.deepcopy(model), seed=3)
    torch.manual_seed(3)
    found = []
    for weights in (None, {name: value + 1 for name, value in right.state_dict().items()}):
        pipe = _split(copy.deepcopy(model), torch.empty(4, WIDTH, device="meta"), weights=weights, shards=shards)
        expected = weights or right.state_dict()
        found.append(all(torch.equal(v, expected[name]) for name, v in whole(pipe.state_dict()).items()))
        found.append(all(p.numel() < 32 * WIDTH for p in pipe.parameters()))
    return found


def saved(folder: str, shards: bool) -> list[bool]:
    """Write whole files, and read them into parts."""
    plain = GroupedGPT()
    pipe = _split(GroupedGPT(), tokens(4).args[0], shards=shards)
    checkpoint.save_weights(f"{folder}/whole", pipe)
    other = GroupedGPT()
    for parameter in other.parameters():
        parameter.data.zero_()
    pipe = _split(other, tokens(4).args[0], shards=shards)
    checkpoint.load_weights(f"{folder}/whole", pipe)
    found = [all(torch.equal(v, plain.state_dict()[name]) for name, v in whole(pipe.state_dict()).items())]
    checkpoint.load_weights(f"{folder}/whole", other := GroupedGPT())
    return [*found, all(torch.equal(v, plain.state_dict()[name]) for name, v in other.state_dict().items())]


def in_parts() -> list[bool]:
    """Train layers between which ranks share positions: compiled, with weights' gradients made later, and again."""
    blocks = [(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH)) for _ in range(2)]
    plain, values, found = nn.Sequential(*(layer for block in blocks for layer in block)), _values(4, 6), []
    expected = F.mse_loss(plain(values), values)
    expected.backward()
    ways: list[dict[str, Any]] = [{"compile": {"backend": "aot_eager"}}, {"schedule": "zb_h1"}, {"recompute": "always"}]
    for how in ways:
        model = copy.deepcopy(plain)
        model.zero_grad()
        pipe = _split(model, values, **how)
        loss = pipe.train_step(values, target=values, loss_fn=F.mse_loss)
        found += [torch.allclose(loss, expected), "not compiled" not in pipe.report()]
        pipe.unsplit()
        pairs = zip(model.parameters(), plain.parameters(), strict=True)
        found += [torch.allclose(one.grad, other.grad, atol=1e-6) for one, other in pairs]
    return found


def seeded() -> list[bool]:
    """Train with dropout by seeds, as a pipe of one process does."""
    blocks = [(nn.LayerNorm(WIDTH), nn.Dropout(), nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))] * 3
    model, values = nn.Sequential(*(copy.deepcopy(layer) for block in blocks for layer in block)), _values(4, 6)
    alone = autosplit(copy.deepcopy(model), ["cpu"], chunks=2, sample=values, rng="counter")
    pipe, losses = _split(model, values, rng="counter"), []
    for each in (alone, pipe):
        torch.manual_seed(4)
        losses.append(each.train_step(values, target=values, loss_fn=F.mse_loss))
    pipe.unsplit()
    pairs = zip(model.parameters(), alone.parameters(), strict=True)
    return [torch.allclose(*losses), *(torch.allclose(one.grad, other.grad, atol=1e-6) for one, other in pairs)]


@pytest.mark.parametrize("call", [outputs, kept_whole, states, on_meta, in_parts, seeded])
def test_two_ranks(ranks: Pool, call: Callable[[], list[bool]]) -> None:
    for found in ranks(2).run(call):
        assert all(found), found


@pytest.mark.parametrize("call", [states, on_meta])
def test_replicas_that_share_out_parts(ranks: Pool, call: Callable[..., list[bool]]) -> None:
    for found in ranks(4).run(call, shards=True):
        assert all(found), found


@pytest.mark.parametrize("shards", [False, True])
def test_whole_files(ranks: Pool, tmp_path: Any, shards: bool) -> None:
    for found in ranks(4 if shards else 2).run(saved, str(tmp_path), shards):
        assert all(found), found


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("grouped gpt", {"recompute": "always", "every": 2}),
        ("mlp", {"schedule": "zb_h1"}),
        ("dropout", {}),
        ("own loss", {}),
        ("recurrent", {}),
        ("tied gpt of changing length", {}),
    ],
)
def test_ways_to_train(ranks: Pool, name: str, options: dict[str, Any]) -> None:
    assert ranks(2).run(compare, name, (1, 1, 1, 2), ONE, **options)[0] == []


# -- rows and gradients ------------------------------------------------------------------------------------------------
class Embedded(nn.Module):
    """An embedding with sparse gradients, and a pair of matrices."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(12, WIDTH, sparse=True)
        self.wide, self.head = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, 12)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.relu(self.wide(self.tokens(ids))))


def gathered() -> list[bool]:
    """Take a first step in which one replica has no rows, then give sparse gradients back whole."""
    mesh = mesh_of(1, 2, 1, 2)
    model, ids, expected = Embedded(), torch.arange(8).view(4, 2), Embedded()
    pipe = autosplit(model, mesh=mesh, chunks=2, sample=ids)
    own = ids[:1] if mesh.get_local_rank("dp_shard") else ids[:0]
    loss = pipe.train_step(own, target=torch.zeros(len(own), 2, 12), loss_fn=F.mse_loss)
    plain = F.mse_loss(expected(ids[:1]), torch.zeros(1, 2, 12))
    plain.backward()
    pipe.unsplit()
    pairs = list(zip(model.parameters(), expected.parameters(), strict=True))
    same = [torch.allclose(one.grad.to_dense(), other.grad.to_dense()) for one, other in pairs]
    return [torch.allclose(loss, plain), model.tokens.weight.grad.is_sparse, *same]


def test_a_replica_without_rows_and_sparse_gradients(ranks: Pool) -> None:
    for found in ranks(4).run(gathered):
        assert all(found), found


# -- copies ----------------------------------------------------------------------------------------------------------
def changed_alone(folder: str, shape: tuple[int, ...], parallelize: str | None) -> list[str]:
    """Change a parameter on one rank, and take the steps that compare it; then undo that."""
    agreement._EVERY = 1
    model, rank = mlp(), dist.get_rank()
    pipe = autosplit(model, mesh=mesh_of(*shape), chunks=2, sample=_values(4), parallelize=parallelize)
    target = torch.zeros(4, WIDTH)

    def step() -> None:
        pipe.zero_grad()
        pipe.train_step(_values(4), target=target, loss_fn=F.mse_loss)

    def change(by: float) -> None:
        if rank == dist.get_world_size() - 1:
            with torch.no_grad():
                list(pipe.parameters())[-1].add_(by)

    asked: list[Callable[[], Any]] = [
        step,
        step,
        lambda: checkpoint.save(folder, 1, pipe),
        lambda: checkpoint.save_weights(f"{folder}/whole", pipe),
        pipe.unsplit,
    ]
    found = []
    for number, ask in enumerate(asked):
        change(2.0**-10)
        found.append(_error(ask))
        change(-(2.0**-10))
        if number < 2:
            found.append(_error(step))
    agreement._EVERY = 100
    return found


@pytest.mark.parametrize(
    ("shape", "parallelize"),
    [((2, 2), None), ((1, 1, 1, 2), None), ((1, 2, 1, 2), None), ((1, 2, 1, 2), "fsdp")],
    ids=["dp x pp", "tp", "dp x tp", "fsdp x tp"],
)
def test_a_parameter_that_one_rank_has_changed_is_named(
    ranks: Pool, tmp_path: Path, shape: tuple[int, ...], parallelize: str | None
) -> None:
    for first, step, later, again, save, files, unsplit in ranks(math.prod(shape)).run(
        changed_alone, str(tmp_path), shape, parallelize
    ):
        for text in (first, later, files, unsplit):
            assert re.search(r"ranks \d and \d hold copies of '.*(weight|bias)'.*, and their values differ", text), text
        assert re.search(r"ranks \[.*\] save different values under one key: model.*(weight|bias)", save), save
        assert step == again == "nothing was raised"


# -- what they refuse --------------------------------------------------------------------------------------------------
def refused() -> list[str]:
    """Ask for what cannot be."""
    values, rank = _values(4), dist.get_rank()
    three, wide = nn.Sequential(nn.Linear(WIDTH, 3), nn.ReLU(), nn.Linear(3, 5)), nn.Sequential(nn.Linear(7, 5))
    held, counting, hooked = mlp(), Counting(), mlp()
    evaluated = _split(Counting(training=False), values)
    hooked[0].weight.register_hook(lambda gradient: gradient / gradient.norm())
    pipe = _split(held, values)
    step = partial(pipe.train_step, loss_fn=F.mse_loss)
    centring = Centred()
    centred = _split(centring, values)
    makes = [
        lambda: _split(three, values),
        lambda: _split(wide, values[:, :7]),
        lambda: _split(counting, values),
        lambda: _split(mlp(), values, feed="first_last"),
        lambda: _split(held, values),
        lambda: autosplit(held, ["cpu"] * 2, sample=values),
        lambda: step(values + rank, target=values),
        lambda: step(values, target=values + rank),
        lambda: _split(hooked, values),
        lambda: centred.train_step(
            values, target=values, loss_fn=lambda y, t: F.mse_loss(y, t) + centring.layers[0].weight.norm()
        ),
        lambda: evaluated.eval_step(values),
    ]
    found = [_error(make) for make in makes]
    pipe.unsplit()
    restored = torch.equal(counting.first.weight, Counting().first.weight)
    return [*found, _error(lambda: _split(held, values)), str(restored)]


def test_what_cannot_be_is_refused_on_all_ranks(ranks: Pool) -> None:
    for found in ranks(2).run(refused):
        three, wide, counting, feed, again, alone, batch, target, hooked, penalty, evaluated, *rest = found
        after, restored = rest
        assert "tp=2 does not divide 3" in three
        assert "InputError: tp=2 shards no parameter" in wide
        assert "calls change Python state" in counting
        assert restored == "True"
        assert "feed='first_last'" in feed
        assert "call unsplit() of that pipe first" in again
        assert "call unsplit() of that pipe first" in alone
        assert "the batch's values" in batch
        assert "the target" in target
        assert "'0.weight' has a hook on its gradient" in hooked
        assert "the loss reads the parameter 'layers.0.weight', which another rank holds, or a part of it" in penalty
        assert "calls change Python state" in evaluated
        assert after == "nothing was raised"
