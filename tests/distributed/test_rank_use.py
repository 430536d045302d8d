"""What a rank's pipe is for its user: who is called with the batch, outputs, clipping, state, models on meta."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from autosplit import autosplit, initialise
from autosplit.distributed import checkpoint
from autosplit.distributed.join import _device, join
from autosplit.options import Sample
from tests.distributed.models import TRAININGS, TiedGPT, few_targets, flat, next_token, tokens
from tests.distributed.processes import Pool, error_of
from tests.distributed.training import compare, squares, without_gradients
from tests.equivalence.equality import flatten
from tests.pairwise import mostly_slow

FED = mostly_slow(
    ["chain", "relative bias of changing length", "relative bias", "rows that mix", "own loss", "keyword inputs"],
    "relative bias of changing length",
    "keyword inputs",
)


def _everything(part: Any) -> dict[str, Tensor]:
    """Return what all ranks hold, by name."""
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, part)
    assert sum(map(len, every)) == len({name for own in every for name in own})
    return {name: value for own in every for name, value in own.items()}


def fed(name: str) -> bool:
    """Train with the batch on the first rank and the target on the last, and compare with one process."""
    training, rank, size = TRAININGS[name], dist.get_rank(), dist.get_world_size()
    batch = without_gradients(training.batch(9))
    how = {"devices": "torchrun", "chunks": 4, "sample": Sample(*batch.args, **batch.kwargs), "feed": "first_last"}
    pipe = autosplit(training.make(), **how)
    one = autosplit(training.make(), devices=["cpu"] * size, plan=pipe.plan) if rank == size - 1 else None
    found = []
    for step, rows in enumerate((9, 9, 7)):
        batch = without_gradients(training.batch(rows))
        given = {} if training.loss is None else {"target": training.target(batch, step), "loss_fn": training.loss}
        state = torch.manual_seed(step).get_state()
        inputs = (batch.args, batch.kwargs) if rank == 0 else ((), {})
        loss = pipe.train_step(*inputs[0], **inputs[1], **(given if rank == size - 1 else {}))
        output = pipe.eval_step(*inputs[0], **inputs[1])
        if one is None:
            found.append(output is None)
            continue
        torch.set_rng_state(state)
        found.append(torch.equal(one.train_step(*batch.args, **batch.kwargs, **given), loss))
        pairs = zip(flatten(output), flatten(one.eval_step(*batch.args, **batch.kwargs)), strict=True)
        found += [torch.equal(a[1], b[1]) for a, b in pairs if isinstance(a[1], Tensor)]
    return all(found)


def timed_as_one_piece() -> tuple[str | None, bool]:
    """Return why a step of one microbatch has no actions, and whether it was timed with its loss and gradients."""
    training = TRAININGS["chain"]
    batch = without_gradients(training.batch(8))
    pipe = autosplit(training.make(), devices="torchrun", chunks=1, sample=Sample(*batch.args, **batch.kwargs))
    step = pipe.profile_step(*batch.args, **batch.kwargs, target=training.target(batch, 0), loss_fn=training.loss)
    counted = step.loss is not None and all(parameter.grad is not None for parameter in pipe.parameters())
    return step.whole, counted and not step.bars


def loop_of_ones_own(clip: float) -> list[str]:
    """Train by ``pipe(x)``, ``loss.backward()`` on every rank and clip; return what differs from the plain model."""
    plain = TRAININGS["rows that mix"].make()
    pipe = autosplit(
        TRAININGS["rows that mix"].make(), devices="torchrun", chunks=4, sample=flat(8).args, outputs="all"
    )
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.1) for module in (pipe, plain)]
    found = []
    for rows in (8, 8, 5):
        batch = flat(rows).args
        for optimizer in optimizers:
            optimizer.zero_grad()
        losses = [squares(module(*batch)) for module in (pipe, plain)]
        for loss in losses:
            loss.backward()
        norms = pipe.clip_grad_norm_(clip), nn.utils.clip_grad_norm_(plain.parameters(), clip)
        for optimizer in optimizers:
            optimizer.step()
        if not torch.allclose(*losses) or not torch.allclose(*norms):
            found.append(f"{losses} {norms}")
    whole = _everything(pipe.state_dict())
    return found + [n for n, value in plain.state_dict().items() if not torch.allclose(value, whole[n], atol=1e-6)]


def clipped_bits() -> bool:
    """Tell whether the norm has the bits of torch's on the same gradients."""
    pipe = autosplit(TiedGPT(), devices="torchrun", chunks=4, sample=tokens(8).args)
    torch.manual_seed(1)
    pipe.train_step(*tokens(8).args, target=few_targets(tokens(8), 0), loss_fn=next_token)
    every = _everything({name: p.grad.clone() for name, p in pipe.named_parameters() if p.grad is not None})
    model = TiedGPT()
    for name, parameter in model.named_parameters():
        parameter.grad = every[name]
    expected = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    total = pipe.clip_grad_norm_(0.01)
    clipped = _everything({name: p.grad for name, p in pipe.named_parameters() if p.grad is not None})
    return torch.equal(total, expected) and all(torch.equal(p.grad, clipped[n]) for n, p in model.named_parameters())


