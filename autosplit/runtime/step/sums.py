"""The gradients of one replica of a stage, added up over its microbatches by its own lane.

    replica 0    microbatches 0, 2, 4   a sum, in this order ─┐
    replica 1    microbatches 1, 3      a sum, in this order ─┴─► added in the order of the replicas, when all are done

So numbers do not depend on which lane is faster. Cells compute with leaves of the parameters' memory. Autograd adds to
their ``.grad``, as in a loop over microbatches; no gradient and no hook of the caller's is touched. For parameters that
a stage reads by itself there are no such leaves: autograd is asked for their gradients. So it is for all leaves of a
stage where weight gradients are put off, and where a cell has several contributions for one leaf: these are added one
after the other, as in one backward of all cells.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import nn

from autosplit.backward import begin_at_sums, dtype_of_sums
from autosplit.runtime.lanes.lanes import Lane
from autosplit.runtime.ops import plus
from autosplit.runtime.step.attributes import StandInAttributes
from autosplit.weight_gradients import WeightUse


class Held(NamedTuple):
    """A stage as one of its replicas has it, numbered from 0."""

    stage: int
    replica: int


class Sums:
    """The sums of gradients of one replica of a stage.

    Attributes:
        held: the stage and the replica.
        lane: where it runs.
        given: its shared values and tied parameters.
        attributes: what its cells run in, where they may change modules; None: they do not.
        parameters: its own parameters, and buffers that require a gradient.
        leaves: what stands for these, and for what is given, in the graphs of cells; those that require a gradient.
        free: leaves under the loss that are no stage's.
        by_engine: whether autograd adds to the leaves' ``.grad``.
        products: what can wait in a cell's backward, and where that is; None: not known yet, or not to be told.
        added: one more than the last microbatch that was added, but for what was put off.
    """

    def __init__(
        self,
        held: Held,
        code: Any,
        lane: Lane,
        shared: Sequence[torch.Tensor],
        attributes: StandInAttributes | None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """``code`` runs the stage (`StageCode`); None: it does not run here. ``dtype`` is what sums are at least in."""
        self.held, self.lane, self.shared, self.attributes, self._code = held, lane, shared, attributes, code
        self._dtype = dtype
        self.parameters: Sequence[torch.Tensor] = ()
        self.leaves: list[torch.Tensor] = []
        self.free: list[torch.Tensor] = []
        self.by_engine, self.added = True, 0
        self.products: list[tuple[WeightUse, int, int]] | None = None
        self._stand_ins: list[torch.Tensor] = []
        """What stands for each parameter: a leaf of its memory, or itself."""
        self._in_slots: list[torch.Tensor | None] = []
        self._totals: dict[int, torch.Tensor] = {}
        """Sums that autograd does not make, by the identity of the leaf."""
        self._added_here: set[int] = set()
        """The leaves, by identity, whose sums no backward begins at: free ones, to which another stream adds, and
        parameters of the caller's, to which autograd adds in their own dtype."""
        self._alone: set[int] = set()
        """The leaves, by identity, whose sum is memory that nothing else uses."""

    def use(self, parameters: Sequence[torch.Tensor], passing: Collection[int] = ()) -> None:
        """Compute with what the model has now, and add up the gradients of these parameters, again or from now on.

        ``passing`` are those, by identity, whose ``.grad`` and hooks are nobody's: autograd adds to them as they are.
        """
        if parameters and len(parameters) == len(self.parameters) and all(map(is_, parameters, self.parameters)):
            return
        self.parameters, others = parameters, set(map(id, self._code.others()))
        self.by_engine &= others.difference(passing).isdisjoint(map(id, parameters))
        leaves = {id(p): p if id(p) in others else leaf_of(p) for p in parameters}
        for leaf in (*leaves.values(), *self.shared):
            if (dtype := dtype_of_sums(leaf, self._dtype)) == leaf.dtype or not (leaf.requires_grad and leaf.is_leaf):
                continue
            if (id(leaf) in leaves or isinstance(leaf, nn.Parameter)) and id(leaf) not in passing:
                self._added_here.add(id(leaf))
            else:
                leaf.grad_dtype = dtype
        self.compute_with(leaves)

    def compute_with(self, leaves: Mapping[int, torch.Tensor]) -> None:
        """Compute with leaves, by the identity of the parameters that they stand for, and add up their gradients."""
        self._stand_ins = list(leaves.values())
        self._in_slots = [leaves.get(id(tensor), tensor) for tensor in self._code.read()]
        self.leaves = [leaf for leaf in (*self.shared, *self._stand_ins, *self.free) if leaf.requires_grad]

    @property
    def reads_modules(self) -> bool:
        """Whether the stage's code reads parameters where modules have them."""
        return any(isinstance(tensor, nn.Parameter) for tensor in self._code.others())

    def fill(self, results: list[Any]) -> None:
        """Have the stage's code compute with this; it leaves its layers' ``results`` where backwards are split."""
        self._code.fill(self._in_slots, None if self.by_engine else results)

    @property
    def read_directly(self) -> list[torch.Tensor]:
        """The parameters that stand for themselves in cells' graphs."""
        return [leaf for leaf, parameter in zip(self._stand_ins, self.parameters, strict=True) if leaf is parameter]

    def ask(self) -> None:
        """Ask autograd for gradients from now on."""
        if self.by_engine:
            self.by_engine = False
            for leaf in self.leaves:
                if leaf.grad is not None:
                    self._totals[id(leaf)], leaf.grad = leaf.grad, None

    def ask_for(self, free: Sequence[torch.Tensor]) -> None:
        """Add up the gradients of free leaves too."""
        self.ask()
        self._added_here.update(map(id, free))
        self.free += free
        self.leaves += free

    def begin(self, leaves: Sequence[torch.Tensor], roots: list[torch.Tensor], seeds: list[torch.Tensor]) -> None:
        """Have a backward begin at the sums of leaves too."""
        there = [leaf for leaf in leaves if id(leaf) in self._totals and id(leaf) not in self._added_here]
        begin_at_sums(there, self._totals, roots, seeds)

    def take(self, totals: Iterable[tuple[torch.Tensor, torch.Tensor | None]]) -> None:
        """Keep the sums that a backward gives, or add what it gives where it has not begun at them."""
        for leaf, total in totals:
            if total is not None and id(leaf) in self._added_here:
                self.add(leaf, total)
            elif total is not None:
                self._totals[id(leaf)] = total

    def add(self, leaf: torch.Tensor, gradient: torch.Tensor, *, alone: bool = False) -> None:
        """Add to a sum, in place where nothing else uses its memory; ``alone``: nor that of this gradient."""
        key, gradient = id(leaf), gradient.to(dtype_of_sums(leaf, self._dtype))
        if key not in self._totals:
            self._totals[key] = gradient
        elif key in self._alone:
            self._totals[key] += gradient
        else:
            self._totals[key] = plus(self._totals[key], gradient)
        if alone:
            self._alone.add(key)

    def totals(self) -> list[torch.Tensor]:
        """Return the sums."""
        grads = (leaf.grad for leaf in self.leaves) if self.by_engine else ()
        return [*self._totals.values(), *(total for total in grads if total is not None)]

    def hand_over(self, free: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """Return the sums of the parameters, of ``free`` leaves and of what is given; there are none afterwards."""
        return self._taken((*self._stand_ins, *free, *self.shared))

    def stand_ins_of(self, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return what stands for some of the parameters in cells' graphs."""
        stand_ins = dict(zip(map(id, self.parameters), self._stand_ins, strict=True))
        return [stand_ins[id(parameter)] for parameter in parameters]

    def take_out(self, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """Return and remove the sums of some parameters, which are complete."""
        return self._taken(self.stand_ins_of(parameters))

    def _taken(self, leaves: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        if not self.by_engine:
            return [self._totals.pop(id(leaf), None) for leaf in leaves]
        ids, grads = set(map(id, self.leaves)), list[torch.Tensor | None]()
        for leaf in leaves:
            grads.append(leaf.grad if id(leaf) in ids else None)
            if grads[-1] is not None:
                leaf.grad = None
        return grads

    def clear(self) -> None:
        """Forget all sums."""
        self.hand_over(())
        self._totals.clear()
        self._alone.clear()
        self.added = 0


def leaf_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a leaf of a tensor's memory; it has the same attributes, for functions that look for them."""
    leaf = tensor.detach().requires_grad_(tensor.requires_grad)
    leaf.__dict__ = vars(tensor)
    return leaf


def together(
    replicas: Sequence[Sums], free: Sequence[torch.Tensor], brought: Callable[[Held, torch.Tensor], torch.Tensor]
) -> list[torch.Tensor | None]:
    """Return what replicas of a stage have added up of its parameters, of ``free``, and of its shared values.

    ``brought`` returns a replica's tensor on the device of the first. Their sums are empty afterwards.
    """
    result: list[torch.Tensor | None] = []
    for sums in replicas:
        totals = sums.hand_over(free)
        result = result or [None] * len(totals)
        for index, gradient in enumerate(totals):
            if gradient is not None:
                total, gradient = result[index], brought(sums.held, gradient)
                result[index] = gradient if total is None else plus(total, gradient)
    return result
