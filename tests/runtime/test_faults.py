"""A fault in any action of a step: it reaches the caller as it is, nothing of the step stays, and the pipe goes on."""

from __future__ import annotations

import threading
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from autosplit.schedule.action import Action, Kind, describe
from tests.pairwise import in_turn, pairwise
from tests.runtime.gates import (
    CHUNKS,
    HOWS,
    LANES,
    MARK,
    STAGES,
    TARGET,
    Boom,
    Case,
    Gates,
    case_of,
    frames,
    hold,
    notes,
    raiser,
)

ERRORS: dict[str, type[BaseException]] = {"exception": Boom, "interrupt": KeyboardInterrupt}
KINDS: tuple[Kind, ...] = ("F", "B")
ACTIONS = [Action(stage, kind, m) for kind in KINDS for stage in range(STAGES) for m in (0, CHUNKS - 1)]
BEFORE = ("none", "values")

lanes_of = pytest.mark.parametrize("lanes", LANES)
error_of = pytest.mark.parametrize("kind", ERRORS)


def with_gradients(case: Case, before: str) -> dict[str, Tensor | None]:
    """Give every leaf a gradient of its own, or none; return copies."""
    case.clear()
    if before == "values":
        for leaf in case.leaves().values():
            leaf.grad = torch.randn_like(leaf)
    return {name: None if leaf.grad is None else leaf.grad.clone() for name, leaf in case.leaves().items()}


def assert_gradients(case: Case, before: dict[str, Tensor | None]) -> None:
    for name, leaf in case.leaves().items():
        expected = before[name]
        assert (leaf.grad is None) == (expected is None), name
        assert expected is None or torch.equal(leaf.grad, expected), name


def fail(case: Case, how: str, action: Action, error: BaseException) -> BaseException:
    """Run a step that meets this error in this action; return what the caller caught."""
    with case.gates.at({action: raiser(error)}), pytest.raises(type(error)) as caught:
        case.run(how)
    assert not case.gates.inside
    return caught.value


def is_transparent(lanes: str, how: str, action: Action) -> bool:
    """Tell whether torch's autograd alone runs the action, as it does for a plain model."""
    return (lanes, how, action.kind) == ("inline", "call", "B")


@in_turn(action=ACTIONS, how=HOWS, setting=list(product(LANES, ERRORS)))
def test_a_fault_in_any_action(action: Action, how: str, setting: tuple[str, str]) -> None:
    lanes, kind = setting
    case = case_of(lanes, how)
    own, every = case.threads(), set(threading.enumerate())
    for before in BEFORE:
        gradients, error = with_gradients(case, before), ERRORS[kind]("a fault")
        assert fail(case, how, action, error) is error
        assert frames(error)[-1] == "trip"
        places = [note for note in notes(error) if "stage" in note]
        if is_transparent(lanes, how, action):
            assert places == []
        else:
            assert len(places) == 1
            assert places[0].endswith(describe(action))
            assert_gradients(case, gradients)
        case.assert_works()
    assert case.threads() == own
    assert set(threading.enumerate()) <= every


@lanes_of
@error_of
def test_all_actions_of_a_case_are_reached(lanes: str, kind: str) -> None:
    """The matrix above rests on gates that all actions pass; a gate that is never passed would test nothing."""
    for how in HOWS:
        case = case_of(lanes, how)
        with case.gates.at({}):
            case.run(how)
        assert sorted(case.gates.passed) == sorted(
            Action(stage, kind, m) for stage in range(STAGES) for kind in KINDS for m in range(CHUNKS)
        )
        case.clear()


# -- the loss ------------------------------------------------------------------------------------------------------
class GatedLoss:
    """A loss with a gate of its own in front of every microbatch; the target's last column holds which one it is."""

    def __init__(self) -> None:
        self.gates = Gates()

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        whole = len(output) == len(TARGET)  # asked what its mean divides by, before the first action
        through: Any = output if whole else self.gates.function.apply(output, target[:, -1:], STAGES - 1)
        return torch.nn.functional.mse_loss(through, target[:, :-1])


@pytest.fixture(scope="module")
def losses() -> dict[tuple[str, str], Case]:
    found = {}
    for lanes in LANES:
        for how in HOWS[1:]:
            case = found[lanes, how] = Case(lanes=lanes, schedule=how)
            case.loss_fn, case.target = GatedLoss(), torch.cat([TARGET, MARK], 1)
            case.run(how)  # the first step proves that the loss is a mean
    return found


@pairwise(lanes=LANES, how=HOWS[1:], microbatch=(0, CHUNKS - 1), direction=KINDS, kind=list(ERRORS))
def test_a_fault_in_the_loss(
    losses: dict[tuple[str, str], Case], lanes: str, how: str, microbatch: int, direction: Kind, kind: str
) -> None:
    case, action = losses[lanes, how], Action(STAGES - 1, direction, microbatch)
    gates: Gates = case.loss_fn.gates
    for before in BEFORE:
        gradients, error = with_gradients(case, before), ERRORS[kind]("a fault")
        with gates.at({action: raiser(error)}), pytest.raises(type(error)) as caught:
            case.run(how)
        assert caught.value is error
        assert frames(error)[-1] == "trip"
        assert describe(action) in notes(error)[0]
        assert_gradients(case, gradients)
        case.assert_works()


