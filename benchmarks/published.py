"""Published memory of training runs against what is predicted for them, row by row: modelled or not, and why.

    python -m benchmarks.published [--without-torchgpipe] [--json FILE]

Nothing is fitted to a row. torchgpipe's rows come from the fake pass and the allocator's simulation
(:mod:`benchmarks.published_torchgpipe`; recording their networks takes minutes), Megatron's from its authors' formulas,
zero bubble's from these and the actions of the schedules.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import cost_models
from autosplit.schedule.catalog import build
from benchmarks import pairs
from benchmarks.published_torchgpipe import experiments, predicted, stages_of

DATA = Path(__file__).parent / "data" / "published_memory_and_speed.json"
ASKED = 0.10
GIB, GB = 2**30, 10**9
MEGATRON_BYTES_PER_PARAMETER = 18
"""16-bit parameter 2, fp32 main gradient 4, fp32 master 4, Adam's moments 8."""

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Line:
    """One published figure, and what is predicted for it.

    Attributes:
        published: in ``unit``; None where the source has none.
        predicted: in ``unit``; None where it is not modelled.
        at_most: the prediction with what is unknown counted in full, where that differs.
        why: why it is not modelled, what was assumed, or why it misses.
    """

    row: str
    figure: str
    unit: str
    published: float | None
    predicted: float | None
    why: str
    at_most: float | None = None

    @property
    def error(self) -> float | None:
        """Predicted over published, less one."""
        return None if self.published is None or self.predicted is None else self.predicted / self.published - 1

    @property
    def within(self) -> bool | None:
        """Whether it is as near as asked; None where there is nothing to compare."""
        return None if self.error is None else abs(self.error) <= ASKED


def rows() -> list[Row]:
    """Return the published rows."""
    found: list[Row] = json.loads(DATA.read_text(encoding="utf-8"))["rows"]
    return found


def lines(row: Row, *, torchgpipe: bool = True) -> Iterator[Line]:
    """Yield a row's figures with their predictions."""
    if "param_opt_GiB" in row:
        yield from megatron(row)
    elif "total_reserved_GiB" in row or "gpipe_paper_model_GB" in row:
        yield from of_torchgpipe(row, run=torchgpipe)
    elif "schedule" in row:
        yield zero_bubble(row)
    elif "peak_GiB" in row:
        yield torchtitan(row)
    else:
        why = "no memory: times and bubbles, which the tests of the schedule simulator use"
        yield Line("2401.10241 Tables 5 and 9", "", "", None, None, why)


# -- Megatron ----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class TransformerShape:
    """What one microbatch brings to a layer: s, b, h and a of the paper, and over how many devices t a layer is cut."""

    sequence: int
    batch: int
    hidden: int
    heads: int
    tensor_parallel: int = 1

    @property
    def stream_elements(self) -> int:
        """Elements of one copy of the residual stream: s b h."""
        return self.sequence * self.batch * self.hidden


def layer_activation_bytes(
    shape: TransformerShape, *, sequence_parallel: bool = False, selective_recompute: bool = False
) -> float:
    """Return what a layer saves for its backward, per device and microbatch (2205.05198, section 4).

    ``s b h (34 + 5 a s / h)`` on one device: 11 s b h + 5 a s^2 b for attention, 19 for the MLP, 4 for two layer norms.
    Tensor parallelism cuts all but the 10 of layer norms, dropouts and block inputs by t, sequence parallelism these
    too; selective recompute leaves the 5 a s / h of softmax, its dropout and the scores to the backward.
    """
    scores = 0.0 if selective_recompute else 5 * shape.heads * shape.sequence / shape.hidden
    cut = (24 + scores) / shape.tensor_parallel
    whole = 10 / shape.tensor_parallel if sequence_parallel else 10
    return shape.stream_elements * (whole + cut)


def first_device_activation_bytes(
    shape: TransformerShape,
    *,
    layers: int,
    stages: int,
    virtual_stages: int = 1,
    sequence_parallel: bool = False,
    selective_recompute: bool = False,
) -> float:
    """Return what the first pipeline device saves under (interleaved) 1F1B (2205.05198, section 4).

    It holds ``stages`` microbatches of its ``layers / stages`` layers, so all layers once; interleaved
    ``1 + (stages - 1) / (stages * virtual_stages)`` times as much.
    """
    layer = layer_activation_bytes(shape, sequence_parallel=sequence_parallel, selective_recompute=selective_recompute)
    interleaved = 1 + (stages - 1) / (stages * virtual_stages) if virtual_stages > 1 else 1.0
    return layers * layer * interleaved


def layer_parameters(hidden: int) -> int:
    """Return a layer's weights, 4 h^2 in attention and 8 h^2 in the MLP, without biases and norms."""
    return 12 * hidden * hidden


_SEQUENCE = 2048
"""Of every model of 2205.05198 (its section 6)."""


