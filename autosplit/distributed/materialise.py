"""Values for a model that was built on the meta device, or for one part of it: read from a file, or initialised."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from os import PathLike

import torch
from torch import Tensor, nn

from autosplit.distributed.initialisers import initial_values
from autosplit.distributed.places import Entry, entries_of, listed, replacement
from autosplit.distributed.weights import Weights, common_prefix, open_weights
from autosplit.errors import InputError

_HOST_BYTES = 1 << 30
"""How many bytes are initialised at once before they go to their device; what is drawn does not depend on it."""


def initialise(model: nn.Module, seed: int = 0) -> nn.Module:
    """Give a model that was built on the meta device all its values, on the CPU; return the model.

    The libraries' own methods give the values: ``reset_parameters()`` of the modules, ``init_weights()`` or
    ``_init_weights(module)`` of those around them, in the order in which constructors call them. Each draw is seeded
    with ``seed`` and the tensor's name, so the ranks of a pipeline give their parts the same values, whatever the cut
    and the number of ranks. The values have the distributions of the constructor's, not its very numbers: for those
    save a checkpoint of a model that was built on the CPU. A tied tensor gets what its first module gives it. Tensors
    that have values keep them. The caller's random state is not touched.

    Raises InputError, before anything changes, for a tensor that no method fills, and for one that the constructor or
    the caller has written to more often than the methods do, as what was written is not known.
    """
    names = [entry.name for entry in entries_of(model) if entry.tensor.is_meta]
    materialise(model, names, device=torch.device("cpu"), seed=seed)
    return model


def materialise(
    model: nn.Module,
    names: Collection[str],
    *,
    device: torch.device,
    seed: int = 0,
    weights: Mapping[str, Tensor] | str | PathLike[str] | None = None,
) -> None:
    """Give the parameters and buffers ``names`` their values on ``device``; the others stay on meta.

    They are new objects with the attributes of the old; a tied one is one object under all its names. What ``weights``
    hold is read from there, in the model's dtype; :func:`~autosplit.distributed.weights.open_weights` tells what they
    may be. All else that is on meta is initialised as by :func:`initialise`: on the CPU, so that it does not depend on
    the device either, and at most 1 GiB or one tensor at a time.

    Raises InputError, before anything changes, for a name that the model lacks, a parameter or persistent buffer that
    ``weights`` lack, another shape, and a tensor that cannot be initialised.
    """
    entries = entries_of(model)
    by_name = {place.name: entry for entry in entries for place in entry.places}
    if unknown := [name for name in names if name not in by_name]:
        raise InputError(f"the model has no parameter or buffer {listed(unknown)}; it has {listed(by_name)}")
    wanted = list({id(by_name[name]): by_name[name] for name in names}.values())
    source = Weights({}, lambda targets: None) if weights is None else open_weights(weights)
    keys = _keys(source, common_prefix(source.shapes, by_name), wanted)
    unread = [entry for entry in wanted if entry.tensor.is_meta and entry.name not in keys]
    if weights is not None and (lacking := [entry.name for entry in unread if entry.persistent]):
        raise InputError(
            f"weights hold no values of {listed(lacking)}; they hold {listed(source.shapes)}. Add them, or leave "
            "weights out, then all is initialised"
        )
    with torch.inference_mode(False), torch.no_grad():
        values: dict[str, Tensor] = {}
        for group in _groups(unread):
            drawn = initial_values(model, entries, group, seed)
            values |= {name: value.to(device) for name, value in drawn.items()}
        values |= {entry.name: torch.empty_like(entry.tensor, device=device) for entry in wanted if entry.name in keys}
        source.read({key: values[name] for name, key in keys.items()})
        for entry in wanted:
            entry.put(replacement(entry.tensor, values.get(entry.name, entry.tensor).to(device)))


def _keys(source: Weights, prefix: str, wanted: list[Entry]) -> dict[str, str]:
    """Return the key of each tensor that can be read, by name; shapes are checked."""
    keys, differ = {}, []
    for entry in wanted:
        for key in [prefix + place.name for place in entry.places if prefix + place.name in source.shapes][:1]:
            keys[entry.name] = key
            if (found := source.shapes[key]) != entry.tensor.shape:
                shapes = f"{tuple(entry.tensor.shape)} in the model, {tuple(found)} in weights"
                differ.append(f"{entry.name!r} has shape {shapes}")
    if differ:
        raise InputError(f"{listed(differ)}: build the model with the configuration of the weights")
    return keys


def _groups(entries: list[Entry]) -> list[list[Entry]]:
    """Split tensors into groups of at most ``_HOST_BYTES``, or of one tensor."""
    groups: list[list[Entry]] = []
    room = 0
    for entry in entries:
        if not groups or entry.tensor.nbytes > room:
            groups, room = [*groups, []], _HOST_BYTES
        groups[-1].append(entry)
        room -= entry.tensor.nbytes
    return groups
