"""Tensor-parallel plans found from the graph, beside those that transformers' configurations carry.

    python -m benchmarks.tensor_plans plans [NAME ...]    every configuration with a ``base_model_tp_plan``, on meta
    python -m benchmarks.tensor_plans runs [NAME ...]     models of the zoo on two gloo ranks against one process

Both write to ``results/tensor-plans.json`` what they were asked for; other entries stay.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import importlib
import inspect
import json
import pkgutil
import re
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from autosplit.options import Sample
from autosplit.tensor.axes import Shard
from autosplit.tensor.build import rank_graph
from autosplit.tensor.collectives import local_part
from autosplit.tensor.plan import TensorPlan, tensor_plan
from autosplit.tensor.styles import styles_of
from autosplit.trace.graph import TracedGraph
from autosplit.trace.ladder import trace
from benchmarks.zoo import catalog
from benchmarks.zoo.case import Case, Shape, as_double
from tests.equivalence.equality import Batch

RESULTS = Path(__file__).parent / "results" / "tensor-plans.json"
RANKS, ROWS, LENGTH = 2, 2, 256
_STYLES = {"colwise": 0, "packed_colwise": 0, "colwise_gather_output": 0, "embedding_rowwise": 0}
_STYLES |= {"rowwise": -1, "packed_rowwise": -1, "rowwise_split_input": -1, "embedding_colwise": 1}
"""Which dimension of a weight a style of transformers shards."""
_LAYERS = ("num_hidden_layers", "num_layers", "n_layer", "encoder_layers", "decoder_layers", "depth")


def configurations() -> dict[str, type]:
    """Return the configuration classes that carry a plan, by their model types."""
    found: dict[str, type] = {}
    for module in pkgutil.iter_modules(transformers.models.__path__):
        with contextlib.suppress(ImportError, AttributeError):
            loaded = importlib.import_module(f"transformers.models.{module.name}.configuration_{module.name}")
            for kind in vars(loaded).values():
                if (
                    isinstance(kind, type)
                    and kind.__module__ == loaded.__name__
                    and kind.__dict__.get("base_model_tp_plan")
                ):
                    found[f"{module.name}:{kind.__name__}"] = kind
    return found


MOST = 50_000_000
"""Parameters of a model that gets values."""
SMALL = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "head_dim": 32}
SMALL |= {"num_key_value_heads": 4, "moe_intermediate_size": 128, "num_experts": 8, "num_local_experts": 8}


def configuration(kind: type, **values: Any) -> Any:
    """Return a configuration with its own widths, or with others, of two layers and without a cache."""
    config = kind()
    known = {name: value for name, value in values.items() if hasattr(config, name)}
    with contextlib.suppress(Exception):
        known["num_hidden_layers"] = min(2, config.num_hidden_layers)
    if isinstance(getattr(config, "layer_types", None), list):
        known["layer_types"] = config.layer_types[: known["num_hidden_layers"]]
    try:
        config = kind(**known)
    except Exception:  # it ties other settings to these: as it is then
        config = kind()
        for name in _LAYERS:
            if isinstance(getattr(config, name, None), int):
                setattr(config, name, min(2, getattr(config, name)))
    config.use_cache = False
    return config


def model_class(kind: type) -> type:
    """Return the base model of a configuration class."""
    mapping = transformers.MODEL_MAPPING
    if kind in mapping:
        return mapping[kind]  # type: ignore[no-any-return]
    module = importlib.import_module(kind.__module__.replace("configuration_", "modeling_"))
    found = [c for c in vars(module).values() if isinstance(c, type) and c.__module__ == module.__name__]
    found = [c for c in found if c.__dict__.get("config_class") is kind or _annotated(c) is kind]
    return min((c for c in found if not c.__name__.endswith("PreTrainedModel")), key=lambda c: len(c.__name__))


def _annotated(kind: type) -> Any:
    hint = inspect.get_annotations(kind).get("config")
    return getattr(importlib.import_module(kind.__module__), hint, None) if isinstance(hint, str) else hint


def recorded(kind: type) -> tuple[nn.Module, TracedGraph, str]:
    """Return a base model and its recording for some tokens: on meta, or small with values where that fails."""
    try:
        with torch.device("meta"):
            model = model_class(kind)(configuration(kind)).eval()
        tokens = torch.zeros(ROWS, LENGTH, dtype=torch.int64, device="meta")
        return model, trace(model, Sample(input_ids=tokens)).graph, "meta"
    except Exception:  # what cannot be recorded without values, such as a forward that reads one
        with torch.device("meta"):
            count = sum(p.numel() for p in model_class(kind)(configuration(kind, **SMALL)).parameters())
        if count > MOST:
            raise
        model = model_class(kind)(configuration(kind, **SMALL)).eval()
        tokens = torch.randint(3, 100, (ROWS, LENGTH))
        return model, trace(model, Sample(input_ids=tokens)).graph, "small"


def styles(model: nn.Module, table: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Yield the parameters that entries of a plan are about, with their styles."""
    for name, parameter in model.named_parameters():
        if parameter.ndim < 2:
            continue
        for pattern, style in table.items():
            regular = re.escape(pattern).replace(r"\*", r"\d+")
            if re.fullmatch(rf"(.*\.)?{regular}(\.weight)?", name) and style in _STYLES:
                yield name, style
                break


