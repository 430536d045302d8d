"""The second rung: dynamo reads the model's Python, and the graph that comes out is run and recorded.

    model ─► dynamo, at one batch size, on fake tensors ─► torch-level graph, told where each module begins
          ─► run under the Recorder, as the model's own forward is ─► the same recording, names and merge

Dynamo follows what no running Python shows: numpy, ``torch.from_numpy``, ``functional_call``. It also loses things:
what it is known to lose is refused here (regions that it keeps as operators of their own, among them checkpointing and
custom functions; attributes that forward changes), and what else a graph lacks shows when it is checked.

Private torch interface: ``torch._dynamo.functional_export.dynamo_graph_capture_for_export``, the only way to a
torch-level graph without a second copy of the parameters; tried on torch 2.13.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import fx, nn
from torch._ops import HigherOrderOperator

from autosplit.trace import state
from autosplit.trace.borrow import stand_ins
from autosplit.trace.calls import Ambient
from autosplit.trace.recording import Refusal
from autosplit.trace.tree_watch import written_back

_TRACKER = "_autosplit_capture"


class Listener(Protocol):
    """Who records what a captured graph does."""

    def enter(self, path: str, number: int) -> None:
        """Take what follows as operations of a module's ``number``-th call."""

    def knows(self, tensor: torch.Tensor) -> bool:
        """Tell whether a tensor is an input, a parameter or a buffer; any other operand is a constant."""

    def mute(self, muted: bool) -> None:
        """Stop recording, or go on."""


