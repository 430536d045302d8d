"""How the ranks agree on a loss, which those of the last stages compute."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
import torch.utils._pytree as pytree
from torch.amp import GradScaler
from torch.overrides import TorchFunctionMode

from autosplit.distributed.ranks.call import WholeCall
from autosplit.distributed.ranks.loss_text import LossText
from autosplit.distributed.step import RankStep
from autosplit.distributed.world import attempt
from autosplit.errors import InputError, as_known
from autosplit.runtime.loss.proof import Proofs
from autosplit.runtime.step import engine
from autosplit.trace.borrowed.state import borrowed, contents
from autosplit.trace.inputs.objects import tensors_in

_LOSS = "the loss (give every rank the same loss_fn, which holds the same numbers; what has rows belongs into target=)"


@dataclass(frozen=True)
class Elsewhere:
    """Stands for a loss that another rank computes; ``wants`` are the outputs that it uses."""

    wants: frozenset[str] | None
    takes_values = True


class Word(NamedTuple):
    """What the last stage's rank says of a loss.

    Attributes:
        in_cells: whether it adds up by microbatches.
        wants: the outputs that it uses; None: all.
        kind: how it adds up, for a loss that was proved to; None: not known, or nothing to prove.
        divisors: what torch's losses in it divide by, on the replica's rows.
        named: the loss by name, and of one that the model returns the lengths that its means are over.
    """

    in_cells: bool
    wants: frozenset[str] | None
    kind: str | None = None
    divisors: Sequence[float] = ()
    named: str = ""


class _OthersNeeded(Exception):
    """How a loss adds up is asked on outputs that all ranks have to make."""


def _ask_others() -> Any:
    raise _OthersNeeded


@dataclass
class RankLoss:
    """The loss of one step; ``found`` is what each microbatch adds, on the last stage's rank, once ranks agree."""

    target: Any
    loss_fn: Any
    reduction: str
    proofs: Proofs
    found: engine.Found | None = None

    @cached_property
    def kind(self) -> tuple[Any, ...]:
        """What tells it from others on this rank, except for numbers and values of tensors."""
        shapes = tuple((tensor.shape, tensor.dtype) for tensor in tensors_in(self.target))
        return shapes, self.reduction, self.proofs.identity(self.loss_fn)

    def facts(self, step: RankStep) -> tuple[dict[str, str], dict[str, str]]:
        """Return the facts about the loss that must be equal on all ranks, and those equal within a replica."""
        rows = step.rows if len(step.sizes) == 1 or step.world.replicas == 1 else -1
        text = LossText(self.loss_fn, rows, step.lowered.traced.root)
        tensors = {f"a tensor that the loss holds, {name}": line for name, line in text.tensors.items()}
        of_rows = {"the tensors with rows of the batch that the loss holds": "\n".join(text.of_rows)}
        return {_LOSS: "\n".join(map(" = ".join, text.lines))} | tensors, of_rows

    def find(self, step: RankStep, whole: Callable[[], Any] = _ask_others) -> Word | None:
        """Return how the loss adds up; None where that takes the whole batch's outputs, and where nothing is known."""
        if step.world.rank != step.last or not step.rows:
            return None
        try:
            self.found = self._find(step, whole)
        except _OthersNeeded:
            return None
        loss = self.found and self.found[0]
        if loss is None:
            return Word(False, None, engine.kind_of(self.proofs, self.loss_fn))
        kind, named = getattr(loss, "kind", None), ""
        divisors: Sequence[float] = ()
        if step.world.replicas > 1:
            divisors, named = loss.divisors, "the model's own" if self.loss_fn is None else "loss_fn"
            if getattr(loss, "averages", False):
                named += f", a mean over elements of inputs {_sizes_of_rows(step)}"
            if self.reduction == "auto" and kind in ("mean", "sum"):
                raise InputError(
                    f"a loss of your own was found to be a {kind} over the rows of one replica, which says nothing of "
                    "the rows of all; say loss_reduction='mean' or 'sum', or give one of torch's losses"
                )
        return Word(True, loss.wants, kind, divisors, f"{named} {self.reduction}")

    def _find(self, step: RankStep, whole: Callable[[], Any]) -> engine.Found | None:
        arguments = {"target": self.target, "loss_fn": self.loss_fn, "reduction": self.reduction, "proofs": self.proofs}
        return engine.find_loss(step, **arguments, whole=whole)

    def agree(self, step: RankStep, words: list[Word | None] | None) -> Word | None:
        """Return what all ranks have to know of the loss; None on a replica without rows.

        ``words`` are what the ranks have said; None: nothing yet.
        """
        world = step.world
        words = self._found_together(step, list(words or self._said(step, partial(self.find, step))))
        last = [words[members[step.last]] for members in world.layout]
        if world.rank in step.ranks[-1][1:] and (word := last[0]) is not None and word.in_cells:
            if self.reduction == "auto" and word.kind is not None:
                engine.keep_kind(self.proofs, self.loss_fn, word.kind)
            self.found = self._find(step, _ask_others)
        if world.replicas > 1:
            divisors = _added_divisors([word for word in last if word is not None])
            if self.found is not None:
                self.found = self.found[0].among(sum(step.shares), divisors), self.found[1]
        return last[world.replica]

    def _said(self, step: RankStep, find: Callable[[], Word | None]) -> list[Word | None]:
        """Return what the ranks find; an error of one is raised on every rank."""
        word, error = attempt(find)
        makes = step.world.rank in step.ranks[-1] and step.rows
        facts = self.facts(step)[0] if makes else {}
        return step.world.agree("asks how the loss adds up", facts, error, word)

    def _found_together(self, step: RankStep, words: list[Word | None]) -> list[Word | None]:
        """Return how a loss adds up where another replica knows that, or it is asked on the outputs of all rows."""
        world = step.world
        while True:
            last = {r: words[members[step.last]] for r, members in enumerate(world.layout) if step.has_rows(r)}
            known = next((word.kind for word in last.values() if word is not None and word.kind), None)
            unsure = any(word is None or not (word.in_cells or word.kind) for word in last.values())
            if unsure and known is not None:
                engine.keep_kind(self.proofs, self.loss_fn, known)
                words = self._said(step, partial(self.find, step))
            elif None in last.values():
                asks = step.rows > 0 and last[world.replica] is None
                with step.all_gathered():
                    say = partial(self.find, step, _whole(step)) if asks else partial(words.pop, world.number)
                    words = self._said(step, say)
            else:
                return words


