"""What runs a region of the model beside its own graph: compiled code, or a run that is repeated in the backward.

    call ──► seen to fail, or not to be compiled now ──► the region itself
         ──► torch.compile(region), as one graph ──► result
                    └── the compiler fails: nothing has run yet; the region itself runs, and a reason is kept

A compiled region is one graph (``fullgraph``), so a failure of the compiler comes before anything has run. The compiler
has a lock of its own; lanes that meet new shapes at the same time compile one after the other.

    forward    inputs ─► region ─► outputs        what it saves is dropped; its inputs are kept
    backward   inputs ─► region ─► what was saved ─► gradients

Autograd's graph is that of the first run, so gradients add in the same order, to the same bits. Random operations take
the key of their cell among the inputs and draw the same again. The second run finds what the first one found: copies of
buffers that the forward writes, and the modules' attributes, parameters and buffers of then. What was changed in place
since, and is no such buffer, is an error. What the second run writes to buffers is thrown away.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from autosplit.errors import ScheduleError
from autosplit.runtime.lanes.ambient import is_transformed, may_hook_saved_tensors, watched
from autosplit.runtime.ops import CellContext
from autosplit.runtime.surroundings import Surroundings
from autosplit.trace.inputs.objects import storage_key

_COMPILERS = ("torch._dynamo", "torch._inductor", "torch._functorch", "torch.fx.experimental")
_DRAWS = "it takes draws or statistics of the whole step"


class Compiled(nn.Module):
    """Runs a region compiled; copies and pickles have its region only, and compile anew.

    Attributes:
        region: the GraphModule; it is not registered here.
        label: what to call it in the report.
        options: the arguments of ``torch.compile``.
        reason: why it runs by its own graph; "" where it is compiled.
    """

    region: Any
    label: str
    options: Mapping[str, Any]
    reason: str

    def __init__(self, region: Any, label: str, options: Mapping[str, Any]) -> None:
        super().__init__()
        self.__dict__.update(region=region, label=label, options=options, making=threading.Lock(), made=None)
        self.__dict__["reason"] = _DRAWS if "key" in region.takes else ""

    def __reduce__(self) -> Any:
        return Compiled, (self.region, self.label, self.options)

    def forward(self, *args: Any) -> Any:
        """Run the region."""
        if self.reason or watched() or is_transformed():
            return self.region(*args)
        try:
            return self._code()(*args)
        except Exception as error:
            if not type(error).__module__.startswith(_COMPILERS):
                raise  # the model's own
            output = self.region(*args)
            self.__dict__["reason"] = f"{type(error).__name__}: {_short(error)}"
            return output

    def _code(self) -> Callable[..., Any]:
        with self.__dict__["making"]:
            if self.__dict__["made"] is None:
                self.__dict__["made"] = torch.compile(self.region.forward, fullgraph=True, **self.options)
            return self.__dict__["made"]


def _short(error: Exception) -> str:
    """Return what an exception says first; the compiler's own have a heading line, which ends in a colon."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or ["no message"]
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]


_HERE = threading.local()
"""Which run of a region that runs twice is under way in this thread."""


def is_checkpointing() -> bool:
    """Tell whether a module's forward is called in a run that keeps nothing: it will be called again."""
    return getattr(_HERE, "run", None) == "first"


def is_recomputing() -> bool:
    """Tell whether a module's forward is called again, in the backward, so as to have what was not kept."""
    return getattr(_HERE, "run", None) == "second"


@contextlib.contextmanager
def _during(run: str) -> Iterator[None]:
    before = getattr(_HERE, "run", None)
    _HERE.run = run
    try:
        yield
    finally:
        _HERE.run = before


