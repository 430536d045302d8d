"""What replicas of a pipeline do beside equal steps: outputs, norms, hooks, checkpoints, and what they refuse."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from autosplit import autosplit
from autosplit.distributed import checkpoint
from autosplit.distributed.replicas import Reductions, adding_gradients
from autosplit.distributed.world import World
from tests.distributed.models import TRAININGS, WIDTH, Dropping, MixesRows, Pictures, Relative, mlp, pictures
from tests.distributed.processes import Pool, error_of
from tests.distributed.replicas import mesh_of
from tests.distributed.training import without_gradients

_error = partial(error_of, meet=True)


def _split(model: nn.Module, sample: Any, **how: Any) -> tuple[Any, int]:
    mesh = mesh_of(2, 2)
    return autosplit(model, mesh=mesh, chunks=2, sample=sample, **how), mesh.get_local_rank("dp")


def _values(rows: int, seed: int = 1) -> Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed))


# -- what they give ----------------------------------------------------------------------------------------------------
def outputs() -> list[bool]:
    """Call replicas with rows of their own, one of them with none."""
    model, found = mlp(), []
    pipe, replica = _split(model, _values(4))
    last = dist.get_rank() % 2 == 1
    for rows in ([4, 3], [2, 0]):
        values = _values(sum(rows)).split(rows)[replica]
        output = pipe.eval_step(values)
        found.append(torch.allclose(output, mlp()(values)) if last else output is None)
        loss = pipe.train_step(values, target=torch.zeros_like(values), loss_fn=F.mse_loss)
        found.append(torch.allclose(loss, mlp()(_values(sum(rows))).square().mean()))
    return found


def norms() -> tuple[dict[str, Tensor], int]:
    """Train one step of a model with batch norms; return the buffers, and the replica."""
    pipe, replica = _split(Pictures(), pictures(4).args)
    rows = [5, 3]
    for rows in ([5, 3], [0, 6]):
        (batch,) = pictures(sum(rows)).args
        own, labels = batch.split(rows)[replica], (torch.arange(sum(rows)) % 5).split(rows)[replica]
        pipe.train_step(own, target=labels, loss_fn=F.cross_entropy)
        pipe(own)
    return dict(pipe.named_buffers()), replica


def hooked() -> list[Any]:
    """Return how often hooks of parameters ran, and whether they saw the whole gradient."""
    pipe, replica = _split(mlp(), _values(4))
    expected = mlp()
    F.mse_loss(expected(_values(8)), torch.zeros(8, WIDTH)).backward()
    seen: list[bool] = []

    def hook(name: str, gradient: Tensor | None) -> None:
        seen.append(torch.allclose(gradient, expected.get_parameter(name).grad))

    for name, parameter in pipe.named_parameters():
        parameter.register_hook(lambda gradient, name=name: hook(name, gradient))
        parameter.register_post_accumulate_grad_hook(lambda own, name=name: hook(name, own.grad))
    values = _values(8).split([5, 3])[replica]
    pipe.train_step(values, target=torch.zeros_like(values), loss_fn=F.mse_loss)
    return [len(seen) == 2 * len(list(pipe.parameters())), all(seen)]


def by_counter() -> list[bool]:
    """Compare replicas of two microbatches with one process of four, whose random numbers are by counter."""
    pipe, replica = _split(Dropping(), _values(4), rng="counter")
    given = {"loss_fn": F.mse_loss}
    torch.manual_seed(3)
    loss = pipe.train_step(_values(8)[4 * replica :][:4], target=torch.zeros(4, WIDTH), **given)
    one = autosplit(Dropping(), devices=["cpu"] * 2, chunks=4, sample=_values(8), rng="counter")
    torch.manual_seed(3)
    expected = one.train_step(_values(8), target=torch.zeros(8, WIDTH), **given)
    return [torch.allclose(loss, expected)]


def fed() -> list[bool]:
    """Give the first rank of each replica the inputs, the last one the target."""
    pipe, replica = _split(mlp(), _values(4), feed="first_last")
    values = _values(8).split([5, 3])[replica]
    inputs = (values,) if dist.get_rank() % 2 == 0 else ()
    given = {"target": torch.zeros_like(values), "loss_fn": F.mse_loss} if dist.get_rank() % 2 else {}
    expected = mlp()(_values(8)).square().mean()
    return [torch.allclose(pipe.train_step(*inputs, **given), expected)]


def kinds_apart() -> list[bool]:
    """Call replicas with batches of other lengths, which each records when it comes to it."""
    pipe, replica = _split(Relative(), torch.randn(4, 6, WIDTH))
    found = []
    for lengths in ([6, 6], [6, 7], [8, 6], [8, 9]):
        parts = [torch.randn(4, n, WIDTH, generator=torch.Generator().manual_seed(n)) for n in lengths]
        loss = pipe.train_step(parts[replica], loss_fn=lambda output: output.square().mean(), loss_reduction="mean")
        expected = sum(Relative()(part).square().mean() for part in parts) / 2
        found.append(torch.allclose(loss, expected))
    return found


def saved(folder: str) -> bool:
    """Save after a step, train on, and restore."""
    pipe, replica = _split(mlp(), _values(4))
    optimizer = torch.optim.AdamW(pipe.parameters())
    values = _values(8).split([5, 3])[replica]

    def step() -> None:
        pipe.zero_grad()
        pipe.train_step(values, target=torch.zeros_like(values), loss_fn=F.mse_loss)
        optimizer.step()

    step()
    checkpoint.save(folder, 1, pipe, optimizer)
    before = {name: value.clone() for name, value in pipe.state_dict().items()}
    step()
    checkpoint.restore(folder, pipe, optimizer)
    return all(torch.equal(value, before[name]) for name, value in pipe.state_dict().items())


@pytest.mark.parametrize("call", [outputs, hooked, by_counter, fed, kinds_apart], ids=lambda call: call.__name__)
def test_replicas(ranks: Pool, call: Callable[[], list[bool]]) -> None:
    found = ranks(4).run(call)
    assert all(all(own) for own in found), found


def test_running_statistics_are_those_of_all_rows(ranks: Pool) -> None:
    """What the first norm sees is what the plain model's sees; all replicas have the same."""
    found = ranks(4).run(norms)
    plain = Pictures()
    for rows in (8, 6):
        for _ in range(2):
            plain(pictures(rows).args[0])
    for buffers, _ in found:
        for name, value in buffers.items():
            if name.startswith("layers.0.") or "batches" in name:
                assert torch.allclose(value, plain.get_buffer(name), rtol=1e-5), name
    assert all(
        torch.equal(value, found[2 + rank][0][name]) for rank in (0, 1) for name, value in found[rank][0].items()
    )
    assert found[0][0].keys() | found[1][0].keys() == dict(plain.named_buffers()).keys()