def _whole(step: RankStep) -> Callable[[], Any]:
    """Make the outputs of a replica's rows, with its other ranks; return what gives them on the last stage's rank."""
    traced, changed = step.lowered.traced, step.tensors if step.lowered.changes_inputs else ()
    with borrowed(traced.root), contents(changed), torch.no_grad():
        flat = WholeCall(replace(step, state=step.state.fresh(), alone=True)).forward()
    return lambda: None if flat is None else traced.unflatten(flat)


def _added_divisors(words: Sequence[Word]) -> list[float]:
    """Return the divisors of a loss on the rows of all replicas; raise InputError if the losses do not add up."""
    if not all(word.in_cells for word in words):
        raise as_known(
            InputError(
                "the loss, or an operation of the model that it uses, needs the whole batch at once, and replicas have "
                "parts of it; use a mean or a sum over rows, or train without dp"
            )
        )
    kinds = {(word.kind, word.wants, len(word.divisors)) for word in words}
    if len(kinds) > 1:
        raise as_known(
            InputError(
                f"the replicas find that the loss adds up in different ways, by their rows: {sorted(map(str, kinds))}; "
                "say it by loss_reduction='mean' or 'sum'"
            )
        )
    if len(names := {word.named for word in words}) > 1:
        raise as_known(InputError(f"the replicas have different losses: {'; '.join(sorted(names))}"))
    return [sum(divisors) for divisors in zip(*(word.divisors for word in words), strict=True)]


def _sizes_of_rows(step: RankStep) -> list[list[int]]:
    pairs = zip(step.tensors, step.lowered.traced.inputs, strict=True)
    return [[size for dim, size in enumerate(tensor.shape) if dim != info.batch_dim] for tensor, info in pairs]


def _callers() -> Iterator[Any]:
    """Yield the objects whose methods have called, the last first, through what other modes of torch call."""
    frame: Any = sys._getframe(2)
    while frame is not None and frame.f_code.co_name != "_train_step":
        yield frame.f_locals.get("self")
        frame = frame.f_back


class ReadsHere(TorchFunctionMode):
    """Raises InputError where a loss reads a parameter that another rank trains, of which nothing or a part is here.

    And tells when a ``GradScaler`` scales it, whose ``scale`` multiplies in a frame of its own.
    """

    def __init__(self, elsewhere: Mapping[int, str], scales: Callable[[], None] = lambda: None) -> None:
        """``elsewhere`` are the names of such parameters, by their identity."""
        super().__init__()
        self.elsewhere, self.scales = elsewhere, scales

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.mul and any(isinstance(caller, GradScaler) for caller in _callers()):
            self.scales()
        value = func(*args, **(kwargs or {}))
        read = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if id(leaf) in self.elsewhere]
        if read and isinstance(value, torch.Tensor | float | list):  # not sizes and flags
            raise InputError(
                f"the loss reads the parameter {self.elsewhere[id(read[0])]!r}, which another rank holds, or a "
                "part of it, or which fsdp_reshard='always' gathers for its layer only; make it part of the model, and "
                "a penalty on weights part of the optimizer (weight_decay)"
            )
        return value
