"""Is a pipe its model? Outputs, gradients, buffers and the loss of a training step, compared on one sample.

    for train, eval    model, whole batch on its own tensors' stand-ins ─┐
                       pipe, microbatches on its lanes                  ─┴► differences, item by item

Where equality cannot hold, the reference is changed no more than is needed, and the result says so: draws that are not
the plain model's are replaced by constants on both sides (:mod:`autosplit.trace.compared_runs`), and norms that take
their statistics per microbatch do so in the model too (:mod:`autosplit.trace.compared_runs`). All the rest is the plain
model's.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from textwrap import fill
from typing import TYPE_CHECKING, Any

import torch
import torch.utils._pytree as pytree
from tabulate import tabulate
from torch import nn

from autosplit.compare import ROUNDING, Item, Parts, compare, tolerance
from autosplit.errors import InputError, listed
from autosplit.options import Sample
from autosplit.runtime.loss.parts import call_loss
from autosplit.runtime.norms import Use
from autosplit.runtime.tree import Together
from autosplit.trace.borrowed import state
from autosplit.trace.borrowed.state import RECORDING, free_leaves, gradients_aside, stand_ins
from autosplit.trace.compared_runs import CutNorms, FixedDraws, Left, Pieces, run_once, updates_noted
from autosplit.trace.inputs.objects import leaves_of

if TYPE_CHECKING:
    from autosplit.pipelined import PipelinedModule

_NAMED = 6
_KINDS = ("output", "input", "gradient", "buffer", "loss", "draws")


@dataclass(frozen=True)
class Verification:
    """What `verify` found; true when everything that can be equal is.

    Attributes:
        items: all comparisons.
        notes: where the plain model's numbers cannot be had by microbatches, and what was compared instead.
    """

    items: tuple[Item, ...]
    notes: tuple[str, ...] = ()

    @property
    def equal(self) -> bool:
        """Whether all items are equal."""
        return all(item.equal for item in self.items)

    def __bool__(self) -> bool:
        return self.equal

    def to_json(self) -> str:
        """Return everything as JSON; an infinite difference is null there, its detail says what it is."""
        items = [asdict(item) | {"equal": item.equal} for item in self.items]
        finite = [item | {"difference": d if math.isfinite(d := item["difference"]) else None} for item in items]
        return json.dumps({"equal": self.equal, "notes": self.notes, "items": finite}, indent=2)

    def __str__(self) -> str:
        rows = []
        for run in dict.fromkeys(item.run for item in self.items):
            for kind in _KINDS:
                group = [item for item in self.items if (item.run, item.kind) == (run, kind)]
                if group:
                    worst = max(group, key=lambda item: (not item.equal, item.difference))
                    off = sum(not item.equal for item in group)
                    verdict = "equal" if not off else f"{off} differ{'s' if off == 1 else ''}"
                    rows.append((run, kind, len(group), _number(worst), f"{worst.tolerance:.0e}", worst.name, verdict))
        header = ("run", "compared", "number", "largest difference", "allowed", "largest at", "")
        table = tabulate(rows, headers=header, disable_numparse=True)
        head = "The pipe is the model." if self.equal else "The pipe is NOT the model."
        wrong = [f"{i.run}: {i.kind} {i.name}: {i.detail or _number(i)}" for i in self.items if not i.equal]
        said = [fill(text, 100, initial_indent="- ", subsequent_indent="  ") for text in (*wrong, *self.notes)]
        return "\n".join([head, "", table, *([""] if said else []), *said])


def _number(item: Item) -> str:
    return "0" if not item.difference else item.detail or f"{item.difference:.1e}"


def verify(model: nn.Module, pipe: Any, sample: Any, *, target: Any = None, loss_fn: Any = None) -> Verification:
    """Compare a pipe with the plain model on a sample: outputs, gradients, buffers, in train and in eval mode.

    Gradients are those of a sum in which every element of every output has a weight of its own. The model runs where
    its parameters are; where these lie on several devices, values are brought to the parameters that use them.

    Args:
        model: the plain model: the pipe's own, or a copy with the same parameters.
        pipe: what `autosplit` returned for it.
        sample: a tensor, a tuple of positional inputs, a dict of keyword inputs, or a `Sample`.
        target: for `train_step`: what ``loss_fn(output, target)`` takes; without it ``loss_fn(output)`` is called.
        loss_fn: when given, `train_step`'s loss and gradients are compared too.

    Returns:
        The comparisons. Modes, gradients, buffers, random states and attributes are as before.

    Raises:
        InputError: the pipe is another model's, or an argument cannot be used. The model's own exceptions pass through.
    """
    pipe_model = _own_model(model, pipe)
    if target is not None and loss_fn is None:
        raise InputError("target= is given without loss_fn=; give loss_fn=, or leave both out")
    comparison = _Comparison(model, pipe_model, pipe, Sample.of(sample))
    parameters = [*model.parameters(), *pipe_model.parameters()]
    with (
        pipe._core.stream.lock,
        RECORDING,  # the model has stand-ins inside
        torch.inference_mode(False),
        torch.enable_grad(),
        state.random_state(),
        gradients_aside(parameters),
    ):
        for run, training in (("train", True), ("eval", False)):
            with _modes((model, pipe_model, pipe), training):
                comparison.compare(run)
        if loss_fn is not None:
            with _modes((model, pipe_model, pipe), True):
                comparison.compare("train_step", _StepLoss(loss_fn, target))
    return comparison.result()


def _own_model(model: nn.Module, pipe: Any) -> nn.Module:
    """Return the pipe's own model; raise InputError when it is not the same as the one that was given."""
    if not isinstance(model, nn.Module) or hasattr(model, "unsplit"):
        raise InputError(f"model is a {type(model).__name__}; give the plain torch.nn.Module that was split")
    if not (hasattr(pipe, "unsplit") and hasattr(pipe, "train_step")):
        raise InputError(f"pipe is a {type(pipe).__name__}; give what autosplit(model, ...) returned")
    pipe_model: nn.Module = pipe.unsplit()
    if pipe_model is model:
        return pipe_model
    tensors = [dict((*m.named_parameters(), *m.named_buffers())) for m in (model, pipe_model)]
    pairs = {name: tuple(held.get(name) for held in tensors) for name in (*tensors[0], *tensors[1])}
    for name, (mine, other) in pairs.items():
        if mine is None or other is None or mine.shape != other.shape:
            raise InputError(
                f"the pipe is another model's: {name} is {_shape(mine)} here, {_shape(other)} in the pipe's "
                f"{type(pipe_model).__name__}; give the model that was split, pipe.unsplit()"
            )
    for name, (mine, other) in pairs.items():
        assert mine is not None
        assert other is not None
        if not torch.equal(mine.detach().cpu(), other.detach().cpu()):
            raise InputError(
                f"{name} has other values in the pipe; load one state_dict into both, or give pipe.unsplit()"
            )
    return pipe_model


