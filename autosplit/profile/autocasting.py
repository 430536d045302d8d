"""A recording as it is under autocast: a model on paper is recorded without it, and its nodes' dtypes follow here.

recorded      float32 ─► linear float32 ─► layer_norm float32
under amp     float32 ─► linear bfloat16 ─► layer_norm float32      by CUDA's lists of operations, or the CPU's
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import fx, nn

from autosplit.errors import is_internal
from autosplit.profile.blocks import shorten_graph, templates
from autosplit.profile.lowering import CudaKernels, cuda_autocast
from autosplit.profile.node_costs.border import BorderInterpreter, tensors_of
from autosplit.profile.node_costs.fake import empty_value, fake_mode
from autosplit.profile.node_costs.shadow import shadow
from autosplit.trace.borrowed.blank import fake
from autosplit.trace.borrowed.state import random_state
from autosplit.trace.graph import INFO, TracedGraph, TracedNode
from autosplit.trace.recording.run import quiet_log

AUTOCASTS = {"amp_bf16": torch.bfloat16, "amp_fp16": torch.float16}
"""What autocast casts to, by precision."""
_CPU = torch.device("cpu")


@contextlib.contextmanager
def autocast_of(precision: str | None, *, kernels: Literal["cpu", "cuda"]) -> Iterator[None]:
    """Switch autocast on for a block where the precision is one of autocast, as it is for such kernels."""
    dtype = AUTOCASTS.get(precision or "")
    if dtype is None:
        yield
    else:
        with cuda_autocast(dtype) if kernels == "cuda" else torch.autocast("cpu", dtype):
            yield


def set_dtypes(traced: TracedGraph, *, kernels: Literal["cpu", "cuda"]) -> None:
    """Give the nodes of a recording the dtypes that their results have under the autocast that is on.

    A node that cannot run on fake tensors keeps those that were recorded.
    """
    graph, runs = shorten_graph(traced)
    mode, rows = fake_mode(), max(2, traced.min_rows)
    with random_state(), torch.inference_mode(False), torch.no_grad(), quiet_log(), mode:
        twin = shadow(traced.root, replace=lambda tensor: fake(tensor, mode), nodes=graph.nodes)
        run = _Dtypes(twin.module, graph, rows, kernels)
        inputs = [empty_value(node, rows, needs_grad=False) for node in graph.nodes if _is_input(node)]
        run.run(rows, *inputs)
    like = templates(runs)
    for node, info in traced.compute_nodes():
        dtypes = run.dtypes.get(like.get(node, node).meta[INFO].name, ())
        if len(dtypes) == len(info.tensors):
            tensors = tuple(replace(tensor, dtype=dtype) for tensor, dtype in zip(info.tensors, dtypes, strict=True))
            node.meta[INFO] = replace(info, tensors=tensors)


def _is_input(node: fx.Node) -> bool:
    return node.op == "placeholder" and INFO in node.meta


class _Dtypes(BorderInterpreter):
    """Runs the nodes one by one; ``found`` are the dtypes of their results, by stable name."""

    def __init__(self, module: nn.Module, graph: fx.Graph, rows: int, kernels: Literal["cpu", "cuda"]) -> None:
        super().__init__(module, graph=graph, device=_CPU)
        self.dtypes: dict[str, tuple[torch.dtype, ...]] = {}
        self._rows = rows
        self._lowering = CudaKernels() if kernels == "cuda" else contextlib.nullcontext()

    def run_node(self, n: fx.Node) -> Any:
        info: TracedNode | None = n.meta.get(INFO)
        if info is None or n.op == "placeholder":
            return super().run_node(n)
        try:
            with self._lowering:
                result = self.prepare(n).run()
        except Exception as error:  # whatever its author wrote, or torch lacks on fake tensors
            if is_internal(error):
                raise
            return empty_value(n, self._rows, needs_grad=False)
        self.dtypes[info.name] = tuple(tensor.dtype for tensor in tensors_of(result))
        return result
