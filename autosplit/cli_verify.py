"""``autosplit verify MODEL``: compare the pipeline with the plain model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import typer

from autosplit.cli_common import (
    ANSWER_IS_NO,
    DONE,
    AsJson,
    Chunks,
    Debug,
    Devices,
    Inputs,
    PlanFile,
    Recompute,
    ScheduleName,
    Seed,
    Target,
    VirtualStages,
    beside_stdout,
    devices_of,
    exit_code,
    recompute_of,
)
from autosplit.cli_inputs import InputSpec

if TYPE_CHECKING:
    from autosplit.verification import Verification

EXAMPLES = """Examples:

\b
  autosplit verify nets.py:make --devices 4 --chunks 8 --input "x=float32[8,3,32,32]"
  autosplit verify my.gpt:GPT --devices cpu,cpu --chunks 4 --input "input_ids=int64[4,128]<50257" --json

Exit codes: 0 equal; 1 not equal; 2 bad usage or input.
"""


def verify_command(
    model: Target,
    devices: Devices,
    chunks: Chunks,
    inputs: Inputs = None,
    schedule: ScheduleName = "auto",
    virtual_stages: VirtualStages = 1,
    recompute: Recompute = "auto",
    seed: Seed = 0,
    plan: PlanFile = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Compare the pipeline with the plain model: outputs, gradients, buffers, in train and in eval mode."""

    def answer() -> int:
        specs = [InputSpec.parse(text) for text in inputs or ()]
        with beside_stdout():
            found = _verified(
                model,
                specs,
                seed=seed,
                devices=devices_of(devices),
                chunks=chunks,
                schedule=schedule,
                virtual_stages=virtual_stages,
                recompute=recompute_of(recompute),
                plan=plan,
            )
        typer.echo(found.to_json() if as_json else str(found))
        return DONE if found else ANSWER_IS_NO

    raise typer.Exit(exit_code(answer, debug=debug))


def _verified(target: str, specs: Sequence[InputSpec], *, seed: int, **choices: Any) -> Verification:
    import torch

    from autosplit.api import autosplit, own_sample
    from autosplit.cli_models import build_sample, load_model, no_inputs
    from autosplit.verification import verify

    torch.manual_seed(seed)
    model = load_model(target)
    sample = build_sample(specs, model=model, seed=seed)
    if sample is None:
        sample = own_sample(model)
    if sample is None:
        raise no_inputs(model)
    return verify(model, autosplit(model, sample=sample, **choices), sample)
