"""What ``autosplit profile MODEL`` does: a model's costs from its name."""

from __future__ import annotations

import re

import torch

import cost_models
from autosplit.cli.common import CPU_LANE, ProfileOptions
from autosplit.cli.inputs import ROWS_PER_DEVICE, ModelSpec
from autosplit.cli.models import make_model, make_sample
from autosplit.devices import device_text
from autosplit.errors import InputError
from autosplit.options import Sample, resolve_devices
from autosplit.planning.request import sizes_of
from autosplit.profile.node_costs.combine import profile
from autosplit.report.costs import CostReport, cost_report
from autosplit.trace.borrowed.blank import has_meta
from autosplit.trace.inputs.inputs import batch_rows
from autosplit.trace.ladder import Trace, trace
from autosplit.trace.rows.probe import probe_inputs


def costs_of(spec: ModelSpec, options: ProfileOptions) -> CostReport:
    """Make a model, record it on random inputs, and return its costs."""
    where = _torch_device(options.device)
    modelled = options.device is not None and where is None
    model = make_model(spec, blank=spec.is_config and modelled)
    sample = Sample.of(make_sample(spec, model=model, rows=ROWS_PER_DEVICE * options.chunks))
    on_meta = has_meta(model)
    measured = _measures(options, on_meta=on_meta)
    target = torch.device("meta") if on_meta else where
    if target is not None:
        model = model if on_meta else model.to(target)
        sample = _moved(sample, target)
    device = _cost_model(options, where)
    traced = trace(model, sample, batch_dims=spec.batch_dims)
    sizes = _sizes(traced, options)
    costs = profile(
        traced.graph,
        rows=sizes[0],
        batch_rows=sum(sizes),
        inputs=probe_inputs(traced.inputs, sizes[0]),
        measure=measured,
        device=device,
    )
    hardware = device_text(torch.device(costs.times.device)) if costs.measured else ""
    return cost_report(model, traced.graph, costs, sizes=sizes, hardware=hardware)


def _torch_device(device: str | None) -> torch.device | None:
    """Return the device to measure on; None where the model is, or where a cost model is asked."""
    if device is None or re.fullmatch(r"(cpu|cuda)(:[0-9]+)?", device) is None:
        return None
    return resolve_devices([device])[0]


def _measures(options: ProfileOptions, *, on_meta: bool) -> bool:
    """Tell whether times are measured; raise InputError where that was asked for and cannot be."""
    modelled = options.device is not None and _torch_device(options.device) is None
    if options.measure and modelled:
        raise InputError(
            f"--device {options.device} asks a cost model, --measure a device of this machine; "
            "leave one of them out, or write --device cpu or --device cuda:0"
        )
    if options.measure and on_meta:
        raise InputError("the model is on the meta device and has no values to run on; leave --measure out")
    return options.measure is not False and not modelled and not on_meta


def _cost_model(options: ProfileOptions, where: torch.device | None) -> str:
    """Return the name or the file of the cost model that answers for what is not measured."""
    if options.device is not None and where is None:
        return options.device
    if where is not None and where.type == "cuda":
        known = cost_models.identify(torch.cuda.get_device_name(where))
        if known is not None:
            return known.name
        if options.measure is False:
            raise InputError(
                f"{torch.cuda.get_device_name(where)} is not among the known devices (autosplit devices); "
                "give --device a name of these or a file, or leave --no-measure out"
            )
    return CPU_LANE


def _sizes(traced: Trace, options: ProfileOptions) -> tuple[int, ...]:
    """Return the rows of each microbatch, the largest first."""
    least = traced.graph.min_rows
    if options.rows is None:
        return sizes_of(batch_rows(traced.inputs), options.chunks, least)
    if options.rows < least:
        raise InputError(f"--rows {options.rows}: this model needs at least {least} rows in a microbatch")
    return (options.rows,) * options.chunks


def _moved(sample: Sample, device: torch.device) -> Sample:
    def move(value: object) -> object:
        return value.to(device) if isinstance(value, torch.Tensor) else value

    args, kwargs = torch.utils._pytree.tree_map(move, (sample.args, sample.kwargs))
    return Sample(*args, **kwargs)
