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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from autosplit.trace.build import RawGraph
from autosplit.trace.graph import INFO, TensorInfo
from autosplit.trace.run import FlatInputs
from autosplit.trace.state import random_state
from autosplit.trace.structure import flatten_output, tensors_in

_COMPARED = 1 << 18
_LOOSE = {torch.float64: 1e-7, torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 5e-2}


@dataclass(frozen=True)
class Probe:
    """Names of the nodes in which rows influence each other, and the graph's outputs for the rows alone."""

    suspects: frozenset[str]
    outputs: tuple[Any, ...]
    alone: tuple[torch.Tensor, ...]
    """The input leaves of the run ``alone``."""


def probe_rows(leaf: torch.Tensor, dim: int, rows: Sequence[int], *, vary: bool = False) -> torch.Tensor:
    """Return the given rows of a sample; rows that it lacks are made from the others.

    ``vary`` changes integers and booleans too where rows would be equal; floating-point rows always differ.
    """
    count = leaf.shape[dim]
    return torch.cat([_row(leaf, dim, row, count, vary) for row in rows], dim).requires_grad_(leaf.requires_grad)


def _row(leaf: torch.Tensor, dim: int, row: int, count: int, vary: bool) -> torch.Tensor:
    piece = leaf.detach().narrow(dim, row % count, 1)
    same = count > 1 and torch.equal(piece, leaf.detach().narrow(dim, (row + 1) % count, 1))
    turn = row if same else row // count
    if turn and leaf.is_floating_point():
        piece = piece.reshape(-1).roll(turn).reshape(piece.shape)
        wave = torch.arange(piece.numel(), dtype=torch.float64, device=piece.device).add(1.7 * turn).sin()
        spread = piece.abs().max().nan_to_num(1.0, 1.0, 1.0).clamp(max=1e4).to(torch.float64)
        shift = (wave * (0.05 * spread + 0.01)).reshape(piece.shape)
        piece = piece + torch.where(piece.isfinite(), shift, 0).to(piece.dtype)
    elif turn and vary and not leaf.is_complex():
        flat = piece.reshape(-1).roll(turn)
        if bool((flat == flat[0]).all()) and row % 2:
            other = not flat[0] if leaf.dtype == torch.bool else abs(int(flat[0]) - 1)
            flat = torch.where(torch.arange(flat.numel(), device=flat.device) % (turn + 1) == 0, other, flat)
        piece = flat.to(leaf.dtype).reshape(piece.shape)
    elif turn:
        piece = piece.reshape(-1).roll(turn).reshape(piece.shape)
    return piece.clone()


