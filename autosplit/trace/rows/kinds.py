"""What an operation is known to do with the rows that it is given."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn
from torch._ops import OpOverload, OpOverloadPacket
from torch.nn import functional as F
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.overrides import TorchFunctionMode

from autosplit.trace.graph import INFO, NodeClass, TracedGraph
from autosplit.trace.recording.recording import apply_function, by_name, invoke, under
from autosplit.trace.scope import STATEFUL_LEAVES, has_hooks, is_layer

REARRANGING = frozenset(
    "getitem getattr view view_as reshape reshape_as transpose permute flip fliplr flipud roll unflatten flatten "
    "gather index_select take_along_dim contiguous clone chunk split split_with_sizes tensor_split unbind squeeze "
    "unsqueeze expand expand_as narrow select movedim moveaxis swapaxes swapdims t cat concat stack detach ravel "
    "repeat tile broadcast_to unfold rot90 adjoint hstack vstack dstack hsplit vsplit".split()
)
"""What moves values and computes none; the value probe follows rows through it."""
_DRAWN_WHOLE = frozenset("randperm multinomial poisson binomial standard_gamma sample_dirichlet rrelu".split())
"""What draws row numbers, or as many numbers as the values of earlier rows ask for."""
_LIKE = frozenset("view_as reshape_as expand_as".split())
SHAPE_ONLY = frozenset(
    "new_zeros new_ones new_empty new_full new_tensor zeros_like ones_like empty_like full_like rand_like randn_like "
    "randint_like".split()
)
UNSET = frozenset("empty new_empty empty_like empty_strided new_empty_strided".split())
_BY_FREQUENCY = {"embedding": 5, "embedding_bag": 5}
"""Where functions take `scale_grad_by_freq`."""
_MODULES = (nn.Flatten, nn.Unflatten, nn.Identity, nn.PixelShuffle, nn.PixelUnshuffle)


def function_of(node: fx.Node, root: nn.Module) -> Any:
    """Return the function, method or module that a node calls, also when it is wrapped in an ambient state."""
    if node.op == "call_module":
        return root.get_submodule(str(node.target))
    if node.op == "call_method":
        return getattr(torch.Tensor, str(node.target), None)
    if node.target is under and isinstance(node.args[1], fx.Node):
        name = str(node.args[1].target)
        return getattr(root, name) if name.startswith("_object") else root.get_submodule(name)
    return node.target


def is_torchs(node: fx.Node, root: nn.Module) -> bool:
    """Tell whether none of the user's own Python runs in a call, which may do something else each time."""
    called = function_of(node, root)
    if called is under:
        called = node.args[1]
    if called is invoke and isinstance(node.args[0], fx.Node):
        return isinstance(getattr(root, str(node.args[0].target), None), (OpOverload, OpOverloadPacket))
    if isinstance(called, nn.Module):
        return type(called).__module__.startswith("torch.nn.") and not has_hooks(called)
    return called not in (apply_function, invoke)


def is_opaque(node: fx.Node, root: nn.Module) -> bool:
    """Tell whether a node is a module that runs by its own Python, or by that of its hooks."""
    if node.op != "call_module":
        return False
    module = root.get_submodule(str(node.target))
    return not is_layer(module) or has_hooks(module)


def arguments(node: fx.Node) -> tuple[Any, ...]:
    """Return the positional arguments of a call, without the ambient state that it may be wrapped in."""
    return node.args[2:] if node.target is under else node.args


def called(node: fx.Node, root: nn.Module) -> tuple[str, tuple[Any, ...]]:
    """Return the name of the function that a node calls, "" for a module, and its positional arguments."""
    if node.op not in ("call_function", "call_method"):
        return "", node.args
    args: tuple[Any, ...] = node.args
    if node.target is invoke:
        held = getattr(root, str(args[0].target))
        return str(getattr(held, "__name__", "")).lstrip("_").partition(".")[0], args[1:]
    name = str(getattr(function_of(node, root), "__name__", "")).removeprefix("__").removesuffix("__").lstrip("_")
    return name, arguments(node)


def moved_and_index(node: fx.Node, root: nn.Module) -> tuple[list[fx.Node], list[fx.Node]]:
    """Return the operands whose values an operation that rearranges moves, and those that say where from."""
    name, args = called(node, root)
    first = args[:1] or tuple(node.kwargs[key] for key in ("input", "self", "tensors") if key in node.kwargs)
    moved = list(_nodes(first))
    others = [n for n in node.all_input_nodes if n not in moved and INFO in n.meta]
    return moved, [] if name in _LIKE else others


def rearranges(node: fx.Node, root: nn.Module) -> bool:
    """Tell whether an operation only moves values: indexing, views, permutations, concatenation."""
    function = function_of(node, root)
    if isinstance(function, nn.Module):
        return isinstance(function, _MODULES)
    return called(node, root)[0] in REARRANGING


def picks_part(node: fx.Node) -> bool:
    """Tell whether a node picks one tensor out of a structured result; its name is that of the result and a dot."""
    info, results = node.meta.get(INFO), [n.meta[INFO].name for n in node.all_input_nodes if INFO in n.meta]
    return info is not None and any(info.name.startswith(f"{name}.") for name in results)


def takes_shape_only(node: fx.Node, root: nn.Module) -> bool:
    """Tell whether an operation reads no value of its tensor operand, only shape and dtype."""
    return _name(function_of(node, root)) in SHAPE_ONLY


