"""``autosplit verify MODEL``: compare the pipeline with the plain model."""

from __future__ import annotations

import typer

from autosplit.cli import common
from autosplit.cli.inputs import ConfigInputs, ModelSpec, parse_batch_dims
from autosplit.progress import phase

EXAMPLES = """Examples:

\b
  autosplit verify nets.py:make --devices 4 --chunks 8 --input "x=float32[8,3,32,32]"
  autosplit verify my.gpt:GPT --devices cpu,cpu --chunks 4 --input "input_ids=int64[4,128]<50257" --json

Exit codes: 0 equal; 1 not equal; 2 bad usage or input.
"""


@common.command
def verify_command(
    model: common.Target,
    devices: common.Devices,
    chunks: common.Chunks,
    inputs: common.Inputs = None,
    kwargs: common.Kwargs = None,
    batch_dims: common.BatchDims = None,
    batch: common.Batch = None,
    sequence: common.Sequence = None,
    schedule: common.ScheduleName = "auto",
    virtual_stages: common.VirtualStages = 1,
    recompute: common.Recompute = "auto",
    seed: common.Seed = 0,
    plan: common.PlanFile = None,
    as_json: common.AsJson = False,
    debug: common.Debug = False,
) -> int:
    """Compare the pipeline with the plain model: outputs, gradients, buffers, in train and in eval mode."""
    spec = ModelSpec.parse(model, inputs=inputs, kwargs=kwargs, sizes=ConfigInputs(batch, sequence), seed=seed)
    own = common.torch_devices(devices)
    choices = {
        "chunks": chunks,
        "schedule": schedule,
        "virtual_stages": virtual_stages,
        "recompute": common.recompute_of(recompute),
    }
    dims = parse_batch_dims(batch_dims)
    pinned = common.pinned_plan(plan, None)
    common.check_choices(own, pinned, optimizer="adamw", memory_limit=None, **choices)
    with common.beside_stdout():
        with phase("importing"):
            from autosplit import verification
            from autosplit.cli.models import make_pipe
        pipe, sample = make_pipe(spec, devices=own, plan=pinned, batch_dims=dims, **choices)
        found = verification.verify(pipe.unsplit(), pipe, sample)
    typer.echo(found.to_json() if as_json else str(found))
    return common.DONE if found else common.ANSWER_IS_NO
