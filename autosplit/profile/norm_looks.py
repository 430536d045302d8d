"""What batch norms give, told by rule: torch works their shapes out by twenty operations each, a tenth of a profile.

The rule holds for what convolutional nets train with: contiguous tensors of one type of at least 32 bits, statistics of
the batch. All else is worked out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

_FORWARD = torch.ops.aten.native_batch_norm.default
_BACKWARD = torch.ops.aten.native_batch_norm_backward.default
_TYPES = (torch.float32, torch.float64)


def norm_results(func: Any, args: Sequence[Any]) -> tuple[tuple[int, ...] | None, ...] | None:
    """Return the shapes of an operation's results, all contiguous and of its arguments' type; None: not known here.

    A result that is not asked for has the shape None.
    """
    if func is _FORWARD and len(args) == 8 and args[5] is True:
        given, rest, mask = args[0], args[1:5], (True, True, True)
    elif func is _BACKWARD and len(args) == 10 and args[7] is True:
        given, rest, mask = args[1], (args[0], *args[2:7]), tuple(args[9])
        if args[0].shape != given.shape or not mask[0]:
            return None
    else:
        return None
    if given.dtype not in _TYPES or given.dim() < 2 or 0 in given.shape:
        return None
    if not all(t is None or (t.dtype == given.dtype and t.is_contiguous()) for t in (given, *rest)):
        return None
    shapes = tuple(given.shape), (given.shape[1],), (given.shape[1],)
    return tuple(shape if asked else None for shape, asked in zip(shapes, mask, strict=True))
