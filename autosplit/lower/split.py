"""From a layout to GraphModules: the stages, their prologues and the epilogue."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import fx

from autosplit.lower.layout import EPILOGUE, Layout, Slot, lay_out
from autosplit.lower.region import Region, RegionModule
from autosplit.runtime.ops import OUT
from autosplit.trace.graph import INFO, NodeClass, TracedGraph


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

    @property
    def traced(self) -> TracedGraph:
        """The recording."""
        return self.layout.traced

    @cached_property
    def takes(self) -> tuple[tuple[str, ...], ...]:
        """The names of what each stage takes, in order."""
        return tuple(stage.takes for stage in self.stages)

    @cached_property
    def changes_inputs(self) -> bool:
        """Tell whether the model writes to one of its inputs."""
        inputs = (n.meta[INFO] for n in self.traced.graph.nodes if n.op == "placeholder" and INFO in n.meta)
        return any(info.mutated for info in inputs)

    @cached_property
    def random(self) -> bool:
        """Tell whether any node draws random numbers."""
        return any(info.random for _, info in self.traced.compute_nodes())


def lower(traced: TracedGraph, stage_of: Mapping[str, int], devices: Sequence[torch.device]) -> Lowered:
    """Cut a recording into stages; ``stage_of`` gives the stage of every tensor-computing node by stable name."""
    layout = lay_out(traced, stage_of, len(devices))
    names = {n.name: n.name for n in traced.graph.nodes} | {name: _identifier(name) for name in layout.given}
    output = next(iter(reversed(traced.graph.nodes)))
    stages = tuple(_stage(layout, i, device, names) for i, device in enumerate(devices))
    prologues = tuple(_prologue(layout, i, device, names) for i, device in enumerate(devices))
    wanted = tuple(
        n.name for n in output.all_input_nodes if INFO in n.meta and n.meta[INFO].node_class is NodeClass.FULL
    )
    inputs = _epilogue_inputs(layout)
    epilogue = _epilogue(layout, devices[-1], inputs, wanted, names) if layout.epilogue else None
    return Lowered(layout, stages, prologues, epilogue, inputs, wanted, tuple(output.args[0]))


def _stage(layout: Layout, index: int, device: torch.device, names: Mapping[str, str]) -> RegionModule:
    stage = layout.stages[index]
    region = Region(layout, device)
    if stage.inputs:
        region.bind("inputs", stage.inputs, names)
    if stage.shared:
        region.bind("shared", stage.shared, names)
    for source in sorted(stage.received):
        region.bind(f"from{source}", stage.received[source], names)
    region.copy(stage.nodes)
    sent = {target: tuple(region.value(slot) for slot in slots) for target, slots in sorted(stage.sent.items())}
    return region.finish(sent, f"Stage{index}")


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
    for node in layout.epilogue:
        for operand in node.all_input_nodes:
            if operand.op == "get_attr":
                if (str(operand.target), EPILOGUE) in layout.alias_of:
                    wanted[Slot(str(operand.target))] = None
            elif INFO in operand.meta and operand not in nodes:
                wanted[Slot(operand.name)] = None
            elif operand.op == "call_function" and INFO not in operand.meta:
                wanted.update({Slot(n.name): None for n in _behind(operand) if n not in nodes})
    return tuple(wanted)


def _behind(node: fx.Node) -> list[fx.Node]:
    """Return the tensor nodes behind a piece of plumbing."""
    if INFO in node.meta:
        return [node]
    return [found for operand in node.all_input_nodes for found in _behind(operand)]


def _epilogue(
    layout: Layout, device: torch.device, inputs: Sequence[Slot], wanted: Sequence[str], names: Mapping[str, str]
) -> RegionModule:
    region = Region(layout, device)
    if inputs:
        region.bind("values", inputs, names)
    region.copy(layout.epilogue)
    return region.finish(tuple(region.value(Slot(name)) for name in wanted), "Epilogue")


def program_alias(layout: Layout, value: str, consumer: str) -> Slot:
    """Return the alias of a given or shared value that the epilogue or the caller takes."""
    assert consumer in (EPILOGUE, OUT)
    return Slot(value, layout.alias_of[value, consumer])


def _identifier(name: str) -> str:
    return name.replace(".", "_")
