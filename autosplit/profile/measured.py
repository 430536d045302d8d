"""How long every node takes on its device, measured on real tensors, and the model left as it was.

Nodes that do the same work - the same operation on the same shapes, as in the blocks of a transformer - share their
samples: the first one is warmed up and measured several times, each later one adds one sample, all get the median.

A node for which memory runs out is left out, and so is what needs its result; the others are measured.
"""

from __future__ import annotations

import contextlib
import re
import statistics
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from autosplit.backward import gradients
from autosplit.devices import Clock, clock_of, is_out_of_memory
from autosplit.errors import InputError, ProfileError
from autosplit.profile.node_costs.border import BorderInterpreter, Invocation, epilogue_nodes
from autosplit.profile.node_costs.shadow import Shadow, shadow
from autosplit.profile.stage_trace.described import called, value_kind
from autosplit.profile.types import MeasuredNode, MeasuredTimes, SplitBackward
from autosplit.profile.workspace_watch import WorkspaceWatch
from autosplit.progress import phase, update
from autosplit.trace.borrowed.state import random_state
from autosplit.trace.graph import INFO, TracedGraph, TracedNode
from autosplit.units import format_bytes
from autosplit.weight_gradients import DeferredWeightGrads, deferrable, uses_to_defer

_LONG_S = 0.1
"""A node whose first run takes longer than this is measured once."""


def measure(
    traced: TracedGraph,
    *,
    inputs: Sequence[torch.Tensor],
    rows: int,
    repeats: int = 3,
    threads: int = 1,
) -> MeasuredTimes:
    """Time forward and backward of every shared and micro node on ``inputs`` of exactly ``rows`` batch rows.

    ``inputs`` are in the order of the placeholders; ``threads`` is the number of intra-op threads of the CPU, 1 as on a
    CPU lane, whose CPU seconds count. A CUDA device's peak bytes are read beside the times. Parameters, gradients,
    buffers, attributes, inputs and random states are as before at the end, also after an error: the nodes run on a twin
    of the model. Where memory runs out, `MeasuredTimes.out_of_memory` says so; raises ProfileError with a node's name
    when it fails in another way.
    """
    tensors = (*inputs, *traced.root.parameters(), *traced.root.buffers())
    device = next((tensor.device for tensor in tensors if tensor.device.type != "cpu"), torch.device("cpu"))
    clock, short = clock_of(device, threads=threads), ""
    try:
        with torch.inference_mode(False):
            values, twin = _own_inputs(traced, inputs, rows=rows), _twin(traced)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        short = f"memory ran out on {device} for copies of inputs and buffers{_amount(error)}"
    if short:
        clock.release()
        return MeasuredTimes({}, str(device), {info.name: short for _, info in traced.compute_nodes()})
    with random_state(), intra_op_threads(threads), torch.inference_mode(False), torch.enable_grad():
        timing = _Timing(twin.module, traced, clock, repeats=repeats, device=device)
        with phase("measuring", total=sum(1 for _ in traced.compute_nodes())):
            timing.run(rows, *values, initial_env=dict.fromkeys(epilogue_nodes(traced)))
    clock.release()
    return MeasuredTimes(timing.measured(), str(device), timing.out_of_memory, timing.observed())


@dataclass(frozen=True)
class _TimedRun:
    forward_s: float
    backward_s: float
    forward_peak_bytes: int | None
    backward_peak_bytes: int | None
    defers: bool
    """Whether some weight gradient can wait."""


@dataclass
class _Samples:
    runs: list[_TimedRun] = field(default_factory=list)
    splits: list[SplitBackward] = field(default_factory=list)

    def summary(self) -> MeasuredNode:
        forwards_s, backwards_s = [run.forward_s for run in self.runs], [run.backward_s for run in self.runs]
        backward_s = statistics.median(backwards_s)
        split = SplitBackward(backward_s, 0.0)
        if self.splits:
            parts = [(sample.input_s, sample.weight_s) for sample in self.splits]
            split = SplitBackward(*map(statistics.median, zip(*parts, strict=True)))
        return MeasuredNode(
            forward_s=statistics.median(forwards_s),
            backward_s=backward_s,
            split=split,
            forward_range_s=_quartiles(forwards_s),
            backward_range_s=_quartiles(backwards_s),
            samples=len(self.runs),
            forward_peak_bytes=_highest([run.forward_peak_bytes for run in self.runs]),
            backward_peak_bytes=_highest([run.backward_peak_bytes for run in self.runs]),
        )


