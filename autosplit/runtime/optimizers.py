"""Move a model's state to devices, and let optimizers' state follow; refuse steps of what a model has no more."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from autosplit.errors import InputError


def move(places: Iterable[tuple[torch.Tensor, torch.device]]) -> None:
    """Move parameters and buffers, with their gradients, to devices; Parameter objects stay the same.

    The state of any optimizer follows.
    """
    moved = []
    for tensor, device in places:
        if tensor.device != device:
            tensor.data = tensor.data.to(device)
            moved.append(tensor)
            if tensor.grad is not None:
                tensor.grad.data = tensor.grad.data.to(device)
    follow(tensor for tensor in moved if isinstance(tensor, torch.nn.Parameter))


def follow(parameters: Iterable[torch.nn.Parameter]) -> None:
    """From now on, before each step of any optimizer, move its state to the devices of these parameters."""

    def bring_all(optimizer: torch.optim.Optimizer, alive: Collection[int]) -> None:
        for owner, state in optimizer.state.items():
            if id(owner) in alive:
                bring(owner, state)

    _before_steps(parameters, bring_all)


def refuse(parameters: Iterable[torch.Tensor], why: str) -> None:
    """From now on, raise InputError where an optimizer has one of these parameters, which no model has any more."""

    def stop(optimizer: torch.optim.Optimizer, alive: Collection[int]) -> None:
        if any(id(parameter) in alive for group in optimizer.param_groups for parameter in group["params"]):
            raise InputError(why)

    _before_steps(parameters, stop)


def _before_steps(
    parameters: Iterable[torch.Tensor], act: Callable[[torch.optim.Optimizer, Collection[int]], None]
) -> None:
    """Call a function before each step of any optimizer, with it and the ids of those parameters that still exist.

    The hook lives as long as one of the parameters.
    """
    params = list(parameters)
    if not params:
        return
    references = [weakref.ref(parameter) for parameter in params]

    def before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        act(optimizer, {id(parameter) for reference in references if (parameter := reference()) is not None})

    # The hook goes with the last parameter, not from inside: torch iterates over its hooks while it calls them.
    left, handle = len(params), register_optimizer_step_pre_hook(before_step)

    def ended() -> None:
        nonlocal left
        left -= 1
        if not left:
            handle.remove()

    for parameter in params:
        weakref.finalize(parameter, ended).atexit = False


def bring(parameter: torch.Tensor, state: dict[str, Any]) -> None:
    """Move the state tensors that have the parameter's shape to its device; the step count stays where it is."""
    for name, value in state.items():
        if isinstance(value, torch.Tensor) and name != "step" and value.shape == parameter.shape:
            state[name] = value.to(parameter.device)
