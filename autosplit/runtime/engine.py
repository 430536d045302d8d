"""One training step, action by action: every cell has borders of its own, and a backward of its own.

    forward of a cell     detach what comes in ─► stage ─► keep inputs and outputs until the backward
    backward of a cell    gradients of the outputs ─► autograd.grad ─► gradients of what came in, and of the parameters

Contributions to a parameter add over the microbatches in ascending order, whatever the cut. Nothing reaches ``.grad``
before the last action has succeeded; then one backward hands all sums over, so that hooks fire once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from autosplit.errors import InputError
from autosplit.runtime import loss as losses
from autosplit.runtime.lanes import Lane
from autosplit.runtime.ops import OUT, Bundle, Key, rows_along, transfer
from autosplit.schedule.catalog import build
from autosplit.schedule.order import issue_order
from autosplit.trace import state
from autosplit.trace.graph import INFO, NodeClass
from autosplit.trace.structure import flatten_output


@dataclass
class Step:
    """One call of the pipe: what to run, on what, in which schedule.

    ``lowered`` are the pieces (:class:`autosplit.lower.split.Lowered`), ``setup`` the part of the program before the
    first cell, ``locate`` adds a note to an exception of a cell.
    """

    lowered: Any
    setup: Callable[..., Any]
    locate: Callable[..., None]
    tensors: list[torch.Tensor]
    rows: int
    sizes: tuple[int, ...]
    lanes: tuple[Lane, ...]
    """One lane per stage, and last the caller's device."""
    seed: int | None
    schedule: str


def train_step(
    step: Step,
    *,
    target: Any,
    loss_fn: Any,
    reduction: str,
    proved: dict[int, tuple[Any, str]],
    whole: Callable[[], Any],
) -> torch.Tensor:
    """Run forward, loss and backward of a whole batch; see :meth:`PipelinedModule.train_step`.

    ``whole`` runs the ordinary program on the step; it is used where the loss needs the whole batch at once.
    """
    _check_loss(loss_fn)
    lowered = step.lowered
    targets = losses.split_target(target, step.sizes, batch_dims=_output_dims(step))
    if lowered.epilogue is not None or _has_hooks(lowered) or len(step.sizes) == 1:
        return whole_step(whole, target=target, loss_fn=loss_fn)
    known = losses.known_reduction(loss_fn, reduction)
    if known is not None:
        return _Run(step, losses.per_microbatch(known, loss_fn, step.sizes, targets)).run()
    if id(loss_fn) in proved:
        kind = proved[id(loss_fn)][1]
    else:
        proof = _prove(step, loss_fn, target, targets, whole)
        kind = proof.kind
        if proof.conclusive:
            proved[id(loss_fn)] = loss_fn, kind
    check = losses.WholeCheck(loss_fn, target, kind)
    return _Run(step, losses.per_microbatch(kind, loss_fn, step.sizes, targets), check).run()


def whole_step(whole: Callable[[], Any], *, target: Any, loss_fn: Any) -> torch.Tensor:
    """Run the loss on the output of the whole batch, and its backward."""
    _check_loss(loss_fn)
    value = losses.call_loss(loss_fn, whole(), target)
    value.backward()
    return value.detach()


def _check_loss(loss_fn: Any) -> None:
    if loss_fn is None:
        raise InputError("train_step needs loss_fn=, a function loss_fn(output, target) that returns a scalar")


def _output_dims(step: Step) -> dict[tuple[int, ...], int]:
    """Map the shapes of the outputs to their batch dimensions: a target of such a shape has its batch there."""
    found = {}
    for value, dim in zip(step.lowered.outputs, step.lowered.traced.batch_outputs, strict=True):
        if dim is not None:
            found[value.meta[INFO].tensors[0].shape_at(step.rows)] = dim
    return found


def _prove(step: Step, loss_fn: Any, target: Any, targets: Sequence[Any], whole: Callable[[], Any]) -> losses.Proof:
    traced = step.lowered.traced
    with torch.no_grad(), state.random_state(), state.buffer_contents(traced.root):
        output = whole()
    flat, rebuild = flatten_output(output)

    def part(microbatch: int | None) -> Any:
        if microbatch is None:
            return output
        start = sum(step.sizes[:microbatch])
        leaves = []
        for leaf, dim in zip(flat, traced.batch_outputs, strict=True):
            if dim is None:
                leaves.append(leaf)
            else:
                factor = leaf.shape[dim] // step.rows
                leaves.append(leaf.narrow(dim, start * factor, step.sizes[microbatch] * factor))
        return rebuild(leaves)

    return losses.prove(loss_fn, part, target, targets, step.sizes)


def _has_hooks(lowered: Any) -> bool:
    """Tell whether a parameter has hooks: those want the whole gradient, once."""
    return any(p._backward_hooks for p in lowered.traced.root.parameters())


