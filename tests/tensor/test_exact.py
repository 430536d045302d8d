"""Operations between sharded layers: two ranks have what one process has, or the layers are whole."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autosplit.errors import InputError
from autosplit.options import Sample
from autosplit.tensor.axes import Shard
from autosplit.tensor.collectives import Sharing, local_part
from autosplit.tensor.entropy import ClassLoss, CrossEntropyInParts
from autosplit.tensor.local import DropoutInPart
from autosplit.tensor.plan import TensorPlan, tensor_plan
from autosplit.tensor.products import GatheredProducts
from autosplit.trace.graph import TracedGraph
from autosplit.trace.ladder import trace
from autosplit.weight_gradients import DeferredWeightGrads, uses_to_defer
from benchmarks.tensor_graph import rank_graph
from benchmarks.tensor_threads import RANKS, threads
from tests.models.three_layers import Tripled
from tests.tensor.nets import LENGTH, ROWS, WIDTH

WORDS, ODD = 24, 15


class Between(nn.Module):
    """An operation between a projection and others that take what it gives."""

    def __init__(self, operation: Callable[[Between, Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.p = nn.Parameter(torch.randn(WIDTH))
        self.operation = operation

    def forward(self, x: Tensor) -> Tensor:
        return self.operation(self, x)


class Halved(Tripled):
    """The backward halves negative gradients."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.where(gradient > 0, gradient / 2)


class Tied(nn.Module):
    """A table of an odd width, looked up by an operation, whose rows are a head's too."""

    def __init__(self, operation: Callable[[Tied, Tensor], Tensor], **options: bool) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(WORDS, ODD, **options), nn.Linear(ODD, WORDS, bias=False)
        self.head.weight = self.table.weight
        self.operation = operation

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.operation(self, x))


def compared(model: nn.Module, inputs: Tensor) -> TensorPlan:
    """Hold the outputs and gradients of two ranks against the plain model's, and return the plan."""
    model = model.double()
    traced = trace(model, Sample(inputs)).graph
    assert isinstance(traced, TracedGraph)
    plan = tensor_plan(traced, ranks=RANKS, rows=ROWS, latency_bytes=1.0)
    plain = model(inputs.clone())
    seed = torch.randn_like(plain)
    plain.backward(seed)
    whole = {name: p.grad for name, p in model.named_parameters(remove_duplicate=False)}

    def ran(rank: int) -> None:
        module = deepcopy(rank_graph(traced, plan, rank=rank))  # threads must not share modules that are called
        (output,) = module(ROWS, inputs.clone())
        torch.testing.assert_close(output, plain)
        parts = dict(module.named_parameters(remove_duplicate=False))
        used = {name: part for name, part in parts.items() if whole[name] is not None}
        for name, found in zip(used, torch.autograd.grad(output, [*used.values()], seed), strict=True):
            dense = [g.to_dense() if g.is_sparse else g for g in (found, whole[name])]
            torch.testing.assert_close(dense[0], local_part(dense[1], plan.parameters[name], rank, RANKS), msg=name)

    with threads() as group:
        group.run(ran)
    return plan


def _changed_by_a_view(net: Between, x: Tensor) -> Tensor:
    hidden = net.a(x) + 0
    before = net.b(hidden + net.p)
    hidden[:, 1:].mul_(2)
    return before + net.b(hidden + net.p)


def _changed_when_flat(net: Between, x: Tensor) -> Tensor:
    hidden = net.a(x) + 0
    before = net.b(hidden + net.p)
    hidden.view(-1).mul_(2)
    return before + net.b(hidden + net.p)


OPERATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "shift": lambda h: F.pad(h, (1, -1)),
    "shift of several": lambda h: F.pad(h, (0, 0, 1, -1)) + F.pad(h, (-2, 2)),
    "circular": lambda h: F.pad(h, (1, 1), mode="circular")[..., 2:],
    "roll": lambda h: h.roll(1, -1),
    "rotate": lambda h: torch.cat((-h[..., 8:], h[..., :8]), -1),
    "rotate by one": lambda h: torch.cat((h[..., 1:], h[..., :1]), -1),
    "sort": lambda h: h.sort(-1).values,
    "all of topk": lambda h: h.topk(WIDTH, -1).values,
    "softmax in groups": lambda h: h.unflatten(-1, (4, 4)).softmax(-1).flatten(-2),
    "gather": lambda h: h.gather(-1, torch.arange(WIDTH).flip(0).expand(h.shape)),
    "triangle": lambda h: h.tril(),
    "transposed view": lambda h: h.unflatten(-1, (4, 4)).transpose(-1, -2).flatten(-2),
    "view over rows": lambda h: h.reshape(-1, WIDTH, LENGTH).reshape(-1, LENGTH, WIDTH),
    "attention over features": lambda h: F.scaled_dot_product_attention(*[h.transpose(1, 2)] * 3).transpose(1, 2),
    "interleave": lambda h: h[..., :8].repeat_interleave(2, -1),
    "bits": lambda h: h.view(torch.int64).view(torch.float64) * 2 + h,
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_what_stands_between_two_projections_is_exact(name: str) -> None:
    operation = OPERATIONS[name]
    torch.manual_seed(3)
    compared(Between(lambda net, x: net.b(operation(net.a(x)))), torch.randn(ROWS, LENGTH, WIDTH).double())


