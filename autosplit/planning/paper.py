"""A model on paper: its twin without values, recorded there, for devices that nobody has to have.

    model (real or on meta) ─► twin on meta, in the dtype of the precision ─► recording ─► plan
                                     no value is made, none is read

What a forward decides by values cannot be followed there; a model that has values is then recorded with them, as
`autosplit` does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from autosplit.adapters import Adapters
from autosplit.errors import InputError, TraceError
from autosplit.options import Options, Sample
from autosplit.planning.adapters import adapt
from autosplit.planning.asked import check_room
from autosplit.planning.paper_loss import paper_loss
from autosplit.planning.parallel.tokens import tokens_of
from autosplit.planning.profiled.problem import RecordedModel
from autosplit.planning.search.sweep import Space, Sweep
from autosplit.profile.autocasting import AUTOCASTS, autocast_of, set_dtypes
from autosplit.profile.node_costs.shadow import shadow
from autosplit.trace.borrowed.blank import blank, has_meta
from autosplit.trace.inputs.inputs import flatten, tokens_per_row
from autosplit.trace.inputs.objects import mapped
from autosplit.trace.ladder import trace
from cost_models.machines import MachineSpec

_DTYPES = {"fp32": torch.float32, "amp_bf16": torch.float32, "amp_fp16": torch.float32}
_DTYPES |= {"bf16": torch.bfloat16, "bf16_fp32_master": torch.bfloat16, "fp8": torch.bfloat16}
_MOST = 16
"""Microbatches per device of a search at most, except for one more count."""
_SCHEDULES = (("1f1b", 1), ("gpipe", 1), ("interleaved", 2), ("interleaved", 4))
"""What schedule="auto" weighs, with how many stages per device."""


@dataclass(frozen=True)
class OnPaper:
    """What is planned: the model or its twin, the recording of it, and what was asked for.

    ``by_values``: the forward depends on values, so that the model's own were used. ``adapters``: what the recorded
    twin has that the model does not.
    """

    recorded: RecordedModel
    options: Options
    sample: Sample
    loss_fn: Any
    by_values: bool
    adapters: Adapters | None = None

    def of(self, options: Options) -> OnPaper:
        """Return the recording under other options."""
        return replace(self, options=replace(options, loss=self.options.loss))

    def sweep(self, space: Space, *, rows: int) -> Sweep:
        """Return the configurations of a space for so many rows."""
        return Sweep(self.recorded, self.options, space, rows=rows)


def stand_ins(machine: MachineSpec) -> tuple[torch.device, ...]:
    """Return a torch device for each device on paper; they need not exist.

    Devices that issue their own work are CPU lanes; each other one is a CUDA device.
    """
    return tuple(
        torch.device("cuda", n) if spec.issue_s else torch.device("cpu") for n, spec in enumerate(machine.devices)
    )


def prepare(
    model: nn.Module,
    sample: Sample,
    options: Options,
    *,
    loss_fn: Any = None,
    adapters: Adapters | None = None,
    then: Callable[[nn.Module], None] = lambda _: None,
    context: int = 1,
) -> OnPaper:
    """Record a model on paper, in the precision that is asked for and with adapters; the model stays as it is.

    ``then`` changes the twin that has adapters further. ``context``: so many ranks share the tokens of each row, and
    those of one are recorded.

    Raises TraceError where no graph can follow it, InputError for a model without parameters, a sample whose batch
    cannot be told, a reserve of all that a device has, a loss that cannot be called on the output, or tokens that ranks
    cannot share.
    """
    check_room(options)
    dtype = _DTYPES.get(options.precision or "")
    if context > 1:
        tokens = tokens_per_row(flatten(model, sample, options.batch_dims))
        sample = with_tokens(sample, tokens or 0, tokens_of(tokens, context))
    twin, blank = _twin(model, dtype, always=adapters is not None), _blank(sample, dtype)
    if adapters is not None:
        adapt(twin, adapters, compute=AUTOCASTS.get(options.precision or ""))
        then(twin)
    whole_norms = options.batch_norm == "full"
    try:
        traced = trace(twin, blank, batch_dims=options.batch_dims, whole_norms=whole_norms)
    except TraceError as refusal:
        if next(model.parameters(), None) is None and (has_meta(model) or twin is model):
            raise InputError(
                f"{type(model).__name__} has no parameters, so there is nothing to train or to cut; autosplit() runs "
                "such models"
            ) from refusal
        if has_meta(model) or twin is model or adapters is not None:
            raise
        if dtype is not None and any(t.is_floating_point() and t.dtype != dtype for t in model.parameters()):
            raise TraceError(
                f"{refusal} (planned in precision={options.precision!r} without values; with them only precision=None "
                "can be planned)"
            ) from refusal
        traced = trace(model, sample, batch_dims=options.batch_dims, whole_norms=whole_norms)
        twin = model
    with autocast_of(options.precision, kernels=options.kernels):
        if options.precision in AUTOCASTS:
            set_dtypes(traced.graph, kernels=options.kernels)
        if loss_fn is not None:
            options = replace(options, loss=paper_loss(loss_fn, traced.graph))
    by_values = twin is model and not has_meta(model)
    recorded = RecordedModel(twin, traced, context=context)
    return OnPaper(recorded, options, sample if by_values else blank, loss_fn, by_values, adapters)


def in_precision(paper: OnPaper, precision: str) -> OnPaper:
    """Return the model in another precision: recorded anew unless all its tensors are of the same dtypes there."""
    options = replace(paper.options, precision=precision)
    kinds = [(_DTYPES.get(each or ""), each in AUTOCASTS) for each in (paper.options.precision, precision)]
    if kinds[0] == kinds[1] and not kinds[0][1]:
        return paper.of(options)
    return prepare(paper.recorded.model, paper.sample, options, loss_fn=paper.loss_fn)


def search_space(options: Options, *, rows: int, free_chunks: bool) -> Space:
    """Return the space to search: the choices that were given, and for open ones all values that are worth trying.

    The numbers of microbatches are 1, 2, 4, ... times the number of devices, as far as the rows suffice. Beyond 16
    times a step hardly gets shorter; one larger number is added for models that fit only then. Schedules that split the
    backward are used only on request, since the cost of splitting is known for measured times only.
    """
    lanes = len(options.devices)
    chunks: tuple[int, ...] = (options.chunks,)
    if free_chunks:
        counts = [-(-rows // 2**power) for power in range(rows.bit_length()) if 2**power <= max(1, rows // lanes)]
        chunks = tuple(count for count in counts if count <= _MOST * lanes) or tuple(counts[-1:])
        chunks = (*[count for count in counts if count <= 4 * _MOST * lanes and count not in chunks][:1], *chunks)
    if options.schedule != "auto":
        schedules: tuple[tuple[str, int], ...] = ((options.schedule, options.virtual_stages),)
    else:
        there = options.parallel.rules.schedules
        weighed = [each for each in _SCHEDULES if not there or each[0] in there]
        schedules = tuple(weighed if lanes > 1 else weighed[:1])
    return Space(chunks=chunks, schedules=schedules, recompute=options.recompute)


def _tensors(model: nn.Module) -> list[torch.Tensor]:
    return [*model.parameters(), *model.buffers()]


def _twin(model: nn.Module, dtype: torch.dtype | None, *, always: bool) -> nn.Module:
    """Return a model of the same structure on meta; the model itself where it has no tensors, or is that already.

    ``always``: a new one, to be changed.
    """
    if not always and all(tensor.is_meta and _kind(tensor, dtype) == tensor.dtype for tensor in _tensors(model)):
        return model
    lazy = next(
        (name for name, p in model.named_parameters() if isinstance(p, nn.parameter.UninitializedParameter)), None
    )
    if lazy is not None:
        raise InputError(f"parameter {lazy!r} has no shape yet; call the model once on its inputs, then plan it")

    return shadow(model, replace=lambda tensor: blank(tensor, _kind(tensor, dtype))).module


def _kind(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype


def _blank(sample: Sample, dtype: torch.dtype | None) -> Sample:
    """Return the sample's tensors without values, floating ones in the dtype."""

    def blank(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return torch.empty(leaf.shape, dtype=_kind(leaf, dtype), device="meta").requires_grad_(leaf.requires_grad)

    args, kwargs = mapped(blank, (sample.args, sample.kwargs))
    return Sample(*args, **kwargs)


def with_tokens(sample: Sample, before: int, tokens: int) -> Sample:
    """Return a sample whose tables of integers and masks have rows of another length, without values."""

    def longer(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or leaf.is_floating_point() or leaf.is_complex():
            return leaf
        shape = [tokens if place and size == before else size for place, size in enumerate(leaf.shape)]
        return torch.empty(shape, dtype=leaf.dtype, device="meta")

    args, kwargs = mapped(longer, (sample.args, sample.kwargs))
    return Sample(*args, **kwargs)
