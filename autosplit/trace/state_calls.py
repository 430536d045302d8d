"""Which parameters and buffers a recorded call reads and writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from autosplit.trace.calls import assign_buffer
from autosplit.trace.recording import Call
from autosplit.trace.scope import STATEFUL_LEAVES, takes_statistics
from autosplit.trace.structure import storage_key

if TYPE_CHECKING:
    from autosplit.trace.record import Recorder


def track_state(recorder: Recorder, call: Call, inputs: Sequence[torch.Tensor]) -> None:
    """Write into a call which of the model's parameters and buffers it reads, and which a norm in training changes."""
    names, model = recorder.attributes, recorder.model
    call.reads += [n for t in inputs if (n := names.get(id(t))) and n not in recorder.constants]
    module = None if call.leaf is None else model.get_submodule(call.leaf)
    if module is not None:
        call.reads += [names[id(t)] for t in (*module.parameters(), *module.buffers())]
    if isinstance(module, STATEFUL_LEAVES) and module.training and module.track_running_stats:
        own = {names[id(b)] for b in module.buffers()}
        call.writes += sorted(own - set(call.writes))
    elif takes_statistics(call):
        held = {recorder.owners.get(storage_key(tensor)) for tensor in inputs}
        own = {name for name, _ in model.named_buffers() if name in held}
        call.writes += sorted(own - set(call.writes))


def assign_buffers(recorder: Recorder, buffers: Mapping[str, torch.Tensor]) -> None:
    """Record that buffers are others now which were computed."""
    for name, tensor in buffers.items():
        if recorder.attributes.get(id(tensor)) != name and id(tensor) in recorder.recorded():
            path, _, own = name.rpartition(".")
            table = recorder.model.get_submodule(path)._buffers
            args = (recorder.constant(table), own, recorder.reference(tensor))
            recorder.calls.append(Call("function", assign_buffer, args, {}, "", f"#0/assign_{name}", writes=[name]))