def _on_meta() -> nn.Module:
    with torch.device("meta"):
        return TiedGPT()


def from_meta(weights: bool) -> tuple[bool, int, int]:
    """Train a model that was built on meta; return whether it is as in one process, and how many elements it holds."""
    source = TiedGPT().state_dict() if weights else None
    model, rank = _on_meta(), dist.get_rank()
    torch.manual_seed(4)  # behind the constructor, which has a seed of its own
    sample = torch.empty(8, 6, dtype=torch.long, device="meta")
    pipe = autosplit(model, devices="torchrun", chunks=4, sample=sample, weights=source)
    held = sum(parameter.numel() for parameter in model.parameters() if not parameter.is_meta)
    given = {"target": few_targets(tokens(8), 0), "loss_fn": next_token}
    torch.manual_seed(1)
    losses = [pipe.train_step(*tokens(8).args, **given) for _ in range(3)]
    output = pipe.eval_step(*tokens(8).args)
    if rank < dist.get_world_size() - 1:
        return output is None, held, sum(p.numel() for p in pipe.parameters())
    plain = _on_meta()
    initialise(plain, 4)
    if source is not None:
        plain.load_state_dict(source)
    one = autosplit(plain, devices=["cpu"] * dist.get_world_size(), plan=pipe.plan)
    torch.manual_seed(1)
    expected = [one.train_step(*tokens(8).args, **given) for _ in range(3)]
    same = all(map(torch.equal, losses, expected)) and torch.equal(output, one.eval_step(*tokens(8).args))
    return same, held, sum(p.numel() for p in pipe.parameters())


@pytest.mark.parametrize("name", FED)
def test_only_the_first_and_the_last_rank_are_called_with_the_batch(ranks: Pool, name: str) -> None:
    assert all(ranks(3).run(fed, name))


@pytest.mark.parametrize("clip", mostly_slow([0.05, 1e9], 0.05))
def test_a_loop_of_the_users_own_on_every_rank(ranks: Pool, clip: float) -> None:
    assert ranks(2).run(loop_of_ones_own, clip) == [[], []]


def test_a_step_of_one_microbatch_is_timed_as_one_piece(ranks: Pool) -> None:
    assert ranks(2).run(timed_as_one_piece) == [("the batch gives one microbatch", True)] * 2


def test_the_norm_has_the_bits_of_one_process(ranks: Pool) -> None:
    assert all(ranks(3).run(clipped_bits))


@pytest.mark.parametrize("weights", mostly_slow([False, True], True))
def test_a_model_on_meta_gets_the_values_of_a_ranks_part(ranks: Pool, weights: bool) -> None:
    found = ranks(3).run(from_meta, weights)
    assert all(same for same, *_ in found)
    whole = sum(p.numel() for p in TiedGPT().parameters())
    assert sum(own for *_, own in found) == whole
    assert all(held == own < whole for _, held, own in found)


def test_without_torchrun_there_are_no_ranks() -> None:
    with pytest.raises(Exception, match="RANK, WORLD_SIZE"):
        autosplit(TiedGPT(), devices="torchrun", sample=tokens(8).args)
    for name, value in {"feed": "first_last", "timeout": 60}.items():
        with pytest.raises(ValueError, match=f"{name}={value!r} is for devices='torchrun'"):
            autosplit(TiedGPT(), devices=2, **{name: value})  # type: ignore[arg-type]


def test_a_process_has_the_cuda_device_of_its_local_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert [_device("cuda", 5), _device("cpu", 5)] == [torch.device("cuda", 1), torch.device("cpu")]
    monkeypatch.delenv("LOCAL_RANK")
    assert _device("cuda", 6) == torch.device("cuda", 2)
    assert current == [torch.device("cuda", 1), torch.device("cuda", 2)]


def by_pairs() -> list[str]:
    """Train with a group for each sender and receiver, as NCCL has them; return what differs."""
    world = join()
    world.open((a, b) for a in range(world.size) for b in range(world.size) if a != b)
    try:
        return compare(TRAININGS["relative bias"], {"schedule": "interleaved", "virtual_stages": 2})
    finally:
        world.pairs.clear()


def test_a_group_for_each_sender_and_receiver(ranks: Pool) -> None:
    assert ranks(3).run(by_pairs)[0] == []


class Scaled(nn.Module):
    """Layers that a buffer scales, which a call in training mode changes where it is asked to."""

    def __init__(self, *, moves: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8).double() for _ in range(4))
        self.register_buffer("scale", torch.ones(8, dtype=torch.float64))
        self.moves = moves

    def forward(self, value: Tensor) -> Tensor:
        scale = self.scale
        if self.moves and self.training:
            scale = self.scale.mul_(0.9)
            value = value * scale
        for layer in self.layers:
            value = layer(value).tanh()
            value = value if self.training and self.moves else value * scale
        return value


