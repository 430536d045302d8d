"""Runs a module and compares two runs: the one metric of the equivalence suite."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

LANES = ("inline", "threads")
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}


@dataclass(frozen=True)
class Batch:
    """The inputs of one call: positional and keyword ones."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)

    def fresh(self) -> Batch:
        """Return the same values as new leaves, so that each run has its own input gradients."""
        return Batch(tuple(map(_leaf, self.args)), {name: _leaf(value) for name, value in self.kwargs.items()})

    def tensors(self) -> dict[str, Tensor]:
        named = {str(index): value for index, value in enumerate(self.args)} | self.kwargs
        return {name: value for name, value in named.items() if isinstance(value, Tensor)}

    def rows(self, start: int, stop: int) -> Batch:
        """Return rows ``start`` to ``stop`` of every tensor; the batch is dimension 0 of all of them."""
        cut = {name: value[start:stop] for name, value in self.tensors().items()}
        args = tuple(cut.get(str(index), value) for index, value in enumerate(self.args))
        return Batch(args, {name: cut.get(name, value) for name, value in self.kwargs.items()})


def _leaf(value: Any) -> Any:
    return value.detach().clone().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value


@dataclass(frozen=True)
class Run:
    """What one forward and backward left: outputs by path, loss, gradients and buffers by name."""

    outputs: dict[str, Any]
    loss: Tensor
    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor]


def flatten(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield ``(path, leaf)``; the path spells the containers' types, so equal paths mean equal structure."""
    kind = type(value).__name__
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from flatten(item, f"{path}/{kind}[{key!r}]")
    elif isinstance(value, (tuple, list)):
        for index, item in enumerate(value):
            yield from flatten(item, f"{path}/{kind}[{index}]")
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for entry in dataclasses.fields(value):
            yield from flatten(getattr(value, entry.name), f"{path}/{kind}.{entry.name}")
    else:
        yield path or "/", value


def probe_loss(output: Any) -> Tensor:
    """Return a scalar in which every element of every differentiable output has a weight of its own."""
    total = torch.zeros((), dtype=torch.float64)
    for _, leaf in flatten(output):
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            weight = torch.arange(1, leaf.numel() + 1, dtype=leaf.dtype).cos().add(0.1).reshape(leaf.shape)
            total = total + (leaf * weight.to(leaf.device)).sum() / max(1, leaf.shape[0] if leaf.dim() else 1)
    return total


def forward_backward(module: nn.Module, batch: Batch, *, loss: Callable[[Any], Tensor] = probe_loss) -> Run:
    """Call ``module``, call backward on a scalar of its outputs, and return what that left."""
    module.zero_grad(set_to_none=True)
    inputs = batch.fresh()
    output = module(*inputs.args, **inputs.kwargs)
    value = loss(output)
    if value.requires_grad:
        value.backward()
    return collect(module, inputs, output=output, loss=value)


def train_step(pipe: Any, batch: Batch, **options: Any) -> Run:
    """Call ``pipe.train_step`` and return what that left; there are no outputs."""
    pipe.zero_grad(set_to_none=True)
    inputs = batch.fresh()
    return collect(pipe, inputs, output=(), loss=pipe.train_step(*inputs.args, **inputs.kwargs, **options))


def collect(module: nn.Module, inputs: Batch, *, output: Any, loss: Tensor) -> Run:
    """Return copies of outputs, gradients and buffers as they are now."""
    gradients = {name: _copy(parameter.grad) for name, parameter in module.named_parameters()}
    gradients |= {f"input {name}": _copy(tensor.grad) for name, tensor in inputs.tensors().items()}
    buffers = {name: buffer.detach().clone() for name, buffer in module.named_buffers()}
    return Run(dict(flatten(output)), loss.detach().clone(), gradients, buffers)


def _copy(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().clone()


def difference(actual: Tensor, plain: Tensor) -> float:
    """Return the largest absolute difference over (the plain tensor's largest absolute value + 1e-6)."""
    if plain.numel() == 0:
        return 0.0
    return float((actual - plain).abs().max() / (plain.abs().max() + 1e-6))


def assert_equal_runs(actual: Run, plain: Run, *, dtype: torch.dtype = torch.float64) -> None:
    """Assert that outputs, loss and gradients are within the tolerance of ``dtype`` and that buffers are equal."""
    assert list(actual.outputs) == list(plain.outputs)
    for path, expected in plain.outputs.items():
        _assert_leaf(f"output {path}", actual.outputs[path], expected, tolerance=TOLERANCE[dtype])
    assert_equal_losses(actual, plain, tolerance=TOLERANCE[dtype])
    assert_equal_gradients(actual, plain, dtype=dtype)
    assert list(actual.buffers) == list(plain.buffers)
    for name, buffer in plain.buffers.items():
        _assert_leaf(f"buffer {name}", actual.buffers[name], buffer, tolerance=TOLERANCE[dtype])


def assert_equal_losses(actual: Run, plain: Run, *, tolerance: float) -> None:
    """Assert that losses agree, measured against the outputs where those are larger: they may add up to nothing."""
    assert (actual.loss.shape, actual.loss.dtype) == (plain.loss.shape, plain.loss.dtype)
    outputs = [value for value in plain.outputs.values() if isinstance(value, Tensor) and value.is_floating_point()]
    scale = max([float(plain.loss.abs()), *(float(value.detach().abs().max()) for value in outputs if value.numel())])
    distance = float((actual.loss - plain.loss).abs()) / (scale + 1e-6)
    assert distance <= tolerance, f"the loss: {distance:.2e} from the plain model, {tolerance:.0e} allowed"


def assert_equal_gradients(actual: Run, plain: Run, *, dtype: torch.dtype = torch.float64) -> None:
    """Assert that all gradients are within the tolerance of ``dtype``, and None where the plain ones are None."""
    assert list(actual.gradients) == list(plain.gradients)
    for name, gradient in plain.gradients.items():
        _assert_leaf(f"gradient of {name}", actual.gradients[name], gradient, tolerance=TOLERANCE[dtype])


def _assert_leaf(what: str, actual: Any, plain: Any, *, tolerance: float) -> None:
    if not isinstance(plain, Tensor):
        assert type(actual) is type(plain), f"{what}: a {type(actual).__name__}, plain has a {type(plain).__name__}"
        assert actual == plain, f"{what}: {actual!r}, plain {plain!r}"
        return
    assert isinstance(actual, Tensor), f"{what}: {actual!r}, plain has a tensor"
    kind = (tuple(actual.shape), actual.dtype, actual.requires_grad)
    expected = (tuple(plain.shape), plain.dtype, plain.requires_grad)
    assert kind == expected, f"{what}: shape, dtype, requires_grad {kind}, plain {expected}"
    if plain.is_floating_point():
        distance = difference(actual.detach(), plain.detach())
        assert distance <= tolerance, f"{what}: {distance:.2e} from the plain model, {tolerance:.0e} allowed"
    else:
        assert torch.equal(actual, plain), f"{what}: {actual} instead of {plain}"


def assert_same_bits(actual: Run, other: Run) -> None:
    for kind in ("outputs", "gradients", "buffers"):
        mine, theirs = getattr(actual, kind), getattr(other, kind)
        assert list(mine) == list(theirs)
        for name, value in mine.items():
            if isinstance(value, Tensor):
                assert torch.equal(value, theirs[name]), f"{kind}: other bits in {name}"
            else:
                assert value == theirs[name], f"{kind}: {name} differs"
    assert torch.equal(actual.loss, other.loss), "other bits in the loss"
