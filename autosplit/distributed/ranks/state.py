"""A rank's part of the model's state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from autosplit.distributed.ranks.guard import check_average, part_of
from autosplit.distributed.ranks.recordings import RankRecordings
from autosplit.distributed.ranks.shards import like
from autosplit.distributed.world import World
from autosplit.errors import InputError
from autosplit.runtime.lower.split import named_state
from autosplit.tensor.part import PARTS
from autosplit.tensor.state import as_part, here


class RankState(nn.Module):
    """The part of a rank's pipe that answers for its parameters, buffers and state."""

    _core: Any
    _world: World

    @property
    def _recordings(self) -> RankRecordings:
        recordings = self._core.recordings
        assert isinstance(recordings, RankRecordings)
        return recordings

    @staticmethod
    def _generator(pipe: Any) -> Any:
        """Return what generates text with a pipe."""
        from autosplit.distributed.ranks.generation import RankGenerator

        return RankGenerator(pipe)

    def _of_function(self, function: nn.Module) -> Any:
        """Return the pipe of a function of the model, given as a module of the same attributes."""
        from autosplit.distributed.ranks.generation import TwinPipe

        return TwinPipe(self, function)

    def decode(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse: an own model's tokens come out of one process."""
        raise InputError("decode() runs in one process: call it of a pipe of several devices, or generate() on ranks")

    def _own_state(self) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, tensor) for name, tensor in named_state(self._core.model) if self._recordings.is_own(name))

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Return the parameters of this rank, in the model's order."""
        check_average(self._core.model)
        return super().parameters(recurse)

    def named_parameters(self, prefix: str = "", *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters of this rank, by their names in the model."""
        named = self._core.model.named_parameters(prefix, *args, **kwargs)
        is_own, start = self._recordings.is_own, prefix and f"{prefix}."
        yield from ((n, p) for n, p in named if is_own(n.removeprefix(start)))

    def named_buffers(self, prefix: str = "", *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the buffers of this rank, by their names in the model."""
        named = self._core.model.named_buffers(prefix, *args, **kwargs)
        yield from ((n, b) for n, b in named if self._recordings.is_own(n.removeprefix(prefix and f"{prefix}.")))

    def state_dict(  # type: ignore[override]
        self, destination: Any = None, prefix: str = "", keep_vars: bool = False
    ) -> dict[str, Any]:
        """Return this rank's part of the model's state, under the model's own names."""
        check_average(self._core.model)
        before = set(destination or ())
        with self._recordings.guard.opened():
            state = self._core.model.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        for name in [n for n in state if n not in before and not self._recordings.is_own(n.removeprefix(prefix))]:
            del state[name]
        parts = {} if keep_vars else {prefix + name: PARTS.get(t) for name, t in named_state(self._core.model)}
        state.update((name, as_part(value, parts.get(name))) for name, value in state.items() if name not in before)
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load this rank's part of a state, which may be the whole model's."""
        model = self._core.model
        with self._recordings.guard.opened():
            state = model.state_dict()
        parts = {name: PARTS.get(tensor) for name, tensor in named_state(model)}
        values = {name: here(value, parts.get(name)) for name, value in state_dict.items()}
        held = {name: like(value, state.get(name)) for name, value in values.items() if self._recordings.is_own(name)}
        missing = [name for name in self.state_dict() if name not in held]
        unexpected = [name for name in held if name not in state]
        if strict and (missing or unexpected):
            raise RuntimeError(f"missing keys of rank {self._world.number}: {missing}; unexpected keys: {unexpected}")
        self._recordings.refuse_whole()
        loaded = model.load_state_dict(held, strict=False, assign=assign)
        PARTS.update((tensor, parts[name]) for name, tensor in named_state(model) if parts[name] is not None)
        return loaded

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return this rank's part of the model, with values of its own, as a module that cannot be called."""
        self._core.stream.drain()
        with self._recordings.guard.opened():
            return part_of(self._core.model, self._recordings.is_own, memo)
