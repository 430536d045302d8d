"""A plan of autosplit's, run by torch's own engine: a process per stage, ``PipelineStage`` and torch's schedules.

    torchrun --standalone --nproc-per-node 2 examples/torch_pipelining_from_plan.py

Rank 0 plans a small GPT for as many H100 as there are processes; every rank builds the stages that the plan gives it
from whole blocks, and torch runs the plan's actions (``plan.export("torch-csv")``) over gloo, or over NCCL where every
process has a CUDA device. This works where a model is a chain of modules: torch sends each stage's output to the next
stage and nowhere else.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

import autosplit
from examples import comparison, data
from examples.comparison import Outcome
from examples.models import GPTBlock, GPTConfig

LENGTH = 32
LR = 0.1


class Tokens(nn.Module):
    """The vectors of tokens and of their positions, added."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.token = nn.Embedding(config.vocab, config.width)
        self.position = nn.Embedding(config.positions, config.width)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map token numbers [rows, length] to vectors [rows, length, width]."""
        return self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))


def chain(config: GPTConfig) -> nn.Sequential:
    """Return a GPT as a chain of modules; its head is not tied to its table of tokens, which is on another stage."""
    head = nn.Sequential(nn.LayerNorm(config.width), nn.Linear(config.width, config.vocab, bias=False))
    return nn.Sequential(Tokens(config), *(GPTBlock(config) for _ in range(config.layers)), head)


def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy of logits [rows, length, vocab] against token numbers [rows, length]."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def parts_of(plan: autosplit.Plan, model: nn.Sequential) -> list[list[str]]:
    """Return the children of a chain that each stage of the plan runs; raises ValueError where a stage has none."""
    parts: list[list[str]] = json.loads(plan.export("torchtitan"))
    if [name for part in parts for name in part] != [name for name, _ in model.named_children()]:
        raise ValueError(f"the plan's stages are {parts}, no rows of the model's children in order")
    if not all(parts):
        raise ValueError(f"the plan's stages are {parts}; plan fewer stages, so that each has a block of its own")
    return parts


def torch_schedule(
    plan: autosplit.Plan, model: nn.Sequential, *, device: torch.device
) -> tuple[_PipelineScheduleRuntime, nn.ModuleDict]:
    """Return torch's runtime of the plan's actions, and the modules of this rank's stages under the model's names."""
    if len(plan.devices) != dist.get_world_size():
        raise ValueError(
            f"the plan is for {len(plan.devices)} devices, and there are {dist.get_world_size()} processes"
        )
    parts, rank = parts_of(plan, model), dist.get_rank()
    stages, modules = [], {}
    for stage, names in enumerate(parts):
        if plan.stages[stage].lane == rank:
            own = {name: model.get_submodule(name) for name in names}
            modules |= own
            stages.append(PipelineStage(nn.Sequential(*own.values()), stage, len(parts), device))
    schedule = _PipelineScheduleRuntime(stages, plan.chunks, loss_fn=loss_fn)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "schedule.csv"
        file.write_text(plan.export("torch-csv"), newline="")
        schedule._load_csv(str(file))
    return schedule, nn.ModuleDict(modules)


def run(
    *, schedule: str, chunks: int, steps: int, rows: int, layers: int, dtype: torch.dtype, device: torch.device
) -> Outcome:
    """Train with torch's engine and plain, in every process of a group; compare losses and trained parameters."""
    comparison.prepare()
    text = data.text_batches(data.python_text(), rows=rows, length=LENGTH, count=steps)
    batches = [data.Batch(batch.inputs.to(device), batch.targets.to(device)) for batch in text]
    model = chain(GPTConfig(layers=layers)).to(dtype).to(device)
    plain = copy.deepcopy(model)
    planned: list[Any] = [None]
    if dist.get_rank() == 0:
        sample = batches[0].inputs.to("meta")
        machine = f"{dist.get_world_size()}xH100-SXM5-80GB"
        planned = [autosplit.plan(model, machine, chunks, sample=sample, loss_fn=loss_fn, schedule=schedule)]
        print(planned[0].schedule_for(chunks))
    dist.broadcast_object_list(planned, device=device)
    plan: autosplit.Plan = planned[0]
    engine, modules = torch_schedule(plan, model, device=device)
    optimizer = torch.optim.SGD(modules.parameters(), lr=LR)
    losses = tuple(torch_step(engine, optimizer, batch, plan) for batch in batches)
    reference = comparison.train(plain, batches, loss_fn=loss_fn, optimizer=torch.optim.SGD(plain.parameters(), lr=LR))
    trained = comparison.parameters(modules)
    expected = {name: value for name, value in plain.named_parameters() if name in trained}
    differences = {
        "loss": comparison.loss_difference(reference, losses),
        "parameters of all stages": _largest(comparison.tensor_difference(expected, trained), device),
    }
    return Outcome({"plain": reference, "torch's engine": losses}, differences, {"stages": float(len(plan.stages))})


def torch_step(
    engine: _PipelineScheduleRuntime, optimizer: torch.optim.Optimizer, batch: data.Batch, plan: autosplit.Plan
) -> float:
    """Run one step of the pipeline and of the optimizer; return the loss, which the last stage has, on every rank."""
    first, last = (plan.stages[index].lane == dist.get_rank() for index in (0, -1))
    microbatch_losses: list[Tensor] = []
    optimizer.zero_grad()
    engine.step(*((batch.inputs,) if first else ()), target=batch.targets if last else None, losses=microbatch_losses)
    optimizer.step()
    loss = torch.zeros((), dtype=torch.float64, device=batch.inputs.device)
    if last:
        loss += torch.stack(microbatch_losses).mean().detach()
    dist.all_reduce(loss)
    return loss.item()


def _largest(value: float, device: torch.device) -> float:
    every = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(every, op=dist.ReduceOp.MAX)
    return every.item()


def main(argv: Sequence[str] | None = None) -> Outcome:
    """Run the comparison in this process of ``torchrun``; rank 0 prints it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedule", default="1f1b", help="one of autosplit's, or the path of an action file")
    parser.add_argument("--chunks", type=int, default=4, help="microbatches per batch")
    parser.add_argument("--steps", type=int, default=10, help="optimizer steps")
    parser.add_argument("--rows", type=int, default=16, help="rows of a batch, a multiple of the microbatches")
    parser.add_argument("--layers", type=int, default=6, help="blocks of the GPT")
    comparison.add_dtype(parser)
    options = vars(parser.parse_args(argv))
    if "LOCAL_RANK" not in os.environ:
        parser.error(f"start it with torchrun --standalone --nproc-per-node 2 {Path(sys.argv[0])}")
    cuda = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)
    try:
        outcome = run(**{**options, "dtype": getattr(torch, options["dtype"])}, device=device)
        if dist.get_rank() == 0:
            comparison.print_losses(outcome.losses)
            comparison.print_verdict(outcome)
    finally:
        dist.destroy_process_group()
    return outcome


if __name__ == "__main__":
    sys.exit(main().exit_code)
