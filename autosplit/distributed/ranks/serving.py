"""Calls of a model's functions that one rank makes and all ranks run, in one order, each with its own stages.

    last rank    issue: number, inputs, keys of caches ─► all       wait for the turn ─► own stages ─► outputs
    the others   hear ─► own stages ─► keep new tensors of caches, tell the last rank their shapes ─► hear

A recording is found by shapes, on zeros in the place of caches, so that all ranks come to the same one. Then what a
rank's stages take is filled in: what it keeps, what is told with the call, and what another rank sends.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch.utils.weak import WeakIdKeyDictionary

from autosplit.distributed import words
from autosplit.distributed.facts import program_text
from autosplit.distributed.messages import flattened, hear, post
from autosplit.distributed.ranks.calls import Call, Seam, ServedStep
from autosplit.distributed.ranks.remote import Leaf, Notes, RemoteTensor
from autosplit.distributed.world import World, attempt
from autosplit.errors import AutosplitError, DeviceError, InputError, TraceError, known_to_all
from autosplit.runtime.ops import OUT
from autosplit.runtime.step.cells import Cells
from autosplit.schedule.entry import Route
from autosplit.trace.graph import INFO
from autosplit.trace.inputs.objects import take_apart

_FEW = 64
"""Tensors of caches with so few elements are the last rank's, and go with every call."""
_CALLS, _SHAPES = 1, 2
"""Tags of what ranks tell each other."""