def compared(name: str, kind: type) -> dict[str, Any]:
    """Plan a configuration's model and compare it with the plan that it carries."""
    start = time.perf_counter()
    model, traced, size = recorded(kind)
    recorded_s, start = time.perf_counter() - start, time.perf_counter()
    plan = tensor_plan(traced, ranks=RANKS, rows=ROWS)
    planned_s = time.perf_counter() - start
    parameters = dict(model.named_parameters())
    rows, differences, pins = 0, [], {}
    for parameter, style in styles(model, kind.base_model_tp_plan):
        rows += 1
        placement = plan.parameters[parameter]
        want = _STYLES[style] % parameters[parameter].ndim
        if parameters[parameter].ndim == 3 and "colwise" in style:
            want = 1
        pins[parameter] = want
        own = placement.dim if isinstance(placement, Shard) else None
        if own != want:
            differences.append(
                {
                    "parameter": parameter,
                    "style": style,
                    "ours": str(placement),
                    "why": plan.replicated.get(parameter, ""),
                }
            )
    sharded = [p for p, placement in plan.parameters.items() if isinstance(placement, Shard)]
    listed = {p for p, _ in styles(model, kind.base_model_tp_plan)}
    theirs = tensor_plan(traced, ranks=RANKS, rows=ROWS, pins=pins).wire_bytes if differences else plan.wire_bytes
    better = len(differences) if plan.wire_bytes <= theirs else 0
    return {
        "name": name,
        "recorded": size,
        "fewer_bytes": better,
        "wire_bytes_pinned": theirs,
        "projections": rows,
        "same": rows - len(differences),
        "differences": differences,
        "beyond": sorted(set(sharded) - listed)[:40],
        "wire_bytes": plan.wire_bytes,
        "collectives": dict(Counter(f"{c.collective.kind} {c.collective.phase}" for c in plan.collectives)),
        "rank_share": plan.rank_elements / sum(plan.elements.values()),
        "recorded_s": round(recorded_s, 2),
        "planned_s": round(planned_s, 2),
    }


def plans(names: list[str], part: int, parts: int) -> Iterator[dict[str, Any]]:
    """Compare every configuration that has a plan, or those named."""
    for name, kind in [*configurations().items()][part::parts]:
        if names and not any(one in name for one in names):
            continue
        try:
            yield compared(name, kind)
        except Exception as error:  # a configuration whose model is not made or recorded is listed with its reason
            yield {"name": name, "error": f"{type(error).__name__}: {str(error)[:200]}"}


# -- runs --------------------------------------------------------------------------------------------------------------
RUNS = (
    "gpt2 gpt2-labels llama llama-padded llama-eager mistral qwen2 qwen3 gemma gemma2 gemma3 phi phi3 olmo2 stablelm "
    "starcoder2 granite cohere smollm3 glm nemotron gpt-neox gpt-j opt bloom falcon mpt codegen bert t5 mixtral"
).split()
"""Models of the zoo."""


def runs(names: list[str], part: int, parts: int) -> list[dict[str, Any]]:
    """Compare models on two ranks with one process."""
    chosen = [name for name in RUNS if not names or name in names][part::parts]
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_ranks, args=(RANKS, chosen, folder), nprocs=RANKS)
        return json.loads((Path(folder) / "found.json").read_text())  # type: ignore[no-any-return]


