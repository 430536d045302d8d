"""``autosplit report MODEL``: plan a model for the devices of this machine and print the partition."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from autosplit.cli_common import (
    AsJson,
    Batch,
    Chunks,
    Debug,
    Devices,
    Inputs,
    Kwargs,
    MemoryLimit,
    Mode,
    Moves,
    Optimizer,
    PlanFile,
    Recompute,
    ScheduleName,
    Seed,
    Sequence,
    Target,
    VirtualStages,
    beside_stdout,
    devices_of,
    exit_code,
    importing,
    optimizer_of,
    pinned_plan,
    recompute_of,
)
from autosplit.cli_inputs import ROWS_PER_DEVICE, ModelSpec
from autosplit.cli_outputs import (
    AsMarkdown,
    Dot,
    Html,
    Save,
    Trace,
    check_form,
    check_outputs,
    print_plan,
    write_outputs,
)

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
    kwargs: Kwargs = None,
    batch: Batch = None,
    sequence: Sequence = None,
    schedule: ScheduleName = "auto",
    virtual_stages: VirtualStages = 1,
    recompute: Recompute = "auto",
    optimizer: Optimizer = "adamw",
    memory_limit: MemoryLimit = None,
    train: Mode = None,
    seed: Seed = 0,
    plan: PlanFile = None,
    move: Moves = None,
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
        check_form(as_json=as_json, as_markdown=as_markdown)
        check_outputs(save=save, html=html, trace=trace, dot=dot)
        spec = ModelSpec.parse(
            model, inputs=inputs, kwargs=kwargs, batch=batch, sequence=sequence, seed=seed, train=train
        )
        with beside_stdout():
            found = _plan(
                spec,
                devices=devices_of(devices),
                chunks=chunks,
                schedule=schedule,
                virtual_stages=virtual_stages,
                recompute=recompute_of(recompute),
                optimizer=optimizer_of(optimizer),
                memory_limit=memory_limit,
                plan=pinned_plan(plan, move),
            )
        write_outputs(found, save=save, html=html, trace=trace, dot=dot)
        return print_plan(found, as_json=as_json, as_markdown=as_markdown)

    raise typer.Exit(exit_code(answer, debug=debug))


def _plan(spec: ModelSpec, *, devices: int | list[str], **choices: Any) -> Plan:
    with importing():
        from autosplit.api import autosplit
        from autosplit.cli_models import make_model, make_sample, no_inputs

    model = make_model(spec)
    rows = ROWS_PER_DEVICE * (devices if isinstance(devices, int) else len(devices))
    pipe = autosplit(model, sample=make_sample(spec, model=model, rows=rows), devices=devices, **choices)
    if pipe.plan is None:
        raise no_inputs(model)
    return pipe.plan
