"""The recordings of one rank, and its part of the model's state: both follow the plan that rank 0 makes."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from autosplit.distributed.facts import (
    BATCH,
    StateUse,
    call_text,
    checksum,
    state_of_several,
    uses_of_state,
    warn_where_apart,
)
from autosplit.distributed.feed import pairs_of
from autosplit.distributed.materialise import materialise
from autosplit.distributed.messages import share
from autosplit.distributed.ranks.guard import ModelGuard
from autosplit.distributed.ranks.parallelize import Parallelize
from autosplit.distributed.ranks.tensors import TensorParallel
from autosplit.distributed.ranks.wrapped import WrappedPart, wrapped_part
from autosplit.distributed.replicas import stage_group
from autosplit.distributed.world import RECORDS, World, attempt
from autosplit.errors import InputError, TraceError
from autosplit.options import Options, Sample
from autosplit.parallel import Parallel
from autosplit.planning.plan.plan import Plan
from autosplit.recorded import FoundCall, PreparedStep, Recorded
from autosplit.recordings import Recordings
from autosplit.runtime.lower.replicas import Replicas, check_cells, check_ending
from autosplit.runtime.lower.split import Lowered, named_state, owners, used_by
from autosplit.runtime.optimizers import move
from autosplit.runtime.tree import TreeRun
from autosplit.tensor.part import PARTS
from autosplit.trace.borrowed.blank import has_meta, without_values
from autosplit.trace.inputs.inputs import batch_rows
from autosplit.trace.inputs.lengths import Shapes
from autosplit.trace.inputs.objects import take_apart, tensors_in
from autosplit.trace.inputs.signature import Key
from autosplit.trace.ladder import Trace, trace
from autosplit.trace.recording.run import PythonRun
from autosplit.trace.rows.findings import Findings

_TRAINED: Any = WeakIdKeyDictionary()
"""The ranks that hold the values of a parameter or buffer, since a pipe has trained it."""
_trained_last: weakref.ref[RankRecordings] | None = None
"""The recordings of the pipe that has trained last."""


class RankRecordings(Recordings):
    """The recordings of one rank: rank 0 plans and says what its probe found; the others record the same.

    Attributes:
        owner: the rank of each parameter and buffer that is used, by name, of replicas the first; empty before the
            first recording. The first kind of call that uses it decides; the first rank has what none has used.
        group: the group of the ranks of this rank's stage; None where it has one.
        sample: what is recorded in the place of a call's inputs, where a sample on meta was given.
        parallelize, part: what wraps this rank's part of the model, None where it stays as it is; what was wrapped.
        guard: refuses what would take the user's model for whole.
    """

    def __init__(
        self, model: nn.Module, options: Options, plan: Plan | None, world: World, *, fits: bool, weights: Any = None
    ) -> None:
        super().__init__(model, options, plan, fits=fits)
        global _trained_last
        _trained_last = None  # who trains on notes it anew
        for _, tensor in named_state(model):
            _TRAINED.pop(tensor, None)  # all ranks have the same values
        self.world = world
        self.tensors = TensorParallel(world, plain_numbers=options.rng == "plain") if world.tensor_ranks > 1 else None
        self.guard = ModelGuard(model)
        self.owner: dict[str, int] = {}
        self.group: Any = None
        self.sample: Sample | None = None
        self.parallelize: Parallelize | None = None
        self.part: WrappedPart | None = None
        self._on_meta, self._weights = has_meta(model), weights
        self._findings: Findings | None = None
        self._homes: dict[str, int] = {}  # the stages of parameters in the first recording
        self._placed: set[str] = set()
        """The parameters and buffers that lie on this rank's device."""
        self._buffers: set[str] = set()
        """The buffers that this rank uses."""
        self._late: list[Callable[[], None]] = []
        """What brings state of a new kind of call here, once the model has its values again."""
        self._uses: set[StateUse] = set()
        """What all kinds of calls do with parameters and buffers."""

    @cached_property
    def ranks(self) -> tuple[Sequence[int], ...]:
        """By stage, the ranks of its replicas."""
        assert self.plan is not None
        return tuple(range(stage.lane, stage.lane + stage.replicas) for stage in self.plan.stages)

    @contextlib.contextmanager
    def preparing(self) -> Iterator[None]:
        """Prepare the first call: a model for which that fails is as it was."""
        failed = True
        try:
            yield
            failed = False
        finally:
            if self.tensors is not None:
                self.tensors.end(failed=failed)

    def reads_no_values(self, args: Any, kwargs: Any) -> bool:
        """Tell whether a kind of call is known, and its recording does not depend on the batch's values."""
        with self.guard.opened():
            known = self.kept.get(self.python.key_of(*take_apart((args, kwargs))), ())
        return bool(known) and all(each.trace.guard is None and not each.changes_python for each in known)

    def find(self, key: Key, sample: Sample) -> tuple[Recorded | TreeRun, PythonRun | None]:
        """Return the recording for a call; a model of which this rank holds a part is recorded on meta."""
        if (known := self._of_no_rows(key)) is not None:
            return known, None
        with self._without_values() if self._has_part and key not in self.kept else contextlib.nullcontext():
            recorded = super().find(key, sample)
        while self._late:
            self._late.pop()()
        return recorded

    def leave(self, step: PreparedStep | FoundCall, kept: Sequence[torch.Tensor]) -> None:
        """Leave in Python what the model's own call would have left."""
        with self.guard.opened():
            super().leave(step, kept)

    def _without_values(self) -> contextlib.AbstractContextManager[None]:
        """Have the model's tensors on meta, whole, and in the dtype that they are gathered in."""
        sizes = {id(tensor): shard.size for tensor, shard in PARTS.items()}
        return without_values(self.model, sizes, self.parallelize.dtypes(self.model) if self.parallelize else {})

    def _of_no_rows(self, key: Key) -> Recorded | None:
        """Return a recording for a replica that has no rows where others have: nothing of it runs here."""
        for known in self.kept.alike(key) if self.world.replicas > 1 else ():
            dims = zip(key.shapes, known.kind.batch_dims, strict=True)
            if {shape[dim] for shape, dim in dims if shape and dim is not None} == {0}:
                return known
        return None

    @property
    def _has_part(self) -> bool:
        """Whether this rank holds the values of only a part of the model, or computes in another dtype."""
        part = bool(self.owner) and (self._on_meta or self.tensors is not None)
        return part or self.part is not None or bool(self.parallelize and self.parallelize.policy)

    def wrap(self) -> None:
        """Have this rank's part of the model wrapped, once it is known; the plan says what ranks share out."""
        parallelize, shared = self.parallelize, Parallel(self.world.replicas, self.world.tensor_ranks, self.world.size)
        if self.part is None and self.plan is not None:
            if parallelize is not None:
                names = {n for n, _ in named_state(self.model) if self.owner_of(n) == self.world.rank}
                self.part, sharded = wrapped_part(self.model, names, parallelize, self.world)
                shared = replace(shared, zero=3 * sharded, by_units=parallelize.by_units and sharded)
            self.plan = self.plan.on_ranks(shared)
        if self._has_part:
            self.refuse_whole()

    def refuse_whole(self) -> None:
        """Refuse calls and copies of the user's own model: what other ranks hold of it may be stale from now on."""
        self.guard.begin(self.is_own, self.world.number)

    def unwrap(self) -> None:
        """Give the model plain parameters again, on every rank."""
        if self.part is not None and not self.part.given_back:
            self.world.agree("gives the model plain parameters", {}, attempt(self.part.check_unchanged)[1])
            self.part.give_back()

    def check_wrapped(self, step: PreparedStep) -> None:
        """Raise InputError where the part has given its parameters back, TraceError for what it may not do wrapped."""
        if self.part is not None:
            self.part.check_step(step.lowered)
        if self.parallelize is not None:
            self.parallelize.check(step, self.model)

    def _replicas(self, lowered: Lowered, stage_of: Mapping[str, int]) -> tuple[Replicas, ...]:
        """Return nothing: each of a stage's replicas is a rank, with modules of its own."""
        check_cells(lowered, counts := [len(ranks) for ranks in self.ranks])
        check_ending(lowered, dict(self.model.named_parameters(remove_duplicate=False)), counts[-1])
        return ()

    def _to_plan(self, trace: Trace) -> Trace:
        if self.tensors is None:
            return trace
        return replace(trace, graph=self.tensors.alone(trace.graph, batch_rows(trace.inputs)))

    def _cut(self, trace: Trace, plan: Plan, key: Key, shapes: Shapes | None = None) -> Recorded:
        if self.tensors is not None:
            if trace.gathered.recording.recording.changed:
                raise TraceError(
                    "calls change Python state of the model, whose Python tp cannot run on parts; leave it out"
                )
            trace = replace(trace, graph=self.tensors.recording(trace.graph, batch_rows(trace.inputs)))
        trace = replace(trace, graph=replace(trace.graph, homes={} if self.parallelize else self._homes))
        return super()._cut(trace, plan, key, shapes)

    def _planned(self, key: Key, sample: Sample) -> Trace:
        world, trace = self.world, None
        of_replica: dict[str, Any] = {"the call": call_text(self.model, sample.args, sample.kwargs)}
        if self.kept:
            of_replica[BATCH] = checksum(tensors_in((sample.args, sample.kwargs)))
        world.agree(RECORDS, {}, replica_facts=of_replica)
        planned = partial(super()._planned, key, sample)
        if not self.kept:  # all replicas record: the first one plans
            first, plan, error = world.first, None, None
            if world.number == first:
                trace, error = attempt(planned)
                plan = None if self.plan is None else self.plan.to_json()
            plan = world.agree("has planned", {}, error, plan)[first]
            self.plan = Plan.model_validate_json(plan)
        if world.rank == 0:
            trace, error = (trace, None) if trace is not None else attempt(planned)
            world.told(0, trace and trace.findings, error)
        else:
            self._findings = world.told(0)
            trace = planned()
            self._findings = None
        assert trace is not None
        self._check_size(key, trace)
        return trace

    def _trace(self, sample: Sample) -> Trace:
        """Record the model's forward; what rows it mixes is what rank 0 has found."""
        with without_values(self.model) if self.sample is not None else contextlib.nullcontext():
            return trace(
                self.model,
                self.sample or sample,
                batch_dims=self.options.batch_dims,
                proofs=() if self.plan is None else self.plan.proofs,
                whole_norms=self.options.batch_norm == "full",
                made_up=True,
                findings=self._findings,
                **({} if self.parallelize is None else self.parallelize.recorded(self.model)),
            )

    def check_stream(self) -> None:
        """Raise InputError where ranks have more in common than the stages of one pipeline."""
        super().check_stream()
        if self.world.pipelines > 1 or self.parallelize is not None:
            raise InputError(
                "a stream has one pipeline of whole stages; with dp, tp or parallelize= ranks train by train_step"
            )

    def notes(self) -> str:
        """Return what the report says of stages that were to be compiled, and of tensors that stay whole."""
        return super().notes() + ("" if self.tensors is None else self.tensors.notes())

    def _tree(self, sample: Sample, reason: str) -> NoReturn:
        raise TraceError(f"{type(self.model).__name__} runs by its own Python, in one process only: {reason}")

    def _check_size(self, key: Key, trace: Trace) -> None:
        assert self.plan is not None
        if len(self.plan.devices) != self.world.size:
            self._collapses.check(key.rest, trace.graph, batch_rows(trace.inputs))
            raise InputError(
                f"the model gives {len(self.plan.devices)} stages, and {self.world.size} processes were started for "
                f"them; start {len(self.plan.devices)}{''.join(f'. {why}' for why in self._collapses.found())}"
            )

    def _place(self, lowered: Lowered, devices: Sequence[torch.device]) -> None:
        ranks, model = self.ranks, self.model
        stage_of, parameters = owners(model, lowered), dict(model.named_parameters(remove_duplicate=False))
        rank_of = {name: ranks[stage][0] for name, stage in stage_of.items()}
        if first := not self.owner:
            self.owner.update(rank_of)
            self._homes.update((name, stage_of[name]) for name in stage_of.keys() & parameters)
        held = {*parameters, *(lowered.traced.written & self.owner.keys())}
        moved = next((name for name in sorted(held) if rank_of.get(name) not in (None, self.owner_of(name))), None)
        if moved is not None:
            raise TraceError(
                f"{moved!r} belongs to rank {self.world.members[self.owner_of(moved)]}, and in this kind of call rank "
                f"{self.world.members[rank_of[moved]]} uses it first; plan on a sample of a call that uses all of them"
            )
        uses = self._uses | uses_of_state(lowered, ranks)
        if (shared := state_of_several(uses)) is not None:
            raise TraceError(
                f"{shared!r} is changed on one rank and used on another, which would not see it; give modules that "
                "share state one stage by plan=, or run them in one process"
            )
        warn_where_apart(lowered, self.owner)
        if self.world.accelerated:
            self.world.open(pairs_of(lowered, ranks))
        self.group = stage_group(self.world, ranks)
        named = dict(named_state(model))
        buffers = {name for name, t in named.items() if not isinstance(t, nn.Parameter) and not t.requires_grad}
        used = used_by(lowered, [stage for stage, each in enumerate(ranks) if self.world.rank in each])
        self._buffers.update(name for name in buffers if id(named[name]) in used)
        names = [name for name, tensor in named.items() if id(tensor) in used or self.is_own(name)]
        owner = {name: rank_of[name] for name in (buffers & rank_of.keys()) - self.owner.keys()}
        self._late = [partial(self._fill, names, buffers, uses, owner)]
        if first and not (self.parallelize and self.parallelize.policy):
            self._late.pop()()

    def _fill(
        self, names: Sequence[str], buffers: Collection[str], uses: set[StateUse], owner: Mapping[str, int]
    ) -> None:
        """Bring what this rank has of the model to its device; ``owner`` are those of buffers that had none.

        What some kind of call uses on other ranks than those before may have been loaded, or changed, there.
        """
        model, new = self.model, [name for name in names if name not in self._placed]
        sizes = {name: tensor.size() for name, tensor in named_state(model)}
        if self._on_meta and new:
            kept = None if self.tensors is None else self.tensors.kept
            seed, device = torch.initial_seed(), self.world.device
            materialise(model, new, device=device, seed=seed, weights=self._weights, kept=kept)
        named = dict(named_state(model))
        if self.tensors is not None:
            self.tensors.cut({name: named[name] for name in new}, sizes)
        move((named[name], self.world.device) for name in new)
        self._placed.update(new)
        for name in sorted({use.name for use in uses - self._uses}.intersection(buffers)) if self._uses else ():
            self._share(name, named[name])
        self._uses.update(uses)
        self.owner.update(owner)

    def check_reads(self, recorded: Recorded) -> None:
        """Raise TraceError where Python reads a value that one rank changes, on which all ranks have to decide."""
        if (guard := recorded.trace.guard) is None:
            return
        named = self.model.named_parameters(remove_duplicate=False)
        changed = {name for name, parameter in named if parameter.requires_grad and name in self.owner}
        changed.update(name for name, parameter in self.model.named_parameters() if parameter in PARTS)
        changed.update(*(each.traced.written for variants in self.kept.values() for each in variants))
        read = [str(node.target) for node in guard.graph.nodes if node.op == "get_attr" and node.target in changed]
        if read:
            raise TraceError(
                f"forward reads the value of {read[0]!r} in Python, and rank {self.owner_of(read[0])} alone has it as "
                "it is after a step, or has a part; compute with it as a tensor (torch.where in place of if), freeze "
                "it on every rank (requires_grad_(False)), or run in one process"
            )

    @property
    def _trained_last(self) -> bool:
        return _trained_last is not None and _trained_last() is self

    def check_fresh(self) -> None:
        """Raise TraceError where another pipe has trained a parameter or buffer on another rank than this one's."""
        for name, tensor in () if self._trained_last else named_state(self.model):
            trained, holders = _TRAINED.get(tensor), self._holders(self.owner_of(name))
            if trained is not None and not holders <= trained:
                raise TraceError(
                    f"another pipe has trained {name!r} on rank {min(trained)}, and this one has it on rank "
                    f"{min(holders - trained)}, where it is as before; give both pipes one cut by plan=, or every "
                    "rank the whole state and split again"
                )

    def trains(self) -> None:
        """Note which ranks hold what this pipe trains."""
        global _trained_last
        if not self._trained_last:
            _trained_last = weakref.ref(self)
            holders = [self._holders(rank) for rank in range(self.world.size)]
            _TRAINED.update((tensor, holders[self.owner_of(name)]) for name, tensor in named_state(self.model))
            self.refuse_whole()

    def share_values(self) -> None:
        """Give every rank the values of all."""
        global _trained_last
        _trained_last = None
        for name, tensor in {id(tensor): (name, tensor) for name, tensor in named_state(self.model)}.values():
            if (shard := PARTS.pop(tensor, None)) is not None:
                tensor.data, gradient = shard.whole(tensor), tensor.grad
                if gradient is not None and gradient.is_sparse:
                    tensor.grad = shard.whole(gradient.to_dense()).to_sparse(gradient.sparse_dim())
                else:
                    tensor.grad = None if gradient is None else shard.whole(gradient)
            self._share(name, tensor)
            _TRAINED.pop(tensor, None)

    def _share(self, name: str, tensor: torch.Tensor) -> None:
        share(tensor, self.owner_of(name), self.world)

    def owner_of(self, name: str) -> int:
        """Return the rank that holds a parameter or buffer; the first stage's has what no stage uses."""
        return self.owner.get(name, self.ranks[0][0])

    def is_own(self, name: str) -> bool:
        """Tell whether this rank holds a parameter, or uses a buffer; as long as it is not known all do."""
        return not self.owner or self.owner_of(name) in self._alike[self.world.rank] or name in self._buffers

    @cached_property
    def _alike(self) -> Mapping[int, Sequence[int]]:
        """The replicas of each rank's stages."""
        return {rank: each for each in self.ranks for rank in each}

    def _holders(self, rank: int) -> frozenset[int]:
        """Return the ranks of ``torch.distributed`` that have a rank's part of the model."""
        return frozenset[int]().union(*map(self.world.holders, self._alike[rank]))
