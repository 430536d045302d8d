"""An account of storages and work: which storages are alive, how many bytes they hold, what the operations cost."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from autosplit.profile.node_costs.flops import causal_part, flat_tensors, flop_formulas, moved_bytes, sides_of
from autosplit.profile.stage_trace.engine import in_place_on_zeros, summed_in_place
from autosplit.profile.workspaces import Workspace, true_results, workspace
from autosplit.trace.shapes.shape_rules import new_tensor

_ADD = torch.ops.aten.add.Tensor
_FREE = frozenset("empty empty_like empty_strided new_empty new_empty_strided _unsafe_view lift_fresh".split())
"""Operations that are no views and yet do no work: they only make a tensor."""


@dataclass
class Storage:
    """One storage: its id, which it keeps for the whole account, and its bytes."""

    id: int
    bytes: int


@dataclass(frozen=True)
class Operation:
    """One aten call that computes: its name, FLOPs, bytes read and written, and the dtype it computes in.

    ``sides``: see `cost_models.OpWork`. ``computed``: the part of the FLOPs that its kernel does not leave out.
    """

    name: str
    flops: int
    bytes: int
    dtype: torch.dtype
    sides: tuple[int, int, int, int] | None = None
    computed: float = 1.0


class Ledger(TorchDispatchMode):
    """Count storages from the operation that makes them to their release, and list the operations.

    It works the same on real and on fake tensors. Scratch that a kernel allocates inside is not seen, but on fake
    tensors it is known for many: see :mod:`autosplit.profile.workspaces`.
    """

    def __init__(
        self,
        *,
        kernels: Literal["cpu", "cuda"] | None = None,
        listing: bool = True,
        observed: Mapping[str, int] | None = None,
    ) -> None:
        """Count; on fake tensors add what the ``kernels`` of a device would hold beside their results.

        Without ``listing`` no operations are listed. ``observed``: see `workspaces.workspace`.
        """
        super().__init__()
        self.kernels = kernels
        self._listing = listing
        self._observed = observed
        self.guessed: dict[str, int] = {}
        """Most bytes of scratch, by operation, that nobody measured."""
        self.live_bytes = 0
        self.peak_bytes = 0
        self.operations: list[Operation] = []
        self._notify: Callable[[tuple[int, int]], None] | None = None
        self._formulas = flop_formulas()
        self.entered = 0
        """How many storages and how much scratch were entered so far; the next id."""
        self._storages: dict[int, Storage] = {}
        self._watches: dict[int, weakref.ref[Any]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Say that nobody compiles what runs under a ledger: every call would pay for a guard against it."""
        return False

    def open(self) -> None:
        """Start a page: no operations yet, and the peak is what is alive now."""
        self.peak_bytes = self.live_bytes
        self.operations = []

    def notify(self, take: Callable[[tuple[int, int]], None]) -> None:
        """Call ``take`` with the id and the bytes of every storage that comes (above zero) or goes (below)."""
        self._notify = take

    def storage(self, tensor: torch.Tensor) -> Storage | None:
        """Return the tensor's storage, entered now if it was unknown; None for a tensor without one (sparse)."""
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):
            return None
        key = storage._cdata
        known = self._storages.get(key)
        if known is None:
            known = self._storages[key] = Storage(self.entered, storage.nbytes())
            self.entered += 1
            self._watches[key] = weakref.ref(storage, lambda _: self._release(key))
            self.live_bytes += known.bytes
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)
            if self._notify is not None:
                self._notify((known.id, known.bytes))
        return known

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation; on fake tensors also one whose shapes torch knows of no device, or of another."""
        new = None if self.kernels is None else new_tensor(func, args, kwargs)
        return func(*args, **kwargs) if new is None else torch.empty(new.shape, dtype=new.dtype)

    def _scratch(self, name: str, workspace: Workspace | None) -> None:
        """Enter what a kernel held and released before it returned."""
        if workspace is None:
            return
        if workspace.source == "unknown":
            self.guessed[name] = max(workspace.bytes, self.guessed.get(name, 0))
        if workspace.bytes > 0:
            self.peak_bytes = max(self.peak_bytes, self.live_bytes + workspace.bytes)
            if self._notify is not None:
                self._notify((self.entered, workspace.bytes))
                self._notify((self.entered, -workspace.bytes))
            self.entered += 1

    def _release(self, key: int) -> None:
        del self._watches[key]
        storage = self._storages.pop(key)
        self.live_bytes -= storage.bytes
        if self._notify is not None:
            self._notify((storage.id, -storage.bytes))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and enter its work and its results."""
        if func.namespace == "prim":
            return func(*args, **(kwargs or {}))
        if self.kernels is not None and func is _ADD:
            total = summed_in_place(func, args, kwargs or {})
            if total is not None:
                self._enter(func, args, [total])
                return total
        filled = in_place_on_zeros(func) if self.kernels is not None else func
        out = self.run(filled, args, kwargs or {})
        if func.is_view:
            return out
        if self.kernels is not None:
            out = true_results(func, args, kwargs or {}, out, target=self.kernels)
        results = list(flat_tensors(out))
        for tensor in results:
            self.storage(tensor)
        if self.kernels is not None:
            scratch = workspace(func, args, kwargs or {}, out, target=self.kernels, observed=self._observed)
            self._scratch(func._opname, scratch)
        self._enter(func, args, results, kwargs=kwargs, out=out)
        return out

    def _enter(self, func: Any, args: Any, results: list[torch.Tensor], *, kwargs: Any = None, out: Any = None) -> None:
        """List an operation that computes."""
        if not self._listing:
            return
        formula = self._formulas.get(func._overloadpacket)
        flops = int(formula(*args, **(kwargs or {}), out_val=out)) if formula else 0
        moved = results + list(flat_tensors(args))
        if moved and func._opname not in _FREE:
            sides, size = sides_of(func._opname, args), moved_bytes(func, args, results)
            part = causal_part(func, args, kwargs or {}, sides)
            self.operations.append(Operation(func._opname, flops, size, moved[0].dtype, sides, part))
