"""Random models and ways to run them, for the hunt of races: everything that may cross from lane to lane.

    skips and joins    a value that several later layers use, on whatever lanes these are
    ties               one weight in several layers
    shared values      what is computed of parameters alone, before the first microbatch
    masks, teachers    values without gradients beside those with
    in place           layers that write to what they are given
    dropout            random numbers, drawn anew where a stage runs again

A case is made of its number and a seed alone, so that one that went wrong can be run again.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from autosplit.options import Options, Sample
from autosplit.pipelined import PipelinedModule
from autosplit.planning.plan.plan import Plan

KINDS = ("linear", "in place", "join", "gate", "mask", "position", "teacher", "dropout", "norm")
HOWS = ("train", "own loss", "call", "two calls", "eval")
_LOOPED = ("interleaved", "looped_bfs", "zb_v")
SCHEDULES = ("gpipe", "1f1b", "zb_h1", *_LOOPED)
RECOMPUTE = ("never", "never", "always", "except_last", "block")


@dataclass(frozen=True)
class Layer:
    """What one layer does, the earlier values that it takes, and the number of its weight."""

    kind: str
    takes: tuple[int, ...]
    weight: int


@dataclass(frozen=True)
class Case:
    """A model and how it is run; the last of ``places`` is the caller's device."""

    number: int
    layers: tuple[Layer, ...]
    weights: int
    early: int
    """A value that is an output too; the last one where there is none."""
    places: tuple[str, ...]
    schedule: str
    virtual_stages: int
    chunks: int
    rows: int
    recompute: str
    how: str

    @property
    def draws(self) -> bool:
        """Whether any layer draws random numbers."""
        return any(layer.kind == "dropout" for layer in self.layers)

    def __str__(self) -> str:
        *lanes, caller = self.places
        where = f"{', '.join(lanes)} for a caller on {caller}"
        kinds = " ".join(f"{layer.kind}{list(layer.takes)}w{layer.weight}" for layer in self.layers)
        return (
            f"{self.number}: {self.how}, {self.schedule} x {self.virtual_stages}, {self.rows} rows in {self.chunks}, "
            f"recompute {self.recompute}, on {where}: {kinds}"
        )


def case_of(number: int, *, seed: int, places: Sequence[Sequence[str]], how: str | None = None) -> Case:
    """Return a case; ``places`` are the lists of devices to choose from, each with the caller's behind the lanes'."""
    chosen = random.Random(f"{seed}/{number}")
    place = chosen.choice(list(places))
    looped = len(place) == 3
    schedule = chosen.choice(SCHEDULES if looped else SCHEDULES[:3])
    lanes, virtual = len(place) - 1, 2 if schedule in _LOOPED else 1
    count = chosen.randint(lanes * virtual + 1, lanes * virtual + 4)
    weights = chosen.randint(2, count)
    layers = []
    for layer in range(count):
        kind = chosen.choice(KINDS)
        others = [chosen.randint(0, layer) for _ in range(chosen.randint(1, 2))]
        layers.append(Layer(kind, (layer, *others), chosen.randrange(weights)))
    return Case(
        number,
        tuple(layers),
        weights,
        chosen.choice([count, chosen.randint(1, count)]),
        tuple(place),
        schedule,
        virtual,
        chosen.choice([2, 3, 4, 4, 5]),
        chosen.randint(5, 9),
        chosen.choice(RECOMPUTE),
        chosen.choice(HOWS) if how is None else how,
    )


class Model(nn.Module):
    """The model of a case."""

    def __init__(self, case: Case, *, width: int) -> None:
        super().__init__()
        self.case_layers, self.early = case.layers, case.early
        self.weights = nn.ModuleList(nn.Linear(width, width) for _ in range(case.weights))
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, width))
        self.norm = nn.LayerNorm(width)
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(width, width)
        self.head.weight = self.weights[0].weight

    def forward(self, value: Tensor) -> Any:
        """Return the last value, and an early one where the case has it."""
        values: list[Any] = [value]
        for layer in self.case_layers:
            values.append(self._layer(layer, *(values[taken] for taken in layer.takes)))
        last = self.head(values[-1])
        return last if self.early == len(values) - 1 else (last, values[self.early])

    def _layer(self, layer: Layer, value: Tensor, *others: Tensor) -> Tensor:
        weight, other, norm, drop = self.weights[layer.weight], others[0], self.norm, self.drop
        match layer.kind:
            case "in place":
                return torch.relu_(weight(value) + 0.5)
            case "join":
                return torch.tanh(weight(value + sum(others)))
            case "gate":
                return torch.tanh(weight(value)) * torch.sigmoid(other)
            case "mask":
                return torch.where(other > 0, value, torch.tanh(weight(value)))
            case "position":
                return torch.tanh(weight(value + self.scale.tanh() * 2))
            case "teacher":
                with torch.no_grad():
                    teacher = torch.tanh(weight(other))
                return torch.tanh(weight(value)) * teacher + other
            case "dropout":
                return other + drop(torch.tanh(weight(value)))
            case "norm":
                return other + norm(weight(value))
        return torch.tanh(weight(value))


