"""Published layouts of large training runs beside what the planner says of them: seconds per step, and whether it fits.

    python -m benchmarks.layouts [--only TEXT ...] [--own] [--json FILE]

For each row of ``data/published_layouts.json`` that can be modelled the published degrees, microbatches, schedule, cut
and recompute are costed as they are. A row that does not say what it recomputes recomputes nothing where that is no
"no", as NeMo's configurations have it (``activations_checkpoint_granularity: null``), else its blocks. One constant per
device and precision is fitted on the rows of *other* sources: the geometric mean of published over predicted seconds.
``--own`` lets the planner choose all of it for the rows of at most ``OWN`` devices. Rows are kept in the file as they
are made; without rows to make, the summary is made anew from the file.
"""

from __future__ import annotations

import argparse
import json
import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from autosplit.options import Options, Sample
from autosplit.parallel import Parallel
from autosplit.planning.paper import prepare, stand_ins
from autosplit.planning.parallel.rank import rank_profile
from autosplit.planning.parallel.search import MeshRequest, plan_mesh
from autosplit.planning.plan.plan import Plan
from autosplit.planning.plan.write import Writer
from autosplit.planning.request import chosen, settle, sizes_of
from autosplit.planning.search.make import as_given
from autosplit.planning.timeline import simulated
from autosplit.profile.node_costs.work import cost_model_of
from benchmarks.layout_models import SHAPES, Shape, build, gpt, loss
from cost_models import device, machine
from cost_models.collectives import Group
from cost_models.machines import MachineSpec

DATA = Path(__file__).parent / "data" / "published_layouts.json"
RESULTS = Path(__file__).parent / "results" / "layouts.json"
OWN = 128
"""Devices of a row for which the planner also chooses all itself, at most."""
_HOST = {"GB200-186GB": 64}
"""Devices of a host, or of a rack with NVLink between all; 8 where it is not named."""
_OVERLAPPED = {"nemo", "bridge"}
"""Sources whose runs hide tensor parallelism's collectives beside products: NeMo's configurations of these runs say so
(``ub_tp_comm_overlap: True`` in NVIDIA/NeMo-Framework-Launcher, ``gpt3/175b_fp8_performance.yaml`` and others), and
Megatron-Bridge's guide to performance (``tp_comm_overlap``)."""
_SOURCES = {
    "Megatron-LM SC21": "sc21",
    "Reducing activation": "selective",
    "NeMo docs": "nemo",
    "Megatron-Bridge": "bridge",
    "The Llama 3": "llama3",
    "torchtitan": "torchtitan",
}


@dataclass(frozen=True)
class Row:
    """A published layout that is modelled."""

    name: str
    source: str
    shape: Shape
    device: str
    parallel: Parallel
    micro_batch: int
    batch: int
    schedule: str
    virtual: int
    recompute: str
    precision: str
    published_s: float

    @property
    def constant(self) -> str:
        """What one constant is for: the device and the precision."""
        return f"{self.device} {self.precision}"


@dataclass(frozen=True)
class Result:
    """What the planner says of a row, before a constant."""

    name: str
    source: str
    constant: str
    published_s: float
    predicted_s: float
    verdict: str
    peak_gib: float
    bubble: float
    update_s: float
    recompute: str
    flops: float
    cpu_s: float


def rows() -> Iterator[Row | tuple[str, str]]:
    """Yield every row, or of one that is not modelled its name and why."""
    for row in json.loads(DATA.read_text())["rows"]:
        source = next(short for text, short in _SOURCES.items() if row["source"].startswith(text))
        name = f"{source}: {row['model']} on {row['gpus']}"
        name += f", cp {row['cp']}" if row.get("cp", 1) > 1 else ""
        if source == "llama3":
            yield f"{name}", "neither its microbatches nor its stages per device are published with it"
        else:
            yield _row(row, source, name)


