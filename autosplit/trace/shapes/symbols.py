"""Record a model once for many lengths: sizes of the inputs are symbols while its forward runs.

    input [rows, dim0]      the model's Python sees symbols where it asks for a shape, and computes with them
    if dim0 > 512: ...      a question about a symbol is answered for the sizes at hand, and noted as a condition
    int(dim0), str(dim0)    a number taken out of a symbol is noted as the condition ``dim0 == 37``

So the recording is what the model does at *all* sizes that meet the conditions. What a symbol does not notice, such as
``isinstance(dim0, int)``, is in decision 08.

Where torch lacks one of the private interfaces that this takes, lengths are recorded one by one.
"""

from __future__ import annotations

import functools
import math
import operator
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from unittest.mock import patch

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.overrides import TorchFunctionMode

from autosplit.trace.graph import LEAST, ROWS, Formula, Length, Number, Symbol

_FOLDED: dict[str, Callable[..., Any]] = {
    "Add": operator.add,
    "Mul": operator.mul,
    "Max": max,
    "Min": min,
    "And": operator.and_,
    "Or": operator.or_,
}
_PLAIN: dict[str, Callable[..., Any]] = {
    "Pow": operator.pow,
    "PowByNatural": operator.pow,
    "FloatPow": operator.pow,
    "FloorDiv": operator.floordiv,
    "CleanDiv": operator.floordiv,
    "IntTrueDiv": operator.truediv,
    "FloatTrueDiv": operator.truediv,
    "Mod": operator.mod,
    "PythonMod": operator.mod,
    "ToFloat": float,
    "CeilToInt": math.ceil,
    "FloorToInt": math.floor,
    "TruncToInt": math.trunc,
    "RoundToInt": round,
    "Not": operator.not_,
    "Equality": operator.eq,
    "Unequality": operator.ne,
    "LessThan": operator.le,
    "StrictLessThan": operator.lt,
    "GreaterThan": operator.ge,
    "StrictGreaterThan": operator.gt,
}


_RECURRENT = {torch.lstm: 2, torch.gru: 1, torch.rnn_tanh: 1, torch.rnn_relu: 1}


class NoFormula(Exception):
    """A number cannot be written as an expression of sizes."""


