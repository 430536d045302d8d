"""Tensor-parallel plans that run: two ranks against the plain model, outputs and gradients.

    python -m benchmarks.tensor_runs [NAME ...] [--seconds N] [--float32]

Small models of the configurations in :mod:`benchmarks.tensor_families`, those of RUNS or those named. Both ranks are
threads of one process, so that each model is recorded once. In float64 every cast to float32 in the recording is one
to float64: what is left is the order of sums.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from copy import deepcopy
from typing import Any

import torch
import transformers
from torch import Tensor, fx, nn

from autosplit.tensor.collectives import local_part
from autosplit.tensor.plan import TensorPlan, tensor_plan
from autosplit.trace.graph import TracedGraph
from benchmarks.tensor_families import ROWS, families, inputs, model_with_values, recording
from benchmarks.tensor_graph import rank_elements, rank_graph
from benchmarks.tensor_plans import RESULTS, write
from benchmarks.tensor_threads import RANKS, threads

RUNS = (
    "arcee cohere doge ernie4_5 gemma gemma2 gemma3 glm glm4 granite gpt_neox helium jais2 llama mistral mixtral "
    "nanochat nemotron olmo olmo2 olmo3 olmoe phi phi3 qwen2 qwen2_moe qwen3 qwen3_moe seed_oss smollm3 starcoder2"
).split()
LENGTH = 8


def compared(kind: type, dtype: torch.dtype) -> dict[str, Any]:
    """Return how far outputs and gradients on ranks are from one process, relative to the largest entry."""
    model = model_with_values(kind).to(dtype)
    if dtype is torch.float64:
        model.config._experts_implementation = "batched_mm"  # the grouped kernel has no float64
    done = recording(model, inputs(model, LENGTH))
    if dtype is torch.float64:
        _double(done.graph)
    plan = tensor_plan(done.graph, ranks=RANKS, rows=ROWS, latency_bytes=1.0)
    given = [ROWS, *(done.inputs.leaves[info.index] for info in done.graph.inputs)]
    plain = fx.Interpreter(done.graph.root, graph=done.graph.graph).run(*given)
    _loss(plain).backward()
    whole = {name: p.grad for name, p in model.named_parameters(remove_duplicate=False)}
    model.zero_grad()
    with threads() as group:
        found = group.run(lambda rank: _rank(rank, done.graph, plan, given, plain, whole))
    kinds = {collective.collective.kind for collective in plan.collectives}
    return {
        "outputs": max(one["outputs"] for one in found),
        "gradients": max(one["gradients"] for one in found),
        "collectives": len(plan.collectives),
        "kinds": sorted(kinds),
        "rank_share": round(rank_elements(plan) / sum(plan.elements.values()), 4),
    }


def _double(traced: TracedGraph) -> None:
    """Let casts to float32 be casts to float64."""
    for node in traced.graph.nodes:
        if node.op == "call_method" and node.target == "float":
            node.target = "double"
        node.args, node.kwargs = fx.node.map_aggregate(
            (node.args, dict(node.kwargs)), lambda value: torch.float64 if value is torch.float32 else value
        )


def _rank(
    rank: int, traced: TracedGraph, plan: TensorPlan, given: list[Any], plain: Any, whole: dict[str, Tensor | None]
) -> dict[str, float]:
    module: nn.Module = deepcopy(rank_graph(traced, plan, rank=rank))  # threads share no module that is called
    own = module(*given)
    parts = dict(module.named_parameters(remove_duplicate=False))
    used = [*{id(p): p for p in parts.values() if p.requires_grad}.values()]
    grads = torch.autograd.grad(_loss(own), used, allow_unused=True)
    gradients = {id(p): g for p, g in zip(used, grads, strict=True)}
    least = 1e-6 * max(float(g.abs().max()) for g in whole.values() if g is not None)
    apart = [0.0]
    for name, gradient in whole.items():
        if gradient is not None:
            part = local_part(gradient, plan.parameters[name], rank, RANKS)
            found = gradients.get(id(parts[name]))
            apart.append(_apart(part, torch.zeros_like(part) if found is None else found, least))
    outputs = [_apart(a, b) for a, b in zip(_floats(plain), _floats(own), strict=True)]
    return {"outputs": max(outputs), "gradients": max(apart)}


def _floats(values: Any) -> list[Tensor]:
    return [v for v in values if isinstance(v, Tensor) and v.is_floating_point() and v.requires_grad]


def _loss(values: Any) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    return sum((v * torch.randn(v.shape, generator=generator)).sum() for v in _floats(values))  # type: ignore[return-value]


def _apart(one: Tensor, two: Tensor, least: float = 1e-30) -> float:
    return float((one - two).detach().abs().max() / one.detach().abs().max().clamp(min=least)) if one.numel() else 0.0


def main() -> None:
    """Run what is asked for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*")
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--float32", action="store_true", help="also in float32")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    done = {entry["name"] for entry in known.get("runs", ())}
    end = time.monotonic() + arguments.seconds
    for name, kind in families().items():
        wanted = name in arguments.names if arguments.names else name.split(":")[0] in RUNS and name not in done
        if not wanted or time.monotonic() > end:
            continue
        entry: dict[str, Any] = {"name": name}
        for dtype in (torch.float64, torch.float32)[: 1 + arguments.float32]:
            key = str(dtype).removeprefix("torch.")
            try:
                found = compared(kind, dtype)
            except RuntimeError as error:  # an operation of the model that the dtype lacks
                entry[f"{key}_error"] = str(error).splitlines()[0]
                continue
            entry |= {key: max(found["outputs"], found["gradients"]), f"{key}_detail": found}
        print(entry, flush=True)
        write("runs", entry)


if __name__ == "__main__":
    main()