def _row(row: Mapping[str, Any], source: str, name: str) -> Row:
    known = SHAPES.get(row["model"])
    if known is None:
        known = gpt(row["layers"], row["hidden"], row["heads"], row["vocab"], dropout=0.1, plain=True)
    shape = known.at(row.get("seq", 8192))
    dp, virtual = row.get("dp", row.get("fsdp")), row.get("virtual", 1)
    batch, micro = row.get("global_batch", 0), row.get("micro_batch", 0)
    recompute, schedule = row.get("recompute", "auto"), "interleaved" if virtual > 1 else "1f1b"
    precision = "fp8" if row.get("precision") == "fp8" else "bf16_fp32_master"
    zero, runtime = {"sc21": 0, "selective": 0}.get(source, 1), "megatron"
    if source == "torchtitan":  # full activation checkpointing, fp8, and as many microbatches as stages by default
        batch, micro, recompute, precision = dp * row["local_batch"], row["local_batch"] // row["pp"], "block", "fp8"
        schedule = row.get("schedule", "1f1b")
        virtual, zero, runtime = 2 if schedule == "interleaved" else 1, 3, "torchtitan"
        name += f", {schedule}"
    published_s = row.get("seconds", 0.0)
    if "tokens_per_s_per_gpu" in row:
        published_s = batch * shape.length / (row["tokens_per_s_per_gpu"] * row["gpus"])
    elif not published_s:
        published_s = shape.step_flops(batch, again=True) / (row["tflops_per_gpu"] * 1e12 * row["gpus"])
    if source == "selective":
        name += f", {recompute}"
    cp = row.get("cp", 1)
    parallel = Parallel(dp, row["tp"], row["pp"], zero if dp * cp > 1 else 0, row["tp"] > 1, runtime, cp=cp)
    made = (row["device"], parallel, micro, batch, schedule, virtual, recompute, precision, published_s)
    return Row(name, source, shape, *made)


def machine_of(row: Row) -> MachineSpec:
    """Return the devices of a row, on hosts of eight or racks."""
    each, count = _HOST.get(row.device, 8), row.parallel.ranks
    name = row.device
    if name == "H100 96 GB":  # as torchtitan describes it: 96 GB of HBM2e at 2.4 TB/s
        name = "H100-SXM5-80GB"
    known = machine(f"{max(2, count // each)}x{each}x{name}" if count > each else f"{count}x{name}")
    if row.device != "H100 96 GB":
        return known
    spec = device(name).model_copy(
        update={"name": "H100-96GB", "memory_bytes": 95 * 2**30, "memory_bandwidth_bytes_per_s": 2.4e12}
    )
    return known.model_copy(update={"devices": (spec,) * len(known)})


def request_of(row: Row, *, own: bool, criterion: Callable[[Tensor, Tensor], Tensor] = loss) -> MeshRequest:
    """Return a recorded row: its published layout, or everything open but devices, batch and precision."""
    machines = machine_of(row)

    limit = "1TiB" if row.recompute == "selective" and not own else None  # planned as if nothing was recomputed

    def choices(*, devices: int) -> dict[str, Any]:
        asked = {"schedule": "auto", "virtual_stages": 1, "recompute": "auto", "chunks": "auto"}
        if not own:
            recompute = "never" if row.recompute == "selective" else row.recompute
            asked = {
                "schedule": row.schedule,
                "virtual_stages": row.virtual,
                "recompute": recompute,
                "chunks": row.batch // row.parallel.dp // row.micro_batch,
            }
        found = chosen(
            devices=devices, memory_limit=limit, reserve="3%", optimizer="adamw", precision=row.precision, **asked
        )
        return {**found, "cut_between": "modules"}

    options = Options(
        devices=stand_ins(machines), **choices(devices=row.parallel.pp), measure=False, machine=machines, processes=True
    )
    sample = Sample(torch.zeros(row.batch, row.shape.length, dtype=torch.int64, device="meta"))
    context = 1 if own else row.parallel.cp
    paper = prepare(build(row.shape), sample, options, loss_fn=criterion, context=context)
    if own:
        return MeshRequest(paper, machines, choices, "auto", "auto", True, row.parallel.runtime)
    return MeshRequest(paper, machines, choices, row.parallel, row.parallel.zero, False, row.parallel.runtime)


