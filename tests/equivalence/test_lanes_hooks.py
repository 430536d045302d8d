"""Hooks, checkpointing and function transforms on both kinds of lanes: what they see is what the plain model shows."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

from autosplit import autosplit
from tests.equivalence.equality import LANES, probe_loss
from tests.equivalence.side_by_side import as_plain, assert_equal, both, check, grads, pair, value_of
from tests.models.named import WIDTH, numbers
from tests.pairwise import in_turn, pairwise


# -- hooks --------------------------------------------------------------------------------------------------------
@pairwise(name=("shared weight", "repeated block", "hub"), step=(False, True), lanes=LANES)
def test_hooks_of_parameters_and_inputs_fire_once_with_the_whole_gradient(name: str, step: bool, lanes: str) -> None:
    target = numbers(9, WIDTH, seed=1)

    def run(module: nn.Module) -> Sequence[Any]:
        seen: list[tuple[str, str, Tensor]] = []
        for key, parameter in module.named_parameters():
            _hook(parameter, key, seen)
        value = value_of()
        value.register_hook(lambda gradient: seen.append(("input", "", gradient.clone())) or gradient * 3)
        for _ in range(2):
            if step and hasattr(module, "train_step"):
                module.train_step(value, target=target, loss_fn=F.mse_loss)
            else:
                F.mse_loss(module(value), target).backward()
        seen.sort(key=lambda entry: entry[:2])
        return [*(entry[:2] for entry in seen), *(entry[2] for entry in seen), value.grad, *grads(module)]

    check(run, name, lanes)


def _hook(parameter: Tensor, key: str, seen: list[Any]) -> None:
    def before(gradient: Tensor) -> Tensor:
        seen.append(("before", key, gradient.clone()))
        return gradient.clamp(-0.02, 0.02)  # not linear: only the whole gradient gives the plain result

    def behind(changed: Tensor) -> None:
        assert changed.grad is not None
        seen.append(("behind", key, changed.grad.clone()))

    parameter.register_hook(before)
    parameter.register_post_accumulate_grad_hook(behind)


@both
def test_train_step_with_hooks_runs_by_the_schedule(lanes: str) -> None:
    pipe = pair("shared weight", lanes)[1]
    for parameter in pipe.parameters():
        parameter.register_hook(lambda _: None)
    rows: list[int] = []

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        rows.append(len(output))
        return F.mse_loss(output, target)

    pipe.train_step(value_of(), target=numbers(9, WIDTH), loss_fn=loss_fn, loss_reduction="mean")
    assert rows == [3, 2, 2, 2]


@both
def test_a_loss_with_parameters_of_its_own_and_a_penalty_on_all_of_the_models(lanes: str) -> None:
    def run(module: nn.Module) -> Sequence[Any]:
        seen: list[tuple[str, str, Tensor]] = []
        scale = nn.Parameter(torch.tensor(1.3, dtype=torch.float64))
        for key, parameter in (*module.named_parameters(), ("scale", scale)):
            _hook(parameter, key, seen)

        def loss_fn(output: Tensor, target: Tensor) -> Tensor:
            return F.mse_loss(output * scale, target) + 0.1 * sum(p.pow(2).sum() for p in module.parameters())

        target = numbers(9, WIDTH, seed=1)
        for _ in range(2):
            if hasattr(module, "train_step"):
                module.train_step(value_of(), target=target, loss_fn=loss_fn)
            else:
                loss_fn(module(value_of()), target).backward()
        seen.sort(key=lambda entry: entry[:2])
        return [*(entry[:2] for entry in seen), *(entry[2] for entry in seen), scale.grad, *grads(module)]

    for name in ("chain", "shared weight"):
        check(run, name, lanes)


@both
def test_hooks_are_back_after_an_error_in_the_backward(lanes: str) -> None:
    plain, pipe = pair("shared weight", lanes)
    parameters = list(pipe.parameters())
    calls: list[int] = []
    for index, parameter in enumerate(parameters):
        parameter.register_hook(lambda _, index=index: calls.append(index))
    loss = probe_loss(pipe(value_of()))
    with torch.no_grad():
        parameters[0].mul_(1)
    with pytest.raises(RuntimeError, match="inplace"):
        loss.backward()
    calls.clear()
    probe_loss(pipe(value_of())).backward()
    assert sorted(calls) == list(range(len(parameters)))
    probe_loss(plain(value_of())).backward()
    assert_equal(grads(pipe), grads(plain))


@as_plain("shared weight")
def test_hooks_of_several_gradients_and_of_the_nodes_that_accumulate(module: nn.Module) -> Sequence[Any]:
    seen: list[Any] = []
    parameters = list(module.parameters())
    torch.autograd.graph.register_multi_grad_hook(parameters, lambda found: seen.append(len(found)))
    nodes = [p.view_as(p).grad_fn.next_functions[0][0] for p in parameters]
    for index, node in enumerate(nodes):
        node.register_hook(lambda *_, index=index: seen.append((index, "behind")))
        node.register_prehook(lambda *_, index=index: seen.append((index, "before")))
    probe_loss(module(value_of())).backward()
    return sorted(map(str, seen))


@both
def test_full_backward_hooks_of_layers_fire_per_microbatch_and_may_change_gradients(lanes: str) -> None:
    rows: dict[str, list[int]] = {}

    def run(module: nn.Module) -> Sequence[Any]:
        module(value_of())  # the call that plans
        for key, layer in module.named_modules():
            if isinstance(layer, nn.Linear):
                layer.register_full_backward_hook(
                    lambda _, inputs, outputs, key=key: (
                        rows.setdefault(key, []).append(len(outputs[0])) or tuple(g * 2 for g in inputs)
                    )
                )
                layer.register_full_backward_pre_hook(lambda _, outputs: tuple(g * 1.5 for g in outputs))
        value = value_of()
        loss = probe_loss(module(value))
        loss.backward(retain_graph=True)
        loss.backward()
        return [value.grad, *grads(module)]

    check(run, "chain", lanes)
    assert [sorted(own) for own in rows.values()] == [[2, 2, 2, 2, 2, 2, 3, 3, 9, 9]] * 4


@both
def test_full_backward_hooks_of_the_model_fire_once_in_a_training_step(lanes: str) -> None:
    target = numbers(9, WIDTH, seed=1)

    def run(module: nn.Module) -> Sequence[Any]:
        seen: list[Tensor] = []
        module(value_of())  # the call that plans
        module.register_full_backward_pre_hook(lambda _, outputs: seen.append(outputs[0].clone()))
        module.register_full_backward_hook(lambda _, inputs, outputs: (inputs[0] * 2,))
        value = value_of()
        if hasattr(module, "train_step"):
            module.train_step(value, target=target, loss_fn=F.mse_loss)
        else:
            F.mse_loss(module(value), target).backward()
        return [*seen, value.grad, *grads(module)]

    check(run, "chain", lanes)


# -- checkpoint and transforms ------------------------------------------------------------------------------------
@pairwise(reentrant=(False, True), first=(False, True), lanes=LANES)
def test_checkpoint(reentrant: bool, first: bool, lanes: str) -> None:
    def run(module: nn.Module) -> Sequence[Any]:
        value = value_of()
        if not first:
            module(value)
        loss = probe_loss(checkpoint(module, value, use_reentrant=reentrant))
        loss.backward(retain_graph=not reentrant)
        if not reentrant:
            loss.backward()
        return [value.grad, *grads(module)]

    check(run, "hub", lanes)


def probe(output: Tensor) -> Tensor:
    """Return a scalar; unlike ``probe_loss`` it does not ask for ``requires_grad``, which transforms hide."""
    return (output * torch.arange(output.numel(), dtype=output.dtype).cos().reshape(output.shape)).sum()


DIRECTION = numbers(9, WIDTH, seed=2)
TRANSFORMS: dict[str, Callable[[nn.Module, Tensor], Sequence[Tensor]]] = {
    "grad": lambda module, value: [torch.func.grad(lambda v: probe(module(v)))(value)],
    "vjp": lambda module, value: torch.func.vjp(module, value)[1](DIRECTION),
    "jvp": lambda module, value: torch.func.jvp(module, (value,), (DIRECTION,)),
    "vmap": lambda module, value: [torch.func.vmap(module)(torch.stack([value, DIRECTION]))],
    "jacrev": lambda module, value: [torch.func.jacrev(module)(value)],
    "hessian": lambda module, value: [torch.func.hessian(lambda v: probe(module(v)))(value)],
    "jacobian": lambda module, value: [torch.autograd.functional.jacobian(module, value)],
    "jacobian in one backward": lambda module, value: [
        torch.autograd.functional.jacobian(module, value, vectorize=True)
    ],
    "other parameters": lambda module, value: [
        torch.func.functional_call(module, {n: p.detach() * 2 for n, p in module.named_parameters()}, (value,))
    ],
}


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@in_turn(rest=False, name=list(TRANSFORMS), case=(("hub", "inline"), ("shared weight", "threads")))
def test_function_transforms(name: str, case: tuple[str, str]) -> None:
    def run(module: nn.Module) -> Sequence[Any]:
        value = value_of(gradient=False)
        module(value)
        return TRANSFORMS[name](module, value)

    check(run, *case)


@as_plain("shared weight")
def test_functional_call_with_parameters_of_the_callers_graph(module: nn.Module) -> Sequence[Any]:
    module(value_of())
    leaves = {name: (p.detach() * 2).requires_grad_() for name, p in module.named_parameters()}
    given = {name: leaf * 1.5 for name, leaf in leaves.items()}
    loss = probe_loss(torch.func.functional_call(module, given, (value_of(),)))
    return [*torch.autograd.grad(loss, list(leaves.values())), *grads(module)]


# -- hooks under recompute: they run again -----------------------------------------------------------------------------
def blocks_of_two() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)) for _ in range(4)]
    return nn.Sequential(*blocks).double().train()


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")
@pytest.mark.parametrize(
    ("make", "options"),
    [
        (nn.utils.spectral_norm, {"chunks": 1}),
        *itertools.product(
            [nn.utils.weight_norm, lambda layer: prune.random_unstructured(layer, "weight", 0.4)],
            [{"chunks": 1}, {"chunks": 3, "recompute": "always"}, {"chunks": 3, "recompute": "block"}],
        ),
    ],
)
def test_a_hook_that_makes_a_weight_runs_again(make: Callable[[nn.Module], Any], options: dict[str, Any]) -> None:
    """As ``torch.nn.utils`` has it: a plain attribute, made before each forward, and no new kind of call."""
    plain, split = blocks_of_two(), blocks_of_two()
    for net in (plain, split):
        torch.manual_seed(1)
        make(net[1][0])
    pipe, x = autosplit(split, devices=2, **options), torch.randn(6, 6, dtype=torch.float64)
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (plain, split)]
    for _ in range(4):
        F.mse_loss(plain(x), x).backward()
        pipe.train_step(x, target=x, loss_fn=F.mse_loss)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert pipe._core.recordings.made == 1
    for one, other in zip(plain.parameters(), split.parameters(), strict=True):
        torch.testing.assert_close(other, one, rtol=1e-10, atol=1e-12)


def test_a_tensor_that_a_hook_does_not_make_is_read_anew() -> None:
    class Scaled(nn.Module):
        """Has a parameter that is called after a plain tensor, as weight norms have."""

        def __init__(self) -> None:
            super().__init__()
            self.scale, self.scale_bias = torch.ones(6), nn.Parameter(torch.zeros(6))
            self.layers = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))

        def forward(self, value: Tensor) -> Tensor:
            return self.layers(value) * self.scale + self.scale_bias

    model, x = Scaled(), torch.randn(4, 6)
    model.register_forward_pre_hook(lambda *_: None)
    pipe = autosplit(model, devices=2, chunks=1)
    for factor in (1.0, 2.0, 3.0):
        model.scale = torch.full((6,), factor)
        torch.testing.assert_close(pipe(x), model(x))
