"""The value probe: do rows influence each other? Asked of real values on few rows.

    alone    rows        1
    among    rows      0 1 2 3    another batch size: counts, means, batch-sized sources, rows that change places
    beside   rows      5 1 7 4    other neighbours, same sizes: any difference in the last bit is influence

A model in which one row behaves differently is asked about two rows, 1 and 2, instead. The three runs go through the
graph in lockstep, so that no more values live than one run needs. Rows that a sample lacks, or that are all equal in
it, are made up: equal rows would hide their influence.
"""

from __future__ import annotations

import contextlib
import math
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx

from autosplit.compare import same_bits, same_reordered, same_rounded
from autosplit.errors import AutosplitError, ForeignSuppressed, is_internal
from autosplit.progress import phase
from autosplit.trace.borrowed.state import random_state
from autosplit.trace.borrowed.surroundings import on_other_rows
from autosplit.trace.graph import INFO, LENGTH, TensorInfo, TracedNode, lengths_in
from autosplit.trace.inputs.objects import take_apart
from autosplit.trace.reads.assertions import check_value
from autosplit.trace.reads.watch import READS
from autosplit.trace.recording.build import RawGraph
from autosplit.trace.recording.recording import OBSERVES
from autosplit.trace.recording.run import FlatInputs
from autosplit.trace.rows.backward_probe import BackwardProbe, has_own_backward
from autosplit.trace.rows.findings import Findings, key_of_opaque
from autosplit.trace.rows.grouped import grouped
from autosplit.trace.rows.kinds import NormsInEval, is_opaque, keeps_statistics, leaves_unset
from autosplit.trace.rows.made_up import FILLS, MadeUp
from autosplit.trace.rows.opaque_probe import OpaqueProbe, run_observing
from autosplit.trace.rows.operator_probe import OperatorProbe
from autosplit.trace.rows.row_values import range_of, tensors_of


def probe_rows(leaf: torch.Tensor, dim: int, rows: Sequence[int], *, vary: bool = False) -> torch.Tensor:
    """Return the given rows of a sample; rows that it lacks are made from the others.

    ``vary`` changes integers and booleans too where rows would be equal; floating-point rows always differ.
    """
    count = leaf.shape[dim]
    return torch.cat([_row(leaf, dim, row, count, vary) for row in rows], dim).requires_grad_(leaf.requires_grad)


def probe_inputs(inputs: FlatInputs, rows: int) -> list[torch.Tensor]:
    """Return the tensors of a sample at a number of rows; those on meta, and without a batch, as they are."""
    pairs = [(inputs.leaves[index], inputs.batch_dims[index]) for index in inputs.tensors()]
    return [leaf if dim is None or leaf.is_meta else probe_rows(leaf, dim, range(rows)) for leaf, dim in pairs]


def _row(leaf: torch.Tensor, dim: int, row: int, count: int, vary: bool) -> torch.Tensor:
    piece = leaf.detach().narrow(dim, row % count, 1)
    same = count > 1 and torch.equal(piece, leaf.detach().narrow(dim, (row + 1) % count, 1))
    turn = 0 if not piece.numel() else row if same else row // count
    if turn and leaf.is_floating_point():
        piece = piece.reshape(-1).roll(turn).reshape(piece.shape)
        low, high = _range(leaf)
        wave = torch.arange(piece.numel(), dtype=torch.float64, device=piece.device).add(1.7 * turn).sin()
        towards = (low + (high - low) * (0.5 + 0.5 * wave)).reshape(piece.shape)
        piece = torch.where(piece.isfinite(), 0.9 * piece + 0.1 * towards, piece).to(piece.dtype)
    elif turn and vary and not leaf.is_complex():
        flat = piece.reshape(-1).roll(turn)
        if bool((flat == flat[0]).all()) and row % 2:
            other = not flat[0] if leaf.dtype == torch.bool else abs(int(flat[0]) - 1)
            flat = torch.where(torch.arange(flat.numel(), device=flat.device) % (turn + 1) == 0, other, flat)
        piece = flat.to(leaf.dtype).reshape(piece.shape)
    elif turn:
        piece = piece.reshape(-1).roll(turn).reshape(piece.shape)
    return piece.clone()


def _range(leaf: torch.Tensor) -> tuple[float, float]:
    """Return bounds for made-up values: the sample's own, so that probabilities stay probabilities."""
    low, high = range_of(leaf.detach())
    if low == high:
        spread = 0.05 * min(abs(low), 1e4) + 0.1
        bounds = (0.0, 1.0) if 0.0 <= low <= 1.0 else (-math.inf, math.inf)
        low, high = max(bounds[0], low - spread), min(bounds[1], high + spread)
    return low, high


