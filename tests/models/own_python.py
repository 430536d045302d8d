"""Models that no graph can follow, each with batches of its own, and how to run one beside the plain model."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autosplit.options import Options, Sample
from autosplit.planning.plan.plan import Plan
from autosplit.planning.tree import plan_tree
from autosplit.runtime.lanes.lanes import lane
from autosplit.runtime.tree import TreeRun
from tests.equivalence.equality import Batch, Run, assert_same_bits, collect, probe_loss

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
        scale = np.sqrt(np.abs(x.detach().cpu().numpy()).mean() + 1.0)
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
    drawn = torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (drawn.requires_grad_(),)


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


def left(
    model: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], *, backward: bool = True
) -> tuple[Run, Any]:
    """Call and call backward; return what that left, numbers in attributes and random states included."""
    model.zero_grad(set_to_none=True)
    inputs = Batch(args).fresh()
    output = call(*inputs.args)
    loss = probe_loss(output)
    if backward:
        loss.backward()
    numbers = {f"{n}.{k}": v for n, m in model.named_modules() for k, v in m.__dict__.items() if isinstance(v, int)}
    drawn = (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
    return collect(model, inputs, output=output, loss=loss), (numbers, drawn)


def assert_left_equal(found: tuple[Run, Any], expected: tuple[Run, Any]) -> None:
    """Assert that two calls left the same bits, numbers and random states."""
    assert_same_bits(found[0], expected[0])
    assert found[1] == expected[1], "numbers in attributes, or random states"


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
