"""One call and its backward, and what they left."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autosplit.options import Sample
from autosplit.trace.borrowed.state import gradients_aside
from autosplit.trace.check import cotangent, seed_all
from autosplit.trace.inputs.objects import take_apart
from autosplit.trace.inputs.structure import flatten_output
from autosplit.trace.norm_watch import NormWatch, Pieces


@dataclass(frozen=True)
class Left:
    """What a run left behind, the calls of its norms, those that were cut up, and torch's generators.

    ``drawn`` is their state behind the forward (of a training step: behind all of it), ``drew`` whether that is another
    one than before.
    """

    tensors: dict[tuple[str, str], Any]
    norms: Pieces
    cut: frozenset[str]
    drew: bool
    drawn: list[bytes]


def run_once(
    call: Callable[..., Any],
    model: nn.Module,
    sample: Sample,
    leaves: Mapping[str, torch.Tensor],
    watch: NormWatch,
    of_loss: Mapping[str, torch.Tensor] | None,
    seed: int,
) -> Left:
    """Call, go backward, and collect what that left.

    ``of_loss``: None where ``call`` returns outputs; where it returns a loss whose backward has been done, the loss's
    own leaves.
    """
    inputs, build = take_apart((sample.args, sample.kwargs))
    given = [_fresh(leaf) for leaf in inputs]
    args, kwargs = build(given)
    own = {**leaves, **(of_loss or {})}
    own |= {f"input {i}": leaf for i, leaf in enumerate(given) if isinstance(leaf, torch.Tensor) and leaf.requires_grad}
    seed_all(seed)
    before = _drawn()
    with gradients_aside((of_loss or {}).values()):
        output = call(*args, **kwargs)
        drawn = _drawn()
        flat = flatten_output(output)[0]
        roots = [value for value in flat if isinstance(value, torch.Tensor) and value.requires_grad]
        if roots:
            torch.autograd.backward(roots, [cotangent(root) for root in roots])
        tensors: dict[tuple[str, str], Any] = {("gradient", name): _host(leaf.grad) for name, leaf in own.items()}
    kind = "output" if of_loss is None else "loss"
    tensors |= {(kind, str(number)): _host(value) for number, value in enumerate(flat)}
    if (container := type(output)) not in (torch.Tensor, nn.Parameter):
        tensors[kind, "type"] = container.__name__
    tensors |= {("input", str(i)): _host(leaf) for i, leaf in enumerate(given) if isinstance(leaf, torch.Tensor)}
    tensors |= {("buffer", name): _host(buffer) for name, buffer in model.named_buffers()}
    return Left(tensors, watch.calls, frozenset(watch.cut), before != drawn, drawn)


def _fresh(leaf: Any) -> Any:
    return leaf.detach().clone().requires_grad_(leaf.requires_grad) if isinstance(leaf, torch.Tensor) else leaf


def _host(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value


def _drawn() -> list[bytes]:
    states = [torch.get_rng_state()]
    if torch.cuda.is_initialized():
        states += torch.cuda.get_rng_state_all()
    return [state.numpy().tobytes() for state in states]
