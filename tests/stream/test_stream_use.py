"""Leaving, draining, saving and going on: nothing that went into a stream is left undone, and nothing is done twice."""

from __future__ import annotations

import copy
import gc
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from autosplit import autosplit
from tests.stream.streams import (
    CPU,
    Normed,
    Pair,
    Skipping,
    adamw,
    cross_entropy,
    expected,
    pair,
    run,
    sgd,
    stream_of,
    words,
)

REPLICAS = [None, [2, 1, 1]]


def test_what_was_taken_is_trained_on_when_the_loop_is_left(own: Pair, items: list[Any]) -> None:
    taken: list[int] = []

    def loader() -> Iterator[Any]:
        for number, item in enumerate(items):
            taken.append(number)
            yield item

    for _ in stream_of(own, loader()):
        if len(taken) == 6:
            break
    gc.collect()
    assert len(taken) == 6
    expected(own, items[:6], "stash", sgd)
    own.assert_equal()


@pytest.mark.parametrize("own", REPLICAS, indirect=True)
def test_a_drained_stream_goes_on_as_one_that_begins(own: Pair, items: list[Any]) -> None:
    optimizer = sgd(list(own.model.parameters()))
    stream = stream_of(own, items, optimizer)
    losses = [next(stream).item() for _ in range(3)]
    stream.drain()
    done = stream.minibatches
    state = copy.deepcopy(own.model.state_dict())
    losses += [loss.item() for loss in stream]
    assert len(losses) == len(items) == stream.minibatches
    wanted = expected(own, items, "stash", sgd, drains=[done])
    assert losses == pytest.approx(wanted, rel=1e-12)
    own.assert_equal()
    assert any(not torch.equal(a, b) for a, b in zip(state.values(), own.model.state_dict().values(), strict=True))


@pytest.mark.parametrize("read", ["model", "pipe", "optimizer", "step", "evaluation", "loaded", "copied", "model back"])
def test_what_reads_the_model_drains_first(own: Pair, items: list[Any], read: str) -> None:
    optimizer = sgd(list(own.model.parameters()))
    stream = stream_of(own, items, optimizer)
    next(stream)
    if read == "optimizer":
        optimizer.state_dict()
    elif read in ("model", "pipe"):
        (own.model if read == "model" else own.pipe).state_dict()
    elif read == "step":
        own.pipe.train_step(items[0][0], target=items[0][1], loss_fn=cross_entropy)
        optimizer.zero_grad()
    elif read == "loaded":
        own.model.load_state_dict(own.plain.state_dict())
    elif read == "copied":
        copy.deepcopy(own.pipe)
    elif read == "model back":
        own.pipe.unsplit()
    else:
        own.pipe.eval_step(items[0][0])
    assert stream.minibatches > 1
    assert len(list(stream)) == len(items) - 1
    assert stream.minibatches == len(items)


def test_another_thread_reads_the_model_meanwhile(own: Pair, items: list[Any]) -> None:
    stream, found = stream_of(own, items * 5), []
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            own.model.state_dict()

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    trainer = threading.Thread(target=lambda: found.extend(stream), daemon=True)
    trainer.start()
    trainer.join(60)
    done.set()
    assert len(found) == len(items) * 5
    reader.join(60)
    assert not reader.is_alive()