def test_a_backward_that_is_not_linear_takes_whole_gradients() -> None:
    torch.manual_seed(3)

    def operation(net: Between, x: Tensor) -> Tensor:
        shifted = x + net.p
        return net.b(Halved.apply(shifted).relu()) + net.b(shifted.relu())

    compared(Between(operation), torch.randn(ROWS, LENGTH, WIDTH).double())


@pytest.mark.parametrize("change", [_changed_by_a_view, _changed_when_flat])
def test_what_is_changed_through_a_view_is_moved_anew(change: Callable[[Between, Tensor], Tensor]) -> None:
    torch.manual_seed(3)
    plan = compared(Between(change), torch.randn(ROWS, LENGTH, WIDTH).double())
    assert str(plan.parameters["b.weight"]).startswith("shard")


TABLES: dict[str, tuple[bool, Callable[[Tied, Tensor], Tensor]]] = {
    "module": (True, lambda net, x: net.table(x)),
    "padding": (True, lambda net, x: F.embedding(x, net.table.weight, WORDS - 1)),
    "padding from the end": (True, lambda net, x: F.embedding(x, net.table.weight, padding_idx=-1)),
    "by names": (True, lambda net, x: F.embedding(weight=net.table.weight, padding_idx=0, input=x)),
    "by frequency": (False, lambda net, x: F.embedding(x, net.table.weight, scale_grad_by_freq=True)),
    "sparse": (False, lambda net, x: F.embedding(x, net.table.weight, sparse=True)),
    "operation": (False, lambda net, x: torch.embedding(net.table.weight, x)),
}


