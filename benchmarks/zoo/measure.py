"""One case in this process: split, run, and compare with the plain model on the full batch."""

from __future__ import annotations

import copy
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from autosplit import Sample, autosplit
from autosplit.profile.node_costs.fake import fake_costs
from autosplit.trace.ladder import trace
from benchmarks.zoo.case import LENGTH, OTHER_LENGTH, OTHER_ROWS, ROWS, Case, Shape, as_double
from tests.equivalence.equality import Batch, Run, difference, forward_backward

CHUNKS = 3
TOLERANCE_FLOAT64 = 1e-9
ROUNDING = 0.05
"""A float32 difference is float32's own when it falls below TOLERANCE_FLOAT64 in float64 and is at most ROUNDING, or at
most twice what separates the plain model in float32 from itself in float64 (one ReLU that rounding switches)."""
SHAPES = {
    "eval": Shape(ROWS, LENGTH),
    "train": Shape(ROWS, LENGTH),
    "rows": Shape(OTHER_ROWS, LENGTH),
    "length": Shape(ROWS, OTHER_LENGTH),
    "values": Shape(ROWS, LENGTH, turned=True),
}


def warm_up() -> None:
    """Record a small model, so that what torch imports at first use is in no case's seconds."""
    trace(nn.Linear(2, 2), Sample(torch.zeros(4, 2)))


def measure(case: Case) -> dict[str, Any]:
    """Return what the table has to say about one case; errors of autosplit are results too."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _measured(case)


def _measured(case: Case) -> dict[str, Any]:
    result: dict[str, Any] = {"name": case.name, "group": case.group, "kind": case.kind, "blocks": case.blocks}
    torch.manual_seed(0)
    model = case.build().eval()
    sample = _batch(case, "eval")
    plain, original = copy.deepcopy(model), copy.deepcopy(model)
    result["parameters"] = sum(p.numel() for p in model.parameters())
    result |= _record(case, copy.deepcopy(model), sample)
    began = time.perf_counter()
    try:
        pipe = _split(case, model, sample)
    except Exception as error:
        return result | {"answer": False, "error": described(error), "checks": {}}
    result["split_s"] = time.perf_counter() - began
    checks = {c: _check(c, _batch(case, c), plain, pipe) | {"tolerance": case.tolerance} for c in case.checks}
    result |= {"checks": checks} | _planned(pipe) | _identity(plain, pipe)
    if any(wrong(check) for check in checks.values()):
        try:
            torch.set_default_dtype(torch.float64)
            _in_float64(case, original, checks)
        finally:
            torch.set_default_dtype(torch.float32)
    result["answer"] = all("error" not in check for check in result["checks"].values())
    return result


def _split(case: Case, model: nn.Module, sample: Batch) -> Any:
    given = Sample(*sample.args, **sample.kwargs)
    return autosplit(model, devices=case.devices, chunks=CHUNKS, sample=given, batch_dims=case.batch_dims)


def wrong(check: dict[str, Any]) -> bool:
    """Tell whether a check gave an answer that is not the plain model's in float32."""
    return "error" not in check and not (check["difference"] <= check["tolerance"] and not check["mismatch"])


def described(error: BaseException) -> dict[str, Any]:
    """Return an error as data: its type, its text with notes, and where it came from."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "autosplit" in Path(f.filename).parts]
    where = [f"{Path(f.filename).name}:{f.lineno} {f.name}" for f in frames[-3:]]
    text = " ".join([str(error), *getattr(error, "__notes__", ())])
    return {"type": type(error).__name__, "text": text[:1500], "where": where}


def _batch(case: Case, check: str) -> Batch:
    torch.manual_seed(1 + list(SHAPES).index(check))
    return case.inputs(SHAPES[check])


def _record(case: Case, model: nn.Module, sample: Batch) -> dict[str, Any]:
    """Return what the recording alone takes and gives; the pipe's own split says why when there is none."""
    forward_backward(model, sample)
    began, began_cpu = time.perf_counter(), time.process_time()
    try:
        found = trace(model, Sample(*sample.args, **sample.kwargs), batch_dims=case.batch_dims)
    except Exception:
        return {"record_s": None}
    seconds = {"record_s": time.perf_counter() - began, "record_cpu_s": time.process_time() - began_cpu}
    return seconds | _nodes(case, model, found.graph)


def _nodes(case: Case, model: nn.Module, traced: Any) -> dict[str, Any]:
    """Return how many nodes a recording has, and the largest share of the FLOPs of one of them, ends aside."""
    infos = [info for _, info in traced.compute_nodes()]
    try:
        costs = fake_costs(traced, rows=3, batch_rows=ROWS)
    except Exception as error:
        return {"nodes": len(infos), "flops_error": described(error)}
    ends = tuple(case.ends(model))
    inside = [i for i in infos if not any(i.module == end or i.module.startswith(f"{end}.") for end in ends)]
    flops = {i.name: costs[i.name].forward_flops for i in inside}
    total = sum(flops.values())
    largest = max(flops, key=lambda name: flops[name], default=None)
    share = flops[largest] / total if largest is not None and total else None
    return {"nodes": len(infos), "largest": largest, "largest_share": share}


def _planned(pipe: Any) -> dict[str, Any]:
    plan = pipe.plan
    stages, microbatches = len(plan.stages), len(plan.microbatch_rows)
    return {
        "rung": getattr(plan, "rung", "recorded"),
        "kept_whole": [str(entry) for entry in getattr(plan, "whole", ())],
        "stages": stages,
        "microbatches": microbatches,
        "full_share": plan.class_flops.get("full", 0.0),
        "whole": stages == 1 or microbatches == 1,
        "notes": list(plan.notes),
    }


