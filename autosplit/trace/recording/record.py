"""Run a model once on fake tensors and write down every torch-level call.

model's own Python ──► Module.__call__ (patched)  leaf: one call, muted inside; other modules: entered
                  ──► TorchFunctionMode          every torch function and Tensor method
                  ──► TorchDispatchMode          which of them draw random numbers
                  ──► FakeTensorMode             shapes only: nothing is computed or allocated
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from autosplit.trace.borrowed.holders import Holders
from autosplit.trace.borrowed.logged import Decides, LoggedNumber
from autosplit.trace.borrowed.side_effects import by_hooks, check_own
from autosplit.trace.borrowed.surroundings import seen_node
from autosplit.trace.inputs.objects import projections, take_apart, tensors_in
from autosplit.trace.inputs.signature import GradAutocastState
from autosplit.trace.reads.assertions import Assertion, assertion_here, check_value, holds_by_rows
from autosplit.trace.reads.reads import Reader
from autosplit.trace.reads.watch import Watcher
from autosplit.trace.recording.random_watch import RandomWatch
from autosplit.trace.recording.recording import (
    GRADIENT_CALLS,
    OBSERVES,
    VALUE_READS,
    Attribute,
    Call,
    Recording,
    Ref,
    Refusal,
    apply_function,
    is_foreign,
    run_checkpointed,
    source_line,
    under,
    where,
)
from autosplit.trace.recording.values import KnownValues
from autosplit.trace.scope import (
    STATEFUL_LEAVES,
    Scope,
    cast,
    has_hooks,
    is_quantised,
    is_stack,
    packed_result,
    pads_in_its_own_way,
    run_stack,
)
from autosplit.trace.shapes.shape_rules import bincount


class Recorder(KnownValues, TorchFunctionMode):
    """Records torch-level calls of one forward."""

    def __init__(
        self,
        model: nn.Module,
        scope: Scope,
        *,
        reader: Reader,
        observed: Watcher | None,
        holders: Holders,
    ) -> None:
        super().__init__(model, scope)
        self.holders = holders
        self.by_layers: set[tuple[str, str]] = set()  # attributes that layers have set themselves, by their hooks
        self.reader = reader
        self.observed = observed
        self.asks_grad_mode = ""  # where the model asked what gradients alone tell; "" while it did not
        self.checkpoints = False
        self.failed_in: str | None = None  # the innermost module out of which an exception came
        self.modules_made: list[type] = []
        self.logged: list[weakref.ref[LoggedNumber]] = []
        self.logged_lines: set[str] = set()
        self.decided: set[str] = set()  # those of which the numbers do more than to be kept
        self.random = RandomWatch()
        self._muted = 0
        self._module_calls: Counter[str] = Counter()
        self._op_counts: Counter[tuple[str, int, str]] = Counter()
        self._root_ambient = GradAutocastState.current()
        self._transforms = torch._C._functorch.maybe_current_level()

    def refuse_gradients(self, what: str, *, observes: bool = True) -> Refusal:
        """Return a refusal of what depends on the graph of autograd, or runs it; ``observes``: on the whole batch."""
        whole = f"{OBSERVES}: it {what}, {source_line()}" if observes else ""
        what += "; a graph carries no hooks and computes no gradients in forward"
        return self.refusal(what, whole=whole)

    def check_saved_hooks(self, hooks: saved_tensors_hooks) -> None:
        """Raise Refusal where the model sees what autograd saves; torch's own hooks, which offload it, are left out."""
        kind = type(hooks)
        self.checkpoints |= kind.__module__ == torch.utils.checkpoint.__name__
        if not self._muted and (kind is saved_tensors_hooks or not kind.__module__.startswith("torch.")):
            raise self.refuse_gradients(f"enters {kind.__name__}")

    # -- calls -------------------------------------------------------------------------------------------------
    def perform(self, kind: str, target: Any, label: str, run: Callable[[], Any], args: Any, kwargs: Any) -> Any:
        """Run one call and write it down; nothing inside is recorded."""
        self._muted += 1
        try:
            inputs = tensors_in((args, kwargs))
            buffers = list(self.modules[target].buffers()) if kind == "module" else []
            touched = [*inputs, *buffers]
            versions = [t._version for t in touched]
            call = Call(kind, target, self.encode(tuple(args)), self.encode(dict(kwargs)), self.path, "")
            call.leaf = target if kind == "module" else None
            call.source = source_line()
            self.random.begin()
            if call.leaf in self.scope.opaque and self.observed is not None:
                out = self.observed.replay(call, self._stack[-1][1], args, kwargs)
            elif call.leaf in self.scope.opaque and is_quantised(self.modules[target]):
                out = packed_result(self.modules[target], *args, **kwargs)
            else:
                out = run()
            if self.random.own_generator:
                raise self.refusal(_OWN_GENERATOR)
            if self.random.drew:
                call.random, call.draws = True, self.random.draws
            self.track_mutation(call, touched, versions)
            self.track_state(call, inputs)
            ambient = GradAutocastState.current()
            if ambient != self._root_ambient:
                self._wrap(call, ambient.differing(self._root_ambient))
            tensors = tensors_in(out)
            if tensors or call.mutates or call.writes:
                call.name = self.name_of(kind, label)
                self.calls.append(call)
                self._bind(out, len(self.calls) - 1)
            return out
        finally:
            self._muted -= 1

    def name_of(self, kind: str, label: str) -> str:
        """Return the stable name of the next call of a kind."""
        path, number = self._stack[-1]
        if kind == "module":
            return f"{path}#{number}"
        count = self._op_counts[path, number, label]
        self._op_counts[path, number, label] += 1
        return f"{path}#{number}/{label}_{count}"

    def _wrap(self, call: Call, ambient: GradAutocastState) -> None:
        function = Attribute(call.target) if call.kind == "module" else self.constant(call.target)
        call.kind, call.target = "function", under
        call.args = (self.constant(ambient), function, *call.args)

    def _bind(self, out: Any, index: int) -> None:
        if isinstance(out, torch.Tensor):
            self.note(self.calls[index], out)
            self.refs[id(out)] = index
            return
        for leaf, steps in projections(out):
            self.note(self.calls[index], leaf)
            parent = Ref(index)
            base = self.calls[index].name
            for pick, step in steps:
                base = f"{base}.{step}"
                call = Call("project", pick, (parent, step), {}, self.calls[index].module, base)
                self.calls.append(call)
                parent = Ref(len(self.calls) - 1)
            self.note(self.calls[-1], leaf)
            self.refs[id(leaf)] = parent.index

    # -- the two seams -------------------------------------------------------------------------------------------
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._muted:
            return func(*args, **kwargs)
        self._refuse_transform()
        label = getattr(func, "__name__", type(func).__name__)
        if label in VALUE_READS and any(self.knows(t) or type(t) is not FakeTensor for t in tensors_in((args, kwargs))):
            return self._read(func, label, args, kwargs)
        if label in GRADIENT_CALLS and any(map(self.knows, tensors_in((args, kwargs)))):
            raise self.refuse_gradients(f"calls {label} on a tensor", observes=label not in ("backward", "grad"))
        if label == "__get__":
            label = func.__self__.__name__
            if label == "grad":
                return func(*args, **kwargs)
            if label in _TELL_GRAD_MODE and args[0].requires_grad and not args[0].is_leaf:
                asked_by_model = not is_foreign(sys._getframe(1).f_code.co_filename)
                self.asks_grad_mode = self.asks_grad_mode or (source_line() if asked_by_model else "")
            value = self.perform("function", getattr, label, lambda: func(*args), (args[0], label), {})
            return seen_node(value, self.refuse_gradients) if label == "grad_fn" else value
        if label == "__set__":
            label = func.__self__.__name__
            if label == "data":
                raise Refusal(f"{where(self.path)} assigns data of a tensor, as no graph does ({source_line()})", "")
            if label.endswith("_hooks"):
                raise self.refuse_gradients(f"sets {label} of a tensor")
            full = (args[0], label, args[1])
            return self.perform("function", setattr, f"set_{label}", lambda: func(*args), full, {})
        if label == "bincount":
            func = bincount
        return self.perform("function", func, label.strip("_") or "op", lambda: func(*args, **kwargs), args, kwargs)

    def _read(self, func: Any, label: str, args: Any, kwargs: Any) -> Any:
        if (asserted := assertion_here(label)) is not None:
            return self._check(asserted, func, args, kwargs)
        if self.scope.only_keeps(label, line := source_line()):
            return self._log_item(args[0], line)
        call = Call("read", func, self.encode(tuple(args)), self.encode(dict(kwargs)), self.path, "")
        call.name, call.source = self.name_of("read", label.strip("_")), source_line()
        value = self.reader.read(call, self)
        self.calls.append(call)
        return value

    def _check(self, asserted: Assertion, read: Callable[..., Any], args: Any, kwargs: Any) -> bool:
        """Record that the model checks a value, and return what it reads where the check holds."""
        positional, named = self.encode(tuple(args)), self.encode(dict(kwargs))
        line = source_line()
        text = asserted.text or f"a check of the model's values failed on this batch ({line})"
        full = (asserted.expected, self.constant(asserted.error), text, self.constant(read), positional, named)
        name = self.name_of("check", read.__name__.strip("_"))
        call = Call("function", check_value, full, {}, self.path, name, source=line)
        if len(args) != 1 or not holds_by_rows(positional[0], asserted.expected, self.calls):
            call.whole = f"it checks a value of the whole batch ({line})"
        self.calls.append(call)
        return asserted.expected

    def _log_item(self, tensor: torch.Tensor, line: str) -> LoggedNumber:
        """Return the number that a tensor of one element has now, to be known when the program has run."""
        if id(tensor) not in self.refs or tensor.numel() != 1:
            raise Decides((line,), self.path)
        kind = float if tensor.dtype.is_floating_point else bool if tensor.dtype is torch.bool else int
        bare = self.perform("function", torch.detach, "detach", lambda: torch.detach(tensor), (tensor,), {})
        copy = self.perform("function", torch.clone, "clone", lambda: torch.clone(bare), (bare,), {})
        number = LoggedNumber(
            lambda real: real.get(id(copy), copy).item(),
            kind=kind,
            lines=frozenset((line,)),
            decided=self.decided,
            tensors=(copy,),
        )
        self.logged_lines.add(line)
        self.logged.append(weakref.ref(number))
        return number

    def call_module(self, original: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Stand in for ``nn.Module.__call__``: a leaf is one call, anything else is entered."""
        path = self._paths.get(id(module))
        if self._muted or path is None:
            return original(module, *args, **kwargs)
        self._refuse_transform()
        if (casts := self.scope.casts.get(path)) is None:
            return self._call_module(original, module, path, args, kwargs)
        args, kwargs = cast((args, kwargs), casts.inputs)
        return cast(self._call_module(original, module, path, args, kwargs), casts.outputs)

    def _call_module(self, original: Callable[..., Any], module: nn.Module, path: str, args: Any, kwargs: Any) -> Any:
        if path == "":
            return (partial(run_stack, module) if is_stack(module, args) else module.forward)(*args, **kwargs)
        self._stack.append((path, self._module_calls[path]))
        self._module_calls[path] += 1
        try:
            if self.scope.is_leaf(module, path) or pads_in_its_own_way(module, args, kwargs):
                if is_stack(module, args) and path not in self.scope.opaque and not has_hooks(module):
                    return run_stack(module, *args, **kwargs)
                return self._leaf(original, module, path, args, kwargs)
            return original(module, *args, **kwargs)
        except Exception as error:
            self.failed_in = path if self.failed_in is None else self.failed_in
            if not isinstance(error, Refusal) and not getattr(error, "__notes__", None):
                error.add_note(f"raised in module {path!r} ({type(module).__name__})")
            raise
        finally:
            self._stack.pop()

    def _refuse_transform(self) -> None:
        """Raise Refusal inside of torch.func's transforms: their tensors are no values of the recording."""
        if torch._C._functorch.maybe_current_level() != self._transforms:
            raise self.refusal("uses torch.vmap or torch.func, whose inner tensors no graph holds")

    def _leaf(self, original: Callable[..., Any], module: nn.Module, path: str, args: Any, kwargs: Any) -> Any:
        cumulative = isinstance(module, STATEFUL_LEAVES) and module.momentum is None
        if cumulative:  # torch reads 1 / float(num_batches_tracked) then, which a fake tensor cannot tell
            module.__dict__["momentum"] = 0.1
        try:
            with by_hooks(module, path, None if path in self.scope.opaque else self.holders, self.by_layers):
                return self.perform("module", path, "", lambda: original(module, *args, **kwargs), args, kwargs)
        finally:
            if cumulative:
                module.__dict__["momentum"] = None

    def call_function(self, original: Callable[..., Any], function: type, args: Any, kwargs: Any) -> Any:
        """Stand in for ``autograd.Function.apply``: one call with its own backward."""
        from torch.utils.checkpoint import CheckpointFunction

        if self._muted:
            self.random.runs_twice |= function is CheckpointFunction
            return original(*args, **kwargs)
        if function.__name__ == "_NoopSaveInputs":  # torch 2.11's checkpoint keeps its inputs by it; here it just runs
            return args[0].detach()
        if function is CheckpointFunction:
            self.checkpoints = True
            return run_checkpointed(*args)
        run = partial(original, *args, **kwargs)
        return self.perform("function", apply_function, function.__name__, run, (function, *args), kwargs)

    def finish(self, output: Any, buffers: dict[str, torch.Tensor], kept: Sequence[torch.Tensor]) -> Recording:
        """Record buffers that were assigned, and return the recording; what is kept besides are its last outputs."""
        self.assign_buffers(buffers)
        self.give_back()
        check_own(self.model, output)
        flat, unflatten = take_apart(output)
        encoded = [self.reference(v) if isinstance(v, torch.Tensor) else v for v in flat]
        encoded += [self.reference(tensor) for tensor in kept]
        return Recording(self.calls, self.constants, encoded, unflatten, kept=len(kept))


_TELL_GRAD_MODE = ("requires_grad", "grad_fn", "is_leaf")
"""What is another of a computed tensor where gradients are off."""
_OWN_GENERATOR = "draws from a generator of its own; a pipeline cannot keep the order of its draws: use torch's default"
