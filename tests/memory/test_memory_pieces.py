"""Traces cut into the pieces of a schedule: literal small ones, and what holds for all."""

from __future__ import annotations

from collections import Counter

import pytest

from autosplit.schedule.memory.pieces import NodeStep, Recompute, StageTrace, TracePieces, WeightNeeds, split
from tests.memory.stages import stage, traces

X, Y, DY, DX, WEIGHT = range(5)

LINEAR = StageTrace(
    forward=(NodeStep("", ((X, 10),)), NodeStep("linear", ((Y, 20),))),
    backward=(
        NodeStep("", ((DY, 20),)),
        NodeStep("linear", ((DX, 10), (WEIGHT, 300), (DY, -20))),
        NodeStep("", ((DX, -10), (Y, -20), (X, -10))),
    ),
    backward_later=(
        NodeStep("", ((DY, 20),)),
        NodeStep("linear", ((DX, 10), (WEIGHT, 300), (WEIGHT, -300), (DY, -20))),
        NodeStep("", ((DX, -10), (Y, -20), (X, -10))),
    ),
    gradients={WEIGHT: "weight"},
    split={"linear": WeightNeeds(saved=(X,), cotangent_bytes=20, gradients=(WEIGHT,))},
)


def test_a_linear_in_four_pieces() -> None:
    pieces = TracePieces(LINEAR)
    forward = pieces.piece("F", first=True)
    assert (forward.peak_bytes, forward.left) == (30, {"activations": 30})
    backward = pieces.piece("B", first=True)
    assert backward.peak_bytes == 330
    assert backward.at_peak == {"transient": 30, "gradients": 300}
    assert backward.left == {"activations": -30, "gradients": 300}
    later = pieces.piece("B", first=False)
    assert (later.peak_bytes, later.at_peak, later.left) == (330, {"transient": 330}, {"activations": -30})


def test_i_keeps_the_input_and_the_output_gradient_for_w() -> None:
    halves = split(LINEAR)
    assert halves.input == (
        NodeStep("", ((DY, 20),)),
        NodeStep("linear", ((DX, 10),)),
        NodeStep("", ((DX, -10), (Y, -20))),
    )
    assert halves.weight == (NodeStep("linear", ((WEIGHT, 300), (DY, -20), (X, -10))),)
    pieces = TracePieces(LINEAR)
    assert pieces.piece("I", first=True).peak_bytes == 30
    assert pieces.piece("W", first=True).left == {"gradients": 300, "activations": -30}
    later = pieces.piece("W", first=False)
    assert later.steps == (NodeStep("linear", ((WEIGHT, 300), (WEIGHT, -300), (DY, -20), (X, -10))),)
    assert (later.peak_bytes, later.at_peak) == (300, {"transient": 300})


def test_an_output_gradient_that_lives_on_elsewhere_is_held_beside_it() -> None:
    """Along a residual the gradient is not freed in the linear's step: W holds as many bytes from then on."""
    backward = (
        NodeStep("", ((DY, 20),)),
        NodeStep("linear", ((WEIGHT, 300),)),
        NodeStep("add", ((DY, -20),)),
        NodeStep("", ((X, -10),)),
    )
    own = StageTrace((NodeStep("", ((X, 10),)),), backward, (), {WEIGHT: "weight"}, {}, LINEAR.split)
    halves = split(own)
    copy = halves.input[1].changes[0]
    assert copy[1] == 20
    assert copy[0] not in (X, Y, DY, DX, WEIGHT)
    assert halves.input[2] == NodeStep("add", ((DY, -20),))
    assert halves.weight == (NodeStep("linear", ((WEIGHT, 300), (copy[0], -20), (X, -10))),)


def test_a_storage_that_two_nodes_saved_waits_for_the_later_one() -> None:
    backward = (NodeStep("b", ((X, -10),)), NodeStep("a", ()), NodeStep("", ()))
    held = {"a": WeightNeeds((X,), 0, ()), "b": WeightNeeds((X,), 0, ())}
    halves = split(StageTrace((NodeStep("", ((X, 10),)),), backward, (), {}, {}, held))
    assert halves.weight == (NodeStep("b", ()), NodeStep("a", ((X, -10),)))


def test_gradients_that_w_does_not_make_come_with_i() -> None:
    own = StageTrace(LINEAR.forward, LINEAR.backward, LINEAR.backward_later, LINEAR.gradients)
    pieces = TracePieces(own)
    assert pieces.piece("I", first=True).left == {"gradients": 300, "activations": -30}
    assert pieces.piece("I", first=False).left == {"activations": -30}
    assert pieces.piece("W", first=True).steps == ()


def test_new_sums_take_the_place_of_the_old_ones() -> None:
    """`torch.autograd.grad` returns new tensors: a later backward frees the gradients of the one before it."""
    later = (NodeStep("linear", ((9, 300),)), NodeStep("", ((WEIGHT, -300), (Y, -20), (X, -10))))
    own = StageTrace(LINEAR.forward, LINEAR.backward, later, LINEAR.gradients)
    piece = TracePieces(own).piece("B", first=False)
    assert (piece.peak_bytes, piece.at_peak, piece.left) == (300, {"gradients": 300}, {"activations": -30})


def test_casts_are_made_by_the_first_microbatch() -> None:
    pieces = traces(4, cast=True).pieces(last=True)
    first, later = (pieces.piece("F", first=first) for first in (True, False))
    assert first.left["casts"] == 2 * (2 * 4 * 16 + 16 + 4), "weights and biases of two layers, in bfloat16"
    assert "casts" not in later.left
    assert first.left["activations"] == later.left["activations"]


def test_without_a_backward_the_forward_keeps_nothing() -> None:
    piece = TracePieces(LINEAR).piece("F", first=True, keeps=False)
    assert (piece.peak_bytes, piece.at_peak, piece.left) == (30, {"transient": 30}, {})


@pytest.mark.parametrize("recompute", ["never", "block", "always"])
@pytest.mark.parametrize("cast", [False, True])
@pytest.mark.parametrize(("blocks", "logits"), [(1, 0), (3, 0), (2, 90)])
def test_i_and_w_do_what_b_does_and_leave_gradients_and_casts(
    blocks: int, logits: int, cast: bool, recompute: Recompute
) -> None:
    own = traces(8, blocks, recompute, logits=logits, cast=cast)
    pieces = own.pieces(last=False)
    for first in (True, False):
        whole, inputs, weights = (pieces.piece(kind, first=first) for kind in ("B", "I", "W"))
        assert bool(weights.steps) == (recompute == "never")
        together = Counter(inputs.left)
        together.update(weights.left)
        assert {kind: count for kind, count in together.items() if count} == whole.left
        freed = [c[0] for half in (inputs, weights) for step in half.steps for c in step.changes if c[1] < 0]
        assert len(freed) == len(set(freed))
        held = inputs.left.get("activations", 0) - whole.left["activations"]
        assert inputs.peak_bytes <= whole.peak_bytes + held
    total = Counter(pieces.piece("F", first=True).left)
    total.update(pieces.piece("B", first=True).left)
    assert total["activations"] == total["transient"] == 0
    assert total["gradients"] == sum(4 * p.numel() for p in stage(8, blocks, logits=logits).parameters())
    assert bool(total["casts"]) == cast