def _identity(plain: nn.Module, pipe: Any) -> dict[str, Any]:
    """Tell whether names, kinds of state and the mode switch are the model's own."""
    names = all(
        [name for name, _ in getattr(pipe, kind)()] == [name for name, _ in getattr(plain, kind)()]
        for kind in ("named_parameters", "named_buffers", "named_modules")
    ) and list(pipe.state_dict()) == list(plain.state_dict())
    switch = True
    for mode in (True, False):
        pipe.train(mode)
        switch &= all(m.training is mode for m in pipe.modules()) and pipe.unsplit().training is mode
    return {"names_exact": names, "switch_exact": switch}


def _check(check: str, batch: Batch, plain: nn.Module, pipe: Any) -> dict[str, Any]:
    """Run both on the same batch, forward and backward, and return how far they are apart at most.

    In train mode two steps follow one another: what the first one did to buffers shows in the second.
    """
    plain.train(check == "train")
    pipe.train(check == "train")
    worst: dict[str, Any] = {"difference": -1.0}
    for _ in range(2 if check == "train" else 1):
        torch.manual_seed(9)
        expected = forward_backward(plain, batch)
        torch.manual_seed(9)
        began = time.perf_counter()
        try:
            actual = forward_backward(pipe, batch)
        except Exception as error:
            pipe.unsplit().load_state_dict(plain.state_dict())  # the next check begins with equal buffers
            return {"error": described(error)}
        found = {"seconds": time.perf_counter() - began} | compare(actual, expected)
        if found["mismatch"] or not found["difference"] <= worst["difference"]:
            worst = found
    return worst


def compare(actual: Run, expected: Run) -> dict[str, Any]:
    """Return the largest difference of outputs, gradients and buffers, where it is, and what differs in kind."""
    worst, where, mismatches = 0.0, "", []
    for kind in ("outputs", "gradients", "buffers"):
        mine, other = getattr(actual, kind), getattr(expected, kind)
        if list(mine) != list(other):
            mismatches.append(f"{kind}: other names")
        for name in (n for n in other if n in mine):
            found = _distance(mine[name], other[name])
            if isinstance(found, str):
                mismatches.append(f"{kind[:-1]} {name}: {found}")
            elif not found <= worst:
                worst, where = found, f"{kind[:-1]} {name}"
    return {"difference": worst, "at": where, "mismatch": mismatches[:5]}


def _distance(actual: Any, plain: Any) -> float | str:
    if not isinstance(plain, Tensor):
        return 0.0 if type(actual) is type(plain) and actual == plain else f"{actual!r:.80}, plain {plain!r:.80}"
    if not isinstance(actual, Tensor):
        return f"{actual!r:.80}, plain has a tensor"
    if (actual.shape, actual.dtype) != (plain.shape, plain.dtype):
        return f"{tuple(actual.shape)} {actual.dtype}, plain {tuple(plain.shape)} {plain.dtype}"
    actual, plain = actual.detach(), plain.detach()
    if not (plain.is_floating_point() or plain.is_complex()):
        return 0.0 if torch.equal(actual, plain) else "other integers"
    if not torch.equal(actual.isfinite(), plain.isfinite()):
        return "other infinities"
    finite = plain.isfinite()
    return difference(torch.where(finite, actual, 0), torch.where(finite, plain, 0))


def _in_float64(case: Case, original: nn.Module, checks: dict[str, Any]) -> None:
    """Add to checks that missed in float32 how far apart the same runs are in float64: same weights, same inputs."""
    missed = [name for name, check in checks.items() if wrong(check)]
    batches = {name: _single(case, name) for name in missed}
    single = {name: _stepped(original, name, batch) for name, batch in batches.items()}
    model = original.double().eval()
    plain = copy.deepcopy(model)
    try:
        pipe = _split(case, model, as_double(_single(case, "eval")))
        for name in missed:
            batch = as_double(batches[name])
            own = compare(_doubled(single[name]), _stepped(plain, name, batch))["difference"]
            checks[name] |= _explained(checks[name], _check(name, batch, plain, pipe), own)
    except Exception as error:
        for name in missed:
            checks[name].setdefault("float64_error", described(error))


def _single(case: Case, check: str) -> Batch:
    """Return a check's float32 batch while float64 is the default."""
    torch.set_default_dtype(torch.float32)
    batch = _batch(case, check)
    torch.set_default_dtype(torch.float64)
    return batch


def _stepped(model: nn.Module, check: str, batch: Batch) -> Run:
    """Run a copy of a model once, in its own dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(next((p.dtype for p in model.parameters()), before))
    run = forward_backward(copy.deepcopy(model).train(check == "train"), batch)
    torch.set_default_dtype(before)
    return run


def _explained(check: dict[str, Any], again: dict[str, Any], own: float) -> dict[str, Any]:
    """Tell whether float32 alone makes a difference; ``own``: how far the plain model in float32 is from float64."""
    same = "error" not in again and not again["mismatch"] and again["difference"] <= TOLERANCE_FLOAT64
    small = not check["mismatch"] and check["difference"] <= max(ROUNDING, 2 * own)
    return {"float64": again.get("difference"), "plain_from_float64": own, "only_float32": same and small}


def _doubled(run: Run) -> Run:
    def double(values: dict[str, Any]) -> dict[str, Any]:
        return {n: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for n, v in values.items()}

    return Run(double(run.outputs), run.loss.double(), double(run.gradients), double(run.buffers))
