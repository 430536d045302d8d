"""The versions of one stage's weights: the newest is the model's own, those that minibatches in flight use are kept.

    computed with    leaf of version 3 ── its memory ──► also the parameter's, as long as 3 is the newest
    optimizer steps  a minibatch in flight uses 3: the parameter gets a copy first, and 3 keeps its memory
                     none does: in place

A stage's lane alone works on it, one action after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from autosplit.backward import donate_gradients
from autosplit.stream.optimizers import Settings, StageOptimizer

Places = Mapping[str, Sequence[tuple[nn.Module, str]]]
"""Where stand-ins of modules hold each parameter: modules and attributes by the parameter's name."""


class StageWeights:
    """A stage's parameters, what steps them, and their versions since the pipeline was filled.

    Attributes:
        updates: how many updates were made since the pipeline was filled: the newest version.
        most: how many versions there were at once.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        places: Places,
        optimizer: StageOptimizer | None,
        used: Callable[[int], int],
    ) -> None:
        """``used`` returns which version a minibatch uses; ``optimizer`` None: nothing steps the parameters.

        ``places`` may get more entries while no minibatch runs.
        """
        self._parameters, self._optimizer, self._used = parameters, optimizer, used
        self._places = places
        self._versions: dict[int, dict[str, nn.Parameter]] = {}
        self.updates = 0
        self._keep_newest()
        self.most = 1

    def _keep_newest(self) -> None:
        self._versions[self.updates] = {name: nn.Parameter(own.data) for name, own in self._parameters.items()}

    @property
    def version_bytes(self) -> int:
        """The bytes of the weights beside the newest, when there were most versions."""
        return (self.most - 1) * sum(own.numel() * own.element_size() for own in self._parameters.values())

    def take(self, minibatch: int) -> list[torch.Tensor]:
        """Put a minibatch's version where its stage reads it, and return it."""
        return self._put(self._used(minibatch))

    def _put(self, version: int) -> list[torch.Tensor]:
        leaves = self._versions[version]
        for name, leaf in leaves.items():
            for module, attribute in self._places[name]:
                setattr(module, attribute, leaf)
        return list(leaves.values())

    def step(self, minibatch: int, totals: dict[int, torch.Tensor], settings: Settings) -> None:
        """Step the newest weights by a minibatch's gradients, and let go of versions that no later minibatch uses.

        ``totals`` are the gradients by the identity of the version's leaves; empty afterwards.
        """
        leaves = self._versions[self._used(minibatch)]
        found = [(self._parameters[name], totals[id(leaf)]) for name, leaf in leaves.items() if id(leaf) in totals]
        totals.clear()
        self._put(self.updates)
        later = self._used(minibatch + 1)
        for version in [version for version in self._versions if version < min(later, self.updates)]:
            del self._versions[version]
        del leaves
        if later <= self.updates:  # a minibatch needs the newest as it is
            for parameter in self._parameters.values():
                parameter.data = parameter.data.clone()
        if found and self._optimizer is not None:
            self._optimizer.step(_through_hooks(found), settings)
        if later > self.updates:
            del self._versions[self.updates]
        self.updates += 1
        self._keep_newest()
        self.most = max(self.most, len(self._versions))

    def end(self) -> None:
        """Keep the newest version only."""
        self._put(self.updates)
        self._versions.clear()


def _through_hooks(found: Sequence[tuple[nn.Parameter, torch.Tensor]]) -> dict[int, torch.Tensor]:
    """Return gradients by the identity of parameters, as the parameters' hooks leave them."""
    gradients = {id(parameter): gradient for parameter, gradient in found}
    hooked = [own for own, _ in found if own._backward_hooks or own._post_accumulate_grad_hooks]
    if hooked:
        torch.autograd.backward(donate_gradients(hooked, [gradients[id(own)] for own in hooked]))
    for parameter in hooked:
        left, parameter.grad = parameter.grad, None
        if left is None:
            raise RuntimeError(
                f"the gradient of a parameter of shape {list(parameter.shape)} was taken away while its stage stepped: "
                "a hook, or zero_grad() between two losses, which a stream has no need of"
            )
        gradients[id(parameter)] = left
    return gradients