def megatron(row: Row) -> Iterator[Line]:
    """Yield parameters with their optimizer, and activations without and with selective recompute."""
    cfg, name = row["cfg"], f"Megatron {row['model']}"
    shape = TransformerShape(_SEQUENCE, cfg["b"], cfg["h"], cfg["a"], tensor_parallel=cfg["t"])
    pipeline = {"layers": cfg["L"], "stages": cfg["p"], "virtual_stages": cfg["v"]}
    own = layer_parameters(cfg["h"]) * cfg["L"] / (cfg["p"] * cfg["t"])
    none = first_device_activation_bytes(shape, **pipeline)
    selective = first_device_activation_bytes(shape, **pipeline, sequence_parallel=True, selective_recompute=True)
    found = {
        "param_opt_GiB": (own * MEGATRON_BYTES_PER_PARAMETER, "parameters and optimizer", "18 bytes per parameter"),
        "act_none_GiB": (none, "activations", "formula; the fake pass gives the same for a layer on one device"),
        "act_seqsel_GiB": (selective, "activations, selective", "formula"),
    }
    for key, (size, figure, why) in found.items():
        yield Line(name, figure, "GiB", row[key], size / GIB, why)


# -- zero bubble -------------------------------------------------------------------------------------------------------
_LAYERS, _HEADS, _HIDDEN, _TOKENS, _BATCH, _DEVICES, _MICROBATCHES = 22, 24, 2304, 1024, 6, 8, 24
_VOCABULARY = 50304
"""GPT-2's 50257 padded to a multiple of 128, Megatron's default; the paper does not say."""
_CHUNKS = 3
_WAITING_UNITS = 32
"""``M_W`` of 2401.10241, Table 1, in units of s b h: what W needs of a layer."""


def zero_bubble(row: Row) -> Line:
    """Return the fullest device of the 1.5B model under a schedule.

    22 layers on 8 devices: three on each, one less where the embedding and the head are (2401.10241, section 5).
    """
    schedule = row["schedule"]
    shape = TransformerShape(_TOKENS, _BATCH, _HIDDEN, _HEADS)
    full, waiting = layer_activation_bytes(shape), _WAITING_UNITS * shape.stream_elements
    names = {"1F1B": ("1f1b", 1), "1F1B-I": ("interleaved", _CHUNKS), "ZB-1p": ("zb_h1", 1)}
    why = "M_B and M_W of Table 1 times the schedule's counts, 18 bytes per parameter; GB taken as 1e9 bytes"
    if schedule in names:
        name, chunks = names[schedule]
        size: float = max(_device_bytes(name, chunks, device, full, waiting) for device in range(_DEVICES))
        more = {"ZB-1p": "; as ZB-H1, whose bubbles it has in Table 5", "1F1B-I": "; chunks of one layer are assumed"}
        why += more.get(schedule, "")
    else:
        layers = (_LAYERS + 2) // _DEVICES
        size = 2 * _DEVICES * layers * full + MEGATRON_BYTES_PER_PARAMETER * layers * layer_parameters(_HIDDEN)
        why += "; its limit, 2 p M_B: the schedule is searched, and none of ours"
    return Line(f"zero bubble 1.5B {schedule}", "fullest device", "GB", row["mem_GB"], size / GB, why)