@phase("tracing: do rows meet")
def run_probe(raw: RawGraph, inputs: FlatInputs, *, kept: int, values: MadeUp | None = None) -> Findings:
    """Find the nodes in which rows influence each other.

    The graph runs on rows of the sample; call it under ``norm_dropout_eval``, with state preserved. ``kept`` rows are
    compared: the smallest microbatch for which the graph holds. ``values`` stand in for those of a model on meta.
    """
    rows = tuple(range(1, kept + 1))
    among = (0, *rows, kept + 1, kept + 2)
    runs = {"alone": rows, "among": among, "beside": (kept + 4, *rows, kept + 6, kept + 3)}
    batched = [(inputs.leaves[i], d) for i in inputs.tensors() if (d := inputs.batch_dims[i]) is not None]
    vary = not any(_distinct(leaf, dim, kept + 7) for leaf, dim in batched)
    count = max((leaf.shape[dim] for leaf, dim in batched), default=0)
    with torch.no_grad(), on_other_rows():
        if vary:
            with ForeignSuppressed():  # the model's exceptions, for tokens or flags that are made up
                return _Lockstep(raw, _leaves(inputs, runs, True), runs, count, values).run()
        return _Lockstep(raw, _leaves(inputs, runs, False), runs, count, values).run()


def run_probe_made_up(raw: RawGraph, inputs: FlatInputs, *, kept: int) -> Findings:
    """Do as `run_probe` for a model or a sample on meta, on values that are made up.

    If each kind of values hides some influence (by NaN or infinity), the findings of all kinds are combined.
    """
    findings: list[Findings] = []
    errors: list[Exception] = []
    for fill in FILLS:
        values = MadeUp(raw, fill)
        try:
            with torch.device("cpu"), values.written():
                seen = run_probe(raw, values.sample(inputs, rows=kept + 7), kept=kept, values=values)
        except Exception as error:  # the model's or torch's, for values that it does not take
            if isinstance(error, AutosplitError) or is_internal(error):
                raise
            traceback.clear_frames(error.__traceback__)  # they hold the values that were made up
            errors.append(error)
            continue
        if not values.hides:
            return seen
        findings.append(seen)
    if not findings:
        raise errors[0]
    return Findings(
        True,
        frozenset().union(*(seen.suspects for seen in findings)),
        frozenset().union(*(seen.mixing for seen in findings)),
        frozenset.intersection(*(seen.alone for seen in findings)),
    )


def _leaves(inputs: FlatInputs, runs: dict[str, tuple[int, ...]], vary: bool) -> dict[str, list[torch.Tensor]]:
    pairs = [(inputs.leaves[i], inputs.batch_dims[i]) for i in inputs.tensors()]
    return {
        name: [leaf.clone() if dim is None else probe_rows(leaf, dim, rows, vary=vary) for leaf, dim in pairs]
        for name, rows in runs.items()
    }


def _distinct(leaf: torch.Tensor, dim: int, rows: int) -> bool:
    """Tell whether the first rows of a sample differ, or will be made to."""
    if leaf.is_floating_point():
        return True
    first = leaf.narrow(dim, 0, 1)
    return any(not torch.equal(first, leaf.narrow(dim, r, 1)) for r in range(1, min(rows, leaf.shape[dim])))


