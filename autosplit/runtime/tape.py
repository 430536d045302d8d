"""The plain model's random numbers: drawn for the whole batch in model order, handed out by microbatch.

    plain model    a: bernoulli_ [8, 64]       b: rand [8, 1]           one after the other, from torch's generator
    tape           a: bernoulli_ [8, 64]       b: rand [8, 1]           the same calls, as late as a cell needs them
    cells          a: rows 0-2, 3-5, 6-7       b: rows 0-2, 3-5, 6-7    in place of what they would draw

An operation is drawn with the plain model's own shape, strides and dtype, so that it takes the same numbers from the
generator and leaves it in the same state. Masks of zeros and ones are drawn as bool, which takes the same numbers.
What runs once, on the whole batch, draws its numbers itself.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from autosplit.trace.graph import ROWS, NodeClass, TracedNode
from autosplit.trace.recording.draw_rules import (
    Rule,
    Sizes,
    batch_dim,
    is_drawn_beforehand,
    rule_of,
    with_plain_numbers,
)
from autosplit.trace.recording.random_watch import (
    Draw,
    draws_numbers,
    has_own_generator,
    is_composite,
    run_composite,
)
from autosplit.trace.recording.recording import by_name
from autosplit.trace.scope import runs_only

DRAWING = threading.RLock()
"""Held while somebody has the process's default generators for itself."""


@dataclass(frozen=True)
class TapeNode:
    """A random node.

    Attributes:
        name: its stable name.
        draws: what it draws; None: it draws by itself, when its turn comes, as what it draws depends on values.
        micro: whether it runs for each microbatch.
        again: whether it runs again in the backward.
        part: a dimension of what it draws, and the elements along it that this process takes; None: all.
    """

    name: str
    draws: tuple[Draw, ...] | None
    micro: bool
    again: bool
    part: tuple[int, tuple[range, ...]] | None = None


def tape_nodes(infos: Iterable[TracedNode], *, again: Collection[str] = ()) -> tuple[TapeNode, ...]:
    """Return the nodes for a tape, of those in model order; ``again`` names those that run again in the backward."""
    return tuple(
        TapeNode(
            info.name,
            info.draws if is_drawn_beforehand(info) else None,
            micro=info.node_class is NodeClass.MICRO,
            again=info.name in again,
            part=info.part,
        )
        for info in with_plain_numbers(infos)
    )


