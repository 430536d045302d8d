"""How the caller's leaves get their gradients: once, all of them or none, with their hooks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence

import torch

from autosplit.backward import apart, donate_gradients
from autosplit.runtime.lanes.lanes import Lane
from autosplit.runtime.step.step import Pairs


def hand(pairs: Pairs, lanes: Sequence[Lane], *, alone: bool) -> None:
    """Give tensors their gradients; the list is empty afterwards.

    ``lanes`` are those of a step; ``alone``: no gradient lies in another's memory.
    """
    tensors, gradients = [tensor for tensor, _ in pairs], [gradient for _, gradient in pairs]
    pairs.clear()
    if not alone:
        gradients = apart(gradients)
    torch.autograd.backward(roots_by_device(tensors, gradients, lanes))


def roots_by_device(
    tensors: list[torch.Tensor], gradients: list[torch.Tensor], lanes: Sequence[Lane]
) -> list[torch.Tensor]:
    """Return a root per device that hands over its leaves' gradients; ``gradients`` is empty afterwards.

    The engine takes all roots to be made on one stream; a node per device puts each device's gradients on the caller's
    stream there.
    """
    first, single = lanes[0], len({lane.device for lane in lanes}) == 1
    devices = [first.device if single else first.origin(tensor).device for tensor in tensors]
    entries = list(zip(devices, tensors, gradients, strict=True))
    gradients.clear()
    roots = []
    for device in dict.fromkeys(devices):
        there = [tensor for other, tensor, _ in entries if other == device]
        roots.append(donate_gradients(there, [gradient for other, _, gradient in entries if other == device]))
        entries = [entry for entry in entries if entry[0] != device]
    return roots


@contextlib.contextmanager
def all_or_nothing(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Put the gradients of leaves back when a hook raises: by then some have been added to.

    Copies are made only where there are hooks; without them nothing of the caller's runs in here.
    """
    leaves = [tensor for tensor in tensors if tensor.requires_grad and tensor.is_leaf]
    if not any(leaf._backward_hooks or leaf._post_accumulate_grad_hooks for leaf in leaves):
        yield
        return
    before = [(leaf, leaf.grad, None if leaf.grad is None else leaf.grad.detach().clone()) for leaf in leaves]
    try:
        yield
    except BaseException:
        for leaf, gradient, content in before:
            leaf.grad = gradient
            if gradient is not None and content is not None:
                gradient.copy_(content)
        raise


@contextlib.contextmanager
def held_back(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Hold back the hooks of tensors while cells run: they want the whole gradient, once."""
    tables = (hooks for tensor in tensors for hooks in (tensor._backward_hooks, tensor._post_accumulate_grad_hooks))
    held = [(hooks, dict(hooks)) for hooks in tables if hooks]
    try:
        for hooks, _ in held:
            hooks.clear()
        yield
    finally:
        for hooks, kept in held:
            hooks.update(kept)
