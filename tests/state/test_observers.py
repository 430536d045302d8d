"""Forwards that observe gradients: hooks on what they compute, on autograd's nodes and on what autograd saves."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import graph
from torch.utils.checkpoint import checkpoint

from autosplit import autosplit

WIDTH = 6
BATCH = torch.linspace(-1, 1, 8 * WIDTH, dtype=torch.float64).reshape(8, WIDTH)
pytestmark = pytest.mark.filterwarnings("ignore:The pipeline of")


class Observing(nn.Module):
    def __init__(self, observe: Callable[[Observing, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.observe = nn.Linear(WIDTH, WIDTH), observe
        self.log, self.kept = list[float](), list[Tensor]()

    def forward(self, x: Tensor) -> Tensor:
        return self.observe(self, x)

    def compute(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x))

    def note(self, gradient: Tensor) -> None:
        self.log.append(gradient.norm().item())


def retained(own: Observing, x: Tensor) -> Tensor:
    hidden = own.compute(x)
    hidden.retain_grad()
    own.kept = [hidden]
    return hidden * 2


def retained_where_it_can(own: Observing, x: Tensor) -> Tensor:
    own.kept = [own.compute(x)]
    if own.kept[0].requires_grad:
        own.kept[0].retain_grad()
    return own.kept[0]


def hook(own: Observing, x: Tensor) -> Tensor:
    hidden = own.compute(x)
    hidden.register_hook(own.note)
    return hidden


def hook_of_an_input(own: Observing, x: Tensor) -> Tensor:
    x.register_hook(own.note)
    return own.compute(x)


def hook_that_changes(own: Observing, x: Tensor) -> Tensor:
    hidden = own.compute(x)
    hidden.register_hook(lambda gradient: 3 * gradient)
    return hidden


def hook_of_a_node(own: Observing, x: Tensor) -> Tensor:
    hidden = own.compute(x)
    hidden.grad_fn.register_hook(lambda into, out: own.note(out[0]))  # type: ignore[union-attr]
    return hidden


def hook_before_a_node(own: Observing, x: Tensor) -> Tensor:
    hidden = own.compute(x)
    hidden.grad_fn.register_prehook(lambda out: own.note(out[0]))  # type: ignore[union-attr]
    return hidden


def hook_of_a_node_that_changes(own: Observing, x: Tensor) -> Tensor:
    hidden = own.compute(x)
    hidden.grad_fn.register_hook(lambda into, out: tuple(3 * own for own in into))  # type: ignore[union-attr]
    return hidden


def hook_where_gradients_accumulate(own: Observing, x: Tensor) -> Tensor:
    hidden, weight = own.compute(x), own.layer.weight
    node = weight.expand_as(weight).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    node.register_hook(lambda into, out: own.log.append(len(own.log)))
    return hidden


def hook_of_an_edge(own: Observing, x: Tensor) -> Tensor:
    hidden = own.compute(x)
    graph.get_gradient_edge(hidden).node.register_prehook(lambda out: own.note(out[0]))
    return hidden


def hook_of_several(own: Observing, x: Tensor) -> Tensor:
    hidden = own.compute(x)
    other = 2 * hidden
    graph.register_multi_grad_hook((hidden, other), lambda gradients: [own.note(each) for each in gradients])
    return hidden + other


def hooks_of_saved_tensors(own: Observing, x: Tensor) -> Tensor:
    with graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: (own.note(tensor), tensor)[1]):
        return own.compute(x)


class Rounded(graph.saved_tensors_hooks):
    def __init__(self) -> None:
        super().__init__(lambda tensor: tensor.float(), lambda tensor: tensor.double())


def saved_tensors_that_are_rounded(own: Observing, x: Tensor) -> Tensor:
    with Rounded():
        return own.compute(x)


OBSERVED = [
    retained,
    retained_where_it_can,
    hook,
    hook_of_an_input,
    hook_that_changes,
    hook_of_a_node,
    hook_before_a_node,
    hook_of_a_node_that_changes,
    hook_where_gradients_accumulate,
    hook_of_an_edge,
    hook_of_several,
    hooks_of_saved_tensors,
    saved_tensors_that_are_rounded,
]


def observing(observe: Callable[[Observing, Tensor], Tensor]) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), Observing(observe), nn.Linear(WIDTH, WIDTH)).double()


def seen(model: Any) -> tuple[list[float], list[Any], list[Any]]:
    own = model[1]
    return own.log, [each.grad for each in own.kept], [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("observe", OBSERVED, ids=lambda observe: observe.__name__)
def test_what_a_forward_observes_is_what_it_would_alone(observe: Any) -> None:
    plain, model = observing(observe), observing(observe)
    step = OBSERVED.index(observe) % 2
    pipe = autosplit(model, devices=["cpu"] * 2, chunks=4, lanes="threads" if step else "inline")
    for _ in range(6):
        nn.functional.mse_loss(plain(BATCH), BATCH).backward()
        if step:
            pipe.train_step(BATCH, target=BATCH, loss_fn=nn.functional.mse_loss)
        else:
            nn.functional.mse_loss(pipe(BATCH), BATCH).backward()
    torch.testing.assert_close(seen(model), seen(plain), rtol=1e-12, atol=1e-12)
    assert pipe._core.recordings.tree is None, "a graph follows the rest of the model"
    assert len(pipe.recordings) == 1, "what it keeps is another in each step, but its Python runs in each"


class Returning(nn.Module):
    """A model whose own forward keeps an activation's gradient for its caller."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.tanh(self.first(x))
        hidden.retain_grad()
        return self.last(hidden), hidden