def _shape(tensor: torch.Tensor | None) -> str:
    return "missing" if tensor is None else str(list(tensor.shape))


@contextlib.contextmanager
def _modes(modules: Sequence[Any], training: bool) -> Iterator[None]:
    """Bring models into train or eval mode; one that is in it, in whole or in part, stays as it is."""
    flags = [(m, m.training) for module in modules for m in module.modules()]
    for module in modules:
        if module.training != training:
            for child in module.modules():
                child.training = training
    try:
        yield
    finally:
        for child, flag in flags:
            child.training = flag


class _Comparison:
    def __init__(self, model: nn.Module, pipe_model: nn.Module, pipe: PipelinedModule, sample: Sample) -> None:
        self.model = model
        self.pipe_model = pipe_model
        self.pipe = pipe
        self.sample = sample
        self.items: list[Item] = []
        self.notes: dict[str, list[str]] = {}
        """The runs that each note is about."""
        self.pieces: Pieces = {}
        """What norms normalised at once in the last run of the pipe."""

    def result(self) -> Verification:
        """Return all comparisons and notes."""
        notes = tuple(f"{', '.join(runs)}: {text}" for text, runs in self.notes.items())
        return Verification(tuple(self.items), notes)

    def compare(self, run: str, loss: _StepLoss | None = None) -> None:
        """Compare one run of the pipe with the model in the present modes."""
        self.pipe.prepare(self.sample)
        plain = self._run_plain(loss)
        fixed = FixedDraws() if plain.drew and not self.pipe.draws_as_model else None
        if fixed is not None:
            plain = self._run_plain(loss, fixed)
        actual = self._run_pipe(loss, fixed)
        if any(len(counts) > 1 for updates in self.pieces.values() for counts in updates):
            norms = CutNorms(self.model, self.pieces)
            plain = self._run_plain(loss, fixed, norms)
            self._note_norms(run, norms.cut)
        self.items += compare(run, actual.tensors, plain.tensors, self._tolerance)
        if plain.drew and fixed is None:
            apart = actual.drawn != plain.drawn
            detail = "torch's generator is not where the plain model leaves it" if apart else ""
            self.items.append(Item(run, "draws", "generator", math.inf if apart else 0.0, 0.0, detail))
        if fixed is not None:
            self._note_draws(run, fixed)
        if fixed is not None and loss is None:
            self._compare_draws(run)

    # -- runs ----------------------------------------------------------------------------------------------------
    def _run_plain(
        self, loss: _StepLoss | None, fixed: FixedDraws | None = None, norms: CutNorms | None = None, seed: int = 0
    ) -> Left:
        none = contextlib.nullcontext()
        with stand_ins(self.model) as (leaves, _), norms or none, fixed or none:
            call: Callable[..., Any] = self.model if loss is None else loss.plain(self.model)
            places = dict.fromkeys(tensor.device for tensor in (*self.model.parameters(), *self.model.buffers()))
            if len(places) > 1:
                call = partial(Together(self.model, {torch.device("cpu"): None, **places}).call, call)
            return run_once(call, self.model, self.sample, leaves, None if loss is None else loss.leaves, seed)

    def _run_pipe(self, loss: _StepLoss | None, fixed: FixedDraws | None = None, seed: int = 0) -> Left:
        free = free_leaves(self.pipe_model)
        call = self.pipe if loss is None else loss.of(self.pipe)
        with (
            stand_ins(self.pipe_model, registered=True) as (leaves, _),
            gradients_aside(free.values()),
            updates_noted(self.pipe_model, Use) as self.pieces,
            fixed or contextlib.nullcontext(),
        ):
            of_loss = None if loss is None else loss.leaves
            return run_once(call, self.pipe_model, self.sample, leaves | free, of_loss, seed)

    # -- what equality cannot hold for -----------------------------------------------------------------------------
    def _note(self, run: str, text: str) -> None:
        self.notes.setdefault(text, []).append(run)

    def _note_norms(self, run: str, cut: Mapping[str, Sequence[int]]) -> None:
        """Say which norms normalised each microbatch by itself."""
        if not cut:
            return
        named = sorted(name.removesuffix(".running_mean") for name in cut)
        norms, sizes = listed(named, most=_NAMED), ", ".join(map(str, cut[min(cut)]))
        self._note(
            run,
            f"{norms} take{'s' if len(named) == 1 else ''} statistics over each microbatch by itself ({sizes} "
            "rows), which no microbatches can do as the whole batch does; compared with the model whose norms do the "
            "same. Running statistics move once, by all rows: the first norm's are the plain model's, later ones see "
            "what was normalised by microbatch (batch_norm='full' has the plain model's numbers throughout)",
        )

    def _note_draws(self, run: str, fixed: FixedDraws) -> None:
        self._note(
            run,
            "random numbers are drawn per microbatch and cannot be the plain model's; compared with all draws replaced "
            "by constants on both sides",
        )
        if fixed.unknown:
            self._note(run, f"{listed(sorted(fixed.unknown), most=_NAMED)} could not be replaced by constants")

    def _compare_draws(self, run: str) -> None:
        """Compare what seeds do: the same draws for the same one, other draws for another one where the model does."""
        first, again, other = (self._run_pipe(None, seed=seed).tensors for seed in (1, 1, 2))
        worst = max(compare(run, again, first, self._tolerance), key=lambda item: (not item.equal, item.difference))
        detail = "" if worst.equal else f"{worst.kind} {worst.name} differs from call to call under one seed"
        self.items.append(Item(run, "draws", "same seed", worst.difference, worst.tolerance, detail))
        plain = [self._run_plain(None, seed=seed).tensors for seed in (1, 2)]
        varied = [_varies(plain[0], plain[1]), _varies(first, other)]
        lost = varied[0] and not varied[1]
        detail = "another seed changes nothing: draws are frozen, or missing" if lost else ""
        self.items.append(Item(run, "draws", "another seed", math.inf if lost else 0.0, 0.0, detail))

    def _tolerance(self, dtype: torch.dtype) -> float:
        """Return what rounding explains: that of the least precise dtype that had a part in it."""
        return tolerance(ROUNDING, dtype, *(parameter.dtype for parameter in self.model.parameters()))


