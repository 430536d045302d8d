"""From a profiled recording to the pure numbers that the solver cuts.

Every micro node is a work, and all full nodes together are one more, the last. A parameter's bytes belong to its first
use, those of a shared node to the first micro node that uses it. A tied parameter is a value of its own: its home is
the first stage that uses it.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import groupby
from statistics import median_high

from torch import fx

from autosplit.errors import TraceError
from autosplit.options import Options
from autosplit.partition.problem import Device, Hold, Problem, TensorEdge, Tie, Work
from autosplit.planning.profiled.apply import DataflowIndex
from autosplit.planning.profiled.specs import link_factors, link_seconds
from autosplit.planning.request import ResolvedSchedule
from autosplit.profile.stage_trace.stage_graph import block_paths, in_units
from autosplit.profile.types import NodeProfile, Profile, StateProfile
from autosplit.schedule.action import Gradients, gradients_of
from autosplit.trace.gradients import GradientFlow, gradient_flow
from autosplit.trace.graph import INFO, NodeClass, TracedGraph, TracedNode

EPILOGUE = "epilogue"


class Outline:
    """The works of a recording by number, and what lies between them; full nodes are one work, the last.

    Attributes:
        micro, full: the nodes that run per microbatch, a work each, and those that run once per step.
        count: how many works there are.
        names: the stable names that each work stands for.
        sources: the names of the tensors that each node takes, of the micro nodes first, then of the full ones.
        consumers: the works that take the result of each micro node, once per use.
        inputs: the works that take each input with a batch dimension.
        first: every node's work: itself, or for a shared node the first that it serves.
        blocks: the number of the block in which nodes lie; the solver takes any other for a block of its own.
        served: the number of the block that a shared node serves first.
        order: pairs of works of which the first must not lie in a later stage than the second.
    """

    def __init__(self, traced: TracedGraph) -> None:
        self.index = index = DataflowIndex(traced)
        self._flows: dict[frozenset[str], GradientFlow] = {}
        nodes = list(traced.compute_nodes())
        micro = [(node, info) for node, info in nodes if info.node_class is NodeClass.MICRO]
        full = [(node, info) for node, info in nodes if info.node_class is NodeClass.FULL]
        self.micro, self.full = [info for _, info in micro], [info for _, info in full]
        self.count = len(micro) + bool(full)
        work_of = {info.name: index for index, info in enumerate(self.micro)}
        work_of.update({info.name: len(micro) for info in self.full})
        self.sources = [[source.meta[INFO].name for source in index.sources[node]] for node, _ in (*micro, *full)]
        users: dict[str, list[int]] = {}
        for info, names in zip((*self.micro, *self.full), self.sources, strict=True):
            for name in names:
                users.setdefault(name, []).append(work_of[info.name])
        self.consumers = [users.get(info.name, []) for info in self.micro]
        self.inputs = {name: tuple(dict.fromkeys(users.get(name, ()))) for name in _inputs(traced)}
        self.first = self._first(nodes, work_of)
        self.blocks = _blocks(traced, micro)
        numbers = [self.blocks.get(info.name) for info in self.micro]
        shared = self.first.keys() - work_of.keys()
        served = {name: at for name in shared if (at := self.first[name]) is not None and at < len(numbers)}
        self.served = {name: block for name, at in served.items() if (block := numbers[at]) is not None}
        self.order = self._order(traced, {node.name: work_of[info.name] for node, info in (*micro, *full)})

        together = tuple(info.name for info in self.full)
        self.names = (*((info.name,) for info in self.micro), *((together,) if together else ()))

    def flow(self, profile: Profile) -> GradientFlow:
        """Return where gradients flow: of a profile what its inputs want counts."""
        inputs = frozenset(name for name, wanted in profile.input_grads.items() if wanted)
        if inputs not in self._flows:
            self._flows[inputs] = gradient_flow(self.index.traced, inputs)
        return self._flows[inputs]

    def gradients(self, profile: Profile, stage_of: Mapping[str, int], stages: int) -> tuple[Gradients, ...]:
        """Return of what each stage of a cut makes gradients, when something trains."""
        micro = [info.name for info in self.micro]
        flows, trained = ([stage_of[name] for name in micro if name in names] for names in self.flow(profile))
        return gradients_of(stages, flows=flows, trained=trained)

    def _first(self, nodes: list[tuple[fx.Node, TracedNode]], work_of: dict[str, int]) -> dict[str, int | None]:
        first: dict[str, int | None] = dict(work_of)
        for node, info in reversed(nodes):
            if info.node_class is NodeClass.SHARED:
                served = [first.get(u.meta[INFO].name) for u in self.index.consumers.get(node, ())]
                first[info.name] = min((s for s in served if s is not None), default=0 if self.count else None)
        return first

    def _order(self, traced: TracedGraph, work_of: Mapping[str, int]) -> tuple[tuple[int, int], ...]:
        pairs = [(work_of[a], work_of[b]) for a, b in traced.order if a in work_of and b in work_of]
        order = [(a, b) for a, b in pairs if a != b]
        if self.full:
            order += [(index, len(self.micro)) for index in range(len(self.micro))]
        return tuple(dict.fromkeys(order))


def _inputs(traced: TracedGraph) -> list[str]:
    """Return the names of the inputs that differ from microbatch to microbatch."""
    infos = [node.meta[INFO] for node in traced.graph.nodes if node.op == "placeholder" and INFO in node.meta]
    return [info.name for info in infos if info.node_class is NodeClass.MICRO]


def _blocks(traced: TracedGraph, micro: list[tuple[fx.Node, TracedNode]]) -> dict[str, int]:
    pieces = in_units([node for node, _ in micro], block_paths(traced.root, (info.module for _, info in micro)))
    return {n.meta[INFO].name: number for number, (unit, nodes) in enumerate(pieces) if unit for n in nodes}


@dataclass(frozen=True)
class StateBytes:
    """Bytes that a parameter or buffer takes at home: itself, its gradient, its optimizer state."""

    tensor: int
    gradient: int
    optimizer: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.tensor + self.gradient + self.optimizer


def state_bytes(state: StateProfile, options: Options) -> StateBytes:
    """Return the bytes of one parameter or buffer under the optimizer that was named, on one data-parallel rank.

    A shard of a parameter is there beside the whole one, where that is held through the step.
    """
    parallel, part_of = options.parallel, options.parallel.part_of
    shard = max(state.bytes, parallel.shard_bytes * state.elements)
    tensor = part_of(shard, state, zero=3) if state.is_parameter else state.bytes
    tensor += state.bytes if state.is_parameter and parallel.whole else 0
    if not (state.is_parameter and state.trainable):
        return StateBytes(tensor, 0, 0)
    return StateBytes(tensor, part_of(parallel.kept_of(state), state, zero=2), options.optimizer_bytes(state))


def formulate(
    outline: Outline, profile: Profile, options: Options, *, microbatches: int, slowdowns: Sequence[float]
) -> Problem:
    """Return the partition problem of a profiled recording under 1F1B, in which nothing is recomputed.

    ``slowdowns`` say how many times as long each device takes.
    """
    return _Formulator(outline, profile, options, microbatches).problem(slowdowns)


def scheduled(problem: Problem, settled: ResolvedSchedule) -> Problem:
    """Return the problem of 1F1B under another schedule; a backward in two parts takes what these do."""
    changed = replace(
        problem, schedule=settled.schedule, virtual_stages=settled.virtual_stages, custom_schedule=settled.custom
    )
    if "W" not in changed.schedule_of(settled.stages).kinds:
        return changed
    works = (replace(work, backward_s=work.backward_s + work.split_s, split_s=0.0) for work in problem.works)
    return replace(changed, works=tuple(works))


def held_copies(
    traced: TracedGraph, profile: Profile, places: Sequence[Hashable], stage_of: Mapping[str, int]
) -> dict[int, int]:
    """Return the bytes of tied parameters that each stage holds a copy of: stages of one place share one.

    ``places`` has one entry per stage (`Options.places`).
    """
    held: dict[int, int] = {}
    for state in tied_states(traced, profile):
        home, *others = sorted({stage_of[name] for name in state.uses})
        for stage in others:
            if places[stage] != places[home]:
                held[stage] = held.get(stage, 0) + state.bytes
    return held


def tied_states(traced: TracedGraph, profile: Profile) -> list[StateProfile]:
    """Return the parameters that several nodes use as a value."""
    parameters = dict(traced.root.named_parameters(remove_duplicate=False))
    tied = {id(parameters[name]) for name in traced.tied if name in parameters}  # a tensor that is none has no state
    return [s for s in profile.state.values() if s.is_parameter and id(parameters[s.name]) in tied]


class _Formulator:
    def __init__(self, outline: Outline, profile: Profile, options: Options, microbatches: int) -> None:
        self.outline, self.profile, self.options, self.microbatches = outline, profile, options, microbatches
        self.micro, self.full, self.count = outline.micro, outline.full, outline.count
        self.evaluated = options.schedule == "forward"
        self.flowing = outline.flow(profile).nodes
        """No action is a backward, and no optimizer makes a step."""
        self.link_s = cache(partial(link_seconds, options))
        self.tied = tied_states(outline.index.traced, profile)
        self.trained = {name for s in profile.state.values() if s.is_parameter and s.trainable for name in s.uses}
        flows = {name for name, node in profile.nodes.items() if node.requires_grad}
        flows |= {name for name, wanted in profile.input_grads.items() if wanted}
        self.behind_grads = {
            info.name for info, names in zip(self.micro, outline.sources, strict=False) if not flows.isdisjoint(names)
        }

    def problem(self, slowdowns: Sequence[float]) -> Problem:
        if not self.count:
            raise TraceError("no operation depends on the batch: there is nothing to pipeline")
        static = self._static()
        each = zip(self.micro, static, self._steps(), strict=False)
        works = [self._work(info, static_bytes, step_bytes) for info, static_bytes, step_bytes in each]
        if self.full:
            works.append(self._epilogue(static[len(self.micro)]))
        devices = (Device(slowdown, self.options.room_bytes(lane)) for lane, slowdown in enumerate(slowdowns))
        return Problem(
            tuple(works),
            tuple(self._nets()),
            tuple(self._holds()),
            self.outline.order,
            self._ties(),
            microbatches=self.microbatches,
            devices=tuple(devices),
            links=link_factors(self.options, self._sent_bytes()),
            block_again=self._block_again() if self.options.parallel.rules.stops else 1.0,
        )

    def _sent_bytes(self) -> int:
        """Return about what a cut sends: the median of what the nodes of a microbatch give."""
        return median_high([self.profile.nodes[info.name].output_bytes for info in self.micro] or [0])

    def _block_again(self) -> float:
        """Return the part of their forwards that blocks do again: up to the last value that a backward takes.

        A product keeps what it takes: the last one of a block is not made again.
        """
        known: set[int] = set()
        again_s = whole_s = 0.0
        for block, members in groupby(self.micro, key=lambda info: self.outline.blocks.get(info.name)):
            passed_s = needed_s = 0.0
            for node in (self.profile.nodes[info.name] for info in members):
                if node.saved:
                    needed_s = passed_s if known.issuperset(node.saved) else passed_s + node.forward_s
                passed_s += node.forward_s
                known.update(node.saved, node.outputs)
            if block is not None:
                again_s, whole_s = again_s + needed_s, whole_s + passed_s
        return again_s / whole_s if whole_s else 1.0

    def _work(self, info: TracedNode, static_bytes: int, step_bytes: int) -> Work:
        node = self.profile.nodes[info.name]
        backward_s, transient = self._back(node)
        weight_s, split_s = 0.0, 0.0
        if backward_s and node.split is not None:
            weight_s = min(node.split.weight_s, backward_s)
            split_s = node.split.input_s + node.split.weight_s - backward_s
        elif backward_s:
            weight_s = self._weight_share(info.name) * backward_s
        return Work(
            info.name,
            node.forward_s,
            backward_s,
            static_bytes,
            transient,
            info.colocation_group,
            weight_s=weight_s,
            split_s=split_s,
            block=self.outline.blocks.get(info.name),
            step_bytes=step_bytes,
        )

    def _back(self, node: NodeProfile) -> tuple[float, int]:
        """Return the seconds of a node's backward, and the larger transient of both passes."""
        if self.evaluated or node.name not in self.flowing:
            return 0.0, node.forward_transient_bytes
        return node.backward_s, max(node.forward_transient_bytes, node.backward_transient_bytes)

    def _weight_share(self, name: str) -> float:
        """Return which part of a node's backward is weight gradients that can wait: an estimate by FLOPs.

        Only those of products wait. A product takes as many FLOPs for the gradient of each operand as it took forward.
        Where nothing but parameters wants a gradient it is all of the backward.
        """
        node = self.profile.nodes[name]
        if name not in self.trained or not node.backward_flops:
            return 0.0
        return min(1.0, node.forward_flops / node.backward_flops) if name in self.behind_grads else 1.0

    def _epilogue(self, static_bytes: int) -> Work:
        """The full nodes as one work: their time once per step, their saved values once as a transient."""
        nodes = [self.profile.nodes[info.name] for info in self.full]
        saved: dict[int, int] = {}
        for node in nodes:
            saved.update(node.saved)
            saved.update(node.outputs)
        backs = [self._back(node) for node in nodes]
        return Work(
            EPILOGUE,
            sum(n.forward_s for n in nodes) / self.microbatches,
            sum(backward_s for backward_s, _ in backs) / self.microbatches,
            static_bytes,
            sum(saved.values()) + max(transient for _, transient in backs),
        )

    def _static(self) -> list[int]:
        static = [0] * self.count
        tied = {state.name for state in self.tied}
        for state in self.profile.state.values():
            users = self._users(state)
            if users and state.name not in tied:
                size = state_bytes(state, self.options)
                static[users[0]] += size.total - self.evaluated * size.gradient
        return static

    def _steps(self) -> list[int]:
        """Return what the optimizer's step holds of the parameters that lie with each work."""
        steps = [0] * self.count
        for state in () if self.evaluated else self.profile.state.values():
            users = self._users(state)
            if users and state.is_parameter and state.trainable:
                steps[users[0]] += self.options.step_bytes(state)
        return steps

    def _ties(self) -> tuple[Tie, ...]:
        """A stage away from home holds a copy, unless it is on the home's device, and its gradient until they meet."""
        alone = len(set(self.options.places)) == 1
        return tuple(
            Tie(
                users,
                home_bytes=state_bytes(state, self.options).total,
                copy_bytes=state.bytes * ((not alone) + state.trainable),
                transfer_s=link_seconds(self.options, state.bytes) * (1 + state.trainable),
            )
            for state in self.tied
            if (users := self._users(state))
        )

    def _users(self, state: StateProfile) -> tuple[int, ...]:
        """Return the works that use a parameter or buffer, themselves or through a shared node, in model order."""
        works = (self.outline.first.get(name) for name in state.uses)
        return tuple(dict.fromkeys(work for work in works if work is not None))

    def _nets(self) -> list[TensorEdge]:
        nets = []
        for index, (info, consumers) in enumerate(zip(self.micro, self.outline.consumers, strict=True)):
            others = tuple(dict.fromkeys(c for c in consumers if c != index))
            if others:
                seconds = self.link_s(self.profile.nodes[info.name].output_bytes)
                floats = bool(info.tensors) and info.tensors[0].dtype.is_floating_point
                back = seconds if floats and not self.evaluated and info.name in self.flowing else 0.0
                nets.append(TensorEdge(index, others, seconds, back))
        return nets

    def _holds(self) -> list[Hold]:
        """One hold per storage: views of one storage are one, whoever makes, uses or saves them."""
        sizes: dict[int, int] = {}
        producers: dict[int, int] = {}
        users: dict[int, list[int]] = {}
        savers: dict[int, list[int]] = {}
        for index, (info, consumers) in enumerate(zip(self.micro, self.outline.consumers, strict=True)):
            node = self.profile.nodes[info.name]
            for storage, size in node.outputs.items():
                sizes[storage] = size
                producers.setdefault(storage, index)
                users.setdefault(storage, []).extend(consumers)
            for storage, size in node.saved.items():
                sizes.setdefault(storage, size)
                savers.setdefault(storage, []).append(index)
        holds = [
            Hold(
                size,
                producers.get(storage, savers.get(storage, [0])[0]),
                tuple(dict.fromkeys(users.get(storage, ()))),
                tuple(dict.fromkeys(savers.get(storage, ()))),
            )
            for storage, size in sizes.items()
        ]
        taken = self.outline.inputs.items()
        return [*holds, *(Hold(self.profile.input_bytes[name], None, consumers, ()) for name, consumers in taken)]
