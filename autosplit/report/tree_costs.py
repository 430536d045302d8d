"""The costs of a model that no graph can follow: what its modules took when its own Python ran."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn

from autosplit.profile.assumptions import ROUTED_RUN
from autosplit.profile.module_costs import ModuleCosts, Seen
from autosplit.report.costs import OUTPUT, CostReport, NodeCost, Totals

WHOLE = "module"
"""The class of what runs by its own Python: how often in a step, only a plan says."""
_BACKWARD_FLOPS = 2
"""FLOPs of a backward over those of its forward: a matrix product has two in its backward."""
_CLOCK_S = 1e-9


def tree_report(
    model: nn.Module, costs: ModuleCosts, *, torch: str, rows: int, device: str, hardware: str, reason: str
) -> CostReport:
    """Return what every module took by itself, without the modules inside it; ``reason`` says why there is no graph."""
    kind = type(model).__name__
    names = {path: path or f"({kind})" for path in costs.modules}
    whole_s = costs.of("").forward_s + costs.of("").backward_s
    nodes = tuple(_node(path, costs, names, whole_s=whole_s) for path in _called(costs))
    parameters, buffers = list(model.parameters()), list(model.buffers())
    forward_flops = costs.of("").flops
    return CostReport(
        model=kind,
        device=device,
        hardware=hardware,
        basis="measured" if costs.measured else "modelled",
        torch=torch,
        rows=rows,
        microbatches=1,
        batch_rows=rows,
        totals=Totals(
            forward_s=costs.of("").forward_s,
            backward_s=costs.of("").backward_s,
            step_s=whole_s,
            forward_flops=forward_flops,
            backward_flops=_BACKWARD_FLOPS * forward_flops,
            step_flops=(1 + _BACKWARD_FLOPS) * forward_flops,
            saved_bytes=costs.saved_below(""),
            parameters=sum(parameter.numel() for parameter in parameters),
            parameter_bytes=sum(parameter.nbytes for parameter in parameters),
            buffer_bytes=sum(buffer.nbytes for buffer in buffers),
        ),
        nodes=nodes,
        notes=(f"no graph can follow this model, its own Python ran: {reason}", ROUTED_RUN),
    )


def _called(costs: ModuleCosts) -> list[str]:
    """Return the modules that ran, in the order of their first calls; the model itself comes first."""
    found = [(seen.first, path) for path, seen in costs.modules.items() if seen.first is not None]
    return [path for _, path in sorted(found)]


def _node(path: str, costs: ModuleCosts, names: dict[str, str], *, whole_s: float) -> NodeCost:
    seen, inside = costs.of(path), list(_directly_inside(path, costs))
    forward_s = _own(seen.forward_s, [part.forward_s for part in inside])
    backward_s = _own(seen.backward_s, [part.backward_s for part in inside])
    flops = max(0, seen.flops - sum(part.flops for part in inside))
    return NodeCost(
        name=names[path],
        module=path,
        node_class=WHOLE,
        forward_s=forward_s,
        backward_s=backward_s,
        share=(forward_s + backward_s) / whole_s if whole_s else 0.0,
        basis="measured" if costs.measured else "modelled",
        forward_flops=flops,
        backward_flops=_BACKWARD_FLOPS * flops,
        saved={list(names).index(path): seen.saved_bytes} if seen.saved_bytes else {},
        forward_transient_bytes=None,
        backward_transient_bytes=None,
        output_bytes=seen.output_bytes,
        users=(names[_around(path, costs)] if path else OUTPUT,),
    )


def _own(seconds: float, inside: Sequence[float]) -> float:
    """Return a module's time without that of the modules inside it: no less than the clock can tell."""
    left = seconds - sum(inside)
    return left if left > _CLOCK_S else 0.0


def _directly_inside(path: str, costs: ModuleCosts) -> Iterator[Seen]:
    return (seen for inner, seen in costs.modules.items() if inner and _around(inner, costs) == path)


def _around(path: str, costs: ModuleCosts) -> str:
    """Return the nearest module around a path that was called itself: a list of modules is not."""
    while path:
        path = path.rpartition(".")[0]
        if path in costs.modules:
            return path
    return ""
