"""A pipe says what each recording was made for; and a batch size that was not seen before needs no recording."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autosplit import autosplit
from autosplit.trace.recording import gather
from autosplit.trace.recording.run import run_python
from autosplit.trace.shapes import generalise

SKIP = 1.0


class Config:
    def __init__(self) -> None:
        self.scale, self.sizes = 1.0, [4, 8]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 3)
        self.counter, self.config = 1, Config()
        self.register_buffer("offset", torch.zeros(3))

    def forward(self, x: Tensor, factor: float = 1.0) -> Tensor:
        hidden = self.a(x).tanh() * self.counter * self.config.scale * self.config.sizes[0]
        return self.b(hidden) * SKIP * factor + self.offset


def pipe_of(model: nn.Module) -> Any:
    return autosplit(model, devices=["cpu"] * 2, chunks=4)


def rows(count: int, *shape: int) -> Tensor:
    return torch.randn(count, *(shape or (8,)), generator=torch.Generator().manual_seed(count))


def _hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output * 2


def _set(name: str, value: Any) -> Callable[[Any], Any]:
    return lambda model: setattr(model, name, value)


CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "attribute": (_set("counter", 2), "attribute `counter` of the model was 1, is 2"),
    "part": (lambda m: setattr(m.config, "scale", 2.5), "attribute `config.scale` of the model was 1.0, is 2.5"),
    "entry": (lambda m: m.config.sizes.insert(0, 5), "attribute `config.sizes.0` of the model was 4, is 5"),
    "mode": (lambda m: m.eval(), "training mode of the model was True, is False"),
    "mode of a part": (lambda m: m.b.eval(), "training mode of the module `b` was the model's, is False"),
    "frozen": (lambda m: m.a.bias.requires_grad_(False), "requires_grad of the parameter `bias` of the module `a` was"),
    "hook": (lambda m: m.b.register_forward_hook(_hook), "hooks of the module `b` was (), is "),
    "buffer": (_set("offset", torch.zeros(1)), "shape of the buffer `offset` of the model was (3), is (1)"),
    "module": (lambda m: setattr(m, "b", nn.Sequential(m.b)), "class of the module `b` was `Linear`, is `Sequential`"),
    "global": (lambda m: globals().__setitem__("SKIP", 2.0), "SKIP` that its code names was 1.0, is 2.0"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_differed_is_told(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    change, reason = CHANGES[name]
    monkeypatch.setitem(globals(), "SKIP", 1.0)
    model = Net()
    pipe = pipe_of(model)
    assert pipe.recordings == ()
    pipe(rows(6))
    pipe(rows(6))
    change(model)
    torch.testing.assert_close(pipe(rows(6)), model(rows(6)))
    pipe(rows(6))
    first, second = pipe.recordings
    assert (first.number, first.reason, first.way_out) == (1, "the first call", "")
    assert reason in second.reason
    assert second.way_out
    assert str(second).startswith("recording 2, ")


CALLS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "dimensions": (lambda pipe: pipe(rows(6, 2, 8)), "shape of input 0 was (6, 8), is (6, 2, 8)"),
    "gradient": (lambda pipe: pipe(rows(6).requires_grad_()), "requires_grad of input 0 was False, is True"),
    "grad mode": (lambda pipe: torch.no_grad()(pipe)(rows(6)), "grad mode was True, is False"),
    "number": (lambda pipe: pipe(rows(6), 3.0), "input 1 was not there, is 3.0"),
    "autocast": (lambda pipe: torch.autocast("cpu")(pipe)(rows(6)), "autocast of cpu was (False"),
}


@pytest.mark.parametrize("name", CALLS)
def test_what_differed_of_a_call_is_told(name: str) -> None:
    call, reason = CALLS[name]
    pipe = pipe_of(Net())
    pipe(rows(6))
    call(pipe)
    assert reason in pipe.recordings[1].reason


# -- the log -----------------------------------------------------------------------------------------------------------


def test_five_recordings_in_a_row_warn_once() -> None:
    model = Net()
    pipe = pipe_of(model)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for model.counter in range(4):
            pipe(rows(6))
        pipe(rows(6))
        for model.counter in range(4, 8):
            pipe(rows(6))
        assert [one for one in seen if "in a row" in str(one.message)] == []
        for model.counter in range(8, 14):
            pipe(rows(6))
    [said] = [str(one.message) for one in seen if "in a row" in str(one.message)]
    assert said.startswith("Net was recorded in 5 calls in a row")
    assert "attribute `counter` of the model was 7, is 8" in said
    assert pipe.recordings[-1].way_out in said


# -- batch sizes -------------------------------------------------------------------------------------------------------
class Shaped(Net):
    """Asks for its number of rows, as most attention layers do."""

    def forward(self, x: Tensor, factor: float = 1.0) -> Tensor:
        count, width = x.shape
        return super().forward(x.view(count, 2, width // 2).transpose(1, 2).reshape(count, width))


@pytest.mark.parametrize("kind", [Net, Shaped])
@pytest.mark.parametrize("way", ["call", "train_step"])
def test_a_batch_size_that_was_not_seen_before_needs_no_recording(
    kind: type[Net], way: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = []
    for module in (gather, generalise):
        monkeypatch.setattr(
            module, "run_python", lambda *args, **given: (runs.append(1), run_python(*args, **given))[1]
        )
    torch.manual_seed(0)
    model = kind().double()
    plain, pipe = copy.deepcopy(model), pipe_of(model)
    for number, count in enumerate((16, 12, 11, 10, 7, 5, 4, 3, 2, 1, 40, 12)):
        x, target = rows(count).double(), torch.zeros(count, 3).double()
        plain.zero_grad()
        model.zero_grad()
        nn.functional.mse_loss(plain(x), target).backward()
        caplog.clear()
        runs.clear()
        with caplog.at_level(logging.INFO, "autosplit"):
            if way == "call":
                nn.functional.mse_loss(pipe(x), target).backward()
            else:
                pipe.train_step(x, target=target, loss_fn=nn.functional.mse_loss)
        if number > 1:
            assert not runs, f"the model's Python runs at {count} rows"
        if number:
            assert not caplog.records
        for one, other in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-12, atol=1e-12)
    assert len(pipe.recordings) == 1


class Counts(Net):
    """Does other things with many rows, and with a number that nobody sees coming."""

    def forward(self, x: Tensor, factor: float = 1.0) -> Tensor:
        if len(x) > 20:
            x = x * 2
        return super().forward(x * 3 if x.shape[0] % 13 == 0 else x)


def test_a_batch_size_for_which_the_model_does_other_things() -> None:
    torch.manual_seed(0)
    model = Counts()
    plain, pipe = copy.deepcopy(model), pipe_of(model)
    for count in (6, 7, 8, 13, 25, 12, 26, 9, 5, 13):
        torch.testing.assert_close(pipe(rows(count)), plain(rows(count)))


# -- what calls change themselves --------------------------------------------------------------------------------------
class Counting(Net):
    """Counts training calls; what it computes in eval mode depends on their number."""

    def forward(self, x: Tensor, factor: float = 1.0) -> Tensor:
        if self.training:
            self.counter += 1
            return self.b(self.a(x).tanh())
        return super().forward(x)


def test_a_counter_of_training_calls_that_evaluation_reads() -> None:
    torch.manual_seed(0)
    model = Counting()
    plain, pipe = copy.deepcopy(model), pipe_of(model)
    for _ in range(4):
        for module in (plain, pipe):
            module.train()
            module(rows(6))
            module(rows(6))
            module.eval()
        torch.testing.assert_close(pipe(rows(6)), plain(rows(6)), rtol=1e-5, atol=1e-5)
