"""What optimizers keep of the tensors that they update, and what one ``step()`` with that allocates and frees.

| name | state of a tensor of n elements in its own dtype | beside it while it steps |
|---|---|---|
| none, sgd | none | nothing: in place |
| momentum | n | nothing |
| adam, adamw | 2 n | a list of roots as large as all (foreach, the default on CUDA), else a root and a quotient |
| adafactor | a row and a column of a matrix, n of a vector | an update, the last one still there |
| muon | n of a matrix; as adamw of all else | the update, and Newton-Schulz in bf16 |
| lion | n | two of a tensor |
| adamw8bit | 2 n bytes, 4 bytes for each block of 256; 8 n bytes below 4096 elements | nothing: one kernel |
| paged_adamw, paged_adamw8bit | as adamw in fp32, adamw8bit; none from 100,000 elements on | nothing |
| cpu_adamw | none: on the host, fp32 master weights too | nothing |

Read from torch 2.13 (``torch/optim``: ``adam.py``, ``sgd.py``, ``_adafactor.py``, ``_muon.py``; default arguments),
lion_pytorch 0.2 and bitsandbytes 0.50 (``optim/optimizer.py``: ``min_8bit_size``, ``blocksize``, ``get_state_buffer``).
Paged states are taken to lie on the host, where the driver moves them when the device is full. Muon steps every matrix,
embeddings among them, and AdamW the rest: ``torch.optim.Muon`` takes nothing else.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from autosplit.schedule.memory.pieces import Change, StageTraces

_SMALL_8BIT, _BLOCK, _PAGED = 4096, 256, 100_000
_ADAM = ("adam", "adamw")
HOSTED = "cpu_adamw"
"""DeepSpeed's CPUAdam: state and fp32 weights lie on the host, which steps them (ZeRO-Offload, arXiv 2101.06840)."""
_IN_PLACE = ("none", "sgd", "momentum", "adamw8bit", "paged_adamw", "paged_adamw8bit")
_AT_ONCE = ("lion", "adamw8bit", "paged_adamw", "paged_adamw8bit")
"""Those of other packages: their masters are stepped all at once."""


