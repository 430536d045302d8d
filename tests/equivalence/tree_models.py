"""Models that no graph can follow, each with batches of its own, and how to run one beside the plain model."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autosplit.options import Options, Sample
from autosplit.planning.plan import Plan
from autosplit.planning.tree import plan_tree
from autosplit.runtime.lanes import lane
from autosplit.runtime.tree import TreeRun
from tests.equivalence.equality import flatten

WIDTH = 8
CPU = torch.device("cpu")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.inner = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(self.norm(x))


class Stack(nn.Module):
    """What most of the models have: a layer, a parameter of the root's own, blocks, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.shift = nn.Parameter(torch.linspace(-1, 1, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, 3)

    def begin(self, x: Tensor) -> Tensor:
        return self.embed(x) + self.shift


class EarlyExit(Stack):
    """Stops at a value: how deep depends on the batch."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.begin(x)
        for block in self.blocks:
            x = block(x)
            if x.abs().mean() > 0.9:
                break
        return self.head(x)


class LayerDrop(Stack):
    """Leaves out blocks at random in training, by Python's and by torch's generator."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.begin(x)
        for index, block in enumerate(self.blocks):
            drawn = random.random() if index % 2 else torch.rand(()).item()
            if not self.training or drawn > 0.5:
                x = block(x)
        return self.head(F.dropout(x, 0.3, self.training))


class Detector(Stack):
    """Takes a list of images of different sizes, returns a list of dicts."""

    def forward(self, images: list[Tensor]) -> list[dict[str, Tensor]]:
        found = []
        for image in images:
            x = self.begin(image)
            for block in self.blocks:
                x = block(x)
            scores = self.head(x).softmax(-1)
            found.append({"scores": scores[scores[:, 0] > 0.3], "box": x.mean(0)})
        return found


class Numpy(Stack):
    """Computes with numpy in the middle."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](self.begin(x))
        scale = np.sqrt(np.abs(x.detach().numpy()).mean() + 1.0)
        for block in list(self.blocks)[1:]:
            x = block(x) * float(scale)
        return self.head(x)


class Counter(Stack):
    """Counts its calls in a Python number and in a buffer, and does other things at every third."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen += x.shape[0]
        x = self.begin(x)
        for block in self.blocks:
            x = block(x) / self.calls
        return self.head(x) if self.calls % 3 else self.head(-x)


class PerRow(Stack):
    """Loops over its rows: their number is the loop's."""

    def forward(self, x: Tensor) -> dict[str, Any]:
        x = self.begin(x)
        for block in self.blocks:
            x = torch.stack([block(row) for row in x])
        return {"logits": self.head(x), "hidden": (x, x.transpose(0, 1)), "name": "rows"}


class Tied(Stack):
    """Uses one weight in its first and in its last unit, and in its own Python."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(WIDTH, WIDTH)
        self.last.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.begin(x)
        for block in self.blocks:
            x = block(x)
        rows = torch.stack([self.last(row) for row in x])
        return rows + F.linear(rows, self.embed.weight)


class Experts(Stack):
    """Sends rows to experts by ``nonzero``; leaves out an expert that gets none."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.begin(x)
        chosen = self.gate(x).argmax(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.blocks):
            rows = (chosen == number).nonzero()[:, 0]
            if rows.numel():
                out = out.index_add(0, rows, expert(x[rows]))
        return self.head(out)