class Tape:
    """The random numbers of one call, drawn when a cell first needs them and dropped when the last one has.

    Cells of several lanes may ask at the same time.
    """

    def __init__(
        self,
        nodes: Sequence[TapeNode],
        sizes: Sequence[int],
        lengths: Sizes,
        start: torch.Tensor | None = None,
        *,
        here: Collection[str] | None = None,
        among: tuple[int, int] | None = None,
    ) -> None:
        """``here`` are the nodes that run in this process; None: all.

        ``among``: how many rows of a larger batch stand before these, and how many it has.
        """
        self.nodes = nodes
        self.here = here
        self.sizes = tuple(sizes)
        self.among = among
        self._before, self._rows = among or (0, sum(self.sizes))
        self.lengths = lengths
        self._start = start
        """The generator's state before the first draw; None: whatever it is then."""
        self._now = start
        """For a tape that draws once more, the state before its next draw."""
        self._places = {node.name: index for index, node in enumerate(nodes)}
        self._next = 0
        self._drawn: dict[str, list[Sequence[torch.Tensor]]] = {}
        """Of each draw the parts of the microbatches, or the one of a node that runs once."""
        self._left = {node.name: len(self.sizes) if node.micro else 1 for node in nodes}

    def fresh(self) -> Tape:
        """Return a tape for another run of the same call; it draws from the generator as it is then."""
        return Tape(self.nodes, self.sizes, self.lengths, here=self.here, among=self.among)

    def again(self) -> Tape:
        """Return a tape that draws once more what this one drew; the generator stays as it is."""
        return Tape(self.nodes, self.sizes, self.lengths, self._start, here=self.here, among=self.among)

    def finish(self) -> None:
        """Draw what nobody has asked for, as other processes do: the generator is then where the plain model's is."""
        with DRAWING:
            while self._next < len(self.nodes):
                self._draw_next()

    def holds(self, name: str) -> bool:
        """Tell whether a node's numbers are on the tape."""
        return name in self._places

    def run(self, name: str, microbatch: int, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a random operation, or a module with several inside, with a microbatch's numbers."""
        index = self._places[name]
        node = self.nodes[index]
        if index >= self._next:
            with DRAWING:
                while self._next < index:
                    self._draw_next()
                if self._next == index and self._draws_itself(node):
                    self._begin()
                    self._next += 1
                    return function(*args, **kwargs)
                if self._next == index:
                    self._draw_next()
        drawn = self._drawn[name]
        if not node.again:
            self._left[name] -= 1
            if not self._left[name]:
                del self._drawn[name]
        numbers = [parts[microbatch if node.micro else 0] for parts in drawn]
        dropped = _dropped(numbers, function, args, kwargs)
        if dropped is not None:
            return dropped
        with _Replay(name, node.draws or (), numbers):
            return function(*args, **kwargs)

    def _draws_itself(self, node: TapeNode) -> bool:
        """Tell whether the next node draws by itself: the numbers would be the same, or cannot be drawn ahead."""
        once = not node.again and (not node.micro or len(self.sizes) == 1)
        alone = self.here is None and self.among is None and self._now is None and node.part is None
        return node.draws is None or (once and alone)

    def _begin(self) -> None:
        if self._start is None:
            self._start = torch.default_generator.get_state()

    def _draw_next(self) -> None:
        node, generator = self.nodes[self._next], torch.default_generator
        if self._now is None:
            self._begin()
            numbers = self._draw(node)
        else:
            outside = generator.get_state()
            generator.set_state(self._now)
            try:
                numbers = self._draw(node)
                self._now = generator.get_state()
            finally:
                generator.set_state(outside)
        if self.here is None or node.name in self.here:
            self._drawn[node.name] = [self._parts(node, *pair) for pair in zip(numbers, node.draws or (), strict=True)]
        self._next += 1

    @torch.no_grad()
    def _draw(self, node: TapeNode) -> list[torch.Tensor]:
        sizes = {**self.lengths, ROWS: self._rows}
        return [_rule(draw).draw(draw, sizes) for draw in node.draws or ()]

    def _parts(self, node: TapeNode, numbers: torch.Tensor, draw: Draw) -> Sequence[torch.Tensor]:
        """Return what each microbatch takes of a draw, or the one run of a node."""
        if node.part is not None:
            along, runs = node.part
            numbers = torch.cat([numbers.narrow(along, run.start, len(run)) for run in runs], along)
        dim = batch_dim(draw.out)
        if not node.micro or dim is None:
            return [numbers] * len(self.sizes)
        factor = numbers.shape[dim] // self._rows
        rows = numbers.narrow(dim, self._before * factor, sum(self.sizes) * factor)
        return rows.split([size * factor for size in self.sizes], dim)


class _Replay(TorchDispatchMode):
    """Gives the random operations inside what a tape holds for them."""

    def __init__(self, name: str, draws: Sequence[Draw], numbers: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.name = name
        self.left = iter(zip(draws, numbers, strict=True))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags or not draws_numbers(func, args, kwargs):
            return func(*args, **kwargs)
        if is_composite(func):
            with self:
                return run_composite(func, args, kwargs)
        if has_own_generator(args, kwargs):
            return func(*args, **kwargs)
        draw, numbers = next(self.left, (None, None))
        asked = _shape_asked(func, args)
        if draw is None or numbers is None or draw.op is not func or (asked and asked != tuple(numbers.shape)):
            known = "none" if draw is None or numbers is None else f"{draw.op.name()} of {list(numbers.shape)}"
            raise RuntimeError(
                f"{self.name} draws {func.name()} of {list(asked or ())} where {known} was recorded: its random "
                "numbers are not the same at every call; split with rng='counter'"
            )
        return _rule(draw).give(numbers, args, kwargs)


def _shape_asked(func: Any, args: Any) -> tuple[int, ...] | None:
    """Return the shape of the numbers that an operation asks for; None where several tensors decide about it."""
    shapes = [tuple(v.shape) if isinstance(v, torch.Tensor) else tuple(v) for v in args if isinstance(v, _SHAPED)]
    return shapes[0] if len(shapes) == 1 or (shapes and func._schema.is_mutable) else None


def _rule(draw: Draw) -> Rule:
    rule = rule_of(draw)
    assert rule is not None, "a tape holds only what can be drawn beforehand"
    return rule


def _dropped(numbers: Sequence[torch.Tensor], function: Any, args: Any, kwargs: Any) -> Any:
    """Return what torch's dropout makes of its mask, as it does it; None for other operations."""
    if isinstance(function, nn.Dropout) and runs_only(function, nn.Dropout.forward):
        kwargs = {**kwargs, "p": function.p, "training": function.training, "inplace": function.inplace}
    elif function is not F.dropout:
        return None
    value, p, training, inplace = by_name(F.dropout, args, kwargs).values()
    if not (training and 0 < p < 1 and [value.shape] == [mask.shape for mask in numbers]):
        return None
    noise = numbers[0].to(value.dtype).div_(1 - p)
    return value.mul_(noise) if inplace else value * noise


_SHAPED = (torch.Tensor, list, tuple, torch.Size)
