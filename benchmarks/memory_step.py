"""The peak of a whole training step of the plain model: predicted on fake tensors, measured on real ones.

    measured   │ parameters, buffers, optimizer state, inputs │ + what the allocator gave out during the step
    predicted  │ the same, from shapes                        │ + replay: one stage, one microbatch, the optimizer

The step is one in the steady state: the optimizer has its state, gradients are None. In fp32 another one went before
it; in bf16, which many CPUs emulate in minutes, none did: a first step allocates what others do. Under autocast forward
and backward are inside the context, which shares its casts between both, as a pipelined step has it.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from autosplit.devices import Allocations
from autosplit.profile.stage_trace.stage_graph import Stages
from autosplit.profile.stage_trace.stage_trace import How
from autosplit.schedule.catalog import build
from autosplit.schedule.memory.replay import StaticBytes, replay
from autosplit.schedule.memory.updates import optimizer_changes, state_sizes
from benchmarks.families import Family
from benchmarks.memory_subject import (
    Line,
    Precision,
    Recompute,
    Subject,
    Training,
    autocast,
    bytes_of,
    held_by,
    recomputed,
    traces,
    trained,
    updated,
)

OPTIMIZERS: Mapping[str, Callable[..., torch.optim.Optimizer]] = MappingProxyType(
    {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adafactor": torch.optim.Adafactor}
)


@dataclass(frozen=True)
class Way:
    """How the step is run."""

    precision: Precision
    recompute: Recompute
    rows: int


def step_lines(subject: Subject, way: Way, *, optimizers: Sequence[str]) -> list[Line]:
    """Return a line per optimizer: one forward and backward serve all of them."""
    family = subject.family
    predicted = predicted_step(subject, way, optimizers=optimizers)
    measured = measured_step(family, way, optimizers=optimizers)
    return [
        Line(
            cell=step_cell(family.name, way, optimizer),
            kind="step",
            rows=way.rows,
            asked=asked(family),
            static_bytes=sum(held_by([subject.model])) + sum(_state_bytes(subject, optimizer)),
            predicted_bytes=predicted[optimizer],
            measured_bytes=measured[optimizer],
        )
        for optimizer in optimizers
    ]


def step_cell(family: str, way: Way, optimizer: str) -> str:
    """Return the name of a cell."""
    return f"step {family} {way.precision} recompute={way.recompute} {optimizer}"


def asked(family: Family) -> float:
    """Return the largest relative error of the peak that is accepted."""
    if family.name == "vit":
        return 0.01
    return 0.005 if family.kind == "transformer" else 0.03


def predicted_step(subject: Subject, way: Way, *, optimizers: Sequence[str]) -> dict[str, int]:
    """Return the peak with each optimizer, from the recording alone."""
    units = subject.units if way.recompute == "block" else ()
    with autocast(way.precision):
        stage = traces(Stages(subject.graph).of(), How(way.rows, units=units), recompute=way.recompute)
    parameters = held_by([subject.model])
    schedule = build("gpipe", stages=1, microbatches=1)
    found = {}
    for name in optimizers:
        finish = optimizer_changes(updated(subject.model), name=name, foreach=False)
        static = StaticBytes(parameters=parameters, optimizer=_state_bytes(subject, name))
        [device] = replay(schedule, {0: stage}, [static], finish={0: finish})
        found[name] = device.peak_bytes
    return found


def _state_bytes(subject: Subject, name: str) -> tuple[int, ...]:
    """Return the bytes of what an optimizer keeps: its step counts, fp32 scalars on the host, among it."""
    sizes = [size for tensor in updated(subject.model) for size in state_sizes(name, tensor)]
    return (*sizes, *((4,) * len(trained(subject.model)) if name != "sgd" else ()))


def measured_step(family: Family, way: Way, *, optimizers: Sequence[str]) -> dict[str, int]:
    """Return the peak with each optimizer, of real tensors, by the allocator's own events."""
    torch.manual_seed(0)
    model = Training(family.make(), family.loss).train()
    inputs = (family.target(way.rows), *family.batch(way.rows))
    stepping = {name: _with_state(model, name) for name in optimizers}
    blocks = family.blocks(model.model) if way.recompute == "block" else []
    with recomputed(blocks):
        if way.precision == "fp32":
            _forward_backward(model, inputs, way.precision)
            model.zero_grad(set_to_none=True)
        gc.collect()
        with Allocations() as run:
            _forward_backward(model, inputs, way.precision)
    held = sum(held_by([model])) + sum(bytes_of(inputs))
    found = {}
    for name, optimizer in stepping.items():
        with Allocations() as finish:
            optimizer.step()
        state = bytes_of(t for entry in optimizer.state.values() for t in _tensors(entry))
        found[name] = held + sum(state) + max(run.peak_bytes, run.left_bytes + finish.peak_bytes)
    return found


def _tensors(entry: Mapping[str, object]) -> list[Tensor]:
    return [value for value in entry.values() if isinstance(value, Tensor)]


def _with_state(model: Training, name: str) -> torch.optim.Optimizer:
    """Return an optimizer that has stepped once, on gradients of zeros."""
    optimizer = OPTIMIZERS[name](trained(model), lr=1e-4)
    for parameter in trained(model):
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    model.zero_grad(set_to_none=True)
    return optimizer


def _forward_backward(model: Training, inputs: Sequence[Tensor], precision: Precision) -> None:
    with autocast(precision):
        model(*inputs).backward()