@pytest.mark.parametrize("own", REPLICAS, indirect=True)
def test_a_synchronous_step_follows_a_stream(own: Pair, items: list[Any]) -> None:
    optimizer = adamw(list(own.model.parameters()))
    list(stream_of(own, items[:5], optimizer))
    twin, other = copy.deepcopy((own.model, optimizer.state_dict()))
    plain = adamw(list(twin.parameters()))
    plain.load_state_dict(other)
    tokens, target = items[5]
    loss = own.pipe.train_step(tokens, target=target, loss_fn=cross_entropy)
    optimizer.step()
    wanted = cross_entropy(twin(tokens), target)
    wanted.backward()
    plain.step()
    torch.testing.assert_close(loss, wanted.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(own.model.state_dict(), twin.state_dict(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("own", REPLICAS, indirect=True)
@pytest.mark.parametrize("how", ["one optimizer", "one per stage"])
def test_a_saved_stream_is_resumed(own: Pair, items: list[Any], how: str) -> None:
    def fresh(model: nn.Module) -> Any:
        return adamw if how == "one per stage" else adamw(list(model.parameters()))

    first = stream_of(own, items[:6], fresh(own.model))
    list(first)
    saved = copy.deepcopy((own.model.state_dict(), first.state_dict()))
    model = Skipping().double()
    model.load_state_dict(saved[0])
    pipe = autosplit(model, plan=own.pipe.plan, **own.how)
    resumed = pipe.train_stream(items[6:], loss_fn=cross_entropy, optimizer=fresh(model))
    resumed.load_state_dict(saved[1])
    losses = [loss.item() for loss in resumed]
    assert resumed.minibatches == len(items)
    assert losses == pytest.approx(expected(own, items, "stash", adamw, drains=[6])[6:], rel=1e-12)
    torch.testing.assert_close(model.state_dict(), own.plain.state_dict(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("lanes", ["threads", "inline"])
def test_modes_that_change_between_losses(lanes: str) -> None:
    items = [(torch.randn(4, 6, dtype=torch.float64), torch.randint(3, (4,))) for _ in range(12)]
    own = pair(Normed, items[0][0], lanes=lanes)
    counter = own.model.layers[0][1].num_batches_tracked
    stream = stream_of(own, items)
    for _ in range(3):
        next(stream)
    stream.drain()
    own.model.eval()
    counted = int(counter)
    list(stream)
    assert 3 <= counted < 12
    assert int(counter) == counted
    assert stream.minibatches == 12


@pytest.mark.parametrize("kind", ["torch", "numpy"])
def test_a_loader_that_fills_one_memory_again_and_again(own: Pair, items: list[Any], kind: str) -> None:
    memory = np.zeros((4, 5), dtype=np.int64)
    tokens = torch.from_numpy(memory) if kind == "numpy" else torch.zeros(4, 5, dtype=torch.int64)
    target = tokens.clone()

    def loader() -> Iterator[Any]:
        for item in items:
            if kind == "numpy":
                memory[:] = item[0].numpy()
            else:
                tokens.copy_(item[0])
            target.copy_(item[1])
            yield tokens, target

    twin = own.twin()
    found = [loss.item() for loss in stream_of(own, loader())]
    assert found == run(twin, items, "stash", sgd)


@pytest.mark.parametrize("lanes", ["threads", "inline"])
def test_a_loader_that_calls_the_pipe(items: list[Any], lanes: str) -> None:
    own = pair(Skipping, items[0][0], lanes=lanes)

    def loader() -> Iterator[Any]:
        for number, item in enumerate(items):
            if number == 5:
                own.pipe.eval_step(items[0][0])
            yield item

    assert len(list(stream_of(own, loader()))) == len(items)


def test_a_stream_that_is_garbage_of_a_lane_is_finished(own: Pair, items: list[Any]) -> None:
    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        gc.collect()
        return cross_entropy(output, target)

    stream = own.pipe.train_stream(items, loss_fn=loss, optimizer=sgd)
    next(stream)
    holder: list[Any] = [stream]
    holder.append(holder)
    del stream, holder
    own.pipe.eval_step(items[0][0])


def test_no_threads_and_no_versions_are_left(own: Pair, items: list[Any]) -> None:
    before = threading.active_count()
    for _ in stream_of(own, items):
        break
    gc.collect()
    own.pipe.unsplit()
    assert threading.active_count() <= before


def test_random_numbers_are_drawn_in_the_loaders_order(items: list[Any]) -> None:
    own = pair(lambda: Skipping(dropout=0.4), items[0][0])

    def loader() -> Iterator[Any]:
        for number in range(6):
            tokens = torch.randint(11, (3 + number % 2, 6))
            yield tokens[:, :-1], tokens[:, 1:]

    twice = []
    for _ in range(2):
        model = copy.deepcopy(own.plain)
        pipe = autosplit(model, plan=own.pipe.plan, **own.how)
        torch.manual_seed(5)
        twice.append([loss.item() for loss in pipe.train_stream(loader(), loss_fn=cross_entropy, optimizer=sgd)])
    assert twice[0] == twice[1]


def test_batch_norm_in_eval_mode_and_a_frozen_layer() -> None:
    items = [(torch.randn(4, 6, dtype=torch.float64), torch.randint(3, (4,))) for _ in range(6)]
    torch.manual_seed(0)
    model = Normed().double().eval()
    model.layers[1].requires_grad_(False)
    frozen = copy.deepcopy(model.layers[1].state_dict())
    pipe = autosplit(model, devices=[CPU] * 3, chunks=2, sample=items[0][0])
    list(pipe.train_stream(items, loss_fn=cross_entropy, optimizer=torch.optim.SGD(model.parameters(), lr=0.1)))
    torch.testing.assert_close(model.layers[1].state_dict(), frozen, rtol=0, atol=0)


@pytest.mark.parametrize(("staleness", "lanes"), [("stash", "threads"), ("2bw", "inline")])
def test_attributes_that_hooks_set_are_the_models(staleness: str, lanes: str) -> None:
    """Also where kinds of minibatches, each with stand-ins of its own, take turns."""
    torch.manual_seed(3)
    items = [item for count in (6, 4) for item in words(2, rows=(count,))]
    items = [
        (inputs[:, : 5 - number % 2], target[:, : 5 - number % 2]) for number, (inputs, target) in enumerate(items)
    ]
    own = pair(Watched, items[0][0], lanes=lanes)
    list(own.pipe.train_stream(items, loss_fn=cross_entropy, optimizer=still, staleness=staleness))
    for inputs, _ in items:
        for part in inputs.chunk(2 if staleness == "2bw" else 1):
            own.plain(part).sum().backward()
    for module, plain in zip(own.model.modules(), own.plain.modules(), strict=True):
        assert module.__dict__.keys() == plain.__dict__.keys()
        for name in vars(module).keys() & {"seen", "calls", "steps"}:
            torch.testing.assert_close(getattr(module, name), getattr(plain, name))
    assert all(
        layer.calls == layer.steps == len(items) * (2 if staleness == "2bw" else 1) for layer in own.model.hooked
    )


class Watched(Skipping):
    """Keeps what layers of its first and its last block give, and counts their forwards and backwards."""

    def __init__(self) -> None:
        super().__init__()
        self.hooked = [self.blocks[0][0], self.blocks[5][0]]
        for layer in self.hooked:
            layer.register_forward_hook(_keep)
            layer.register_full_backward_hook(_count)


def _keep(module: Any, given: Any, made: torch.Tensor) -> None:
    module.seen, module.calls = made.detach().clone(), getattr(module, "calls", 0) + 1
    module.first = module.calls == 1
    if not module.first:
        del module.first


def _count(module: Any, *gradients: Any) -> None:
    module.steps = getattr(module, "steps", 0) + 1


def still(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.0)


@pytest.mark.quick
@pytest.mark.parametrize("lanes", ["threads", "inline"])
def test_a_program_ends_with_minibatches_in_flight(lanes: str) -> None:
    program = f"""
        import itertools, torch
        from autosplit import autosplit
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        item = torch.randn(2, 4), torch.randn(2, 4)
        pipe = autosplit(model, devices=["cpu"] * 2, chunks=1, sample=item[0], lanes={lanes!r})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        stream = pipe.train_stream(itertools.repeat(item), loss_fn=torch.nn.functional.mse_loss, optimizer=optimizer)
        next(stream)
        print("left", flush=True)
        """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "left\n", "")
