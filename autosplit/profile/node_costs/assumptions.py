"""What is assumed of a node that cannot run without values, in words and in numbers: the one place for both.

Experts that rows are routed to get work by the values of the rows. Nothing but a run on real data knows it, so routing
is taken to be balanced: of E experts, k per row, each gets k/E of the rows.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

BALANCED = (
    "balanced routing is assumed: each of its experts gets an equal share of the rows; where rows prefer some experts, "
    "those and the step take longer"
)
EVERY_ROW = "every row is taken to meet every parameter once: an upper bound where rows are routed to experts"

_VALUE_ERRORS = frozenset(
    ("DynamicOutputShapeException", "DataDependentOutputException", "GuardOnDataDependentSymNode")
)
_EXPERTS = ("num_experts", "n_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN = ("top_k", "topk", "k", "num_experts_per_tok", "num_selected_experts", "moe_top_k", "n_activated_experts")
"""The attributes in which mixtures of experts keep how many there are, and how many a row is routed to."""


def why_estimated(error: Exception, *, module: nn.Module | None = None) -> str:
    """Say why a node's costs are estimates, and what was assumed; ``module`` is the node's own where it has one."""
    text = f"it did not run on fake tensors: {error_text(error)}"
    if type(error).__name__ not in _VALUE_ERRORS:
        return text
    known = module is not None and any(share < 1 for _, share in _shares(module))
    return f"{text}; {BALANCED if known else EVERY_ROW}"


def error_text(error: Exception) -> str:
    """Return the type of an error, and the first line of what it says."""
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def parameters_met(module: nn.Module) -> int:
    """Return how many of a module's parameter elements one row meets when routing is balanced."""
    return round(sum(parameter.numel() * share for parameter, share in _shares(module)))


def _shares(module: nn.Module) -> Iterator[tuple[nn.Parameter, float]]:
    """Yield every parameter and the share of the rows that meets it."""
    shares = {id(parameter): 1.0 for parameter in module.parameters()}
    for child in module.modules():
        chosen = _number(child, _CHOSEN)
        if chosen is None:
            continue
        for expert, count in _experts(child):
            for parameter in expert:
                shares[id(parameter)] = min(shares[id(parameter)], chosen / count, 1.0)
    for parameter in module.parameters():
        yield parameter, shares[id(parameter)]


def _experts(module: nn.Module) -> Iterator[tuple[list[nn.Parameter], int]]:
    """Yield the parameters that belong to experts, and how many experts share the rows.

    Experts are alike modules in a list of as many, or tensors whose first dimension is their number.
    """
    count = _number(module, _EXPERTS)
    for inner in module.modules():
        if isinstance(inner, nn.ModuleList) and len(inner) > 1 and count in (None, len(inner)) and _alike(inner):
            yield list(inner.parameters()), len(inner)
        elif count is not None and count > 1:
            stacked = [p for p in inner.parameters(recurse=False) if p.dim() > 2 and p.shape[0] == count]
            yield stacked, count


def _alike(modules: nn.ModuleList) -> bool:
    kinds = {(type(m), tuple(tuple(p.shape) for p in m.parameters())) for m in modules}
    return len(kinds) == 1


def _number(module: nn.Module, names: tuple[str, ...]) -> int | None:
    """Return the first of the named attributes that is a whole number above zero."""
    values = (getattr(module, name, None) for name in names)
    return next((v for v in values if isinstance(v, int) and not isinstance(v, bool) and v > 0), None)
