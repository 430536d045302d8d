"""How long every node takes on its device, measured on real tensors, and the model left as it was.

Nodes that do the same work - the same operation on the same shapes, as in the blocks of a transformer - share their
samples: the first one is warmed up and measured several times, each later one adds one sample, all get the median.
"""

from __future__ import annotations

import contextlib
import inspect
import statistics
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from autosplit.errors import InputError, ProfileError
from autosplit.profile.border import BorderInterpreter, epilogue_nodes
from autosplit.profile.shadow import shadow
from autosplit.trace.graph import INFO, TracedGraph, TracedNode
from autosplit.trace.state import random_state

_LONG_S = 0.1
"""A node whose first run takes longer than this is measured once."""


@dataclass(frozen=True)
class NodeTimes:
    """Median times of one node; ``backward_s`` is 0 for a node without a backward."""

    forward_s: float
    backward_s: float


@dataclass(frozen=True)
class MeasuredTimes:
    """Times by stable node name; ``full`` nodes and what depends on them are missing."""

    nodes: Mapping[str, NodeTimes]
    device: str


def measure(
    traced: TracedGraph, *, inputs: Sequence[torch.Tensor], rows: int, repeats: int = 3, threads: int = 1
) -> MeasuredTimes:
    """Time forward and backward of every shared and micro node on ``inputs`` of exactly ``rows`` batch rows.

    ``inputs`` are in the order of the placeholders; ``threads`` is the number of intra-op threads of the CPU, 1 as on a
    CPU lane. Parameters, gradients, buffers, attributes, inputs and random states are as before at the end, also
    after an error: the nodes run on a twin of the model. Raises ProfileError with a node's name when it fails.
    """
    epilogue = epilogue_nodes(traced)
    with torch.inference_mode(False):
        own = _own_inputs(traced, inputs, rows=rows)
        written = _written(traced)
        twin = shadow(traced.root, replace=lambda tensor: _private(tensor, shared=id(tensor) not in written))
    devices = [tensor.device for tensor in (*inputs, *twin.tensors)]
    device = next((device for device in devices if device.type != "cpu"), torch.device("cpu"))
    with random_state(), _threads(threads), torch.inference_mode(False), torch.enable_grad():
        timing = _Timing(twin.module, traced, _clock(device), repeats)
        timing.run(rows, *own, initial_env=dict.fromkeys(epilogue))
    return MeasuredTimes(timing.times(), str(device))


@dataclass
class _Samples:
    forward_s: list[float] = field(default_factory=list)
    backward_s: list[float] = field(default_factory=list)

    def add(self, run: _Run) -> None:
        self.forward_s.append(run.forward_s)
        self.backward_s.append(run.backward_s)

    def median(self) -> NodeTimes:
        return NodeTimes(statistics.median(self.forward_s), statistics.median(self.backward_s))


@dataclass(frozen=True)
class _Run:
    result: Any
    forward_s: float
    backward_s: float


_Clock = Callable[[Callable[[], Any]], tuple[Any, float]]
"""Run something and return its result and the seconds that the device spent on it."""


class _Timing(BorderInterpreter):
    """Interpret the graph and time every node."""

    def __init__(self, module: nn.Module, traced: TracedGraph, clock: _Clock, repeats: int) -> None:
        super().__init__(module, graph=traced.graph)
        self._clock = clock
        self._repeats = repeats
        self._samples: dict[Hashable, _Samples] = {}
        self._kinds: dict[str, Hashable] = {}

    def times(self) -> dict[str, NodeTimes]:
        """Return the median times of all nodes that ran."""
        medians = {kind: samples.median() for kind, samples in self._samples.items()}
        return {name: medians[kind] for name, kind in self._kinds.items()}

    def run_node(self, n: fx.Node) -> Any:
        """Run and time one node; inputs, sizes, attributes and the output just run."""
        info: TracedNode | None = n.meta.get(INFO)
        if info is None or n.op == "placeholder":
            return super().run_node(n)
        try:
            described = _described((n.args, n.kwargs), self.env)
            target = _described(self.fetch_attr(str(n.target)), {}) if n.op == "call_module" else n.target
            kind = self._kinds[info.name] = (n.op, target, described)
            if kind not in self._samples:
                self._samples[kind] = self._rehearse(n)
            run = self._once(n, private=False)
        except Exception as error:
            raise ProfileError(
                f"node {info.name!r} failed while it was measured: {type(error).__name__}: {error}; "
                "profile with measure=False to take its time from a cost model"
            ) from error
        self._samples[kind].add(run)
        return run.result

    def _rehearse(self, node: fx.Node) -> _Samples:
        """Warm the node up and measure it on copies, as often as its length allows."""
        samples = _Samples()
        warm = self._once(node, private=True)
        affordable = int(_LONG_S / max(warm.forward_s + warm.backward_s, 1e-9))
        for _ in range(min(self._repeats, affordable) - 1):
            samples.add(self._once(node, private=True))
        return samples

    def _once(self, node: fx.Node, *, private: bool) -> _Run:
        call = self.prepare(node, private=private)
        result, forward_s = self._clock(call.run)
        targets = call.targets(result)
        backward_s = 0.0
        if targets and call.leaves:
            ones = [torch.ones_like(target) for target in targets]
            _, backward_s = self._clock(lambda: torch.autograd.grad(targets, call.leaves, ones, allow_unused=True))
        return _Run(call.settle(result), forward_s, backward_s)


