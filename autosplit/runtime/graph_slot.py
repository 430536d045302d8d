"""One microbatch of a stage in flight, as graphs: a forward, and a backward for each way in which gradients come.

    forward    copy in ─► replay: inputs ─► stage ─► outputs        ─► copies go to whoever takes them
                                     └─ what autograd saves stays where it is
    backward   copy in ─► replay: gradients ─► stage's backward     ─► copies go back
                                     └─ the parameters' are added to the stage's sums

What crosses a graph's border is copied, so that outside of it values live as they ever do. Inside, the capture runs
the stage and autograd's engine as they always run, on parameters of its own (the same memory): so the same operations
in the same order, to the same bits. What autograd saved is kept for good, since the same forward writes it again: a
microbatch in flight has a slot to itself, and each slot a pool of memory: what one slot's graphs use and free could
become what another slot keeps, which a replay of the first would write over.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import GradientEdge

from autosplit.runtime.ambient import any_autocast
from autosplit.runtime.behind import leaves_behind, saved_behind
from autosplit.runtime.differentiate import gradients
from autosplit.runtime.graph_state import Watched
from autosplit.runtime.lanes import CudaLane
from autosplit.runtime.ops import CallState, Key, seed_of
from autosplit.runtime.put_off import PutOff
from autosplit.runtime.recompute import gathered, spread
from autosplit.runtime.running_statistics import Collected

Tensors = list[torch.Tensor]


class Leaf(NamedTuple):
    """A leaf whose gradient is a sum: its key among the stage's sums, and the tensor that stands for it in graphs."""

    key: Any
    tensor: torch.Tensor


