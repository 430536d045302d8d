"""Plans under a budget that falls: the predicted peak never rises, and never passes the budget."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import autosplit
from autosplit import InfeasibleError, Plan
from autosplit.planning.plan.parts import StageMemory
from autosplit.profile.allocations import Allocations

STEPS = 10
_TIGHTEST = (0.1, 0.2, 0.35, 0.5)
"""Shares of what is above the states that the tightest budget leaves: the first that a plan fits in."""


@dataclass(frozen=True)
class Budget:
    """A limit, and the fastest plan within it."""

    limit_bytes: int
    plan: Plan

    @property
    def peak_bytes(self) -> int:
        """The highest predicted peak of a device."""
        return max(stage.memory.peak_bytes for stage in self.plan.stages)


def falling(
    make: Callable[[], nn.Module], batch: Tensor, *, machine: str, optimizer: str = "adamw", steps: int = STEPS
) -> list[Budget]:
    """Return plans for ``steps`` budgets, from what the fastest plan takes down to near what the states take."""
    with torch.device("meta"):
        model = make()
    sample = batch.to("meta")

    def within(limit: int | None) -> Plan:
        return autosplit.plan(model, machine, sample=sample, memory_limit=limit, optimizer=optimizer)

    # a plan that does not fit is returned with its verdict; what is below the least that fits would be one
    free = within(None)
    most = max(stage.memory.peak_bytes for stage in free.stages)
    states = max(_states_bytes(stage.memory) for stage in free.stages)
    for share in _TIGHTEST:
        least = states + round(share * (most - states))
        last = Budget(least, within(least))
        if last.peak_bytes > least:
            continue
        limits = [most - round(step * (most - least) / (steps - 1)) for step in range(steps - 1)]
        return [*(Budget(limit, within(limit)) for limit in limits), last]
    raise InfeasibleError(
        f"no plan takes less than half of what the fastest has above its states: {most - states} bytes"
    )


def _states_bytes(memory: StageMemory) -> int:
    return memory.parameter_bytes + memory.gradient_bytes + memory.buffer_bytes + memory.optimizer_bytes


def rises(peaks: Sequence[int]) -> int:
    """Return how often a peak is above the one before it."""
    return sum(later > earlier for earlier, later in itertools.pairwise(peaks))


def measured_bytes(
    budget: Budget, make: Callable[[], nn.Module], batch: Tensor, *, device: torch.device, loss_fn: Callable[..., Any]
) -> int:
    """Return the most that a plan's lane held in a step beyond what it held before: a CUDA device's peak, or a lane's.

    Before a step the parameters are there and no gradients.
    """
    torch.manual_seed(0)
    pipe = autosplit.autosplit(
        make().to(device), devices=[device] * len(budget.plan.stages), chunks=budget.plan.chunks, plan=budget.plan
    )
    x = batch.to(device)
    if device.type == "cuda":
        return _grown_on_card(partial(pipe.train_step, x, loss_fn=loss_fn, loss_reduction="mean"), pipe, device)
    for _ in range(2):
        pipe.zero_grad(set_to_none=True)
        found = pipe.profile_step(x, loss_fn=loss_fn, loss_reduction="mean", memory=True)
    counted = [own.grown_bytes for own in found.memory if own is not None]
    if counted:
        return max(counted)
    pipe.zero_grad(set_to_none=True)
    with Allocations() as run:  # one microbatch runs as one piece, whose lane nobody counts on the CPU
        pipe.train_step(x, loss_fn=loss_fn, loss_reduction="mean")
    return run.peak_bytes


def _grown_on_card(step: Callable[[], Any], pipe: nn.Module, device: torch.device) -> int:
    """Return what the allocator gave out at most in a second step, beyond what it had given out before it."""
    step()
    pipe.zero_grad(set_to_none=True)
    torch.cuda.synchronize(device)
    held = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    step()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - held
