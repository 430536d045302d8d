"""Mutations: what is broken on purpose is found, in a recording by its check, in a program by verify()."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from autosplit import Sample, Verification, autosplit, verify
from autosplit.runtime.norms import normalise, update_statistics
from autosplit.runtime.ops import draw, merge, transfer
from autosplit.trace.check import check_recording
from autosplit.trace.ladder import Trace, trace
from autosplit.trace.recording.recording import apply_function, under
from tests.models.three_layers import WIDTH, Model, Tripled, numbers

VALUE = numbers(6, WIDTH, gradient=False)


def net() -> Model:
    """All that is easily lost: statistics, draws, a custom function, a region without gradients."""

    def body(model: Any, value: Tensor) -> Tensor:
        hidden = Tripled.apply(model.norm(model.a(value)))
        with torch.no_grad():
            gate = torch.sigmoid(hidden)
        return model.c(F.dropout(torch.tanh(model.b(hidden)) * gate, 0.4, model.training))

    return Model(body, norm=lambda: nn.BatchNorm1d(WIDTH))


# -- mutations of a graph that calls the model's own functions -----------------------------------------------------
def find(graph: fx.Graph, wanted: Callable[[fx.Node], bool]) -> fx.Node:
    return next(node for node in graph.nodes if wanted(node))


def passed(value: Tensor) -> Tensor:
    return value.detach()


def drop_gradient(graph: fx.Graph) -> None:
    node = find(graph, lambda n: n.op == "call_module" and str(n.target).endswith("b"))
    with graph.inserting_before(node):
        node.args = (graph.call_function(passed, node.args), *node.args[1:])


def double_update(graph: fx.Graph) -> None:
    node = find(graph, lambda n: n.target is normalise or (n.op == "call_module" and str(n.target).endswith("norm")))
    with graph.inserting_after(node):
        again = graph.node_copy(node, lambda operand: operand)
    if node.target is normalise:  # in a stage each call of a norm has a name
        again.update_arg(1, f"{node.args[1]} once more")


def drop_no_grad(graph: fx.Graph) -> None:
    node = find(graph, lambda n: n.target is under)
    with graph.inserting_before(node):
        node.replace_all_uses_with(graph.call_function(torch.sigmoid, node.args[2:]))
    graph.erase_node(node)


def trace_through(graph: fx.Graph) -> None:
    node = find(graph, lambda n: n.target is apply_function)
    with graph.inserting_before(node):
        node.replace_all_uses_with(graph.call_function(torch.clone, node.args[1:]))
    graph.erase_node(node)


def freeze_dropout(graph: fx.Graph) -> None:
    node = find(graph, lambda n: n.target in (F.dropout, draw))
    node.replace_all_uses_with(node.all_input_nodes[-1])
    graph.erase_node(node)


BROKEN: dict[str, tuple[Callable[[fx.Graph], None], str, str]] = {
    "a dropped gradient": (drop_gradient, "the gradient of ", "gradient"),
    "a doubled buffer update": (double_update, "buffer norm.", "buffer"),
    "a dropped no_grad": (drop_no_grad, "the gradient of ", "gradient"),
    "a custom function traced through": (trace_through, "the gradient of ", "gradient"),
    "a frozen dropout mode": (freeze_dropout, "output 0 ", "output"),
}


@pytest.fixture
def recording() -> tuple[Model, Trace]:
    model = net()
    return model, trace(model, Sample(VALUE))


def test_nothing_broken_in_a_recording(recording: tuple[Model, Trace]) -> None:
    model, found = recording
    assert check_recording(model, found.graph, found.inputs) is None


@pytest.mark.parametrize("name", BROKEN)
def test_the_check_of_a_recording_finds(name: str, recording: tuple[Model, Trace]) -> None:
    model, found = recording
    mutate, expected, _ = BROKEN[name]
    mutate(found.graph.graph)
    text = check_recording(model, found.graph, found.inputs)
    assert text is not None
    assert text.startswith(expected)


# -- mutations of a pipe -------------------------------------------------------------------------------------------
@pytest.fixture
def pipe() -> Any:
    return autosplit(net(), devices=["cpu"] * 2, chunks=3, sample=VALUE)


def wrong(pipe: Any, run: str = "train") -> set[str]:
    found: Verification = verify(pipe.unsplit(), pipe, VALUE)
    assert bool(found) == found.equal
    return {item.kind for item in found.items if not item.equal and item.run == run}


def test_nothing_broken_in_a_pipe(pipe: Any) -> None:
    assert wrong(pipe) == set()
    assert wrong(pipe, "eval") == set()


@pytest.mark.parametrize("name", BROKEN)
def test_verify_finds_in_a_stage(name: str, pipe: Any) -> None:
    mutate, _, kind = BROKEN[name]
    done = 0
    for stage in pipe.stages:
        try:
            mutate(stage.graph)
        except StopIteration:  # the node is in another stage
            continue
        stage.recompile()
        done += 1
    assert done == 1
    assert kind in wrong(pipe)
    assert wrong(pipe, "eval") == set()  # that is another recording


def cells(graph: fx.Graph, function: Any) -> list[fx.Node]:
    return [node for node in graph.nodes if node.target is function]


def bundle_without_gradient(bundle: Any) -> Any:
    return tuple(value.detach() for value in bundle)


def drop_gradient_of_a_transfer(graph: fx.Graph) -> None:
    moved = cells(graph, transfer)[1]
    with graph.inserting_after(moved):
        cut = graph.call_function(bundle_without_gradient, (moved,))
    moved.replace_all_uses_with(cut, delete_user_cb=lambda user: user is not cut)


def swap_microbatches(graph: fx.Graph) -> None:
    merged = cells(graph, merge)[0]
    first, second, *rest = merged.args[0]
    merged.args = ([second, first, *rest], *merged.args[1:])


def miss_a_transfer(graph: fx.Graph) -> None:
    first, second, *_ = cells(graph, transfer)
    second.replace_all_uses_with(first)


def leave_statistics_behind(graph: fx.Graph) -> None:
    graph.erase_node(find(graph, lambda node: node.target is update_statistics))


PROGRAMS: dict[str, tuple[Callable[[fx.Graph], None], str]] = {
    "a dropped gradient": (drop_gradient_of_a_transfer, "gradient"),
    "swapped microbatches": (swap_microbatches, "output"),
    "a missing transfer": (miss_a_transfer, "output"),
    "a lost buffer update": (leave_statistics_behind, "buffer"),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_verify_finds_in_a_program(name: str, pipe: Any) -> None:
    mutate, kind = PROGRAMS[name]
    mutate(pipe.graph)
    pipe.recompile()
    assert kind in wrong(pipe)


def test_verify_finds_draws_that_every_call_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe, draw = autosplit(net(), devices=["cpu"] * 2, chunks=3, sample=VALUE, rng="counter"), torch.randint
    monkeypatch.setattr(torch, "randint", lambda *args, **kwargs: torch.zeros_like(draw(*args, **kwargs)))
    assert wrong(pipe) == {"draws"}


def test_verify_finds_a_recording_of_the_other_mode(pipe: Any) -> None:
    pipe.eval()
    pipe(VALUE)
    evaluating = pipe._autosplit.recordings.kept
    newest = next(reversed(evaluating.values()))
    for key in list(evaluating):
        evaluating[key] = newest
    assert "output" in wrong(pipe)
    assert wrong(pipe, "eval") == set()