class Exchange:
    """The calls that ranks run together.

    Attributes:
        last: the rank that makes them.
        kept: the tensors that this rank has for it, by their keys.
        broken: what has ended a call on this rank alone; all ranks end of it.
    """

    def __init__(self, world: World, entry: Callable[[str], Any]) -> None:
        self.world, self.last = world, world.size - 1
        self.kept: dict[Hashable, torch.Tensor] = {}
        self.broken: BaseException | None = None
        self._entry = entry
        self._lent: dict[tuple[str, int], Any] = {}
        self._notes = Notes(world.device)
        self._inputs: Any = WeakIdKeyDictionary()
        self._told: set[tuple[str, int]] = set()
        """The layouts that all ranks know."""
        self._issuing, self._turn = threading.Lock(), threading.Condition()
        self._issued = self._done = 0
        self._on_way: deque[tuple[int, list[Any], Any]] = deque()
        """Works to wait for, and what they send, with the number of the call."""

    @property
    def leads(self) -> bool:
        """Whether this rank makes the calls."""
        return self.world.rank == self.last

    def call(self, entry: Any, numbers: Mapping[str, int], state: Mapping[str, Any], inputs: Any) -> Any:
        """Have all ranks run an entry; return its output. Several threads may do so at once."""
        leaves, structure = take_apart(inputs)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        dense = {id(t): t.detach().contiguous() for t in tensors if t.requires_grad or not t.is_contiguous()}
        leaves = [dense.get(id(leaf), leaf) for leaf in leaves]  # other ranks have them so
        with self._issuing:
            sent: list[Leaf] = []
            told = [self._input(leaf, sent) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
            caches = {name: [self._leaf(tensor) for tensor in tensors] for name, tensors in state.items()}
            new = {n: entry.layouts[n] for n in numbers.values() if (entry.name, n) not in self._told}
            heading = self._issued, self._done, *self._notes.take()
            self._tell(call := Call(*heading, entry.name, sent, new, numbers, caches, told, structure))
            self._issued += 1
            self._told.update((entry.name, number) for number in new)
        with self._turn:
            self._turn.wait_for(lambda: self._done == call.number)
        try:
            with self.alone():
                return self._run(call, structure(leaves), state)
        finally:
            with self._turn:
                self._done += 1
                self._turn.notify_all()

    def _input(self, tensor: torch.Tensor, sent: list[Leaf]) -> Leaf:
        """Return what is told of an input, which is ``sent`` once, however many calls take it."""
        version, leaf = self._inputs.get(tensor, (None, None))
        now = None if tensor.is_inference() else tensor._version
        if leaf is None or version != now:
            sent.append(Leaf.of(tensor, self.last, ("input", self._issued, len(sent))))
            self._inputs[tensor] = now, (leaf := replace(sent[-1], data=None))
            self._notes.watch(tensor, leaf.key)
        return leaf

    def _leaf(self, tensor: torch.Tensor, key: Hashable = None) -> Leaf:
        return tensor.leaf if isinstance(tensor, RemoteTensor) else Leaf.of(tensor, self.world.rank, key, most=_FEW)

    def end(self) -> None:
        """Make no more calls."""
        self._lent.clear()
        with self._issuing:
            self._tell(Call(self._issued, self._issued, *self._notes.take()))
            self._settle(self._issued)

    def _tell(self, call: Call) -> None:
        self._settle(call.arrived)
        for rank in self.world.others():
            self._on_way.append((call.number, post(self.world, call, rank, _CALLS), ()))

    def serve(self) -> None:
        """Run calls until there are no more."""
        device = self.world.device
        while True:
            call: Call = hear(self.world, "a call of the rank that generates text", self.last, _CALLS)
            self._settle(call.arrived)
            with self.alone():
                for noted in call.noted:
                    if noted.owner == self.world.rank:
                        noted.perform(self.kept, device)
                for key in call.dropped:
                    self.kept.pop(key, None)
                if not call.entry:
                    return self._lent.clear()
                self.kept.update({leaf.key: leaf.tensor(device) for leaf in call.sent})
                self._entry(call.entry).layouts.known.update(call.layouts)
                try:
                    leaves = [self.kept[leaf.key] if isinstance(leaf, Leaf) else leaf for leaf in call.leaves]
                    self._run(call, call.structure(leaves))
                except Exception as error:
                    if not known_to_all(error):  # else the rank that made the call has it too
                        raise

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Have all ranks end of an error that this one alone has."""
        try:
            yield
        except BaseException as error:
            if not known_to_all(error):
                self.broken = error
                if not isinstance(error, DeviceError):
                    self.world.watch.failed(error)
            raise

    def _run(self, call: Call, inputs: Any, own: Mapping[str, Sequence[torch.Tensor]] | None = None) -> Any:
        """Run this rank's stages; return the output on the last rank, whose ``own`` tensors caches are made of."""
        entry, device = self._entry(call.entry), self.world.device
        zeros = {name: [leaf.zeros(device) for leaf in leaves] for name, leaves in call.state.items()}
        step = self._prepared(entry, call, zeros, inputs)
        seam: Seam = step.once("seam", lambda: Seam.of(step))
        at = {id(tensor): index for index, tensor in enumerate(step.tensors)}
        caches: dict[int, Any] = {}
        for name, leaves in call.state.items():
            for number, (leaf, zero) in enumerate(zip(leaves, zeros[name], strict=True)):
                caches[at[id(zero)]] = leaf, own and own[name][number]
        with step.running():
            for index, (leaf, tensor) in caches.items():
                takers = seam.takers.get(index, set())
                step.tensors[index] = self._filled(call, leaf, tensor, step.tensors[index], takers)
            cells = Cells(step, step.start(ending=True), {}, detached=False)
            with step.entered():
                step.perform(step.forwards, cells)
            flat = self._ended(call, step, cells, seam, caches)
        for works, tensors in step.sent.values():
            self._on_way.append((call.number, works, tensors))
        entry.pipe._core.recordings.leave(step, ())
        return flat and step.recorded.traced.unflatten(flat)

    def _prepared(self, entry: Any, call: Call, zeros: Any, inputs: Any) -> ServedStep:
        """Return the call, ready to run; ranks meet for what they refuse."""

        def made() -> ServedStep:
            ready = vars(entry.prepare(call.numbers, zeros, inputs))
            step = ServedStep(**ready, lent=self._lent)
            step.whole = True
            self._check(step, call, zeros)
            return step

        step: ServedStep
        step, error = attempt(made)
        if isinstance(error, AutosplitError) and not known_to_all(error):  # all ranks refuse alike
            self.world.agree("generates text", {}, error)
        if error is not None:
            raise error
        return step

    def _check(self, step: ServedStep, call: Call, zeros: Mapping[str, Sequence[torch.Tensor]]) -> None:
        """Raise where ranks cannot run a recording together."""
        if step.lowered.random:
            raise InputError("the model draws random numbers in its forward: call pipe.eval() before generate()")
        names, guard, seam = call.state.items(), step.recorded.trace.guard, step.once("seam", lambda: Seam.of(step))
        leaves = {id(z): leaf for name, leaves in names for z, leaf in zip(zeros[name], leaves, strict=True)}
        read = [] if guard is None else [*guard.graph.find_nodes(op="placeholder")][1 + len(guard.lengths) :]
        if any(node.users and id(tensor) in leaves for node, tensor in zip(read, step.tensors, strict=False)):
            raise TraceError(
                "the model's Python reads values of its cache, which lie on several ranks; use one process"
            )
        for index in seam.changed:
            leaf, takers = leaves.get(id(step.tensors[index])), seam.takers.get(index, set())
            if leaf is not None and leaf.data is None and takers - {leaf.owner}:
                raise InputError(
                    f"a cache's tensor of shape {list(leaf.shape)} lies on rank {leaf.owner}, and rank {min(takers)} "
                    "changes it in place; give generate() a cache that is empty, whose tensors the stages make"
                )

    def _filled(self, call: Call, leaf: Leaf, own: Any, zeros: torch.Tensor, takers: set[int]) -> torch.Tensor:
        """Return a tensor of a cache where this rank takes it; else zeros."""
        if leaf.data is not None:
            return own if own is not None else leaf.tensor(self.world.device)
        rank, tensor = self.world.rank, zeros
        if rank == leaf.owner:
            tensor = own if leaf.key is None else self.kept[leaf.key]
        for taker in sorted(takers - {leaf.owner}) if zeros.numel() else ():
            if rank == leaf.owner:
                flat = flattened(tensor.detach().contiguous())
                self._on_way.append((call.number, [self.world.isend(flat, taker)], flat))
            elif rank == taker:
                with self.world.waiting("a tensor of a cache", leaf.owner):
                    self.world.irecv(flattened(tensor), leaf.owner).wait()
        return tensor

    def _ended(self, call: Call, step: ServedStep, cells: Cells, seam: Seam, caches: Mapping[int, Any]) -> list[Any]:
        """Keep what stays here; return the flat outputs on the last rank, nothing elsewhere."""
        rank, given, made = self.world.rank, dict[int, Any](), dict[int, Any]()
        for stage, positions in seam.travels.items():
            route, here = Route(stage, cells.last, 0, loss=True), step.ranks[stage][0] == rank
            bundle = cells.cells[stage, 0].sent.get(OUT, ()) if here else ()
            made.update({at: bundle[p] for at, (s, p) in seam.kept.items() if here and s == stage})
            if self.leads and here:
                given[stage] = [bundle]
            elif self.leads:
                came = cells.transport.recv(route) if positions else ()
                width = len(step.lowered.layout.stages[stage].sent.get(OUT, ()))
                given[stage] = [[came[positions.index(at)] if at in positions else None for at in range(width)]]
            elif here and positions:
                cells.transport.send(route, [bundle[at] for at in positions])
        program = step.once("program digest", lambda: words.digest(program_text(step.lowered)))
        tells: dict[Any, Any] = {"program": program}
        changed = [i for i in seam.changed if i in caches and caches[i][0].data is not None]
        if not self.leads:
            for at, tensor in made.items():
                tells[at] = leaf = self._leaf(tensor, (call.number, at))
                if leaf.data is None:
                    self.kept[leaf.key] = tensor
            tells |= {-1 - i: Leaf.of(step.tensors[i], rank) for i in changed if rank in seam.takers.get(i, ())}
            self._on_way.append((call.number, post(self.world, tells, self.last, _SHAPES), ()))
            return []
        flat = list(step.end(cells.start, given))
        for teller in self.world.others():
            told = hear(self.world, "the shapes of its caches", teller, _SHAPES)
            if told.pop("program") != program:
                raise RuntimeError(f"ranks {teller} and {rank} have recorded other programs for one call")
            for at, leaf in told.items():
                if at < 0:
                    caches[-1 - at][1].copy_(leaf.tensor(self.world.device))
                else:
                    flat[at] = RemoteTensor(leaf, self._notes) if leaf.data is None else leaf.tensor(self.world.device)
        inputs = [n for n in step.lowered.traced.graph.nodes if n.op == "placeholder" and INFO in n.meta]
        for at, value in enumerate(step.lowered.outputs):
            if isinstance(value, fx.Node) and value.op == "placeholder" and value in inputs:
                flat[at] = caches.get(inputs.index(value), (None, flat[at]))[1]
        return flat

    def _settle(self, number: int) -> None:
        """Let go of what was sent in calls before a number: it has arrived."""
        while self._on_way and self._on_way[0][0] < number:
            for work in self._on_way.popleft()[1]:
                work.wait()
