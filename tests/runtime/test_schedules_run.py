"""How any schedule runs: turns of lanes with several stages, split backwards, errors by action, streams in order."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from autosplit import autosplit
from autosplit.backward import gradients
from autosplit.runtime.lanes.lanes import StreamLane
from autosplit.runtime.lanes.threads import Turn, backwards, forwards, turns
from autosplit.runtime.step.cells import Cells
from autosplit.schedule.action import Action, Schedule
from autosplit.schedule.catalog import SCHEDULES, build
from autosplit.schedule.entry import Receive
from autosplit.schedule.order import lane_lists
from autosplit.weight_gradients import DeferredWeightGrads, Product, uses_to_defer
from tests.equivalence.equality import TOLERANCE, difference
from tests.runtime.gates import (
    CHUNKS,
    LANES,
    STAGES,
    Boom,
    Case,
    notes,
    raiser,
)
from tests.runtime.happens_before import problems
from tests.runtime.lane_models import ROWS, WIDTH, Skips
from tests.runtime.recorded_pipe import RecordedPipe


def turn(text: str, number: int, needs: tuple[int, ...], tells: tuple[int, ...]) -> Turn:
    return Turn(Action.parse(text), number, needs, tells)


# -- turns -----------------------------------------------------------------------------------------------------------


def test_stages_of_one_lane_send_each_other_no_messages() -> None:
    chain_and_skip = [set(), {0}, {0, 1}, {2}]
    assert turns(lane_lists(build("zb_v", stages=4, microbatches=1), chain_and_skip)) == (
        (
            turn("0F0", 0, (), (1,)),
            turn("3F0", 1, (7,), ()),
            turn("3I0", 2, (), (1,)),
            turn("3W0", 3, (), ()),
            turn("0I0", 4, (10, 8), ()),
            turn("0W0", 5, (), ()),
        ),
        (
            turn("1F0", 6, (0,), ()),
            turn("2F0", 7, (), (0,)),
            turn("2I0", 8, (2,), (0,)),
            turn("2W0", 9, (), ()),
            turn("1I0", 10, (), (0,)),
            turn("1W0", 11, (), ()),
        ),
    )


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_call_runs_a_schedules_forwards_and_their_reverse(name: str) -> None:
    whole = build(name, stages=4, microbatches=3)
    for lane, ahead, back in zip(whole.lanes, forwards(whole).lanes, backwards(whole).lanes, strict=True):
        assert ahead == tuple(action for action in lane if action.kind == "F")
        assert back == tuple(Action(a.stage, "B", a.microbatch) for a in reversed(ahead))
    both = tuple(ahead + back for ahead, back in zip(forwards(whole).lanes, backwards(whole).lanes, strict=True))
    assert len(Schedule(name, both, whole.stage_lane).clocks) == 2 * 4 * 3


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb_v"])
def test_the_program_is_the_list_of_a_call(name: str) -> None:
    """A receive is a transfer and a send an event: between stages of one lane there are none."""
    pipe = autosplit(Skips(), devices=["cpu"] * 2, chunks=3, schedule=name, virtual_stages=1 if name == "1f1b" else 2)
    pipe(torch.ones(6, WIDTH))
    schedule, [recorded] = pipe.plan.schedule_for(3), pipe._core.recordings.kept.values()
    lists = lane_lists(forwards(schedule), recorded[0].lowered.sources)
    expected = {f"y{action.stage}_{action.microbatch}" for action in forwards(schedule)}
    for entry in (entry for entries in lists for entry in entries if not isinstance(entry, Action)):
        source, target, microbatch, *_ = entry.route
        received = isinstance(entry, Receive)
        expected.add(f"y{source}_{microbatch}_on{target}" if received else f"done{source}_{microbatch}")
    assert set(re.findall(r"^ +((?:y|done)\d+_\d+(?:_on\d+)?) = ", pipe.code, re.MULTILINE)) == expected


# -- faults ----------------------------------------------------------------------------------------------------------
class Split(Case):
    """The gated case under a split backward."""

    def __init__(self, lanes: str) -> None:
        super().__init__(lanes=lanes, schedule="zb_h1")


def before(case: Case) -> dict[str, Tensor]:
    """Give every leaf a gradient of its own; return copies."""
    for leaf in case.leaves().values():
        leaf.grad = torch.randn_like(leaf)
    return {name: leaf.grad.clone() for name, leaf in case.leaves().items() if leaf.grad is not None}


@pytest.mark.parametrize("lanes", LANES)
def test_a_fault_in_either_part_leaves_gradients_alone_and_is_named(lanes: str) -> None:
    case, made = Split(lanes), Product.gradients
    for stage, microbatch in ((STAGES - 1, 0), (0, CHUNKS - 1)):
        grads = before(case)
        with case.gates.at({Action(stage, "B", microbatch): raiser(Boom())}), pytest.raises(Boom) as caught:
            case.run("step")
        assert f"raised in pipeline stage {stage}, input gradient, microbatch {microbatch}" in notes(caught.value)
        for name, leaf in case.leaves().items():
            assert leaf.grad is not None
            assert torch.equal(leaf.grad, grads[name])
    grads, third = before(case), iter(range(3))

    def fails(product: Product) -> Iterator[Any]:
        if next(third, None) is None:
            raise Boom
        return made(product)

    with mock.patch.object(Product, "gradients", fails), pytest.raises(Boom) as caught:
        case.run("step")
    assert any("weight gradients, microbatch" in note for note in notes(caught.value))
    assert all(torch.equal(leaf.grad, grads[name]) for name, leaf in case.leaves().items())
    case.assert_works()


# -- what is put off -------------------------------------------------------------------------------------------------
class Doubled(torch.autograd.Function):
    """A product of the caller's own, whose backward makes both gradients and counts itself."""

    backwards = 0

    @staticmethod
    def forward(ctx: Any, value: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(value, weight)
        return value @ weight

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        Doubled.backwards += 1
        value, weight = ctx.saved_tensors
        return gradients[0] @ weight.t(), value.t() @ gradients[0]


class Awkward(nn.Module):
    """Weights that cannot wait, or not simply: of a custom function, used twice, in other places, hooked on."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.own, self.left = (nn.Parameter(torch.randn(4, 4)) for _ in range(2))
        self.shared_bias = nn.Parameter(torch.randn(4))
        self.double()

    def forward(self, value: Tensor) -> Tensor:
        value = torch.tanh(self.layers[0](self.layers[0](value)))
        hidden = self.layers[1](value)
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: gradient * 2)
        value = Doubled.apply(hidden, self.own) + self.own.sum()
        value = torch.addmm(self.shared_bias, value, self.left) + torch.mm(self.left, value[:4]).sum()
        value = torch.addmm(self.shared_bias, value, self.layers[2].weight.t(), alpha=0.5)
        return value * self.shared_bias


def parts(model: nn.Module, value: Tensor) -> tuple[dict[str, Tensor], set[str]]:
    """Return all gradients made in two parts, and the names of those that were put off."""
    named = dict(model.named_parameters())
    output = model(value)
    leaves = {id(parameter) for parameter in named.values()}
    later = DeferredWeightGrads.of(uses_to_defer([output], leaves, leaves | {id(value)}))
    now = {n: p for n, p in named.items() if id(p) not in later.leaves} | {"value": value}
    found = iter(torch.autograd.grad(output, [*now.values(), *later.edges], torch.ones_like(output), allow_unused=True))
    sums = {name: gradient for name, gradient in zip(now, found, strict=False) if gradient is not None}
    later.catch(found)
    names = {id(parameter): name for name, parameter in named.items()}
    for product in later.products:
        for leaf, gradient in product.gradients():
            name = names[id(leaf)]
            sums[name] = sums[name] + gradient if name in sums else gradient
    return sums, {names[leaf] for leaf in later.leaves}


@pytest.mark.parametrize("lanes", ["inline", "threads"])
def test_products_behind_which_nothing_is_asked_for_make_their_weight_gradients(lanes: str) -> None:
    class Cut(nn.Module):
        """Takes a gradient for an input of its own that nobody wants, as PEFT has a frozen embedding do."""

        def __init__(self) -> None:
            super().__init__()
            self.a, self.norm, self.b = nn.Linear(8, 8), nn.LayerNorm(8).requires_grad_(False), nn.Linear(8, 8)

        def forward(self, value: Tensor) -> Tensor:
            return self.b(self.norm(self.a(value.detach().requires_grad_())).tanh())

    model = Cut().double()
    plain, value = copy.deepcopy(model), torch.randn(8, 8, dtype=torch.float64)
    pipe = autosplit(model, ["cpu", "cpu"], 4, schedule="zb_h1", lanes=lanes)
    pipe.train_step(value, loss_fn=lambda output: output.square().mean())
    plain(value).square().mean().backward()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(model.get_parameter(name).grad, parameter.grad, rtol=1e-12, atol=1e-12)


def test_a_bias_of_one_element_is_summed_to_its_own_shape() -> None:
    hidden, wide, narrow = torch.randn(4, 8), torch.randn(8, 8), torch.randn(8, 1)
    bias = torch.zeros(1)
    leaves = [tensor.double().requires_grad_() for tensor in (hidden, wide, narrow, bias)]
    hidden, wide, narrow, bias = leaves
    root = torch.addmm(bias, torch.addmm(bias, hidden, wide).tanh(), narrow).square().sum()
    *_, expected = torch.autograd.grad(root, leaves, retain_graph=True)
    asked = [id(leaf) for leaf in leaves]
    deferred = DeferredWeightGrads.of(uses_to_defer([root], asked[1:], asked))
    gradients([root], [torch.ones_like(root)], [hidden], keep=False)
    parts = [made for product in deferred.products for leaf, made in product.gradients() if leaf is bias]
    assert [part.shape for part in parts] == [bias.shape] * 2
    torch.testing.assert_close(parts[0] + parts[1], expected)


def test_weights_that_cannot_wait_are_made_with_the_input_and_nothing_twice() -> None:
    torch.manual_seed(0)
    model = Awkward()
    value = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    model(value).backward(torch.ones(5, 4, dtype=torch.float64))
    plain = {name: p.grad for name, p in model.named_parameters() if p.grad is not None} | {"value": value.grad}
    Doubled.backwards = 0
    sums, put = parts(model, value)
    assert Doubled.backwards == 1
    assert put == {"layers.0.weight", "layers.0.bias", "layers.1.weight", "layers.1.bias", "left"}
    assert sums.keys() == plain.keys()
    for name, gradient in plain.items():
        assert difference(sums[name], gradient) <= TOLERANCE[torch.float64], name


# -- streams ---------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("part", ["input_gradient", "weight_gradients"])
def test_a_part_of_a_backward_off_its_stream_is_found(part: str) -> None:
    kept = getattr(Cells, part)

    def inactive(*given: Any) -> None:
        with mock.patch.object(StreamLane, "active", return_value=nullcontext()):
            kept(*given)

    with mock.patch.object(Cells, part, inactive):
        run = RecordedPipe(Skips(), ["cuda:0", "cuda:1"], "cuda:0", schedule="zb_h1")
        run.train(torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH), nn.MSELoss())
    assert any("unordered" in problem for problem in problems(run.streams.log))
