"""From a model and its inputs to an accepted :class:`TracedGraph`.

record at 3, 4 and 6 rows ─► merge ─► fx graph ─► value probe (eval mode, real rows) ─► node classes ─► colours, order
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.utils._pytree as pytree
from torch import fx, nn

from autosplit.errors import InputError, TraceError
from autosplit.options import Sample
from autosplit.trace import state
from autosplit.trace.build import RawGraph, build
from autosplit.trace.classes import batched_nodes, classify, with_classes
from autosplit.trace.effects import Effects, effects
from autosplit.trace.findings import Findings
from autosplit.trace.graph import INFO, InputInfo, NodeClass, TracedGraph
from autosplit.trace.inputs import alternatives, batch_rows, flatten
from autosplit.trace.kinds import function_of
from autosplit.trace.merge import BATCH_SIZES, MergedRecording, matches, merge
from autosplit.trace.probe import check_outputs, run_probe
from autosplit.trace.record import STATEFUL_LEAVES, Call
from autosplit.trace.run import FlatInputs, record


@dataclass(frozen=True)
class Trace:
    """An accepted recording and what was found out on the way.

    Attributes:
        graph: the recording.
        inputs: the flattened sample with its batch dimensions.
        findings: what the value probe saw; hand it to the next `trace` of the same model in another mode.
    """

    graph: TracedGraph
    inputs: FlatInputs
    findings: Findings
    merged: _Merged

    def check_rows(self, model: nn.Module, sample: Sample, rows: int) -> None:
        """Record once more at a batch size of the caller's; raise TraceError when the graph does not hold there."""
        leaves = pytree.tree_leaves((sample.args, sample.kwargs))
        _check_rows(model, replace(self.inputs, leaves=tuple(leaves)), self.merged, rows)


def trace(model: nn.Module, sample: Sample, *, batch_dims: object = None, findings: Findings | None = None) -> Trace:
    """Record a model's forward in its present modes; the model and all random states are as before at the end.

    Raises TraceError when a graph cannot follow the model, InputError for inputs whose batch cannot be told, and the
    model's own exception when its forward raises.
    """
    flat = flatten(model, sample, batch_dims)
    try:
        merged, flat = _merged_or_alternative(model, flat, told=batch_dims is not None)
        _check_rows(model, flat, merged, batch_rows(flat))
    except TraceError:
        raise
    except InputError:
        raise
    except Exception as error:
        _raise_own(model, flat, error)
    names = frozenset(m.call.name for m in merged.recording.calls)
    if findings is None or not names <= findings.probed:
        seen = _probe(model, flat)
        before = findings or Findings()
        findings = Findings(before.probed | seen.probed | names, before.suspects | seen.suspects)
    return Trace(_accept(model, flat, merged, findings), flat, findings, merged)


@dataclass(frozen=True)
class _Merged:
    recording: MergedRecording
    min_rows: int
    entered: frozenset[str]


def _check_rows(model: nn.Module, flat: FlatInputs, merged: _Merged, rows: int) -> None:
    again = record(model, flat, rows=rows, entered=merged.entered, hooks=False)
    if not matches(merged.recording, again, rows=rows):
        raise TraceError(
            f"forward does other things at {rows} rows than at {', '.join(map(str, BATCH_SIZES))}: Python code depends "
            "on the number of rows; a graph holds for all batch sizes only when sizes are a*rows + b"
        )


def _merged_or_alternative(model: nn.Module, flat: FlatInputs, *, told: bool) -> tuple[_Merged, FlatInputs]:
    try:
        return _merged(model, flat), flat
    except Exception as first:
        found = []
        for other in () if told else alternatives(flat):
            try:
                found.append((_merged(model, other), other))
            except Exception:  # any failure only says that this reading of the inputs is wrong
                continue
        if len(found) == 1:
            return found[0]
        if found:
            readings = "; or ".join(_reading(other) for _, other in found)
            raise InputError(
                f"the inputs' batch dimensions are ambiguous: {readings}; say which by batch_dims="
            ) from first
        raise


def _reading(flat: FlatInputs) -> str:
    return ", ".join(f"{name}: {dim}" for name, dim in zip(flat.names, flat.batch_dims, strict=True))


def _merged(model: nn.Module, flat: FlatInputs) -> _Merged:
    entered: frozenset[str] = frozenset()
    while True:
        first = record(model, flat, rows=BATCH_SIZES[0], entered=entered)
        more = _to_enter(model, first.calls) - entered
        if not more:
            break
        entered |= more
    recordings = [first, *(record(model, flat, rows=rows, entered=entered) for rows in BATCH_SIZES[1:])]
    merged = merge(recordings)
    try:
        holds = matches(merged, record(model, flat, rows=1, entered=entered), rows=1)
    except Exception:  # whatever one row does to the model, microbatches of one row are then not made
        holds = False
    return _Merged(merged, 1 if holds else 2, entered)


def _uses(calls: Sequence[Call]) -> dict[str, list[Call]]:
    uses: dict[str, list[Call]] = defaultdict(list)
    for call in calls:
        for name in dict.fromkeys(call.reads):
            uses[name].append(call)
    return uses


def _to_enter(model: nn.Module, calls: Sequence[Call]) -> frozenset[str]:
    """Return the leaf modules whose parameters are used more than once: inside them, the parameter is a value."""
    parameters = dict(model.named_parameters())
    found: set[str] = set()
    for name, users in _uses(calls).items():
        if name in parameters and len(users) > 1:
            found.update(c.leaf for c in users if c.leaf is not None and _enterable(model.get_submodule(c.leaf)))
    return frozenset(found)


