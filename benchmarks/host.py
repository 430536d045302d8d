"""What a step costs the host: models so small that a step is issuing alone, over the plain model and a plain loop.

    python -m benchmarks.host [--json FILE] [--repeats 9] [--nets gpt resnet ...]
    python -m benchmarks.host --compiled [--nets gpt ...]     a stage compiled by torch.compile, beside eager
    python -m benchmarks.host --ranks 2 [--json FILE]         the GPT beside torch.distributed.pipelining, over gloo

A GPU computes while the host issues, so what is saved here is saved there. All contenders take turns. Seconds are those
of CPU of the process, which a busy machine changes little; over ranks those of the rank with the most, and the clock's.

    1 x 1     one stage and one microbatch, beside the plain model's step
    4 x 8     four stages that one thread issues and eight microbatches, beside a loop over these
    ranks     a stage per rank and eight microbatches under 1F1B, beside torch's schedule of the same stages

Gradients are compared before anything is timed, where nothing is drawn.
"""

from __future__ import annotations

import argparse
import copy
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from autosplit import autosplit
from benchmarks import pairs
from benchmarks.host_nets import GPT, Net, nets

ROWS, CHUNKS, STAGES = 16, 8, 4
PLAIN, LOOP, TORCH, OURS = "plain", "loop", "torch", "ours"
EAGER, COMPILED = "eager", "compiled"
WHOLE = ("1 x 1, train_step", "1 x 1, call")
PARTS = {f"{STAGES} x {CHUNKS}, {name}": name for name in ("gpipe", "1f1b", "zb_h1")}
ASKED = dict.fromkeys(WHOLE, 1.05) | {name: 1.5 if schedule == "zb_h1" else 1.1 for name, schedule in PARTS.items()}
ASKED_OF_RESNET = dict.fromkeys(WHOLE, 1.0)
TOLERANCE = 1e-4
Step = Callable[[], Any]


def pipe_of(model: nn.Module, batch: Tensor, stages: int, chunks: int, schedule: str, **options: Any) -> Any:
    """Return a pipe of a copy whose stages the calling thread issues."""
    options |= {"devices": ["cpu"] * stages, "chunks": chunks, "schedule": schedule, "sample": batch}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return autosplit(copy.deepcopy(model), lanes="inline", batch_norm="micro", **options)


def contenders(net: Net) -> dict[str, Step]:
    """Return what is timed; raises AssertionError where a pipe's gradients are not the plain model's."""
    torch.manual_seed(0)
    model, batch = net.make(), net.batch(ROWS)

    def step(chunks: int) -> None:
        for rows in batch.chunk(chunks):
            (net.loss(model(rows)) / chunks).backward()

    whole = pipe_of(model, batch, 1, 1, "gpipe")
    parts = {name: pipe_of(model, batch, STAGES, CHUNKS, schedule) for name, schedule in PARTS.items()}
    if not any(isinstance(module, nn.Dropout) and module.p for module in model.modules()):
        for chunks, pipes in ((1, [whole]), (CHUNKS, parts.values())):
            _check(model, net, batch, lambda chunks=chunks: step(chunks), pipes)
    found: dict[str, Step] = {PLAIN: lambda: net.loss(model(batch)).backward(), LOOP: lambda: step(CHUNKS)}
    found[WHOLE[0]] = lambda: whole.train_step(batch, loss_fn=net.loss)
    found[WHOLE[1]] = lambda: net.loss(whole(batch)).backward()
    for name, pipe in parts.items():
        found[name] = lambda pipe=pipe: pipe.train_step(batch, loss_fn=net.loss)
    return found


def _check(model: nn.Module, net: Net, batch: Tensor, step: Step, pipes: Any) -> None:
    model.zero_grad(set_to_none=True)
    step()
    for pipe in pipes:
        pipe.train_step(batch, loss_fn=net.loss)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(pipe.get_parameter(name).grad, parameter.grad, rtol=TOLERANCE, atol=TOLERANCE)


def compiled(net: Net) -> dict[str, Step]:
    """Return one stage of the plain model and of a pipe, each eager and compiled."""
    torch.manual_seed(0)
    model, batch = net.make(), net.batch(ROWS)
    found: dict[str, Step] = {}
    for name, options in ((EAGER, {}), (COMPILED, {"compile": True})):
        plain = torch.compile(copy.deepcopy(model)) if options else model
        pipe = pipe_of(model, batch, 1, 1, "gpipe", **options)
        found[f"{PLAIN}, {name}"] = lambda plain=plain: net.loss(plain(batch)).backward()
        found[f"{OURS}, {name}"] = lambda pipe=pipe: pipe.train_step(batch, loss_fn=net.loss)
    return found


class Part(nn.Module):
    """Some blocks of a GPT, with the table where they are the first and the head where they are the last."""

    def __init__(self, model: GPT, first: int, end: int) -> None:
        super().__init__()
        self.table = model.table if first == 0 else nn.Identity()
        self.blocks = nn.Sequential(*model.blocks[first:end])
        self.head = nn.Sequential(model.norm, model.head) if end == len(model.blocks) else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.table(x)))


