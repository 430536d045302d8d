"""How a model's own loss is made of sums over rows.

    labels ──────────────► class_weights on the whole batch, up front: what the mean divides by
    logits ─► ... ─► each ─► rows [rows, 2] ─► ratio ─► / items ─► + 0.1 * other ─► loss
              microbatch by microbatch         the light rest: a sum over rows, and what is linear in it

The recording keeps a loss as values per row and a light rest (:mod:`autosplit.trace.decompose`). Where the rest is
linear in the sums over the rows, each microbatch can add its part of the loss, and the step runs in its schedule. Where
it is not (a product of means, as in a routing loss), only the whole batch gives the loss.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from autosplit.runtime.cells import Step
from autosplit.runtime.loss_calls import class_weights
from autosplit.runtime.ops import OUT, transfer
from autosplit.trace import reductions
from autosplit.trace.calls import under
from autosplit.trace.decompose import reduced
from autosplit.trace.graph import INFO, LENGTH, NodeClass
from autosplit.trace.kinds import function_of

_MOST = 200
"""How many operations on labels may run on the whole batch before the step."""
_LINEAR = frozenset("add sub neg to float double clone contiguous iadd radd rsub".split())
_SCALED = frozenset("mul rmul imul multiply div truediv true_divide divide".split())


@dataclass(frozen=True)
class Half:
    """A sum over rows: its kind, what the rows give, and for a ratio what decides its divisor."""

    kind: str
    rows: fx.Node
    target: Any = None
    ignore_index: int = -100
    weight: Any = None


class _Refused(Exception):
    """Why only the whole batch gives a loss."""


class Form:
    """How a loss is made: ``halves`` are sums over rows, the ``chain`` is linear in them.

    Attributes:
        why: why only the whole batch gives the loss; None where microbatches do.
        fixed: what is computed on the whole batch before the step, operands first.
    """

    def __init__(self, lowered: Any, loss: fx.Node) -> None:
        self.root: nn.Module = lowered.traced.root
        self.loss = loss
        self.halves: dict[fx.Node, Half] = {}
        self.chain: list[fx.Node] = []
        self.fixed: list[fx.Node] = []
        self.why: str | None = None
        self._nodes = list(lowered.traced.graph.nodes)
        self._given = {slot.value for layout in lowered.layout.stages for slot in layout.sent.get(OUT, ())}
        self._parameters = {name for name, _ in self.root.named_parameters(remove_duplicate=False)}
        try:
            for node in lowered.layout.epilogue:
                _check_pure(node)
            self._linear(loss)
        except _Refused as refusal:
            self.why = str(refusal)

    def _linear(self, node: fx.Node) -> None:
        """Take a node that is linear in sums over rows; raise _Refused for any other."""
        if node in self.halves or node in self.chain:
            return
        info = node.meta.get(INFO)
        if info is None or info.node_class is not NodeClass.FULL or len(info.tensors) != 1 or info.tensors[0].shape:
            raise _Refused(f"{_name(node)} is no scalar that rows add up to")
        half = self._half(node)
        if half is not None:
            self.halves[node] = half
            return
        operands = [a for a in arguments(node) if isinstance(a, fx.Node)]
        varying = [a for a in operands if self._varies(a)]
        name = str(getattr(function_of(node, self.root), "__name__", "")).strip("_")
        numbers = any(isinstance(a, (int, float)) and not isinstance(a, bool) for a in arguments(node))
        adds = name in _LINEAR and varying == operands and not numbers
        scales = (
            name in _SCALED
            and len(varying) == 1
            and (not name.startswith(("div", "true")) or _is_first(varying[0], node))
        )
        if not (adds or scales) or not varying or node.kwargs or not info.tensors[0].differentiable:
            raise _Refused(f"{_name(node)} is not linear in the rows")
        for operand in node.all_input_nodes:
            if operand in varying:
                self._linear(operand)
            else:
                self._fix(operand)
        self.chain.append(node)

    def _half(self, node: fx.Node) -> Half | None:
        """Return a sum or mean over rows; None for another node."""
        function, args = function_of(node, self.root), arguments(node)
        kind = next((n for n in ("ratio", "total", "average") if function is getattr(reductions, n)), None)
        found = (kind, args[0]) if kind else reduced(node, self.root)
        if found is None or found[0] not in ("ratio", "total", "average", "sum", "mean"):
            return None
        kind, rows = found
        if not isinstance(rows, fx.Node) or rows.name not in self._given:
            raise _Refused(f"{_name(node)} takes no values of the rows")
        if kind != "ratio":
            return Half(kind, rows)
        _, target, _, _, ignore_index, _, weight = arguments(rows)
        for operand in (target, weight):
            if isinstance(operand, fx.Node):
                self._fix(operand)
        return Half(kind, rows, target, ignore_index, weight)

    def _varies(self, node: fx.Node) -> bool:
        """Tell whether a node hangs on anything that is trained."""
        return any(
            (n.op == "get_attr" and n.target in self._parameters) or set(_reads(n)) & self._parameters
            for n in _behind(node)
        )

    def _fix(self, node: fx.Node) -> None:
        """Take an operand that the batch gives without the model's parameters."""
        behind = _behind(node)
        if self._varies(node) or len(behind) > _MOST:
            raise _Refused(f"{_name(node)} is known only behind the model's layers")
        for operand in behind:
            _check_pure(operand)
        behind |= set(self.fixed)
        self.fixed = [operand for operand in self._nodes if operand in behind]

    # -- in a step -------------------------------------------------------------------------------------------------
    def wants_gradient(self, step: Step) -> bool:
        """Tell whether what is computed before the step would need a gradient."""
        given = self._given_by(step)
        return any(isinstance(v := given.get(n), torch.Tensor) and v.requires_grad for n in self.fixed)

    def ahead(self, step: Step) -> dict[fx.Node, Any]:
        """Compute on the whole batch what the parts of the loss need: divisors, by their halves, and fixed operands."""
        *_, last, caller = step.lanes
        env = self._given_by(step)
        with torch.no_grad():
            for node in self.fixed:
                if node.op != "placeholder":
                    env[node] = run_node(node, env, self.root, caller.device)
            for node, half in self.halves.items():
                if half.kind == "ratio":
                    target, weight = fx.node.map_arg((half.target, half.weight), env.__getitem__)
                    env[node] = class_weights(target, half.ignore_index, weight)
        wanted = {*self.halves, *(operand for node in self.chain for operand in node.all_input_nodes)}
        return {
            node: transfer((value,), caller, last)[0] if isinstance(value, torch.Tensor) else value
            for node, value in env.items()
            if node in wanted
        }

    def _given_by(self, step: Step) -> dict[fx.Node, Any]:
        """Return the values of the graph's placeholders."""
        tensors = iter(step.tensors)
        found: dict[fx.Node, Any] = {}
        for node in self._nodes:
            if node.op == "placeholder":
                length = step.lengths[node.meta[LENGTH]] if LENGTH in node.meta else step.rows
                found[node] = next(tensors) if INFO in node.meta else length
        return found


