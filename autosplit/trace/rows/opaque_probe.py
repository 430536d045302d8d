"""Does a module that runs by its own Python treat each row alone, although it reads values of the batch?

    all                    0123               what each row must give
    one row at a time      0 │ 1 │ 2 │ 3
    some together          01 │ 23
    backwards, drawn       3210 │ 32 of them, drawn with repetition

Equal results are not enough: ``if x.mean() > 0`` may go one way on all of these rows. So every read is listed with what
it gave. A yes-or-no read has to give both answers in these runs, or the other answer, forced upon it, has to change
nothing or to raise (an assertion). Sizes of selections have to be zero once, or of several kinds, lists have to differ
from run to run, and a number that the model's own code reads must not matter at all.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn
from torch.overrides import TorchFunctionMode

from autosplit.compare import same_rounded
from autosplit.errors import ForeignSuppressed
from autosplit.trace.borrowed.holders import Holders
from autosplit.trace.borrowed.side_effects import changes
from autosplit.trace.borrowed.state import random_state
from autosplit.trace.graph import INFO
from autosplit.trace.inputs.objects import mapped
from autosplit.trace.reads.watch import SIZES, Taint
from autosplit.trace.recording.recording import VALUE_READS
from autosplit.trace.rows.layout import from_sources
from autosplit.trace.rows.row_values import rows_of, tensors_of

Site = tuple[str, int, str]
"""File, line and function of a read."""
Forced = tuple[Site, Callable[[Any], Any]]
_OWN, _TORCH = str(Path(__file__).parents[1]), str(Path(torch.__file__).parent)
_DRAWN = 32
_OTHER_NUMBERS = (lambda v: (v + 1) * 10**9, lambda v: -(v + 1) * 10**9, lambda v: v * 0)
_KINDS_OF_SIZES = 3


class ReadLog(TorchFunctionMode):
    """Lists the results of reads of values, and of sizes that depend on values, by their place in the code.

    ``forced`` replaces the answers of one place: a function of the answer. With ``emptied`` a mask that this place
    tests for any entry is empty from then on.
    """

    def __init__(self, steady: set[int], forced: Forced | None = None, *, emptied: bool = False) -> None:
        super().__init__()
        self.outcomes: dict[Site, list[Any]] = defaultdict(list)
        self.forced, self.emptied = forced, emptied
        self.masks: dict[int, tuple[Any, torch.Tensor]] = {}
        self._taint = Taint(steady)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        label = getattr(func, "__name__", "")
        label = func.__self__.__name__ if label == "__get__" else label
        self._taint.read = ""
        out = self._taint.call(func, args, kwargs or {})
        if label == "any" and len(args) == 1:
            self.masks[id(out)] = out, args[0]
        if not self._taint.read or (label not in VALUE_READS and label not in SIZES):
            return out
        file, line = _place()
        site = file, line, label
        # Numbers and truth values tell answers apart as they are, anything else in words.
        self.outcomes[site].append(out if isinstance(out, (bool, int, float)) else repr(out))
        if self.forced is not None and self.forced[0] == site:
            if self.emptied:
                if id(args[0]) not in self.masks:
                    raise RuntimeError(f"{file}:{line} does not ask whether a mask has any entry")
                self.masks[id(args[0])][1].zero_()
            return self.forced[1](out)
        return out


class OpaqueProbe:
    """One opaque module of a graph, with the values that its operands have in a run on ``rows`` rows."""

    def __init__(self, node: fx.Node, root: nn.Module, run: fx.Interpreter, *, rows: int) -> None:
        self.node, self.run, self.rows = node, run, rows
        self.every, self.module = list(range(rows)), root.get_submodule(str(node.target))
        self.steady = {id(tensor) for tensor in (*self.module.parameters(), *self.module.buffers())}
        self.holders = Holders([self.module])
        self.keeps_state = True
        self.whole: list[torch.Tensor] = []
        self.outcomes: dict[Site, list[Any]] = defaultdict(list)

    def treats_rows_alone(self) -> bool:
        """Tell whether rows are independent in all runs, and whether these show all that reads may bring about."""
        if any(tensor.batch_dim is None for tensor in self.node.meta[INFO].tensors):
            return False
        with ForeignSuppressed():
            self.whole = self._results(self.every)
            alone = all(map(self._is_as_whole, self._batches())) and all(map(self._is_shown, list(self.outcomes)))
            return alone and self.keeps_state
        return False  # what does not run on some rows alone is no module by rows

    def _batches(self) -> list[list[int]]:
        drawn = torch.randint(self.rows, (_DRAWN,), generator=torch.Generator().manual_seed(0)).tolist()
        pairs = [self.every[i : i + 2] for i in range(0, self.rows - 1, 2)]
        return [*([row] for row in self.every), *pairs, self.every[::-1], drawn]

    def _is_as_whole(self, rows: Sequence[int], forced: Forced | None = None) -> bool:
        """Tell whether rows give what they give among all."""
        tensors, infos = self._results(rows, forced), self.node.meta[INFO].tensors
        return all(
            same_rounded(tensor, from_sources(whole, info.batch_dim, self.rows, rows))
            for tensor, whole, info in zip(tensors, self.whole, infos, strict=True)
        )

    def _results(
        self, rows: Sequence[int], forced: Forced | None = None, *, emptied: bool = False
    ) -> list[torch.Tensor]:
        operands = {n: rows_of(n, self.run, self.rows, rows) for n in self.node.all_input_nodes}
        args, kwargs = fx.node.map_arg((self.node.args, self.node.kwargs), operands.__getitem__)
        log, buffers = ReadLog(self.steady, forced, emptied=emptied), list(self.module.buffers())
        with random_state():
            before = torch.get_rng_state(), [buffer._version for buffer in buffers], self.holders.read()
            with log:
                output = self.module(*args, **kwargs)
            if not torch.equal(before[0], torch.get_rng_state()):
                raise RuntimeError("it draws random numbers")
            if self.whole:  # the first call may set the module up
                same = before[1] == [b._version for b in buffers] and not changes(self.holders, before[2])
                self.keeps_state &= same
        if forced is None:
            for site, outcomes in log.outcomes.items():
                self.outcomes[site] += outcomes
        return tensors_of(output)

    def _is_shown(self, site: Site) -> bool:
        """Tell whether the runs show what a read may bring about, or nothing depends on it."""
        seen = self.outcomes[site]
        first = seen[0]
        if isinstance(first, bool):
            both = len(set(seen)) == 2 or self._is_idle(site, lambda value: not value, or_raises=True)
            return both or (first and self._skips_nothing(site))
        if site[0].startswith(_TORCH):
            return True
        if site[2] in SIZES:
            sizes = set(map(repr, seen))
            return len(sizes) >= _KINDS_OF_SIZES or any(_is_zero(value) for value in seen)
        if isinstance(first, str):
            return len(set(seen)) > 1
        return all(self._is_idle(site, change) for change in _OTHER_NUMBERS)

    def _skips_nothing(self, site: Site) -> bool:
        """Tell whether a mask without entries gives the same, be it asked whether it has any or not."""
        with ForeignSuppressed():
            skipped = self._results(self.every, (site, lambda _: False), emptied=True)
            gone_on = self._results(self.every, (site, lambda _: True), emptied=True)
            return all(map(same_rounded, skipped, gone_on))
        return False  # the module raises for an answer that it does not expect

    def _is_idle(self, site: Site, change: Callable[[Any], Any], *, or_raises: bool = False) -> bool:
        """Tell whether another answer to a read changes nothing."""
        with ForeignSuppressed():
            return self._is_as_whole(self.every, (site, change))
        return or_raises  # the module's own exception, for an answer that it does not expect


def run_observing(run: fx.Interpreter, node: fx.Node) -> Any:
    """Run a module that observes gradients on copies that require them, and return what it gives without."""
    operands = {n: mapped(_as_computed, run.env[n]) for n in node.all_input_nodes}
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), operands.__getitem__)
    with torch.enable_grad():
        value = getattr(run, node.op)(node.target, args, kwargs)
        return mapped(lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf, value)


def _as_computed(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor) or not (leaf.is_floating_point() or leaf.is_complex()):
        return leaf
    with torch.enable_grad():
        return leaf.detach().requires_grad_().clone()


def _is_zero(size: Any) -> bool:
    return size == 0 or (isinstance(size, str) and ("0," in size or "[0" in size))


def _place() -> tuple[str, int]:
    frame = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith((_OWN, f"{_TORCH}/_tensor", f"{_TORCH}/overrides")):
        frame = frame.f_back  # type: ignore[assignment]
    return (frame.f_code.co_filename, frame.f_lineno) if frame is not None else ("", 0)
