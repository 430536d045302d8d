"""What kernels hold beside their results, measured: each operation alone, its allocator events against the prediction.

    python -m benchmarks.workspaces [--probes 20] [--threads 1] [--seed 0] [--misses]

The grid is of generic shapes, drawn at random, none of them a model's. The constants of
``autosplit/profile/opaque_*.py`` that are tagged "measured" were fitted to such shapes. ``exact`` counts probes within
64 bytes (a scalar that becomes a tensor), ``worst`` is the largest error beyond, as a share of all that the operation
holds at its peak; ``--misses`` lists what is off by more than a percent.

    python -m benchmarks.workspaces --device cuda:0 [--save FILE]

observes a GPU's kernels instead, on the training steps of the eight families, and writes a dated file that predictions
for that device take: ``cost_models/workspaces/<device>.json``, joined with what is there.
"""

from __future__ import annotations

import argparse
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor, nn

import cost_models
from autosplit.profile.allocations import Allocations
from autosplit.profile.clocks import Clock, clock_of
from autosplit.profile.ledger import Ledger
from autosplit.profile.opaque import workspace
from autosplit.profile.workspace_watch import WorkspaceWatch, device_name
from benchmarks.families import Family, families
from cost_models.workspaces import Workspaces

_SCALARS_BYTES = 64


@dataclass(frozen=True)
class Probe:
    """One operation that ran: its scratch as the allocator saw it, and as predicted.

    ``peak_bytes`` is all that it held at once, results included; ``shapes`` are those of its tensors.
    """

    operation: str
    dtype: str
    peak_bytes: int
    scratch_bytes: int
    predicted_bytes: int
    source: str
    shapes: str

    @property
    def off_bytes(self) -> int:
        """How far the prediction is off, beyond scalars."""
        return max(0, abs(self.predicted_bytes - self.scratch_bytes) - _SCALARS_BYTES)

    @property
    def error(self) -> float:
        """The error as a share of what the operation holds."""
        return self.off_bytes / max(1, self.peak_bytes)


