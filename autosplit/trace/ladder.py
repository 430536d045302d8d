"""From a model and its inputs to an accepted :class:`TracedGraph`.

record at few sizes ─► merge ─► fx graph ─► value probe (eval mode, real rows) ─► node classes ─► colocation, order
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import networkx as nx
import torch
from torch import fx, nn

from autosplit.errors import AutosplitError, TraceError, is_internal
from autosplit.options import Sample
from autosplit.trace.borrowed import state
from autosplit.trace.borrowed.blank import has_meta, home_of
from autosplit.trace.borrowed.writes import written_back
from autosplit.trace.check import check_recording
from autosplit.trace.graph import INFO, LEAST, InputInfo, Length, NodeClass, TracedGraph
from autosplit.trace.inputs.inputs import batch_rows, flatten
from autosplit.trace.inputs.objects import leaves_of
from autosplit.trace.proof import identity
from autosplit.trace.reads.reads import Guard, guard_of, without_reads
from autosplit.trace.recording.build import RawGraph, build
from autosplit.trace.recording.gather import Gathered, answering, gather, only_recorded, refuse_hiding
from autosplit.trace.recording.merge import MergedRecording
from autosplit.trace.recording.recording import Refusal, Unexpected
from autosplit.trace.recording.run import FlatInputs
from autosplit.trace.reductions.decompose import decompose, is_decomposed
from autosplit.trace.rows.classes import batched_nodes, classify, with_classes
from autosplit.trace.rows.findings import Findings, Proof
from autosplit.trace.rows.kinds import function_of, note_rewritten
from autosplit.trace.rows.probe import run_probe, run_probe_made_up
from autosplit.trace.rows.tallies import tallied_with
from autosplit.trace.scope import Casts, Scope
from autosplit.trace.shapes.generalise import Domain, for_one_row, generalise


@dataclass(frozen=True)
class Trace:
    """An accepted recording and what was found out on the way.

    Attributes:
        graph: the recording.
        inputs: the flattened sample with its batch dimensions.
        findings: what the value probe saw.
        guard: tells whether the recording holds for a batch; None where it holds for all.
        gathered: the merged recordings, and what was entered in them.
        domain: the lengths for which the recording holds; None: for those of the sample only.
        proof: what was proved of the recording, in a form that a plan can carry; None where there is none.
    """

    graph: TracedGraph
    inputs: FlatInputs
    findings: Findings
    guard: Guard | None
    gathered: Gathered
    domain: Domain | None = None
    proof: Proof | None = None

    @property
    def whole(self) -> dict[str, str]:
        """The modules of the model's own that stayed whole, with the reason."""
        return {path: opaque.reason for path, opaque in self.gathered.scope.opaque.items()}

    def check_rows(self, model: nn.Module, sample: Sample, rows: int) -> None:
        """Record once more at a batch size of the caller's; raise TraceError when the graph does not hold there."""
        flat = replace(self.inputs, leaves=tuple(leaves_of((sample.args, sample.kwargs))))
        try:
            self.gathered.check_rows(model, flat, rows)
        except Unexpected as error:
            _raise_own(model, flat, error.error)


def trace(
    model: nn.Module,
    sample: Sample,
    *,
    batch_dims: object = None,
    proofs: Sequence[Proof] = (),
    whole_norms: bool = False,
    made_up: bool = False,
    findings: Findings | None = None,
    blocks: Collection[str] = (),
    casts: Mapping[str, Casts] = MappingProxyType({}),
) -> Trace:
    """Record a model's forward in its present modes; the model and all random states are as before at the end.

    A recording is not proved again if one of ``proofs`` names it, or if ``findings`` are given, such as those of an
    equal recording in another process. With ``whole_norms`` norms that keep batch statistics are full.

    With ``made_up`` a model on meta is recorded as on the CPU and probed on made-up values; without it, shapes and
    kinds of operations say which nodes mix rows, which is enough for a plan but not for a run. A model that lies on
    several devices is recorded on the CPU and probed on copies; one on another device than its inputs is recorded on
    copies of the inputs there. Each module of ``blocks`` is one call; those in ``casts`` cast inputs and outputs.

    Raises TraceError when a graph cannot follow the model, InputError for inputs without a batch, and the model's own
    exception when its forward raises.
    """
    flat, home = _at_home(flatten(model, sample, batch_dims), model), home_of(model)
    on_cpu = flat.lie_apart(model) or (made_up and has_meta(model))
    with state.attributes(model):  # what borrows the model inside does not walk through its state again
        try:
            scope = Scope(whole_norms=whole_norms, on_cpu=on_cpu, home=home, blocks=frozenset(blocks), casts=casts)
            gathered = gather(model, flat, scope=scope)
        except Unexpected as error:
            _raise_own(model, flat, error.error)
        raw = _decomposed(model, gathered)
        fingerprint = identity(model, flat, gathered, raw)
        known = next((p for p in proofs if p.recording == fingerprint), None)
        proved = known is not None or findings is not None
        if findings is None:
            findings = _probe(model, flat, gathered, raw) if known is None else known.findings()
        graph = _accept(model, flat, gathered, raw, findings)
        refuse_hiding(model, gathered.scope, _opaque_once(graph))
        if not proved:
            _check(model, graph, flat, gathered)
        guard = guard_of(model, gathered.recording, gathered.scope)
        proof = known or (Proof.of(fingerprint, findings) if fingerprint is not None else None)
        return Trace(graph, flat, findings, guard, gathered, proof=proof)


