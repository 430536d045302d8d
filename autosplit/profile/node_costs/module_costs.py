"""What every module of a model costs, from runs of the model's own Python on real tensors.

    first run     the order of calls, saved and sent bytes, operations; it is the warm-up
    more runs     times of the modules' forwards, and of the backward between the gradients of their outputs

The model is left as it was.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from autosplit.errors import is_internal
from autosplit.options import Sample
from autosplit.profile.node_costs.ledger import Ledger
from autosplit.profile.node_costs.work import cost_model_of, work_of
from autosplit.profile.types import NodeTimes
from autosplit.trace.borrowed import state
from autosplit.trace.borrowed.state import gradients_aside, written_back
from autosplit.trace.inputs.objects import take_apart, tensors_in
from autosplit.trace.module_tree import ModuleCost, intercept

_BACKWARD = 2.0
"""Backward over forward time where the backward cannot be measured: a matrix product has two in its backward."""

_CPU = "cpu-lane"
"""Whose cost model gives the times that are not measured."""
_REPEATS = 3
_LONG_S = 1.0
"""Runs are repeated for as long as this at most."""


@dataclass
class Seen:
    """What was seen of one module, its children included; bytes of what it saved for its backward without theirs."""

    first: int | None = None
    forward_s: float = 0.0
    backward_s: float = 0.0
    output_bytes: int = 0
    saved_bytes: int = 0


@dataclass(frozen=True)
class ModuleCosts:
    """Costs by module path; ``measured`` is False where times come from a cost model."""

    modules: Mapping[str, Seen]
    measured: bool

    def of(self, path: str) -> Seen:
        """Return what was seen of a module; nothing for one that was never called."""
        return self.modules.get(path, Seen())

    def for_units(self) -> dict[str, ModuleCost]:
        """Return what the choice of units wants to know."""
        return {path: ModuleCost(s.forward_s + s.backward_s, s.first) for path, s in self.modules.items()}

    def saved_below(self, path: str) -> int:
        """Return the bytes that a module and all inside it keep for the backward."""
        inside = (s for p, s in self.modules.items() if p == path or not path or p.startswith(f"{path}."))
        return sum(seen.saved_bytes for seen in inside)


def module_costs(model: nn.Module, sample: Sample, *, measure: bool) -> ModuleCosts:
    """Return what every module costs in a call of ``sample``; raises what the model's forward raises.

    The model runs in the caller's modes; where there are no gradients the backward's times are estimates.
    ``measure=False`` takes the times of a CPU lane by its cost model.
    """
    meta = any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    grad = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(grad):
        try:
            first, wrote = _first_run(model, sample)
        except Exception as error:  # whatever its author wrote, or torch lacks on meta tensors
            if not meta or is_internal(error):
                raise
            return ModuleCosts(_by_size(model), measured=False)
        if meta or not measure:
            return ModuleCosts(first.seen, measured=False)
        _time(model, first.seen, sample, guarded=wrote)
    return ModuleCosts(first.seen, measured=True)


def _first_run(model: nn.Module, sample: Sample) -> tuple[_FirstRun, bool]:
    """Run a model once; return what was seen, and whether it writes to parameters."""
    first = _FirstRun(model)
    try:
        return first, first.run(sample)
    except RuntimeError as error:
        if "saved tensor hooks" not in str(error):
            raise
    first = _FirstRun(model)  # torch.func.grad in its forward takes no such hooks: nothing kept is counted
    return first, first.run(sample, saved=False)


def _time(model: nn.Module, seen: dict[str, Seen], sample: Sample, *, guarded: bool) -> None:
    """Replace modelled times by measured ones: the least of a few runs, as the first are often slower."""
    runs: list[dict[str, NodeTimes]] = []
    begin_s = time.perf_counter()
    while len(runs) < _REPEATS and (not runs or time.perf_counter() - begin_s < _LONG_S):
        run = _TimedRun(model, list(seen))
        run.run(sample, guarded=guarded)
        runs.append(run.times())
    for path, known in seen.items():
        found = [times[path] for times in runs if path in times]
        known.forward_s = min((t.forward_s for t in found), default=0.0)
        known.backward_s = min((t.backward_s for t in found), default=0.0)


def _by_size(model: nn.Module) -> dict[str, Seen]:
    """Guess the costs of a model that cannot run: time as bytes of parameters, calls in order of registration."""
    found = {}
    for number, (path, module) in enumerate(model.named_modules()):
        size = sum(p.numel() * p.element_size() for p in module.parameters())
        found[path] = Seen(first=number, forward_s=size * 1e-12, backward_s=_BACKWARD * size * 1e-12)
    return found


@contextlib.contextmanager
def _borrowed(model: nn.Module) -> Iterator[None]:
    with state.borrowed(model), gradients_aside(model.parameters()):
        yield


class _FirstRun:
    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.seen: dict[str, Seen] = {}
        self.inside: list[str] = [""]
        self.ledger = Ledger()
        self.cost_model = cost_model_of(_CPU)
        self.storages: set[int] = set()
        for tensor in (*model.parameters(), *model.buffers()):
            self._is_new(tensor)

    def run(self, sample: Sample, *, saved: bool = True) -> bool:
        """Run the model; tell whether it writes to parameters. With ``saved`` count what is kept for the backward."""
        for tensor in tensors_in((sample.args, sample.kwargs)):
            self._is_new(tensor)
        with _borrowed(self.model), written_back(self.model) as wrote:
            args, kwargs = own_inputs(sample)
            hooks = saved_tensors_hooks(self._pack, lambda tensor: tensor) if saved else contextlib.nullcontext()
            intercept(self.model, [path for path, _ in self.model.named_modules()], self.visit)
            with self.ledger, hooks:
                self.model.forward(*args, **kwargs)
            return bool(wrote)

    def visit(self, path: str, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a module and note what it does."""
        seen = self.seen.setdefault(path, Seen())
        seen.first = len(self.seen) if seen.first is None else seen.first
        begin = len(self.ledger.operations)
        self.inside.append(path)
        try:
            result = plain(*args, **kwargs)
        finally:
            self.inside.pop()
        operations = self.ledger.operations[begin:]
        forward_s = sum(self.cost_model.seconds(work_of(operation)) for operation in operations)
        seen.forward_s += forward_s
        seen.backward_s += _BACKWARD * forward_s
        seen.output_bytes = sum(t.numel() * t.element_size() for t in tensors_in(result))
        return result

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._is_new(tensor):
            self.seen.setdefault(self.inside[-1], Seen()).saved_bytes += tensor.untyped_storage().nbytes()
        return tensor

    def _is_new(self, tensor: torch.Tensor) -> bool:
        try:
            key = tensor.untyped_storage()._cdata
        except (NotImplementedError, RuntimeError):
            return False
        new = key not in self.storages
        self.storages.add(key)
        return new


