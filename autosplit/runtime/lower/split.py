"""From a layout to GraphModules: the stages, their prologues and the epilogue."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import fx, nn

from autosplit.profile.stage_trace.stage_graph import block_paths, in_units
from autosplit.runtime.lower.layout import EPILOGUE, Layout, Slot, lay_out, tensor_operands
from autosplit.runtime.lower.region import Region, RegionModule, recomputed
from autosplit.runtime.lower.stage_code import StageCode
from autosplit.runtime.lower.visits import StageVisits
from autosplit.runtime.optimizers import move
from autosplit.runtime.regions import Compiled, Recomputed
from autosplit.runtime.tape import TapeNode, tape_nodes
from autosplit.schedule.action import Gradients, gradients_of
from autosplit.trace.gradients import gradient_flow
from autosplit.trace.graph import INFO, NodeClass, TracedGraph, TracedNode
from autosplit.trace.rows.kinds import counts_by_microbatch


@dataclass(frozen=True)
class Lowered:
    """The pieces of one recording under one assignment.

    Attributes:
        layout: who needs which value where.
        stages: one GraphModule per stage; it returns a dict of bundles by target.
        prologues: per stage the GraphModule of its shared nodes, or None.
        epilogue: the GraphModule of the full nodes, or None; it returns the tuple of ``epilogue_outputs``.
        epilogue_inputs: the slots that the epilogue takes, in order.
    """

    layout: Layout
    stages: tuple[RegionModule, ...]
    prologues: tuple[RegionModule | None, ...]
    epilogue: RegionModule | None
    epilogue_inputs: tuple[Slot, ...]
    epilogue_outputs: tuple[str, ...]
    outputs: tuple[object, ...]
    """The flat outputs: fx nodes of the recording, or constants."""
    recompute: tuple[str, ...]
    """What each stage recomputes in its backward."""
    runs: tuple[nn.Module, ...]
    """What runs each stage: its own graph, compiled code, or either of them again in its backward."""
    codes: dict[int, StageCode] = field(default_factory=dict, repr=False, compare=False)
    """The code that runs each stage in steps, for stages that have run."""
    visits: dict[int, StageVisits] = field(default_factory=dict, repr=False, compare=False)
    """The visits of units of parameters, for stages that gather these one by one."""

    @property
    def traced(self) -> TracedGraph:
        """The recording."""
        return self.layout.traced

    @cached_property
    def takes(self) -> tuple[tuple[str, ...], ...]:
        """The names of what each stage takes, in order."""
        return tuple(stage.takes for stage in self.stages)

    @cached_property
    def sources(self) -> list[set[int]]:
        """For each stage, the stages whose values it takes."""
        return [set(stage.received) for stage in self.layout.stages]

    def gradients(self, tensors: Sequence[torch.Tensor]) -> tuple[Gradients, ...]:
        """Return of what each stage makes gradients in a call with these inputs, when something trains."""
        wanting = [info.name for info, tensor in zip(self._inputs, tensors, strict=True) if tensor.requires_grad]
        flow = gradient_flow(self.traced, wanting)
        names = [{node.meta[INFO].name for node in stage.nodes} for stage in self.layout.stages]
        flows, trained = ([s for s, of in enumerate(names) if not each.isdisjoint(of)] for each in flow)
        return gradients_of(len(names), flows=flows, trained=trained)

    def runs_again(self, stage: int, *, last: bool) -> bool:
        """Tell whether all of a stage runs again in its backward; ``last``: for the last microbatch of a step."""
        again = isinstance(self.runs[stage], Recomputed)
        return again and not (last and self.recompute[stage] == "except_last")

    def code(self, stage: int) -> StageCode:
        """Return the code of a stage, made anew where its modules are others or have hooks."""
        code = self.codes.get(stage)
        if code is None or not code.holds():
            code = self.codes[stage] = StageCode(self.stages[stage], self.runs[stage])
        return code

    def cell(self, stage: int, *, last: bool) -> Callable[..., Any]:
        """Return what runs a stage on a microbatch."""
        if (code := self.codes[stage]).is_entered:
            return code.function
        run = self.runs[stage]
        once = isinstance(run, Recomputed) and not self.runs_again(stage, last=last)
        return partial(run, recompute=False) if once else run

    @property
    def uncompiled(self) -> dict[str, str]:
        """The stages and blocks that run by their own graphs where they were to be compiled, and why."""
        runs = (*self.runs, *(stage.__dict__[name] for stage in self.stages for name in stage.units))
        inner = [run.run if isinstance(run, Recomputed) else run for run in runs]
        return {run.label: run.reason for run in inner if isinstance(run, Compiled) and run.reason}

    @cached_property
    def changes_inputs(self) -> bool:
        """Tell whether the model writes to one of its inputs."""
        return any(info.mutated for info in self._inputs)

    @property
    def _inputs(self) -> list[TracedNode]:
        nodes = self.traced.graph.nodes
        return [node.meta[INFO] for node in nodes if node.op == "placeholder" and INFO in node.meta]

    @cached_property
    def counts(self) -> bool:
        """Tell whether any stage has norms whose running statistics are updated when all forwards are over."""
        return any(counts_by_microbatch(node) for s in self.layout.stages for node in s.nodes)

    @cached_property
    def epilogue_needs_counts(self) -> bool:
        """Tell whether a full node reads or writes the statistics of such norms, and so comes behind their update."""
        written = {
            name
            for stage in self.layout.stages
            for node in stage.nodes
            if counts_by_microbatch(node)
            for name in node.meta[INFO].writes
        }
        return any(not written.isdisjoint((*(i := n.meta[INFO]).reads, *i.writes)) for n in self.layout.epilogue)

    @cached_property
    def random(self) -> bool:
        """Tell whether any node draws random numbers."""
        return any(info.random for _, info in self.traced.compute_nodes())

    @cached_property
    def tape(self) -> tuple[TapeNode, ...]:
        """The random nodes that can have the plain model's numbers, in model order."""
        twice = (stage.nodes for stage, how in zip(self.layout.stages, self.recompute, strict=True) if how != "never")
        again = {node.meta[INFO].name for nodes in twice for node in nodes}
        return tape_nodes((info for _, info in self.traced.compute_nodes()), again=again)

    @cached_property
    def off_tape(self) -> tuple[str, ...]:
        """The names of the random nodes that cannot have the plain model's numbers."""
        held = {node.name for node in self.tape}
        return tuple(i.name for _, i in self.traced.compute_nodes() if i.random and i.name not in held)


