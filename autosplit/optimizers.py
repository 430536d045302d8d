"""An optimizer that updates fp32 copies of parameters in bf16 or fp16.

    parameter p, p.grad   bf16   ── grad.float() ──►  master, master.grad   fp32
                                                        │ the wrapped optimizer's step: state in fp32
    p                     bf16   ◄──── copy_ ────────  master               kept as state["master"]

Micikevicius et al. 2018, "Mixed precision training", section 3.1: steps that are too small for bf16 add up in the copy.
"""

from __future__ import annotations

import inspect
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import torch
from torch.optim import Optimizer

from autosplit.errors import InputError
from autosplit.schedule.memory.updates import in_batches

MASTER = "master"
"""The entry of a parameter's state that is its master weight."""
BATCH_ELEMENTS = 1 << 26
"""Optimizers of torch step parameters of at most so many elements at once, or one: gradients in fp32 take memory."""


class MasterWeights(Optimizer):
    """Steps fp32 master weights of bf16 and fp16 parameters by a wrapped optimizer, and copies them back.

    ``precision="bf16_fp32_master"`` of :func:`autosplit.plan` means this. Parameters of other dtypes are stepped as
    they are. Groups, options, schedulers, hooks and ``state_dict()`` are as of the wrapped optimizer. A parameter's
    state has an entry ``"master"`` too, and is loaded without rounding. A parameter that was changed since the last
    step, by ``load_state_dict`` of the model for example, is taken over into its master.

    Args:
        optimizer: a class such as ``torch.optim.AdamW``, whose ``step()`` needs no closure.
        params: parameters or groups of them, as the class takes them.
        options: further arguments of the class.

    Raises InputError for an optimizer that calls the model in its step (``torch.optim.LBFGS``), and in a step for a
    parameter in fp32 that has a master.
    """

    def __init__(self, optimizer: Callable[..., Optimizer], params: Any, **options: Any) -> None:
        self._stepped = optimizer(params, **options)
        self.kind = f"{type(self).__name__} of {type(self._stepped).__name__}"
        """What checkpoints of ranks call it."""
        _, *needed = inspect.signature(type(self._stepped).step).parameters.values()
        if any(p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD for p in needed):
            raise InputError(
                f"{type(self._stepped).__name__} calls the model itself in a step, and master weights are copied to it "
                "behind the step; give an optimizer that steps by the gradients that are there"
            )
        super().__init__(self._stepped.param_groups, self._stepped.defaults)
        self._stepped.param_groups, self._stepped.state = [], defaultdict(dict)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Perform one step; ``closure`` evaluates the model again, and its result is returned."""
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        for batch in self._batches():
            self._step({parameter: self._master(parameter) for parameter in batch})
        return result

    def _batches(self) -> Iterator[list[torch.Tensor]]:
        """Yield parameters that are stepped at once: all of them, where the optimizer may look at several together."""
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        apart, left = type(self._stepped).__module__.startswith("torch.optim."), iter(parameters)
        for batch in in_batches([p.numel() for p in parameters], BATCH_ELEMENTS if apart else sys.maxsize):
            yield list(islice(left, len(batch)))

    def _master(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return what is stepped of a parameter; a new value of the parameter is a new value of its master."""
        master: torch.Tensor | None = self.state[parameter].get(MASTER) if parameter in self.state else None
        if not _is_narrow(parameter):
            if master is not None:
                raise InputError(
                    f"a parameter of {parameter.dtype} {list(parameter.shape)} has a master weight from when it was in "
                    f"bf16 or fp16, so its value is rounded; copy state[parameter][{MASTER!r}] to it and delete that"
                )
            return parameter
        if master is None:
            return parameter.detach().to(torch.float32, copy=True)
        return torch.where(master.to(parameter.dtype) == parameter, master, parameter, out=master)

    def _step(self, masters: dict[torch.Tensor, torch.Tensor]) -> None:
        """Have the wrapped optimizer step the masters of some parameters."""
        stepped, state = self._stepped, self.state
        stepped.param_groups = [
            {**group, "params": [masters[p] for p in group["params"] if p in masters]} for group in self.param_groups
        ]
        stepped.state = defaultdict(dict, {k: v for k, v in state.items() if not isinstance(k, torch.Tensor)})
        for parameter, master in masters.items():
            if entries := {key: value for key, value in state.get(parameter, {}).items() if key != MASTER}:
                stepped.state[master] = entries
            if master is not parameter:
                assert parameter.grad is not None
                master.grad = parameter.grad.to(torch.float32)
        stepped.step()
        for group, changed in zip(self.param_groups, stepped.param_groups, strict=True):
            group.update({key: value for key, value in changed.items() if key != "params"})
        for parameter, master in masters.items():
            entries = stepped.state.pop(master, {})
            if master is not parameter:
                parameter.copy_(master)
                master.grad, entries[MASTER] = None, master
            if entries:
                state[parameter] = entries
        state.update(stepped.state)
        stepped.param_groups, stepped.state = [], defaultdict(dict)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict; masters and other state keep their dtype, where torch casts to the parameter's."""
        before, parameters = [group["params"] for group in self.param_groups], {}
        for group in self.param_groups:
            group["params"] = [_wide(p) if _is_narrow(p) else p for p in group["params"]]
        try:
            wide = [p for group in self.param_groups for p in group["params"]]
            super().load_state_dict(state_dict)
            parameters = dict(zip(wide, (p for params in before for p in params), strict=True))
        finally:
            for group, params in zip(self.param_groups, before, strict=True):
                group["params"] = params
        self.state = defaultdict(dict, {parameters.get(key, key): entries for key, entries in self.state.items()})

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_stepped": self._stepped, "kind": self.kind}


def _is_narrow(parameter: torch.Tensor) -> bool:
    return parameter.dtype in (torch.bfloat16, torch.float16)


def _wide(parameter: torch.Tensor) -> torch.Tensor:
    """Return a tensor that stands for a parameter's master when state is loaded: of its dtype and on its device."""
    return torch.empty(0, dtype=torch.float32, device=parameter.device)
