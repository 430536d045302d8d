"""A function of a model, recorded with caches as inputs and outputs, and run by several threads on the pipe's stages.

    thread of group 0   ─► stage 0 ─► stage 1 ─► ...      a stage is a lock: whoever has it runs
    thread of group 1   ────────────► stage 0 ─► stage 1

The tensors of a cache are inputs of the stages that use them and outputs that stay there: none goes from stage to
stage.
"""

from __future__ import annotations

import threading
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from autosplit.generation.attributes import Kept, buffers_of, kept_apart
from autosplit.generation.caches import Layouts
from autosplit.generation.noise import WholeBatch, in_group, outside_group
from autosplit.recorded import PreparedStep, PreparedTree
from autosplit.trace.inputs.objects import is_object, leaves_of, take_apart

Numbers = Mapping[str, int]
"""The layouts of caches, by the names of the inputs or outputs that they are."""
State = Mapping[str, Sequence[torch.Tensor]]
"""The tensors of caches."""


Result = tuple[Any, Mapping[str, str], Mapping[str, tuple[int, Sequence[torch.Tensor]]]]
"""The output without its caches, which caches these are, and the layout and new tensors of each cache."""
KEPT = ""
"""The name of caches in attributes."""


class WritesBuffers(Exception):
    """What is run writes to these buffers of the model: they are state, too."""

    def __init__(self, names: Collection[str]) -> None:
        super().__init__(", ".join(names))
        self.names = names


class Stages:
    """The stages of a pipe as threads share them: one lock each, and one for what is done per call."""

    def __init__(self) -> None:
        self.preparing = threading.RLock()
        self._locks: dict[int, threading.Lock] = {}

    def turn(self, stage: int, run: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that runs in the turn of a stage's lane."""
        lock = self._locks.setdefault(stage, threading.Lock())

        def alone(*args: Any) -> Any:
            with lock:
                return run(*args)

        return alone


class Entry:
    """A function of a pipe's model as a program of the pipe's stages.

    Attributes:
        pipe: runs the function with caches taken apart.
        layouts: of the caches.
    """

    def __init__(self, pipe: Any, function: Callable[..., Any], stages: Stages) -> None:
        """``function`` takes the model of ``pipe`` and keyword inputs, and returns a dict of outputs."""
        self.layouts, self.stages, self._whole = Layouts(), stages, pipe
        self.pipe = pipe._of_function(_functional(pipe._core.model, function, self.layouts))

    def __call__(self, kept: Kept, /, **inputs: Any) -> Any:
        """Return the function's output; caches among the inputs are changed in place, as the function would.

        ``kept`` are caches in the modules' attributes, which are changed there instead.
        """
        caches = {name: value for name, value in inputs.items() if is_object(value)}
        others = {name: value for name, value in inputs.items() if name not in caches}
        caches[KEPT] = kept
        while True:
            apart = {name: self.layouts.apart(cache) for name, cache in caches.items()}
            numbers, state = ({name: each[i] for name, each in apart.items()} for i in (0, 1))
            try:
                with outside_group():
                    output, names, after = self.run(numbers, state, others)
                break
            except WritesBuffers as error:  # before it has run
                kept.values.update(buffers_of(self._whole._core.model, error.names))
        for name, (number, tensors) in after.items():
            caches[name] = self.layouts.put(caches.get(name), apart.get(name), number, tensors)
        for name, cache in names.items():
            output[name] = caches[cache]
        return output

    def run(self, numbers: Numbers, state: State, inputs: Mapping[str, Any]) -> Result:
        """Run the function on inputs and the tensors of caches.

        Raises WritesBuffers where the function writes to buffers of the model, before it runs.
        """
        recordings = self.pipe._core.recordings
        with self.stages.preparing:
            recordings.share(self._whole._core.recordings)
            step = self.pipe._prepare((numbers, state), dict(inputs))
            self._whole._core.recordings.share(recordings)
            if isinstance(step, PreparedTree):
                if in_group():
                    raise WholeBatch("the model's own Python runs, module by module")
                return step.call()
            if written := step.recorded.traced.written:
                raise WritesBuffers(written)
            program, modules = self._program(step)
        with step.entered() as handed:
            flat = program(SimpleNamespace(**modules), *step.program_inputs())
            handed += flat
        traced = step.recorded.traced
        with self.stages.preparing:
            recordings.leave(step, flat[len(flat) - traced.kept :])
        return traced.unflatten(list(flat))

    def _program(self, step: PreparedStep) -> tuple[Callable[..., Any], dict[str, Any]]:
        """Return the program of a call, and what it names: stages that run in turn."""
        pipe, core = self.pipe, self.pipe._core
        graph, modules = pipe._program(step), pipe._modules_of(step.recorded)
        if graph not in core.compiled:
            pipe._show(graph, modules)
        modules |= step.codes_by(core.names)
        for stage, schedule_lane in enumerate(step.schedule.stage_lane):
            name = core.names[f"stage{stage}"]
            modules[name] = self.stages.turn(schedule_lane, modules[name])
        return core.compiled[graph][0], modules


def _functional(model: nn.Module, function: Callable[..., Any], layouts: Layouts) -> nn.Module:
    """Return a module with the attributes of a model whose forward takes and returns caches as tensors."""

    def forward(self: Any, numbers: Numbers, state: State, /, **inputs: Any) -> Any:
        caches = {name: layouts[numbers[name]].build(tensors) for name, tensors in state.items()}
        before = {name: take_apart(cache)[0] for name, cache in caches.items()}
        with kept_apart(self, caches.pop(KEPT)) as kept:
            output = function(self, **inputs, **caches)
        returned = {name: value for name, value in output.items() if is_object(value)}
        anchor = next(leaf for leaf in leaves_of((output, inputs)) if isinstance(leaf, torch.Tensor))
        known = {id(cache): name for name, cache in caches.items()}
        names = {name: known.get(id(cache), f"new {name}") for name, cache in returned.items()}
        caches |= {names[name]: cache for name, cache in returned.items()} | {KEPT: kept}
        after = {name: layouts.after(cache, before.get(name, ()), anchor) for name, cache in caches.items()}
        for name in returned:
            output[name] = None
        return output, names, after

    kind = type(model)
    members = {"forward": forward, "__module__": kind.__module__, "__init_subclass__": classmethod(lambda cls: None)}
    twin: Any = object.__new__(types.new_class(kind.__name__, (kind,), {}, lambda space: space.update(members)))
    object.__setattr__(twin, "__dict__", model.__dict__)
    return twin