def _ranks(rank: int, ranks: int, names: list[str], folder: str) -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    cases = {case.name: case for case in catalog.cases(("transformers",))}
    found = []
    for name in names:
        found.append(compared_run(cases[name], rank, ranks))
        if rank == 0:
            print(found[-1], flush=True)
            (Path(folder) / "found.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def compared_run(case: Case, rank: int, ranks: int) -> dict[str, Any]:
    """Return how far outputs and gradients on ranks are from one process, in float64, relative to the largest entry."""
    torch.manual_seed(0)
    model = case.build().double().eval()
    batch = as_double(case.inputs(Shape(4, 8)))
    done = trace(model, Sample(*batch.args, **batch.kwargs))
    plan = tensor_plan(done.graph, ranks=ranks, rows=4)
    module = rank_graph(done.graph, plan)
    inputs = [4, *(done.inputs.leaves[info.index] for info in done.graph.inputs)]
    plain = torch.fx.Interpreter(done.graph.root, graph=done.graph.graph).run(*inputs)
    _loss(plain).backward()
    whole = {name: p.grad for name, p in model.named_parameters(remove_duplicate=False)}
    model.zero_grad()
    own = module(*inputs)
    _loss(own).backward()
    parts = dict(module.named_parameters(remove_duplicate=False))
    largest = {
        "outputs": max(_apart(a, b) for a, b in zip(_floats(plain), _floats(own), strict=True)),
        "gradients": 0.0,
    }
    least = 1e-6 * max(float(g.abs().max()) for g in whole.values() if g is not None)
    for name, gradient in whole.items():
        if gradient is not None:
            part = local_part(gradient, plan.parameters[name], rank, ranks)
            given = parts[name].grad
            apart = _apart(part, torch.zeros_like(part) if given is None else given, least)
            largest["gradients"] = max(largest["gradients"], apart)
    worst = torch.tensor([*largest.values()])
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return {
        "name": case.name,
        "outputs": float(worst[0]),
        "gradients": float(worst[1]),
        "largest": float(worst.max()),
        "rank_share": plan.rank_elements / sum(plan.elements.values()),
        "collectives": len(plan.collectives),
        "styles": _styles_run(case, batch, done.graph, plan, plain),
    }


def _floats(values: Any) -> list[Tensor]:
    return [v for v in values if isinstance(v, Tensor) and v.is_floating_point() and v.requires_grad]


def _loss(values: Any) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    return sum((v * torch.randn(v.shape, generator=generator)).sum() for v in _floats(values))  # type: ignore[return-value]


def _apart(one: Tensor, two: Tensor, least: float = 1e-30) -> float:
    return float((one - two).abs().max() / one.abs().max().clamp(min=least)) if one.numel() else 0.0


def _styles_run(case: Case, batch: Batch, traced: TracedGraph, plan: TensorPlan, plain: Any) -> str:
    """Say how the model itself runs with the plan's styles: "equal", how far off, or what it raises."""
    found = styles_of(traced, plan)
    if found.left_out:
        return f"cannot be said: {next(iter(found.left_out.values()))}"
    torch.manual_seed(0)
    model = case.build().double().eval()
    try:
        parallelize_module(model, init_device_mesh("cpu", (plan.ranks,)), found.styles)
        output = model(*batch.args, **batch.kwargs)
        first = next(iter(output.values())) if isinstance(output, dict) else output[0]
        apart = _apart(_floats(plain)[0], first)
    except Exception as error:  # what the model's own Python makes of local tensors
        return f"{type(error).__name__}: {str(error)[:120]}"
    return "equal" if apart < 1e-6 else f"off by {apart:.1e}"


def main() -> None:
    """Run what is asked for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("plans", "runs"))
    parser.add_argument("names", nargs="*")
    parser.add_argument("--part", default="0/1", help="which of how many parts of the configurations")
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    part, parts = map(int, arguments.part.split("/"))
    for one in (plans if arguments.what == "plans" else runs)(arguments.names, part, parts):
        print(one["name"], {key: value for key, value in one.items() if key in _SHOWN}, flush=True)
        if arguments.write:
            write(arguments.what, one)


_SHOWN = ("same", "projections", "fewer_bytes", "error", "largest", "styles")


def write(what: str, one: dict[str, Any]) -> None:
    """Put one entry into the results, in the place of an older one."""
    with RESULTS.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        entries = {entry["name"]: entry for entry in (*known.get(what, ()), one)}
        known[what] = [entries[name] for name in sorted(entries)]
        known["summary"] = summary(known)
        RESULTS.write_text(json.dumps(known, indent=1) + "\n")
    RESULTS.with_suffix(".lock").unlink(missing_ok=True)


def summary(results: dict[str, Any]) -> dict[str, Any]:
    """Return what was asked beside what was measured."""
    done = [one for one in results.get("plans", ()) if one.get("projections")]
    count = sum(one["projections"] for one in done)
    good = sum(one["same"] + one["fewer_bytes"] for one in done)
    equal = [one for one in results.get("runs", ()) if one.get("largest", 1) <= 1e-6]
    return {
        "configurations": {"asked": 100, "measured": len(done)},
        "projections": count,
        "same_or_fewer_bytes": {"asked": 0.98, "measured": round(good / max(count, 1), 4)},
        "same": sum(one["same"] for one in done),
        "rank_share": {"asked": 1 / RANKS + 0.03, "measured": max((one["rank_share"] for one in done), default=None)},
        "runs": {"asked": 20, "measured": len(equal), "of": len(results.get("runs", ()))},
    }


if __name__ == "__main__":
    main()
