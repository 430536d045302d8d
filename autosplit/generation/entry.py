"""A function of a model, recorded with caches as inputs and outputs, and run by several threads on the pipe's stages.

    thread of group 0   ─► stage 0 ─► stage 1 ─► ...      a stage is a lock: whoever has it runs
    thread of group 1   ────────────► stage 0 ─► stage 1

The tensors of a cache are inputs of the stages that use them and outputs that stay there: none goes from stage to
stage.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import nn

from autosplit.delegation import object_like
from autosplit.generation.attributes import Kept, buffers_of, kept_apart
from autosplit.generation.caches import Apart, Layouts
from autosplit.generation.noise import WholeBatch, in_group, outside_group
from autosplit.options import Sample
from autosplit.recorded import PreparedStep, PreparedTree
from autosplit.runtime.ops import OUT
from autosplit.runtime.step.cells import Cells
from autosplit.schedule.action import Action
from autosplit.trace.graph import INFO, NodeClass
from autosplit.trace.inputs.objects import is_object, take_apart

Numbers = Mapping[str, int]
"""The layouts of caches, by the names of the inputs or outputs that they are."""
State = Mapping[str, Sequence[torch.Tensor]]
"""The tensors of caches."""


Result = tuple[Any, Mapping[str, str], Mapping[str, tuple[int, Sequence[torch.Tensor]]]]
"""The output without its caches, which caches these are, and the layout and new tensors of each cache."""
_AFTER = "layouts after a call"
_LAYOUT = " has layout"
_STEPS = 8
"""For so many calls of each group a plan is made: so many that even stages are the best ones."""
KEPT = ""
"""The name of caches in attributes."""


class WritesBuffers(Exception):
    """What is run writes to these buffers of the model: they are state, too."""

    def __init__(self, names: Collection[str]) -> None:
        super().__init__(", ".join(names))
        self.names = names


class Stages:
    """The stages of a pipe as threads share them: a lock per lane, and one for what is done per call."""

    def __init__(self) -> None:
        self.preparing = threading.RLock()
        self._locks: dict[int, threading.Lock] = {}
        self._running = 0
        self._news = threading.Condition()

    def lane(self, number: int) -> threading.Lock:
        """Return the lock of a lane."""
        return self._locks.setdefault(number, threading.Lock())

    def begin(self) -> None:
        """Note that a call runs from now on; its thread has the lock of what is done per call."""
        with self._news:
            self._running += 1

    def end(self) -> None:
        """Note that a call has run."""
        with self._news:
            self._running -= 1
            self._news.notify_all()

    @contextlib.contextmanager
    def still(self) -> Iterator[None]:
        """Wait until no call runs: while the model is recorded, its modules hold stand-ins of tensors."""
        with self._news:
            self._news.wait_for(lambda: not self._running)
        yield


class Entry:
    """A function of a pipe's model as a program of the pipe's stages.

    Attributes:
        pipe: runs the function with caches taken apart.
        layouts: of the caches.
        keeps_state: whether modules of the model are known to keep state from call to call, so that rows stay together.
        usual: what modules have where they keep that, before they do (`taken`).
    """

    def __init__(self, pipe: Any, function: Callable[..., Any], stages: Stages, layouts: Layouts | None = None) -> None:
        """``function`` takes the model of ``pipe`` and keyword inputs, and returns a dict of outputs."""
        self.layouts, self.stages, self._whole = layouts or Layouts(), stages, pipe
        self.pipe = pipe._of_function(_functional(pipe._core.model, function, self.layouts))
        recordings = self.pipe._core.recordings
        recordings.still, recordings.calls = stages.still, _STEPS * len(recordings.options.devices)
        # Where these recordings make the plan, it is for some calls of as many groups of rows as there are devices.
        recordings.options = replace(recordings.options, chunks=recordings.calls)
        self.keeps_state, self.usual = False, dict[str, Any]()

    def __call__(self, kept: Kept, /, **inputs: Any) -> Any:
        """Return the function's output; caches among the inputs are changed in place, as the function would.

        ``kept`` are caches in the modules' attributes, which are changed there instead.
        """
        caches = {name: value for name, value in inputs.items() if is_object(value)}
        others = {name: value for name, value in inputs.items() if name not in caches}
        caches[KEPT] = kept
        while True:
            apart = {name: self.layouts.apart(cache) for name, cache in caches.items()}
            numbers = {name: each.number for name, each in apart.items()}
            state = {name: each.tensors for name, each in apart.items()}

            def release(after: Mapping[str, int], apart: Mapping[str, Apart] = apart) -> None:
                for name in apart.keys() & after.keys():
                    self.layouts.release(caches[name], apart[name], after[name])

            try:
                with outside_group():
                    output, names, after = self.run(numbers, state, others, release)
                break
            except WritesBuffers as error:  # before it has run
                kept.values.update(buffers_of(self._whole._core.model, error.names))
        if kept.values or self.layouts[after[KEPT][0]].slots:
            self.keeps_state = True
            if in_group():
                raise WholeBatch("modules of the model keep state from call to call")
        for name, (number, tensors) in after.items():
            caches[name] = self.layouts.put(caches.get(name), apart.get(name), number, tensors)
        for name, cache in names.items():
            output[name] = caches[cache]
        return output

    def run(
        self,
        numbers: Numbers,
        state: State,
        inputs: Mapping[str, Any],
        release: Callable[[Numbers], None] = lambda after: None,
    ) -> Result:
        """Run the function on inputs and the tensors of caches.

        ``release`` drops the caller's tensors of caches, of whose layouts after the call it is given the numbers, once
        these are known: from the second call of a kind on.

        Raises WritesBuffers where the function writes to buffers of the model, before it runs.
        """
        recordings = self.pipe._core.recordings
        with self.stages.preparing:
            recordings.share(self._whole._core.recordings)
            step = self._step(numbers, state, inputs)
            self._whole._core.recordings.share(recordings)
            if isinstance(step, PreparedTree):
                if in_group():
                    raise WholeBatch("the model's own Python runs, module by module")
                return step.call()
            if written := step.recorded.traced.written:
                raise WritesBuffers(written)
            if in_group() and (step.recorded.changes_python or step.python is not None):
                raise WholeBatch("the model changes state of its Python")
            if in_group() and (why := step.once("rows meet", lambda: _rows_meet(step))):
                raise WholeBatch(why)
            self.stages.begin()
        try:
            flat = self._forward(step, lambda: release(step.orders.get(_AFTER, {})))
        finally:
            self.stages.end()
        traced = step.recorded.traced
        with self.stages.preparing:
            recordings.leave(step, flat[len(flat) - traced.kept :])
        result: Result = traced.unflatten(list(flat))
        step.once(_AFTER, lambda: {name: number for name, (number, _) in result[2].items()})
        return result

    def _step(self, numbers: Numbers, state: State, inputs: Mapping[str, Any]) -> Any:
        """Return the call of the pipe for caches taken apart: the tensors of all, and the numbers of their layouts."""
        layouts = {f"{name}{_LAYOUT}": number for name, number in numbers.items()}
        return self.pipe._prepare(tuple(chain.from_iterable(state.values())), layouts | dict(inputs))

    def _forward(self, step: PreparedStep, release: Callable[[], None]) -> Sequence[Any]:
        """Run a call's cells in the turns of their lanes; return its flat outputs.

        What a stage takes of the caches is gone when the stage has run, unless the caller keeps it.
        """
        start = step.start(ending=True)
        cells = Cells(step, start, {}, detached=False)
        step.tensors = step.once("ending's inputs", lambda: _Ending(step)).only(step.tensors)
        if step.python is None:
            step.sample = Sample()  # which nothing asks for behind the call then
        release()
        sent = {}
        with step.entered() as handed:
            for action in step.entries(step.forwards, cells):
                assert isinstance(action, Action)
                stage = action.stage
                with self.stages.lane(step.schedule.stage_lane[stage]):
                    state = cells.forward(stage, action.microbatch)
                start.inputs.pop(stage, None)
                sent[stage] = [tuple(state.sent.get(OUT, ()))]
            flat = step.end(start, sent)
            handed += flat
        return flat


def _rows_meet(step: PreparedStep) -> str:
    """Return why a call of some rows may have other numbers for them than a call of all; "" where it has the same."""
    mixing = [info.name for _, info in step.recorded.traced.compute_nodes() if info.node_class is NodeClass.FULL]
    if step.lowered.random or step.lowered.tape:
        return "the model draws random numbers"
    return f"{mixing[0]} mixes rows" if mixing else ""


class _Ending:
    """Which inputs of a call are taken behind the last cell, or returned."""

    def __init__(self, step: PreparedStep) -> None:
        lowered = step.lowered
        taken = {node for last in lowered.layout.epilogue for node in last.all_input_nodes} | set(lowered.outputs)
        inputs = [node for node in step.recorded.traced.graph.nodes if node.op == "placeholder" and INFO in node.meta]
        self._taken = [node in taken for node in inputs]
        self._stand_in = torch.empty(0)

    def only(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the inputs with stand-ins for those that are not taken."""
        return [t if taken else self._stand_in for t, taken in zip(tensors, self._taken, strict=True)]


def _functional(model: nn.Module, function: Callable[..., Any], layouts: Layouts) -> nn.Module:
    """Return a module with the attributes of a model whose forward takes and returns caches as tensors."""

    def forward(self: Any, *state: torch.Tensor, **inputs: Any) -> Any:
        tensors = iter(state)
        numbers = {name: inputs.pop(name) for name in [*inputs] if name.endswith(_LAYOUT)}
        caches = {name.removesuffix(_LAYOUT): layouts[number].build(tensors) for name, number in numbers.items()}
        before = {name: take_apart(cache)[0] for name, cache in caches.items()}
        with kept_apart(self, caches.pop(KEPT)) as kept:
            output = function(self, **inputs, **caches)
        returned = {name: value for name, value in output.items() if is_object(value)}
        known = {id(cache): name for name, cache in caches.items()}
        names = {name: known.get(id(cache), f"new {name}") for name, cache in returned.items()}
        caches |= {names[name]: cache for name, cache in returned.items()} | {KEPT: kept}
        after = {name: layouts.after(cache, before.get(name, ())) for name, cache in caches.items()}
        for name in returned:
            output[name] = None
        return output, names, after

    twin: nn.Module = object_like(model, {"forward": forward})
    return twin
