"""Several threads that call pipes at the same time."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autosplit import autosplit

WIDTH, CALLERS = 6, 4
VALUE = torch.linspace(-1, 1, 7 * WIDTH, dtype=torch.float64).reshape(7, WIDTH)


def model(seed: int, layers: int = 3) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(layers))).double()


def together(function: Any) -> list[Any]:
    """Return what a function gives for each caller's number, all callers at the same time."""
    with ThreadPoolExecutor(CALLERS) as callers:
        return list(callers.map(function, range(CALLERS)))


@pytest.mark.parametrize("lanes", ["inline", "threads"])
def test_models_are_recorded_by_several_callers_at_once(lanes: str) -> None:
    models = [model(number, layers=2 + number) for number in range(CALLERS)]
    pipes = [autosplit(own, devices=["cpu"] * 2, chunks=3, lanes=lanes) for own in models]
    outputs = together(lambda number: pipes[number](VALUE))
    for own, output in zip(models, outputs, strict=True):
        torch.testing.assert_close(output, own(VALUE), rtol=1e-12, atol=1e-12)


def test_a_plain_model_runs_while_another_is_recorded() -> None:
    other, expected = model(9), model(9)(VALUE)

    def call(number: int) -> Tensor:
        if number % 2:
            return autosplit(model(number), devices=["cpu"] * 2, chunks=3)(VALUE)
        outputs = [other(VALUE) for _ in range(200)]
        assert all(torch.equal(output, expected) for output in outputs)
        return expected

    together(call)


@pytest.mark.parametrize("lanes", ["inline", "threads"])
def test_a_target_that_was_computed_with_gradients(lanes: str) -> None:
    def gradients(student: nn.Module, teacher: nn.Module) -> list[Tensor | None]:
        target = teacher(VALUE)
        if hasattr(student, "train_step"):
            student.train_step(VALUE, target=target, loss_fn=nn.functional.mse_loss)
        else:
            nn.functional.mse_loss(student(VALUE), target).backward()
        return [p.grad for p in (*student.parameters(), *teacher.parameters())]

    pipe = autosplit(model(0), devices=["cpu"] * 2, chunks=3, lanes=lanes, sample=VALUE)
    torch.testing.assert_close(gradients(pipe, model(1)), gradients(model(0), model(1)), rtol=1e-10, atol=1e-12)


