"""How close the search comes to the best of an exhaustive sweep, and what part of its time it takes.

    python -m benchmarks.planning [--only NAME ...] [--json FILE]

Every pair is a model and devices on paper; where a limit is given it is a share of the peak of the best plan without
one. The sweep solves, cuts and replays each combination of microbatches, schedule and recompute alone, as `autosplit`
does when all three are given; the best that fits is the reference. The search is one `PlanChoice` over the same
space. ``above`` is the search's step over the reference's, ``share`` its part of the sweep's time; seconds are of this
process's CPU, without the recording of the model, which both start from. All pairs take about a quarter of an hour. The
file is written after every pair.
"""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace

import torch
from torch import nn

from autosplit.checks import resolve_machine
from autosplit.errors import InfeasibleError, ScheduleError
from autosplit.options import Options, Sample
from autosplit.partition.problem import RECOMPUTE
from autosplit.planning.paper import OnPaper, prepare, stand_ins
from autosplit.planning.plan.plan import Plan
from autosplit.planning.profiled.problem import RecordedModel
from autosplit.planning.request import sizes_of
from autosplit.planning.search.choose import PlanChoice, Search
from autosplit.planning.search.make import make_plan
from autosplit.planning.search.sweep import Space, Sweep
from benchmarks import pairs
from examples.models import GPT, GPTConfig, ResNet, UNet

CHUNKS = (2, 8)
SCHEDULES = (("1f1b", 1), ("gpipe", 1), ("interleaved", 2), ("zb_h1", 1))
ABOVE, SHARE = 0.02, 0.1
"""What the search may be above the sweep's best, and what part of its time it may take."""


@dataclass(frozen=True)
class Pair:
    """A model with its sample, devices, and how much of the free plan's peak they have; None: all that they have."""

    name: str
    build: Callable[[], tuple[nn.Module, Sample]]
    devices: str | list[str]
    limit: float | None = None


@dataclass(frozen=True)
class Row:
    """What came of one pair; steps are None where nothing fits."""

    name: str
    devices: int
    limit_bytes: int | None
    configurations: int
    sweep_s: float | None
    search_s: float | None
    above: float | None
    sweep_cpu_s: float
    search_cpu_s: float
    chosen: str
    best: str

    @property
    def share(self) -> float:
        """The search's part of the sweep's time."""
        return self.search_cpu_s / self.sweep_cpu_s

    @property
    def ok(self) -> bool:
        """Whether the search is near enough and quick enough."""
        return all(check.ok for check in self.checks)

    @property
    def checks(self) -> list[pairs.Check]:
        """Both, with what was asked; where only the sweep found what fits the search is as far off as can be."""
        missed = (self.above is None) != (self.sweep_s is None)
        above = 1.0 if missed else self.above or 0.0
        return [
            pairs.at_most(f"{self.name}: step above the sweep's best", ABOVE, above),
            pairs.at_most(f"{self.name}: part of the sweep's time", SHARE, self.share),
        ]


class Uneven(nn.Module):
    """A wide embedding, narrow middle layers and a wide head."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(32_000, 512)
        self.middle = nn.Sequential(*[nn.Sequential(nn.Linear(512, 512), nn.GELU()) for _ in range(10)])
        self.head = nn.Linear(512, 32_000)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map tokens [rows, length] to scores [rows, length, words]."""
        scores: torch.Tensor = self.head(self.middle(self.words(tokens)))
        return scores


def _chain() -> tuple[nn.Module, Sample]:
    layers = [nn.Sequential(nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 1024)) for _ in range(8)]
    return nn.Sequential(*layers), Sample(torch.empty(2048, 1024))


def _gpt() -> tuple[nn.Module, Sample]:
    return GPT(GPTConfig(layers=3, width=512, heads=8, vocab=8192, positions=256)), Sample(
        torch.zeros(32, 256, dtype=torch.int64)
    )


def _uneven() -> tuple[nn.Module, Sample]:
    return Uneven(), Sample(torch.zeros(32, 128, dtype=torch.int64))


def _resnet() -> tuple[nn.Module, Sample]:
    return ResNet(blocks=(1, 1, 1, 1)), Sample(torch.empty(32, 3, 224, 224))


def _unet() -> tuple[nn.Module, Sample]:
    return UNet(inputs=3, widths=(32, 64)), Sample(torch.empty(16, 3, 128, 128))


PAIRS = (
    Pair("chain-2", _chain, "2xH100-SXM5-80GB"),
    Pair("chain-2-limit", _chain, "2xH100-SXM5-80GB", 0.95),
    Pair("chain-4-limit", _chain, "4xA100-SXM4-80GB", 0.95),
    Pair("chain-mixed", _chain, ["H100-SXM5-80GB", "H100-SXM5-80GB", "V100-SXM2-16GB"]),
    Pair("gpt-2", _gpt, "2xA100-SXM4-80GB"),
    Pair("gpt-2-limit", _gpt, "2xA100-SXM4-80GB", 0.7),
    Pair("gpt-3", _gpt, "3xA100-SXM4-80GB"),
    Pair("gpt-4-limit", _gpt, "4xL4-24GB", 0.6),
    Pair("uneven-3", _uneven, "3xL4-24GB"),
    Pair("uneven-2-limit", _uneven, "2xL4-24GB", 0.97),
    Pair("resnet-2", _resnet, "2xV100-SXM2-16GB"),
    Pair("resnet-3-limit", _resnet, "3xV100-SXM2-16GB", 0.7),
    Pair("unet-2", _unet, "2xA100-SXM4-80GB"),
    Pair("unet-2-limit", _unet, "2xA100-SXM4-80GB", 0.7),
)