class Recomputed(nn.Module):
    """Runs a region so that it runs again in the backward; the region's own module is not registered here.

    Attributes:
        region: the GraphModule; ``region.parameters()`` are those that it reads.
        root: where its modules, parameters and buffers are.
        rewritten: names of the buffers that it uses and that any part of the forward writes, each with whether the
            region itself writes it. They are copied for the second run.
        aliased: names of all such buffers; inputs that share memory with one are copied too.
        written: names of the tensors that the forward may change: those, and what norms and tables write.
        copied: positions in the bundle "inputs" that the model changes in place, and that are copied too.
        label: what to call the region in a note on an exception of the second run.
        run: what runs the region: itself, or what compiles it.
    """

    region: Any
    root: nn.Module
    rewritten: Mapping[str, bool]
    aliased: tuple[str, ...]
    written: frozenset[str]
    copied: tuple[int, ...]
    label: str
    run: Any

    def __init__(
        self,
        region: Any,
        root: nn.Module,
        *,
        rewritten: Mapping[str, bool] = MappingProxyType({}),
        aliased: Sequence[str] = (),
        written: frozenset[str] = frozenset(),
        copied: Sequence[int] = (),
        label: str,
        run: Compiled | None = None,
    ) -> None:
        super().__init__()
        self.__dict__.update(region=region, root=root, rewritten=dict(rewritten), aliased=tuple(aliased))
        self.__dict__.update(written=written, copied=tuple(copied), label=label, run=run or region)

    def forward(self, *args: Any, recompute: bool = True) -> Any:
        """Run the region; with ``recompute`` and gradients it runs again in the backward."""
        if not (recompute and torch.is_grad_enabled() and may_hook_saved_tensors()):
            return self.run(*args)
        flat, sizes = spread(args)
        again = _Again(self, sizes, self._changed(args, flat))
        return checkpoint(again, *flat, use_reentrant=False, preserve_rng_state=False)

    def _changed(self, args: Sequence[Any], flat: list[Any]) -> dict[int, torch.Tensor]:
        """Replace in ``flat`` what the forward changes in place by copies; return what was there by position."""
        originals: dict[int, torch.Tensor] = {}
        if self.copied:
            start = len(spread(args[: self.region.takes.index("inputs")])[0])
            originals = {start + index: flat[start + index] for index in self.copied}
        if self.aliased:
            storages = {storage_key(self.root.get_buffer(name)) for name in self.aliased}
            tensors = ((index, value) for index, value in enumerate(flat) if isinstance(value, torch.Tensor))
            originals |= {index: value for index, value in tensors if storage_key(value) in storages}
        for index, copy in _copies(originals).items():
            flat[index] = copy
        return originals


class _Again:
    """What is called first in the forward, and then in each backward that asks for what was saved."""

    def __init__(self, unit: Recomputed, sizes: Sequence[int | None], first: dict[int, torch.Tensor]) -> None:
        self.unit, self.sizes, self.first, self.places = unit, sizes, first, tuple(first)
        self.around: Surroundings | None = None

    def __call__(self, *flat: Any) -> Any:
        values = list(flat)
        if self.around is not None:
            return self._second(values, self.around)
        steady = [value for index, value in enumerate(values) if index not in self.places]
        unit = self.unit
        self.around = Surroundings.of(unit.region, unit.root, steady, rewritten=unit.rewritten, written=unit.written)
        for index in self.places:
            values[index] = self.first.pop(index)
        try:
            with _during("first"):
                return self.unit.run(*gathered(values, self.sizes))
        except RuntimeError as error:
            if "saved tensor hooks" not in str(error):
                raise
            raise ScheduleError(
                f"{unit.label} cannot run again in its backward: a forward in it uses torch.func.grad, vjp or jacrev, "
                "which take no saved tensor hooks; give recompute='never', or 'never' for that stage"
            ) from error

    def _second(self, values: list[Any], around: Surroundings) -> Any:
        around.check(self.unit.label)
        for index, copy in _copies({index: values[index] for index in self.places}).items():
            values[index] = copy
        try:
            with around.restored(), _during("second"):
                return self.unit.run(*gathered(values, self.sizes))
        except Exception as error:
            error.add_note(f"raised when {self.unit.label} ran again for its backward")
            raise


def _copies(tensors: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    """Return copies of tensors; tensors that are the same memory share one copy."""
    copies = {(tensor.data_ptr(), tensor.shape): tensor.detach().clone() for tensor in tensors.values()}
    return {index: copies[tensor.data_ptr(), tensor.shape] for index, tensor in tensors.items()}


def spread(args: Sequence[Any]) -> tuple[list[Any], list[int | None]]:
    """Return the tensors of all bundles one by one, and the length of each bundle; None for what is no bundle."""
    flat: list[Any] = []
    sizes: list[int | None] = []
    for value in args:
        bundle = isinstance(value, (tuple, list)) and not isinstance(value, CellContext)
        flat += value if bundle else [value]
        sizes.append(len(value) if bundle else None)
    return flat, sizes


def gathered(flat: Sequence[Any], sizes: Sequence[int | None]) -> list[Any]:
    """Put what `spread` took apart together again, each bundle a tuple."""
    rest = iter(flat)
    return [next(rest) if size is None else tuple(next(rest) for _ in range(size)) for size in sizes]
