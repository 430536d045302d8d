"""A planned recording as the module that one rank of a tensor-parallel group runs, on parts of a whole model."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import fx, nn

from autosplit.tensor.build import rank_recording
from autosplit.tensor.collectives import Sharing, local_part
from autosplit.tensor.plan import TensorPlan
from autosplit.tensor.ways import REPLICATED
from autosplit.trace.graph import TracedGraph


def rank_graph(
    traced: TracedGraph,
    plan: TensorPlan,
    *,
    group: dist.ProcessGroup | None = None,
    rank: int | None = None,
    alone: bool = False,
) -> fx.GraphModule:
    """Return the module that runs a recording on one rank of a group; it has the model's own names for its parts.

    ``alone``: it sends nothing.
    """
    rank = dist.get_rank(group) if rank is None else rank
    return _Alone(rank_recording(traced, plan, Sharing(rank, plan.ranks, group, alone=alone)), plan, rank).module()


def rank_elements(plan: TensorPlan) -> float:
    """Return the elements of parameters that a rank has; a parameter of several names counts once per name."""
    return sum(
        plan.elements[name] / (1 if placement is REPLICATED else plan.ranks)
        for name, placement in plan.parameters.items()
    )


class _Alone:
    """A rank's recording as a module, with parts of a model that is whole."""

    def __init__(self, own: TracedGraph, plan: TensorPlan, rank: int) -> None:
        self.own, self.plan, self.rank = own, plan, rank
        self._parts: dict[int, nn.Parameter] = {}

    def module(self) -> fx.GraphModule:
        """Return it; it has the names of parameters that its graph does not read, too."""
        root: dict[str, Any] = {}
        for node in self.own.graph.nodes:
            if node.op in ("call_module", "get_attr"):
                path, _, name = str(node.target).rpartition(".")
                value: Any = getattr(self.own.root.get_submodule(path) if path else self.own.root, name)
                root[str(node.target)] = self._part(node.target, value) if isinstance(value, nn.Parameter) else value
        module = fx.GraphModule(root, self.own.graph, class_name="RankGraph")
        for name, parameter in self.own.root.named_parameters(remove_duplicate=False):
            path, _, last = name.rpartition(".")
            holder: nn.Module = module
            for part in path.split(".") if path else ():
                if part not in holder._modules:
                    holder.add_module(part, nn.Module())
                holder = holder.get_submodule(part)
            if last not in holder._parameters:
                holder.register_parameter(last, self._part(name, parameter))
        return module

    def _part(self, name: Any, parameter: nn.Parameter) -> nn.Parameter:
        if id(parameter) not in self._parts:
            placement = self.plan.parameters.get(name, REPLICATED)
            part = local_part(parameter.detach(), placement, self.rank, self.plan.ranks)
            whole = placement is REPLICATED
            self._parts[id(parameter)] = parameter if whole else nn.Parameter(part, parameter.requires_grad)
        return self._parts[id(parameter)]
