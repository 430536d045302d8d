"""A model that no graph can follow, run by its own Python: its units on their stages' devices.

    one chunk       the caller's thread runs the model; units are told apart by doors (trace/module_tree.py)
    microbatches    where rows were proved independent (trace/tree_rows.py): on CPU lanes a thread each, that have a
                    unit's lane while they are in it (tree_lanes.py); on CUDA one after the other, as launches return

Everything is ordinary autograd: outputs and gradients have the plain model's graph.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn

from autosplit.options import Sample
from autosplit.planning.sizes import sizes_of
from autosplit.runtime.ambient import ThreadState, needs_one_thread, without_saved_tensor_hooks
from autosplit.runtime.lanes import Lane
from autosplit.runtime.ops import rows_along
from autosplit.runtime.tree_devices import Devices, Moves
from autosplit.runtime.tree_lanes import Crossing, Over, describe
from autosplit.trace.calls import Ambient
from autosplit.trace.module_tree import Doors
from autosplit.trace.objects import objects_in
from autosplit.trace.scope import has_module_hooks
from autosplit.trace.structure import flatten_output
from autosplit.trace.tree_rows import ONE_ROW, OutputRows, TreeFindings, examine

_KEPT = 64
_ASKED = 2
"""Calls that were found to need one chunk this often are not asked about again at other shapes: one chunk is right."""
_PLAIN = (bool, int, float, str, type(None))


class TreeRun:
    """Runs a model's own Python with its units on lanes.

    Attributes:
        units: paths of the units.
        timeout_s: how long a unit may run on a lane's thread before the call is given up; None waits for ever.
    """

    def __init__(
        self,
        model: nn.Module,
        stage_of: Mapping[str, int],
        lanes: Sequence[Lane],
        *,
        chunks: int,
        batch_dims: Any = None,
        threads: bool = True,
        timeout_s: float | None = None,
        lock: contextlib.AbstractContextManager[Any] | None = None,
    ) -> None:
        """Move parameters and buffers to the devices of their stages.

        ``stage_of`` maps unit names (``blocks.2#0``) to stages, ``lanes`` has one per stage. ``lock`` is held while
        the model is examined: that patches torch for the whole process.
        """
        self.timeout_s = timeout_s
        self._model, self._lanes, self._chunks, self._batch_dims = model, tuple(lanes), chunks, batch_dims
        self._stages = {name.partition("#")[0]: stage for name, stage in stage_of.items()}
        self.units = tuple(self._stages)
        self._doors = Doors(model, self.units)
        self._devices = Devices(model, self._stages, self._lanes)
        self._lock = contextlib.nullcontext() if lock is None else lock
        self._found: OrderedDict[Hashable, TreeFindings] = OrderedDict()
        self._doubts: OrderedDict[Hashable, list[TreeFindings]] = OrderedDict()
        self._why = _nothing_to_overlap(self._lanes, chunks, threads)

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any], key: Hashable = None) -> Any:
        """Run the model's forward and return what it returns; ``key`` is the call's signature with all shapes.

        Raises what the model raises, with a note that names the unit, the stage and the microbatch.
        """
        if needs_one_thread() or has_module_hooks():
            return self._whole(*args, **kwargs)
        found = self.findings(args, kwargs, key)
        if found.why is not None:
            return self._whole(*args, **kwargs)
        return self._in_pieces(args, kwargs, found, key)

    def findings(self, args: tuple[Any, ...], kwargs: dict[str, Any], key: Hashable = None) -> TreeFindings:
        """Return whether this kind of call may be cut into microbatches; the model is asked the first time."""
        known = self.independent(args, kwargs, key)
        if known is None:
            with self._lock, without_saved_tensor_hooks():
                sample = Sample(*args, **kwargs)
                known = examine(
                    self._model, sample, batch_dims=self._batch_dims, chunks=self._chunks, forward=self._whole
                )
            self.learn(args, kwargs, key, known)
        return known

    def independent(self, args: tuple[Any, ...], kwargs: dict[str, Any], key: Hashable = None) -> TreeFindings | None:
        """Return what is known of this kind of call, None when it was not asked about yet."""
        if self._why is not None:
            return TreeFindings(self._why)
        form, shapes = self._kind(args, kwargs)
        if len(self._doubts.get(form, ())) >= _ASKED:
            return self._doubts[form][-1]
        return self._found.get((form, shapes, key))

    def learn(self, args: tuple[Any, ...], kwargs: dict[str, Any], key: Hashable, findings: TreeFindings) -> None:
        """Take what was found out about a kind of call."""
        form, shapes = self._kind(args, kwargs)
        self._found[form, shapes, key] = findings
        if findings.why not in (None, ONE_ROW):
            self._doubts.setdefault(form, []).append(findings)
        for kept in (self._found, self._doubts):
            while len(kept) > _KEPT:
                kept.popitem(last=False)

    # -- one chunk -----------------------------------------------------------------------------------------------
    def _whole(self, *args: Any, **kwargs: Any) -> Any:
        with self._doors.up():
            return self._forward((args, kwargs), self._devices.call(), None, None)

    def _forward(self, given: Any, moves: Moves, microbatch: int | None, crossing: Crossing | None) -> Any:
        """Run the model's forward in this thread, for one microbatch or for the whole batch (None)."""
        visit = _Visit(self._stages, moves, microbatch, crossing)
        args, kwargs = moves.inputs(given)
        with self._doors.visited(visit), moves.entered():
            try:
                return self._model.forward(*args, **kwargs)
            except Exception as error:
                if microbatch is not None and visit.failed is not error:
                    error.add_note(f"in the model's own Python, microbatch {microbatch}")
                raise

    # -- microbatches --------------------------------------------------------------------------------------------
    def _in_pieces(self, args: tuple[Any, ...], kwargs: dict[str, Any], found: TreeFindings, key: Hashable) -> Any:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        pairs = list(zip(leaves, found.batch_dims, strict=True))
        rows = next(leaf.shape[dim] for leaf, dim in pairs if dim is not None)
        sizes = sizes_of(rows, self._chunks, 1)
        cut = [[leaf] * len(sizes) if dim is None else rows_along(leaf, sizes, dim) for leaf, dim in pairs]
        pieces = [pytree.tree_unflatten(list(piece), spec) for piece in zip(*cut, strict=True)]
        outputs = self._run(pieces)
        flats, rebuilds = zip(*map(flatten_output, outputs), strict=True)
        kept = set.intersection(*({id(each) for each in objects_in(output)} for output in outputs))
        merged = None if kept else _merged(flats, found.outputs, sizes)  # an object of the model's own is no copy
        if merged is None:  # nothing was written and nothing drawn: the model runs as if for the first time
            self.learn(args, kwargs, key, TreeFindings("parts of a batch gave outputs that do not fit together"))
            return self._whole(*args, **kwargs)
        return rebuilds[0](merged)

    def _run(self, pieces: Sequence[Any]) -> list[Any]:
        moves = self._devices.call()
        with self._doors.up():
            if any(lane.asynchronous for lane in self._lanes):
                return [self._forward(piece, moves, number, None) for number, piece in enumerate(pieces)]
            crossing = Crossing(lanes=len(self._lanes), microbatches=len(pieces), timeout_s=self.timeout_s)
            return crossing.run(
                lambda number: self._forward(pieces[number], moves, number, crossing), ThreadState.current()
            )

    def _kind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Hashable, Hashable]:
        """Return what a call is like, and its shapes; Python state, which may differ at every call, is not in it."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        modes = tuple(module.training for module in self._model.modules())
        form = spec, tuple(map(_described, leaves)), modes, Ambient.current(), torch.is_inference_mode_enabled()
        return form, tuple(leaf.shape for leaf in leaves if isinstance(leaf, torch.Tensor))


class _Visit:
    """Stands at the doors for one microbatch, or for the whole batch."""

    def __init__(
        self, stages: Mapping[str, int], moves: Moves, microbatch: int | None, crossing: Crossing | None
    ) -> None:
        self.stages, self.moves, self.microbatch, self.crossing = stages, moves, microbatch, crossing
        self.inside: str | None = None
        self.failed: BaseException | None = None

    def __call__(self, path: str, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        stage = self.stages[path]
        if self.inside is not None:  # a unit that calls another one goes on in its own lane
            return self.moves.run(stage, plain, args, kwargs)
        self.inside = path
        try:
            with self._lane(stage, path):
                return self.moves.run(stage, plain, args, kwargs)
        except Over:
            raise
        except BaseException as error:
            if self.failed is not error:
                self.failed = error
                error.add_note(f"in {describe(path, stage, self.microbatch)}")
            raise
        finally:
            self.inside = None

    def _lane(self, stage: int, path: str) -> contextlib.AbstractContextManager[None]:
        if self.crossing is None or self.microbatch is None:
            return contextlib.nullcontext()
        return self.crossing.held(stage, microbatch=self.microbatch, unit=path)


def _nothing_to_overlap(lanes: Sequence[Lane], chunks: int, threads: bool) -> str | None:
    """Return why microbatches would only cost time, None when they may overlap."""
    if len(lanes) < 2:
        return "there is one stage"
    if chunks < 2:
        return "chunks is 1"
    if any(lane.asynchronous for lane in lanes):
        return None if len({lane.device for lane in lanes}) > 1 else "all stages are on one device"
    return None if threads else "lanes='inline': one thread runs everything"


def _described(leaf: Any) -> Hashable:
    if isinstance(leaf, torch.Tensor):
        return leaf.dtype, leaf.device, leaf.requires_grad
    return type(leaf), leaf if isinstance(leaf, _PLAIN) else None


def _merged(flats: Sequence[list[Any]], places: Sequence[OutputRows | None], sizes: Sequence[int]) -> list[Any] | None:
    """Put the microbatches' flat outputs together; None when they are not what was found out about them."""
    if any(len(flat) != len(places) for flat in flats):
        return None
    joined = []
    for parts, place in zip(zip(*flats, strict=True), places, strict=True):
        if place is None:
            if any(type(part) is not type(parts[0]) or part != parts[0] for part in parts):
                return None
            joined.append(parts[0])
            continue
        if not all(isinstance(part, torch.Tensor) for part in parts):
            return None
        shapes = [list(part.shape) for part in parts]
        for shape, size in zip(shapes, sizes, strict=True):
            if place.dim >= len(shape) or shape[place.dim] != size * place.each:
                return None
            shape[place.dim] = 0
        if any(shape != shapes[0] for shape in shapes) or len({part.dtype for part in parts}) > 1:
            return None
        joined.append(torch.cat(list(parts), place.dim))
    return joined
