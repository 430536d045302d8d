"""What a step changes for a while: the modes of modules, and the random state when it is refused."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn

from autosplit.errors import InputError
from autosplit.trace.borrowed.state import attributes, buffer_contents, contents, random_state


@contextlib.contextmanager
def eval_mode(model: nn.Module, *others: nn.Module) -> Iterator[None]:
    """Have a model in eval mode, by its own ``eval()``; at the end every module is in its own mode again.

    ``others`` get the same flag. A module with a ``train()`` of its own (one that merges weights for eval mode, say)
    is told to go back by it.
    """
    flags = [(module, module.training) for module in (*model.modules(), *others)]
    try:
        if any(training for _, training in flags):
            model.eval()
            for other in others:
                other.__dict__["training"] = False
        yield
    finally:
        for module, training in flags:
            if training != module.training and type(module).train is not nn.Module.train and module not in others:
                module.train(training)
        for module, training in flags:
            if module.training != training:
                module.__dict__["training"] = training


@contextlib.contextmanager
def left_alone(model: nn.Module, given: Any) -> Iterator[None]:
    """Run steps that leave no trace: gradients, buffers, attributes, what is given and random states are as before.

    Gradients are None inside.
    """
    modules = [model, *(leaf for leaf in pytree.tree_leaves(given) if isinstance(leaf, nn.Module))]
    tensors = [leaf for leaf in pytree.tree_leaves(given) if isinstance(leaf, torch.Tensor)]
    leaves = [leaf for leaf in tensors if leaf.is_leaf]
    leaves += [parameter for module in modules for parameter in module.parameters()]
    before = [(leaf, leaf.grad) for leaf in dict.fromkeys(leaves)]
    with contextlib.ExitStack() as stack:
        stack.enter_context(random_state())
        stack.enter_context(contents(tensors))
        stack.enter_context(attributes(*modules))
        for module in modules:
            stack.enter_context(buffer_contents(module))
        try:
            for leaf, _ in before:
                leaf.grad = None
            yield
        finally:
            for leaf, gradient in before:
                leaf.grad = gradient


@contextlib.contextmanager
def random_state_on_refusal() -> Iterator[None]:
    """Restore torch's random state when arguments are refused: what was drawn for the step was drawn for nothing."""
    before = torch.get_rng_state()
    try:
        yield
    except InputError:
        torch.set_rng_state(before)
        raise