def _at_home(flat: FlatInputs, model: nn.Module) -> FlatInputs:
    """Return inputs on the device of a model that lies on one, where they lie on another."""
    home = home_of(model)
    return flat.at(home) if home is not None and flat.lie_apart(model) else flat


def _check(model: nn.Module, graph: TracedGraph, flat: FlatInputs, gathered: Gathered) -> None:
    """Raise Refusal if a recording differs from the model; one that cannot run is recorded at two rows instead."""
    if only_recorded(model, gathered.scope):
        if LEAST not in gathered.sizes:
            gathered.check_rows(model, flat, LEAST)
        return
    difference = _difference(model, graph, flat, gathered)
    if difference is not None:
        raise Refusal(
            f"the recorded graph does not reproduce the model: {difference}; the forward does something that a graph "
            "cannot follow",
            "",
        )


def widen(
    model: nn.Module, base: Trace, sample: Sample, *, lengths: Sequence[Length], before: Sequence[tuple[int, ...]]
) -> Trace | None:
    """Return a recording for all lengths, made of one and a call at others; None where there is no such one.

    ``before`` are the shapes of the input tensors for which ``base`` was recorded; see
    :mod:`autosplit.trace.shapes.generalise`.
    """
    flat = _at_home(replace(base.inputs, leaves=tuple(leaves_of((sample.args, sample.kwargs)))), model)
    rows, merged, scope = batch_rows(flat), base.gathered.recording, base.gathered.scope
    generalised = generalise(model, merged, scope, flat, rows=rows, lengths=lengths, before=before)
    if generalised is None:
        return None
    merged, domain = generalised
    gathered = replace(base.gathered, recording=merged)
    raw = _decomposed(model, gathered)
    try:
        gathered.check_rows(model, flat, rows)
        seen = _probe(model, flat, gathered, raw)
    except (Refusal, Unexpected):
        return None
    if not seen.suspects | seen.mixing <= base.findings.suspects | base.findings.mixing:
        return None
    graph = _accept(model, flat, gathered, raw, base.findings)
    wide = Trace(graph, flat, base.findings, guard_of(model, merged, scope), gathered, domain=domain)
    return wide if rows >= LEAST else widen_to_one_row(model, wide, sample)


def for_all_rows(model: nn.Module, base: Trace, sample: Sample) -> Domain | None:
    """Return for which numbers of rows a recording without lengths holds, found out at a call's; None: not known."""
    flat = _at_home(replace(base.inputs, leaves=tuple(leaves_of((sample.args, sample.kwargs)))), model)
    merged, scope, rows = base.gathered.recording, base.gathered.scope, batch_rows(flat)
    generalised = generalise(model, merged, scope, flat, rows=rows, lengths=(), before=())
    return generalised and replace(generalised[1], single=() if base.gathered.min_rows == 1 else None)


def widen_to_one_row(model: nn.Module, wide: Trace, sample: Sample) -> Trace | None:
    """Return a recording for all lengths with the lengths for which it holds for one row too; None: for none."""
    assert wide.domain is not None
    flat = replace(wide.inputs, leaves=tuple(leaves_of((sample.args, sample.kwargs))))
    domain = for_one_row(model, wide.gathered.recording, wide.gathered.scope, flat, wide.domain)
    return None if domain is None else replace(wide, domain=domain)


def _difference(model: nn.Module, graph: TracedGraph, flat: FlatInputs, gathered: Gathered) -> str | None:
    """Return how a graph differs from the model; taken apart, its reductions add up in another order."""

    def check(recording: RawGraph | TracedGraph, *, loose: bool = False) -> str | None:
        answer, run = lambda _: answering(model, gathered.scope), gathered.recording.recording
        return check_recording(
            model, recording, flat, answers=answer, loose=loose, changes_python=bool(run.changed), logged=run.logged
        )

    difference = check(graph)
    if difference is None or not is_decomposed(graph.graph):
        return difference
    return check(_built(model, gathered)) or check(graph, loose=True)


def _opaque_once(graph: TracedGraph) -> set[str]:
    """Return the modules that are one node and run once per step."""
    nodes = ((node, info) for node, info in graph.compute_nodes() if info.node_class is NodeClass.FULL)
    return {info.module for node, info in nodes if node.op == "call_module"}


