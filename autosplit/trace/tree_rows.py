"""May a model that runs by its own Python be given its batch in pieces? Asked of the model itself, as a whole.

    watch     the whole batch      nothing but the rows may matter: no value reads, draws, writes, counters
    alone     row         1   ┐
    among     rows  0 1 2 3   ├    the value probe: row 1 has the same outputs and gradients whatever is beside it
    beside    rows  5 1 7 4   ┘    and the outputs' batch dimensions are those that follow the number of rows
    pieces    the whole batch      cut as the call will cut it, put together again: what the whole gave

Whenever one of them is in doubt the answer is no: one chunk is always right.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn

from autosplit.errors import InputError
from autosplit.options import Sample
from autosplit.trace import state
from autosplit.trace.inputs import batch_rows, flatten
from autosplit.trace.kept import changes_given
from autosplit.trace.objects import is_object
from autosplit.trace.probe import probe_rows
from autosplit.trace.run import FlatInputs
from autosplit.trace.structure import flatten_output
from autosplit.trace.tree_watch import Watch, own_gradients

_RUNS = {"alone": (1,), "among": (0, 1, 2, 3), "again": (0, 1, 2, 3), "beside": (5, 1, 7, 4)}
_LOOSE = {torch.float64: 1e-7, torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 5e-2}
_NOTHING = contextlib.nullcontext()
_SAMPLED = 1 << 14
ONE_ROW = "there is only one row"
_NOISE = {dtype: tolerance * 1e-2 for dtype, tolerance in _LOOSE.items()}
"""Between runs of equal sizes, in which all that is added are zeros of other rows."""
_PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class OutputRows:
    """Where an output has its batch: the dimension, and how many entries of it each row has."""

    dim: int
    each: int


@dataclass(frozen=True)
class TreeFindings:
    """Whether a call may be cut into microbatches.

    Attributes:
        why: None when rows were proved independent, else the reason for one chunk, in words.
        batch_dims: the batch dimension of every leaf of the inputs (None: none).
        outputs: where every leaf of the output has its batch; None for what is the same for all rows.
    """

    why: str | None
    batch_dims: tuple[int | None, ...] = ()
    outputs: tuple[OutputRows | None, ...] = ()


def examine(
    model: nn.Module, sample: Sample, *, batch_dims: Any, chunks: int, forward: Callable[..., Any]
) -> TreeFindings:
    """Ask a model about one kind of call; its state and all random states are as before at the end.

    ``forward`` runs the model, in the modes of the caller. What it raises counts as a no.
    """
    why = _refused(model, sample, batch_dims)
    if why is not None:
        return TreeFindings(why)
    grad = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(grad):
        try:
            flat = flatten(model, sample, batch_dims)
            rows = batch_rows(flat)
            if min(rows, chunks) < 2:
                return TreeFindings(ONE_ROW if rows < 2 else "chunks is 1")
            return _Examination(model, forward, flat, rows, min(rows, chunks)).findings()
        except _Dependent as doubt:
            return TreeFindings(str(doubt))
        except InputError as error:
            return TreeFindings(f"its inputs have no common batch dimension ({error})")
        except Exception as error:
            return TreeFindings(f"it does not run while it is asked ({type(error).__name__}: {error})")


class _Dependent(Exception):
    """A sign that rows may matter to each other; its text says which."""


def _refused(model: nn.Module, sample: Sample, batch_dims: Any) -> str | None:
    """Return what speaks against microbatches before anything is run."""
    if any(
        m._forward_hooks or m._forward_pre_hooks or m._backward_hooks or m._backward_pre_hooks for m in _inner(model)
    ):
        return "modules have hooks, which see whole batches"
    if any(p._backward_hooks or p._post_accumulate_grad_hooks for p in model.parameters()):
        return "parameters have hooks, which a proof on rows would call"
    if any(p.is_meta for p in model.parameters()):
        return "on meta there are no values that could prove rows independent"
    given = next((leaf for leaf in pytree.tree_leaves((sample.args, sample.kwargs)) if is_object(leaf)), None)
    if given is not None:
        return f"an input is a {type(given).__name__}, which cannot be cut into rows"
    if batch_dims is not None:
        return None
    for path, leaf in pytree.tree_flatten_with_path((sample.args, sample.kwargs))[0]:
        nested = any(isinstance(step, pytree.SequenceKey) for step in path[2:])
        if isinstance(leaf, torch.Tensor) and nested:
            return "an input is a list of tensors"
        if not isinstance(leaf, (torch.Tensor, *_PLAIN)):
            return f"an input is a {type(leaf).__name__}, which cannot be cut into rows"
    return None


def _inner(model: nn.Module) -> Iterator[nn.Module]:
    return (module for module in model.modules() if module is not model)


class _Examination:
    def __init__(self, model: nn.Module, forward: Callable[..., Any], flat: FlatInputs, rows: int, pieces: int) -> None:
        self.model, self.forward, self.flat, self.rows, self.pieces = model, forward, flat, rows, pieces

    def findings(self) -> TreeFindings:
        whole = self._watched()
        if not self._distinct():
            raise _Dependent("all rows of its batch are equal, which proves nothing")
        runs = {name: self._probe(rows) for name, rows in _RUNS.items()}
        found = tuple(self._output(n, value, runs) for n, value in enumerate(whole))
        for name, run in runs.items():
            self._compare(f"{name}", run, runs, found)
        self._gradients(runs, found)
        del runs
        self._pieces(whole, found)
        return TreeFindings(None, self.flat.batch_dims, found)

    # -- runs ----------------------------------------------------------------------------------------------------
    def _forward(self, leaves: Sequence[Any], watch: contextlib.AbstractContextManager[Any] = _NOTHING) -> list[Any]:
        """Run the model on other inputs and give its state back; ``watch`` is left before that."""
        model = self.model
        with state.random_state(), state.attributes(model), state.buffer_contents(model), own_gradients(model), watch:
            args, kwargs = self.flat.rebuild(leaves)
            output = self.forward(*args, **kwargs)
            if changes_given((args, kwargs), self.flat.spec, leaves):
                raise _Dependent("it changes a list or dict among its inputs")
            return flatten_output(output)[0]

    def _watched(self) -> list[Any]:
        leaves, watch = [_own(leaf) for leaf in self.flat.leaves], Watch(self.model, self._telling_rows())
        versions = [leaf._version for leaf in leaves if isinstance(leaf, torch.Tensor)]
        whole = self._forward(leaves, watch.watching())
        if [leaf._version for leaf in leaves if isinstance(leaf, torch.Tensor)] != versions:
            raise _Dependent("it changes its inputs in place")
        if watch.why is not None:
            raise _Dependent(watch.why)
        return [value.detach() if isinstance(value, torch.Tensor) else value for value in whole]

    def _telling_rows(self) -> int:
        """Return the rows of the batch where no other size is the same, so that a size tells where rows are."""
        sizes = {size for t in (*self.model.parameters(), *self.model.buffers()) for size in t.shape}
        for leaf, dim in zip(self.flat.leaves, self.flat.batch_dims, strict=True):
            if isinstance(leaf, torch.Tensor):
                sizes |= {size for d, size in enumerate(leaf.shape) if d != dim}
        return sys.maxsize if self.rows in sizes else self.rows

    def _probe(self, rows: Sequence[int]) -> _Probed:
        pairs = list(zip(self.flat.leaves, self.flat.batch_dims, strict=True))
        leaves = [_own(leaf) if dim is None else probe_rows(leaf, dim, rows) for leaf, dim in pairs]
        return _Probed(tuple(rows), leaves, self._forward(leaves))

    def _distinct(self) -> bool:
        """Tell whether rows differ, or will be made to: equal rows would hide their influence."""
        for leaf, dim in zip(self.flat.leaves, self.flat.batch_dims, strict=True):
            if dim is not None:
                first = leaf.narrow(dim, 0, 1)
                rows = range(1, self.rows)
                if leaf.is_floating_point() or any(not torch.equal(first, leaf.narrow(dim, r, 1)) for r in rows):
                    return True
        return False

    # -- comparisons ---------------------------------------------------------------------------------------------
    def _output(self, number: int, whole: Any, runs: dict[str, _Probed]) -> OutputRows | None:
        """Find an output's batch dimension: the one that follows the number of rows."""
        values = [_nth(run.outputs, number) for run in runs.values()]
        if isinstance(whole, _PLAIN):
            if any(type(v) is not type(whole) or v != whole for v in values):
                raise _Dependent(f"output {number} is a {type(whole).__name__} that depends on the batch")
            return None
        if not isinstance(whole, torch.Tensor):
            raise _Dependent(f"output {number} is a {type(whole).__name__}, which cannot be put together from parts")
        shapes = {self.rows: tuple(whole.shape), 1: runs["alone"].shape(number), 4: runs["among"].shape(number)}
        one = shapes[1]
        dims = [d for d in range(len(one)) if one[d] and all(_grown(one, d, n) == s for n, s in shapes.items())]
        if len(dims) != 1:
            raise _Dependent(f"output {number} of shape {list(whole.shape)} has no dimension that follows the rows")
        return OutputRows(dims[0], one[dims[0]])

    def _compare(self, name: str, run: _Probed, runs: dict[str, _Probed], found: Sequence[OutputRows | None]) -> None:
        """Compare row 1 of a run with row 1 among others, bit for bit where the number of rows is the same."""
        among = runs["among"]
        for number, place in enumerate(found):
            if place is None:
                continue
            mine, other = run.kept(number, place), among.kept(number, place)
            exact = name != "alone" and mine.device.type == "cpu"
            if not agree(mine, other, 0.0 if exact else _LOOSE.get(mine.dtype, 0.0)):
                what = "is another one when the model runs again" if name == "again" else "depends on other rows"
                raise _Dependent(f"a row of output {number} {what}")

    def _gradients(self, runs: dict[str, _Probed], found: Sequence[OutputRows | None]) -> None:
        """Send a gradient back from row 1 only: no other row may get any, and parameters get the same."""
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        with own_gradients(self.model):
            sent = {name: runs[name].gradients(found, parameters) for name in ("alone", "among", "beside")}
        if len({len(gradients) for gradients in sent.values()}) > 1:
            raise _Dependent("whether there are gradients depends on the rows")
        pairs = zip(runs["among"].leaves, self.flat.batch_dims, strict=True)
        dims = [dim for leaf, dim in pairs if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        for gradient, dim in zip(sent["among"], dims, strict=False):
            if gradient is not None and dim is not None:
                others = torch.cat([gradient.narrow(dim, 0, 1), gradient.narrow(dim, 2, 2)], dim)
                if bool(others.count_nonzero()):
                    raise _Dependent("a row's gradient reaches other rows")
        scale = max(
            (float(g.abs().max()) for g in sent["among"][len(dims) :] if g is not None and g.numel()), default=0
        )
        for number in range(len(dims), len(sent["among"])):
            own, alone, beside = (sent[name][number] for name in ("among", "alone", "beside"))
            for other, tolerance in ((alone, _LOOSE), (beside, _NOISE)):
                if own is None or other is None:
                    if own is not other:
                        raise _Dependent("which parameters get a gradient depends on the rows")
                elif not agree(other, own, tolerance.get(own.dtype, 0.0), scale=scale):
                    raise _Dependent("the gradient that a row gives a parameter depends on other rows")

    def _pieces(self, whole: Sequence[Any], found: Sequence[OutputRows | None]) -> None:
        """Cut the batch as the call will, and compare what comes out with the whole."""
        start = 0
        for size in sizes_of(self.rows, self.pieces):
            leaves = [
                leaf if dim is None else leaf.narrow(dim, start, size).detach().requires_grad_(leaf.requires_grad)
                for leaf, dim in zip(self.flat.leaves, self.flat.batch_dims, strict=True)
            ]
            for number, (part, place) in enumerate(zip(self._forward(leaves), found, strict=True)):
                if place is None:
                    continue
                expected = whole[number].narrow(place.dim, start * place.each, size * place.each)
                if not agree(part.detach(), expected, _LOOSE.get(part.dtype, 0.0)):
                    raise _Dependent(f"output {number} of a part of the batch is not that part of the output")
            start += size


def sizes_of(rows: int, pieces: int) -> list[int]:
    """Return the rows of each piece, as ``torch.tensor_split`` cuts."""
    base, extra = divmod(rows, pieces)
    return [base + (index < extra) for index in range(pieces)]


@dataclass(frozen=True)
class _Probed:
    """One run on a few rows."""

    rows: tuple[int, ...]
    leaves: list[Any]
    outputs: list[Any]

    def shape(self, number: int) -> tuple[int, ...]:
        """Return the shape of an output, an empty one for what is no tensor."""
        value = _nth(self.outputs, number)
        return tuple(value.shape) if isinstance(value, torch.Tensor) else ()

    def kept(self, number: int, place: OutputRows) -> torch.Tensor:
        """Return what an output has for row 1."""
        value: torch.Tensor = self.outputs[number]
        return value.narrow(place.dim, self.rows.index(1) * place.each, place.each)

    def gradients(
        self, found: Sequence[OutputRows | None], parameters: Sequence[torch.Tensor]
    ) -> list[torch.Tensor | None]:
        """Return the gradients of row 1's outputs for inputs, and samples of those for parameters.

        None at all when there is no graph.
        """
        roots = []
        for number, place in enumerate(found):
            if place is not None and self.outputs[number].requires_grad:
                roots.append(self.kept(number, place))
        inputs = [leaf for leaf in self.leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        if not roots or not (inputs or parameters):
            return []
        weights = [torch.arange(1, r.numel() + 1, device=r.device).cos().to(r.dtype).reshape(r.shape) for r in roots]
        samples: dict[int, torch.Tensor] = {}

        def take(parameter: torch.Tensor) -> None:
            """Keep a sample: whole gradients of all parameters would be the model once more."""
            assert parameter.grad is not None
            gradient, parameter.grad = parameter.grad, None
            flat = (gradient.to_dense() if gradient.is_sparse else gradient).reshape(-1)
            samples[id(parameter)] = flat[:: flat.numel() // _SAMPLED + 1].clone()

        hooks = [parameter.register_post_accumulate_grad_hook(take) for parameter in parameters]
        try:
            torch.autograd.backward(roots, weights, inputs=[*inputs, *parameters])
        finally:
            for hook in hooks:
                hook.remove()
        return [*(leaf.grad for leaf in inputs), *(samples.get(id(parameter)) for parameter in parameters)]


def _own(leaf: Any) -> Any:
    return leaf.detach().clone().requires_grad_(leaf.requires_grad) if isinstance(leaf, torch.Tensor) else leaf


def _nth(values: Sequence[Any], number: int) -> Any:
    return values[number] if number < len(values) else _Dependent


def _grown(shape: Sequence[int], dim: int, rows: int) -> tuple[int, ...]:
    return (*shape[:dim], shape[dim] * rows, *shape[dim + 1 :])


def agree(a: torch.Tensor, b: torch.Tensor, tolerance: float, *, scale: float = 0.0) -> bool:
    """Tell whether two tensors are equal, up to ``tolerance`` of the largest value; NaN equals NaN.

    What is small against ``scale`` may be rounding of nothing, as the gradient of a bias that has no effect.
    """
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if torch.equal(a, b) or a.numel() == 0:
        return True
    if not a.is_floating_point():
        a, b = (torch.view_as_real(t.resolve_conj()) if t.is_complex() else t for t in (a, b))
    a, b = a.detach().double(), b.detach().double()
    if not torch.equal(a.isnan(), b.isnan()) or not torch.equal(a.isinf(), b.isinf()):
        return False
    a, b = a.nan_to_num(0.0, 0.0, 0.0), b.nan_to_num(0.0, 0.0, 0.0)
    return float((a - b).abs().max()) <= tolerance * max(float(b.abs().max()), 1e-3 * scale, 1e-12)