def _tokens() -> Tensor:
    tokens = torch.randint(0, WORDS, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    tokens[:, 0], tokens[:, 1] = WORDS - 1, 0
    return tokens


@pytest.mark.parametrize("name", TABLES)
def test_rows_of_a_table_are_cut_only_where_the_look_up_is_exact(name: str) -> None:
    exact, operation = TABLES[name]
    _cut_or_refused(Tied(operation), exact)


@pytest.mark.parametrize("options", [{"scale_grad_by_freq": True}, {"sparse": True}])
def test_a_module_with_such_an_option_has_a_whole_table(options: dict[str, bool]) -> None:
    _cut_or_refused(Tied(lambda net, x: net.table(x), **options), False)


class Losing(nn.Module):
    """A head and a loss of its own, in which the first class is not counted."""

    def __init__(self, *, weighted: bool, **options: Any) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.register_buffer("weight", torch.rand(WORDS) if weighted else None)
        self.options = options

    def forward(self, x: Tensor) -> Tensor:
        logits = self.head(self.words(x)).transpose(1, 2)
        return F.cross_entropy(logits, x.roll(1, -1), self.weight, ignore_index=0, **self.options)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("weighted", [False, True])
def test_a_loss_takes_parts_of_the_classes(*, weighted: bool, smoothing: float) -> None:
    torch.manual_seed(3)
    plan = compared(Losing(weighted=weighted, label_smoothing=smoothing), _tokens())
    assert str(plan.parameters["head.weight"]) == "shard(0)"
    logits = ROWS * LENGTH * WORDS * 8
    assert logits not in {each.collective.value_bytes for each in plan.collectives}


def test_a_target_that_is_no_class_is_refused_as_by_the_whole_loss() -> None:
    loss = CrossEntropyInParts(ClassLoss(None, None, None, -100, 0.0), 4, Sharing(0, 2, alone=True))  # type: ignore[arg-type]
    loss(torch.zeros(3, 2), torch.tensor([3, -100, 0]))
    for wrong in (4, -1):
        with pytest.raises(RuntimeError, match="out of bounds"):
            loss(torch.zeros(1, 2), torch.tensor([wrong]))


HOOKS: dict[str, Callable[[nn.Linear], Any]] = {
    "no": lambda layer: None,
    "behind": lambda layer: layer.register_forward_hook(lambda module, args, result: 2 * result),
    "before": lambda layer: layer.register_forward_pre_hook(lambda module, args: (2 * args[0],)),
    "in place": lambda layer: layer.register_forward_pre_hook(lambda module, args: (args[0].mul_(2),)),
}


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("hook", HOOKS)
def test_products_gather_once_in_each_pass(hook: str, *, later: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those with hooks, and for weights' gradients that are made later."""
    torch.manual_seed(3)
    first, layer = nn.Linear(WIDTH, ODD, bias=False), nn.Linear(WIDTH, ODD)
    HOOKS[hook](layer)
    values, shard, gathers = torch.randn(ROWS, LENGTH, WIDTH), Shard(1, ((1, LENGTH),)), []
    gathered = Sharing.gathered
    monkeypatch.setattr(Sharing, "gathered", lambda self, local: gathers.append(self.rank) or gathered(self, local))

    def gradients(value: Tensor, call: Callable[[Tensor], Any], leaves: list[Tensor]) -> dict[int, Tensor]:
        loss = sum(result.square().sum() for result in call(value))
        asked = {id(leaf) for leaf in leaves}
        late = DeferredWeightGrads.of(uses_to_defer([loss], asked, {*asked, id(value)}) if later else ())
        now = [value, *(leaf for leaf in leaves if id(leaf) not in late.leaves)]
        found = torch.autograd.grad(loss, [*now, *late.edges])
        late.catch(found[len(now) :])
        result = {id(leaf): gradient for leaf, gradient in zip(now, found, strict=False)}
        return result | {id(leaf): gradient for product in late.products for leaf, gradient in product.gradients()}

    leaves = [first.weight, *layer.parameters()]
    whole = values.clone().requires_grad_()
    expected = gradients(whole, lambda value: (first(value), layer(value + 0)), leaves)

    def ran(rank: int) -> None:
        local = local_part(values, shard, rank, RANKS).requires_grad_()
        products = GatheredProducts(shard, Sharing(rank, RANKS), (None, deepcopy(layer)))
        state = (first.weight, None, layer.weight, layer.bias)
        found = gradients(local, lambda value: products(value, *state), leaves)
        back = local_part(expected[id(whole)], shard, rank, RANKS)
        torch.testing.assert_close(found[id(local)], RANKS * back)  # each rank has all of the products
        for leaf in leaves:
            torch.testing.assert_close(found[id(leaf)], expected[id(leaf)])

    with threads() as group:
        group.run(ran)
    assert sorted(gathers) == [0, 0, 1, 1]


@pytest.mark.parametrize("layer", [F.dropout, nn.Dropout(0.3)])
def test_dropout_by_a_seed_takes_its_part_of_the_whole_mask(layer: Any) -> None:
    values, shard = torch.rand(ROWS, LENGTH, WIDTH) + 1, Shard(1, ((1, LENGTH),))
    given = () if isinstance(layer, nn.Module) else (0.3,)

    def drawn(run: Any, value: Tensor) -> Tensor:
        torch.manual_seed(7)
        return run(value, *given)

    whole = drawn(layer, values)
    for rank in range(RANKS):
        run = DropoutInPart(layer, 1, shard.indices(rank, RANKS), LENGTH)
        torch.testing.assert_close(
            drawn(run, local_part(values, shard, rank, RANKS)), local_part(whole, shard, rank, RANKS)
        )


def _cut_or_refused(model: Tied, exact: bool) -> None:
    if exact:
        assert str(compared(model, _tokens()).parameters["head.weight"]).startswith("shard(0)")
    else:
        with pytest.raises(InputError, match="does not divide 15"):
            compared(model, _tokens())


def test_a_token_outside_of_the_table_is_refused_as_by_the_whole_one() -> None:
    model = Tied(lambda net, x: net.table(x)).double()
    traced = trace(model, Sample(_tokens())).graph
    assert isinstance(traced, TracedGraph)
    plan = tensor_plan(traced, ranks=RANKS, rows=ROWS, latency_bytes=1.0)
    with threads() as group, pytest.raises(IndexError):
        group.run(lambda rank: rank_graph(traced, plan, rank=rank)(ROWS, _tokens() + 1))