@dataclass
class Own:
    """What all slots of a stage share.

    Attributes:
        watched: the parameters and buffers that the graphs have in them.
        random: the names of the stage's random operations.
        written: those of the parameters and buffers that the stage writes, by their identities.
        state: what stands for each parameter and buffer, by its identity: the same memory, whose changes are none of
            what a graph saved, since its next replay reads and saves the new values.
        parameters: those of it that want a gradient.
        sums: the sums of gradients over microbatches, by the key of their leaf.
        held_bytes: what graphs hold for good, by the device's allocator.
    """

    lane: CudaLane
    watched: Watched
    random: tuple[str, ...]
    written: frozenset[int] = frozenset()
    sums: dict[Any, torch.Tensor] = field(default_factory=dict)
    held_bytes: int = 0

    def __post_init__(self) -> None:
        with torch.inference_mode(False):
            self.state = {id(tensor): _twin(tensor) for tensor in self.watched.tensors}
        self.parameters = {key: tensor for key, tensor in self.state.items() if tensor.requires_grad}

    def settled(self) -> Tensors:
        """Return the parameters and buffers that the stage does not write."""
        return [tensor for tensor in self.watched.tensors if id(tensor) not in self.written]

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count what is held at the end and was not before."""
        before = self.lane.held_bytes() or 0
        yield
        self.held_bytes += (self.lane.held_bytes() or 0) - before

    def inside(self) -> AbstractContextManager[None]:
        """Have the model's own state be what stands for it in the stage's graphs."""
        return self.watched.replaced(self.state)

    def capture(self, work: Callable[[], None], draws: _Draws, pool: Any) -> Callable[[], None]:
        """Return what replays ``work``."""
        cached = any_autocast()  # a cast that one graph has made is no other's to read
        if cached:
            torch.clear_autocast_cache()
        before = torch.default_generator.get_state()
        try:
            with self.inside():
                graph = self.lane.capture(work, pool, list(draws.generators.values()))
        finally:
            if cached:
                torch.clear_autocast_cache()
        if not torch.equal(before, torch.default_generator.get_state()):
            torch.default_generator.set_state(before)
            raise RuntimeError("it draws from the CPU's generator")
        return lambda: self.lane.streams.replay(graph)


class _Draws:
    """Random operations of one slot: each has a generator, which starts at the seed that it would have anyway."""

    def __init__(self, lane: CudaLane, names: Sequence[str]) -> None:
        self.lane = lane
        self.generators = {name: lane.streams.generator(lane.device) for name in names}

    def seed(self, key: Key) -> None:
        """Set the generators to where a cell's random operations begin."""
        for name, generator in self.generators.items():
            generator.manual_seed(seed_of(key, name))

    def run(self, name: str, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a random operation."""
        with self.lane.streams.drawing(self.generators[name]):
            return function(*args, **kwargs)


class Slot:
    """The graphs of one microbatch in flight; free when nobody holds its `Lease`.

    Attributes:
        pool: where its graphs have their memory from; no other slot's have any from there.
        names: per input that is a tensor, the bundle that it comes in and its position there.
        outs: what the stage gives, flat, where the graph leaves it.
        bundles: by target, how many of these it is given.
        read: what its backward reads of the model's parameters and buffers.
    """

    def __init__(
        self, own: Own, run: Callable[..., Any], given: Sequence[Any], names: Sequence[str], *, grad: bool
    ) -> None:
        self.own, self.busy = own, False
        self.draws = _Draws(own.lane, own.random)
        self.pool = own.lane.streams.pool(own.lane.device)
        self.statistics = Collected()
        flat, self.sizes = spread(given)
        lengths = zip(names, self.sizes, strict=True)
        places = [(name, i) for name, size in lengths for i in range(1 if size is None else size)]
        key = _key_in(flat)
        self.backs: dict[Any, Back] = {}
        self.outs: Tensors = []
        self.bundles: dict[str, int] = {}
        with torch.inference_mode(False), torch.set_grad_enabled(grad):
            self.inputs = {p: _blank(v) for p, v in enumerate(flat) if isinstance(v, torch.Tensor)}
            self.names = {p: places[p] for p in self.inputs}
            self.into = [tensor.data for tensor in self.inputs.values()]
            """The same memory; a copy there is no change in place of what autograd saved."""
            self._copy_in(flat)
            self.seed(key)
            self._replay = own.capture(lambda: self._issue(run, flat), self.draws, self.pool)
        self._check_leaves()
        self.read: Tensors = []

    def _issue(self, run: Callable[..., Any], flat: Sequence[Any]) -> None:
        """Run the stage on the inputs that are the slot's own, seen as views where the stage was given views."""
        given = list(flat)
        for place, tensor in self.inputs.items():
            viewed = flat[place].requires_grad and not flat[place].is_leaf
            given[place] = tensor[...] if viewed and torch.is_grad_enabled() else tensor
        state = CallState(statistics=self.statistics, draws=self.draws)
        given = [Key(state, 0) if isinstance(value, Key) else value for value in given]
        sent = run(*gathered(given, self.sizes))
        self.bundles = {target: len(bundle) for target, bundle in sent.items()}
        self.outs = [tensor for bundle in sent.values() for tensor in bundle]

    def _check_leaves(self) -> None:
        """Raise RuntimeError where gradients would reach a leaf that is not the slot's own."""
        own = {id(tensor) for tensor in (*self.inputs.values(), *self.own.parameters.values())}
        for leaf in leaves_behind(self.outs):
            if id(leaf) not in own:
                raise RuntimeError(f"a gradient goes to a tensor of shape {list(leaf.shape)} that no module holds")

    def find_read(self, *, again: bool, units: bool) -> None:
        """Find what a backward reads; where it begins with another forward (``again``), or has such in it (``units``).

        To ask what was saved would run that forward: so all parameters count, and with ``units`` buffers too, of which
        what does not run again may have saved something.
        """
        if units:
            self.read = self.own.settled()
        elif again:
            self.read = [tensor for tensor in self.own.settled() if isinstance(tensor, nn.Parameter)]
        else:
            saved, every = saved_behind(self.outs), self.own.watched.tensors
            self.read = [tensor for tensor in every if tensor.untyped_storage().data_ptr() in saved]

    def seed(self, key: Key | None) -> None:
        """Have the random operations draw what they draw in a cell."""
        if key is not None:
            self.draws.seed(key)

    def _copy_in(self, flat: Sequence[Any]) -> None:
        for into, place in zip(self.into, self.inputs, strict=True):
            _cored(into).copy_(_cored(flat[place].detach()))

    def forward(self, given: Sequence[Any]) -> Tensors:
        """Replay on what a cell is given; return new tensors, and tell the step what norms saw."""
        flat, _ = spread(given)
        key = _key_in(flat)
        with torch.no_grad():
            self._copy_in(flat)
            self.seed(key)
            self._replay()
            outs = [_copied(tensor.detach()) for tensor in self.outs]
            if key is not None:
                self._tell(key)
        return outs

    def _tell(self, key: Key) -> None:
        """Tell a step what norms saw."""
        for name, use in self.statistics.uses.items():
            (part,) = use.parts.values()
            fresh = replace(part, mean=part.mean.clone(), variance=part.variance.clone())
            key.state.statistics.add(name, key.microbatch, replace(use, parts={}), fresh)

    def leaves(self) -> Iterator[Leaf]:
        """Yield the leaves whose gradients are sums: shared values, then parameters."""
        for place, (name, position) in self.names.items():
            if name == "shared" and self.inputs[place].requires_grad:
                yield Leaf(("shared", position, *_layout(self.inputs[place])), self.inputs[place])
        yield from (Leaf(key, tensor) for key, tensor in self.own.parameters.items())

    def back(self, came: Sequence[torch.Tensor | None], key: Key | None, put_off: Callable[..., PutOff] | None) -> Back:
        """Return the backward for gradients that come in like these; ``put_off`` finds what can wait, None: nothing."""
        kind = put_off is not None, tuple(None if seed is None else _layout(seed) for seed in came)
        if kind not in self.backs:
            with self.own.counted():
                self.backs[kind] = Back(self, came, key, put_off)
        return self.backs[kind]


class Back:
    """The backward of a slot for one way in which gradients come in.

    Attributes:
        sends: the inputs whose gradients go back, by bundle and position, and where the graph leaves them.
        leaves: the leaves to whose sums it adds.
        late: those to whose sums `rest` adds: the weight gradients that were put off.

    What the forward's graph saved is for graphs only: outside of a capture a kernel may read on the host where its
    random numbers begin, which in a graph is memory of the device. So all is captured, or an error is raised.
    """

    def __init__(
        self,
        slot: Slot,
        came: Sequence[torch.Tensor | None],
        key: Key | None,
        put_off: Callable[..., PutOff] | None,
    ) -> None:
        self.slot: Slot = weakref.proxy(slot)  # which holds this: without a cycle its memory is free at once
        self.own = slot.own
        self.roots = [out for out, seed in zip(slot.outs, came, strict=True) if seed is not None]
        self.seeds = [_blank(seed).detach() for seed in came if seed is not None]
        self._copy_in(came)
        every = list(slot.leaves())
        allowed = {id(leaf.tensor) for leaf in every}
        self.later = PutOff() if put_off is None else put_off(self.roots, allowed)
        waits = self.later.leaves
        self.wanted = [p for p, (name, _) in slot.names.items() if name != "shared" and slot.inputs[p].requires_grad]
        self.leaves = [leaf for leaf in every if id(leaf.tensor) not in waits]
        self.found: list[torch.Tensor | None] = []
        slot.seed(key)
        reached, late = self._looked()
        self.leaves = [leaf for leaf, total in zip(self.leaves, reached, strict=True) if total is not None]
        by_tensor = {id(leaf.tensor): leaf for leaf in every}
        self.late: dict[Any, Leaf] = {}
        for leaf, total in zip(self.leaves, (t for t in reached if t is not None), strict=True):
            slot.own.sums.setdefault(leaf.key, torch.empty_like(total))
        for tensor, gradient in late:
            leaf = by_tensor[id(tensor)]
            slot.own.sums.setdefault(leaf.key, torch.empty_like(gradient))
            self.late[leaf.key] = leaf
        del reached, late
        self.run = slot.own.capture(self._issue, slot.draws, slot.pool)
        self.rest = slot.own.capture(self._issue_rest, slot.draws, slot.pool) if self.late else None

    def _looked(self) -> tuple[list[torch.Tensor | None], list[tuple[torch.Tensor, torch.Tensor]]]:
        """Return which leaves a backward comes to, and which with what is put off, by a capture that is thrown away."""
        reached: list[torch.Tensor | None] = []
        late: list[tuple[torch.Tensor, torch.Tensor]] = []

        @torch.no_grad()
        def look() -> None:
            reached.extend(self._engine([]))
            late.extend(pair for product in self.later.products for pair in product.gradients())

        self.slot.own.capture(look, self.slot.draws, self.slot.pool)
        self.found = []
        return reached, late

    def _engine(self, sums: Sequence[torch.Tensor]) -> Sequence[torch.Tensor | None]:
        """Run autograd's engine; keep what goes back, and return what came to the leaves."""
        leaves = [leaf.tensor for leaf in self.leaves]
        held = leaves if sums else []
        wanted = [self.slot.inputs[place] for place in self.wanted]
        ends: list[torch.Tensor | GradientEdge] = [*wanted, *leaves, *self.later.edges]
        found = gradients([*self.roots, *held], [*self.seeds, *sums], ends, keep=True)
        self.found, rest = list(found[: len(wanted)]), found[len(wanted) :]
        self.later.catch(rest[len(leaves) :])
        return rest[: len(leaves)]

    @torch.no_grad()
    def _issue(self) -> None:
        sums = [self.slot.own.sums[leaf.key] for leaf in self.leaves]
        for into, total in zip(sums, self._engine(sums), strict=True):
            assert total is not None, "a leaf that was reached"
            into.copy_(total)

    @torch.no_grad()
    def _issue_rest(self) -> None:
        for product in self.later.products:
            for tensor, gradient in product.gradients():
                self.slot.own.sums[self._key(tensor)].add_(gradient)

    def _key(self, tensor: torch.Tensor) -> Any:
        return next(leaf.key for leaf in self.late.values() if leaf.tensor is tensor)

    def _copy_in(self, came: Sequence[torch.Tensor | None]) -> None:
        given = (seed for seed in came if seed is not None)
        for into, seed in zip(self.seeds, given, strict=True):
            _cored(into).copy_(_cored(seed.detach()))

    @torch.no_grad()
    def replay(self, came: Sequence[torch.Tensor | None], key: Key | None) -> list[tuple[str, int, torch.Tensor]]:
        """Run the backward; return copies of the gradients that go back, with the bundle and position of each."""
        self._copy_in(came)
        self.slot.seed(key)
        self.run()
        pairs = zip(self.wanted, self.found, strict=True)
        return [(*self.slot.names[place], _copied(gradient)) for place, gradient in pairs if gradient is not None]


def _key_in(flat: Sequence[Any]) -> Key | None:
    return next((value for value in flat if isinstance(value, Key)), None)


def _twin(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same memory that counts its own changes in place."""
    if isinstance(tensor, nn.Parameter):  # a compiler asks for that
        return nn.Parameter(tensor.data, requires_grad=tensor.requires_grad)
    return tensor.data.requires_grad_(tensor.requires_grad)


def explained(error: BaseException) -> str:
    """Return what an exception says first."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype


def _cored(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor without the repetitions of an expanded one."""
    strides = tensor.stride()
    if 0 not in strides:
        return tensor
    sizes = [min(size, 1) if stride == 0 else size for size, stride in zip(tensor.shape, strides, strict=True)]
    return tensor.as_strided(sizes, strides)


def _blank(tensor: torch.Tensor) -> torch.Tensor:
    """Return new memory laid out as a tensor is; it wants a gradient where that does."""
    core = _cored(tensor.detach())
    blank = torch.empty_strided(core.shape, core.stride(), dtype=core.dtype, device=core.device)
    return blank.expand(tensor.shape).detach().requires_grad_(tensor.requires_grad)


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    blank = _blank(tensor.detach())
    _cored(blank).copy_(_cored(tensor))
    return blank