def scaled(folder: str, replicas: list[int] | None) -> list[float]:
    """Load a buffer that all stages use, by a state and a checkpoint; return how far outputs are from the model's."""
    value = torch.rand(8, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    state = {name: own.clone() for name, own in Scaled().state_dict().items()}
    state["scale"] *= 2
    plain = Scaled()
    plain.load_state_dict(state)
    how: Any = {"devices": "torchrun", "chunks": 4, "sample": value, "outputs": "all", "replicas": replicas}
    found, pipes = [], [autosplit(Scaled(), **how) for _ in range(3)]
    pipes[0].load_state_dict(state)
    checkpoint.save(folder, 1, pipes[0])
    checkpoint.restore(folder, pipes[1])
    for buffer in pipes[2].buffers():
        buffer.mul_(2)
    for pipe in pipes:
        assert "scale" in pipe.state_dict()
        found.append((pipe.eval_step(value) - plain(value)).abs().max().item())
    return found


@pytest.mark.quick
@pytest.mark.parametrize("replicas", [None, [2, 1], [1, 2]], ids=str)
def test_a_buffer_of_several_stages_has_its_value_on_all(
    ranks: Pool, tmp_path: Path, replicas: list[int] | None
) -> None:
    size = 2 if replicas is None else sum(replicas)
    for off in ranks(size).run(scaled, str(tmp_path), replicas):
        assert max(off) < 1e-12


def moved() -> str:
    """Train a model that changes a buffer in one stage and, in eval mode, reads it in others."""
    value = torch.rand(8, 8, dtype=torch.float64)
    pipe = autosplit(Scaled(moves=True), devices="torchrun", chunks=4, sample=value, outputs="all")
    pipe.train_step(value, target=value, loss_fn=nn.functional.mse_loss)
    return error_of(pipe.eval_step, value)


def test_a_buffer_that_one_kind_of_call_changes_and_another_reads_elsewhere(ranks: Pool) -> None:
    for said in ranks(2).run(moved):
        assert "'scale' is changed on one rank and used on another" in said


class Two(nn.Module):
    """Two outputs, of the first stage and of the last; random slopes that hang on values."""

    def __init__(self, *, draws: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.layers = nn.Linear(8, 8), nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
        self.draws = draws

    def forward(self, value: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.tanh(self.first(value))
        output = self.layers(hidden)
        return nn.functional.rrelu(output, training=self.draws), hidden


def one_after_the_other(draws: bool) -> list[tuple[Tensor, Tensor]]:
    """Differentiate other outputs, and in other layouts, step by step; return all gradients and the plain model's."""
    plain, own = Two(draws=draws), Two(draws=draws)
    value = flat(8).args[0]
    pipe = autosplit(own, devices="torchrun", chunks=4, sample=value, outputs="all")
    losses: list[Any] = [
        lambda out: out[0].square().mean(),
        lambda out: out[1].square().mean(),
        lambda out: (out[0].t() @ out[1]).sum(),
        lambda out: out[0].sum(),
        lambda out: out[1].square().mean(),
    ]
    found = []
    for step, loss in enumerate(losses):
        next_numbers = []
        for model in (plain, pipe):
            torch.manual_seed(step)
            loss(model(value)).backward()
            next_numbers.append(torch.rand(1))
        named = dict(plain.named_parameters())
        found += [(p.grad.clone(), named[n].grad.clone()) for n, p in pipe.named_parameters() if p.grad is not None]
        found.append((next_numbers[0], next_numbers[1]))
    return found


@pytest.mark.parametrize("draws", [False, True])
def test_a_backward_may_begin_with_other_outputs_than_the_one_before(ranks: Pool, draws: bool) -> None:
    for found in ranks(2).run(one_after_the_other, draws):
        for own, plain in found:
            torch.testing.assert_close(own, plain)


class Tied(nn.Module):
    """Layers of which the first runs again at the end, or a gain that the first and the last stage use."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind, self.gain = kind, nn.Parameter(torch.ones(8))
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(4)))

    def forward(self, value: Tensor) -> Tensor:
        if self.kind == "gain":
            return self.layers(value * self.gain) * self.gain
        return self.layers[0](self.layers(value))


def tied_backwards(kind: str) -> list[tuple[Tensor, Tensor]]:
    """Differentiate calls whose first and last stage use one parameter; return gradients and the plain model's."""
    plain, own = Tied(kind), Tied(kind)
    pipe = autosplit(own, devices="torchrun", chunks=2, sample=flat(8).args, outputs="all")
    for rows in (8, 8, 5):
        for model in (plain, pipe):
            model(*flat(rows).args).square().mean().backward()
    named = dict(plain.named_parameters())
    return [(p.grad, named[n].grad) for n, p in pipe.named_parameters() if named[n].grad is not None]


@pytest.mark.parametrize("kind", ["gain", "layer"])
def test_a_backward_of_the_users_own_through_a_tied_parameter(ranks: Pool, kind: str) -> None:
    for found in ranks(2).run(tied_backwards, kind):
        for own, plain in found:
            torch.testing.assert_close(own, plain)
