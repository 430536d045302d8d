"""One kind of call of a model: its recording, cut into stages, and what was made of it so far."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import fx, nn

from autosplit.lower.program import emit_ending, emit_setup
from autosplit.lower.split import Lowered
from autosplit.runtime.cells import Step
from autosplit.runtime.lanes import Lane
from autosplit.runtime.ops import on_lane
from autosplit.runtime.tree import TreeRun
from autosplit.trace.graph import TracedGraph
from autosplit.trace.ladder import Trace
from autosplit.trace.signature import Key, Kind


@dataclass
class Recorded:
    """One signature of the model: its recording, cut by the plan, and the programs made of it per microbatch count."""

    traced: TracedGraph
    lowered: Lowered
    trace: Trace
    kind: Kind
    lanes: tuple[Lane, ...]
    vain: int = 0
    """How many attempts to make one recording of several lengths were in vain so far."""
    programs: dict[int, fx.Graph] = field(default_factory=dict)
    orders: dict[Any, Any] = field(default_factory=dict)

    @cached_property
    def parts(self) -> dict[str, nn.Module]:
        """The modules that the program calls, each on its lane."""
        lowered, lanes = self.lowered, self.lanes
        parts = {f"stage{i}": on_lane(lowered.run(i), lanes[i]) for i in range(len(lowered.stages))}
        parts |= {f"shared{i}": on_lane(p, lanes[i]) for i, p in enumerate(lowered.prologues) if p is not None}
        if lowered.epilogue is not None:
            parts["epilogue"] = on_lane(lowered.epilogue, lanes[-1])
        return parts

    @cached_property
    def setup(self) -> fx.GraphModule:
        """The part of the program before the first cell."""
        return emit_setup(self.lowered, self.parts)

    @cached_property
    def ending(self) -> fx.GraphModule:
        """The part of the program behind the last cell."""
        return emit_ending(self.lowered, self.parts)


@dataclass(frozen=True)
class PreparedTree:
    """One call of a model that runs by its own Python; ``lanes`` are the stages' and last the caller's."""

    tree: TreeRun
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    key: Key
    lanes: tuple[Lane, ...]


@dataclass
class PreparedStep(Step):
    """One call of the pipe, ready to run, and the recording that it follows."""

    recorded: Recorded