def test_a_checkpoint_of_replicas(ranks: Pool, tmp_path: Path) -> None:
    assert all(ranks(4).run(saved, str(tmp_path)))
    model = mlp()
    checkpoint.restore(tmp_path, model, torch.optim.AdamW(model.parameters()))


class _Averaged(nn.Module):
    """Returns a mean over the elements of rows of any length."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))

    def forward(self, value: Tensor) -> Tensor:
        return F.mse_loss(self.layers(value), value)


class _Scaled(_Averaged):
    """Divides its loss by the number of labels that count."""

    def forward(self, value: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.layers(value), labels, ignore_index=0, reduction="sum") / (labels != 0).sum()


class _Counting(_Averaged):
    """Changes a buffer once per call."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, value: Tensor) -> Tensor:
        self.count += 1
        return self.layers(value) * self.count


class _Alone:
    """The only replica: what it adds up stays as it is."""

    def begin_to_add(self, tensor: Tensor) -> None:
        """Add nothing."""

    def wait_for(self, what: str, work: None) -> None:
        """Wait for nobody."""


def test_sums_of_gradients_lie_in_buckets() -> None:
    """Every parameter gets its sum where it was made; the replica's own gradients are gone by then."""
    leaves = [torch.nn.Parameter(torch.zeros(2048, 1024 + n)) for n in range(5)]
    world, gone = cast(World, _Alone()), []
    with adding_gradients(Reductions(world), leaves, leaves, dict, again=False):
        for leaf in leaves:
            leaf.grad = torch.ones_like(leaf)
            gone.append(weakref.ref(leaf.grad))
    sums = [leaf.grad for leaf in leaves if leaf.grad is not None]
    assert len({own.untyped_storage().data_ptr() for own in sums}) == 2
    assert [own() for own in gone] == [None] * 5
    for leaf, own in zip(leaves, sums, strict=True):
        own.detach_()
        assert torch.equal(own, torch.ones_like(leaf))


def test_a_gradient_behind_a_sum_that_has_begun_is_an_error_unless_it_was_announced() -> None:
    world, leaf = cast(World, _Alone()), torch.nn.Parameter(torch.zeros(3))

    def add(*, again: bool) -> None:
        reductions = Reductions(world)
        reductions.begin([leaf], [torch.ones(3)])
        with adding_gradients(reductions, [leaf], [leaf], dict, again=again):
            leaf.grad = torch.full((3,), 2.0)

    with pytest.raises(RuntimeError, match="when its sum had begun"):
        add(again=False)
    assert leaf.grad is None
    add(again=True)
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [3.0] * 3


# -- what they refuse --------------------------------------------------------------------------------------------------


