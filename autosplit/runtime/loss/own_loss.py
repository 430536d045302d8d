"""The loss that a model returns itself, by microbatches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from operator import attrgetter
from typing import Any

import torch
from torch import fx, nn

from autosplit.errors import InputError
from autosplit.runtime.lanes.lanes import Lane
from autosplit.runtime.ops import transfer
from autosplit.runtime.step.step import Step
from autosplit.trace.graph import INFO, LENGTH, NodeClass, size_at
from autosplit.trace.reductions.decompose import average, total
from autosplit.trace.reductions.losses import class_weights
from autosplit.trace.reductions.own_loss import Form, Half, form_of
from autosplit.trace.rows.kinds import arguments


class OwnLoss:
    """What each microbatch adds to the model's own loss, given what the stages give for it by name."""

    takes_values = True

    def __init__(self, step: Step, form: Form) -> None:
        self.form, self.step = form, step
        self.wants: frozenset[str] | None = frozenset(half.rows.name for half in form.halves.values())
        self._rows = step.rows
        self._ahead = _ahead(form, step)

    @property
    def _ratios(self) -> list[fx.Node]:
        return [node for node, half in self.form.halves.items() if half.kind == "ratio"]

    @property
    def _scales(self) -> set[fx.Node]:
        """What the loss is scaled by, except for the model's own attributes."""
        operands = {operand for node in self.form.chain for operand in node.all_input_nodes}
        return {operand for operand in operands & set(self.form.fixed) if operand.op != "get_attr"}

    @property
    def averages(self) -> bool:
        """Whether a row's part of it depends on the sizes of rows: a mean over elements, or a division by a length."""
        means = any(half.kind not in ("ratio", "total") for half in self.form.halves.values())
        return means or any(INFO not in node.meta for node in self._scales)

    @property
    def divisors(self) -> list[float]:
        """What means over targets divide by, on these rows, where they are some of a larger batch's.

        Raises InputError where the loss is scaled by a value of these rows.
        """
        for node in self._scales:
            if INFO in node.meta and node.meta[INFO].node_class is not NodeClass.SHARED:
                raise InputError(
                    f"the model scales its loss by {node.name!r}, a value of all rows, and a replica has some of them; "
                    "let the model return its outputs, and give train_step a loss_fn"
                )
        return [float(self._ahead[node]) for node in self._ratios]

    def among(self, rows: int, divisors: Sequence[float]) -> OwnLoss:
        """Return what the same microbatches add to the loss of a larger batch, by its rows and divisors."""
        larger = copy(self)
        scales = [node for node in self._scales if INFO not in node.meta]
        sizes = {node: size_at(node, rows, lambda n: self.step.lengths[n.meta[LENGTH]]) for node in scales}
        larger._rows, larger._ahead = rows, {**self._ahead, **sizes}
        for node, divisor in zip(self._ratios, divisors, strict=True):
            larger._ahead[node] = self._ahead[node].new_tensor(divisor)
        return larger

    def __call__(self, values: Mapping[str, torch.Tensor], microbatch: int) -> torch.Tensor:
        """Return what a microbatch adds."""
        share = self.step.sizes[microbatch] / self._rows
        env: dict[fx.Node, Any] = dict(self._ahead)
        for node, half in self.form.halves.items():
            env[node] = self._part(node, half, values[half.rows.name], share)
        for node in self.form.chain:
            env[node] = _run_node(node, env, self.form.root)
        loss: torch.Tensor = env[self.form.loss]
        return loss

    def _part(self, node: fx.Node, half: Half, rows: torch.Tensor, share: float) -> torch.Tensor:
        match half.kind:
            case "ratio":
                return (rows[:, 0].sum() / self._ahead[node]).to(arguments(node)[1])
            case "total":
                return total(rows, *arguments(node)[1:])
        return average(rows, *arguments(node)[1:]) * share


def in_schedule(step: Step) -> OwnLoss | None:
    """Return the model's own loss by microbatches; None where only the whole batch gives it.

    Raises InputError when the model returns no loss.
    """
    form: Form = step.once("own loss", lambda: form_of(step.lowered.traced))
    return None if form.why is not None or _wants_gradient(form, step) else OwnLoss(step, form)


def _wants_gradient(form: Form, step: Step) -> bool:
    """Tell whether what is computed before the step would need a gradient."""
    values = _given(form, step)
    return any(isinstance(v := values.get(n), torch.Tensor) and v.requires_grad for n in form.fixed)


def _ahead(form: Form, step: Step) -> dict[fx.Node, Any]:
    """Compute on the whole batch what the parts of the loss need: divisors, by their halves, and fixed operands."""
    *_, last, caller = step.lanes
    env = _given(form, step)
    with torch.no_grad():
        for node in form.fixed:
            if node.op != "placeholder":
                env[node] = _run_node(node, env, form.root, caller)
        for node, half in form.halves.items():
            if half.kind == "ratio":
                target, weight = fx.node.map_arg((half.target, half.weight), env.__getitem__)
                env[node] = class_weights(target, half.ignore_index, weight).sum()
    wanted = {*form.halves, *(operand for node in form.chain for operand in node.all_input_nodes)}
    return {
        node: transfer((value,), caller, last)[0] if isinstance(value, torch.Tensor) else value
        for node, value in env.items()
        if node in wanted
    }


def _given(form: Form, step: Step) -> dict[fx.Node, Any]:
    """Return the values of the graph's placeholders."""
    tensors = iter(step.tensors)
    values: dict[fx.Node, Any] = {}
    for node in form.nodes:
        if node.op == "placeholder":
            length = step.lengths[node.meta[LENGTH]] if LENGTH in node.meta else step.rows
            values[node] = next(tensors) if INFO in node.meta else length
    return values


def _run_node(node: fx.Node, env: Mapping[fx.Node, Any], root: nn.Module, lane: Lane | None = None) -> Any:
    """Compute a node from the values of its operands; with ``lane`` on that lane's device."""
    if node.op == "get_attr":
        value = attrgetter(str(node.target))(root)
        if lane is None or not isinstance(value, torch.Tensor):
            return value
        return transfer((value,), lane.origin(value), lane)[0]
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), env.__getitem__)
    if lane is not None and lane.asynchronous:
        args, kwargs = fx.node.map_aggregate(
            (args, kwargs), lambda v: lane.device if isinstance(v, torch.device) else v
        )
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    function: Any = root.get_submodule(str(node.target)) if node.op == "call_module" else node.target
    return function(*args, **kwargs)
