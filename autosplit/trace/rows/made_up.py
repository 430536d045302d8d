"""Values for a model that has none where it is probed, for one node of a graph at a time; they are dropped again.

    node       on meta ─► its parameters and buffers get values ─► three runs and all questions ─► on meta again
               on several devices ─► copies on the CPU          ─► likewise
    sample     on meta ─► rows that differ
    buffers that the forward changes ─► values that stay for the whole probe, as a run carries them on

A tensor has the same values wherever and whenever it is used: they follow from its name. Weights keep the size of what
they are given, biases and means are small, other vectors and buffers positive: a variance, a frequency, a scale. Masks
have both entries in each row. What is valid depends on the model: an index, a mask by 0 and 1, or a length. So there
are several ways to make integers, masks and inputs up, and the next one is taken where one raises or gives NaN, which
hides influence.
"""

from __future__ import annotations

import contextlib
import math
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn

from autosplit.trace.borrowed.holders import Holders
from autosplit.trace.graph import INFO
from autosplit.trace.inputs.objects import empty_in_layout, layout_of
from autosplit.trace.on_cpu import OnCpu
from autosplit.trace.recording.build import RawGraph
from autosplit.trace.recording.run import FlatInputs
from autosplit.trace.rows.kinds import function_of

_DRAWN = 65_537
"""Random values that are drawn; larger tensors repeat them. A prime, so that rows do not repeat."""


@dataclass(frozen=True)
class Fill:
    """How to make up what a model may not take.

    Attributes:
        integers: least and largest integer of an input.
        number: every integer of a parameter or buffer, an index most often.
        first: the first entry along the last dimension of a mask; the second one is the other.
        positive: floating-point inputs lie between 0 and 1, else around 0.
    """

    integers: tuple[int, int]
    number: int
    first: bool
    positive: bool


FILLS = (
    Fill(integers=(0, 6), number=0, first=False, positive=False),
    Fill(integers=(0, 1), number=0, first=True, positive=True),
    Fill(integers=(1, 2), number=1, first=False, positive=True),
)


class MadeUp:
    """The made-up values of one probe of a graph."""

    def __init__(self, raw: RawGraph, fill: Fill) -> None:
        self.raw, self.fill = raw, fill
        self.hides = False
        """Whether some node gave NaN or infinity, beside which no difference shows."""
        self._names: dict[int, str] = {}
        for name, tensor in (*raw.root.named_parameters(), *raw.root.named_buffers()):
            self._names.setdefault(id(tensor), name)
        self._now: dict[int, torch.Tensor] = {}

    def interpreter(self) -> fx.Interpreter:
        """Return an interpreter that reads values on the CPU in the places of the model's own elsewhere."""
        return _MadeUpRun(self)

    @contextlib.contextmanager
    def at(self, node: fx.Node) -> Iterator[None]:
        """Give what a node takes from the model values inside."""
        module = function_of(node, self.raw.root)
        try:
            if isinstance(module, nn.Module):
                holders = Holders([module])
                held = (tensor for _, tensor in holders.tensors.values())
                with self._valued(holders, (*module.parameters(), *module.buffers(), *held)):
                    yield
            else:
                yield
        finally:
            self._now.clear()

    def written(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the buffers that the graph changes have values."""
        names = {name for node in self.raw.graph.nodes if INFO in node.meta for name in node.meta[INFO].writes}
        buffers = [self.raw.root.get_buffer(name) for name in sorted(names)]
        return self._valued(Holders([self.raw.root]), buffers) if buffers else contextlib.nullcontext()

    def _valued(self, holders: Holders, tensors: Iterable[torch.Tensor]) -> contextlib.AbstractContextManager[None]:
        """Put values in the places of tensors that are not on the CPU, wherever they are held."""
        return holders.swapped([(each, self.value(each)) for each in tensors if each.device.type != "cpu"])

    def value(self, value: Any) -> Any:
        """Return the values of a tensor that is not on the CPU, equal ones each time; anything else as it is."""
        if not isinstance(value, torch.Tensor) or value.device.type == "cpu":
            return value
        if id(value) not in self._now:
            meta = value.is_meta
            copy = self._filled(value, self._names.get(id(value), ""), is_input=False) if meta else value.detach().cpu()
            parameter = isinstance(value, nn.Parameter)
            self._now[id(value)] = nn.Parameter(copy, value.requires_grad) if parameter else copy
        return self._now[id(value)]

    def sample(self, inputs: FlatInputs, *, rows: int) -> FlatInputs:
        """Return inputs with values, of no fewer rows than these where they are made up."""
        leaves, first = list(inputs.leaves), dict[int, str]()
        for index in inputs.tensors():
            leaf, dim = leaves[index], inputs.batch_dims[index]
            shape = [max(size, rows) if d == dim else size for d, size in enumerate(leaf.shape)]
            if leaf.is_meta:
                blank = empty_in_layout(layout_of(leaf), shape, dtype=leaf.dtype, device="meta")
                leaves[index] = self._filled(blank, first.setdefault(id(leaf), inputs.names[index]), is_input=True)
            else:
                leaves[index] = leaf.detach().cpu()
            leaves[index].requires_grad_(leaf.requires_grad)
        return replace(inputs, leaves=tuple(leaves))

    def note(self, tensors: Iterable[torch.Tensor]) -> None:
        """Note whether values hide others."""
        self.hides = self.hides or any(
            bool((tensor.isnan() | (tensor == math.inf)).any()) for tensor in tensors if tensor.is_floating_point()
        )

    def _filled(self, like: torch.Tensor, name: str, *, is_input: bool) -> torch.Tensor:
        """Return a tensor like one on meta; ``given``: it is an input."""
        values = torch.empty_like(like, device="cpu", requires_grad=False)
        memory = values.new_empty(0).set_(values.untyped_storage())
        drawn = self._drawn(like, name, min(memory.numel(), _DRAWN), is_input).to(values.dtype)
        for piece in memory.split(_DRAWN):
            piece.copy_(drawn[: len(piece)])
        if values.dtype == torch.bool and values.dim() and values.shape[-1] > 1:
            values[..., 0], values[..., 1] = self.fill.first, not self.fill.first
        return values

    def _drawn(self, like: torch.Tensor, name: str, count: int, is_input: bool) -> torch.Tensor:
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        if like.is_complex():
            return torch.randn(count, generator=generator, dtype=torch.complex128)
        if not like.is_floating_point():
            numbers = self.fill.integers if is_input else (self.fill.number,) * 2
            low, high = (0, 1) if like.dtype == torch.bool else numbers
            return torch.randint(low, high + 1, (count,), generator=generator)
        small = name.endswith(("bias", "mean"))
        if self.fill.positive if is_input else not small and (like.dim() < 2 or not isinstance(like, nn.Parameter)):
            return torch.rand(count, generator=generator) + (0.0 if is_input else 0.5)
        inputs = like.shape[1:]
        fan = max(inputs) if len(inputs) == 2 else math.prod(inputs)  # several matrices, or a convolution's weight
        return torch.randn(count, generator=generator) * (1.0 if is_input else 0.1 if small else max(fan, 1) ** -0.5)


class _MadeUpRun(OnCpu):
    def __init__(self, made_up: MadeUp) -> None:
        super().__init__(made_up.raw.root, graph=made_up.raw.graph)
        self.made_up = made_up

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        return self.made_up.value(super().get_attr(target, args, kwargs))