def run_probe(raw: RawGraph, inputs: FlatInputs, *, kept: int) -> Probe:
    """Run the graph on rows of the sample and compare; call it under ``quiet_layers``, with state preserved.

    ``kept`` is how many rows are compared: the smallest microbatch for which the graph holds.
    """
    rows = tuple(range(1, kept + 1))
    among = (0, *rows, kept + 1, kept + 2)
    runs = {"alone": rows, "among": among, "beside": (kept + 4, *rows, kept + 6, kept + 3)}
    batched = [(inputs.leaves[i], d) for i in inputs.tensors() if (d := inputs.batch_dims[i]) is not None]
    vary = not any(_distinct(leaf, dim, kept + 7) for leaf, dim in batched)
    with torch.no_grad(), slow_attention():
        try:
            return _Lockstep(raw, _leaves(inputs, runs, vary), runs).run()
        except Exception:
            if not vary:
                raise
            return _Lockstep(raw, _leaves(inputs, runs, False), runs).run()


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
    def __init__(self, raw: RawGraph, leaves: dict[str, list[torch.Tensor]], rows: dict[str, tuple[int, ...]]) -> None:
        self.raw = raw
        self.rows = rows
        self.kept = len(rows["alone"])
        self.leaves = leaves
        self.untouched = tuple(leaf.clone() for leaf in leaves["alone"])
        self.runs = {name: fx.Interpreter(raw.root, graph=raw.graph) for name in rows}
        self.last: dict[fx.Node, list[fx.Node]] = {}
        seen: set[fx.Node] = set()
        for node in reversed(list(raw.graph.nodes)):
            fresh = [n for n in (*node.all_input_nodes, node) if n not in seen]
            seen.update(fresh)
            self.last[node] = fresh
        self.suspects: set[str] = set()
        self.failed: list[fx.Node] = []
        written = {name for n in raw.graph.nodes if INFO in n.meta for name in n.meta[INFO].writes}
        self.buffers = {name: raw.root.get_buffer(name) for name in sorted(written)}
        self.contents = {run: {name: b.clone() for name, b in self.buffers.items()} for run in rows}

    def run(self) -> Probe:
        order = list(self.raw.graph.nodes)
        position = 0
        for node in order[:-1]:
            for name, interpreter in self.runs.items():
                if node.op != "placeholder":
                    self._step(name, interpreter, node)
                elif INFO in node.meta:
                    interpreter.env[node] = self.leaves[name][position]
                else:
                    interpreter.env[node] = len(self.rows[name])
            if INFO in node.meta and node.op != "placeholder":
                self._compare(node)
            position += INFO in node.meta and node.op == "placeholder"
            for gone in self.last[node]:
                for interpreter in self.runs.values():
                    interpreter.env.pop(gone, None)
        alone = self.runs["alone"]
        outputs = fx.node.map_arg(order[-1].args[0], lambda n: alone.env[n])
        return Probe(frozenset(self.suspects), tuple(outputs), self.untouched)

    def _step(self, name: str, interpreter: fx.Interpreter, node: fx.Node) -> None:
        try:
            interpreter.env[node] = self._run_node(interpreter, node, self.contents[name])
        except Exception:
            if name != "alone" or INFO not in node.meta:
                raise
            self.failed.append(node)  # a row alone does not get this far: what it would give is taken from among

    def _run_node(self, interpreter: fx.Interpreter, node: fx.Node, own: dict[str, torch.Tensor]) -> Any:
        """Run a node with the run's own contents of the buffers that the graph changes."""
        info = node.meta.get(INFO)
        touched = [name for name in own if info is not None and name in (*info.reads, *info.writes)]
        for name in touched:
            self.buffers[name].copy_(own[name])
        value = interpreter.run_node(node)
        for name in touched:
            own[name].copy_(self.buffers[name])
        return value

    def _compare(self, node: fx.Node) -> None:
        info = node.meta[INFO]
        if not info.tensors:
            changed = [n for n in node.all_input_nodes if INFO in n.meta and n.meta[INFO].mutated]
            if any(self._differs(self._values(n), n.meta[INFO].tensors) for n in changed):
                self.suspects.add(info.name)
            return
        if node in self.failed:
            self.suspects.add(info.name)
            self._take_from_among(node, info.tensors)
            return
        if info.random:
            self._share_draws(node, info.tensors)
        if self._differs(self._values(node), info.tensors):
            self.suspects.add(info.name)

    def _values(self, node: fx.Node) -> dict[str, list[torch.Tensor]]:
        return {name: tensors_in(flatten_output(run.env[node])[0]) for name, run in self.runs.items()}

    def _share_draws(self, node: fx.Node, tensors: Sequence[TensorInfo]) -> None:
        """Draw again with equal generators among and beside; alone, take the rows' values from among."""
        for name in ("among", "beside"):
            with random_state():
                torch.manual_seed(0)
                self.runs[name].env[node] = self._run_node(self.runs[name], node, self.contents[name])
        self._take_from_among(node, tensors)

    def _take_from_among(self, node: fx.Node, tensors: Sequence[TensorInfo]) -> None:
        flat, rebuild = flatten_output(self.runs["among"].env[node])
        infos = iter(tensors)
        kept = [self._rows(leaf, next(infos)).clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in flat]
        self.runs["alone"].env[node] = rebuild(kept)

    def _rows(self, tensor: torch.Tensor, info: TensorInfo) -> torch.Tensor:
        """Return the compared rows of a tensor of the larger batch."""
        if info.batch_dim is None:
            return tensor
        factor = info.shape[info.batch_dim].per_row
        return tensor.narrow(info.batch_dim, factor, self.kept * factor)

    def _differs(self, values: dict[str, list[torch.Tensor]], tensors: Sequence[TensorInfo]) -> bool:
        for position, info in enumerate(tensors):
            alone, among, beside = (values[name][position] for name in ("alone", "among", "beside"))
            among, beside = self._rows(among, info), self._rows(beside, info)
            if not _same(among, beside, 0.0 if among.device.type == "cpu" else 1e-6):
                return True
            if not _same(among, alone, _LOOSE.get(among.dtype, 0.0)):
                return True
        return False


def _same(a: torch.Tensor, b: torch.Tensor, tolerance: float) -> bool:
    """Tell whether two tensors are equal, up to ``tolerance`` of the largest value; NaNs are equal to each other."""
    if a.shape != b.shape:
        return False
    if torch.equal(a, b):
        return True
    if not (a.is_floating_point() or a.is_complex()):
        return False
    if a.is_complex():
        a, b = torch.view_as_real(a.resolve_conj()), torch.view_as_real(b.resolve_conj())
    a, b = _sampled(a, tolerance), _sampled(b, tolerance)
    worst, scale = float((a - b).abs().max()), float(b.abs().max())
    if not (math.isfinite(worst) and math.isfinite(scale)):
        a, b = a.double().nan_to_num(), b.double().nan_to_num()
        worst, scale = float((a - b).abs().max()), float(b.abs().max())
    return worst <= tolerance * scale + (1e-12 if tolerance else 0.0)


def _sampled(tensor: torch.Tensor, tolerance: float) -> torch.Tensor:
    """Return evenly spread values of a large tensor where a comparison is loose, all of them where it is exact."""
    flat = tensor.detach().reshape(-1)
    return flat[:: flat.numel() // _COMPARED + 1] if tolerance else flat


@contextlib.contextmanager
def slow_attention() -> Iterator[None]:
    """Keep torch's encoder layers off their inference fast path, which gives padded rows other values."""
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)


def check_outputs(model: nn.Module, inputs: FlatInputs, probe: Probe) -> str | None:
    """Compare the graph's outputs with the model's own on the same rows; return what differs, or None."""
    leaves = list(inputs.leaves)
    for position, leaf in zip(inputs.tensors(), probe.alone, strict=True):
        leaves[position] = leaf
    args, kwargs = inputs.rebuild(leaves)
    with torch.no_grad(), slow_attention():
        expected = flatten_output(model.forward(*args, **kwargs))[0]
    if len(expected) != len(probe.outputs):
        return f"the model returns {len(expected)} values, the graph {len(probe.outputs)}"
    for number, (want, got) in enumerate(zip(expected, probe.outputs, strict=True)):
        if not isinstance(want, torch.Tensor):
            continue
        if want.shape != got.shape:
            return f"output {number} has shape {tuple(got.shape)} instead of {tuple(want.shape)}"
        if not _same(want, got, _LOOSE.get(want.dtype, 0.0) * 0.01):
            worst = float((want.detach().double() - got.double()).abs().max())
            return f"output {number} differs by {worst:.3g}"
    return None