# -- before the first cell, behind the last, and at the hand-over ----------------------------------------------------
class Around(torch.nn.Module):
    """A parameter that is transformed once per step, a block per stage, and a gate on each of the two ends."""

    def __init__(self, gates: Gates, *, ending: bool) -> None:
        super().__init__()
        self.gates, self.ending = gates, ending
        self.scale = torch.nn.Parameter(torch.ones(1, 6))
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(6, 6) for _ in range(STAGES))
        self.mark = torch.zeros(1)
        self.double()

    def forward(self, value: Tensor, mark: Tensor) -> Tensor:
        scale: Any = self.gates.function.apply(torch.tanh(self.scale), self.mark, 0)
        for block in self.blocks:
            value = torch.tanh(block(value)) * scale
        if not self.ending:
            return value
        return self.gates.function.apply(value - value.mean(0, keepdim=True), self.mark, 1)


@pytest.fixture(scope="module")
def arounds() -> dict[tuple[str, bool], Case]:
    return {
        (lanes, ending): Case(lanes=lanes, model=lambda gates, ending=ending: Around(gates, ending=ending))
        for lanes in LANES
        for ending in (False, True)
    }


@pairwise(lanes=LANES, kind=list(ERRORS), how=("call", "step"), ending=(False, True))
def test_a_fault_outside_of_the_cells(
    arounds: dict[tuple[str, bool], Case], lanes: str, how: str, ending: bool, kind: str
) -> None:
    case = arounds[lanes, ending]
    action = Action(1, "F", 0) if ending else Action(0, "F", 0)
    for before in BEFORE:
        gradients, error = with_gradients(case, before), ERRORS[kind]("a fault")
        assert fail(case, how, action, error) is error
        assert frames(error)[-1] == "trip"
        assert_gradients(case, gradients)
        case.assert_works()


@pairwise(lanes=LANES, kind=list(ERRORS), how=HOWS)
def test_a_fault_in_a_parameters_hook_at_the_hand_over(lanes: str, how: str, kind: str) -> None:
    case, error, calls = case_of(lanes, how), ERRORS[kind]("a fault"), []
    gradients, parameter = with_gradients(case, "values"), case.pipe.get_parameter("blocks.1.weight")

    def trip(gradient: Tensor) -> None:
        calls.append(gradient)
        raise error

    handle = parameter.register_hook(trip)
    with pytest.raises(type(error)) as caught:
        case.run(how)
    handle.remove()
    assert caught.value is error
    assert frames(error)[-1] == "trip"
    assert len(calls) == 1
    if how != HOWS[0]:  # the backward of a call is the caller's own, which stops where it is, as a plain one does
        assert_gradients(case, gradients)
    case.assert_works()


@lanes_of
@pytest.mark.parametrize("how", HOWS[1:])
def test_a_loss_that_depends_on_no_parameter(lanes: str, how: str) -> None:
    case = case_of(lanes, how)
    gradients, loss_fn = with_gradients(case, "values"), case.loss_fn
    case.loss_fn = lambda output, target: torch.nn.functional.mse_loss(output.detach(), target)
    with pytest.raises(RuntimeError, match="does not depend on any parameter"):
        case.run(how)
    case.loss_fn = loss_fn
    assert_gradients(case, gradients)
    case.assert_works()


# -- what the other lanes do meanwhile -------------------------------------------------------------------------------
PAIRS = [
    pytest.param(how, failing, other, id=f"{how}-{failing}-while-{other}")
    for how, failing, other in (
        ("call", Action(1, "F", 0), Action(0, "F", 1)),
        ("call", Action(0, "F", 2), Action(2, "F", 0)),
        ("call", Action(1, "B", 3), Action(2, "B", 2)),
        ("gpipe", Action(2, "F", 0), Action(0, "F", 2)),
        ("gpipe", Action(0, "B", 0), Action(2, "B", 2)),
        ("1f1b", Action(2, "B", 0), Action(0, "F", 2)),
        ("1f1b", Action(0, "F", 2), Action(2, "B", 0)),
    )
]


@pytest.mark.parametrize(("how", "failing", "other"), PAIRS)
def test_the_other_lanes_end_their_action_and_start_no_other(how: str, failing: Action, other: Action) -> None:
    case, gradients = case_of("threads", how), with_gradients(case_of("threads", how), "values")
    inside, returned, ended = threading.Event(), threading.Event(), []

    def work() -> None:
        inside.set()
        returned.wait(0.3)  # with lanes that drain, the caller cannot be back before this action ends
        ended.append(returned.is_set())

    def trip() -> None:
        hold(until=inside)
        raise Boom

    with case.gates.at({failing: trip, other: work}):
        with pytest.raises(Boom):
            case.run(how)
        returned.set()
        assert ended == [False]
        assert [a for a in case.gates.passed if a.stage == other.stage][-1] == other
        assert_gradients(case, gradients)
    case.assert_works()


@pytest.mark.parametrize("how", HOWS)
def test_several_stages_that_fail_at_once(how: str) -> None:
    case = case_of("threads", how)
    gradients = with_gradients(case, "values")
    actions = [Action(0, "F", 2), Action(1, "F", 1), Action(2, "F", 0)]
    together = threading.Barrier(len(actions))
    errors = {action: Boom(str(action)) for action in actions}

    def handler(action: Action) -> Any:
        def trip() -> None:
            together.wait(60)
            raise errors[action]

        return trip

    with case.gates.at({action: handler(action) for action in actions}), pytest.raises(Boom) as caught:
        case.run(how)
    assert [caught.value is error for error in errors.values()].count(True) == 1
    assert [describe(a) in note for a, e in errors.items() for note in notes(e)] == [True] * len(actions)
    assert not case.gates.inside
    assert_gradients(case, gradients)
    case.assert_works()