class _Lockstep:
    def __init__(
        self,
        raw: RawGraph,
        leaves: dict[str, list[torch.Tensor]],
        rows: dict[str, tuple[int, ...]],
        sample_rows: int,
        values: MadeUp | None,
    ) -> None:
        self.raw = raw
        self.made_up = values
        self.rows = rows
        self.kept = len(rows["alone"])
        self.leaves = leaves
        self.lengths = lengths_in(raw.lengths, [tensor.shape for tensor in leaves["alone"]])
        self.runs = {
            name: fx.Interpreter(raw.root, graph=raw.graph) if values is None else values.interpreter() for name in rows
        }
        self.sorts = grouped(raw.graph, raw.root)
        self.orders: dict[tuple[str, fx.Node], torch.Tensor] = {}
        self.last: dict[fx.Node, list[fx.Node]] = {}
        seen: set[fx.Node] = set()
        # rows that are made up need not pass the model's own checks
        self.order = [node for node in raw.graph.nodes if node.target is not check_value]
        for node in reversed(self.order):
            fresh = [n for n in (*node.all_input_nodes, node) if n not in seen]
            seen.update(fresh)
            self.last[node] = fresh
        self.suspects: set[str] = set()
        self.mixing: set[str] = set()
        self.alone: set[str] = set()
        self.operators = OperatorProbe(
            raw.graph,
            raw.root,
            self.runs["among"],
            rows=len(rows["among"]),
            lengths=self.lengths,
            sample_rows=sample_rows,
        )
        self.failed: list[fx.Node] = []
        written = {name for n in raw.graph.nodes if INFO in n.meta for name in n.meta[INFO].writes}
        self.buffers = {name: raw.root.get_buffer(name) for name in sorted(written)}
        self.contents = {run: {name: b.clone() for name, b in self.buffers.items()} for run in rows}

    def run(self) -> Findings:
        position = 0
        for node in self.order[:-1]:
            if node.op == "placeholder":
                for name, interpreter in self.runs.items():
                    length = self.lengths.get(node.meta.get(LENGTH, ""), len(self.rows[name]))
                    interpreter.env[node] = self.leaves[name][position] if INFO in node.meta else length
                position += INFO in node.meta
            else:
                with contextlib.nullcontext() if self.made_up is None else self.made_up.at(node):
                    self._visit(node)
            for gone in self.last[node]:
                if INFO in gone.meta or gone.op == "get_attr":  # sizes are worked out at other numbers of rows
                    for interpreter in self.runs.values():
                        interpreter.env.pop(gone, None)
        return Findings(True, frozenset(self.suspects), frozenset(self.mixing), frozenset(self.alone))

    def _visit(self, node: fx.Node) -> None:
        """Ask a node, run it in all runs, and compare them."""
        computes = INFO in node.meta
        if computes:
            self._ask_operator(node)
        for name, interpreter in self.runs.items():
            self._step(name, interpreter, node)
        if computes:
            self._compare(node)
            self._compare_backward(node)
        if computes and self.made_up is not None:
            self.made_up.note(tensors_of(self.runs["among"].env[node]))

    def _ask_operator(self, node: fx.Node) -> None:
        info = node.meta[INFO]
        if node in self.sorts.sorting:
            return
        if info.whole.startswith(READS) and is_opaque(node, self.raw.root):
            probe = OpaqueProbe(node, self.raw.root, self.runs["among"], rows=len(self.rows["among"]))
            if probe.treats_rows_alone():
                self.alone.add(key_of_opaque(info.name, self.raw.root.get_submodule(info.module)))
        with self._own_contents(info, self.contents["among"]):
            mixes = self.operators.mixes(node, self.suspects)
        moved = self.operators.is_moved(node)
        if moved:
            self.suspects.add(info.name)
        if mixes or (node in self.sorts.order and moved):
            self._note_mixing(node)

    def _note_mixing(self, node: fx.Node) -> None:
        self.suspects.add(node.meta[INFO].name)
        self.mixing.add(node.meta[INFO].name)

    def _note_difference(self, node: fx.Node) -> None:
        """Note that a row has other values beside other rows: as mixing, unless its rows are known to be moved."""
        if node in self.sorts.sorting or self.operators.is_moved(node):
            self.suspects.add(node.meta[INFO].name)
        else:
            self._note_mixing(node)

    def _step(self, name: str, interpreter: fx.Interpreter, node: fx.Node) -> None:
        try:
            interpreter.env[node] = self._run_node(interpreter, node, self.contents[name])
        except Exception as error:
            if name != "alone" or INFO not in node.meta or is_internal(error):
                raise
            self.failed.append(node)  # a row alone does not get this far: what it would give is taken from among

    def _run_node(self, interpreter: fx.Interpreter, node: fx.Node, contents: dict[str, torch.Tensor]) -> Any:
        """Run a node with the run's own contents of the buffers that the graph changes."""
        info = node.meta.get(INFO)
        if info is None:
            return interpreter.run_node(node)
        quiet = NormsInEval() if info.writes and keeps_statistics(node, self.raw.root) else contextlib.nullcontext()
        with self._own_contents(info, contents) as touched:
            with quiet:
                observes = info.whole.startswith(OBSERVES)
                value = run_observing(interpreter, node) if observes else interpreter.run_node(node)
            if leaves_unset(node, self.raw.root):
                value.detach().zero_()  # what lay in that memory says nothing about rows
            for name in touched:
                contents[name].copy_(self.buffers[name])
        return value

    @contextlib.contextmanager
    def _own_contents(self, info: TracedNode, contents: dict[str, torch.Tensor]) -> Iterator[list[str]]:
        """Put a run's own contents into the buffers that a node touches; yield their names."""
        touched = [name for name in contents if name in (*info.reads, *info.writes)]
        for name in touched:
            self.buffers[name].copy_(contents[name])
        yield touched

    def _compare(self, node: fx.Node) -> None:
        info = node.meta[INFO]
        if not info.tensors:
            changed = [n for n in node.all_input_nodes if INFO in n.meta and n.meta[INFO].mutated]
            loose = node in self.sorts.back
            if any(self._differs(self._values(n), n.meta[INFO].tensors, loose=loose) for n in changed):
                self._note_difference(node)
            elif loose:
                for n in changed:
                    self._equalize(self._values(n), n.meta[INFO].tensors)
            return
        if node in self.failed:
            self._note_mixing(node)
            self._take_from_among(node, info.tensors)
            return
        if info.random:
            self._share_draws(node, info.tensors)
        if self.sorts.order.get(node) is node:
            for name, run in self.runs.items():
                order = run.env[node]
                self.orders[name, node] = order if isinstance(order, torch.Tensor) else order[1]
        values = self._put_back(node, self._values(node))
        opaque = is_opaque(node, self.raw.root)
        loose = node in self.sorts.order or node in self.sorts.back
        if self._differs(values, info.tensors, loose=loose, rounds=opaque):
            self._note_difference(node)
        elif node in self.sorts.back or opaque:
            self._equalize(values, info.tensors)

    def _compare_backward(self, node: fx.Node) -> None:
        info = node.meta[INFO]
        if info.random or node in self.failed or not has_own_backward(node, self.raw.root):
            return
        rows = len(self.rows["among"])
        with self._own_contents(info, self.contents["among"]):
            probe = BackwardProbe(node, self.runs["among"], rows=rows, kept=self.kept)
            if probe.mixes():
                self.mixing.add(info.name)

    def _values(self, node: fx.Node) -> dict[str, list[torch.Tensor]]:
        return {name: tensors_of(run.env[node]) for name, run in self.runs.items()}

    def _put_back(self, node: fx.Node, values: dict[str, list[torch.Tensor]]) -> dict[str, list[torch.Tensor]]:
        """Return sorted rows in the order that they had before the sort."""
        sort = self.sorts.order.get(node)
        if sort is None:
            return values
        back = {name: self.orders[name, sort].argsort() for name in values}
        return {name: [tensor.index_select(0, back[name]) for tensor in tensors] for name, tensors in values.items()}

    def _equalize(self, values: dict[str, list[torch.Tensor]], tensors: Sequence[TensorInfo]) -> None:
        """Give the compared rows the same last bits: in groups of other sizes, other kernels compute them."""
        for position, info in enumerate(tensors):
            among, beside = values["among"][position], values["beside"][position]
            self._rows(beside, info).copy_(self._rows(among, info))

    def _share_draws(self, node: fx.Node, tensors: Sequence[TensorInfo]) -> None:
        """Draw again with equal generators among and beside; alone, take the rows' values from among."""
        for name in ("among", "beside"):
            with random_state():
                torch.manual_seed(0)
                self.runs[name].env[node] = self._run_node(self.runs[name], node, self.contents[name])
        self._take_from_among(node, tensors)

    def _take_from_among(self, node: fx.Node, tensors: Sequence[TensorInfo]) -> None:
        flat, rebuild = take_apart(self.runs["among"].env[node])
        infos = iter(tensors)
        kept = [self._rows(leaf, next(infos)).clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in flat]
        self.runs["alone"].env[node] = rebuild(kept)

    def _rows(self, tensor: torch.Tensor, info: TensorInfo) -> torch.Tensor:
        """Return the compared rows of a tensor of the larger batch."""
        if info.batch_dim is None:
            return tensor
        factor = tensor.shape[info.batch_dim] // len(self.rows["among"])
        return tensor.narrow(info.batch_dim, factor, self.kept * factor)

    def _differs(
        self,
        values: dict[str, list[torch.Tensor]],
        tensors: Sequence[TensorInfo],
        *,
        loose: bool = False,
        rounds: bool = False,
    ) -> bool:
        for position, info in enumerate(tensors):
            alone, among, beside = (values[name][position] for name in ("alone", "among", "beside"))
            among, beside = self._rows(among, info), self._rows(beside, info)
            same = same_reordered if loose else same_rounded if rounds else same_bits
            if not same(among, beside) or not same_reordered(among, alone):
                return True
        return False
