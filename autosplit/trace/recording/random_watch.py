"""Notice operations that draw random numbers, and write down what is needed to draw the same beforehand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from autosplit.trace.shapes.shape_rules import ShapeRules


class TensorSpec(NamedTuple):
    """A tensor that an operation takes or gives; sizes are numbers, or in a merged recording expressions."""

    shape: tuple[Any, ...]
    strides: tuple[Any, ...]
    dtype: torch.dtype


class Draw(NamedTuple):
    """One call of an aten operation that draws; ``TensorSpec`` stands for the tensors among its arguments."""

    op: Any
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    out: TensorSpec


class RandomWatch(TorchDispatchMode):
    """Lists the operations that draw random numbers.

    Attributes:
        drawn: them, since :meth:`begin`.
        own_generator: whether others drew from another generator than torch's default one.
        runs_twice: whether one of them runs again in the backward, inside what was watched.
    """

    def __init__(self) -> None:
        super().__init__()
        self._rules = ShapeRules()
        self.begin()

    def begin(self) -> None:
        """Forget what was drawn so far."""
        self.drawn: list[Draw] = []
        self.own_generator = self.runs_twice = False
        self._hooks = _hooks()

    @property
    def drew(self) -> bool:
        """Whether an operation has drawn random numbers."""
        return bool(self.drawn)

    @property
    def draws(self) -> tuple[Draw, ...] | None:
        """What was drawn, in order; None where it cannot be told beforehand."""
        return None if self.runs_twice else tuple(self.drawn)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":  # the device of a fake tensor, which operations ask again and again
            return func(*args, **kwargs)
        if not draws_numbers(func, args, kwargs):
            return self._rules.run(func, args, kwargs)
        if is_composite(func):
            with self:
                return run_composite(func, args, kwargs)
        out = func(*args, **kwargs)
        if has_own_generator(args, kwargs):
            self.own_generator = True
            return out
        self.runs_twice |= _hooks() != self._hooks
        result = _specs(out[0] if isinstance(out, tuple) else out)
        self.drawn.append(Draw(func, _specs(args), tuple((k, _specs(v)) for k, v in kwargs.items()), result))
        return out


def draws_numbers(func: Any, args: Any, kwargs: Any) -> bool:
    """Tell whether an aten operation draws random numbers, given its arguments."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    named = named_arguments(func, args, kwargs)
    return named.get("dropout_p", named.get("dropout")) != 0


def has_own_generator(args: Any, kwargs: Any) -> bool:
    """Tell whether an aten operation was given a generator."""
    return any(isinstance(value, torch.Generator) for value in (*args, *kwargs.values()))


def is_composite(func: Any) -> bool:
    """Tell whether an aten operation is made of others."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")


def run_composite(func: Any, args: Any, kwargs: Any) -> Any:
    """Run the operations that one is made of, as the plain model does; Python's own decompositions draw otherwise."""
    return func._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)


def named_arguments(func: Any, args: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return all arguments of an aten operation by name, defaults included."""
    named = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | dict(kwargs)
    return {a.name: named.get(a.name, a.default_value) for a in func._schema.arguments}


def _specs(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return TensorSpec(tuple(value.shape), tuple(value.stride()), value.dtype)
    return tuple(map(_specs, value)) if isinstance(value, (list, tuple)) else value


def _hooks() -> Any:
    return torch._C._autograd._top_saved_tensors_default_hooks(False)
