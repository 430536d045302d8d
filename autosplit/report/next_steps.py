"""What to run next: the commands that lead from a plan on paper to a plan that fits, and to a training."""

from __future__ import annotations

from collections.abc import Iterator
from shlex import quote

from autosplit.planning.plan.plan import Plan
from autosplit.report.document import Section

COMMAND = "autosplit plan MODEL ..."
"""Stands for the command that made a plan, where it is not known."""
_PLANNED = ("recompute", "chunks", "schedule", "devices", "optimizer", "precision")
"""The arguments of changes that any command takes."""


def next_steps(plan: Plan, command: str) -> Iterator[Section]:
    """Yield what to run next after ``command`` has planned on paper; nothing for devices that are there."""
    if plan.machine is not None and plan.schedule != "forward":
        yield Section("What to run next", points=tuple(_commands(plan, command)))


def _commands(plan: Plan, command: str) -> Iterator[str]:
    change = next((change for change in plan.changes if set(change.arguments) <= set(_PLANNED)), None)
    if change is not None:
        options = " ".join(f"--{name} {quote(str(value))}" for name, value in change.arguments.items())
        yield f"{command} {options}: the first of the changes above that is an option, planned in full"
    if plan.verdict == "no":
        return
    if (plan.lora, plan.base) != (None, None):
        yield "in Python: add the adapters by peft, then autosplit(model, devices=..., sample=batch)"
        return
    if plan.replicas:
        yield 'in Python: plan.save("plan.json"), there autosplit(model, plan="plan.json", devices=..., sample=batch)'
        return
    runs = plan.mesh is None or (plan.mesh.runtime == "autosplit" and plan.mesh.cp == plan.mesh.ep == 1)
    if "--script" not in command and runs and not plan.offload:
        yield f"{command} --script train.py: writes the program that trains by this plan, and says how to start it"
    if plan.mesh is None and not plan.offload:
        yield 'in Python: plan.save("plan.json"), there autosplit(model, plan="plan.json", devices=..., sample=batch)'
    elif plan.mesh is not None and "--export" not in command:
        exports = "--export torchtitan-toml:job.toml --export megatron-args:arguments.txt"
        yield f"{command} {exports}: the plan as settings of these tools"
