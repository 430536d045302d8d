"""Which parameters and buffers a recorded call reads and writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from autosplit.trace.inputs.objects import storage_key
from autosplit.trace.recording.recording import Call, Refusal, assign_buffer
from autosplit.trace.scope import STATEFUL_LEAVES, takes_statistics

if TYPE_CHECKING:
    from autosplit.trace.recording.record import Recorder


def track_state(recorder: Recorder, call: Call, inputs: Sequence[torch.Tensor]) -> None:
    """Write into a call which of the model's parameters and buffers it reads, and which a norm in training changes."""
    names, model = recorder.attributes, recorder.model
    call.reads += [n for t in inputs if (n := names.get(id(t))) and n not in recorder.constants]
    module = None if call.leaf is None else model.get_submodule(call.leaf)
    if module is not None:
        own_state = [names.get(id(t)) for t in (*module.parameters(), *module.buffers())]
        if None in own_state:
            raise Refusal(
                f"forward replaces a parameter or buffer of module {call.leaf!r}, which a graph does not: do so before "
                "the model is called",
                "",
            )
        call.reads += filter(None, own_state)
    if isinstance(module, STATEFUL_LEAVES) and module.training and module.track_running_stats:
        statistics = {names[id(b)] for b in module.buffers()}
        call.writes += sorted(statistics - set(call.writes))
    elif takes_statistics(call):
        held = {recorder.owners.get(storage_key(tensor)) for tensor in inputs}
        statistics = {name for name, _ in model.named_buffers() if name in held}
        call.writes += sorted(statistics - set(call.writes))


def track_mutation(recorder: Recorder, call: Call, touched: Sequence[torch.Tensor], versions: Sequence[int]) -> None:
    """Write into a call which tensors it has changed in place, by their versions before it.

    Raises Refusal for a constant and for a parameter.
    """
    for tensor, version in zip(touched, versions, strict=True):
        changed, name = tensor._version != version, recorder.attributes.get(id(tensor))
        owner, storage = recorder.owners.get(storage_key(tensor)), recorder.storage_of(tensor)
        if changed and name in recorder.constants:
            raise recorder.refusal(
                "changes a tensor in place that is a plain attribute; a graph would hold its own: register it as "
                "a buffer"
            )
        if changed and owner is not None and owner in recorder.parameters:
            raise Refusal(in_place(owner), "")
        if owner is not None and name is None:
            call.views.append(owner)
        if owner is not None and changed and owner not in call.writes:
            call.writes.append(owner)
        if storage >= 0:
            call.reads_storages.append(storage)
            if changed:
                call.mutates.append(storage)


def in_place(parameter: str) -> str:
    """Return why a forward that changes a parameter is not recorded."""
    return (
        f"forward changes the parameter {parameter!r} in place, which a graph that runs by microbatch does not; "
        "register it as a buffer, or change it outside of forward"
    )


def assign_buffers(recorder: Recorder, buffers: Mapping[str, torch.Tensor]) -> None:
    """Record that buffers are others now which were computed."""
    for name, tensor in buffers.items():
        if recorder.attributes.get(id(tensor)) != name and id(tensor) in recorder.refs:
            path, _, attribute = name.rpartition(".")
            table = recorder.model.get_submodule(path)._buffers
            args = (recorder.constant(table), attribute, recorder.reference(tensor))
            recorder.calls.append(Call("function", assign_buffer, args, {}, "", f"#0/assign_{name}", writes=[name]))


def give_back(recorder: Recorder) -> None:
    """Let inputs, parameters and buffers that no call changed stand for themselves in what the model returns.

    Until now the last operation that returned its operand stood for it, as a dropout does in evaluation. What an opaque
    module gave back stays its result: with other values it may be a new tensor.
    """
    refs, calls = recorder.refs, recorder.calls
    changed = {storage for call in calls for storage in call.mutates}
    changed |= {storage for call in calls if call.leaf in recorder.scope.opaque for storage in call.storages}
    for index, (tensor, requires_grad) in enumerate(recorder.inputs):
        if recorder.storage_of(tensor) not in changed and tensor.requires_grad == requires_grad:
            refs[id(tensor)] = index
    written = {name for call in calls for name in call.writes}
    for tensor in (*recorder.model.parameters(), *recorder.model.buffers()):
        unchanged = id(tensor) in recorder.attributes and recorder.storage_of(tensor) not in changed
        if unchanged and recorder.owners.get(storage_key(tensor)) not in written:
            refs.pop(id(tensor), None)
