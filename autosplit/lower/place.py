"""Put every parameter, buffer and constant on the device of its home stage."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from autosplit.lower.split import Lowered
from autosplit.runtime.optimizers import move


def place(model: nn.Module, lowered: Lowered, devices: Sequence[torch.device]) -> None:
    """Move the model's state to the devices of the stages that use it; Parameter objects stay the same.

    State that no stage uses moves to the first device. Does nothing where everything lies on the right device already.
    """
    parts = [*lowered.stages, *lowered.prologues]
    homes = [*devices, *devices]
    if lowered.epilogue is not None:
        parts.append(lowered.epilogue)
        homes.append(devices[-1])
    target: dict[int, torch.device] = {}
    with_state = dict(model.named_parameters(remove_duplicate=False))
    for name, stage in lowered.layout.home.items():
        if name in with_state:
            target[id(with_state[name])] = devices[stage]
    for part, device in zip(parts, homes, strict=True):
        if part is not None:
            for tensor in (*part.parameters(), *part.buffers()):
                target.setdefault(id(tensor), device)
    move((tensor, target.get(id(tensor), devices[0])) for tensor in (*model.parameters(), *model.buffers()))
