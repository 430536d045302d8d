"""Stages whose replicas are ranks: a training has the bits of the same replicas in one process."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autosplit import autosplit
from autosplit.distributed import checkpoint
from autosplit.errors import InputError
from tests.distributed.models import WIDTH, Dropping, flat
from tests.distributed.processes import Pool, error_of
from tests.distributed.replicas import doubled, mesh_of, replica_of
from tests.distributed.training import Trained, Training, compare, without_gradients

NAMES = ("tied gpt with dropout", "batch norm", "relative bias", "skips", "ragged", "passthrough")
PAIRS = [
    *zip(([2, 1], [1, 2], [1, 3], [3, 1], [1, 2], [4]), NAMES, strict=True),
    ([2, 1], "rows that mix"),
    ([1, 2, 1], "relative bias"),
]
SLOW = [
    *(([2, 1], name) for name in (*NAMES[1:], "own loss")),
    *(([1, 2], name) for name in NAMES if name not in ("batch norm", "ragged")),
    *(([2, 2], name) for name in NAMES),
]


@pytest.mark.quick
@pytest.mark.parametrize(
    ("replicas", "name"), [*PAIRS, *(pytest.param(*pair, marks=pytest.mark.slow) for pair in SLOW)]
)
def test_a_training_has_the_bits_of_one_process(ranks: Pool, replicas: list[int], name: str) -> None:
    assert ranks(sum(replicas)).run(compare, name, {"replicas": replicas})[0] == []


def loop(pipe: Any, training: Training) -> Trained:
    """Train by AdamW with clipping, an update every second step; return losses, and norms of gradients as outputs."""
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.01)
    torch.manual_seed(5)
    losses, norms = [], []
    for step, rows in enumerate(training.rows):
        batch = without_gradients(training.batch(rows))
        given = {"target": training.target(batch, step), "loss_fn": training.loss}
        losses.append(pipe.train_step(*batch.args, **batch.kwargs, **given))
        if step % 2:
            clip = getattr(pipe, "clip_grad_norm_", partial(nn.utils.clip_grad_norm_, pipe.parameters()))
            norms.append(clip(0.1))
            optimizer.step()
            optimizer.zero_grad()
    return losses, norms


@pytest.mark.parametrize(
    ("replicas", "options"),
    [([1, 2], {"recompute": "always"}), ([2, 2], {"rng": "counter"})],
)
def test_clipping_counts_each_stage_once(ranks: Pool, replicas: list[int], options: dict[str, Any]) -> None:
    assert ranks(sum(replicas)).run(compare, "batch norm", {"replicas": replicas, **options}, loop)[0] == []


def square(output: Tensor, target: Tensor) -> Tensor:
    """Return a mean over rows, which is proved; at zeros the mean of a part."""
    value = (output - target).square().mean()
    return value if target.any() else value * len(target)


def plain(replicas: list[int]) -> list[float]:
    """Train beside the plain model, and call the pipe; return how far it is off, relative to the largest value."""
    one, other = Dropping().double(), Dropping().double()
    value = doubled(flat(8).args[0])
    pipe = autosplit(other, devices="torchrun", chunks=4, sample=value, replicas=replicas, outputs="all")
    optimizers = [torch.optim.AdamW(own.parameters(), lr=0.01) for own in (one, pipe)]
    found = []
    for rows in (8, 7, 2, 1):
        value = doubled(flat(rows).args[0])
        torch.manual_seed(rows)
        loss = square(one(value), torch.ones_like(value))
        loss.backward()
        torch.manual_seed(rows)
        own = pipe.train_step(value, target=torch.ones_like(value), loss_fn=square)
        pipe(value).sum().backward()
        torch.manual_seed(rows)
        one(value), one(value).sum().backward()
        pairs = [(own, loss.detach())]
        pairs += [(p.grad, one.get_parameter(name).grad) for name, p in pipe.named_parameters()]
        found += [float((a - b).abs().max() / b.abs().max()) for a, b in pairs]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return found


@pytest.mark.parametrize("replicas", [[1, 2], [3], [2, 2]], ids=str)
def test_gradients_are_the_plain_models(ranks: Pool, replicas: list[int]) -> None:
    assert max(max(own) for own in ranks(sum(replicas)).run(plain, replicas)) < 1e-12


def other_loss() -> list[str]:
    """Have a loss that turns out to be none by rows, on microbatches of both replicas; train on after it."""
    pipe = autosplit(Dropping(), devices="torchrun", chunks=4, sample=flat(8).args, replicas=[1, 2])
    value = flat(8).args[0]
    ones, zeros = torch.ones_like(value), torch.zeros_like(value)
    return [error_of(pipe.train_step, value, target=target, loss_fn=square) for target in (ones, zeros, ones)]


def test_a_loss_is_held_against_the_whole_batch(ranks: Pool) -> None:
    for first, refused, last in ranks(3).run(other_loss):
        assert first == last == "nothing was raised"
        assert "was a mean over rows on the first batch and is none on this one" in refused


def saved(folder: Path) -> list[bool]:
    """Save a training of replicas; go on in a pipe without, in one whose other stage has them, and in the plain model.

    Returns whether all do the same, and what the model is in the end.
    """

    def step(pipe: Any, optimizer: Any, number: int) -> Tensor:
        torch.manual_seed(number)
        value = flat(8).args[0]
        if not hasattr(pipe, "train_step"):
            loss = F.mse_loss(pipe(value), value)
            loss.backward()
        else:
            loss = pipe.train_step(value, target=value, loss_fn=F.mse_loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    def made(**options: Any) -> tuple[Any, Any]:
        if not options:
            return (model := Dropping()), torch.optim.AdamW(model.parameters(), lr=0.01)
        pipe = autosplit(Dropping(), devices="torchrun", chunks=4, sample=flat(8).args, **options)
        return pipe, torch.optim.AdamW(pipe.parameters(), lr=0.01)

    first, optimizer = made(replicas=[2, 1])
    step(first, optimizer, 0)
    checkpoint.save(folder, 1, first, optimizer).wait()
    losses = [step(first, optimizer, 1)]
    for options in ({"replicas": [1, 2]}, {"schedule": "1f1b"}, {}):
        other, its_optimizer = made(**options)
        checkpoint.restore(folder, other, its_optimizer)
        losses.append(step(other, its_optimizer, 1))
        if options:
            checkpoint.save(folder / str(len(losses)), 1, other, its_optimizer).wait()
            checkpoint.restore(folder / str(len(losses)), first, optimizer)
    whole = first.unsplit().state_dict()
    return [*(bool(own.isclose(losses[0], atol=1e-6)) for own in losses), *(v.sum().item() for v in whole.values())]


def test_a_checkpoint_goes_to_pipes_without_replicas_and_back(ranks: Pool, tmp_path: Path) -> None:
    first, *others = ranks(3).run(saved, tmp_path)
    assert all(first[:4])
    assert all(own == first for own in others)


class Table(nn.Module):
    """Changes a table where it is read; has a value that is made once per step, which may be an output."""

    def __init__(self, *, renormalises: bool, returns: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(9, WIDTH, max_norm=1.0 if renormalises else None)
        self.layers, self.scale = (
            nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4))),
            nn.Parameter(torch.ones(3)),
        )
        self.returns = returns

    def forward(self, value: Tensor) -> Any:
        output = self.layers(self.table(value).sum(1))
        return (output, self.scale.softmax(0)) if self.returns else output


def refused() -> list[str]:
    """Say what is refused, with what words, before anything ran."""
    value = torch.randint(9, (8, 2))
    sample = {"devices": "torchrun", "chunks": 4, "sample": value, "replicas": [2, 1]}
    mesh = mesh_of(3, 1)
    model = partial(Table, renormalises=False, returns=False)
    pipe = autosplit(model(), **sample)
    target = torch.zeros(8, WIDTH)

    calls: list[Any] = [
        lambda: autosplit(model(), **sample, feed="first_last"),
        lambda: autosplit(model(), **sample, parallelize=lambda part, mesh: part),
        lambda: autosplit(model(), mesh=mesh, chunks=4, sample=value, replicas=[2, 1]),
        lambda: autosplit(model(), mesh=mesh, chunks=4, sample=value, plan=pipe.plan),
        lambda: autosplit(model(), **{**sample, "replicas": [2, 2]}),
        lambda: autosplit(Table(renormalises=True, returns=False), **sample),
        lambda: autosplit(Table(renormalises=False, returns=True), **{**sample, "replicas": [1, 2]}),
    ]
    said = [error_of(call) for call in calls]
    assert autosplit(Table(renormalises=True, returns=True), **{**sample, "replicas": [1, 1, 1]}).plan is not None
    assert pipe.train_step(value, target=target, loss_fn=F.mse_loss).isfinite()
    return said


def test_what_is_refused_on_all_ranks(ranks: Pool) -> None:
    words = [
        r"feed and replicas=\[2, 1\]: .* leave one of them out",
        r"parallelize and replicas=\[2, 1\]",
        r"a mesh of several pipelines and replicas=\[2, 1\]: .* by a mesh with a dimension dp",
        r"a mesh of several pipelines and replicas=\(2, 1\)",
        r"replicas=\[2, 2\] are 4 devices in 2 stages, and devices names 3",
        r"stage 0 has 2 replicas, and 'table#0' looks up a table with max_norm",
        r"'\w*softmax\w*', which is made once per step, is returned or used .* the last stage's 2 replicas",
    ]
    for said in ranks(3).run(refused):
        for text, own in zip(said, words, strict=True):
            assert re.search(own, text), text


class Moves(nn.Module):
    """In training it moves a running mean, or takes off the batch's, behind what reads every row."""

    def __init__(self, *, writes: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
        self.head = nn.Identity() if writes else nn.Linear(8, 8)
        self.register_buffer("centre", torch.zeros(8))
        self.writes = writes

    def forward(self, value: Tensor) -> Tensor:
        value = self.layers(value)
        if not self.writes:
            return self.head(value - value.mean(0) if self.training else value)
        output = torch.tanh(value - self.centre)
        if self.training:
            self.centre.mul_(0.5).add_(value.detach().mean(0), alpha=0.5)
        return output


def moved_later(replicas: list[int], writes: bool) -> Any:
    """Plan in eval mode, then train; return what is refused, or the buffer as it is then."""
    value = flat(8).args[0]
    pipe = autosplit(Moves(writes=writes).eval(), devices="torchrun", chunks=4, sample=value, replicas=replicas)
    try:
        pipe.train().train_step(value, target=value, loss_fn=F.mse_loss)
    except InputError as error:
        return str(error)
    return pipe.unsplit().get_buffer("centre").tolist()


@pytest.mark.parametrize("writes", [True, False])
def test_what_one_replica_alone_would_do_is_refused_in_a_later_kind_of_call(ranks: Pool, writes: bool) -> None:
    does = "changes 'centre'" if writes else "uses 'head.weight'"
    for said in ranks(3).run(moved_later, [1, 2], writes):
        assert re.search(f"{does} once per step, .* the last stage's 2 replicas.* give that stage one replica", said)
    plain = Moves(writes=writes)
    plain(flat(8).args[0])
    for found in ranks(3).run(moved_later, [2, 1], writes):
        assert found == pytest.approx(plain.centre.tolist(), abs=1e-6)


class Seen(torch.optim.SGD):
    """Notes the layouts of gradients."""

    layouts: ClassVar[set[Any]] = set()

    def step(self, closure: Any = None) -> Any:
        self.layouts.update(p.grad.layout for group in self.param_groups for p in group["params"] if p.shape[0] == 9)
        return super().step(closure)


def looked_up(way: str, replicas: list[int]) -> tuple[list[float], set[Any]]:
    """Train a table with sparse gradients; return the losses, and the layouts of its gradients on this rank."""
    value, target = torch.arange(16).view(8, 2) % 7, torch.zeros(8, WIDTH)
    options: dict[str, Any] = {"devices": "torchrun", "chunks": 4, "replicas": replicas}
    if way == "dp":
        options = {"mesh": (mesh := mesh_of(2, 1)), "chunks": 2}
        value, target = (own[4 * replica_of(mesh) :][:4] for own in (value, target))
    if way == "plain":
        options = {"devices": ["cpu"] * sum(replicas), "chunks": 4, "replicas": replicas}
    model = Table(renormalises=False, returns=False)
    model.table.sparse = True
    pipe = autosplit(model, sample=value, **options)
    Seen.layouts.clear()
    make = partial(Seen, lr=0.5)
    if way == "stream":
        items = [(value, target)] * 3
        return [loss.item() for loss in pipe.train_stream(items, loss_fn=F.mse_loss, optimizer=make)], {*Seen.layouts}
    optimizer, losses = make(pipe.parameters()), []
    for _ in range(3):
        losses.append(pipe.train_step(value, target=target, loss_fn=F.mse_loss).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, {*Seen.layouts}


@pytest.mark.parametrize(("way", "replicas"), [("step", [2, 1]), ("dp", [1, 1]), ("stream", [2, 1])])
def test_sparse_gradients_stay_sparse(ranks: Pool, way: str, replicas: list[int]) -> None:
    found = ranks(sum(replicas)).run(looked_up, way, replicas)
    assert set[Any]().union(*(layouts for _, layouts in found)) == {torch.sparse_coo}
    if way != "stream":  # whose later losses are of earlier weights
        losses, _ = looked_up("plain", replicas)
        assert all(own == pytest.approx(losses, rel=1e-5) for own, _ in found)
