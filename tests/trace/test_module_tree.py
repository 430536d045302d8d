"""Units of a module tree, homes of its state, and who sees modules called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from autosplit.trace.borrowed import state
from autosplit.trace.module_tree import (
    ModuleCost,
    choose_units,
    coarsened,
    homes,
    intercept,
    stages_of_modules,
)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.out = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(self.inner(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 4)
        self.shift = nn.Parameter(torch.zeros(4))
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.unused = nn.Linear(4, 4)
        self.head = nn.Linear(4, 4)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x) + self.shift
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def costs(**seconds: float) -> dict[str, ModuleCost]:
    """Return costs by path (``__`` for dots), called in this order; the model's are their sum."""
    found = {path.replace("__", "."): ModuleCost(s, n) for n, (path, s) in enumerate(seconds.items())}
    tops = [path for path in found if not any(path.startswith(f"{other}.") for other in found)]
    return {"": ModuleCost(sum(found[path].forward_s for path in tops), 0), **found}


EQUAL = costs(embed=1.0, blocks__0=2.0, blocks__1=2.0, blocks__2=2.0, head=1.0)


# -- units -----------------------------------------------------------------------------------------------------------
def test_units_are_the_children_of_the_root_and_of_containers_in_call_order() -> None:
    assert choose_units(Model(), EQUAL, least=1) == ("embed", "blocks.0", "blocks.1", "blocks.2", "unused", "head")
    turned = costs(head=1.0, blocks__2=2.0, blocks__1=2.0, blocks__0=2.0, embed=1.0)
    assert choose_units(Model(), turned, least=1) == ("head", "blocks.2", "unused", "blocks.1", "blocks.0", "embed")


def test_a_unit_with_more_than_its_share_is_opened() -> None:
    inside = {"blocks__1__inner": 6.0, "blocks__1__inner__0": 5.0, "blocks__1__inner__1": 1.0, "blocks__1__out": 3.0}
    dear = costs(embed=1.0, blocks__0=1.0, blocks__1=10.0, **inside, blocks__2=1.0, head=1.0)
    found = choose_units(Model(), dear, least=2)
    assert [unit for unit in found if unit.startswith("blocks.1")] == [
        "blocks.1.inner.0",
        "blocks.1.inner.1",
        "blocks.1.out",
    ]
    assert "blocks.0" in found


def test_a_unit_whose_own_python_does_the_work_stays_whole() -> None:
    dear = costs(embed=1.0, blocks__1=10.0, blocks__1__inner=0.4, blocks__1__out=0.4, head=1.0)
    assert "blocks.1" in choose_units(Model(), dear, least=2)


def test_a_module_that_is_passed_over_is_no_unit() -> None:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = Model()

        def forward(self, x: Tensor) -> Tensor:
            return self.model.head(self.model.embed(x))

    seen = {path: ModuleCost(1.0, n) for n, path in enumerate(["", "model.embed", "model.head"])}
    found = choose_units(Holder(), seen, least=3)
    assert "model" not in found
    assert [unit for unit in found if unit in seen] == ["model.embed", "model.head"]


# -- homes -----------------------------------------------------------------------------------------------------------
def test_state_lies_with_its_unit_and_what_is_around_units_with_their_first() -> None:
    model = Model()
    stage_of = {"embed": 1, "blocks.0": 1, "blocks.1.inner.0": 2, "blocks.1.out": 1, "blocks.2": 2, "head": 3}
    stages = stages_of_modules(model, stage_of)
    assert stages[""] == 1
    assert stages["blocks.0.inner.0"] == 1
    assert stages["blocks.1"] == 1
    assert stages["blocks.1.inner"] == 2
    assert stages["blocks"] == 1
    assert stages["unused"] == 2  # as what is registered before it
    found = homes(model, stage_of)
    assert found["shift"] == 1
    assert found["blocks.1.inner.0.weight"] == 2
    assert found["embed.weight"] == 1  # tied to the head's: one home, with the first
    assert found["head.bias"] == 3
    assert "head.weight" not in found
    assert set(found) == {name for name, _ in model.named_parameters()}


# -- calls -----------------------------------------------------------------------------------------------------------
def recorder(seen: list[Any]) -> Callable[..., Any]:
    def visit(path: str, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        seen.append((path, len(args), sorted(kwargs)))
        return plain(*args, **kwargs)

    return visit


def test_calls_are_visited_until_the_model_is_given_back() -> None:
    model, seen = Model(), []
    before = {path: dict(module.__dict__) for path, module in model.named_modules()}
    x = torch.randn(2, 4)
    expected = model(x)
    with state.attributes(model):
        intercept(model, ["embed", "blocks.1"], recorder(seen))
        assert torch.equal(model(x), expected)
        model.embed(input=x)
        model.blocks[1].forward(x)
    model(x)
    assert seen == [("embed", 1, []), ("blocks.1", 1, []), ("embed", 0, ["input"]), ("blocks.1", 1, [])]
    assert {path: dict(module.__dict__) for path, module in model.named_modules()} == before


def test_modules_come_together_again_where_they_share_a_stage() -> None:
    fine = {"embed": 0, "blocks.0.inner.0": 0, "blocks.0.inner.1": 0, "blocks.0.out": 1, "blocks.1.inner.0": 1}
    called = {"blocks.0", "blocks.0.inner", "blocks.1", "blocks.1.inner"}
    assert coarsened(fine, called=called) == {"embed": 0, "blocks.0.inner": 0, "blocks.0.out": 1, "blocks.1": 1}
    assert coarsened(fine, called=set()) == fine
