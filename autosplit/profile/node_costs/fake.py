"""What every node of a recording costs, from one run on fake tensors: nothing is allocated, no value is computed.

Every fake tensor lives on the CPU, wherever the model is: fake CUDA tensors that require grad abort the process without
a GPU, and "meta" tensors take other kernels.

    first pass    shared and micro nodes at ``rows``      ──► ids of the storages by node
    second pass   full nodes, on a batch of ``batch_rows``      equal values, equal ids
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

from autosplit.errors import ProfileError, is_internal
from autosplit.profile.lowering import CudaKernels
from autosplit.profile.node_costs.assumptions import error_text, parameters_met, why_estimated
from autosplit.profile.node_costs.border import BorderInterpreter, Invocation, Picks, epilogue_nodes, tensors_of
from autosplit.profile.node_costs.ledger import Ledger, Operation, Storage
from autosplit.profile.node_costs.shadow import Shadow, shadow
from autosplit.profile.types import NodeProfile
from autosplit.trace.borrowed.blank import fake
from autosplit.trace.borrowed.state import random_state
from autosplit.trace.graph import INFO, TracedGraph, TracedNode
from autosplit.trace.recording.run import quiet_log

_CPU = torch.device("cpu")
_SECOND = 1 << 32
"""The first id of a storage that a second pass makes."""


def fake_costs(
    traced: TracedGraph,
    *,
    rows: int,
    batch_rows: int,
    input_grads: Sequence[bool] | None = None,
    kernels: Literal["cpu", "cuda"] = "cpu",
) -> dict[str, NodeProfile]:
    """Return the costs of every node, by stable name in model order, inputs excluded; without seconds.

    Micro and shared nodes are run at ``rows`` batch rows, full nodes at ``batch_rows``. ``input_grads`` says which
    inputs require a gradient (None: none of them). The costs are those of training, also when gradients are switched
    off around the call. ``kernels``: whose kernels run: what they save, allocate and compute.
    """
    runs = FakeRuns(traced, input_grads=input_grads, kernels=kernels)
    costs = {**runs.micro(rows), **runs.full(batch_rows, rows=rows)}
    return {info.name: costs[info.name] for _, info in traced.compute_nodes()}


class FakeRuns:
    """The costs of the nodes of one recording at several sizes, as `fake_costs` has them, each made once."""

    def __init__(
        self,
        traced: TracedGraph,
        *,
        input_grads: Sequence[bool] | None = None,
        kernels: Literal["cpu", "cuda"] = "cpu",
    ) -> None:
        self.traced, self.kernels = traced, kernels
        self.grads = input_grads if input_grads is not None else [False] * len(traced.inputs)
        self.epilogue = epilogue_nodes(traced)
        self._micro: dict[int, _Swept] = {}
        self._full: dict[Hashable, _Swept] = {}

    def micro(self, rows: int) -> dict[str, NodeProfile]:
        """Return the costs of the micro and shared nodes at ``rows`` batch rows."""
        return self._micro_pass(rows).costs

    def full(self, batch_rows: int, *, rows: int) -> dict[str, NodeProfile]:
        """Return the costs of the full nodes on ``batch_rows``; storages are those of the others at ``rows``."""
        if not self.epilogue:
            return {}
        known_ids = self._micro_pass(rows).output_ids
        key = batch_rows, tuple(map(tuple, known_ids.values()))
        if key not in self._full:
            self._full[key] = self._swept(self.epilogue, known_ids, batch_rows, skip=frozenset())
        return self._full[key].costs

    def _micro_pass(self, rows: int) -> _Swept:
        if rows not in self._micro:
            nodes = frozenset(node for node, _ in self.traced.compute_nodes()) - self.epilogue
            self._micro[rows] = self._swept(nodes, {}, rows, skip=self.epilogue)
        return self._micro[rows]

    def _swept(
        self, nodes: frozenset[fx.Node], known_ids: Mapping[str, list[int]], rows: int, *, skip: frozenset[fx.Node]
    ) -> _Swept:
        """Return a pass over the graph; what a second one makes has ids of its own."""
        mode, ledger = fake_mode(), Ledger(kernels=self.kernels)
        ledger.entered = _SECOND if known_ids else 0
        with random_state(), torch.inference_mode(False), torch.enable_grad():
            twin = shadow(self.traced.root, replace=lambda tensor: fake(tensor, mode), nodes=self.traced.graph.nodes)
            with quiet_log(), mode, ledger:
                run = _FakePass(self.traced, twin, ledger, nodes, known_ids)
                run.sweep(rows, self.grads, skip=skip)
        return _Swept(run.costs, run.output_ids)


@dataclass(frozen=True)
class _Swept:
    """What a pass says of its nodes, and the ids of the storages of all results, by stable name."""

    costs: dict[str, NodeProfile]
    output_ids: dict[str, list[int]]


class _FakePass(BorderInterpreter):
    """One sweep over the graph: profiles the nodes in ``profiled`` and runs the others plainly."""

    def __init__(
        self,
        traced: TracedGraph,
        twin: Shadow,
        ledger: Ledger,
        profiled: frozenset[fx.Node],
        known_ids: Mapping[str, list[int]],
    ) -> None:
        super().__init__(twin.module, graph=traced.graph, device=_CPU)
        self.costs: dict[str, NodeProfile] = {}
        self.output_ids: dict[str, list[int]] = {}
        self._ledger = ledger
        self._lowering = CudaKernels() if ledger.kernels == "cuda" else contextlib.nullcontext()
        self._profiled = profiled
        self._known_ids = known_ids
        self._saved: dict[int, int] = {}
        self._rows = 0
        self._state_ids = {storage.id for t in twin.tensors if (storage := ledger.storage(t))}

    def sweep(self, rows: int, input_grads: Sequence[bool], *, skip: frozenset[fx.Node]) -> None:
        """Run the graph at ``rows`` batch rows, without the nodes in ``skip``."""
        self._rows = rows
        inputs: list[torch.Tensor] = []
        placeholders = [node for node in self.graph.nodes if node.op == "placeholder" and INFO in node.meta]
        for node, needs_grad in zip(placeholders, input_grads, strict=True):
            tensor = _empty(node.meta[INFO], rows)[0].requires_grad_(needs_grad)
            inputs.append(tensor)
            if storage := self._ledger.storage(tensor):
                self._state_ids.add(storage.id)
        with saved_tensors_hooks(self._pack, lambda tensor: tensor):
            self.run(rows, *inputs, initial_env=dict.fromkeys(skip))

    def run_node(self, n: fx.Node) -> Any:
        """Run one node; profile it when it is one of this sweep's."""
        info: TracedNode | None = n.meta.get(INFO)
        if info is None or n.op == "placeholder":
            return super().run_node(n)
        self._ledger.open()
        self._saved = {}
        before = self._ledger.live_bytes
        call = self.prepare(n)
        try:
            with self._lowering:
                result = call.run()
        except Exception as error:
            if is_internal(error):
                raise
            return self._estimate(n, call, error)
        settled = call.settle(result)
        if n in self._profiled:
            self.costs[info.name] = self._profile(info, call, result, before=before)
        self._number(info, settled)
        return settled

    def _profile(self, info: TracedNode, call: Invocation, result: Any, *, before: int) -> NodeProfile:
        ledger = self._ledger
        alive = max(before, ledger.live_bytes)
        forward_transient_bytes = max(0, ledger.peak_bytes - alive)
        forward = tuple(ledger.operations)
        saved, problem = dict(self._saved), None
        ledger.open()
        targets = call.targets(result)
        if targets and call.leaves:
            try:
                ones = [torch.empty_like(target) for target in targets]
                grads = torch.autograd.grad(targets, call.leaves, ones, allow_unused=True)
                del ones, grads
            except Exception as error:
                if is_internal(error):
                    raise
                problem = f"its backward did not run alone: {error_text(error)}"
        backward = tuple(ledger.operations)
        backward_transient_bytes = max(0, ledger.peak_bytes - alive)
        if problem is not None:
            backward = forward + forward
            backward_transient_bytes = _bytes(targets) + _bytes(call.leaves)
        return NodeProfile(
            name=info.name,
            forward_operations=forward,
            backward_operations=backward,
            output_bytes=_bytes(tensors_of(result)),
            saved=saved,
            outputs=self._storages(tensors_of(result)),
            forward_transient_bytes=forward_transient_bytes,
            backward_transient_bytes=backward_transient_bytes,
            requires_grad=any(tensor.requires_grad for tensor in tensors_of(result)),
            estimated=problem,
        )

    def _estimate(self, node: fx.Node, call: Invocation, error: Exception) -> Any:
        """Return values of the recorded shapes for a node that cannot run on fake tensors, with guessed costs.

        Every parameter is taken to meet every output position once, those of experts their share of the positions; the
        backward to cost twice as much.
        """
        info: TracedNode = node.meta[INFO]
        values = _empty(info, self._rows)
        needs_grad = bool(call.leaves)
        for value in values:
            value.requires_grad_(needs_grad and value.dtype.is_floating_point)
        if node in self._profiled:
            inputs = [t for t in call.leaves if not isinstance(t, nn.Parameter)]
            module = self.fetch_attr(str(node.target)) if node.op == "call_module" else None
            parameters = [t.numel() for t in call.leaves if isinstance(t, nn.Parameter)]
            weights = sum(parameters) if module is None else parameters_met(module)
            positions = values[0].numel() // max(1, values[0].shape[-1] if values[0].dim() else 1)
            moved = _bytes(values) + _bytes(inputs)
            work = Operation("unknown", 2 * weights * positions, moved, values[0].dtype)
            self.costs[info.name] = NodeProfile(
                name=info.name,
                forward_operations=(work,),
                backward_operations=(work, work) if needs_grad else (),
                output_bytes=_bytes(values),
                saved=self._storages(inputs),
                outputs=self._storages(values),
                forward_transient_bytes=0,
                backward_transient_bytes=(moved + _bytes(call.leaves)) * needs_grad,
                requires_grad=needs_grad,
                estimated=why_estimated(error, module=module),
            )
        self._number(info, values)
        return as_recorded(node, values, self._rows)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        if not _is_cast_of_parameter(tensor):
            self._saved |= self._storages([tensor])
        return tensor

    def _storages(self, tensors: Sequence[torch.Tensor]) -> dict[int, int]:
        """Map ids to bytes; storages of the model's state and of its inputs left out."""
        storages: list[Storage | None] = [self._ledger.storage(tensor) for tensor in tensors]
        return {s.id: s.bytes for s in storages if s is not None and s.bytes and s.id not in self._state_ids}

    def _number(self, info: TracedNode, result: Any) -> None:
        """Note the ids of a result's storages, or give them those of the pass before."""
        storages = [self._ledger.storage(tensor) for tensor in tensors_of(result)]
        known = self._known_ids.get(info.name, ())
        for storage, number in zip(storages, known, strict=False):
            if storage is not None and number >= 0:
                storage.id = number
        self.output_ids[info.name] = [-1 if storage is None else storage.id for storage in storages]