def calls() -> list[str]:
    """Let replicas differ in what they have to agree in, or need the whole batch."""
    replica, rank = dist.get_rank() // 2, dist.get_rank()

    def seed() -> None:
        torch.manual_seed(replica)
        _split(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), _values(4))

    pipe, _ = _split(Dropping(), _values(4))
    mixing, _ = _split(MixesRows(), _values(4))
    balanced = TRAININGS["experts of one layer"]
    sample = without_gradients(balanced.batch(4)).args
    experts, _ = _split(balanced.make(), sample)

    labels = torch.arange(4) % 5
    scaled, _ = _split(_Scaled(), (_values(4), labels))

    def step(values: Tensor, loss: Any = F.mse_loss, **how: Any) -> Any:
        return pipe.train_step(values, target=torch.zeros_like(values), loss_fn=loss, **how)

    def failing(output: Tensor, target: Tensor) -> Tensor:
        if dist.get_rank() > 1:
            raise ValueError("no loss of replica 1")
        return F.mse_loss(output, target)

    def drawn() -> None:
        torch.manual_seed(replica)
        step(_values(4))

    asked: list[Callable[[], Any]] = [
        seed,
        drawn,
        lambda: step(_values(4, seed=rank)),
        lambda: step(_values(0)),
        lambda: step(_values(4), failing),
        lambda: step(_values(4), lambda output, target: (output - target).square().mean().sqrt()),
        lambda: pipe.eval_step(_values(4)) if replica else step(_values(4)),
        lambda: mixing(_values(4)),
        lambda: mixing.train_step(_values(4), loss_fn=lambda output: output[0].square().mean()),
        lambda: experts.train_step(*sample),
        lambda: scaled.train_step(_values(4), labels),
    ]
    found = []
    for ask in asked:
        torch.manual_seed(7)
        found.append(_error(ask))
    torch.manual_seed(7)
    return [*found, _error(lambda: step(_values(4)))]


def silent() -> list[str]:
    """Ask for what each replica by itself takes to be right."""
    replica = dist.get_rank() // 2
    plain = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, size)) for size in (WIDTH, 1)]
    mesh = mesh_of(2, 2)
    pipe, column = (autosplit(model, mesh=mesh, chunks=1, sample=_values(4)) for model in plain)
    counting, _ = _split(_Counting(), _values(4))
    lengths = [torch.randn(4, length, WIDTH, generator=torch.Generator().manual_seed(1)) for length in (6, 9)]
    averaged, _ = _split(_Averaged(), lengths[0])
    values, target = _values(4), torch.zeros(4, WIDTH)

    def masked(output: Tensor, mask: Tensor) -> Tensor:
        return (output.square().mean(1) * mask).sum() / mask.sum()

    ends, _ = _split(mlp(), values, feed="first_last")
    fed = partial(ends.train_step, *([] if dist.get_rank() % 2 else [values]), target=target)

    def step(loss: Any, pipe: Any = pipe, target: Any = target, values: Any = values) -> Any:
        return pipe.train_step(values, target=target, loss_fn=loss)

    asked: list[Callable[[], Any]] = [
        lambda: step(masked, target=torch.full((4,), 1.0 + replica)),
        lambda: step(F.mse_loss, column, torch.zeros(4)),
        lambda: step(F.l1_loss if replica else F.mse_loss),
        lambda: step(nn.MSELoss(reduction="sum" if replica else "mean")),
        lambda: fed(loss_fn=partial(F.huber_loss, delta=1.0 + 2 * replica)),
        lambda: step(F.mse_loss, counting, torch.zeros(4 * (1 - replica), WIDTH), _values(4 * (1 - replica))),
        lambda: averaged.train_step(lengths[replica]),
        lambda: step(F.mse_loss),
    ]
    return [_error(ask) for ask in asked]


def test_what_each_replica_by_itself_takes_to_be_right_is_refused(ranks: Pool) -> None:
    for masked, column, other, reduction, fed, counting, averaged, right in ranks(4).run(silent):
        assert "say loss_reduction='mean' or 'sum'" in masked
        assert "needs the whole batch" in column
        assert "the ranks differ in the loss" in other
        assert "loss_fn.reduction = 'mean', rank 2 has loss_fn.reduction = 'sum'" in reduction
        assert "loss_fn['delta'] = 1.0, rank 3 has loss_fn['delta'] = 3.0" in fed
        assert "replica 1 has no rows, and every call changes count" in counting
        assert "different losses: the model's own, a mean over elements" in averaged
        assert right == "nothing was raised"


def test_what_replicas_differ_in_or_need_whole_is_refused_on_all_ranks(ranks: Pool) -> None:
    every = ranks(4).run(calls)
    for seed, drawn, batch, empty, failing, root, calling, mixing, training, balanced, divided, right in every:
        assert "the values of their models" in seed
        assert "torch's random state" in drawn
        assert "the batch's values" in batch
        assert "no replica has any rows" in empty
        assert "no loss of replica 1" in failing
        assert "neither a mean nor a sum" in root
        assert "the ranks differ in the kind of call" in calling or "make different calls" in calling
        assert "mixes the rows" in mixing
        assert "needs the whole batch" in training
        assert "needs the whole batch" in balanced
        assert "scales its loss by" in divided
        assert right == "nothing was raised"
