"""A plan as JSON, with what was measured beside it."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from autosplit.planning.plan import Plan
from autosplit.planning.timeline import StepTimeline
from autosplit.report.beside import beside


def render_json(plan: Plan, *, measured: StepTimeline | None = None) -> str:
    """Return the plan's own JSON; with a recorded step there is "recorded" too, and it is no plan file any more.

    "recorded" has a row per device and per stage, predicted and measured, and the step's bars and transfers. Seconds
    and bytes; null where something was not measured.
    """
    text = plan.to_json()
    if measured is None:
        return text
    return json.dumps(json.loads(text) | {"recorded": _recorded(plan, measured)}, indent=2, allow_nan=False)


def _recorded(plan: Plan, measured: StepTimeline) -> dict[str, Any]:
    found = beside(plan, measured)
    loss = measured.loss
    return {
        "step_s": found.step_s,
        "predicted_step_s": found.predicted_step_s,
        "once_s": measured.once_s if measured.timed else None,
        "loss": loss if loss is None or abs(loss) < float("inf") else str(loss),
        "microbatch_rows": list(measured.rows),
        "whole": measured.whole,
        "devices": [asdict(one) for one in found.devices],
        "stages": [asdict(one) for one in found.stages],
        "bars": [asdict(bar) for bar in measured.bars] if measured.timed else [],
        "sent": [asdict(sent) for sent in measured.sent] if measured.timed else [],
    }