class _StepLoss:
    """A loss and its target, for the model and for the pipe."""

    def __init__(self, function: Callable[..., Any], target: Any) -> None:
        self.function = function
        self.target = target
        named = function.named_parameters() if isinstance(function, nn.Module) else ()
        self.leaves = {f"loss_fn.{name}": parameter for name, parameter in named if parameter.requires_grad}

    def plain(self, model: nn.Module) -> Callable[..., torch.Tensor]:
        """Return the model's training step."""

        def step(*args: Any, **kwargs: Any) -> torch.Tensor:
            output = model(*args, **kwargs)
            device = next((v.device for v in leaves_of(output) if isinstance(v, torch.Tensor)), None)
            target = pytree.tree_map_only(torch.Tensor, lambda leaf: leaf.to(device), self._copied())
            value = call_loss(self.function, output, target)
            value.backward()
            return value.detach()

        return step

    def of(self, pipe: PipelinedModule) -> Callable[..., torch.Tensor]:
        """Return the pipe's training step."""
        return lambda *args, **kwargs: pipe.train_step(*args, target=self._copied(), loss_fn=self.function, **kwargs)

    def _copied(self) -> Any:
        """Return the target for one run, which may change it; what wants a gradient is the caller's own."""
        return pytree.tree_map_only(torch.Tensor, lambda t: t if t.requires_grad else t.clone(), self.target)


def _varies(first: Parts, second: Parts) -> bool:
    return any(item.difference for item in compare("", first, second, lambda dtype: 0.0))