class Watch(Ledger):
    """Runs each operation of the dispatcher under the allocator's events, and predicts its scratch."""

    def __init__(self) -> None:
        super().__init__()
        self.probes: list[Probe] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace != "aten" or func.is_view:
            return func(*args, **(kwargs or {}))
        given = {tensor.untyped_storage()._cdata for tensor in _tensors((args, kwargs))}
        with Allocations() as found:
            out = func(*args, **(kwargs or {}))
        results = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in _tensors(out)}
        made = sum(size for key, size in results.items() if key not in given)
        expected = workspace(func, args, kwargs or {}, out)
        dtype = next((str(t.dtype).removeprefix("torch.") for t in _tensors(args)), "")
        predicted, source = (0, "none") if expected is None else (expected.bytes, expected.source)
        shapes = " ".join(str(a) if not isinstance(a, Tensor) else str(list(a.shape)) for a in args)
        scratch = found.peak_bytes - made
        self.probes.append(Probe(func._opname, dtype, found.peak_bytes, scratch, predicted, source, shapes))
        return out


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def watch(run: Callable[[], Any]) -> list[Probe]:
    """Run something, and its backward with a dense cotangent; return its operations in order."""
    with Watch() as seen:
        out = [tensor for tensor in _tensors(run()) if tensor.requires_grad]
        if out:
            torch.autograd.backward(out, [torch.randn_like(tensor) for tensor in out])
    return seen.probes


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return random numbers that require a gradient."""
    return torch.randn(*shape).to(dtype).requires_grad_()


def convolutions(draw: random.Random, dtype: torch.dtype) -> Iterator[Callable[[], Any]]:
    """Yield convolutions: dense, pointwise, grouped, depthwise, patches, transposed; of one and two dimensions."""
    while True:
        rows, size, groups = draw.randint(1, 20), draw.randint(8, 40), draw.choice([1, 1, 1, 1, 2, 4, 8])
        kernel, stride = draw.choice([1, 1, 3, 3, 3, 4, 5, 7, 8]), draw.choice([1, 1, 2, 4])
        padding, bias = draw.choice([0, kernel // 2]), draw.random() < 0.5
        source, target = (groups * draw.choice([1, 3, 4, 8, 16, 20, 24]) for _ in range(2))
        if draw.random() < 0.15:
            source = target = groups = draw.choice([16, 24, 30])
        x = leaf(rows, source, size, size, dtype=dtype)
        kind = draw.random()
        if kind < 0.15:
            layer: nn.Module = nn.ConvTranspose2d(source, target, kernel, max(stride, 1), 0, bias=bias, dtype=dtype)
        elif kind < 0.25:
            layer, x = nn.Conv1d(source, target, kernel, stride, padding, bias=bias, dtype=dtype), x.flatten(2)
        else:
            layer = nn.Conv2d(source, target, kernel, stride, padding, groups=groups, bias=bias, dtype=dtype)
        yield lambda layer=layer, x=x: layer(x)


def recurrences(draw: random.Random) -> Iterator[Callable[[], Any]]:
    """Yield LSTMs of one to two layers, one or both ways."""
    while True:
        steps, rows, inputs, hidden = (draw.randint(1, 40), *(draw.randint(4, 160) for _ in range(3)))
        layer = nn.LSTM(inputs, hidden, draw.randint(1, 2), bidirectional=draw.random() < 0.3)
        x = leaf(steps, rows, inputs)
        yield lambda layer=layer, x=x: layer(x)[0]


def others(draw: random.Random, dtype: torch.dtype) -> Sequence[Callable[[], Any]]:
    """Return one call of everything else, in shapes drawn anew."""
    rows, length, width = draw.randint(1, 6), draw.randint(8, 900), 8 * draw.randint(1, 12)
    x, table = leaf(rows, length, width, dtype=dtype), leaf(500, width, dtype=dtype)
    words, classes = torch.randint(0, 500, (rows, length)), leaf(rows * length, 100, dtype=dtype)
    image = leaf(rows, 4 * draw.randint(1, 8), draw.randint(6, 60), draw.randint(6, 60), dtype=dtype)
    channels = image.shape[1]
    scale, mixed = torch.ones(channels), x.detach().float()

    def attention(**kwargs: Any) -> Tensor:
        q, k, v = (leaf(rows, length, 2, 16, dtype=dtype).transpose(1, 2) for _ in range(3))
        return F.scaled_dot_product_attention(q, k, v, **kwargs)

    return (
        lambda: attention(is_causal=True),
        lambda: attention(attn_mask=torch.ones(length, length, dtype=torch.bool)),
        lambda: attention(is_causal=True, dropout_p=0.1) if length < 300 else x,
        lambda: F.layer_norm(x, (width,), leaf(width, dtype=dtype), leaf(width, dtype=dtype)),
        lambda: F.rms_norm(x, (width,), leaf(width, dtype=dtype)),
        lambda: F.linear(x, leaf(24, width, dtype=dtype), leaf(24, dtype=dtype)),
        lambda: torch.bmm(x, x.transpose(1, 2)),
        lambda: F.softmax(x, -1),
        lambda: F.gelu(x),
        lambda: F.silu(x) * x + mixed,
        lambda: F.dropout(x, 0.1),
        lambda: F.embedding(words, table),
        lambda: F.cross_entropy(classes, torch.randint(0, 100, (rows * length,))),
        lambda: F.mse_loss(x, torch.zeros_like(x)),
        lambda: F.binary_cross_entropy_with_logits(x, torch.zeros_like(x)),
        lambda: (x.mean(-1), x.mean(), x.sum(1), x.sum((0, 2)), x.var(-1)),
        lambda: (x.sort(-1)[0], x.topk(2)[0], words.flatten().sort()[0], x.cumsum(1)),
        lambda: x.flatten(0, 1)[torch.randint(0, rows * length, (2 * rows * length,))],
        lambda: torch.zeros(500, width, dtype=dtype).index_add(0, words.flatten(), x.flatten(0, 1)),
        lambda: F.batch_norm(image, torch.zeros(channels), scale, scale.clone().requires_grad_(), scale, training=True),
        lambda: F.group_norm(image, 2, leaf(channels, dtype=dtype), leaf(channels, dtype=dtype)),
        lambda: F.max_pool2d(image, 3, 2, 1),
        lambda: F.adaptive_avg_pool2d(image, 1),
        lambda: F.interpolate(image, scale_factor=2),
        lambda: F.interpolate(image, scale_factor=2, mode="bilinear"),
    )


def grid(draw: random.Random, probes: int) -> Iterator[Callable[[], Any]]:
    """Yield everything that is probed."""
    for dtype in (torch.float32, torch.bfloat16):
        for _, run in zip(range(4 * probes), convolutions(draw, dtype), strict=False):
            yield run
        for _ in range(max(1, probes // 4)):
            yield from others(draw, dtype)
    for _, run in zip(range(probes), recurrences(draw), strict=False):
        yield run


def observed(place: torch.device, clock: Clock, *, chosen: Sequence[Family]) -> WorkspaceWatch:
    """Return what a device's kernels held in a training step of some families, in fp32 and under bf16 autocast."""
    found = WorkspaceWatch(clock)
    for family in chosen:
        torch.manual_seed(0)
        model, target = family.make().to(place), family.target(family.rows).to(place)
        inputs = [tensor.to(place) for tensor in family.batch(family.rows)]
        for low in (False, True):
            with found, torch.autocast(place.type, torch.bfloat16, enabled=low):
                family.loss(model(*inputs), target).backward()
            model.zero_grad(set_to_none=True)
    return found


