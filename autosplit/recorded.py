"""One kind of call of a model: its recording, cut into stages, and what was made of it so far."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import fx, nn

from autosplit.lower.program import emit_ending, emit_setup
from autosplit.lower.split import Lowered
from autosplit.options import Options, Sample
from autosplit.planning.plan import Plan
from autosplit.runtime.ambient import is_transformed
from autosplit.runtime.cells import Step
from autosplit.runtime.lanes import Lane, caller_lane
from autosplit.runtime.ops import CallState, on_lane
from autosplit.runtime.running_statistics import Collected
from autosplit.runtime.tape import Tape
from autosplit.runtime.tree import TreeRun
from autosplit.trace.graph import TracedGraph
from autosplit.trace.ladder import Trace
from autosplit.trace.run import PythonRun
from autosplit.trace.signature import Key, Kind, rows_of

_SEED_BITS = 62
SHARED = (
    "_parameters",
    "_buffers",
    "_modules",
    "_non_persistent_buffers_set",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_is_full_backward_hook",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
"""The attributes of a model that its pipe has too, the same objects: its state and its hooks."""


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
    settled: dict[Key, bool] = field(default_factory=dict)
    """Calls after which the model's own Python changed nothing more: True; False where it did."""

    @property
    def changes_python(self) -> bool:
        """Whether the model's own Python has to run in a call, for what it changes besides tensors."""
        return bool(self.trace.gathered.recording.recording.changed)

    def lacks_one_row(self, key: Key) -> bool:
        """Tell whether it is for many lengths and would do for a call if it were known to hold for one row."""
        domain, one = self.trace.domain, rows_of(key.shapes, self.kind.batch_dims) == 1
        return domain is not None and domain.single is None and one and self.kind.lengths_in(key) is not None

    @cached_property
    def parts(self) -> dict[str, nn.Module]:
        """The modules that the program calls, each on its lane."""
        lowered, lanes = self.lowered, self.lanes
        parts = {f"stage{i}": on_lane(lowered.run(i), lanes[i]) for i in range(len(lowered.stages))}
        parts |= {f"shared{i}": on_lane(p, lanes[i]) for i, p in enumerate(lowered.prologues) if p is not None}
        if lowered.epilogue is not None:
            parts["epilogue"] = on_lane(lowered.epilogue, lanes[-1])
        return parts

    def call_state(self, options: Options, sizes: Sequence[int], lengths: Mapping[str, int]) -> CallState:
        """Return where the random numbers of a call come from, and where what its norms see goes.

        Under transforms operations draw by a seed.
        """
        lowered = self.lowered
        taped = options.rng == "plain" and bool(lowered.tape) and not is_transformed()
        seeded = bool(lowered.off_tape) if taped else lowered.random
        seed = int(torch.randint(2**_SEED_BITS, ())) if seeded else 0
        tape = Tape(lowered.tape, sizes, lengths) if taped else None
        return CallState(seed, tape, Collected(each=options.norm_counts == "microbatch"))

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
    lanes: tuple[Lane, ...]


@dataclass
class PreparedStep(Step):
    """One call of the pipe, ready to run, and the recording that it follows."""

    recorded: Recorded
    key: Key
    sample: Sample
    python: PythonRun | None = None
    """What the call changes besides tensors; None: nothing."""


def free_names(model: nn.Module, stages: int) -> dict[str, str]:
    """Choose attribute names for the parts that hide nothing of the model's own."""
    names = {}
    for part in (
        *(f"stage{i}" for i in range(stages)),
        *(f"shared{i}" for i in range(stages)),
        "epilogue",
        "module_tree",
    ):
        name = part
        while hasattr(model, name):
            name = f"pipe_{name}"
        names[part] = name
    return names


def lane_of_caller(leaves: Sequence[Any]) -> Lane:
    """Return the lane of the caller: on the device of the batch."""
    return caller_lane(next((t.device for t in leaves if isinstance(t, torch.Tensor)), torch.device("cpu")))


def tree_of(model: nn.Module, plan: Plan, lanes: tuple[Lane, ...]) -> TreeRun:
    """Return what runs a model's own Python, its modules on the stages of a plan."""
    paths = {path for path, _ in model.named_modules()}
    units = {name: s for name, s in plan.stage_of().items() if name.endswith("#0") and name[:-2] in paths}
    return TreeRun(model, units, lanes)


def used(cache: OrderedDict[Any, Any], key: Any) -> None:
    """Make an entry the last one to be dropped."""
    if key in cache:
        cache.move_to_end(key)