def test_an_activation_that_is_returned_with_its_gradient() -> None:
    def gradient(model: Any) -> Tensor | None:
        output, hidden = model(BATCH)
        output.square().sum().backward()
        return hidden.grad

    torch.manual_seed(0)
    model = Returning().double()
    expected = gradient(model)
    pipe = autosplit(model, devices=["cpu"] * 2, chunks=4)
    torch.testing.assert_close(gradient(pipe), expected, rtol=1e-12, atol=1e-12)


class Checkpointed(nn.Module):
    """A stem, and blocks under a reentrant checkpoint: they get no gradients unless their input requires one."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.stem, self.way = nn.Linear(WIDTH, WIDTH), way
        norm = nn.BatchNorm1d if way == "a norm" else nn.LayerNorm
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), norm(WIDTH), nn.Tanh()) for _ in range(2))
        self.stem.requires_grad_(way == "a norm")
        if way == "a hook":
            self.stem.register_forward_hook(require_gradients)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        if self.way == "the model":
            x = x.detach().requires_grad_()
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)  # type: ignore[assignment]
        return x


def require_gradients(module: nn.Module, args: Any, output: Tensor) -> None:
    output.requires_grad_()


@pytest.mark.parametrize("lanes", ["inline", "threads"])
@pytest.mark.parametrize("way", ["a hook", "the model", "a norm"])
def test_a_reentrant_checkpoint_over_what_is_made_to_require_a_gradient(way: str, lanes: str) -> None:
    torch.manual_seed(0)
    model = Checkpointed(way).double()
    plain = copy.deepcopy(model)
    pipe = autosplit(model, devices=["cpu"] * 2, chunks=4, lanes=lanes)
    for _ in range(2):
        nn.functional.mse_loss(plain(BATCH), BATCH).backward()
        pipe.train_step(BATCH, target=BATCH, loss_fn=nn.functional.mse_loss)
    for own, other in ((model.parameters(), plain.parameters()), (model.buffers(), plain.buffers())):
        for each, wanted in zip(own, other, strict=True):
            torch.testing.assert_close(each, wanted, rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(each.grad, wanted.grad, rtol=1e-12, atol=1e-12)
    assert (pipe._core.recordings.tree is None) == (way != "a norm"), (
        "a norm counts each batch twice, as in plain torch"
    )


def logged_by(hook: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)).double()
    model[0].register_forward_hook(hook)
    return model, autosplit(model, devices=["cpu"] * 2, chunks=4)


def test_a_hook_of_a_layer_that_only_logs_sees_each_microbatch() -> None:
    log: list[float] = []
    model, pipe = logged_by(lambda module, args, output: log.append(output.square().sum().item()))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pipe(BATCH)
    expected = nn.functional.linear(BATCH, model[0].weight, model[0].bias).detach()
    torch.testing.assert_close(log, [rows.square().sum().item() for rows in expected.chunk(4)])


@pytest.mark.filterwarnings("ignore:.* devices were given")
def test_a_hook_that_decides_by_a_value_is_named_by_the_warning() -> None:
    _, pipe = logged_by(lambda module, args, output: 2 * output if output.mean().item() > 0 else output)
    where = rf"it reads a tensor's value \(item, {__file__}:\d+\)"
    with pytest.warns(UserWarning, match=where):
        pipe(BATCH)


@pytest.mark.parametrize("lanes", ["inline", "threads"])
def test_hooks_of_parameters_are_called_once_each_in_an_order_of_their_own(lanes: str) -> None:
    """The order is the engine's for leaves of one node, not that of a backward: see docs/limits.md."""

    def called(make: Callable[[nn.Module], Any]) -> list[str]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)).double()
        log: list[str] = []
        for name, parameter in model.named_parameters():
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: log.append(name))
        step = make(model)
        step(BATCH, BATCH)
        return log

    def stepped(model: nn.Module) -> Any:
        pipe = autosplit(model, devices=["cpu"] * 2, chunks=4, lanes=lanes)
        return lambda x, y: pipe.train_step(x, target=y, loss_fn=nn.functional.mse_loss)

    plain = called(lambda model: lambda x, y: nn.functional.mse_loss(model(x), y).backward())
    assert sorted(called(stepped)) == sorted(plain)


