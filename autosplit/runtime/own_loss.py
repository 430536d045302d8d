"""The loss that a model returns itself, by microbatches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from autosplit.errors import InputError
from autosplit.runtime.cells import Step
from autosplit.runtime.loss_outputs import Outputs
from autosplit.runtime.own_form import Form, Half, arguments, run_node
from autosplit.trace import reductions


def own_loss(output: Any) -> torch.Tensor:
    """Return the loss in a model's output: what is called "loss", or else the first scalar.

    Raises InputError when there is none.
    """
    found: Any = None
    if isinstance(output, torch.Tensor):
        found = output
    elif isinstance(output, Mapping):
        found = output.get("loss")
    elif isinstance(getattr(output, "loss", None), torch.Tensor):
        found = output.loss
    elif isinstance(output, (tuple, list)):
        found = next((part for part in output if isinstance(part, torch.Tensor) and part.dim() == 0), None)
    if isinstance(found, torch.Tensor) and found.dim() == 0 and found.is_floating_point():
        return found
    raise InputError(
        f"train_step needs loss_fn=, a function loss_fn(output, target) that returns a scalar: the model returns a "
        f"{type(output).__name__} without a loss of its own (a scalar 'loss', or a scalar in a tuple; does it want "
        "labels?)"
    )


class OwnLoss:
    """What each microbatch adds to the model's own loss, given what the stages give for it by name."""

    takes_values = True

    def __init__(self, step: Step, form: Form) -> None:
        self.form, self.step = form, step
        self._ahead = form.ahead(step)

    def __call__(self, values: Mapping[str, torch.Tensor], microbatch: int) -> torch.Tensor:
        """Return what a microbatch adds."""
        share = self.step.sizes[microbatch] / self.step.rows
        env: dict[fx.Node, Any] = dict(self._ahead)
        for node, half in self.form.halves.items():
            env[node] = self._part(node, half, values[half.rows.name], share)
        for node in self.form.chain:
            env[node] = run_node(node, env, self.form.root)
        found: torch.Tensor = env[self.form.loss]
        return found

    def _part(self, node: fx.Node, half: Half, rows: torch.Tensor, share: float) -> torch.Tensor:
        match half.kind:
            case "ratio":
                return (rows[:, 0].sum() / self._ahead[node]).to(arguments(node)[1])
            case "total":
                return reductions.total(rows, *arguments(node)[1:])
            case "average":
                return reductions.average(rows, *arguments(node)[1:]) * share
            case "sum":
                return rows.sum()
        return rows.mean() * share


def in_schedule(step: Step) -> OwnLoss | None:
    """Return the model's own loss by microbatches; None where only the whole batch gives it.

    Raises InputError when the model returns no loss.
    """
    form: Form = step.once("own loss", lambda: _form(step))
    return None if form.why is not None or form.wants_gradient(step) else OwnLoss(step, form)


def _form(step: Step) -> Form:
    outputs = Outputs(step)
    leaves = outputs.leaves()
    wanted = own_loss(step.lowered.traced.unflatten(leaves))
    node = next(node for node, leaf in zip(outputs.nodes, leaves, strict=True) if leaf is wanted)
    return Form(step.lowered, node)
