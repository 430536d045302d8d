"""What batch norms take their statistics over: watched in one run, repeated in another.

    pipe     bn1: 3 rows, 3 rows, 2 rows     a training BatchNorm normalises each microbatch by itself
    model    bn1: 8 rows ─► 3, 3, 2          its own forward on the whole batch, only its norms in the same pieces

Nothing else of the model's forward changes then, so that the two runs have equal numbers. Running statistics take the
whole batch in at once, as ever.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

_SIGNATURE = inspect.signature(F.batch_norm)
Pieces = Mapping[str, Sequence[Sequence[int]]]
"""By norm, for each of its calls in a forward, the sizes of the first dimension of what it normalised at once."""


class NormWatch(TorchFunctionMode):
    """Lists the calls of batch norms that take statistics over the batch; with ``pieces`` it cuts them up.

    Enter it when the model holds the tensors that it will run with: norms are told apart by those.

    Attributes:
        cut: names of the norms whose calls were cut up, by their first tensor.
    """

    def __init__(
        self, model: nn.Module, pieces: Pieces | None = None, *, apart: Callable[..., Any] | None = None
    ) -> None:
        """Watch a model; ``apart`` is what a pipe calls to normalise one microbatch (``norm_and_collect_stats``)."""
        super().__init__()
        self.cut: set[str] = set()
        self._calls: dict[str, dict[str, dict[int, int]]] = defaultdict(dict)
        self._pieces = pieces or {}
        self._apart = apart
        tensors = (*model.named_buffers(), *model.named_parameters())
        self._names = {tensor.data_ptr(): name for name, tensor in tensors if tensor.numel()}

    @property
    def calls(self) -> dict[str, list[tuple[int, ...]]]:
        """The sizes by norm and call, in the order of the first calls and of the microbatches."""
        return {
            name: [tuple(sizes[number] for number in sorted(sizes)) for sizes in uses.values()]
            for name, uses in self._calls.items()
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is self._apart:
            return self._by_microbatch(func, *args)
        if func is not F.batch_norm:
            return func(*args, **kwargs)
        bound = _SIGNATURE.bind(*args, **kwargs)
        bound.apply_defaults()
        named: dict[str, Any] = dict(bound.arguments)
        if not named["training"]:
            return func(**named)
        name = self._name(named["running_mean"], named["weight"])
        number, size = len(self._calls[name]), named["input"].shape[0]
        self._calls[name][str(number)] = {0: size}
        pieces = self._pieces.get(name, ())[number : number + 1]
        if not pieces or len(pieces[0]) < 2 or sum(pieces[0]) != size:
            return func(**named)
        self.cut.add(name)
        if named["running_mean"] is not None:
            with torch.no_grad():
                func(**named)  # for what it leaves in the running statistics
        alone = named | {"running_mean": None, "running_var": None}
        return torch.cat([func(**alone | {"input": part}) for part in named["input"].split(list(pieces[0]))])

    def _name(self, mean: torch.Tensor | None, weight: torch.Tensor | None) -> str:
        holder = weight if mean is None else mean
        return "a norm without state" if holder is None else self._names.get(holder.data_ptr(), "an unknown norm")

    def _by_microbatch(self, func: Any, note: Any, function: Any, value: torch.Tensor, *rest: Any) -> Any:
        """Write down a microbatch of a pipe; one that comes again, for a backward, is the same one."""
        if function is F.batch_norm:
            mean, _, weight, *_ = rest
            self._calls[self._name(mean, weight)].setdefault(note.name, {})[note.microbatch] = value.shape[0]
        return func(note, function, value, *rest)