@dataclass
class _Border:
    """What one cell keeps from its forward to its backward."""

    leaves: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    """Detached inputs by the name of the bundle that they came in."""
    sent: dict[str, Bundle] = field(default_factory=dict)
    loss: torch.Tensor | None = None
    gradients: dict[str, list[torch.Tensor | None]] = field(default_factory=dict)
    """Gradients of what was sent, by target."""


class _Run:
    def __init__(
        self, step: Step, loss: Callable[[Any, int], torch.Tensor], check: losses.WholeCheck | None = None
    ) -> None:
        self.step = step
        self.loss = loss
        self.check = check
        self.free: list[torch.Tensor] = []
        self.free_sums: list[torch.Tensor | None] = []
        self.lowered = step.lowered
        self.layout = self.lowered.layout
        self.count = len(self.lowered.stages)
        self.cells: dict[tuple[int, int], _Border] = {}
        self.losses: list[torch.Tensor] = []
        with torch.enable_grad():
            self.inputs, self.shared = self._setup()
        self.given = {s: _detached(bundle) for s, bundle in self.shared.items()}
        self.parameters = [[p for p in stage.parameters() if p.requires_grad] for stage in self.lowered.stages]
        self.sums: list[list[torch.Tensor | None]] = [[None] * len(own) for own in self.parameters]
        self.given_sums: dict[int, list[torch.Tensor | None]] = {s: [None] * len(b) for s, b in self.given.items()}
        inputs = (n.meta[INFO] for n in self.lowered.traced.graph.nodes if n.op == "placeholder" and INFO in n.meta)
        self.changes_inputs = any(info.mutated for info in inputs)
        self.input_gradients: list[tuple[torch.Tensor, torch.Tensor]] = []

    def run(self) -> torch.Tensor:
        """Issue every action and hand the gradients over."""
        schedule = build(self.step.schedule, stages=self.count, microbatches=len(self.step.sizes))
        for action in issue_order(schedule):
            try:
                if action.kind == "F":
                    self._forward(action.stage, action.microbatch)
                else:
                    self._backward(action.stage, action.microbatch)
            except Exception as error:
                self.step.locate(error, cell=f"y{action.stage}_{action.microbatch}")
                raise
        total = self.losses[0]
        for value in self.losses[1:]:
            total = total + value
        if self.check is not None:
            self.check.compare(total, self.lowered.traced)
        self._hand_over()
        return total

    def _setup(self) -> tuple[dict[int, Sequence[Bundle]], dict[int, Bundle]]:
        step = self.step
        return step.setup(*step.tensors, step.rows, step.sizes, step.lanes, step.seed)

    def _forward(self, stage: int, microbatch: int) -> None:
        module, layout = self.lowered.stages[stage], self.layout.stages[stage]
        border = self.cells[stage, microbatch] = _Border()
        given: dict[str, Any] = {"rows": self.step.sizes[microbatch], "shared": self.given.get(stage)}
        given["key"] = None if self.step.seed is None else Key(self.step.seed, microbatch)
        if layout.inputs:
            taken = border.leaves["inputs"] = _detached(self.inputs[stage][microbatch])
            given["inputs"] = [t.clone() if t.requires_grad else t for t in taken] if self.changes_inputs else taken
        for source in layout.received:
            bundle = self.cells[source, microbatch].sent[str(stage)]
            given[f"from{source}"] = border.leaves[str(source)] = self._received(bundle, source, stage)
        with torch.enable_grad():
            border.sent = module(*(given[name] for name in module.takes))
            if stage == self.count - 1:
                flat = self._output(microbatch, border)
                if self.check is not None:
                    self.check.keep(flat)
                border.loss = self.loss(self.lowered.traced.unflatten(flat), microbatch)
                self.losses.append(border.loss.detach())
                if microbatch == 0:
                    self.free = self._free_leaves(border)
                    self.free_sums = [None] * len(self.free)

    def _received(self, bundle: Bundle, source: int, target: int) -> list[torch.Tensor]:
        lanes = self.step.lanes
        lanes[target].wait(lanes[source].record())
        with torch.no_grad():
            moved = transfer(bundle, lanes[source], lanes[target])
        return [m.detach().requires_grad_(b.requires_grad) for m, b in zip(moved, bundle, strict=True)]

    def _free_leaves(self, border: _Border) -> list[torch.Tensor]:
        """Return the leaves under the loss that are not the model's: parameters of the loss itself."""
        own = {id(p) for p in self.lowered.traced.root.parameters()}
        own |= {id(t) for bundle in (*border.leaves.values(), *self.given.values()) for t in bundle}
        own |= {id(p) for p in self.parameters[-1]}
        found, seen = [], set()
        todo = [border.loss.grad_fn] if border.loss is not None else []
        while todo:
            node = todo.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            leaf = getattr(node, "variable", None)
            if leaf is not None and id(leaf) not in own:
                found.append(leaf)
            todo += [following for following, _ in node.next_functions]
        return found

    def _output(self, microbatch: int, last: _Border) -> list[Any]:
        """Return the model's flat outputs for one microbatch; what earlier stages made has a border of its own."""
        values: dict[str, torch.Tensor] = {}
        for stage, layout in enumerate(self.layout.stages):
            slots = layout.sent.get(OUT, ())
            bundle: Any = self.cells[stage, microbatch].sent.get(OUT, ())
            if slots and stage < self.count - 1:
                bundle = last.leaves[f"{OUT}{stage}"] = self._received(bundle, stage, self.count - 1)
            values.update((slot.value, tensor) for slot, tensor in zip(slots, bundle, strict=True))
        return [self._flat(value, values, microbatch) for value in self.lowered.outputs]

    def _flat(self, value: Any, values: dict[str, torch.Tensor], microbatch: int) -> Any:
        if not isinstance(value, fx.Node):
            return value
        if value.name in values:
            return values[value.name]
        info = value.meta.get(INFO)
        if info is not None and value.op == "placeholder" and info.node_class is NodeClass.MICRO:
            return self._input(value, microbatch)
        raise InputError(
            f"train_step cannot hand {value.name!r} of the output to the loss per microbatch: it is no value of the "
            "batch's rows; call pipe(x) and loss.backward() instead"
        )

    def _input(self, node: fx.Node, microbatch: int) -> torch.Tensor:
        names = [n.name for n in self.lowered.traced.graph.nodes if n.op == "placeholder" and INFO in n.meta]
        tensor = self.step.tensors[names.index(node.name)]
        return rows_along(tensor, self.step.sizes, node.meta[INFO].tensors[0].batch_dim)[microbatch]

    def _backward(self, stage: int, microbatch: int) -> None:
        border = self.cells.pop((stage, microbatch)) if stage == 0 else self.cells[stage, microbatch]
        roots: list[torch.Tensor] = []
        seeds: list[torch.Tensor | None] = []
        if border.loss is not None:
            roots.append(border.loss)
            seeds.append(None)
        for target, bundle in border.sent.items():
            for tensor, gradient in zip(bundle, border.gradients.get(target, [None] * len(bundle)), strict=True):
                if gradient is not None:
                    roots.append(tensor)
                    seeds.append(gradient)
        leaves = [(name, i, t) for name, own in border.leaves.items() for i, t in enumerate(own) if t.requires_grad]
        given = [(i, t) for i, t in enumerate(self.given.get(stage, ())) if t.requires_grad]
        free = self.free if border.loss is not None else []
        wanted = [t for *_, t in leaves] + [t for _, t in given] + self.parameters[stage] + free
        if not roots or not wanted:
            return
        found = torch.autograd.grad(roots, wanted, seeds, allow_unused=True)
        for (name, position, _), gradient in zip(leaves, found, strict=False):
            self._send_back(stage, microbatch, name, position, gradient)
        rest = found[len(leaves) :]
        for (position, _), gradient in zip(given, rest, strict=False):
            _add(self.given_sums[stage], position, gradient)
        own = rest[len(given) :]
        for position, gradient in enumerate(own[: len(own) - len(free)]):
            _add(self.sums[stage], position, gradient)
        for position, gradient in enumerate(own[len(own) - len(free) :]):
            _add(self.free_sums, position, gradient)
        border.leaves.clear()
        border.sent = {}

    def _send_back(self, stage: int, microbatch: int, name: str, position: int, gradient: torch.Tensor | None) -> None:
        if gradient is None:
            return
        if name == "inputs":
            self.input_gradients.append((self.inputs[stage][microbatch][position], gradient))
            return
        target = OUT if name.startswith(OUT) else str(stage)
        source = int(name.removeprefix(OUT))
        lanes = self.step.lanes
        lanes[source].wait(lanes[stage].record())
        (moved,) = transfer((gradient,), lanes[stage], lanes[source])
        border = self.cells[source, microbatch]
        gradients = border.gradients.setdefault(target, [None] * len(border.sent[target]))
        gradients[position] = moved

    def _hand_over(self) -> None:
        """Give every leaf its whole gradient: parameters, shared values and inputs, in one backward."""
        pairs: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for own, sums in zip(self.parameters, self.sums, strict=True):
            pairs.update((id(p), (p, g)) for p, g in zip(own, sums, strict=True) if g is not None)
        for stage, given in self.given_sums.items():
            bundle = self.shared[stage]
            pairs.update((id(t), (t, g)) for t, g in zip(bundle, given, strict=True) if g is not None)
        pairs.update((id(t), (t, g)) for t, g in zip(self.free, self.free_sums, strict=True) if g is not None)
        pairs.update((id(t), (t, g)) for t, g in self.input_gradients)
        if not pairs:
            raise RuntimeError("the loss does not depend on any parameter that requires a gradient")
        tensors, gradients = zip(*pairs.values(), strict=True)
        torch.autograd.backward(tensors, gradients)


def _detached(bundle: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in bundle]


def _add(sums: list[Any], position: int, gradient: torch.Tensor | None) -> None:
    if gradient is not None:
        sums[position] = gradient if sums[position] is None else sums[position] + gradient