def own_loss(output: Any, target: Tensor) -> Tensor:
    """Return a mean over rows that is none of torch's losses."""
    outputs = output if isinstance(output, tuple) else (output,)
    total = (outputs[0] - target).abs().pow(1.5).mean()
    for other in outputs[1:]:
        total = total + (other * other).mean()
    return total


def known_loss(output: Any, target: Tensor) -> Tensor:
    """Return torch's own mean, of the first output."""
    return nn.functional.mse_loss(output[0] if isinstance(output, tuple) else output, target)


def pipe_of(
    model: nn.Module, case: Case, devices: Sequence[torch.device], *, width: int, lanes: str, plan: Plan | None = None
) -> PipelinedModule:
    """Return the pipe of a case, planned by estimates, the same cut every time, or by an earlier plan of the case.

    Where some of the devices are GPUs and some are not, the cut is the one of as many equal lanes: by their speeds next
    to nothing would be left for the CPU.
    """
    if plan is None and len({device.type for device in devices}) > 1:
        equal = [torch.device("cpu")] * len(devices)
        plan = pipe_of(copy.deepcopy(model), case, equal, width=width, lanes="inline").plan
    options = Options(
        tuple(devices),
        case.chunks,
        schedule=case.schedule,
        virtual_stages=case.virtual_stages,
        recompute=(case.recompute,),
        lanes=lanes,
        rng="counter",
        measure=False,
    )
    pipe = PipelinedModule(model, options, plan)
    pipe.prepare(Sample(torch.zeros(case.rows, width, dtype=torch.get_default_dtype())))
    return pipe


def run_case(
    run: Any,
    model: nn.Module,
    case: Case,
    *,
    width: int,
    put: Callable[[Tensor], Tensor],
    beside: Callable[[Tensor, Tensor], Tensor] = lambda tensor, other: tensor.to(other.device),
    steps: int = 2,
) -> list[Tensor]:
    """Run some steps and return copies of all that came out, made where the caller works.

    ``run`` is the pipe, or the plain model. ``put`` brings a tensor to the caller's device, ``beside`` to
    that of another one. Between steps the caller
    changes the parameters, as an optimizer does; at the end the gradients are gone.
    """
    torch.manual_seed(case.number)
    found: list[Tensor] = []
    for _ in range(steps):
        batches = [torch.randn(case.rows, width) for _ in range(4)]
        found += _step(run, case, [put(batch) for batch in batches], beside)
        leaves = [parameter for parameter in model.parameters() if parameter.grad is not None]
        found += [leaf.grad * 1 for leaf in leaves if leaf.grad is not None]
        with torch.no_grad():
            for leaf in leaves:
                assert leaf.grad is not None
                leaf.sub_(leaf.grad, alpha=0.1)
        model.zero_grad(set_to_none=True)
    return found


def _step(run: Any, case: Case, batches: list[Tensor], beside: Callable[[Tensor, Tensor], Tensor]) -> list[Tensor]:
    first, second, target, other = batches
    if case.how == "eval":
        with torch.no_grad():
            return [tensor * 1 for tensor in _flat(run.eval_step(first) if hasattr(run, "eval_step") else run(first))]
    if case.how in ("train", "own loss"):
        loss_fn = known_loss if case.how == "train" else own_loss
        if hasattr(run, "train_step"):
            return [run.train_step(first, target=target, loss_fn=loss_fn) * 1]
        loss = loss_fn(run(first), target)
        loss.backward()
        return [loss.detach()]
    outputs = [run(first)] if case.how == "call" else [run(first), run(second)]
    found = []
    for output, wanted in zip(outputs, (target, other), strict=False):
        first = _flat(output)[0]
        loss = own_loss(first, beside(wanted, first))
        loss.backward()
        found += [loss.detach(), *(tensor.detach() * 1 for tensor in _flat(output))]
    return found


def _flat(output: Any) -> list[Tensor]:
    return list(output) if isinstance(output, tuple) else [output]