def recorded(pair: Pair) -> OnPaper:
    """Return the recording of a pair's model on its devices."""
    with torch.device("meta"):
        model, sample = pair.build()
    machine = resolve_machine(pair.devices)
    options = Options(devices=stand_ins(machine), chunks=8, recompute=None, measure=False, machine=machine)
    return prepare(model, sample, options)


def swept(paper: OnPaper, space: Space) -> Iterator[Plan | None]:
    """Yield the plan of each combination alone, None where it does not fit or cannot be built."""
    rows = paper.recorded.rows
    for chunks in space.chunks:
        sizes = sizes_of(rows, chunks, paper.recorded.trace.graph.min_rows)
        for schedule, virtual_stages in space.schedules:
            for recompute in RECOMPUTE:
                options = replace(
                    paper.options,
                    chunks=len(sizes),
                    schedule=schedule,
                    virtual_stages=virtual_stages,
                    recompute=(recompute,),
                )
                found = None
                with contextlib.suppress(InfeasibleError, ScheduleError):
                    found = make_plan(paper.recorded.model, paper.recorded.trace, options, sizes=sizes)
                yield found


def searched(paper: OnPaper, space: Space) -> Plan:
    """Return the best plan of a space; nothing is known of the recording before."""
    rows = paper.recorded.rows
    return PlanChoice(
        Search(Sweep(RecordedModel(paper.recorded.model, paper.recorded.trace), paper.options, space, rows=rows))
    ).plan


def measured(pair: Pair) -> Row:
    """Return what search and sweep find for a pair, and in what time."""
    space = Space(CHUNKS, SCHEDULES)
    paper = recorded(pair)
    if pair.limit is not None:
        free = searched(paper, space)
        limit = int(pair.limit * max(stage.memory.peak_bytes for stage in free.stages))
        paper = replace(paper, options=replace(paper.options, memory_limit=limit))
    begun = time.process_time()
    chosen = searched(paper, space)
    search_cpu_s = time.process_time() - begun
    begun = time.process_time()
    plans = list(swept(paper, space))
    sweep_cpu_s = time.process_time() - begun
    best = min((plan for plan in plans if plan is not None), key=lambda plan: plan.step_s, default=None)
    fits = _within(chosen)
    return Row(
        name=pair.name,
        devices=len(paper.options.devices),
        limit_bytes=paper.options.memory_limit,
        configurations=len(plans),
        sweep_s=None if best is None else best.step_s,
        search_s=chosen.step_s if fits else None,
        above=chosen.step_s / best.step_s - 1 if fits and best is not None else None,
        sweep_cpu_s=round(sweep_cpu_s, 2),
        search_cpu_s=round(search_cpu_s, 2),
        chosen=_what(chosen),
        best="nothing fits" if best is None else _what(best),
    )


def _within(plan: Plan) -> bool:
    return all(
        stage.memory.capacity_bytes is None or stage.memory.peak_bytes <= stage.memory.capacity_bytes
        for stage in plan.stages
    )


def _what(plan: Plan) -> str:
    recompute = "/".join(dict.fromkeys(stage.recompute for stage in plan.stages))
    return f"{plan.chunks} x {plan.schedule} x {plan.virtual_stages}, {recompute}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the pairs and print a line each; 1 where one is too far off or took too long."""
    parser = pairs.parser(__doc__)
    parser.add_argument("--only", nargs="*", choices=[pair.name for pair in PAIRS], default=None)
    asked = parser.parse_args(arguments)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    rows: list[Row] = []
    for pair in PAIRS:
        if asked.only is not None and pair.name not in asked.only:
            continue
        row = measured(pair)
        rows.append(row)
        above = "-" if row.above is None else f"{row.above:+.2%}"
        print(
            f"{row.name:16} above {above:>8}  search {row.search_cpu_s:6.2f} s of {row.sweep_cpu_s:7.2f} s "
            f"({row.share:.1%})  {row.chosen}  [{row.best}]",
            flush=True,
        )
    checks = [check for row in rows for check in row.checks]
    pairs.conclude(
        asked.json,
        benchmark="planning",
        settings={"chunks": CHUNKS, "schedules": SCHEDULES, "recompute": RECOMPUTE, "seconds": "of CPU, one thread"},
        machine=pairs.facts(),
        figures=[{**asdict(row), "share": row.share, "ok": row.ok} for row in rows],
        checks=checks,
    )
    return 0 if all(check.ok for check in checks) else 1


if __name__ == "__main__":
    raise SystemExit(main())