def run_node(node: fx.Node, env: Mapping[fx.Node, Any], root: nn.Module, device: torch.device | None = None) -> Any:
    """Compute a node from the values of its operands; with ``device`` on that device."""
    if node.op == "get_attr":
        path, _, name = str(node.target).rpartition(".")
        value = getattr(root.get_submodule(path), name)
        return value.to(device) if isinstance(value, torch.Tensor) and device is not None else value
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), env.__getitem__)
    if device is not None and device.type != "cpu":
        args, kwargs = fx.node.map_aggregate((args, kwargs), lambda v: device if isinstance(v, torch.device) else v)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    function: Any = root.get_submodule(str(node.target)) if node.op == "call_module" else node.target
    return function(*args, **kwargs)


def arguments(node: fx.Node) -> Sequence[Any]:
    """Return the positional arguments of a call, without the ambient state that it may be wrapped in."""
    return node.args[2:] if node.target is under else node.args


def _is_first(operand: fx.Node, node: fx.Node) -> bool:
    return arguments(node)[0] is operand


def _behind(node: fx.Node) -> set[fx.Node]:
    """Return a node and all that it hangs on."""
    found, todo = {node}, [node]
    while todo:
        for operand in todo.pop().all_input_nodes:
            if operand not in found:
                found.add(operand)
                todo.append(operand)
    return found


def _reads(node: fx.Node) -> tuple[str, ...]:
    return node.meta[INFO].reads if INFO in node.meta else ()


def _check_pure(node: fx.Node) -> None:
    info = node.meta.get(INFO)
    if info is not None and (info.writes or info.random or info.mutated):
        raise _Refused(f"{info.name} draws, or changes a value in place, once per batch")


def _name(node: fx.Node) -> str:
    return str(node.meta[INFO].name) if INFO in node.meta else node.name