def _is_cast_of_parameter(tensor: torch.Tensor) -> bool:
    """Tell whether autocast made a tensor of a parameter: that is kept once per step, whatever is in flight."""
    if not (torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")):
        return False
    node, casts = tensor.grad_fn, False
    while node is not None and len(node.next_functions) == 1:
        casts |= node.name() == "ToCopyBackward0"
        node = node.next_functions[0][0]
    return casts and isinstance(getattr(node, "variable", None), nn.Parameter)


@contextlib.contextmanager
def on_fakes(what: str) -> Iterator[None]:
    """Raise ProfileError for what the user's code raises on fake tensors, or torch lacks there."""
    try:
        yield
    except Exception as error:
        if isinstance(error, ProfileError) or is_internal(error):
            raise
        raise ProfileError(f"{what} does not run on fake tensors ({error_text(error)})") from error


def fake_mode() -> FakeTensorMode:
    """Return a mode for fake tensors that allows real ones, such as numbers that a forward makes."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def empty_value(node: fx.Node, rows: int, *, needs_grad: bool, users: Collection[fx.Node] | None = None) -> Any:
    """Return what a node gives at ``rows`` batch rows, as new tensors of the recorded shapes and dtypes.

    Of a nested result only what the ``users`` pick (None: all nodes of the graph).
    """
    values = _empty(node.meta[INFO], rows)
    for value in values:
        value.requires_grad_(needs_grad and (value.dtype.is_floating_point or value.dtype.is_complex))
    return as_recorded(node, values, rows, users=users)


def as_recorded(
    node: fx.Node, values: Sequence[torch.Tensor], rows: int, *, users: Collection[fx.Node] | None = None
) -> Any:
    """Return the tensors of a node's result in the form in which the graph, or the ``users``, take them apart."""
    picked = _picked(node, f"{node.meta[INFO].name}.", list(values), rows, users)
    return picked or (values[0] if len(values) == 1 else tuple(values))


def _picked(
    parent: fx.Node, inside: str, free: list[torch.Tensor], rows: int, users: Collection[fx.Node] | None
) -> Picks:
    """Return the parts of a nested result as they are picked; empty where nobody picks any."""
    picks = Picks()
    for user in parent.users if users is None else [user for user in parent.users if user in users]:
        info: TracedNode | None = user.meta.get(INFO)
        if user.target not in (operator.getitem, getattr) or user.args[0] is not parent:
            continue
        if info is None:
            picks.setdefault(user.args[1], Picks()).update(_picked(user, inside, free, rows, users))
        elif info.name.startswith(inside):
            kind = info.tensors[0].shape_at(rows), info.tensors[0].dtype
            index = next(i for i, value in enumerate(free) if (tuple(value.shape), value.dtype) == kind)
            picks[user.args[1]] = free.pop(index)
    return picks


def _empty(info: TracedNode, rows: int) -> list[torch.Tensor]:
    return [torch.empty(tensor.shape_at(rows), dtype=tensor.dtype) for tensor in info.tensors]


def _bytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
