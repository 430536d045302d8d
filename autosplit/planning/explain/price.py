"""What the tokens of a plan cost: its devices' hours, at a price that is given or at published list prices."""

from __future__ import annotations

from collections import Counter

from autosplit.planning.plan.fields import Price
from autosplit.planning.plan.plan import Plan
from cost_models.prices import list_prices


def price_of(plan: Plan, usd_per_hour: float | None) -> Price | None:
    """Return the price of a plan at so many US dollars per device and hour, or at list prices; None without these."""
    ranks = plan.parallel.ranks // plan.parallel.pp
    counts = {name: count * ranks for name, count in Counter(plan.devices).items()}
    if plan.machine is None or (usd_per_hour is None and not counts.keys() <= list_prices().keys()):
        return None
    each = {name: usd_per_hour or list_prices()[name].usd_per_hour for name in counts}
    hour = sum(count * each[name] for name, count in counts.items())
    tokens = plan.tokens_per_s and plan.tokens_per_s * 3600
    listed = "; ".join(f"{name} {list_prices()[name]}" for name in counts) if usd_per_hour is None else ""
    return Price(
        usd_per_hour=hour,
        source=f"list prices per hour: {listed}" if listed else f"${usd_per_hour:.2f} per device and hour, as given",
        usd_per_billion_tokens=hour / tokens * 1e9 if tokens else None,
    )
