"""Balances for `GPipe`: how many layers each partition should have, by measured time or by memory.

What is found has the least largest partition, proven by the solver, where torchgpipe's block partition is a heuristic.
"""

from __future__ import annotations

import copy
import inspect
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from autosplit.compat.chain import PipeSequential
from autosplit.compat.skip import on_their_own
from autosplit.partition.problem import Problem, TensorEdge, Work
from autosplit.partition.solve import solve
from autosplit.profile.node_costs.ledger import Ledger
from autosplit.trace.borrowed.state import random_state


def balance_by_time(
    partitions: int,
    module: nn.Sequential,
    sample: Any,
    *,
    timeout: float = 1.0,
    device: torch.device | int | str | None = None,
) -> list[int]:
    """Return how many layers each partition should have so that the slowest takes the least time.

    Copies of the layers run forward and backward in training mode, again and again for ``timeout`` seconds, on
    ``device`` (default: the current CUDA device, without one the CPU). The module, its gradients, its buffers and the
    random states stay as they are. ``sample`` is an input, of any batch size: a tensor, or a tuple of tensors, which a
    layer is given as one argument (`GPipe`), or as several where it takes several (`Pipe`).

    Raises ValueError where a parameter has a gradient already, or for fewer layers than partitions.
    """
    _check(partitions, module)
    if any(parameter.grad is not None for parameter in module.parameters()):
        raise ValueError("some parameter already has gradient; call module.zero_grad(set_to_none=True) first")
    target = _place(device)
    spent = [0.0] * len(module)
    end = time.perf_counter() + timeout
    while not any(spent) or time.perf_counter() < end:
        inputs = _moved(sample, target)
        for index, layer in _sandbox(module, target):
            tick = _now(target)
            outputs = _called(layer, inputs)
            wanted = [tensor for tensor in _parts(outputs) if tensor.requires_grad]
            if wanted:
                torch.autograd.backward(wanted, [tensor.detach() for tensor in wanted])
            spent[index] += _now(target) - tick
            inputs = _moved(outputs, target)
    return _balance(spent, partitions)


def balance_by_size(
    partitions: int,
    module: nn.Sequential,
    input: Any,
    *,
    chunks: int = 1,
    param_scale: float = 2.0,
    device: torch.device | int | str | None = None,
) -> list[int]:
    """Return how many layers each partition should have so that the fullest needs the least memory.

    A layer needs what its forward leaves allocated for one row, times the rows of a microbatch, and ``param_scale``
    times its parameters' bytes (weights, gradients and the optimizer's state: 2 to 3 for SGD, 4 to 5 for Adam).
    ``input`` is a batch of the size of training, cut into ``chunks`` microbatches. torchgpipe measures on CUDA only;
    here a CPU does too.

    Raises ValueError for fewer layers than partitions.
    """
    _check(partitions, module)
    target = _place(device)
    rows = _parts(input)[0].shape[0] / chunks
    inputs = _moved(input, target, rows=1)
    sizes = []
    for _, layer in _sandbox(module, target):
        outputs, left_bytes = _left_bytes(layer, inputs)
        held = sum(parameter.untyped_storage().nbytes() for parameter in layer.parameters())
        sizes.append(left_bytes * rows + held * param_scale)
        inputs = _moved(outputs, target)
    return _balance(sizes, partitions)


def _check(partitions: int, module: nn.Sequential) -> None:
    if partitions < 1:
        raise ValueError(f"partitions must be a positive integer ({partitions} < 1)")
    if len(module) < partitions:
        raise ValueError(f"sequence is shorter than intended partitions ({len(module)} < {partitions})")


def _balance(costs: Sequence[float], partitions: int) -> list[int]:
    works = tuple(Work(str(index), cost, 0.0) for index, cost in enumerate(costs))
    nets = tuple(TensorEdge(index, (index + 1,), 0.0, 0.0) for index in range(len(costs) - 1))
    assignment = solve(Problem(works, nets, microbatches=1), stages=partitions).assignment
    return [assignment.count(stage) for stage in range(partitions)]


def _sandbox(module: nn.Sequential, device: torch.device) -> Iterator[tuple[int, nn.Module]]:
    """Yield copies of the layers in training mode; the random states are as before at the end."""
    with random_state(), on_their_own():
        for index, layer in enumerate(module):
            yield index, copy.deepcopy(layer).to(device).train()


def _left_bytes(layer: nn.Module, inputs: Any) -> tuple[Any, int]:
    """Run a layer; return its output and the bytes that it left allocated."""
    ledger = Ledger()
    for known in (*_parts(inputs), *layer.parameters(), *layer.buffers()):
        ledger.storage(known)
    before = ledger.live_bytes
    with ledger:
        outputs = _called(layer, inputs)
    return outputs, ledger.live_bytes - before


def _called(layer: nn.Module, inputs: Any) -> Any:
    """Call a layer as the pipe will: with a tuple as one argument, or unpacked for a layer of several arguments."""
    if not isinstance(inputs, tuple):
        return layer(inputs)
    try:
        takes_tuple = not isinstance(layer, PipeSequential) and inspect.signature(layer.forward).bind(inputs)
    except TypeError:
        takes_tuple = False
    return layer(inputs) if takes_tuple else layer(*inputs)


def _place(device: torch.device | int | str | None) -> torch.device:
    default = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(default if device is None else device)


def _parts(value: Any) -> tuple[torch.Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)


def _moved(value: Any, device: torch.device, *, rows: int | None = None) -> Any:
    """Return leaves with the values, or the first rows, of a tensor or a tuple of tensors."""
    cut = (tensor if rows is None else tensor[:rows] for tensor in _parts(value))
    leaves = tuple(tensor.detach().to(device).requires_grad_(tensor.requires_grad) for tensor in cut)
    return leaves if isinstance(value, tuple) else leaves[0]


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