class _TimedRun:
    """Times modules' forwards, and the backward by when the gradients of outputs arrive."""

    def __init__(self, model: nn.Module, paths: list[str]) -> None:
        self.model = model
        self.forward_s = dict.fromkeys(paths, 0.0)
        self.backward_s = dict.fromkeys(paths, 0.0)
        self.marked: set[int] = set()
        self.kept: list[torch.Tensor] = []
        self.arrivals: list[tuple[float, str]] = []

    def times(self) -> dict[str, NodeTimes]:
        """Return what was measured, by module path."""
        return {path: NodeTimes(forward_s, self.backward_s[path]) for path, forward_s in self.forward_s.items()}

    def run(self, sample: Sample, *, guarded: bool) -> None:
        """Run forward and backward; ``guarded`` gives back what is written to parameters, at some cost in time."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(_borrowed(self.model))
            if guarded:
                stack.enter_context(written_back(self.model))
            args, kwargs = own_inputs(sample)
            intercept(self.model, list(self.forward_s), self.visit)
            output = self.model.forward(*args, **kwargs)
            self._backward([t for t in tensors_in(output) if t.requires_grad], tensors_in((args, kwargs)))

    def visit(self, path: str, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a module and time it."""
        start_s = time.perf_counter()
        result = plain(*args, **kwargs)
        self.forward_s[path] += time.perf_counter() - start_s
        for tensor in tensors_in(result):
            if tensor.requires_grad and not tensor.is_leaf and id(tensor) not in self.marked:
                self.marked.add(id(tensor))
                self.kept.append(tensor)
                tensor.register_hook(lambda _: self.arrivals.append((time.perf_counter(), path)))
        return result

    def _backward(self, roots: list[torch.Tensor], inputs: list[torch.Tensor]) -> None:
        wanted = [t for t in (*self.model.parameters(), *inputs) if t.requires_grad]
        if roots and wanted and not _has_backward_hooks(self.model):
            try:
                torch.autograd.grad(roots, wanted, [torch.ones_like(root) for root in roots], allow_unused=True)
            except RuntimeError:  # a backward that cannot be, as of a custom function without one
                self.arrivals.clear()
        if not self.arrivals:
            self.backward_s = {path: _BACKWARD * forward_s for path, forward_s in self.forward_s.items()}
            return
        ends = [*(when for when, _ in self.arrivals[1:]), time.perf_counter()]
        for (begin_s, path), end_s in zip(self.arrivals, ends, strict=True):
            for around in _around(path):
                if around in self.backward_s:
                    self.backward_s[around] += end_s - begin_s


def _around(path: str) -> Iterator[str]:
    """Yield a module's path and those of the modules around it: its time is theirs too."""
    yield path
    while path:
        path = path.rpartition(".")[0]
        yield path


def _has_backward_hooks(model: nn.Module) -> bool:
    """Tell whether a backward would call anything of the user's."""
    modules = any(m._backward_hooks or m._backward_pre_hooks for m in model.modules())
    return modules or any(p._backward_hooks for p in model.parameters())


def own_inputs(sample: Sample) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return copies of a call's inputs, so that nothing that the model does to them is seen outside."""
    leaves, rebuild = take_apart((sample.args, sample.kwargs))
    args, kwargs = rebuild([_copy(leaf) for leaf in leaves])
    return args, kwargs


def _copy(leaf: Any) -> Any:
    return leaf.detach().clone().requires_grad_(leaf.requires_grad) if isinstance(leaf, torch.Tensor) else leaf
