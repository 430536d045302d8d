"""A model's own ``save_pretrained`` where every rank has a part: rank 0 writes, the others send what it reads."""

from __future__ import annotations

from collections import UserDict
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from autosplit.distributed.together import Ranks
from autosplit.errors import InputError, listed
from autosplit.tensor.part import PARTS


class _Rank(int):
    """The rank that has a value."""


class StateOfRanks(UserDict[str, Any]):
    """The state of the whole model on rank 0: what another rank has is sent when it is read first, and kept.

    ``data`` has a rank in the place of a value that was not sent yet.
    """

    def __init__(self, ranks: Ranks, pipe: Any) -> None:
        super().__init__()
        self._ranks, self._part = ranks, dict[str, Any]()
        every = ranks.run(lambda: self._names(pipe))
        self.data = {name: _Rank(rank) for rank, names in reversed([*enumerate(every)]) for name in names} | self._part

    def _names(self, pipe: Any) -> list[str]:
        state = pipe.state_dict(keep_vars=True)
        if cut := [n for n, v in state.items() if isinstance(v, DTensor) or v in PARTS]:
            raise InputError(
                f"ranks have parts of {listed(cut)}, and save_pretrained takes tensors that are whole: save by "
                "autosplit.distributed.checkpoint.save_weights, or call it of the model that pipe.unsplit() gives"
            )
        self._part = state
        return list(state)

    def __getitem__(self, name: str) -> Any:
        if isinstance(owner := self.data[name], _Rank):
            self._exchange((name, owner))
            value, names = self._exchange()[owner]
            self.data.update(dict.fromkeys(names, value))
        value = self.data[name]
        return value.detach() if isinstance(value, torch.Tensor) else value

    def send(self) -> None:
        """Send rank 0 what it asks for, until it has written."""
        while (asked := self._exchange()[0]) is not None:
            name, owner = asked
            self._exchange(self._answer(name) if owner == self._ranks.rank else None)

    def _answer(self, name: str) -> tuple[Any, list[str]]:
        value = self._part[name]
        names = [other for other, each in self._part.items() if each is value]
        return value.detach().cpu() if isinstance(value, torch.Tensor) else value, names

    def _exchange(self, value: Any = None) -> list[Any]:
        return self._ranks.run(lambda: value)


def save_pretrained(model: Any, *args: Any, **options: Any) -> None:
    """Save as the model's method of this name does, once, on rank 0; every rank calls it.

    ``model``: the twin of the model, see :mod:`autosplit.delegation`. Raises InputError where ranks have parts of
    tensors; what rank 0 raises is raised on every rank.
    """
    pipe, method = model._autosplit_pipe(), super(type(model), model).save_pretrained
    with Ranks("saves the model by save_pretrained") as ranks:
        state = StateOfRanks(ranks, pipe)
        if ranks.rank:
            state.send()
        else:
            with pipe._recordings.guard.opened():
                ranks.run(lambda: method(*args, **options | {"state_dict": state}))