class Inputs(Protocol):
    """The flattened inputs of a call."""

    @property
    def leaves(self) -> tuple[Any, ...]:
        """The tensors and other values."""

    def rebuild(self, leaves: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return positional and keyword arguments made of other leaves."""


class Capture:
    """Captures a model at any number of batch sizes; constants are the same objects in all of them.

    The model runs once on the inputs that it is made with; raises Refusal when its forward changes an attribute.
    """

    def __init__(self, model: nn.Module, inputs: Inputs) -> None:
        self._model = model
        self._constants: dict[str, torch.Tensor] = {}
        changed = _side_effect(model, inputs)
        if changed is not None:
            raise Refusal(
                f"forward changes the attribute {changed!r} at every call, which a captured graph would not", ""
            )

    def forward(self, listener: Listener, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any]:
        """Capture the model's forward for these inputs; return a function that runs it, to be called under a recorder.

        Raises Refusal for what dynamo cannot follow, or follows wrongly. Of the inputs dynamo looks at shapes and
        dtypes only.
        """
        graph = _capture(self._model, args, kwargs)
        for node in graph.graph.nodes:
            if _is_apart(node.target):
                raise Refusal(
                    f"dynamo keeps {_name(node.target)} as a region of its own, which a graph does not run right", ""
                )
        tracker = graph.__dict__[_TRACKER] = _Tracker(listener, self._constants)
        _mark(graph, {id(module): path for path, module in self._model.named_modules()})
        with contextlib.suppress(_Looked):
            graph.forward(*args, **kwargs)
        return tracker.running(graph.forward)


def _is_apart(target: Any) -> bool:
    """Tell whether a call is a region of its own, or enters one: transforms, checkpoints, custom functions, hooks."""
    home, name = str(getattr(target, "__module__", "")), str(getattr(target, "__name__", ""))
    return (
        isinstance(target, HigherOrderOperator)
        or "functorch" in home
        or name.startswith(("_saved_tensors_hooks", "_grad_increment", "_wrap_for_grad", "_autograd_grad"))
    )


def _name(target: Any) -> str:
    return str(getattr(target, "__name__", target))


def _capture(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.GraphModule:
    from torch._dynamo import config
    from torch._dynamo.exc import TorchDynamoException
    from torch._dynamo.functional_export import dynamo_graph_capture_for_export

    with warnings.catch_warnings(), config.patch(automatic_dynamic_shapes=False, assume_static_by_default=True):
        warnings.simplefilter("ignore")
        try:
            graph: Any = dynamo_graph_capture_for_export(model.forward)(*args, **kwargs)
        except TorchDynamoException as error:
            raise Refusal(f"dynamo cannot follow forward: {str(error).strip().splitlines()[0]}", "") from error
    return graph


class _Looked(Exception):
    """All operands of a captured graph have been seen."""


class _Tracker:
    """What a captured graph calls while it runs."""

    def __init__(self, listener: Listener, constants: dict[str, torch.Tensor]) -> None:
        self.enter = listener.enter
        self.listener = listener
        self.constants = constants
        self.looking = True

    def running(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Let a listener hear the graph itself, not what dynamo does before and behind it; modes are as before."""

        def run(*args: Any, **kwargs: Any) -> Any:
            ambient = Ambient.current()
            self.listener.mute(True)
            try:
                with torch.set_grad_enabled(torch.is_grad_enabled()):
                    return forward(*args, **kwargs)
            finally:
                self.listener.mute(False)
                for mode in ambient.autocast:
                    torch.set_autocast_enabled(mode.device_type, mode.enabled)
                    torch.set_autocast_dtype(mode.device_type, mode.dtype)

        return run

    def operand(self, name: str, value: Any) -> Any:
        """Return an operand; a constant as the object that the first capture met under its name."""
        if not isinstance(value, torch.Tensor) or self.listener.knows(value):
            return value
        if self.looking:
            first = self.constants.setdefault(name, value)
            if first.dtype != value.dtype or not torch.equal(first, value):
                raise Refusal(f"forward captures another constant ({name}) at every call; register it as a buffer", "")
        return self.constants[name]

    def begin(self) -> None:
        """Come behind all operands; the first time they are all that is looked at."""
        if self.looking:
            self.looking = False
            raise _Looked
        self.listener.mute(False)

    def end(self) -> None:
        """Come behind the last operation."""
        self.listener.mute(True)


def _mark(graph: fx.GraphModule, paths: dict[int, str]) -> None:
    """Let a graph tell its tracker where its operations come from, and ask it for its constants."""
    nodes = list(graph.graph.nodes)
    inputs = [node for node in nodes if node.op == "placeholder"]
    body = next(node for node in nodes if node.op != "placeholder")
    with graph.graph.inserting_before(body):
        tracker = graph.graph.create_node("get_attr", _TRACKER)
        for node in inputs:
            operand = graph.graph.call_method("operand", (tracker, str(node.target), node))
            node.replace_all_uses_with(operand, delete_user_cb=lambda user, own=operand: user is not own)
        graph.graph.call_method("begin", (tracker,))
    at = ("", 0)
    for node in nodes:
        if node.op in ("placeholder", "output"):
            continue
        where = _origin(node, paths)
        if where != at:
            with graph.graph.inserting_before(node):
                graph.graph.call_method("enter", (tracker, *where))
            at = where
    with graph.graph.inserting_before(nodes[-1]):
        graph.graph.call_method("end", (tracker,))
    graph.recompile()


def _origin(node: fx.Node, paths: dict[int, str]) -> tuple[str, int]:
    """Return the module that a node comes from, by its path in the model, and which call of it that was."""
    for key in reversed(list(node.meta.get("nn_module_stack") or {})):
        number, _, call = str(key).partition("@")
        if number.isdecimal() and int(number) in paths:
            return paths[int(number)], int(call or 0)
    return "", 0


def _side_effect(model: nn.Module, inputs: Inputs) -> str | None:
    """Run the model for real and name an attribute that its forward changes; dynamo would not change it."""
    leaves = [leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in inputs.leaves]
    args, kwargs = inputs.rebuild(leaves)
    undone = state.random_state(), written_back(model), stand_ins(model)
    with contextlib.ExitStack() as stack, torch.no_grad(), warnings.catch_warnings():
        for context in undone:
            stack.enter_context(context)
        warnings.simplefilter("ignore")
        before = _attributes(model)
        model.forward(*args, **kwargs)
        after = _attributes(model)
    return next((key for key in dict.fromkeys((*before, *after)) if before.get(key) != after.get(key)), None)


def _attributes(model: nn.Module) -> dict[str, Any]:
    """Describe what modules hold beside parameters, buffers and children: numbers, texts, objects, containers."""
    found: dict[str, Any] = {}
    for path, module in model.named_modules():
        for key, value in module.__dict__.items():
            if key in ("_parameters", "_buffers", "_modules"):
                continue
            name = f"{path}.{key}".strip(".")
            if isinstance(value, (bool, int, float, str, bytes)) or value is None:
                found[name] = value
            elif isinstance(value, (list, dict, set, tuple)):
                found[name] = id(value), len(value), _short(value)
            else:
                found[name] = id(value)
    return found


def _short(value: Sequence[Any] | dict[Any, Any] | set[Any]) -> Any:
    plain = (bool, int, float, str, type(None))
    parts = [*value, *value.values()] if isinstance(value, dict) else list(value)
    return [part if isinstance(part, plain) else id(part) for part in parts[:256]]
