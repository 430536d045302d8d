"""``autosplit report MODEL``: plan a model for the devices of this machine and print the partition."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import typer

from autosplit.cli_common import (
    AsJson,
    Chunks,
    Debug,
    Devices,
    Inputs,
    MemoryLimit,
    Mode,
    Optimizer,
    PlanFile,
    Recompute,
    ScheduleName,
    Seed,
    Target,
    VirtualStages,
    beside_stdout,
    devices_of,
    exit_code,
    optimizer_of,
    recompute_of,
)
from autosplit.cli_inputs import InputSpec
from autosplit.cli_outputs import AsMarkdown, Dot, Html, Save, Trace, check_outputs, print_plan, write_outputs

if TYPE_CHECKING:
    from autosplit.planning.plan import Plan

EXAMPLES = """Examples:

\b
  autosplit report nets.py:make --devices 4 --chunks 8 --input "x=float32[8,3,32,32]"
  autosplit report my.gpt:GPT --devices 2 --chunks 4 --input "input_ids=int64[4,128]<50257"
  autosplit report nets.py:make --devices cpu,cpu --chunks 4 --input "0=float32[8,16]" --json
  autosplit report nets.py:make --devices 4 --chunks 8 --save plan.json --memory-limit 70GiB

Inputs are random: float32[8,3,32,32] is normal, int64[4,128]<50257 lies in 0 to 50256 (without a limit: 0 or 1),
bool[4,128] is either. Without --input the model's own example_input_array or dummy_inputs is used.

Exit codes: 0 done; 1 done, and the plan does not fit; 2 bad usage or input.
"""


def report_command(
    model: Target,
    devices: Devices,
    chunks: Chunks,
    inputs: Inputs = None,
    schedule: ScheduleName = "auto",
    virtual_stages: VirtualStages = 1,
    recompute: Recompute = "auto",
    optimizer: Optimizer = "adamw",
    memory_limit: MemoryLimit = None,
    train: Mode = None,
    seed: Seed = 0,
    plan: PlanFile = None,
    save: Save = None,
    html: Html = None,
    trace: Trace = None,
    dot: Dot = None,
    as_json: AsJson = False,
    as_markdown: AsMarkdown = False,
    debug: Debug = False,
) -> None:
    """Plan a model and print its partition: stages, times, memory, boundaries."""

    def answer() -> int:
        check_outputs(save=save, html=html, trace=trace, dot=dot)
        specs = [InputSpec.parse(text) for text in inputs or ()]
        with beside_stdout():
            found = _plan(
                model,
                specs,
                seed=seed,
                train=train,
                devices=devices_of(devices),
                chunks=chunks,
                schedule=schedule,
                virtual_stages=virtual_stages,
                recompute=recompute_of(recompute),
                optimizer=optimizer_of(optimizer),
                memory_limit=memory_limit,
                plan=plan,
            )
        write_outputs(found, save=save, html=html, trace=trace, dot=dot)
        return print_plan(found, as_json=as_json, as_markdown=as_markdown)

    raise typer.Exit(exit_code(answer, debug=debug))


def _plan(target: str, specs: Sequence[InputSpec], *, seed: int, train: bool | None, **choices: Any) -> Plan:
    import torch

    from autosplit.api import autosplit
    from autosplit.cli_models import build_sample, load_model, no_inputs

    torch.manual_seed(seed)
    model = load_model(target)
    if train is not None:
        model.train(train)
    pipe = autosplit(model, sample=build_sample(specs, model=model, seed=seed), **choices)
    if pipe.plan is None:
        raise no_inputs(model)
    return pipe.plan
