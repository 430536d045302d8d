"""Values for a model that was built on the meta device, or for one part of it: read from a file, or initialised."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from os import PathLike

import torch
from torch import Tensor, nn

from autosplit.distributed import constructors
from autosplit.distributed.initialisers import initial_values
from autosplit.distributed.places import TensorEntry, entries_of, replacement
from autosplit.distributed.weights import Weights, common_prefix, open_weights
from autosplit.errors import InputError, listed


def initialise(model: nn.Module, seed: int = 0) -> nn.Module:
    """Give a model that was built on the meta device all its values, on the CPU; return the model.

    The libraries' own methods give the values: ``reset_parameters()`` of the modules, ``init_weights()`` or
    ``_init_weights(module)`` of those around them, in the order in which constructors call them. Each module's draws
    are seeded with ``seed`` and its name, so the ranks of a pipeline give their parts the same values, whatever the cut
    and the number of ranks. The values have the distributions of the constructor's, not its very numbers: for those
    save a checkpoint of a model that was built on the CPU. A tied tensor gets what its first module gives it. Tensors
    that have values keep them. The caller's random state is not touched.

    A method that a constructor names and did not call, as the number of writes tells, is left out. What meta does not
    show is not known: other arguments than a method's defaults, by which it writes other values as often. Compare with
    a model on the CPU where in doubt.

    Raises InputError, before anything changes, for a tensor that no method fills, for one that the constructor or the
    caller has written to more often than the methods do, or by ``.data``, as what was written is not known, and for a
    parameter that ``torch.FloatTensor`` or the like has made on the CPU, where nothing was written to it.
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
    kept: Callable[[str, Tensor], Tensor] | None = None,
) -> None:
    """Give the parameters and buffers ``names`` their values on ``device``; the others stay on meta.

    They are new objects with the attributes of the old ones; tied tensors stay one object. Tensors in ``weights`` (see
    :func:`~autosplit.distributed.weights.open_weights`) are read from there, in the model's dtype. Other tensors on
    meta are initialised as by :func:`initialise`: on the CPU, so that their values do not depend on the device, and
    module by module. ``kept(name, value)`` returns the part of a value to keep; then memory holds no more than the kept
    parts and the values of one module.

    Raises InputError, before anything changes, for a name that the model lacks, a parameter or persistent buffer that
    ``weights`` lack, another shape, and a tensor that cannot be initialised.
    """
    entries = entries_of(model)
    by_name = {holder.name: entry for entry in entries for holder in entry.places}
    if unknown := [name for name in names if name not in by_name]:
        raise InputError(f"the model has no parameter or buffer {listed(unknown)}; it has {listed(by_name)}")
    wanted = list(dict.fromkeys(by_name[name] for name in names))
    source = Weights({}, lambda targets: None) if weights is None else open_weights(weights)
    keys = _keys(source, common_prefix(source.shapes, by_name), wanted)
    unread = [entry for entry in wanted if entry.tensor.is_meta and entry not in keys]
    if weights is not None and (lacking := [entry.name for entry in unread if entry.persistent]):
        raise InputError(
            f"weights hold no values of {listed(lacking)}; they hold {listed(source.shapes)}. Add them, or leave "
            "weights out, then all is initialised"
        )
    on_meta = any(entry.tensor.is_meta for entry in entries)
    if unset := [
        entry.shown
        for entry in (entries if weights is None else wanted)
        if entry not in keys and on_meta and _unset(entry)
    ]:
        raise InputError(
            f"{listed(unset)} of a model that was built on meta is memory on the CPU that nothing was written to: the "
            "constructor made it by torch.FloatTensor or the like; give weights= that hold it, or build the model on a "
            "real device"
        )
    with torch.inference_mode(False), torch.no_grad():
        values = initial_values(model, entries, unread, seed, device, kept)
        for some in [keys] if kept is None else [{entry: key} for entry, key in keys.items()]:
            read = {entry: torch.empty_like(entry.tensor, device=device) for entry in some}
            source.read({key: read[entry] for entry, key in some.items()})
            values |= read if kept is None else {entry: kept(entry.name, value) for entry, value in read.items()}
        for entry in wanted:
            entry.put(replacement(entry.tensor, values.get(entry, entry.tensor).to(device)))


def _unset(entry: TensorEntry) -> bool:
    """Tell whether a parameter is off meta because its constructor has no device, and was never written to."""
    tensor = entry.tensor
    fresh = isinstance(tensor, nn.Parameter) and not (tensor.is_meta or tensor.is_inference() or tensor._version)
    return fresh and constructors.leaves_unset(type(entry.places[0].module))


def _keys(source: Weights, prefix: str, wanted: list[TensorEntry]) -> dict[TensorEntry, str]:
    """Return the key of each tensor that can be read; shapes are checked."""
    pairs = ((entry, prefix + holder.name) for entry in wanted for holder in reversed(entry.places))
    keys = {entry: key for entry, key in pairs if key in source.shapes}
    differ = [
        f"{entry.name} has shape {tuple(entry.tensor.shape)} in the model, {tuple(source.shapes[key])} in weights"
        for entry, key in keys.items()
        if source.shapes[key] != entry.tensor.shape
    ]
    if differ:
        raise InputError(f"{listed(differ)}: build the model with the configuration of the weights")
    return keys