def _raise_own(model: nn.Module, flat: FlatInputs, error: Exception) -> None:
    """Raise the model's own exception if it raises on the sample itself, else say what the recording ran into."""
    if not any(p.is_meta for p in model.parameters()) and not flat.lie_apart(model):
        inputs = [leaf for leaf in flat.leaves if isinstance(leaf, torch.Tensor)]
        with state.borrowed(model), written_back(model), state.contents(inputs):
            try:
                args, kwargs = flat.rebuild(flat.leaves)
                model(*args, **kwargs)
            except Exception as raised:
                for note in getattr(error, "__notes__", ()):
                    raised.add_note(note)
                raise raised from None
    notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
    raise TraceError(
        f"recording failed at another batch size with {type(error).__name__}: {error}{notes}; if an input has its "
        "batch in another dimension, or none, say so by batch_dims="
    ) from error


def _probe(model: nn.Module, flat: FlatInputs, gathered: Gathered, raw: RawGraph) -> Findings:
    """Ask the value probe, the layers quiet; where there are no values the structure alone decides, or made-up ones."""
    scope = gathered.scope
    made_up = scope.on_cpu or flat.lie_elsewhere(model, scope.home)
    if not made_up and any(p.is_meta for p in model.parameters()):
        return Findings()
    with state.borrowed(model):
        state.norm_dropout_eval(model)
        try:
            return (run_probe_made_up if made_up else run_probe)(raw, flat, kept=gathered.min_rows)
        except AutosplitError:
            raise
        except Exception as error:
            if is_internal(error):
                raise
            raise Refusal(
                f"{'made-up values' if made_up else 'other rows of the sample'} could not be tried "
                f"({type(error).__name__}: {error}): an input may hold numbers of rows, or batch_dims= must say where "
                f"the batch is{'; give a sample that has values' if made_up else ''}",
                "",
            ) from error


def _built(model: nn.Module, gathered: Gathered) -> RawGraph:
    return build(model, gathered.recording, keep=without_reads(gathered.recording))


@state.no_collection()
def _decomposed(model: nn.Module, gathered: Gathered) -> RawGraph:
    """Build the graph of a recording, with its reductions taken apart."""
    raw = _built(model, gathered)
    decompose(raw, device=torch.device("cpu") if gathered.scope.on_cpu else gathered.scope.home)
    return raw


@state.no_collection()
def _accept(model: nn.Module, flat: FlatInputs, merged: Gathered, raw: RawGraph, findings: Findings) -> TracedGraph:
    """Classify a graph's nodes by what the probe found."""
    effects = raw.effects
    inputs = tuple(InputInfo(flat.names[index], index, flat.batch_dims[index]) for index in flat.tensors())
    batched = batched_nodes(raw.graph, effects, [f"input/{i.name}" for i in inputs if i.batch_dim is not None])
    classes = classify(raw.graph, raw.root, effects, batched, findings, whole_norms=merged.scope.whole_norms)
    with_classes(classes)
    _colocate(raw, merged.recording)
    note_rewritten(raw.graph, raw.root)
    dims = tuple(
        v.meta[INFO].tensors[0].batch_dim
        if isinstance(v, fx.Node) and INFO in v.meta and v.meta[INFO].node_class is NodeClass.MICRO
        else None
        for v in next(iter(reversed(raw.graph.nodes))).args[0]
    )
    return TracedGraph(
        graph=raw.graph,
        root=raw.root,
        inputs=inputs,
        order=tuple((a.name, b.name) for a, b in effects.pairs()),
        tied=_tied(model, raw),
        min_rows=merged.min_rows,
        unflatten=merged.recording.recording.unflatten,
        batch_outputs=dims,
        lengths=merged.recording.lengths,
        changed=merged.recording.recording.changed,
        kept=merged.recording.recording.kept,
        asks_grad_mode=merged.recording.recording.asks_grad_mode,
        checkpoints=merged.recording.recording.checkpoints,
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


def _colocate(raw: RawGraph, merged: MergedRecording) -> None:
    """Number the groups that must share a stage: parts of one result, users of changed state, shared leaves."""
    groups = [*raw.effects.storages, *raw.effects.buffers, *tallied_with(raw.graph, raw.root)]
    groups += [
        (node, raw.nodes[merged.calls[index].args[0].index])
        for index, node in raw.nodes.items()
        if merged.calls[index].call.kind == "project"
    ]
    readers: dict[str, list[fx.Node]] = defaultdict(list)
    for node in raw.graph.nodes:
        for name in node.meta[INFO].reads if INFO in node.meta else ():
            readers[name].append(node)
    for nodes in readers.values():  # parameters cannot be handed to a module of their own
        if len(nodes) > 1 and any(isinstance(function_of(node, raw.root), nn.Module) for node in nodes):
            groups.append(tuple(nodes))
    together: nx.Graph[fx.Node] = nx.Graph(pair for group in groups for pair in itertools.pairwise(group))
    numbers: dict[int, int] = {}
    component = {node: n for n, nodes in enumerate(nx.connected_components(together)) for node in nodes}
    for node in raw.graph.nodes:
        if INFO in node.meta and node.op != "placeholder" and node in component:
            group = numbers.setdefault(component[node], len(numbers))
            node.meta[INFO] = replace(node.meta[INFO], colocation_group=group)