def _described(value: Any, env: Mapping[fx.Node, Any]) -> Hashable:
    """Return what determines the work that a node does with ``value``: equal work, equal description."""
    if isinstance(value, fx.Node):
        return _described(env[value], env)
    if isinstance(value, torch.Tensor):
        return (tuple(value.shape), value.stride(), value.dtype, value.requires_grad)
    if isinstance(value, (list, tuple)):
        return tuple(_described(item, env) for item in value)
    if isinstance(value, dict):
        return tuple((key, _described(item, env)) for key, item in value.items())
    if isinstance(value, slice):
        return ("slice", *(_described(item, env) for item in (value.start, value.stop, value.step)))
    if isinstance(value, nn.Module):
        return _described_module(value, env)
    try:
        hash(value)
    except TypeError:
        return id(value)
    return (type(value), value)


def _described_module(module: nn.Module, env: Mapping[fx.Node, Any]) -> Hashable:
    """Return class, settings and state of one of torch's layers; any other module is only like itself."""
    if any(not type(m).__module__.startswith("torch.nn.") or m._forward_hooks for m in module.modules()):
        return id(module)
    settings = (
        (type(part), key, repr(item))
        for part in module.modules()
        for key, item in part.__dict__.items()
        if isinstance(item, (bool, int, float, str, tuple, type(None))) or inspect.isroutine(item)
    )
    state = ((name, _described(t, env)) for name, t in (*module.named_parameters(), *module.named_buffers()))
    return (*settings, *state)


def _written(traced: TracedGraph) -> set[int]:
    """Return the ids of the parameters that some node writes to."""
    names = {name for _, info in traced.compute_nodes() for name in info.writes}
    return {id(tensor) for name, tensor in traced.root.named_parameters(remove_duplicate=False) if name in names}


def _private(tensor: torch.Tensor, *, shared: bool) -> torch.Tensor:
    """Return a parameter without gradient and hooks, in the same storage if ``shared``; copies of all else."""
    if isinstance(tensor, nn.Parameter):
        own = tensor.detach() if shared else tensor.detach().clone()
        return nn.Parameter(own, requires_grad=tensor.requires_grad)
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _own_inputs(traced: TracedGraph, inputs: Sequence[torch.Tensor], *, rows: int) -> list[torch.Tensor]:
    placeholders = [node for node in traced.graph.nodes if node.op == "placeholder" and INFO in node.meta]
    if len(inputs) != len(placeholders):
        raise InputError(f"the recording has {len(placeholders)} input tensors, got {len(inputs)}; give one for each")
    own = []
    for node, tensor in zip(placeholders, inputs, strict=True):
        expected = node.meta[INFO].tensors[0].shape_at(rows)
        if tuple(tensor.shape) != expected:
            raise InputError(
                f"{node.meta[INFO].name} has shape {tuple(tensor.shape)}, the recording at {rows} rows has {expected}; "
                f"give inputs of exactly {rows} batch rows"
            )
        copied = node.meta[INFO].mutated or tensor.is_inference()
        value = tensor.clone().detach() if copied else tensor.detach()
        own.append(value.requires_grad_(tensor.requires_grad))
    return own


@contextlib.contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _clock(device: torch.device) -> _Clock:
    """Return the clock of a device: the one place that asks what kind it is."""
    return _device_events if device.type == "cuda" else _wall_clock


def _wall_clock(run: Callable[[], Any]) -> tuple[Any, float]:
    start_s = time.perf_counter()
    result = run()
    return result, time.perf_counter() - start_s


def _device_events(run: Callable[[], Any]) -> tuple[Any, float]:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    result = run()
    end.record()
    end.synchronize()
    return result, start.elapsed_time(end) / 1e3
