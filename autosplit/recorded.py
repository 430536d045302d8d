"""One kind of call of a model: its recording, cut into stages, and what was made of it so far."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import fx

from autosplit.lower.program import emit_ending, emit_setup
from autosplit.lower.split import Lowered
from autosplit.runtime.cells import Step
from autosplit.trace.graph import TracedGraph
from autosplit.trace.ladder import Trace
from autosplit.trace.signature import Kind


@dataclass
class Recorded:
    """One signature of the model: its recording, cut by the plan, and the programs made of it per microbatch count."""

    traced: TracedGraph
    lowered: Lowered
    trace: Trace
    kind: Kind
    programs: dict[int, fx.Graph] = field(default_factory=dict)
    orders: dict[Any, Any] = field(default_factory=dict)

    @cached_property
    def setup(self) -> fx.GraphModule:
        """The part of the program before the first cell."""
        return emit_setup(self.lowered)

    @cached_property
    def ending(self) -> fx.GraphModule:
        """The part of the program behind the last cell."""
        return emit_ending(self.lowered)


@dataclass
class PreparedStep(Step):
    """One call of the pipe, ready to run, and the recording that it follows."""

    recorded: Recorded