def _enterable(module: nn.Module) -> bool:
    hooked = any((module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks))
    return not hooked and not isinstance(module, (nn.RNNBase, *STATEFUL_LEAVES))


def _raise_own(model: nn.Module, flat: FlatInputs, error: Exception) -> None:
    """Raise the model's own exception if it raises on the sample itself, else say what the recording ran into."""
    if not any(p.is_meta for p in model.parameters()):
        with state.random_state(), state.attributes(model), state.buffer_contents(model):
            try:
                args, kwargs = flat.rebuild(flat.leaves)
                model(*args, **kwargs)
            except Exception as own:
                for note in getattr(error, "__notes__", ()):
                    own.add_note(note)
                raise own from None
    notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
    raise TraceError(
        f"recording failed at another batch size with {type(error).__name__}: {error}{notes}; if an input has its "
        "batch in another dimension, or none, say so by batch_dims="
    ) from error


def _probe(model: nn.Module, flat: FlatInputs) -> Findings:
    """Ask the value probe; a model on meta has no values, there the structure alone decides."""
    if any(p.is_meta for p in model.parameters()):
        return Findings()
    with state.random_state(), state.attributes(model), state.buffer_contents(model), state.quiet_layers(model):
        found = _merged(model, flat)
        raw = build(model, found.recording)
        marked = _mark(raw, found.recording)
        with state.attributes(model), state.buffer_contents(model):
            probe = run_probe(raw, flat, kept=found.min_rows)
        infos = [node.meta[INFO] for node in raw.graph.nodes if INFO in node.meta]
        random = any(info.random for info in infos)
        difference = None if random else check_outputs(model, flat, probe)
    if difference is not None:
        raise TraceError(
            f"the recorded graph does not reproduce the model: {difference} ({len(marked.flow)} in-place effects); the "
            "forward does something that a graph cannot follow"
        )
    return Findings(frozenset(info.name for info in infos), probe.suspects)


def _mark(raw: RawGraph, merged: MergedRecording) -> Effects:
    found = effects([m.call for m in merged.calls], raw.nodes)
    for node in found.mutated:
        if INFO in node.meta:
            node.meta[INFO] = replace(node.meta[INFO], mutated=True)
    return found


def _accept(model: nn.Module, flat: FlatInputs, merged: _Merged, findings: Findings) -> TracedGraph:
    raw = build(model, merged.recording)
    found = _mark(raw, merged.recording)
    inputs = tuple(InputInfo(flat.names[index], index, flat.batch_dims[index]) for index in flat.tensors())
    batched = batched_nodes(raw.graph, found, [f"input/{i.name}" for i in inputs if i.batch_dim is not None])
    classes = classify(raw.graph, raw.root, found, batched, findings)
    with_classes(raw.graph, classes)
    _colour(raw, found, merged.recording)
    output = next(iter(reversed(raw.graph.nodes))).args[0]
    dims = tuple(
        v.meta[INFO].tensors[0].batch_dim
        if isinstance(v, fx.Node) and INFO in v.meta and v.meta[INFO].node_class is NodeClass.MICRO
        else None
        for v in output
    )
    return TracedGraph(
        graph=raw.graph,
        root=raw.root,
        inputs=inputs,
        order=tuple((a.name, b.name) for a, b in found.pairs()),
        tied=_tied(model, raw),
        min_rows=merged.min_rows,
        unflatten=merged.recording.recording.unflatten,
        batch_outputs=dims,
    )


def _tied(model: nn.Module, raw: RawGraph) -> tuple[str, ...]:
    """Return the parameters that are operands of several nodes."""
    parameters: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
    free = raw.root.__dict__.items()
    parameters |= {n: t for n, t in free if isinstance(t, torch.Tensor) and t.requires_grad}
    users: dict[str, int] = defaultdict(int)
    for node in raw.graph.nodes:
        if node.op == "get_attr" and node.target in parameters:
            users[node.target] += 1
    return tuple(name for name, count in users.items() if count > 1)


def _colour(raw: RawGraph, found: Effects, merged: MergedRecording) -> None:
    """Give one colour to nodes that must share a stage: parts of one result, users of changed state, shared leaves."""
    leader: dict[fx.Node, fx.Node] = {}

    def find(node: fx.Node) -> fx.Node:
        while leader.get(node, node) is not node:
            node = leader[node]
        return node

    groups = [*found.storages, *found.buffers]
    groups += [
        (node, raw.nodes[merged.calls[index].args[0].index])
        for index, node in raw.nodes.items()
        if merged.calls[index].call.kind == "project"
    ]
    readers: dict[str, list[fx.Node]] = defaultdict(list)
    for node in raw.graph.nodes:
        for name in node.meta[INFO].reads if INFO in node.meta else ():
            readers[name].append(node)
    groups += [
        tuple(nodes) for nodes in readers.values() if len(nodes) > 1 and any(_holds_state(n, raw.root) for n in nodes)
    ]
    for first, *rest in groups:
        for other in rest:
            leader[find(other)] = find(first)
    numbers: dict[fx.Node, int] = {}
    sizes: dict[fx.Node, int] = defaultdict(int)
    for node in leader:
        sizes[find(node)] += 1
    for node in raw.graph.nodes:
        if INFO in node.meta and node.op != "placeholder" and (node in leader or sizes[find(node)]):
            colour = numbers.setdefault(find(node), len(numbers))
            node.meta[INFO] = replace(node.meta[INFO], colour=colour)


def _holds_state(node: fx.Node, root: nn.Module) -> bool:
    """Tell whether a node reads its parameters from a module of its own, so that they cannot be handed to it."""
    return isinstance(function_of(node, root), nn.Module)