def hook_of_a_parameter(own: Observing, x: Tensor) -> Tensor:
    if not own.log:
        own.layer.weight.register_post_accumulate_grad_hook(lambda weight: own.note(weight.grad))
    return own.compute(x)


def hook_of_a_parameter_each_time(own: Observing, x: Tensor) -> Tensor:
    own.layer.weight.register_post_accumulate_grad_hook(lambda weight: own.note(weight.grad))
    return own.compute(x)


def hook_of_all_parameters(own: Observing, x: Tensor) -> Tensor:
    parameters = tuple(own.layer.parameters())
    graph.register_multi_grad_hook(parameters, lambda gradients: [own.note(each) for each in gradients])
    return own.compute(x)


def backward_inside(own: Observing, x: Tensor) -> Tensor:
    with torch.enable_grad():
        own.compute(x.detach()).square().mean().backward()
    return own.compute(x)


@pytest.mark.parametrize("trains", [False, True], ids=["calls", "train_step"])
@pytest.mark.parametrize(
    "observe",
    [hook_of_a_parameter, hook_of_a_parameter_each_time, hook_of_all_parameters, backward_inside],
    ids=lambda observe: observe.__name__,
)
def test_planning_leaves_no_hook_of_a_parameter_and_no_gradient(observe: Any, trains: bool) -> None:
    plain, model = observing(observe), observing(observe)
    pipe = autosplit(model, devices=["cpu"] * 2, chunks=4, lanes="inline")
    for rows in (8, 8, 5):  # a second kind of call is recorded when there are gradients
        nn.functional.mse_loss(plain(BATCH[:rows]), BATCH[:rows]).backward()
        if trains:
            pipe.train_step(BATCH[:rows], target=BATCH[:rows], loss_fn=nn.functional.mse_loss)
        else:
            nn.functional.mse_loss(pipe(BATCH[:rows]), BATCH[:rows]).backward()
        torch.testing.assert_close(seen(model), seen(plain), rtol=1e-12, atol=1e-12)
