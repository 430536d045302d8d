"""What every module of a model costs, from a run of the model's own Python: the order of calls, saved and sent bytes.

Times are those of a CPU lane by its cost model, from the operations that run: stages of the module tree run one after
the other, so that times decide nothing but which modules are cut between. The model is left as it was.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from autosplit.errors import is_internal
from autosplit.options import Sample
from autosplit.profile.node_costs.ledger import Ledger
from autosplit.profile.node_costs.work import cost_model_of, work_of
from autosplit.trace.borrowed import state
from autosplit.trace.borrowed.blank import has_meta
from autosplit.trace.borrowed.writes import written_back
from autosplit.trace.inputs.objects import fresh, mapped, tensors_in
from autosplit.trace.module_tree import ModuleCost, intercept

BACKWARD = 2.0
"""Backward over forward time: a matrix product has two in its backward."""
_CPU = "cpu-lane"
"""Whose cost model gives the times."""


def module_costs(model: nn.Module, sample: Sample) -> dict[str, ModuleCost]:
    """Return what every module costs in a call of ``sample``, in the caller's modes; raises what its forward raises."""
    meta = has_meta(model)
    grad = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(grad):
        try:
            return _run(model, sample)
        except Exception as error:  # whatever its author wrote, or torch lacks on meta tensors
            if not meta or is_internal(error):
                raise
            return _by_size(model)


def _run(model: nn.Module, sample: Sample) -> dict[str, ModuleCost]:
    """Run a model once; return what was seen."""
    try:
        return _ModuleRun(model).seen_with(sample)
    except RuntimeError as error:
        if "saved tensor hooks" not in str(error):
            raise
    return _ModuleRun(model).seen_with(sample, saved=False)  # torch.func.grad in its forward takes no such hooks


def _by_size(model: nn.Module) -> dict[str, ModuleCost]:
    """Guess the costs of a model that cannot run: time as bytes of parameters, calls in order of registration."""
    costs = {}
    for number, (path, module) in enumerate(model.named_modules()):
        size = sum(p.numel() * p.element_size() for p in module.parameters())
        costs[path] = ModuleCost(size * 1e-12, number)
    return costs


def saved_below(costs: Mapping[str, ModuleCost], path: str) -> int:
    """Return the bytes that a module and all inside it keep for the backward."""
    inside = (cost for p, cost in costs.items() if p == path or not path or p.startswith(f"{path}."))
    return sum(cost.saved_bytes for cost in inside)


class _ModuleRun:
    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.seen: dict[str, ModuleCost] = {}
        self.inside: list[str] = [""]
        self.ledger = Ledger()
        self.cost_model = cost_model_of(_CPU)
        self.storages: set[int] = set()
        for tensor in (*model.parameters(), *model.buffers()):
            self._is_new(tensor)

    def seen_with(self, sample: Sample, *, saved: bool = True) -> dict[str, ModuleCost]:
        """Run the model on inputs of its own; with ``saved`` count what is kept for the backward."""
        for tensor in tensors_in((sample.args, sample.kwargs)):
            self._is_new(tensor)
        with state.borrowed(self.model), written_back(self.model):
            args, kwargs = mapped(fresh, (sample.args, sample.kwargs))
            hooks = saved_tensors_hooks(self._pack, lambda tensor: tensor) if saved else contextlib.nullcontext()
            intercept(self.model, [path for path, _ in self.model.named_modules()], self.visit)
            with self.ledger, hooks:
                self.model.forward(*args, **kwargs)
        return self.seen

    def visit(self, path: str, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a module and note what it does."""
        seen = self.seen.setdefault(path, ModuleCost())
        seen.first = len(self.seen) if seen.first is None else seen.first
        begin = len(self.ledger.operations)
        self.inside.append(path)
        try:
            result = plain(*args, **kwargs)
        finally:
            self.inside.pop()
        operations = self.ledger.operations[begin:]
        seen.forward_s += sum(self.cost_model.seconds(work_of(operation)) for operation in operations)
        seen.output_bytes = sum(t.numel() * t.element_size() for t in tensors_in(result))
        return result

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._is_new(tensor):
            self.seen.setdefault(self.inside[-1], ModuleCost()).saved_bytes += tensor.untyped_storage().nbytes()
        return tensor

    def _is_new(self, tensor: torch.Tensor) -> bool:
        try:
            key = tensor.untyped_storage()._cdata
        except (NotImplementedError, RuntimeError):
            return False
        new = key not in self.storages
        self.storages.add(key)
        return new
