"""What hangs on a parameter: attributes, sums of gradients, hooks. Planning leaves none, steps leave the plain ones."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autosplit import autosplit
from autosplit.trace.graph import NodeClass
from tests.state.test_outside_state import Net, batch, both, check


class Fused(torch.autograd.Function):
    """Adds the gradient of a weight to an attribute of it, as fused kernels do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        ctx.weight.main_grad.add_(gradient.t() @ x)
        return gradient @ ctx.weight, None


class Accumulates(Net):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)
        self.a.weight.main_grad = torch.zeros(8, 6).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.b((Fused.apply(self.first(x).tanh(), self.a.weight) + self.a.bias).tanh()).tanh())


@pytest.mark.parametrize("step", [True, False])
def test_sums_of_gradients_on_a_parameter(step: bool) -> None:
    plain, model = both(Accumulates)
    x, y = batch()
    pipe = autosplit(model, ["cpu"] * 2, 4, lanes="inline", sample=x)
    assert not model.a.weight.main_grad.any()
    for _ in range(2):
        nn.functional.mse_loss(plain(x), y).backward()
        if step:
            pipe.train_step(x, target=y, loss_fn=nn.MSELoss())
        else:
            nn.functional.mse_loss(pipe(x), y).backward()
        torch.testing.assert_close(model.a.weight.main_grad, plain.a.weight.main_grad, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(model.b.weight.grad, plain.b.weight.grad, rtol=1e-12, atol=1e-12)


class Holds(Net):
    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.held = kind([self.a.weight])

    def forward(self, x: Tensor) -> Tensor:
        return self.b((x @ sum(self.held).t()).tanh()) + sum(self.a.weight.sum(1)[:6])


@pytest.mark.parametrize("kind", [list, frozenset, set])
def test_a_parameter_in_a_container_is_the_models_for_as_long_as_it_is(kind: Any) -> None:
    plain, model = both(lambda: Holds(kind))
    pipe = autosplit(model, ["cpu"] * 2, 4, lanes="inline")
    x, y = batch()
    check(plain, pipe, nn.MSELoss(), x, y)
    assert pipe._core.recordings.tree is None, "a graph follows it"
    assert not any("uses no parameters" in note for note in pipe.plan.notes)
    for each in (plain, model):
        each.a.weight = nn.Parameter(each.a.weight.detach() * 2)
    check(plain, pipe, nn.MSELoss(), x, y)


class Counts(Net):
    def forward(self, x: Tensor) -> Tensor:
        self.a.weight.calls = getattr(self.a.weight, "calls", 0) + 1  # type: ignore[union-attr]
        return super().forward(x)


def test_a_counter_on_a_parameter_counts_calls_and_not_those_of_planning() -> None:
    plain, model = both(Counts)
    x, y = batch()
    pipe = autosplit(model, ["cpu"] * 2, 4, lanes="inline", sample=x)
    assert not hasattr(model.a.weight, "calls")
    for number in range(1, 4):
        check(plain, pipe, nn.MSELoss(), x, y)
        assert model.a.weight.calls == plain.a.weight.calls == number


class HooksItself(Net):
    def __init__(self) -> None:
        super().__init__()
        self.is_hooked = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_hooked:
            self.is_hooked = True
            self.a.weight.register_hook(lambda gradient: gradient / 2)
        return super().forward(x)


@pytest.mark.filterwarnings("ignore:The pipeline of HooksItself has collapsed")
def test_a_hook_that_a_forward_registers_on_its_parameter_is_there_once() -> None:
    plain, model = both(HooksItself)
    pipe = autosplit(model, ["cpu"] * 2, 4, lanes="inline")
    for _ in range(3):
        check(plain, pipe, nn.MSELoss(), *batch())
    assert len(model.a.weight._backward_hooks) == 1


Count = Callable[["Counting", Tensor, Tensor], Any]


class Counting(nn.Module):
    """Two of four experts for each row; ``count`` gets the module, what was chosen and the scores."""

    def __init__(self, count: Count) -> None:
        super().__init__()
        self.gate, self.out = nn.Linear(8, 4), nn.Linear(4, 8)
        self.register_buffer("counts", torch.zeros(4))
        self.register_buffer("whole", torch.zeros(4, dtype=torch.long))
        self.register_buffer("rows", torch.zeros((), dtype=torch.long))
        self.count = count

    def forward(self, value: Tensor) -> Tensor:
        scores = self.gate(value).sigmoid()
        chosen = scores.topk(2, -1).indices
        made = self.count(self, chosen, scores)
        scores = scores if made is None else scores * made
        return value + self.out(scores * F.one_hot(chosen, 4).sum(-2))


def _experts(chosen: Tensor) -> Tensor:
    return F.one_hot(chosen, 4).sum(-2)


def _without_gradients(own: Counting, chosen: Tensor, scores: Tensor) -> None:
    with torch.no_grad():
        own.counts += _experts(chosen).to(scores.dtype).sum(0)


def _integers(own: Counting, chosen: Tensor, scores: Tensor) -> None:
    own.whole += _experts(chosen).sum(0)
    own.rows += scores.shape[0]


def _behind_the_sum(own: Counting, chosen: Tensor, scores: Tensor) -> None:
    own.counts.sub_(_experts(chosen).sum(0).double(), alpha=0.5)
    own.rows += _experts(chosen).sum()


def _at_places(own: Counting, chosen: Tensor, scores: Tensor) -> None:
    ones = torch.ones_like(chosen.view(-1), dtype=scores.dtype)
    own.counts.index_add_(0, chosen.view(-1), ones)
    own.counts.scatter_add_(0, chosen.flatten(), torch.ones(chosen.numel(), dtype=scores.dtype))


def _read_before(own: Counting, chosen: Tensor, scores: Tensor) -> Tensor:
    made = 1 + own.counts
    own.counts += scores.detach().sum(0)
    return made


def _read_behind(own: Counting, chosen: Tensor, scores: Tensor) -> Tensor:
    own.counts += _experts(chosen).sum(0)
    return 1 + own.counts


def _cut_off(own: Counting, chosen: Tensor, scores: Tensor) -> None:
    own.whole += scores.detach().sum(0).long()


def _mean(own: Counting, chosen: Tensor, scores: Tensor) -> None:
    own.counts += scores.detach().mean(0)


def _moving(own: Counting, chosen: Tensor, scores: Tensor) -> None:
    own.counts.mul_(0.9).add_(_experts(chosen).sum(0), alpha=0.1)


PARTS = [_without_gradients, _integers, _behind_the_sum, _at_places, _read_before]
WHOLE = [_read_behind, _cut_off, _mean, _moving]


@pytest.mark.parametrize(
    ("count", "recompute"),
    [*((count, "never") for count in (*PARTS, *WHOLE)), (_without_gradients, "block"), (_read_before, "always")],
    ids=lambda given: given if isinstance(given, str) else given.__name__.strip("_"),
)
def test_counters_are_the_plain_models(count: Count, recompute: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[Counting(count) for _ in range(3)], nn.Linear(8, 3)).double()
    plain = copy.deepcopy(model)
    value, target = torch.randn(10, 8).double(), torch.arange(10) % 3
    pipe = autosplit(model, devices=["cpu"] * 2, chunks=4, sample=value, recompute=recompute)
    optimizers = [torch.optim.SGD(module.parameters(), 0.05) for module in (model, plain)]
    for rows in (10, 10, 7):
        loss = F.cross_entropy(plain(value[:rows]), target[:rows])
        loss.backward()
        own = pipe.train_step(value[:rows], target=target[:rows], loss_fn=F.cross_entropy)
        torch.testing.assert_close(own, loss.detach())
        torch.testing.assert_close(pipe.eval_step(value), plain(value).detach())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(model.state_dict(), plain.state_dict())
    (recorded, *_), *_ = pipe._core.recordings.kept.values()
    infos = [info for _, info in recorded.traced.compute_nodes()]
    assert any(info.node_class is NodeClass.FULL for info in infos) == (count in WHOLE)