def _highest(peaks: Sequence[int | None]) -> int | None:
    """Return the highest of the peaks that were counted, at least 0; None where none was."""
    return max((max(peak, 0) for peak in peaks if peak is not None), default=None)


class _Timing(BorderInterpreter):
    """Interpret the graph and time every node."""

    def __init__(
        self, module: nn.Module, traced: TracedGraph, clock: Clock, *, repeats: int, device: torch.device
    ) -> None:
        super().__init__(module, graph=traced.graph)
        self.out_of_memory: dict[str, str] = {}
        self._watched = WorkspaceWatch(clock)
        self._clock = clock
        self._repeats = repeats
        self._where = device
        self._samples: dict[Hashable, _Samples] = {}
        self._kinds: dict[str, Hashable] = {}
        self._lost: dict[fx.Node, str] = {}

    def measured(self) -> dict[str, MeasuredNode]:
        """Return what was measured of all nodes that ran."""
        summaries = {kind: self._samples[kind].summary() for kind in set(self._kinds.values())}
        return {name: summaries[kind] for name, kind in self._kinds.items()}

    def observed(self) -> Mapping[str, int] | None:
        """Return what the device's kernels held beside their results; None where bytes are not counted."""
        return self._watched.scratch if self._clock.warms else None

    def run_node(self, n: fx.Node) -> Any:
        """Run and time one node; inputs, sizes, attributes and the output just run."""
        info: TracedNode | None = n.meta.get(INFO)
        cause = next((self._lost[node] for node in n.all_input_nodes if node in self._lost), None)
        if cause is not None and n.op != "output":
            return self._lose(n, cause, f"it needs {cause!r}, for which memory ran out on {self._where}")
        if info is None or n.op == "placeholder":
            return super().run_node(n)
        update(len(self._kinds))
        try:
            return self._time(n, info)
        except Exception as error:
            if not is_out_of_memory(error):
                raise ProfileError(
                    f"node {info.name!r} failed while it was measured: {type(error).__name__}: {error}; "
                    "profile with measure=False to take its time from a cost model"
                ) from error
            short = f"memory ran out on {self._where} while it was measured{_amount(error)}"
        self._kinds.pop(info.name, None)
        self._clock.release()
        return self._lose(n, info.name, short)

    def _lose(self, node: fx.Node, cause: str, reason: str) -> None:
        """Note that a node has no result, and why."""
        self._lost[node] = cause
        if INFO in node.meta:
            self.out_of_memory[node.meta[INFO].name] = reason

    def _time(self, node: fx.Node, info: TracedNode) -> Any:
        kind = called(node, self.module, {operand: value_kind(self.env[operand]) for operand in node.all_input_nodes})
        if kind not in self._samples:
            self._samples[kind] = self._rehearse(node)
        result, run = self._once(node, private=False)
        self._samples[kind].runs.append(run)
        self._kinds[info.name] = kind
        return result

    def _rehearse(self, node: fx.Node) -> _Samples:
        """Warm the node up and measure it on copies, as often as its length allows.

        Where the first run loads kernels its length says nothing: a second one tells. The first is watched instead.
        """
        samples = _Samples()
        if self._clock.warms:
            with self._watched:
                self._once(node, private=True)
        warm = self._once(node, private=True)[1]
        affordable = min(self._repeats, int(_LONG_S / max(warm.forward_s + warm.backward_s, 1e-9)))
        for _ in range(affordable - 1):
            samples.runs.append(self._once(node, private=True)[1])
        if warm.defers:
            samples.splits = [self._split(node) for _ in range(max(1, affordable))]
        return samples

    def _once(self, node: fx.Node, *, private: bool) -> tuple[Any, _TimedRun]:
        """Run a node; return its result, and what that took."""
        call, clock = self.prepare(node, private=private), self._clock
        before = clock.held_bytes() or 0
        forward = clock.timed(call.run)
        backward_s, backward_peak, defers = 0.0, None, False
        if targets := _targets(call, forward.result):
            defers = bool(deferrable(targets, _weights(call)))
            ones = [torch.ones_like(target) for target in targets]
            backward = clock.timed(lambda: _backward(call, targets, ones))
            backward_s, backward_peak = backward.seconds, backward.peak_bytes
        return call.settle(forward.result), _TimedRun(
            forward.seconds,
            backward_s,
            None if forward.peak_bytes is None else forward.peak_bytes - before,
            None if backward_peak is None else backward_peak - before,
            defers,
        )

    def _split(self, node: fx.Node) -> SplitBackward:
        """Time the node's backward in two parts, as the runtime makes it."""
        call, clock = self.prepare(node, private=True), self._clock
        targets = _targets(call, call.run())
        ones = [torch.ones_like(target) for target in targets]
        uses = uses_to_defer(targets, _weights(call), {id(leaf) for leaf in call.leaves})  # of one cell in a step

        def input_gradient() -> DeferredWeightGrads:
            deferred = DeferredWeightGrads.of(uses)
            wanted = [leaf for leaf in call.leaves if id(leaf) not in deferred.leaves]
            if wanted or deferred.edges:
                grads = gradients(targets, ones, [*wanted, *deferred.edges], keep=False)
                deferred.catch(grads[len(wanted) :])
            return deferred

        first = clock.timed(input_gradient)
        rest = clock.timed(lambda: [list(product.gradients()) for product in first.result.products])
        return SplitBackward(first.seconds, rest.seconds)