def observe(place: torch.device, save: Path | None) -> None:
    """Observe a GPU and write what was seen."""
    name = device_name(place)
    seen = observed(place, clock_of(place, threads=1), chosen=list(families().values())).found(name)
    path = save or Path(cost_models.__path__[0]) / "workspaces" / f"{name}.json"
    both = Workspaces.load(path).joined(seen) if path.is_file() else seen
    both.save(path)
    most = max(both.operations.values(), default=0)
    print(f"{len(both.operations)} operations on {name}, most scratch {most} bytes, kept {both.kept_bytes}: {path}")


def table(probes: Sequence[Probe]) -> str:
    """Return one row per operation that holds, or is said to hold, more than its results."""
    by_operation: dict[tuple[str, str], list[Probe]] = defaultdict(list)
    for probe in probes:
        by_operation[probe.operation, probe.dtype].append(probe)
    rows = []
    for (operation, dtype), found in sorted(by_operation.items()):
        if any(probe.scratch_bytes or probe.predicted_bytes for probe in found):
            exact = sum(probe.off_bytes == 0 for probe in found)
            sources = sorted({probe.source for probe in found})
            worst = max(probe.error for probe in found)
            rows.append((operation, dtype, len(found), exact, f"{worst:.2%}", ", ".join(sources)))
    return tabulate(rows, ("operation", "dtype", "probes", "exact", "worst", "tags"), tablefmt="github")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--probes", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--misses", action="store_true")
    parser.add_argument("--device", type=torch.device, help="a CUDA device whose kernels are observed")
    parser.add_argument("--save", type=Path, metavar="FILE", help="with --device: the file to write")
    chosen = parser.parse_args()
    if chosen.device is not None:
        observe(chosen.device, chosen.save)
        return
    torch.set_num_threads(chosen.threads)
    torch.manual_seed(chosen.seed)
    found: list[Probe] = []
    for run in grid(random.Random(chosen.seed), chosen.probes):
        try:
            found += watch(run)
        except RuntimeError as error:
            if "kernel size" not in str(error).lower():
                raise
    print(f"{len(found)} operations, {chosen.threads} thread(s), {torch.backends.cpu.get_cpu_capability()}")
    print(table(found))
    if chosen.misses:
        print(*(probe for probe in found if probe.error > 0.01), sep="\n")


if __name__ == "__main__":
    main()
