"""What is alive while a stage works on a microbatch: its nodes run on fake tensors, with autograd's own backward.

    forward 0 ─ backward 0 ─ forward 1 ─ backward 1        1: gradients are there already
        │            │                       │
        ▼            ▼                       ▼
      forward     backward             backward_later      of the StageTrace

Nothing is allocated and no value is computed. Autograd's engine decides what is saved and when it is freed; what it
runs belongs to the node in whose range of sequence numbers its autograd node's number lies.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from operator import attrgetter
from typing import Any, Literal

import torch
from torch import fx, nn
from torch.utils.checkpoint import _StopRecomputationError, checkpoint

from autosplit.backward import begin_at_sums
from autosplit.errors import ProfileError, is_internal
from autosplit.profile.lowering import CudaKernels
from autosplit.profile.node_costs.border import BorderInterpreter, Picks, alias, tensors_of
from autosplit.profile.node_costs.fake import as_recorded, empty_value, fake_mode, on_fakes
from autosplit.profile.node_costs.ledger import Ledger
from autosplit.profile.node_costs.shadow import shadow
from autosplit.profile.stage_trace.engine import Guess, Labels
from autosplit.profile.stage_trace.stage_graph import StageNodes, in_units
from autosplit.schedule.memory.pieces import Change, NodeStep, StageTrace, WeightNeeds
from autosplit.trace.borrowed.blank import fake
from autosplit.trace.borrowed.state import random_state
from autosplit.trace.graph import INFO, NodeClass
from autosplit.trace.inputs.signature import any_autocast
from autosplit.trace.recording.run import quiet_log
from autosplit.weight_gradients import deferrable

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class How:
    """How a stage is run.

    Attributes:
        rows: batch rows of the microbatch.
        input_grads: whether gradients flow back through the inputs, by stable name; those that are missing want none.
        roots: stable names of the outputs that gradients arrive for; None: all through which gradients flow.
        averaged: the output whose mean is the loss: its gradient is made in the backward, and goes when it is used.
        loss: what the loss is instead of that mean, from that output and the number of rows.
        units: paths of the modules whose forward is recomputed in the backward; empty: nothing is.
        whole: the whole stage is recomputed, as one.
        by_use: every use of a tied parameter or of a shared value has a gradient of its own, as in a lane's cells.
        apart: gradients of a further microbatch are added to the sums so far, outside ``.grad``: large ones in place,
            small ones to new tensors, beside which the old sums stay until all are made.
        kernels: whose kernels' scratch is counted.
        observed: bytes of scratch that those of the device were seen to hold, by `operation_key`.
    """

    rows: int
    input_grads: Mapping[str, bool] = field(default_factory=dict)
    roots: Collection[str] | None = None
    averaged: str | None = None
    loss: Callable[[torch.Tensor, int], torch.Tensor] | None = None
    units: Collection[str] = ()
    whole: bool = False
    by_use: bool = False
    apart: bool = False
    kernels: Literal["cpu", "cuda"] = "cpu"
    observed: Mapping[str, int] | None = None


def trace_stage(stage: StageNodes, how: How) -> StageTrace:
    """Return what a stage allocates and frees in the forward and the backward of one microbatch."""
    mode = fake_mode()
    ledger = Ledger(kernels=how.kernels, listing=False, observed=how.observed)
    with random_state(), torch.inference_mode(False), torch.enable_grad():
        twin = shadow(stage.root, replace=lambda tensor: fake(tensor, mode), nodes=stage.nodes)
        with quiet_log(), mode, ledger, _one_autocast():
            run = _Run(stage, how, twin.module, ledger)
            for tensor in twin.tensors:
                ledger.storage(tensor)
            return run.traced()


@contextlib.contextmanager
def _one_autocast() -> Iterator[None]:
    """Keep what autocast casts from one operation to the next: the caller's own context is around all of a step."""
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()