def lower(
    traced: TracedGraph,
    stage_of: Mapping[str, int],
    devices: Sequence[torch.device],
    *,
    recompute: Sequence[str] | None = None,
    compiled: Mapping[str, Any] | None = None,
) -> Lowered:
    """Cut a recording into stages; ``stage_of`` gives the stage of every tensor-computing node by stable name.

    ``recompute`` says what each stage does again in its backward; None: nothing. ``compiled``: the arguments of
    ``torch.compile`` for stages, and for blocks that are recomputed; None: they run as they are.
    """
    recompute = tuple(recompute or ["never"] * len(devices))
    layout = lay_out(traced, stage_of, len(devices))
    names = {n.name: n.name for n in traced.graph.nodes} | {name: name.replace(".", "_") for name in layout.given}
    output = next(iter(reversed(traced.graph.nodes)))
    stages = tuple(_stage(layout, i, device, names, recompute[i], compiled) for i, device in enumerate(devices))
    prologues = tuple(_prologue(layout, i, device, names) for i, device in enumerate(devices))
    wanted = tuple(
        n.name for n in output.all_input_nodes if INFO in n.meta and n.meta[INFO].node_class is NodeClass.FULL
    )
    inputs = _epilogue_inputs(layout)
    epilogue = _epilogue(layout, devices[-1], inputs, wanted, names) if layout.epilogue else None
    runs = tuple(_run(layout, i, stage, recompute[i], compiled) for i, stage in enumerate(stages))
    return Lowered(layout, stages, prologues, epilogue, inputs, wanted, tuple(output.args[0]), recompute, runs)


def _run(
    layout: Layout, index: int, stage: RegionModule, recompute: str, compiled: Mapping[str, Any] | None
) -> nn.Module:
    label = f"stage {index}"
    run = None if compiled is None or stage.units else Compiled(stage, label, compiled)
    if recompute == "never" or stage.units:
        return run or stage
    inputs = {n.name: n.meta[INFO] for n in layout.traced.graph.nodes if n.op == "placeholder" and INFO in n.meta}
    of_stage = layout.stages[index]
    copied = [position for position, slot in enumerate(of_stage.inputs) if inputs[slot.value].mutated]
    return recomputed(stage, layout, of_stage.nodes, copied=copied, label=label, run=run)


