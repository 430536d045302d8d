"""Gradients of given cotangents, without what ``torch.autograd.grad`` does before its engine runs.

To compare shapes it imports sympy, half a second that a plan may not need otherwise.

Private torch API, used in this file only, tried on torch 2.13: ``torch.autograd.graph._engine_run_backward``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch

from autosplit.errors import ProfileError, is_internal


def gradients(
    targets: Sequence[torch.Tensor],
    leaves: Sequence[torch.Tensor],
    cotangents: Sequence[torch.Tensor],
) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients of ``leaves``, None for those that nothing depends on; the autograd graph is freed.

    ``cotangents`` have the shapes of ``targets``.
    """
    run = getattr(torch.autograd.graph, "_engine_run_backward", None)
    if run is None:
        return torch.autograd.grad(targets, leaves, cotangents, allow_unused=True)
    found: tuple[torch.Tensor | None, ...] = run(
        tuple(targets), tuple(cotangents), False, False, tuple(leaves), True, accumulate_grad=False
    )
    return found


def accumulate(targets: Sequence[torch.Tensor], cotangents: Sequence[torch.Tensor]) -> None:
    """Add the gradients of all leaves to their ``grad``; the autograd graph is freed."""
    run = getattr(torch.autograd.graph, "_engine_run_backward", None)
    if run is None:
        torch.autograd.backward(targets, cotangents)
    else:
        run(tuple(targets), tuple(cotangents), False, False, (), allow_unreachable=True, accumulate_grad=True)


@contextlib.contextmanager
def on_fakes(what: str) -> Iterator[None]:
    """Raise ProfileError for what the user's code raises on fake tensors, or torch lacks there."""
    try:
        yield
    except Exception as error:
        if isinstance(error, ProfileError) or is_internal(error):
            raise
        first = str(error).partition("\n")[0]
        raise ProfileError(f"{what} does not run on fake tensors ({type(error).__name__}: {first})") from error