class Normed(Stack):
    """Has batch norm between its units: rows depend on each other in training, and statistics move."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.begin(x)
        for number, block in enumerate(self.blocks):
            x = self.norm(block(x)) if number == 1 else torch.stack([block(row) for row in x])
        return self.head(x)


def rows(count: int, seed: int) -> tuple[Any, ...]:
    return (torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64),)


def images(count: int, seed: int) -> tuple[Any, ...]:
    made = torch.Generator().manual_seed(seed)
    sizes = [int(torch.randint(2, 6, (), generator=made)) for _ in range(count)]
    return ([torch.randn(size, WIDTH, generator=made, dtype=torch.float64) for size in sizes],)


@dataclass(frozen=True)
class Case:
    """A model, and how its batches are made."""

    model: Callable[[], nn.Module]
    batch: Callable[[int, int], tuple[Any, ...]] = rows


CASES = {
    "early exit": Case(EarlyExit),
    "layer drop": Case(LayerDrop),
    "detector": Case(Detector, images),
    "numpy": Case(Numpy),
    "counter": Case(Counter),
    "per row": Case(PerRow),
    "tied": Case(Tied),
    "experts": Case(Experts),
    "batch norm": Case(Normed),
}


def seed(number: int) -> None:
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


@dataclass
class Left:
    """What a call and its backward leave."""

    outputs: dict[str, Any] = field(default_factory=dict)
    gradients: dict[str, Tensor | None] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    numbers: dict[str, Any] = field(default_factory=dict)
    random: tuple[Any, ...] = ()


def left(model: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], *, backward: bool = True) -> Left:
    """Call, call backward where there is a graph, and note everything."""
    model.zero_grad(set_to_none=True)
    tensors = [t for _, t in flatten(args) if isinstance(t, Tensor)]
    own = iter([t.detach().clone().requires_grad_(backward and t.is_floating_point()) for t in tensors])
    inputs: list[Tensor] = []

    def fresh(value: Any) -> Any:
        if isinstance(value, Tensor):
            inputs.append(next(own))
            return inputs[-1]
        return type(value)(map(fresh, value)) if isinstance(value, (list, tuple)) else value

    outputs = dict(flatten(call(*fresh(args))))
    if backward:
        weighted = [
            (o * torch.arange(1, o.numel() + 1, dtype=o.dtype, device=o.device).cos().reshape(o.shape)).sum().cpu()
            for o in outputs.values()
            if isinstance(o, Tensor) and o.requires_grad
        ]
        torch.stack(weighted).sum().backward()
    gradients = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    gradients |= {f"input {i}": None if t.grad is None else t.grad.clone() for i, t in enumerate(inputs)}
    numbers = {f"{n}.{k}": v for n, m in model.named_modules() for k, v in m.__dict__.items() if isinstance(v, int)}
    drawn = (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
    detached = {k: v.detach() if isinstance(v, Tensor) else v for k, v in outputs.items()}
    return Left(detached, gradients, {n: b.clone() for n, b in model.named_buffers()}, numbers, drawn)


def differences(one: Left, other: Left, *, tolerance: float = 0.0) -> Iterator[str]:
    """Yield what differs: tensors by more than ``tolerance`` of the largest value, all else at all."""
    for kind in ("outputs", "gradients", "buffers", "numbers"):
        mine, theirs = getattr(one, kind), getattr(other, kind)
        if list(mine) != list(theirs):
            yield f"{kind}: {list(mine)} instead of {list(theirs)}"
            continue
        for name, value in mine.items():
            expected = theirs[name]
            if isinstance(value, Tensor) and isinstance(expected, Tensor):
                if value.shape != expected.shape or value.dtype != expected.dtype:
                    yield f"{kind}: {name} is {tuple(value.shape)} instead of {tuple(expected.shape)}"
                elif not _near(value.cpu(), expected.cpu(), tolerance):
                    yield f"{kind}: {name} differs"
            elif type(value) is not type(expected) or value != expected:
                yield f"{kind}: {name} is {value!r} instead of {expected!r}"
    if one.random != other.random:
        yield "the random states differ"


def _near(a: Tensor, b: Tensor, tolerance: float) -> bool:
    if not tolerance or not a.is_floating_point() or not a.numel():
        return torch.equal(a, b)
    return float((a - b).abs().max()) <= tolerance * (float(b.abs().max()) + 1e-6)


def options(stages: int, chunks: int = 4, **more: Any) -> Options:
    return Options((CPU,) * stages, chunks, lanes="threads", **{"measure": False, **more})


def split(
    model: nn.Module, args: tuple[Any, ...], *, stages: int, chunks: int = 4, devices: Any = None
) -> tuple[TreeRun, Plan]:
    """Plan a model by modelled costs and return what runs it."""
    chosen = Options(tuple(devices) if devices else (CPU,) * stages, chunks, measure=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # fewer modules than devices
        plan = plan_tree(model, Sample(*args), chosen, reason="a test says so")
    lanes = [lane(torch.device(stage.device)) for stage in plan.stages]
    return TreeRun(model, plan.stage_of(), lanes), plan


def pair(case: Case, *, training: bool, count: int = 10, **how: Any) -> tuple[nn.Module, nn.Module, TreeRun]:
    """Return the plain model, its twin, and the twin's run."""
    torch.manual_seed(3)
    plain = case.model().double().train(training)
    twin = copy.deepcopy(plain)
    run, _ = split(twin, case.batch(count, 0), **how)
    return plain, twin, run


def caller(run: TreeRun) -> Callable[..., Any]:
    """Return the run as a function of a model's arguments."""
    return lambda *args, **kwargs: run.call(args, kwargs)


def everything(model: nn.Module) -> Any:
    """Return all of a model, and the random states, in a form that can be compared."""
    tensors = [t.detach().clone().tolist() for t in (*model.parameters(), *model.buffers())]
    gradients = [(id(p.grad), None if p.grad is None else p.grad.tolist()) for p in model.parameters()]
    held = [{k: repr(v) for k, v in m.__dict__.items() if not k.startswith("_")} for m in model.modules()]
    drawn = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    return tensors, gradients, held, drawn