def _stage(
    layout: Layout,
    index: int,
    device: torch.device,
    names: Mapping[str, str],
    recompute: str,
    compiled: Mapping[str, Any] | None,
) -> RegionModule:
    stage = layout.stages[index]
    region = Region(layout, device, compiled=compiled)
    if stage.inputs:
        region.bind("inputs", stage.inputs, names)
    if stage.shared:
        region.bind("shared", stage.shared, names)
    for source in sorted(stage.received):
        region.bind(f"from{source}", stage.received[source], names)
    if recompute == "block":
        region.copy_units(_units(layout, stage.nodes), label=f"stage {index}")
    else:
        region.copy(stage.nodes)
    sent = {target: tuple(region.value(slot) for slot in slots) for target, slots in sorted(stage.sent.items())}
    return region.finish(sent, f"Stage{index}")


def _units(layout: Layout, nodes: Sequence[fx.Node]) -> list[tuple[str, tuple[fx.Node, ...]]]:
    paths = block_paths(layout.traced.root, (node.meta[INFO].module for node in nodes))
    return in_units(nodes, paths)


def _prologue(layout: Layout, index: int, device: torch.device, names: Mapping[str, str]) -> RegionModule | None:
    prologue = layout.prologues[index]
    if not prologue.nodes:
        return None
    region = Region(layout, device)
    if prologue.takes:
        region.bind("shared", prologue.takes, names)
    region.copy(prologue.nodes)
    return region.finish(tuple(region.value(slot) for slot in prologue.gives), f"Shared{index}")


def _epilogue_inputs(layout: Layout) -> tuple[Slot, ...]:
    wanted: dict[Slot, None] = {}
    nodes = set(layout.epilogue)
    for operand in (operand for node in layout.epilogue for operand in tensor_operands(node) if operand not in nodes):
        if operand.op != "get_attr":
            wanted[Slot(operand.name)] = None
        elif (str(operand.target), EPILOGUE) in layout.alias_of:
            wanted[Slot(str(operand.target))] = None
    return tuple(wanted)


def _epilogue(
    layout: Layout, device: torch.device, inputs: Sequence[Slot], wanted: Sequence[str], names: Mapping[str, str]
) -> RegionModule:
    region = Region(layout, device)
    if inputs:
        region.bind("values", inputs, names)
    region.copy(layout.epilogue)
    return region.finish(tuple(region.value(Slot(name)) for name in wanted), "Epilogue")


def place(model: nn.Module, lowered: Lowered, devices: Sequence[torch.device]) -> None:
    """Move the model's state to the devices of the stages that use it; Parameter objects stay the same.

    State that no stage uses moves to the first device. Does nothing where everything lies on the right device already.
    """
    stages = owners(model, lowered)
    move((tensor, devices[stages.get(name, 0)]) for name, tensor in named_state(model))


def owners(model: nn.Module, lowered: Lowered) -> dict[str, int]:
    """Return the stage that holds each parameter and buffer that is used, by all its names: the first that uses it."""
    stage_of: dict[int, int] = {}
    named = dict(named_state(model))
    for name, stage in lowered.layout.home.items():
        if name in named:
            stage_of[id(named[name])] = stage
    for stage, region in _parts(lowered):
        for tensor in (*region.parameters(), *region.buffers()):
            stage_of.setdefault(id(tensor), stage)
    return {name: stage_of[id(tensor)] for name, tensor in named.items() if id(tensor) in stage_of}


def used_by(lowered: Lowered, stages: Collection[int]) -> set[int]:
    """Return the identities of the parameters and buffers that stages use; of tied ones the first stage's."""
    return {id(t) for stage, each in _parts(lowered) if stage in stages for t in (*each.parameters(), *each.buffers())}


def _parts(lowered: Lowered) -> Iterator[tuple[int, RegionModule]]:
    """Yield the parts of the program by stage: stages, shared nodes, and what comes behind the last cell."""
    parts = [*enumerate(lowered.stages), *enumerate(lowered.prologues), (len(lowered.stages) - 1, lowered.epilogue)]
    yield from ((stage, region) for stage, region in parts if region is not None)


def named_state(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield parameters and buffers by all their names."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)
