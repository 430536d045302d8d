"""The module tree as what runs: which modules are units, where state lives, and who sees modules called.

model                its own Python
  embed              a unit: a child
  blocks             a container: opened
    blocks.0         a unit
    blocks.1         a unit; one that has more than its share of the cost is opened too
  head               a unit
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_PART = 0.1


# -- units -----------------------------------------------------------------------------------------------------------
@dataclass
class ModuleCost:
    """What a run of the model saw of one module, its children included.

    Attributes:
        forward_s: of its forward.
        first: when it was first called; None: never.
        output_bytes: of what it returned.
        saved_bytes: what it saved for its backward, without its children.
    """

    forward_s: float = 0.0
    first: int | None = None
    output_bytes: int = 0
    saved_bytes: int = 0


def choose_units(model: nn.Module, costs: Mapping[str, ModuleCost], *, least: int) -> tuple[str, ...]:
    """Return the paths of the modules that are placed as a whole, in the order of their first calls.

    Containers are always opened. So is a module that costs more than half of an equal share among ``least`` stages and
    whose called children do a part of that; and, while there are fewer units than stages, the dearest.
    Modules that were never called are units if they hold state; they follow the one registered before them.
    """
    total = sum(cost.forward_s for path, cost in costs.items() if not path) or 1.0
    tree = _Tree(model, costs)
    units = tree.below("")
    while True:
        much = total / (2 * least)
        worth = [path for path in units if tree.can_open(path)]
        dear = [path for path in worth if costs[path].forward_s > much]
        if not dear and len(units) < least and worth:
            dear = [max(worth, key=lambda path: costs[path].forward_s)]
        if not dear:
            break
        units = [unit for path in units for unit in (tree.below(path) if path in dear else [path])]
    return tuple(_in_call_order(units, costs)) or ("",)


class _Tree:
    def __init__(self, model: nn.Module, costs: Mapping[str, ModuleCost]) -> None:
        self.costs = costs
        self.modules = dict(model.named_modules())
        self.children: dict[str, list[str]] = {path: [] for path in self.modules}
        for path in self.modules:
            if path:
                self.children[path.rpartition(".")[0]].append(path)

    def below(self, path: str) -> list[str]:
        """Return the units that an opened module gives: its children, and for containers theirs."""
        units = []
        for child in self.children[path]:
            if isinstance(self.modules[child], CONTAINERS) or self._is_passed_over(child):
                units += self.below(child)
            elif self._is_called(child) or [*self.modules[child].parameters(), *self.modules[child].buffers()]:
                units.append(child)
        return units

    def _is_passed_over(self, path: str) -> bool:
        """Tell whether a module is not called itself, but modules inside it are."""
        return not self._is_called(path) and any(
            self._is_called(child) or self._is_passed_over(child) for child in self.children[path]
        )

    def can_open(self, path: str) -> bool:
        """Tell whether children that are called do a part of a module's work that is worth placing."""
        if not self._is_called(path):
            return False
        inside = [unit for unit in self.below(path) if self._is_called(unit)]
        return sum(self.costs[unit].forward_s for unit in inside) > _PART * self.costs[path].forward_s

    def _is_called(self, path: str) -> bool:
        return path in self.costs and self.costs[path].first is not None


def _in_call_order(units: Sequence[str], costs: Mapping[str, ModuleCost]) -> list[str]:
    places: dict[str, tuple[int, int]] = {}
    previous = -1
    for number, path in enumerate(units):
        first = costs[path].first if path in costs else None
        previous = previous if first is None else first
        places[path] = previous, number
    return sorted(units, key=places.__getitem__)


def coarsened(stage_of: Mapping[str, int], *, called: Collection[str]) -> dict[str, int]:
    """Put a module in the place of the units inside it where all of them have one stage.

    Then its own Python runs there too, and a microbatch takes the lane once. Only modules that are called can be.
    """
    inside: dict[str, list[str]] = {}
    for unit in stage_of:
        above = unit.rpartition(".")[0]
        while above:
            inside.setdefault(above, []).append(unit)
            above = above.rpartition(".")[0]
    fit = {path for path, units in inside.items() if path in called and len({stage_of[u] for u in units}) == 1}
    coarse: dict[str, int] = {}
    for unit, stage in stage_of.items():
        parts = unit.split(".")
        paths = (".".join(parts[:length]) for length in range(1, len(parts)))
        coarse[next((path for path in paths if path in fit), unit)] = stage
    return coarse


# -- homes -----------------------------------------------------------------------------------------------------------
def stages_of_modules(model: nn.Module, stage_of: Mapping[str, int]) -> dict[str, int]:
    """Return the stage of every module: its unit's, or for what was opened the first stage of the units inside.

    A module without either belongs to the module registered before it.
    """
    stages: dict[str, int] = {}
    previous = 0
    for path, _ in model.named_modules(remove_duplicate=False):
        above = path
        while above and above not in stage_of:
            above = above.rpartition(".")[0]
        if above in stage_of:
            previous = stage_of[above]
        else:
            inside = [s for unit, s in stage_of.items() if not path or unit.startswith(f"{path}.")]
            previous = min(inside, default=previous)
        stages[path] = previous
    return stages


def homes(model: nn.Module, stage_of: Mapping[str, int]) -> dict[str, int]:
    """Return the home stage of every parameter and buffer, by the first name of each.

    One that several modules hold has its home with the first stage of them.
    """
    stages = stages_of_modules(model, stage_of)
    first: dict[int, str] = {}
    home_of: dict[str, int] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                known = first.setdefault(id(tensor), f"{path}.{name}" if path else name)
                home_of[known] = min(stages[path], home_of.get(known, stages[path]))
    return home_of


# -- calls -----------------------------------------------------------------------------------------------------------
Visit = Callable[[str, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""Runs a module's own forward, given with the module's path and arguments, and returns its result."""


def intercept(model: nn.Module, paths: Collection[str], visit: Visit) -> None:
    """Have ``visit`` called in the place of some modules' forwards, behind their hooks.

    Each becomes an attribute of its module; who borrowed the model's attributes puts them back.
    """
    for path, module in model.named_modules():
        if path in paths:
            # a module that was compiled in place is entered by its compiled call
            name = "forward" if getattr(module, "_compiled_call_impl", None) is None else "_compiled_call_impl"
            module.__dict__[name] = _visited(visit, path, getattr(module, name))


def _visited(visit: Visit, path: str, plain: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: visit(path, plain, args, kwargs)
