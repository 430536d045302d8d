"""The runs of a model's own Python in calls of its pipe, where it changes more than tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from autosplit.options import Sample
from autosplit.recorded import Recorded
from autosplit.runtime.ambient import without_callers_modes
from autosplit.trace.objects import leaves_of, take_apart
from autosplit.trace.python_state import Place
from autosplit.trace.run import PythonRun
from autosplit.trace.signature import Key, OutsideValues, key_of, rows_of


class PythonRuns:
    """Runs a model's own Python, and knows which attributes calls change time and again."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._changed: frozenset[Place] = frozenset()
        """Where calls of the model have changed Python state."""
        self._changing: frozenset[Place] = frozenset()
        """Where they do so time and again."""
        self._outside = OutsideValues()

    def key_of(self, leaves: Sequence[Any], spec: Any) -> Key:
        """Return a call's signature, without attributes that calls change time and again."""
        return key_of(self.model, leaves, spec, outside=self._outside, without=self._changing)

    def called(self) -> bool:
        """Leave what a call has changed outside of the modules out of signatures; tell whether that is new."""
        before, self._changing = self._changing, self._changing | self._outside.changed()
        return self._changing != before

    def run(self, recorded: Recorded, key: Key, sample: Sample) -> PythonRun | None:
        """Return what a call changes in Python, put back; None where that Python is not what was recorded."""
        with torch.inference_mode(False), without_callers_modes():
            flat = replace(recorded.trace.inputs, leaves=tuple(leaves_of((sample.args, sample.kwargs))))
            rows = rows_of(key.shapes, recorded.kind.batch_dims)
            return recorded.trace.gathered.run_python(self.model, flat, rows)

    def choose(
        self, variants: Iterable[Recorded], key: Key, sample: Sample
    ) -> tuple[Recorded, PythonRun | None] | None:
        """Return the first recording of which the model's own Python makes the calls, and what that changes.

        None where there is no such recording.
        """
        for recorded in variants:
            if not recorded.changes_python or recorded.settled.get(key):
                return recorded, None
            if (run := self.run(recorded, key, sample)) is not None:
                return recorded, run
        return None

    def leave(
        self, recorded: Recorded, key: Key, run: PythonRun | None, sample: Sample, kept: Sequence[torch.Tensor]
    ) -> Key:
        """Leave what a call changes, and return the signature that its recording is good for now too.

        Attributes that a second run would change again are no part of signatures any more. Where a second run changes
        nothing, the model's Python does not have to run in later calls of this kind.
        """
        if run is None:
            return self.key_of(*take_apart((sample.args, sample.kwargs)))
        run.leave(kept)
        places, again = run.changes.places, None
        if key not in recorded.settled:
            again = self.run(recorded, key, sample)
            self._changing |= frozenset() if again is None else again.changes.places
        self._changing |= places & self._changed
        self._changed |= places
        recorded.settled[key] = False
        now = self.key_of(*take_apart((sample.args, sample.kwargs)))
        if again is not None:
            recorded.settled[now] = not again.changes
        return now