def _device_bytes(name: str, chunks: int, device: int, full: float, waiting: float) -> float:
    stages = _DEVICES * chunks
    schedule = build(name, stages=stages, microbatches=_MICROBATCHES, virtual_stages=chunks)
    own = schedule.stages_on(device)
    layers = {stage: (_LAYERS + 2) // stages - (stage in (0, stages - 1)) for stage in own}
    parameters = sum(layers.values()) * layer_parameters(_HIDDEN)
    parameters += _VOCABULARY * _HIDDEN * sum(stage in (0, stages - 1) for stage in own)
    changes = {"F": full, "B": -full, "I": waiting - full, "W": -waiting}
    held = most = 0.0
    for action in schedule.lanes[device]:
        held += layers[action.stage] * changes[action.kind]
        most = max(most, held)
    return most + MEGATRON_BYTES_PER_PARAMETER * parameters


# -- torchtitan --------------------------------------------------------------------------------------------------------
def torchtitan(row: Row) -> Line:
    """Return why a row is not modelled: by what its configuration names."""
    reasons = {
        "FSDP": "parameters sharded over data-parallel ranks",
        "TP8": "tensor parallelism",
        "SAC": "selective recompute, operation by operation",
        "compile": "torch.compile's fusion and its choice of what to save",
        "fp8": "fp8 casts",
        "asyncTP": "asynchronous tensor parallelism",
        "same": "as the row before: FSDP, tensor parallelism, fp8",
    }
    why = "not modelled: " + "; ".join(reason for word, reason in reasons.items() if word in row["cfg"])
    return Line(f"{row['model']} {row['cfg']}", "reserved peak", "GiB", row["peak_GiB"], None, why)


# -- torchgpipe --------------------------------------------------------------------------------------------------------
_SCRATCH = "at most: with Winograd's scratch, not fused, for every 3 x 3 convolution; what cuDNN 7 took is unknown"
_LEFT_OUT = "for unknown: cuDNN 7's scratch, and blocks whose copies were not done when the host went on"
_NO_SCRATCH = f"not counted, {_LEFT_OUT}"
_HUANG = "Huang et al.'s own TensorFlow program: "


def of_torchgpipe(row: Row, *, run: bool) -> Iterator[Line]:
    """Yield parameters, and reserved bytes over all devices; theirs for AmoebaNet-D less 12 bytes per parameter."""
    name = row["model"]
    experiment = experiments()[name]
    with torch.device("meta"):
        parameters = sum(p.numel() for p in experiment.make().parameters())
    yield Line(name, "parameters", "M", row["params_M"], parameters / 1e6, "counted on our own definition")
    if "model_GiB" in row:
        model = parameters * experiment.state_bytes
        yield Line(name, "model", "GiB", row["model_GiB"], model / GIB, "parameter, gradient, RMSprop's average")
        why = _HUANG + "12 bytes per parameter"
        yield Line(name, "model (GPipe paper)", "GB", row["gpipe_paper_model_GB"], model / GB, why)
        why = f"not modelled: {_HUANG}how it allocates is not published"
        yield Line(name, "activations (GPipe paper)", "GB", row["gpipe_paper_act_GB"], None, why)
    if not run:
        yield Line(name, "reserved", "GiB", _total(row), None, "left out of this run")
        return
    stages = stages_of(experiment)
    least, most = (predicted(experiment, stages, scratch=scratch) for scratch in (False, True))
    bare, full = least.reserved_bytes / GIB, most.reserved_bytes / GIB
    if (total := _total(row)) is None:
        usable = cost_models.device("P40-24GB").usable_bytes or 0
        fits = "fits" if least.reserved_bytes <= usable else "does not fit"
        why = f"published: out of memory; predicted: {fits} on a P40, which has {usable / GIB:.1f} GiB to give"
        yield Line(name, "reserved", "GiB", None, bare, why, at_most=full)
        return
    why = _SCRATCH if full > bare else _NO_SCRATCH
    yield Line(name, "reserved", "GiB", total, bare, why, at_most=full)
    if "peak_act_GiB" in row:
        own = least.model_bytes / GIB
        why = "the line above less the model: all its error, on a smaller number; not counted, " + _LEFT_OUT
        yield Line(name, "reserved less model", "GiB", row["peak_act_GiB"], bare - own, why, at_most=full - own)


def _total(row: Row) -> float | None:
    if "total_reserved_GiB" in row:
        return float(row["total_reserved_GiB"])
    return None if row["peak_act_GiB"] is None else float(row["model_GiB"] + row["peak_act_GiB"])


# -- the table ---------------------------------------------------------------------------------------------------------
def shown(line: Line) -> dict[str, str]:
    """Return a line of the table."""

    def number(value: float | None) -> str:
        return "" if value is None else f"{value:.4g}"

    verdict = {True: "yes", False: "yes, misses", None: "yes" if line.predicted is not None else "no"}[line.within]
    return {
        "row": line.row,
        "figure": line.figure,
        "unit": line.unit,
        "published": number(line.published),
        "predicted": number(line.predicted),
        "at most": number(line.at_most),
        "error": "" if line.error is None else f"{line.error:+.1%}",
        "modelled": verdict,
        "why": line.why,
    }


def checks(found: Sequence[Line]) -> list[pairs.Check]:
    """Return what is asked of the modelled figures."""
    return [
        pairs.at_most(f"{line.row}: {line.figure}", ASKED, abs(line.error)) for line in found if line.error is not None
    ]


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table, and write all figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--without-torchgpipe", action="store_true", help="leave out what takes minutes to record")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    found: list[Line] = []
    for row in rows():
        print(f"\r\033[K{row.get('model', '')}", end="", file=sys.stderr, flush=True)
        found += lines(row, torchgpipe=not arguments.without_torchgpipe)
    print("\r\033[K", end="", file=sys.stderr, flush=True)
    print(pairs.table([shown(line) for line in found]))
    print(f"\n{pairs.checks_text(checks(found))}")
    if arguments.json:
        figures = [{**asdict(line), "error": line.error, "modelled": line.predicted is not None} for line in found]
        pairs.write(
            arguments.json,
            benchmark="published",
            settings={"asked": ASKED, "torchgpipe": not arguments.without_torchgpipe},
            machine=pairs.facts(),
            figures=figures,
            checks=checks(found),
        )


if __name__ == "__main__":
    main()