def leaves_unset(node: fx.Node, root: nn.Module) -> bool:
    """Tell whether an operation gives memory as it is, for others to fill."""
    return _name(function_of(node, root)) in UNSET


def permutes_at_random(node: fx.Node, root: nn.Module) -> bool:
    """Tell whether the draws for a row depend on the other rows, so that draws per microbatch would differ."""
    info = node.meta.get(INFO)
    if info is None or not info.random:
        return False
    name = _name(function_of(node, root))
    bounds = node.args[:2] if name == "randint" else ()
    return name in _DRAWN_WHOLE or any(isinstance(bound, fx.Node) for bound in bounds)


def mixes_gradients(node: fx.Node, root: nn.Module) -> bool:
    """Tell whether an operation is known to mix rows in its backward only."""
    function = function_of(node, root)
    if isinstance(function, (nn.Embedding, nn.EmbeddingBag)):
        return function.scale_grad_by_freq
    position = _BY_FREQUENCY.get(_name(function)) if node.op == "call_function" else None
    if position is None:
        return False
    return bool(node.kwargs.get("scale_grad_by_freq", node.args[position] if len(node.args) > position else False))


def renormalises(node: fx.Node, root: nn.Module) -> bool:
    """Tell whether a node is a module that scales rows of a table before it looks them up, in the table itself."""
    function = function_of(node, root)
    modules = function.modules() if isinstance(function, nn.Module) else ()
    return any(getattr(module, "max_norm", None) is not None for module in modules)


def _nodes(value: Any) -> Iterator[fx.Node]:
    nodes: list[fx.Node] = []
    fx.node.map_arg(value, nodes.append)
    yield from nodes


def _name(function: Any) -> str:
    return str(getattr(function, "__name__", "")).strip("_")


# -- norms that keep statistics ----------------------------------------------------------------------------------------
def keeps_statistics(node: fx.Node, root: nn.Module) -> bool:
    """Tell whether a node writes buffers as batch norm does: per microbatch is what it is meant to do."""
    function = function_of(node, root)
    return isinstance(function, STATEFUL_LEAVES) or function in (F.batch_norm, F.instance_norm)


class NormsInEval(TorchFunctionMode):
    """Has ``F.batch_norm`` take the running statistics that it is given, as norm layers do in eval mode."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.batch_norm:
            return func(*args, **(kwargs or {}))
        return func(**by_name(func, args, kwargs or {}) | {"training": False})


def normalises_rows_apart(node: fx.Node, root: nn.Module) -> bool:
    """Tell whether a norm takes every row by itself, as instance norm does; only its running statistics average."""
    function = function_of(node, root)
    return isinstance(function, _InstanceNorm) or function is F.instance_norm


def counts_by_microbatch(node: fx.Node) -> bool:
    """Tell whether a node leaves something of each microbatch for an update of buffers: a norm, or a counter."""
    info = node.meta.get(INFO)
    return info is not None and bool(info.writes) and info.node_class is NodeClass.MICRO


def note_rewritten(graph: fx.Graph, root: nn.Module) -> None:
    """Write down at the nodes of a classified graph which buffers they take that the forward changes.

    What norms count by microbatch is changed when the step is over, and their second run does not read it.
    """
    written = {name for node in graph.nodes if INFO in node.meta for name in node.meta[INFO].writes}
    buffers = {name for name, _ in root.named_buffers()} & written
    for node in graph.nodes if buffers else ():
        if INFO in node.meta and not counts_by_microbatch(node):
            taken = tuple(name for name in sorted(buffers) if any(map(name.startswith, _paths(node))))
            node.meta[INFO] = replace(node.meta[INFO], rewritten=taken)


def _paths(node: fx.Node) -> list[str]:
    """Return what names of tensors begin with that a node takes from the model itself."""
    taken = [str(operand.target) for operand in node.all_input_nodes if operand.op == "get_attr"]
    return [*taken, f"{node.target}."] if node.op == "call_module" else taken


def batch_norms(traced: TracedGraph, node_class: NodeClass) -> list[fx.Node]:
    """Return the nodes of a class that are batch norms in training whose running statistics are the model's."""
    norms = (node for node, info in traced.compute_nodes() if info.writes and info.node_class is node_class)
    return [n for n in norms if keeps_statistics(n, traced.root) and not normalises_rows_apart(n, traced.root)]


def norm_notes(traced: TracedGraph) -> Iterator[str]:
    """Yield what is to be said of a recording's batch norms: whose numbers theirs are."""
    names = [node.meta[INFO].name for node in batch_norms(traced, NodeClass.MICRO)]
    whole = [node.meta[INFO].name for node in batch_norms(traced, NodeClass.FULL)]
    if names:
        layers = "1 batch norm layer normalises" if len(names) == 1 else f"{len(names)} batch norm layers normalise"
        yield (
            f"{layers} each microbatch by itself; running statistics move once per step, by all rows: the plain "
            f"model's for the first ({names[0]}), behind it those of what was normalised by microbatch"
        )
    if whole:
        layers = "1 batch norm layer sees" if len(whole) == 1 else f"{len(whole)} batch norm layers see"
        yield f"{layers} the whole batch, as in the plain model; what comes behind {whole[0]} does not overlap"
