"""One optimizer per stage: made by the caller's function, or the caller's one optimizer, stepped stage by stage.

Private torch interface: ``Optimizer._opt_called``, by which schedulers of learning rates tell that a step came first.
"""

from __future__ import annotations

import inspect
import operator
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from autosplit.errors import InputError
from autosplit.optimizers import MasterWeights

Settings = list[dict[str, Any]]
"""The options of an optimizer's groups: learning rates and so on."""
Given = Optimizer | Callable[[list[nn.Parameter]], Optimizer]


class StageOptimizer:
    """Steps one stage's parameters of an optimizer.

    It steps stand-ins of the parameters, of the same memory and with the same entries of the optimizer's state: a
    caller who calls ``step()`` or ``zero_grad()`` between two losses finds no gradients, and takes none away. What a
    step counts in a group or in an attribute is the stage's own until the pipeline is drained.
    """

    def __init__(self, optimizer: Optimizer, parameters: Iterable[nn.Parameter]) -> None:
        self.optimizer = optimizer
        self.groups = groups_of(optimizer, parameters)
        self._twins = [(p, nn.Parameter(p.data)) for group in self.groups.values() for p in group]
        twin = {id(parameter): other for parameter, other in self._twins}
        self._stage = _copied(optimizer)
        self._stage.param_groups = [
            {**optimizer.param_groups[index], "params": [twin[id(p)] for p in members]}
            for index, members in self.groups.items()
        ]
        self._counted: set[str] = set()
        """The options that steps change."""
        optimizer._opt_called = True  # type: ignore[attr-defined]

    def step(self, gradients: Mapping[int, torch.Tensor], settings: Mapping[int, Settings]) -> None:
        """Step by gradients, by the identity of parameters; ``settings`` are options by the identity of optimizers."""
        options = settings[id(self.optimizer)]
        for index, group in zip(self.groups, self._stage.param_groups, strict=True):
            group.update({k: v for k, v in options[index].items() if k not in self._counted})
        state, self._stage.state = self.optimizer.state, defaultdict(dict)
        for parameter, twin in self._twins:
            twin.data, twin.grad = parameter.data, gradients.get(id(parameter))
            if parameter in state:
                self._stage.state[twin] = state[parameter]
        before = [dict(group) for group in self._stage.param_groups]
        if self.groups:
            self._stage.step()
        for group, old in zip(self._stage.param_groups, before, strict=True):
            self._counted |= {name for name, value in group.items() if name not in old or value is not old[name]}
        for parameter, twin in self._twins:
            twin.grad = None
            if twin in self._stage.state:
                state[parameter] = self._stage.state[twin]

    def hand_back(self) -> None:
        """Give the caller's optimizer what steps have counted."""
        for index, group in zip(self.groups, self._stage.param_groups, strict=True):
            self.optimizer.param_groups[index].update({k: group[k] for k in self._counted})
        kept = {"state", "param_groups"}
        self.optimizer.__dict__.update({k: v for k, v in self._stage.__dict__.items() if k not in kept})


def _copied(optimizer: Optimizer) -> Any:
    """Return an optimizer with the same attributes, and copies of optimizers that it steps."""
    twin = type(optimizer).__new__(type(optimizer))
    attributes = {k: v for k, v in optimizer.__dict__.items() if k != "step"}
    twin.__dict__.update({k: _copied(v) if isinstance(v, Optimizer) else v for k, v in attributes.items()})
    return twin


def settings_of(optimizer: Optimizer) -> Settings:
    """Return the options of an optimizer's groups as they are now."""
    return [{k: cloned(v) for k, v in group.items() if k != "params"} for group in optimizer.param_groups]


def groups_of(optimizer: Optimizer, parameters: Iterable[nn.Parameter]) -> dict[int, list[nn.Parameter]]:
    """Return those of an optimizer's parameters that are among others, by the number of their group."""
    ids = {id(parameter) for parameter in parameters}
    groups = [[p for p in group["params"] if id(p) in ids] for group in optimizer.param_groups]
    return {index: mine for index, mine in enumerate(groups) if mine}


def cloned(value: Any) -> Any:
    """Return a copy of a tensor, and any other value as it is."""
    return value.clone() if isinstance(value, torch.Tensor) else value


def check_optimizer(optimizer: Any, model: nn.Module) -> None:
    """Raise InputError for an optimizer that steps only as a whole, or steps what is not the model's."""
    if not isinstance(optimizer, Optimizer):
        if not callable(optimizer):
            raise InputError(
                "optimizer= is a torch.optim.Optimizer, or a function that makes one for a list of parameters, not a "
                f"{type(optimizer).__name__}"
            )
        return
    known = {id(parameter) for parameter in model.parameters()}
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        if id(parameter) not in known:
            raise InputError(
                f"the optimizer steps a parameter of shape {list(parameter.shape)} that is not the model's; a stream "
                "steps what its stages hold: give that an optimizer of its own"
            )
    own_step = optimizer.__dict__.get("step")
    if own_step is not None and not hasattr(own_step, "_wrapped_by_lr_sched"):
        raise InputError(
            f"the step of this {type(optimizer).__name__} was replaced on the object, and stages step copies of it; "
            "define it in a class, or use register_step_pre_hook"
        )
    several = not isinstance(optimizer, MasterWeights) and any(
        isinstance(v, Optimizer) for v in vars(optimizer).values()
    )
    if several or isinstance(getattr(type(optimizer), "param_groups", None), property):
        raise InputError(
            f"{type(optimizer).__name__} steps another optimizer, which has all stages' parameters; give that one"
        )
    _, *needed = inspect.signature(type(optimizer).step).parameters.values()
    if any(p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD for p in needed):
        raise InputError(
            f"{type(optimizer).__name__} calls the model itself, with all its weights, in a step, and stages of a "
            "stream step one by one; give an optimizer that steps each parameter by its own gradient"
        )


def stage_optimizers(
    asked: Given, stages: Sequence[Mapping[str, nn.Parameter]], earlier: Sequence[StageOptimizer | None]
) -> list[StageOptimizer | None]:
    """Return an optimizer per stage, None where a stage has no parameter to train.

    ``earlier`` are those of the last time: a function is called once per stage.

    Raises InputError where a stage has parameters now that its optimizer was not made for.
    """
    optimizers: list[StageOptimizer | None] = []
    for index, stage in enumerate(stages):
        known = earlier[index] if index < len(earlier) and stage else None
        if isinstance(asked, Optimizer):
            optimizer = asked
        elif known is not None:
            optimizer = known.optimizer
        elif stage:
            optimizer = asked(list(stage.values()))
            check_optimizer(optimizer, nn.ParameterList(stage.values()))
        if stage and (known is None or not _is(known.groups, optimizer, stage)):
            if known is not None and optimizer is not asked:
                raise InputError(
                    f"stage {index} does not train what its optimizer was made for any more; begin a new stream"
                )
            known = StageOptimizer(optimizer, stage.values())
        optimizers.append(known)
    return optimizers


def _is(groups: Mapping[int, Sequence[nn.Parameter]], optimizer: Optimizer, stage: Mapping[str, nn.Parameter]) -> bool:
    """Tell whether a stage's groups are the optimizer's groups of its parameters."""
    here = groups, groups_of(optimizer, stage.values())
    return operator.eq(*({index: list(map(id, mine)) for index, mine in side.items()} for side in here))
