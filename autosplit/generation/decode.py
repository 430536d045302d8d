"""``pipe.decode``: tokens out of a model of one's own, with a cache in an argument or in its modules."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autosplit.delegation import one_at_a_time
from autosplit.errors import InputError
from autosplit.generation.attributes import Kept, taken
from autosplit.generation.entry import Entry, Stages
from autosplit.generation.groups import rows_of_groups, run_groups
from autosplit.generation.noise import WholeBatch
from autosplit.trace.borrowed.state import eval_mode
from autosplit.trace.inputs.objects import tensors_in


class _Cache:
    """What a model keeps of a group: what it takes and gives as its cache, and how many tokens it has seen."""

    def __init__(self) -> None:
        self.value: Any = None
        self.seen = 0


class Decoder:
    """Extends rows of tokens by calls of a pipe's model, one per token."""

    def __init__(self, pipe: Any) -> None:
        self.pipe = pipe
        self._entry = Entry(pipe, partial(_step, type(pipe._core.model).forward), Stages())
        self._kept = Kept()

    @property
    def device(self) -> torch.device:
        """Where the model begins."""
        return self.pipe._core.recordings.options.devices[0]

    def __copy__(self) -> Decoder:
        copy: Decoder = object.__new__(type(self))
        copy.__dict__.update(self.__dict__, _kept=Kept())
        return copy

    def decode(self, tokens: Tensor, inputs: Mapping[str, Any], groups: int, **options: Any) -> Tensor:
        """Extend rows in groups; where that may give other tokens, all rows at once."""
        whole = self.__copy__()
        with taken(self.pipe._core.model, self._entry.usual) as whole._kept:
            try:
                sizes = rows_of_groups(tokens.shape[0], 1 if self._entry.keeps_state else groups)
                parts = {name: _rows(value, sizes) for name, value in inputs.items()}
                each = zip(tokens.split(sizes), *parts.values(), strict=True)
                split = ({"tokens": rows, "inputs": dict(zip(parts, more, strict=True))} for rows, *more in each)
                if len(sizes) > 1:
                    return torch.cat(run_groups(self, sizes, [options | each for each in split]))
            except Exception as reason:  # such as state of the whole batch; another is raised again
                self.pipe._core.recordings.of_group(str(reason))
            return whole.generate(tokens=tokens, inputs=inputs, **options)

    def generate(
        self,
        tokens: Tensor,
        inputs: Mapping[str, Any],
        steps: int,
        names: tuple[str | None, ...],
        choose: Callable[[Tensor], Tensor],
        end: int | None,
    ) -> Tensor:
        """Extend rows of tokens; behind its ``end`` a row has that token only."""
        state, new, length = _Cache(), tokens, tokens.shape[1]
        ended = torch.zeros(tokens.shape[0], dtype=torch.bool, device=tokens.device)
        for _ in range(steps):
            output = self._entry(self._kept, tokens=new, state=state, names=names, **inputs)
            logits = output["logits"]
            if logits.dim() not in (2, 3):
                raise InputError(f"logits are [rows, (length,) vocabulary]; the model returns {list(logits.shape)}")
            new = choose(logits[:, -1] if logits.dim() == 3 else logits).to(tokens).reshape(-1, 1)
            if end is not None:
                new = new.masked_fill(ended[:, None], end)
                ended |= new[:, 0] == end
            tokens = torch.cat([tokens, new], 1)
            if ended.all():
                break
        return F.pad(tokens, (0, length + steps - tokens.shape[1]), value=end or 0)


def _step(
    forward: Callable[..., Any],
    model: nn.Module,
    *,
    tokens: Tensor,
    state: _Cache,
    names: tuple[str | None, ...],
    **inputs: Any,
) -> dict[str, Any]:
    """Call a model with its cache; ``names`` are the inputs that take the cache and the number of tokens before."""
    values = zip(names, (state.value, state.seen), strict=True)
    output = forward(model, tokens, **inputs, **{name: value for name, value in values if name is not None})
    state.seen = state.seen + tokens.shape[1]
    if isinstance(output, Mapping):
        logits, state.value = output["logits"], output.get(names[0], state.value)
    else:
        logits, *more = output if isinstance(output, (tuple, list)) else (output,)
        state.value = more[0] if names[0] is not None and more else state.value
    return {"logits": logits}


class Decoding:
    """The part of a pipe that makes tokens with a model of one's own."""

    _core: Any

    @one_at_a_time
    def decode(
        self,
        tokens: Tensor,
        steps: int,
        *,
        cache: str | None = None,
        position: str | None = None,
        choose: Callable[[Tensor], Tensor] | None = None,
        end: int | None = None,
        groups: int | None = None,
        **inputs: Any,
    ) -> Tensor:
        """Extend rows of tokens by a model of one's own, ``steps`` tokens each, in eval mode and without gradients.

        The model is called with the tokens, then with one new token per row and call. Rows run in groups, by default
        as many as lanes, whose calls keep all stages busy; their caches stay on the stages.

        Args:
            tokens: integers, [rows, length], of one length.
            steps: how many tokens each row gets.
            cache: the name of the input that takes the cache: None first, then what came back as the second output, or
                under that name; it may be changed in place. None: the model keeps its cache in its modules.
            position: the name of the input that takes how many tokens came before, an int; None: there is none.
            choose: makes tokens [rows] of logits [rows, vocabulary]; row by row. None: the most likely one.
            end: the token behind which a row has only that; None: there is none.
            groups: how many groups of rows decode in turn.
            **inputs: further inputs; tensors with as many rows as ``tokens`` are cut with them.

        Returns:
            All tokens, [rows, length + steps].

        Raises:
            InputError: the tokens are no such table.
        """
        if tokens.dim() != 2 or tokens.is_floating_point() or not tokens.numel() or steps < 0:
            shape = list(tokens.shape)
            raise InputError(f"decode() extends a table of tokens, [rows, length]; got {shape}, steps={steps}")
        core = self._core
        if core.model._forward_hooks or core.model._forward_pre_hooks:
            raise InputError("decode() calls the model's forward itself: remove the model's own forward hooks")
        if core.decoder is None:
            core.decoder = Decoder(self)
        options = {"steps": steps, "names": (cache, position), "choose": choose or (lambda logits: logits.argmax(-1))}
        with eval_mode(core.model, cast(nn.Module, self)), torch.no_grad():
            extended: Tensor = core.decoder.decode(tokens, inputs, groups or lanes_of(self), **options, end=end)
        return extended


def lanes_of(pipe: Any) -> int:
    """Return how many lanes a pipe has, or will have."""
    recordings = pipe._core.recordings
    return len(recordings.options.devices if recordings.plan is None else recordings.plan.devices)


def _rows(value: Any, sizes: Sequence[int]) -> Sequence[Any]:
    """Return an input for each group: its rows where it has those of all."""
    if not isinstance(value, Tensor) and tensors_in(value) and len(sizes) > 1:
        raise WholeBatch("an input holds tensors, which may be of all rows")
    rows = isinstance(value, Tensor) and value.dim() > 0 and value.shape[0] == sum(sizes)
    return value.split(sizes) if rows else [value] * len(sizes)
