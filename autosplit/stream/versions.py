"""The versions of one stage's weights: the newest is the model's own, those that minibatches in flight use are kept.

    computed with    leaf of version 3 ── its memory ──► also the parameter's, as long as 3 is the newest
    optimizer steps  a minibatch in flight uses 3: the parameter gets a copy first, and 3 keeps its memory
                     none does: in place

Replicas of the stage have leaves of their own of the same memory, whose ``.grad`` is their sum of a minibatch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from autosplit.backward import donate_gradients
from autosplit.errors import InputError
from autosplit.runtime.lanes.lanes import Lane, lane
from autosplit.runtime.step.sums import Sums
from autosplit.stream.lowering import Places
from autosplit.stream.optimizers import Settings, StageOptimizer


class StageWeights:
    """A stage's parameters, what steps them, and their versions since the pipeline was filled.

    Attributes:
        parameters: the stage's parameters.
        updates: how many updates were made since the pipeline was filled: the newest version.
        minibatches: how many minibatches went into them.
        most: how many versions there were at once.
        lane: where updates run: the stage's lane, or where it has replicas one of its own, which waits for all.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        places: Mapping[str, Places],
        optimizer: StageOptimizer | None,
        lanes: Sequence[Lane],
        *,
        behind: int,
    ) -> None:
        """``lanes`` are those of the replicas; ``optimizer`` None: nothing steps the parameters.

        ``places`` are by the parameter's name, and may get more entries while no minibatch runs. What update u takes in
        used version ``u - behind``.
        """
        self._parameters, self._optimizer, self._behind = parameters, optimizer, behind
        self.parameters, self._places, self._lanes = list(parameters.values()), places, lanes
        self._in_modules = False
        """Whether a minibatch has needed its version where modules have their parameters."""
        self.lane = lanes[0] if len(lanes) == 1 else lane(lanes[0].device)
        self._versions: dict[int, tuple[Any, list[dict[int, nn.Parameter]]]] = {}
        """By version the event behind its making, and each replica's leaves by the identity of the parameters."""
        self.updates = self.minibatches = 0
        self._keep_newest()
        self.most = 1

    def _keep_newest(self) -> None:
        leaves = [{id(p): nn.Parameter(p.data) for p in self.parameters} for _ in self._lanes]
        self._versions[self.updates] = self.lane.record(), leaves
        self._changes = {name: p._version for name, p in self._parameters.items()}
        """How often each parameter was changed in place, when the newest version was made."""

    def _check_unchanged(self) -> None:
        """Raise InputError where somebody else has changed a parameter since: which minibatches saw it is a race."""
        for name, parameter in self._parameters.items():
            if parameter._version != self._changes[name]:
                raise InputError(
                    f"{name!r} was changed in place while minibatches of the stream were in flight; call "
                    "stream.drain() before that, or change it in a hook of the optimizer (register_step_post_hook)"
                )

    def _used(self, update: int) -> int:
        return max(0, update - self._behind)

    @property
    def version_bytes(self) -> int:
        """The bytes of the weights beside the newest, when there were most versions."""
        return (self.most - 1) * sum(p.numel() * p.element_size() for p in self.parameters)

    def take(self, sums: Sums, update: int) -> None:
        """Have a replica compute with the version of what an update takes in."""
        ready, leaves = self._versions[self._used(update)]
        replica = sums.held.replica
        self._lanes[replica].wait(ready)
        self._in_modules |= sums.reads_modules
        if self._in_modules:
            self._put(replica, leaves[replica].values())
        sums.compute_with(leaves[replica])
        if sums.reads_modules:
            sums.ask()

    def _put(self, replica: int, leaves: Iterable[nn.Parameter]) -> None:
        for name, leaf in zip(self._parameters, leaves, strict=True):
            for module, attribute in self._places[name][replica]:
                setattr(module, attribute, leaf)

    def release(self, sums: Sums) -> None:
        """Keep what a replica has added up of a minibatch, and have its stand-ins hold no older version."""
        if self._in_modules:
            self._put(sums.held.replica, self.parameters)
        sums.ask()

    def step(
        self, gradients: Sequence[torch.Tensor | None], settings: Mapping[int, Settings], *, minibatches: int
    ) -> None:
        """Step the newest weights by the gradients of a round, and let go of versions that no later one uses.

        ``gradients`` are those of the parameters, in their order, of so many ``minibatches``.
        """
        self._check_unchanged()
        later = self._used(self.updates + 1)
        for version in [version for version in self._versions if version < min(later, self.updates)]:
            self._forget(version)
        if later <= self.updates:  # a minibatch needs the newest as it is
            for parameter in self.parameters:
                parameter.data = parameter.data.clone()
        pairs = [(p, g) for p, g in zip(self.parameters, gradients, strict=True) if g is not None]
        if pairs and self._optimizer is not None:
            self._optimizer.step(_through_hooks(pairs), settings)
        if later > self.updates:
            self._forget(self.updates)
        self.updates += 1
        self.minibatches += minibatches
        self._keep_newest()
        self.most = max(self.most, len(self._versions))

    def _forget(self, version: int) -> None:
        """Let go of a version; its memory is used again behind what this lane has waited for."""
        _, (leaves, *_) = self._versions.pop(version)
        for leaf in leaves.values():
            self.lane.keep(leaf)

    def end(self) -> None:
        """Keep the newest version only."""
        for replica in range(len(self._lanes)):
            self._put(replica, self.parameters)
        self._versions.clear()


def _through_hooks(pairs: Sequence[tuple[nn.Parameter, torch.Tensor]]) -> dict[int, torch.Tensor]:
    """Return gradients by the identity of parameters, as the parameters' hooks leave them."""
    gradients = {id(parameter): gradient for parameter, gradient in pairs}
    hooked = [p for p, _ in pairs if p._backward_hooks or p._post_accumulate_grad_hooks]
    if hooked:
        torch.autograd.backward(donate_gradients(hooked, [gradients[id(p)] for p in hooked]))
    for parameter in hooked:
        left, parameter.grad = parameter.grad, None
        if left is None:
            raise RuntimeError(
                f"the gradient of a parameter of shape {list(parameter.shape)} was taken away while its stage stepped: "
                "a hook, or zero_grad() between two losses, which a stream has no need of"
            )
        gradients[id(parameter)] = left
    return gradients