def _targets(call: Invocation, result: Any) -> list[torch.Tensor]:
    """Return where the node's backward starts; nothing where it has none."""
    return call.targets(result) if call.leaves else []


def _weights(call: Invocation) -> set[int]:
    return {id(leaf) for leaf in call.leaves if isinstance(leaf, nn.Parameter)}


def _backward(call: Invocation, targets: Sequence[torch.Tensor], ones: Sequence[torch.Tensor]) -> None:
    gradients(targets, ones, call.leaves, keep=False)


def _quartiles(samples: Sequence[float]) -> tuple[float, float]:
    if len(samples) < 2:
        return samples[0], samples[0]
    low, _, high = statistics.quantiles(samples, n=4, method="inclusive")
    return low, high


def _amount(error: Exception) -> str:
    """Return how much was asked for when memory ran out, where the error tells."""
    asked = re.search(r"tried to allocate ([0-9.]+) (bytes|[KMGTP]iB)", str(error), re.IGNORECASE)
    if asked is None:
        return ""
    size = format_bytes(float(asked[1])) if asked[2].lower() == "bytes" else f"{asked[1]} {asked[2]}"
    return f" (it asked for {size})"


def _twin(traced: TracedGraph) -> Shadow:
    written = _written(traced)
    return shadow(traced.root, replace=lambda tensor: _private(tensor, shared=id(tensor) not in written))


def _written(traced: TracedGraph) -> set[int]:
    """Return the ids of the parameters that some node writes to."""
    names = {name for _, info in traced.compute_nodes() for name in info.writes}
    return {id(tensor) for name, tensor in traced.root.named_parameters(remove_duplicate=False) if name in names}


def _private(tensor: torch.Tensor, *, shared: bool) -> torch.Tensor:
    """Return a parameter without gradient and hooks, in the same storage if ``shared``; copies of all else."""
    if isinstance(tensor, nn.Parameter):
        data = tensor.detach() if shared else tensor.detach().clone()
        return nn.Parameter(data, requires_grad=tensor.requires_grad)
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _own_inputs(traced: TracedGraph, inputs: Sequence[torch.Tensor], *, rows: int) -> list[torch.Tensor]:
    placeholders = [node for node in traced.graph.nodes if node.op == "placeholder" and INFO in node.meta]
    if len(inputs) != len(placeholders):
        raise InputError(f"the recording has {len(placeholders)} input tensors, got {len(inputs)}; give one for each")
    values = []
    for node, tensor in zip(placeholders, inputs, strict=True):
        expected = node.meta[INFO].tensors[0].shape_at(rows)
        if tuple(tensor.shape) != expected:
            raise InputError(
                f"{node.meta[INFO].name} has shape {tuple(tensor.shape)}, the recording at {rows} rows has {expected}; "
                f"give inputs of exactly {rows} batch rows"
            )
        copied = node.meta[INFO].mutated or tensor.is_inference()
        value = tensor.clone().detach() if copied else tensor.detach()
        values.append(value.requires_grad_(tensor.requires_grad))
    return values


@contextlib.contextmanager
def intra_op_threads(count: int) -> Iterator[None]:
    """Compute with so many threads of the CPU in a block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
