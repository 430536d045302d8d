"""A part of a stage that runs again in its backward instead of keeping what autograd saves.

    forward    inputs ─► region ─► outputs        what it saves is dropped; its inputs are kept
    backward   inputs ─► region ─► what was saved ─► gradients

Autograd's graph is that of the first run, so gradients add in the same order, to the same bits. Random operations take
the key of their cell among the inputs and draw the same again. The second run writes buffers to copies: statistics are
counted once.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from autosplit.runtime.ambient import may_hook_saved_tensors
from autosplit.runtime.compiled import Compiled
from autosplit.runtime.ops import Key

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
        root: where the buffers are that it writes, ``writes`` by their names.
        copied: positions in the bundle "inputs" of what the model changes in place: it is copied, so that the second
            run finds what the first one found.
        place: what to call the region in a note on an exception of the second run.
        run: what runs the region: itself, or what compiles it.
    """

    region: Any
    root: nn.Module
    writes: tuple[str, ...]
    copied: tuple[int, ...]
    place: str
    run: Any

    def __init__(
        self,
        region: Any,
        root: nn.Module,
        *,
        writes: Sequence[str] = (),
        copied: Sequence[int] = (),
        place: str,
        run: Compiled | None = None,
    ) -> None:
        super().__init__()
        self.__dict__.update(region=region, root=root, writes=tuple(writes), copied=tuple(copied), place=place)
        self.__dict__["run"] = run or region

    def forward(self, *given: Any, recompute: bool = True) -> Any:
        """Run the region; with ``recompute`` and gradients it runs again in the backward."""
        if not (recompute and torch.is_grad_enabled() and may_hook_saved_tensors()):
            return self.run(*given)
        flat, sizes = spread(given)
        again = _Again(self, sizes, self._changed(given, flat))
        return checkpoint(again, *flat, use_reentrant=False, preserve_rng_state=False)

    def _changed(self, given: Sequence[Any], flat: list[Any]) -> dict[int, torch.Tensor]:
        """Replace in ``flat`` inputs that the model changes by copies; return them themselves by position."""
        if not self.copied:
            return {}
        names = self.region.takes
        start = len(spread(given[: names.index("inputs")])[0])
        found = {start + place: flat[start + place] for place in self.copied}
        for place, copy in _copies(found).items():
            flat[place] = copy
        return found

    def versions(self) -> tuple[int, ...]:
        """Return how often each parameter was changed in place, but for those that the region changes itself."""
        own = ((name, p) for name, p in self.region.named_parameters() if name not in self.writes)
        return tuple(parameter._version for _, parameter in own if not parameter.is_inference())


class _Again:
    """What is called first in the forward, and then in each backward that asks for what was saved."""

    def __init__(self, part: Recomputed, sizes: Sequence[int | None], first: dict[int, torch.Tensor]) -> None:
        self.part, self.sizes, self.first, self.places = part, sizes, first, tuple(first)
        self.versions: tuple[int, ...] | None = None

    def __call__(self, *flat: Any) -> Any:
        own = list(flat)
        if self.versions is None:
            for place in self.places:
                own[place] = self.first.pop(place)
            self.versions = self.part.versions()
            with _during("first"):
                return self.part.run(*gathered(own, self.sizes))
        if self.part.versions() != self.versions:
            raise RuntimeError(
                f"a parameter of {self.part.place} was changed in place between the forward and the backward, which "
                "runs the forward again: call backward before the optimizer's step, or split with recompute='never'"
            )
        return self._second(own)

    def _second(self, own: list[Any]) -> Any:
        for place, copy in _copies({place: own[place] for place in self.places}).items():
            own[place] = copy
        try:
            with _copied(self.part.root, self.part.writes), _during("second"):
                return self.part.run(*gathered(own, self.sizes))
        except Exception as error:
            error.add_note(f"raised when {self.part.place} ran again for its backward")
            raise


def _copies(tensors: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    """Return copies of tensors, one copy of those that are the same memory."""
    made = {(tensor.data_ptr(), tensor.shape): tensor.detach().clone() for tensor in tensors.values()}
    return {place: made[tensor.data_ptr(), tensor.shape] for place, tensor in tensors.items()}


def spread(given: Sequence[Any]) -> tuple[list[Any], list[int | None]]:
    """Return the tensors of all bundles one by one, and the length of each bundle; None for what is no bundle."""
    flat: list[Any] = []
    sizes: list[int | None] = []
    for value in given:
        bundle = isinstance(value, (tuple, list)) and not isinstance(value, Key)
        flat += value if bundle else [value]
        sizes.append(len(value) if bundle else None)
    return flat, sizes


def gathered(flat: Sequence[Any], sizes: Sequence[int | None]) -> list[Any]:
    """Put what `spread` took apart together again, each bundle a tuple."""
    rest = iter(flat)
    return [next(rest) if size is None else tuple(next(rest) for _ in range(size)) for size in sizes]


@contextlib.contextmanager
def _copied(root: nn.Module, names: Sequence[str]) -> Iterator[None]:
    """Put copies in the places of buffers; their own come back at the end, unchanged and with no new version.

    Whoever uses a buffer that is written lies in one stage, whose cells run one after the other.
    """
    kept: list[tuple[dict[str, Any], str, torch.Tensor]] = []
    copies: dict[int, torch.Tensor] = {}
    for path, _, name in (full.rpartition(".") for full in names):
        table = root.get_submodule(path)._buffers
        buffer = table.get(name)
        if buffer is not None:
            kept.append((table, name, buffer))
            table[name] = copies.setdefault(id(buffer), buffer.detach().clone())
    try:
        yield
    finally:
        for table, name, buffer in kept:
            table[name] = buffer
