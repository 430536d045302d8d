"""One optimizer per stage: made by the caller's function, or the caller's one optimizer, stepped stage by stage.

Private torch interface: ``Optimizer._opt_called``, by which schedulers of learning rates tell that a step came first.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from autosplit.errors import InputError

Settings = list[dict[str, Any]]
"""The options of an optimizer's groups: learning rates and so on."""
Given = Optimizer | Callable[[list[nn.Parameter]], Optimizer]


class StageOptimizer:
    """Steps one stage's parameters of an optimizer.

    It shares the optimizer's state, which has an entry per parameter, and has groups of its own.
    """

    def __init__(self, optimizer: Optimizer, parameters: Iterable[nn.Parameter]) -> None:
        own = {id(parameter) for parameter in parameters}
        groups = [(place, [p for p in g["params"] if id(p) in own]) for place, g in enumerate(optimizer.param_groups)]
        self.optimizer = optimizer
        self._places = [place for place, mine in groups if mine]
        self._stage = type(optimizer).__new__(type(optimizer))
        self._stage.__dict__.update({k: v for k, v in optimizer.__dict__.items() if k != "step"})
        self._stage.param_groups = [{**optimizer.param_groups[p], "params": groups[p][1]} for p in self._places]

    def has(self, parameter: nn.Parameter) -> bool:
        """Tell whether it steps a parameter."""
        return any(parameter is own for group in self._stage.param_groups for own in group["params"])

    def settings(self) -> Settings:
        """Return the options as they are now."""
        return [{k: _kept(v) for k, v in g.items() if k != "params"} for g in self.optimizer.param_groups]

    def step(self, settings: Settings) -> None:
        """Step this stage's parameters, with the options that were taken when the minibatch came in."""
        for place, group in zip(self._places, self._stage.param_groups, strict=True):
            group.update(settings[place])
        if self._places:
            self._stage.state = self.optimizer.state
            self._stage.step()
            self.optimizer._opt_called = True  # type: ignore[attr-defined]


def _kept(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def check_optimizer(given: Any, model: nn.Module) -> None:
    """Raise InputError for an optimizer that steps only as a whole, or steps what is not the model's."""
    if not isinstance(given, Optimizer):
        if not callable(given):
            raise InputError(
                "optimizer= is a torch.optim.Optimizer, or a function that makes one for a list of parameters, not a "
                f"{type(given).__name__}"
            )
        return
    known = {id(parameter) for parameter in model.parameters()}
    for parameter in (p for group in given.param_groups for p in group["params"]):
        if id(parameter) not in known:
            raise InputError(
                f"the optimizer steps a parameter of shape {list(parameter.shape)} that is not the model's; a stream "
                "steps what its stages hold: give that an optimizer of its own"
            )
    _, *needed = inspect.signature(type(given).step).parameters.values()
    if any(own.default is own.empty and own.kind is own.POSITIONAL_OR_KEYWORD for own in needed):
        raise InputError(
            f"{type(given).__name__} calls the model itself, with all its weights, in a step, and stages of a stream "
            "step one by one; give an optimizer that steps each parameter by its own gradient"
        )


def stage_optimizers(
    given: Given, stages: Sequence[Mapping[str, nn.Parameter]], made: Sequence[StageOptimizer | None]
) -> list[StageOptimizer | None]:
    """Return an optimizer per stage, None where a stage has no parameter to train.

    ``made`` are those of the last time: a function is called once per stage.

    Raises InputError where a stage has parameters now that its optimizer was not made for.
    """
    if isinstance(given, Optimizer):
        return [StageOptimizer(given, stage.values()) if stage else None for stage in stages]
    found: list[StageOptimizer | None] = []
    for place, stage in enumerate(stages):
        known = made[place] if place < len(made) else None
        if stage and known is None:
            own = given(list(stage.values()))
            check_optimizer(own, nn.ParameterList(stage.values()))
            known = StageOptimizer(own, stage.values())
        for name, parameter in stage.items():
            if known is not None and not known.has(parameter):
                raise InputError(
                    f"stage {place} trains {name!r} now, for which its optimizer was not made; begin a new stream"
                )
        found.append(known)
    return found