def over_ranks() -> dict[str, Step]:
    """Return this rank's steps of torch's schedule and of ours, from gradients that are None."""
    torch.manual_seed(0)
    rank, size, loss = dist.get_rank(), dist.get_world_size(), nn.MSELoss()
    model, batch, target = GPT(), torch.randint(17, (ROWS, 4)), torch.randn(ROWS, 4, 17)
    count = len(model.blocks) // size
    part = Part(copy.deepcopy(model), rank * count, (rank + 1) * count)
    schedule = Schedule1F1B(PipelineStage(part, rank, size, torch.device("cpu")), CHUNKS, loss_fn=loss)
    given, losses = (batch,) if rank == 0 else (), [] if rank == size - 1 else None
    pipe = autosplit(model, devices="torchrun", chunks=CHUNKS, sample=batch, schedule="1f1b")

    def theirs() -> None:
        part.zero_grad()
        schedule.step(*given, target=target if rank == size - 1 else None, losses=losses)

    def ours() -> None:
        pipe.zero_grad()
        pipe.train_step(batch, target=target, loss_fn=loss)

    return {TORCH: theirs, OURS: ours}


def ratios(found: Mapping[str, Sequence[Any]], reference: str, clock: str) -> dict[str, pairs.Spread]:
    """Return each contender's seconds over the reference's of the same round, on a clock."""
    base = [getattr(reading, clock) for reading in found[reference]]
    return {
        name: pairs.Spread.of([getattr(own, clock) / other for own, other in zip(readings, base, strict=True)])
        for name, readings in found.items()
        if name != reference
    }


def measure(name: str, net: Net, repeats: int) -> tuple[dict[str, Any], list[pairs.Check]]:
    """Time a net; return its figure and what is asked of it."""
    found = pairs.interleave(contenders(net), repeats=repeats, warmups=3)
    over = ratios(found, PLAIN, "process_s") | {
        own: spread for own, spread in ratios(found, LOOP, "process_s").items() if own in PARTS
    }
    asked = ASKED | (ASKED_OF_RESNET if name == "resnet" else {})
    checks = [pairs.at_most(f"{name}, {own}", asked[own], over[own].median) for own in asked]
    return _figure(name, found, {own: over[own] for own in asked}), checks


def measure_compiled(name: str, net: Net, repeats: int) -> tuple[dict[str, Any], list[pairs.Check]]:
    """Time a net's stage eager and compiled; nothing is asked."""
    found = pairs.interleave(compiled(net), repeats=repeats, warmups=3)
    over = {
        f"{OURS}, {how}": ratios(found, f"{PLAIN}, {how}", "process_s")[f"{OURS}, {how}"] for how in (EAGER, COMPILED)
    }
    return _figure(name, found, over), []


def measure_ranks(repeats: int) -> tuple[dict[str, Any], list[pairs.Check]]:
    """Time this rank's steps with the others."""
    readings: dict[str, list[pairs.Reading]] = {}
    steps = over_ranks()
    for turn in range(repeats + 1):
        for name in pairs.rotated(list(steps), turn):
            dist.barrier()
            reading = pairs.read(steps[name], calls=5)
            every: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(every, (reading.wall_s, reading.process_s, reading.thread_s))
            if turn:
                readings.setdefault(name, []).append(pairs.Reading(*map(max, zip(*every, strict=True))))
    over = {f"{OURS}, {clock}": ratios(readings, TORCH, clock)[OURS] for clock in ("process_s", "wall_s")}
    name = f"gpt, {dist.get_world_size()} ranks"
    return _figure(name, readings, over), [pairs.at_most(f"{name}, {own}", 1.0, over[own].median) for own in over]


def _figure(name: str, found: Mapping[str, Sequence[Any]], over: Mapping[str, pairs.Spread]) -> dict[str, Any]:
    seconds = {own: pairs.Spread.of([reading.process_s for reading in readings]) for own, readings in found.items()}
    return {"net": name, "process_s": seconds, "over_reference": dict(over)}


def report(figures: Sequence[Mapping[str, Any]], checks: Sequence[pairs.Check], options: argparse.Namespace) -> None:
    """Print the figures and the checks, and write them."""
    machine = pairs.facts()
    print(pairs.facts_text(machine))
    rows = [
        {"net": figure["net"]} | {name: s.text(2) for name, s in figure["over_reference"].items()} for figure in figures
    ]
    print(pairs.table(rows))
    settings = {name: getattr(options, name) for name in ("repeats", "ranks")}
    settings |= {"rows": ROWS, "chunks": CHUNKS, "stages": STAGES}
    pairs.conclude(options.json, benchmark="host", settings=settings, machine=machine, figures=figures, checks=checks)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the command line's settings."""
    parser = pairs.parser(__doc__)
    parser.add_argument("--repeats", type=int, default=9, help="rounds")
    parser.add_argument(
        "--nets", nargs="+", choices=nets(), default=list(nets()), metavar="NET", help=", ".join(nets())
    )
    parser.add_argument("--compiled", action="store_true", help="one stage, compiled beside eager")
    parser.add_argument("--ranks", type=int, default=0, help="over so many processes, beside torch's pipelining")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Time what the command line asks for."""
    options = parse(argv)
    torch.set_num_threads(1)
    if options.ranks and not dist.is_torchelastic_launched():
        start = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(options.ranks), "--module"]
        command = [sys.executable, "-m", *start, "benchmarks.host", *(sys.argv[1:] if argv is None else argv)]
        return subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False).returncode
    if options.ranks:
        dist.init_process_group("gloo")
        measured = [measure_ranks(options.repeats)]
    else:
        time = measure_compiled if options.compiled else measure
        measured = [time(name, nets()[name], options.repeats) for name in options.nets]
    if not options.ranks or dist.get_rank() == 0:
        report([figure for figure, _ in measured], [check for _, each in measured for check in each], options)
    if options.ranks:
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