class _Run:
    def __init__(self, stage: StageNodes, how: How, root: nn.Module, ledger: Ledger) -> None:
        self.stage, self.how, self.root, self.ledger = stage, how, root, ledger
        self.interpreter = BorderInterpreter(root, graph=fx.Graph(), device=_CPU)
        self.lowering = CudaKernels() if how.kernels == "cuda" else contextlib.nullcontext()
        """Entered node by node: what runs again in a backward runs outside of the modes around it."""
        self.labels = Labels()
        self.steps: list[tuple[str, list[Change]]] = []
        self.parameters = {id(p): name for name, p in root.named_parameters() if p.requires_grad}
        self.leaves: list[torch.Tensor] = [p for p in root.parameters() if p.requires_grad]
        self.totals: dict[int, torch.Tensor] = {}
        self.saved: dict[str, dict[int, None]] = {}
        self.late: set[int] = set()
        self.goes_back = False
        self.shared = {
            node: self._given(node) for node in stage.inputs if node.meta[INFO].node_class is NodeClass.SHARED
        }
        for node, value in self.shared.items():
            for tensor in tensors_of(value):
                if tensor.requires_grad:
                    self.leaves.append(tensor)
                    self.parameters[id(tensor)] = node.meta[INFO].name
        once = {node: value for node, value in self.shared.items() if not node.meta[INFO].mutated}
        tied = [node for node in stage.nodes if node.op == "get_attr" and str(node.target) in stage.tied]
        values = {node: attrgetter(str(node.target))(root) for node in tied}
        once |= {node: value for node, value in values.items() if id(value) in self.parameters}
        self.used = {
            (node, user): value.detach().requires_grad_()
            for node, value in once.items()
            for user in (node.users if how.by_use and getattr(value, "requires_grad", False) else ())
        }
        """The leaf of each use of a value that comes once per step, by the value and who takes it."""
        self.leaves += self.used.values()
        self.parameters |= {id(leaf): self.parameters[id(once[node])] for (node, _), leaf in self.used.items()}
        self.pieces = pieces_of(stage.nodes, how.units, whole=how.whole)
        self.ends = _last_uses(self.pieces, keep=frozenset(stage.outputs))

    def traced(self) -> StageTrace:
        self.ledger.notify(self._note)
        forward, backward = self._microbatch()
        first = self._gradients()
        gradients = {storage: self.parameters[leaf] for leaf, storage in first.items()}
        split = self._split(first, self.saved)
        again, later = self._microbatch()
        kept = _kept((*forward, *backward), gradients)
        renewed = {first[leaf]: storage for leaf, storage in self._gradients().items()}
        later = _renamed(later, renewed | _as_first(again, forward, kept))
        guessed_bytes = max(self.ledger.guessed.values(), default=0)
        return StageTrace(forward, backward, later, gradients, kept, split, guessed_bytes)

    def _note(self, change: Change) -> None:
        name = self.labels.current()
        if not self.steps or self.steps[-1][0] != name:
            self.steps.append((name, []))
        self.steps[-1][1].append(change)

    def _taken(self) -> tuple[NodeStep, ...]:
        steps = tuple(NodeStep(name, tuple(changes)) for name, changes in self.steps)
        self.steps = []
        return steps

    # -- one microbatch ------------------------------------------------------------------------------------------
    def _microbatch(self) -> tuple[tuple[NodeStep, ...], tuple[NodeStep, ...]]:
        self.labels.begin()
        self.goes_back = False
        env: dict[fx.Node, Any] = dict.fromkeys(self.stage.numbers, None)
        env |= zip(self.stage.numbers[:1], (self.how.rows,), strict=True)
        self.views = {use: leaf[...] if any_autocast() else leaf for use, leaf in self.used.items()}
        inputs = {node: self._given(node) for node in self.stage.inputs if node not in self.shared}
        env |= {node: _lent(node, value) for node, value in (inputs | self.shared).items()}
        with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor):
            for piece in self.pieces:
                self._play(piece, env)
        sent = {node: [t for t in tensors_of(env[node]) if t.requires_grad] for node in self.stage.outputs}
        env.clear()
        self.labels.forget()
        forward = self._taken()
        wanted = self.how.roots
        named = [(n.meta[INFO].name, t) for n, tensors in sent.items() for t in tensors]
        averaged = self.how.averaged
        outputs = [self._loss(t) if n == averaged else t for n, t in named if wanted is None or n in wanted]
        self.goes_back = True
        self._look_at(outputs)
        with on_fakes("a backward"):
            self._backward(outputs, [t for value in inputs.values() for t in tensors_of(value) if t.requires_grad])
        self.labels.forget()
        del outputs, named, sent, inputs
        return forward, self._taken()

    def _look_at(self, outputs: Sequence[torch.Tensor]) -> None:
        """Read off the graph, which nobody holds afterwards, which gradients can wait."""
        self.late = {id(route.leaf) for use in deferrable(outputs, self.parameters, dense=True) for route in use.ways}

    def _loss(self, value: torch.Tensor) -> torch.Tensor:
        if self.how.loss is None:
            return value.mean()
        with on_fakes("the loss"), self.lowering:
            return self.how.loss(value, self.how.rows)

    def _backward(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> None:
        if not outputs:
            return
        cotangents = [torch.empty_like(output) for output in outputs]
        if self.how.apart:
            held = [leaf for leaf in self.leaves if id(leaf) in self.totals]
            begin_at_sums(held, self.totals, outputs, cotangents)
            wanted: list[torch.Tensor] = [*inputs, *self.leaves]
            grads = torch.autograd.grad(outputs, wanted, cotangents, allow_unused=True)
            self.labels.forget()
            pairs = zip(self.leaves, grads[len(inputs) :], strict=True)
            self.totals |= {id(leaf): total for leaf, total in pairs if total is not None}
        else:
            torch.autograd.backward(outputs, cotangents)
            self.labels.forget()
            for tensor in inputs:
                tensor.grad = None

    def _play(self, piece: Piece, env: dict[fx.Node, Any]) -> None:
        """Run a piece on the values in ``env``, which holds afterwards what is still to be taken."""
        if not piece.again:
            self._run_nodes(piece.nodes, env)
            return
        nodes = set(piece.nodes)
        taken = list(dict.fromkeys(o for n in piece.nodes for o in n.all_input_nodes if o not in nodes))
        ended = {value for node in piece.nodes for value in self.ends.get(node, ())}
        kept = [node for node in piece.nodes if node not in ended]

        def forward(_copies: Any, *values: Any) -> tuple[Any, ...]:
            inside = dict(zip(taken, values, strict=True))
            with self._unit():
                self._run_nodes(piece.nodes, inside)
            return tuple(inside[node] for node in kept)

        results = checkpoint(forward, self._copied(piece.nodes), *(env[node] for node in taken), use_reentrant=False)
        env |= zip(kept, results, strict=True)
        del results
        for dead in ended:
            env.pop(dead, None)

    def _run_nodes(self, nodes: Sequence[fx.Node], env: dict[fx.Node, Any]) -> None:
        for node in nodes:
            env[node] = self._execute(node, env)
            for dead in self.ends.get(node, ()):
                env.pop(dead, None)

    def _copied(self, nodes: Sequence[fx.Node]) -> list[torch.Tensor]:
        """Copy the buffers that nodes take and the forward writes, for their second run."""
        infos = [node.meta[INFO] for node in nodes if INFO in node.meta]
        names = dict.fromkeys(name for info in infos for name in info.rewritten)
        if not names:
            return []
        with self.labels.forward(infos[0].name):
            return [self.root.get_buffer(name).clone() for name in names]

    @contextlib.contextmanager
    def _unit(self) -> Iterator[None]:
        """Note that a unit's nodes run, for the first time or again."""
        self.labels.repeating = self.goes_back
        try:
            yield
        finally:
            self.labels.repeating = False

    def _given(self, node: fx.Node) -> Any:
        info = node.meta[INFO]
        grad = self.how.input_grads.get(info.name, False)
        return empty_value(node, self.how.rows, needs_grad=grad, users=self.stage.nodes)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        if (storage := self.ledger.storage(tensor)) is not None and self.labels.running:
            self.saved.setdefault(self.labels.running[-1], {})[storage.id] = None
        return tensor

    def _gradients(self) -> dict[int, int]:
        """Return the storages of the gradients, by the identity of their leaves."""
        storages = {}
        for leaf in self.leaves:
            gradient = self.totals.get(id(leaf)) if self.how.apart else leaf.grad
            storage = None if gradient is None else self.ledger.storage(gradient)
            if storage is not None:
                storages[id(leaf)] = storage.id
        return storages

    def _split(self, gradients: Mapping[int, int], saved: Mapping[str, Mapping[int, None]]) -> dict[str, WeightNeeds]:
        taker = {id(leaf): user.meta[INFO].name for (_, user), leaf in self.used.items()}
        deferred = [leaf for leaf in gradients if leaf in self.late]
        storages = {(self.parameters[leaf], taker.get(leaf, "")): gradients[leaf] for leaf in deferred}
        split = {}
        for _, info in self.stage.computing():
            keys = product(info.reads, ("", info.name))
            if late := tuple(storages[key] for key in keys if key in storages):
                size = sum(tensor.bytes_at(self.how.rows) for tensor in info.tensors)
                split[info.name] = WeightNeeds(tuple(saved.get(info.name, ())), size, late)
        return split

    # -- nodes ---------------------------------------------------------------------------------------------------
    def _execute(self, node: fx.Node, env: Mapping[fx.Node, Any]) -> Any:
        """Run one node, on the CPU wherever the model's own devices are."""
        args, kwargs = self.interpreter.arguments(node, lambda operand: self.views.get((operand, node), env[operand]))
        run: Any = getattr(self.interpreter, node.op)
        if INFO not in node.meta:
            return run(node.target, args, kwargs)
        with self.labels.forward(node.meta[INFO].name), self.lowering:
            try:
                return run(node.target, args, kwargs)
            except Exception as error:  # whatever its author wrote, or torch lacks on fake tensors
                if isinstance(error, (_StopRecomputationError, ProfileError)) or is_internal(error):
                    raise
                return self._guessed(node, tensors_of((args, kwargs)))

    def _guessed(self, node: fx.Node, taken: list[torch.Tensor]) -> Any:
        """Return values of the recorded shapes for a node that does not run on fake tensors.

        It is taken to save what it is given, and to allocate nothing but its results and gradients.
        """
        if node.op == "call_module":
            taken = [*taken, *self.interpreter.fetch_attr(str(node.target)).parameters()]
        outputs = [torch.empty(t.shape_at(self.how.rows), dtype=t.dtype) for t in node.meta[INFO].tensors]
        if any(t.requires_grad for t in taken) and torch.is_grad_enabled():
            outputs = list(Guess.apply(len(outputs), *outputs, *taken))
        return as_recorded(node, outputs, self.how.rows)


def _kept(steps: Sequence[NodeStep], gradients: Collection[int]) -> dict[int, str]:
    """Name the storages that a first microbatch leaves beside gradients; those without bytes are never seen to go."""
    alive = {storage for step in steps for storage, _ in step.changes}
    freed = {storage for step in steps for storage, count in step.changes if count < 0}
    return {storage: f"kept{n}" for n, storage in enumerate(sorted(alive - freed - set(gradients)))}


def _as_first(again: Sequence[NodeStep], forward: Sequence[NodeStep], kept: Collection[int]) -> dict[int, int]:
    """Map the storages of a repeated forward to those of the first one."""
    earlier = [(s, count) for step in forward for s, count in step.changes if count > 0 and s not in kept]
    two = [(s, count) for step in again for s, count in step.changes if count > 0]
    if [count for _, count in earlier] != [count for _, count in two]:
        raise ProfileError(
            f"a second microbatch allocates {sum(c for _, c in two)} bytes in {len(two)} storages, the first "
            f"{sum(c for _, c in earlier)} in {len(earlier)}: the forward does not repeat itself"
        )
    return {second: first for (first, _), (second, _) in zip(earlier, two, strict=True)}


def _renamed(steps: Sequence[NodeStep], names: Mapping[int, int]) -> tuple[NodeStep, ...]:
    return tuple(NodeStep(step.node, tuple((names.get(s, s), count) for s, count in step.changes)) for step in steps)


def _lent(node: fx.Node, value: Any) -> Any:
    """Return a value from outside as the stage's nodes get it.

    An alias if a node changes it in place; otherwise a view, since autocast would keep the casts of a leaf.
    """
    if isinstance(value, Picks):
        return Picks({key: _lent(node, item) for key, item in value.items()})
    if not isinstance(value, torch.Tensor) or not (node.meta[INFO].mutated or value.requires_grad):
        return value
    return alias(value) if node.meta[INFO].mutated else value[...]


@dataclass(frozen=True)
class Piece:
    """Nodes that run one after the other, as they are or to be run again in the backward."""

    nodes: tuple[fx.Node, ...]
    again: bool


def pieces_of(nodes: tuple[fx.Node, ...], units: Collection[str], *, whole: bool) -> tuple[Piece, ...]:
    """Return a stage's nodes cut where a unit begins or ends."""
    if whole or not units:
        return (Piece(nodes, whole),) if nodes else ()
    return tuple(Piece(piece, bool(unit)) for unit, piece in in_units(nodes, units))


def _last_uses(pieces: Sequence[Piece], *, keep: Collection[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """Map nodes to the values that nobody takes after them."""
    last: dict[fx.Node, fx.Node] = {}
    for piece in pieces:
        for node in piece.nodes:
            last[node] = node
            for operand in node.all_input_nodes:
                last[operand] = node
    ended: dict[fx.Node, list[fx.Node]] = {}
    for value, node in last.items():
        if value not in keep:
            ended.setdefault(node, []).append(value)
    return ended
