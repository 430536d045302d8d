"""A step whose first layers are frozen: over its simulated step, and over one with backwards in every stage.

    python -m benchmarks.frozen [--json FILE] [--repeats 9]

Sixteen layers wait 50 ms forward, and as long backward where they or layers before them are trained, on four lanes with
eight microbatches. Waiting needs no core. Three quarters of the layers are frozen. The steps take turns: as planned,
and with the same cut and the actions of a model whose first layer is trained, as frozen stages had them before. Asked:
at most 1.05 times the simulated step of waiting alone, and no backward in a stage before the first trained layer.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn import functional as F

from autosplit import autosplit
from autosplit.runtime.lower.split import Lowered
from autosplit.schedule.action import Schedule
from autosplit.schedule.simulate import simulate
from benchmarks import pairs
from benchmarks.overlap import Waiting

STAGES, LAYERS, FROZEN, CHUNKS, WAIT_S = 4, 16, 12, 8, 0.05
ASKED = 1.05
NEEDED, WHOLE = "frozen stages run forwards only", "every stage has backwards"


def make(plan: Any = None) -> tuple[Any, Callable[..., Any]]:
    """Return a pipe, and what runs a step of it by the name of a method."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Waiting(WAIT_S) for _ in range(LAYERS)))
    model[:FROZEN].requires_grad_(False)
    value, target = torch.randn(2, CHUNKS, 4)
    pipe = autosplit(model, devices=STAGES, chunks=CHUNKS, schedule="1f1b", sample=value, plan=plan)

    def step(method: str = "train_step") -> Any:
        pipe.zero_grad()
        return getattr(pipe, method)(value, target=target, loss_fn=F.mse_loss)

    return pipe, step


def simulated(plan: Any, schedule: Schedule) -> float:
    """Return the simulated step of a plan's cut, of waiting alone."""
    layers = [{int(name.partition(".")[0].partition("#")[0]) for name in stage.nodes} for stage in plan.stages]
    trained = [sum(layer >= FROZEN for layer in own) for own in layers]
    there, back = [WAIT_S * len(own) for own in layers], [WAIT_S * count for count in trained]
    return simulate(schedule, forward_s=there, backward_s=back).step_s


def main(argv: Sequence[str] | None = None) -> int:
    """Time what the command line asks for."""
    parser = pairs.parser(__doc__)
    parser.add_argument("--repeats", type=int, default=9, help="rounds")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    pipe, needed = make()
    _, whole = make(pipe.plan)
    with mock.patch.object(Lowered, "gradients", return_value=("all",) * STAGES):
        whole()
    readings = pairs.interleave({NEEDED: needed, WHOLE: whole}, repeats=options.repeats)
    found = {name: [reading.wall_s for reading in each] for name, each in readings.items()}
    plan, frozen = pipe.plan, [stage.index for stage in pipe.plan.stages if stage.gradients == "none"]
    schedules = {NEEDED: plan.schedule_for(CHUNKS), WHOLE: plan.whole_schedule(CHUNKS)}
    steps_s = {name: simulated(plan, schedule) for name, schedule in schedules.items()}
    backwards = sum(bar.stage in frozen and bar.kind != "F" for bar in needed("profile_step").bars)
    medians = {name: statistics.median(seconds) for name, seconds in found.items()}
    checks = [
        pairs.at_most("step over the simulated one", ASKED, medians[NEEDED] / steps_s[NEEDED]),
        pairs.at_most("backwards in frozen stages", 0, backwards),
    ]
    figures = [{"contender": name, "seconds": pairs.Spread.of(seconds)} for name, seconds in found.items()]
    figures += [{"contender": f"simulated: {n}", "seconds": pairs.Spread.of([s])} for n, s in steps_s.items()]
    print(pairs.facts_text(machine := pairs.facts()))
    print(pairs.table([{"contender": own["contender"], "seconds": own["seconds"].text(3)} for own in figures]))
    settings = {"stages": STAGES, "layers": LAYERS, "frozen": FROZEN, "chunks": CHUNKS, "wait_s": WAIT_S}
    settings |= {"repeats": options.repeats, "stages without a backward": len(frozen)}
    pairs.conclude(options.json, benchmark="frozen", settings=settings, machine=machine, figures=figures, checks=checks)
    return 0


if __name__ == "__main__":
    sys.exit(main())