class SymbolicSizes(TorchFunctionMode):
    """The sizes of one symbolic recording; inside it, the shapes of operations are symbolic too.

    Args:
        rows: the number of rows at hand; a symbol where it is 2 or more.
        lengths: the dimensions that are symbols.
        sizes: the size of each at hand, 2 or more.
    """

    def __init__(self, rows: int, lengths: Sequence[Length], sizes: Mapping[str, int]) -> None:
        super().__init__()
        self._env = ShapeEnv(allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False, duck_shape=False)
        self._names: dict[str, str] = {}
        self._numbers: dict[Any, Number] = {}
        self._sizes = dict(sizes)
        self._rows: Any = rows
        if rows >= LEAST:
            self._sizes[ROWS] = rows
            self._rows = self._symbol(ROWS, rows)
        self._places: dict[tuple[int, int], Any] = {}
        for length in lengths:
            self._places.update(dict.fromkeys(length.places, self._symbol(length.name, sizes[length.name])))

    def _symbol(self, name: str, size: int) -> Any:
        source = ConstantSource(name)
        symbol = self._env.create_symbol(size, source, dynamic_dim=DimDynamic.DYNAMIC)
        self._names[str(symbol)] = name
        return self._env.create_symintnode(symbol, hint=size, source=source)

    def fake_mode(self) -> FakeTensorMode:
        """Return a mode in which tensors have symbolic shapes."""
        return FakeTensorMode(allow_non_fake_inputs=True, shape_env=self._env)

    def shape(self, position: int, leaf: torch.Tensor, batch_dim: int | None) -> list[Any]:
        """Return the shape of the tensor at a position among the input tensors."""
        sizes: list[Any] = [self._places.get((position, dim), size) for dim, size in enumerate(leaf.shape)]
        if batch_dim is not None:
            sizes[batch_dim] = self._rows
        return sizes

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        return _recurrent(_RECURRENT[func], *args, **kwargs) if func in _RECURRENT else func(*args, **kwargs)

    def __enter__(self) -> SymbolicSizes:
        super().__enter__()
        thread = threading.get_ident()

        def text(symbol: torch.SymInt) -> str:
            return repr(int(symbol)) if threading.get_ident() == thread else plain(symbol)

        plain = torch.SymInt.__repr__
        self._patch = patch.multiple(torch.SymInt, __repr__=text, __str__=text)
        self._patch.start()
        self._dispatcher = enable_python_dispatcher()
        self._dispatcher.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._dispatcher.__exit__(*error)
        self._patch.stop()
        super().__exit__(*error)

    # -- what was found ------------------------------------------------------------------------------------------
    def number(self, value: Any) -> Any:
        """Return a symbolic number as a formula that is affine in the rows; anything else as it is.

        Raises NoFormula where there is none.
        """
        if isinstance(value, torch.SymBool):
            return bool(value)
        if not isinstance(value, (torch.SymInt, torch.SymFloat)):
            return value
        expression = value.node.expr
        if expression not in self._numbers:
            self._check_affine(expression)
            self._numbers[expression] = self._formula(expression)
        return self._numbers[expression]

    def conditions(self) -> tuple[Number, ...]:
        """Return what was asked about the sizes, as formulas that were true.

        Raises NoFormula where one cannot be written.
        """
        if any(self._env.deferred_runtime_asserts.values()):
            raise NoFormula("a size depends on values")
        return tuple(self._formula(guard.expr) for guard in self._env.guards)

    def _check_affine(self, expression: Any) -> None:
        rows = next((s for s in expression.free_symbols if self._names.get(str(s)) == ROWS), None)
        if rows is None:
            return
        constant = expression.subs(rows, 0)
        per_row = expression.subs(rows, 1) - constant
        if (expression - constant - per_row * rows).expand() != 0:
            raise NoFormula(f"{expression} is not affine in the rows")

    def _formula(self, expression: Any) -> Number:
        kind = type(expression).__name__
        if expression.is_Integer:
            return int(expression)
        if expression.is_Float:
            return float(expression)
        if expression.is_Symbol and str(expression) in self._names:
            return Symbol(self._names[str(expression)])
        if kind in ("BooleanTrue", "BooleanFalse"):
            return kind == "BooleanTrue"
        operands = [self._formula(operand) for operand in expression.args]
        if kind in _FOLDED and operands:
            return functools.reduce(lambda a, b: Formula(_FOLDED[kind], (a, b)), operands)
        natural = kind != "Pow" or (isinstance(operands[1], int) and operands[1] > 0)
        if kind not in _PLAIN or not natural:
            raise NoFormula(f"{expression}: no Python operator is known for {kind}")
        return Formula(_PLAIN[kind], tuple(operands))


def _recurrent(states: int, input: torch.Tensor, hx: Any, weights: Sequence[torch.Tensor], *options: Any) -> Any:
    """Return tensors like those of ``torch.lstm`` and its like on a padded batch, which fake tensors cannot tell."""
    if len(options) != 6:
        raise NotImplementedError("a packed sequence has no symbolic length")
    bidirectional = options[4]
    states_in = hx if states > 1 else (hx,)
    width = states_in[0].shape[-1] * (2 if bidirectional else 1)
    output = input.new_empty((*input.shape[:-1], width))
    tensors = [output, *(torch.empty_like(state) for state in states_in)]
    if torch.is_grad_enabled() and any(t.requires_grad for t in (input, *states_in, *weights)):
        tensors = [tensor.requires_grad_().clone() for tensor in tensors]
    return tuple(tensors)