@dataclass(frozen=True)
class Updated:
    """A tensor that an optimizer updates: a parameter, its master weight, or a shard of one, by rows.

    ``shape`` is that of the whole parameter.
    """

    elements: int
    itemsize: int = 4
    shape: tuple[int, ...] = ()

    @property
    def bytes(self) -> int:
        """Its size."""
        return self.elements * self.itemsize

    @property
    def factors(self) -> tuple[int, int] | None:
        """The bytes of its rows' and its columns' means; None for a vector."""
        if len(self.shape) < 2 or not self.elements:
            return None
        rows = -(-self.elements // self.shape[-1])
        columns = self.shape[-1] if len(self.shape) == 2 else -(-self.elements // self.shape[-2])
        return rows * self.itemsize, columns * self.itemsize


def state_sizes(name: str, tensor: Updated) -> tuple[int, ...]:
    """Return the bytes of each tensor that an optimizer keeps on the device of one that it updates."""
    whole = tensor.bytes
    if name == HOSTED:
        return ()
    if name in ("momentum", "lion"):
        return (whole,)
    if name in _ADAM:
        return whole, whole
    if name == "adafactor":
        return tensor.factors or (whole,)
    if name == "muon":
        return (whole,) if len(tensor.shape) == 2 else (whole, whole)
    if name.startswith("paged_") and tensor.elements >= _PAGED:
        return ()
    if name.endswith("adamw8bit") and tensor.elements >= _SMALL_8BIT:
        blocks = 4 * -(-tensor.elements // _BLOCK)
        return tensor.elements, tensor.elements, blocks, blocks
    return (4 * tensor.elements,) * 2 * ("adamw" in name)


def handed_over(stages: Iterable[StageTraces], copies: Mapping[str, int]) -> Iterator[Change]:
    """Yield how gradients of each parameter's uses are added up where it lies; ``copies`` come from other devices."""
    sizes: dict[str, list[int]] = defaultdict(list)
    for trace in (next(filter(None, (traces.never, traces.recomputed))) for traces in stages):
        for storage, count in chain.from_iterable(step.changes for step in trace.backward):
            if count > 0 and storage in trace.gradients:
                sizes[trace.gradients[storage]].append(count)
    for name, each in sizes.items():
        beside = each[0] * ((others := copies.get(name, 0)) + (len(each) + others > 1))
        changes = (-1, beside), *((-2, -count) for count in each[name in copies :]), (-1, -beside)
        yield from (change for change in changes if change[1])


def optimizer_changes(
    updated: Sequence[Updated], *, name: str | int, foreach: bool, masters_bytes: int | None = None
) -> tuple[Change, ...]:
    """Return what one ``optimizer.step()`` with existing state allocates and frees on a device, in order.

    How an optimizer that is given in bytes per parameter works is unknown: only its state is counted.
    ``masters_bytes``: master weights are stepped (`autosplit.optimizers.MasterWeights`), of at most so many bytes at
    once or of one parameter, and there are gradients in fp32 of these.
    """
    if name == HOSTED:
        return ()
    if masters_bytes is not None:
        changes: list[Change] = []
        left = iter(updated)
        most = sys.maxsize if name in _AT_ONCE else masters_bytes
        for batch in in_batches([tensor.bytes for tensor in updated], most):
            tensors = [next(left) for _ in batch]
            gradients = [(~index, count) for index, count in enumerate(batch)]
            changes += [*gradients, *optimizer_changes(tensors, name=name, foreach=foreach)]
            changes += [(gradient, -count) for gradient, count in gradients]
        return tuple(changes)
    if isinstance(name, int) or name in _IN_PLACE:
        return ()
    if name == "muon":
        matrices = [tensor for tensor in updated if len(tensor.shape) == 2]
        others = [tensor for tensor in updated if len(tensor.shape) != 2]
        return (
            *_overwritten(_muon(tensor, copies=not foreach) for tensor in matrices),
            *optimizer_changes(others, name="adamw", foreach=foreach),
        )
    if name in _ADAM and foreach:
        sizes = [tensor.bytes for tensor in updated]
        return (*enumerate(sizes), *((storage, -count) for storage, count in enumerate(sizes)))
    each = {"adafactor": _adafactor, "lion": _lion}.get(name, _adam)
    return _overwritten(map(each, updated))


_Assigned = tuple[str, int]
"""A variable of a loop over tensors, and the bytes of what it is given; 0 lets go of it."""


def _adam(tensor: Updated) -> list[_Assigned]:
    return [("root", tensor.bytes), ("denominator", tensor.bytes), ("root", 0)]


def _lion(tensor: Updated) -> list[_Assigned]:
    return [("clone", tensor.bytes), ("update", tensor.bytes), ("clone", 0), ("update", 0)]


def _adafactor(tensor: Updated) -> list[_Assigned]:
    if tensor.factors is None:
        return [("square", tensor.bytes), ("update", tensor.bytes)]
    rows, columns = tensor.factors
    return [("rows", rows), ("columns", columns), ("update", tensor.bytes)]


def _muon(tensor: Updated, *, copies: bool) -> list[_Assigned]:
    """Newton-Schulz in bf16; its second iteration finds the products of the first.

    ``copies``: the product of a matrix with itself copies the transposed one, as oneDNN's on the CPU does.
    """
    narrow, least = 2 * tensor.elements, min(-(-tensor.elements // tensor.shape[1]), tensor.shape[1])
    gram, cast = 2 * least**2, narrow if tensor.itemsize != 2 else 0
    product = [("copy", narrow * copies), ("gram", gram), ("copy", 0)]
    iteration = [*product, ("gram update", gram), ("orthogonal", narrow)]
    ended = [("gram", 0), ("gram update", 0), ("update", 0)]
    return [("update", tensor.bytes), ("orthogonal", 0), ("orthogonal", cast), *iteration, *iteration, *ended]


def _overwritten(each: Iterable[list[_Assigned]]) -> tuple[Change, ...]:
    """Return the changes of a loop: a variable lets go of what it had when it is given something new, or at the end."""
    changes: list[Change] = []
    held: dict[str, Change] = {}
    for variable, size in chain.from_iterable(each):
        before = held.pop(variable, None)
        if size:
            held[variable] = len(changes), size
            changes.append(held[variable])
        if before is not None:
            changes.append((before[0], -before[1]))
    return (*changes, *((storage, -size) for storage, size in held.values()))


def in_batches(sizes: Sequence[int], most: int) -> list[list[int]]:
    """Return sizes in lists of at most so much together, or of one."""
    batches: list[list[int]] = []
    for size in sizes:
        if batches and sum(batches[-1]) + size <= most:
            batches[-1].append(size)
        else:
            batches.append([size])
    return batches