def published_cut(row: Row) -> dict[str, int]:
    """Return the stage of each module: layers evenly, the words with the first ones, the head with the last.

    So does Megatron-LM (``get_num_layers_to_build``). Where that leaves a rest, the first and the last stage have a
    layer less, as torchtitan and Llama 3.1 have it.
    """
    layers, last = row.shape.layers, row.parallel.pp * row.virtual - 1
    fewer = int(layers % (last + 1) > 0)
    each = (layers + 2 * fewer) // (last + 1)
    return {"words": 0, "norm": last, "head": last} | {f"layers.{n}": (n + fewer) // each for n in range(layers)}


def planned(row: Row) -> Result:
    """Return what the planner says of a published layout."""
    begin = time.process_time()
    request = request_of(row, own=False)
    options, paper = request.options(row.parallel), request.paper
    sizes = sizes_of(row.batch // row.parallel.dp, options.chunks, paper.recorded.trace.graph.min_rows)
    case = paper.recorded.problem(options, sizes)
    stages = row.parallel.pp * row.virtual
    case = case.under(options, settle(options, parts=stages, microbatches=len(sizes)))
    options_of = {"auto": ("never", "block"), "selective": ("never",)}
    for again in options_of.get(row.recompute, (row.recompute,)):
        plan = Writer(case, as_given(case, published_cut(row), (again,), stages=stages)).plan()
        if plan.verdict != "no":
            break
    return Result(
        name=row.name,
        source=row.source,
        constant=row.constant,
        published_s=row.published_s,
        predicted_s=_changed_s(plan, request, row),
        verdict=plan.verdict if row.recompute != "selective" else "not asked",
        peak_gib=max(stage.memory.peak_bytes for stage in plan.stages) / 2**30,
        bubble=plan.bubble,
        update_s=plan.update_s,
        recompute="selective" if row.recompute == "selective" else again,
        flops=(plan.model_flops or 0.0) / row.parallel.ranks,
        cpu_s=round(time.process_time() - begin, 1),
    )


def _changed_s(plan: Plan, request: MeshRequest, row: Row) -> float:
    """Return the step of a run that makes attention's core again, or hides collectives: a plan does neither."""
    options, paper = request.options(row.parallel), request.paper
    whole = paper.recorded.profile(options, plan.microbatch_rows)
    costs = paper.recorded.of_rank(whole, options)
    products = {name for name in paper.recorded.outline.blocks if whole.nodes[name].forward_flops}
    alone = costs
    if row.source in _OVERLAPPED and row.parallel.tp > 1:
        shares = paper.recorded.shares(row.parallel, rng=options.rng)
        model = cost_model_of(options.machine.devices[0])  # type: ignore[union-attr]
        blocks = paper.recorded.outline.blocks
        groups = {"tp": Group(1, 1, None, None)}
        alone = rank_profile(whole, shares, groups=groups, blocks=blocks, model=model, fp8=True)
    stages = []
    for stage in plan.stages:
        forward_s = backward_s = 0.0
        for name in products & set(stage.nodes):
            own, other = costs.nodes[name], alone.nodes[name]
            forward_s -= _hidden_s(other.forward_s, own.forward_s - other.forward_s, row.parallel.tp)
            backward_s -= _hidden_s(other.backward_s, own.backward_s - other.backward_s, row.parallel.tp)
        if row.recompute == "selective":
            backward_s += sum(costs.nodes[name].forward_s for name in stage.nodes if ".core#" in name)
        update = {"forward_s": stage.forward_s + forward_s, "backward_s": stage.backward_s + backward_s}
        stages.append(stage.model_copy(update=update))
    changed = plan.model_copy(update={"stages": tuple(stages)})
    return plan.step_s + simulated(changed).step_s - simulated(plan).step_s


def _hidden_s(work_s: float, waits_s: float, ranks: int) -> float:
    """Return how much of a product's collectives its own work hides where both are done in a part per rank.

    All parts but one overlap (Wang et al., ASPLOS 2023); what is left is the longer, and a part of the other.
    """
    return min(work_s, waits_s) * (1 - 1 / ranks)


def chosen_by_us(row: Row) -> dict[str, Any]:
    """Return our own choice for a row's shape, devices and batch, beside what is predicted for theirs."""
    begin = time.process_time()
    request = request_of(row, own=True)
    plan = plan_mesh(request)
    return {
        "name": row.name,
        "ours": str(plan.mesh),
        "theirs": str(row.parallel),
        "chunks": plan.chunks,
        "schedule": f"{plan.schedule} x {plan.virtual_stages}",
        "recompute": sorted({stage.recompute for stage in plan.stages}),
        "step_s": plan.step_s,
        "verdict": plan.verdict,
        "reasons": list(plan.reasons),
        "search_cpu_s": round(time.process_time() - begin, 1),
    }


def judged(results: Sequence[Result]) -> dict[str, Any]:
    """Return each row's error after a constant from other sources, beside that of one constant rate per source."""
    found = []
    for own in results:
        others = [each for each in results if each.source != own.source and each.constant == own.constant]
        scale = _mean([each.published_s / each.predicted_s for each in others])
        same = [each for each in results if each.source == own.source and each.constant == own.constant]
        rate = _mean([each.flops / each.published_s for each in same])
        elsewhere = _mean([each.flops / each.published_s for each in others])
        entry = {
            "name": own.name,
            "published_s": round(own.published_s, 3),
            "scale": None if scale is None else round(scale, 3),
            "error": None if scale is None else round(scale * own.predicted_s / own.published_s - 1, 4),
            "one_rate_of_its_own_source": None if rate is None else round(own.flops / rate / own.published_s - 1, 4),
            "one_rate_of_other_sources": None
            if elsewhere is None
            else round(own.flops / elsewhere / own.published_s - 1, 4),
            "verdict": own.verdict,
        }
        found.append(entry)
    judged_rows = [own for own in found if own["error"] is not None]
    summary = {
        "rows": len(found),
        "with_a_constant_from_elsewhere": len(judged_rows),
        "not_a_no": sum(own["verdict"] != "no" for own in found),
        "within_15%": sum(abs(own["error"]) <= 0.15 for own in judged_rows),
    }
    for key in ("error", "one_rate_of_its_own_source", "one_rate_of_other_sources"):
        errors = [abs(own[key]) for own in judged_rows if own[key] is not None]
        summary[f"mean_abs_{key}"] = round(sum(errors) / len(errors), 4) if errors else None
    return {"summary": summary, "ratios": _ratios(results), "judged": found}


def _mean(values: Sequence[float]) -> float | None:
    return math.exp(sum(map(math.log, values)) / len(values)) if values else None


_RATIOS = {
    "full over selective recompute, 175B": (
        "selective: GPT 175B on 64, block",
        "selective: GPT 175B on 64, selective",
    ),
    "full over selective recompute, 22B": ("selective: GPT 22B on 8, block", "selective: GPT 22B on 8, selective"),
    "1F1B over interleaved, 405B": (
        "torchtitan: Llama3.1-405B on 512, 1f1b",
        "torchtitan: Llama3.1-405B on 512, interleaved",
    ),
}


def _ratios(results: Sequence[Result]) -> dict[str, dict[str, float]]:
    known = {own.name: own for own in results}
    found = {}
    for what, (first, second) in _RATIOS.items():
        if first in known and second in known:
            one, other = known[first], known[second]
            published, predicted = one.published_s / other.published_s, one.predicted_s / other.predicted_s
            found[what] = {"published": published, "predicted": predicted, "error": predicted / published - 1}
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Make the rows that are asked for, and write the file anew after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=None, help="rows whose name has one of these texts")
    parser.add_argument("--own", action="store_true", help="our own choice for these rows")
    parser.add_argument("--json", type=Path, default=RESULTS)
    asked = parser.parse_args(arguments)
    kept = json.loads(asked.json.read_text()) if asked.json.is_file() else {}
    made = {own["name"]: Result(**own) for own in kept.get("rows", ())}
    ours = {own["name"]: own for own in kept.get("own", ())}
    every = list(rows())
    left_out = dict(own for own in every if isinstance(own, tuple))
    for row in (own for own in every if isinstance(own, Row)):
        if asked.only is not None and any(text in row.name for text in asked.only):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)
                if asked.own and row.parallel.ranks <= OWN:
                    ours[row.name] = chosen_by_us(row)
                elif not asked.own:
                    made[row.name] = planned(row)
            print(row.name, ours[row.name] if asked.own else made[row.name], flush=True)
        _write(asked.json, made, ours, left_out)


def _write(
    path: Path, made: Mapping[str, Result], ours: Mapping[str, Mapping[str, Any]], left_out: Mapping[str, str]
) -> None:
    order = [row.name for row in rows() if isinstance(row, Row)]
    results = [made[name] for name in order if name in made]
    own = [
        {**each, "theirs_s": made[name].predicted_s, "faster": made[name].predicted_s / each["step_s"] - 1}
        for name, each in ours.items()
        if name in made
    ]
    content = {**judged(results), "own": own or list(ours.values()), "not_modelled": left_out}
    content["rows"] = [asdict(each) for each in results]
    path.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
