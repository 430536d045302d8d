"""The pipe's state is the model's own: names, objects, modes, hooks and replacements."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx, nn

from autosplit import autosplit
from tests.equivalence.equality import Batch, assert_equal_runs, forward_backward
from tests.models.named import CASES, Case, flat, numbers
from tests.pairwise import mostly_slow

pytestmark = pytest.mark.filterwarnings("ignore:.*stage:UserWarning")
NAMES = ("chain", "nested skips", "shared weight", "tiny gpt", "weight norm", "repeated block", "unused parameters")


@pytest.fixture(params=mostly_slow(NAMES, "nested skips", "shared weight"))
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


def split(model: nn.Module) -> nn.Module:
    return autosplit(model, devices=["cpu"] * 3, chunks=4)


@pytest.mark.parametrize("planned", [False, True])
def test_names_and_objects_are_the_models(case: Case, planned: bool) -> None:
    model = case.build()
    parameters, buffers = dict(model.named_parameters(remove_duplicate=False)), dict(model.named_buffers())
    names, keys = [name for name, _ in model.named_modules()], list(model.state_dict())
    pipe = split(model)
    if planned:
        forward_backward(pipe, case.batch(8))
    assert isinstance(pipe, fx.GraphModule)
    assert list(pipe.state_dict()) == keys
    assert [name for name, _ in pipe.named_modules()] == names
    for found, expected in (
        (dict(pipe.named_parameters(remove_duplicate=False)), parameters),
        (dict(pipe.named_buffers()), buffers),
    ):
        assert list(found) == list(expected)
        assert all(found[name] is tensor for name, tensor in expected.items())


def test_unsplit_returns_the_model_itself(case: Case) -> None:
    model, plain = case.build(), case.build()
    pipe = split(model)
    assert pipe.unsplit() is model
    assert_equal_runs(forward_backward(pipe, case.batch(8)), forward_backward(plain, case.batch(8)))
    assert pipe.unsplit() is model
    assert_equal_runs(forward_backward(model, case.batch(8)), forward_backward(plain, case.batch(8)))


class Awkward(nn.Module):
    """Its children and buffers have names that a graph module uses itself."""

    NAMES = ("graph", "code", "stage0", "plan", "model", "stages", "report", "_graph", "root", "split")

    def __init__(self) -> None:
        super().__init__()
        for name in self.NAMES:
            setattr(self, name, nn.Linear(6, 6))
        self.register_buffer("rows", torch.linspace(0, 1, 6))
        self.weight = nn.Parameter(torch.linspace(1, 2, 6))

    def forward(self, value: Tensor) -> Tensor:
        for name in self.NAMES:
            value = torch.tanh(self.get_submodule(name)(value)) + value * self.rows
        return value * self.weight


def test_children_whose_names_a_graph_module_uses_itself() -> None:
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Awkward().double())
    plain, pipe = models[0], split(models[1])
    for rows in (8, 5):
        assert_equal_runs(forward_backward(pipe, flat(rows)), forward_backward(plain, flat(rows)))
    assert list(pipe.state_dict()) == list(plain.state_dict())
    assert len(pipe.__dict__["_modules"]) == len(Awkward.NAMES)


@pytest.mark.parametrize("assign", [False, True])
def test_loaded_values_are_seen_by_the_next_call(case: Case, assign: bool) -> None:
    plain, pipe = case.build(), split(case.build())
    forward_backward(pipe, case.batch(8))
    values = {name: tensor + 0.01 * numbers(*tensor.shape) for name, tensor in plain.state_dict().items()}
    if case.name in ("tiny gpt", "shared weight"):  # the two names of a tied parameter get the one value
        first, second = {"tiny gpt": ("table", "head"), "shared weight": ("first", "last")}[case.name]
        values[f"{second}.weight"] = values[f"{first}.weight"]
    for module in (plain, pipe):
        result = module.load_state_dict({name: value.clone() for name, value in values.items()}, assign=assign)
        assert not result.missing_keys
        assert not result.unexpected_keys
    assert_equal_runs(forward_backward(pipe, case.batch(8)), forward_backward(plain, case.batch(8)))


class LowRank(nn.Module):
    """Wraps a frozen linear layer as LoRA does."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner.requires_grad_(False)
        self.down = nn.Parameter(numbers(2, inner.in_features, seed=1))
        self.up = nn.Parameter(numbers(inner.out_features, 2, seed=2))

    def forward(self, value: Tensor) -> Tensor:
        return self.inner(value) + value @ self.down.T @ self.up.T


@pytest.mark.parametrize("planned", [False, True])
def test_a_module_replaced_after_the_split_is_seen(planned: bool) -> None:
    case = CASES["nested skips"]
    plain, pipe = case.build(), split(case.build())
    if planned:
        forward_backward(pipe, case.batch(8))
    for module in (plain, pipe):
        module.down[1] = LowRank(module.down[1])
        module.up[2] = LowRank(module.up[2])
    for rows in (8, 5):
        assert_equal_runs(forward_backward(pipe, case.batch(rows)), forward_backward(plain, case.batch(rows)))
    assert list(pipe.state_dict()) == list(plain.state_dict())


def test_a_module_replaced_by_one_of_the_same_kind_is_seen() -> None:
    case = CASES["chain"]
    plain, pipe = case.build(), split(case.build())
    forward_backward(pipe, case.batch(8))
    for module in (plain, pipe):
        torch.manual_seed(9)
        module.set_submodule("2.0", nn.Linear(6, 6, dtype=torch.float64))
        module.set_submodule("1.1", nn.GELU())
    assert_equal_runs(forward_backward(pipe, case.batch(8)), forward_backward(plain, case.batch(8)))


def test_a_parameter_changed_in_place_and_one_assigned_are_seen() -> None:
    case = CASES["nested skips"]
    plain, pipe = case.build(), split(case.build())
    forward_backward(pipe, case.batch(8))
    for module in (plain, pipe):
        with torch.no_grad():
            module.down[0].weight.mul_(0.5)
        module.up[0].weight = nn.Parameter(module.up[0].weight.detach() * 0.5)
    assert_equal_runs(forward_backward(pipe, case.batch(8)), forward_backward(plain, case.batch(8)))


@pytest.mark.parametrize("change", [nn.Module.double, lambda pipe: pipe.to(torch.float64), lambda pipe: pipe.to("cpu")])
@pytest.mark.parametrize("planned", [False, True])
def test_to_takes_a_dtype_and_the_one_device(change: Callable[[nn.Module], nn.Module], planned: bool) -> None:
    plain, pipe = CASES["chain"].build().float(), split(CASES["chain"].build().float())
    if planned:
        pipe(numbers(8, 6).float())
    assert change(pipe) is pipe
    change(plain)
    dtype = next(plain.parameters()).dtype
    batch = Batch((numbers(8, 6).to(dtype),))
    assert_equal_runs(forward_backward(pipe, batch), forward_backward(plain, batch), dtype=dtype)