class Kinds(nn.Module):
    """Does other things for each kind of call."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.drop, self.seen = nn.Dropout(0.9), list[Tensor]()

    def forward(self, x: Tensor, scale: float | None = None) -> Any:
        hidden = torch.tanh(self.first(x)) if x.dim() == 2 else torch.relu(self.norm(self.first(x)))
        if not self.training:
            hidden = self.drop(hidden)
        out = self.last(hidden)
        return out if scale is None else {"out": out, "scaled": out * scale}


def kinds() -> Kinds:
    torch.manual_seed(0)
    return Kinds().double()


THREE = torch.linspace(-1, 1, 5 * 3 * WIDTH, dtype=torch.float64).reshape(5, 3, WIDTH)


def trained(module: Any, *args: Any) -> list[Tensor]:
    output = module(*args)
    output = output["scaled"] if isinstance(output, dict) else output
    gradients = torch.autograd.grad(output.square().sum(), list(module.parameters()), allow_unused=True)
    return [output.detach(), *(g for g in gradients if g is not None)]


def evaluated(module: Any, *args: Any) -> list[Tensor]:
    if hasattr(module, "eval_step"):
        return [module.eval_step(*args)]
    with torch.no_grad():
        module.eval()
        output = module(*args)
        module.train()
    return [output]


CALLS: list[Any] = [
    lambda module: trained(module, VALUE),
    lambda module: trained(module, THREE),
    lambda module: trained(module, VALUE, 2.0),
    lambda module: evaluated(module, VALUE),
]


@pytest.mark.parametrize("lanes", ["inline", "threads"])
def test_kinds_of_calls_by_several_threads(lanes: str) -> None:
    pipe, expected = autosplit(kinds(), devices=["cpu"] * 2, chunks=3, lanes=lanes), [call(kinds()) for call in CALLS]

    def repeated(number: int) -> list[list[Tensor]]:
        return [CALLS[number](pipe) for _ in range(12)]

    for wanted, results in zip(expected, together(repeated), strict=True):
        for found in results:
            torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    pipe(THREE)
    assert "self.stage1(" in pipe.code


class Meeting(Kinds):
    """Runs what the calling thread brings, where its Python runs: while it is recorded."""

    def forward(self, x: Tensor, scale: float | None = None) -> Any:
        getattr(threading.current_thread(), "meet", bool)()
        return super().forward(x, scale)


def loaded(pipe: Any, parameters: list[nn.Parameter]) -> None:
    pipe.load_state_dict({name: 2 * value for name, value in kinds().state_dict().items()})


BESIDE: dict[str, Any] = {
    "lists parameters": lambda pipe, parameters: [p.grad for p in pipe.parameters()],
    "lists state": lambda pipe, parameters: [t.grad for t in pipe.state_dict(keep_vars=True).values()],
    "loads state": loaded,
    "sets the mode": lambda pipe, parameters: pipe.eval() and None,
    "adds to gradients": lambda pipe, parameters: sum(p.square().sum() for p in parameters).backward(),
}


@pytest.mark.parametrize("action", BESIDE)
def test_what_another_thread_does_while_a_model_is_recorded(action: str) -> None:
    def left_by(*, beside: bool) -> Any:
        torch.manual_seed(0)
        own, results, begun = Meeting().double(), list[Any](), list[threading.Thread]()
        pipe, parameters = autosplit(own, devices=["cpu"] * 2, chunks=3, lanes="inline"), list(own.parameters())
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        act = threading.Thread(target=lambda: results.append(BESIDE[action](pipe, parameters)))

        def meet() -> None:
            if not begun:
                begun.append(act)
                act.start()
                act.join(0.5)  # it waits for the recording, or must be right within it

        caller = threading.Thread(target=lambda: pipe(THREE))
        caller.meet = meet if beside else bool  # type: ignore[attr-defined]
        caller.start()
        caller.join()
        assert len(begun) == beside
        act.join() if beside else act.run()
        return results, own.state_dict(), [p.grad for p in parameters], [m.training for m in own.modules()]

    torch.testing.assert_close(left_by(beside=True), left_by(beside=False), rtol=0, atol=0)


def test_a_model_is_recorded_while_another_pipe_of_it_is_called() -> None:
    torch.manual_seed(0)
    own, inside, done = Meeting().double(), threading.Event(), threading.Event()
    pipe, twin = (autosplit(own, devices=["cpu"] * 2, chunks=3, lanes="inline") for _ in range(2))
    own.first.register_forward_hook(lambda *_: getattr(threading.current_thread(), "begin", list)() or None)
    twin(VALUE)
    results = list[Any]()
    caller = threading.Thread(target=lambda: results.append(trained(twin, VALUE)))
    recorder = threading.Thread(target=lambda: pipe(THREE))
    recorder.meet = lambda: (inside.set(), done.wait(0.5))  # type: ignore[attr-defined]

    def begin() -> None:
        if recorder.ident is None:
            recorder.start()
        inside.wait(0.5)  # it waits for this call, or has begun

    caller.begin = begin  # type: ignore[attr-defined]
    caller.start()
    caller.join()
    done.set()
    recorder.join()
    assert inside.is_set()
    torch.testing.assert_close(results, [trained(kinds(), VALUE)], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("lanes", ["inline", "threads"])
def test_a_backward_in_another_thread_while_a_call_runs(lanes: str) -> None:
    own = kinds()
    pipe = autosplit(own, devices=["cpu"] * 2, chunks=3, lanes="inline", sample=VALUE)
    other = autosplit(kinds(), devices=["cpu"] * 2, chunks=3, lanes=lanes, sample=VALUE)
    loss, done, waited = other(VALUE).sum(), threading.Event(), list[bool]()

    def backward() -> None:
        loss.backward()
        done.set()

    def wait(*_: Any) -> None:
        threading.Thread(target=backward).start() if not waited else None
        waited.append(done.wait(60))

    own.norm.register_forward_hook(wait)
    pipe(THREE)
    assert waited
    assert all(waited)
    assert other.unsplit().first.weight.grad is not None


def test_a_call_inside_a_call() -> None:
    model = kinds()
    pipe = autosplit(model, devices=["cpu"] * 2, chunks=3, lanes="inline", sample=VALUE)
    plain, inner = trained(kinds(), THREE), list[Tensor]()
    with torch.no_grad():
        pipe(THREE)

    def again(*_: Any) -> None:
        if len(inner) < 6:
            inner.append(torch.empty(()))
            with torch.no_grad():
                inner[-1] = pipe(VALUE[:4])

    model.norm.register_forward_hook(again)
    pipe(THREE[:3])
    torch.testing.assert_close(trained(pipe, THREE), plain, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(inner[-1], kinds()(VALUE[:4]).detach(), rtol=1e-12, atol=1e-12)


class Around(nn.Module):
    """A model that calls a pipe, which is no part of it."""

    def __init__(self, inside: Any) -> None:
        super().__init__()
        self.first, self.last, self.inside = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), [inside]

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.inside[0](torch.tanh(self.first(x))))


@pytest.mark.filterwarnings("ignore:The pipeline of Around has collapsed")
@pytest.mark.parametrize("lanes", ["inline", "threads"])
def test_a_pipe_in_a_model_of_another_pipe(lanes: str) -> None:
    def around(inside: Any) -> Around:
        torch.manual_seed(1)
        return Around(inside).double()

    inside = autosplit(kinds(), devices=["cpu"] * 2, chunks=2, lanes=lanes)
    outside = autosplit(around(inside), devices=["cpu"] * 2, chunks=2, lanes="inline")
    expected = [around(kinds())(VALUE), kinds()(VALUE)]
    for number, output in enumerate(together(lambda number: (outside, inside)[number % 2](VALUE))):
        torch.testing.assert_close(output, expected[number % 2], rtol=1e-12, atol=1e-12)
