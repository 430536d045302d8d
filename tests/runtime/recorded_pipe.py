"""A pipe whose lanes are recording lanes, and what one step of it logs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from autosplit import autosplit, recorded
from autosplit.runtime.lanes.lanes import CallerLane, Lane
from autosplit.trace import ladder
from tests.runtime.lane_models import ROWS, WIDTH
from tests.runtime.recording_engine import Engine
from tests.runtime.recording_lane import RecordingStreams, recording_lanes


class RecordedPipe:
    """A pipe as :func:`autosplit.autosplit` makes it; its model lies where its lanes say, and so does the caller.

    With ``pipe`` it is that one, which was prepared for one kind of call.

    With ``wants_gradient`` its batches require a gradient, which is another kind of call.

    ``others`` are modules of the caller's own, such as a loss with parameters; they lie on the last lane's device.
    """

    def __init__(
        self,
        model: nn.Module,
        devices: list[str],
        caller: str,
        *,
        schedule: str = "gpipe",
        chunks: int = 3,
        others: tuple[nn.Module, ...] = (),
        rows: int = ROWS,
        wants_gradient: bool = False,
        streams: RecordingStreams | None = None,
        pipe: Any = None,
        **options: Any,
    ) -> None:
        self.rows = rows
        self.pipe = pipe or autosplit(
            model,
            devices=["cpu"] * len(devices),
            chunks=chunks,
            schedule=schedule,
            lanes="inline",
            sample=torch.zeros(rows, WIDTH, requires_grad=wants_gradient),
            **options,
        )
        self.streams = streams or RecordingStreams()
        self.engine = Engine(self.streams)
        own = recording_lanes(self.streams, devices)
        assert self.pipe.plan is not None
        stages = self.pipe.plan.stages
        self.lanes = [own[stage.lane] for stage in stages]
        self.caller = Lane() if caller == "cpu" else CallerLane(torch.device(caller), self.streams)
        self.modules = model, *others
        assert {stage.lane + r for stage in stages for r in range(stage.replicas)} == set(range(len(devices)))
        ((self.recorded,),) = self.pipe._core.recordings.kept.values()
        self.recorded.replicas = tuple(
            replace(one, lanes={stage: own[stages[stage].lane + number] for stage in one.lanes})
            for number, one in enumerate(self.recorded.replicas, 1)
        )
        self.pipe._core.recordings.lanes = self.recorded.lanes = tuple(self.lanes)
        for made in ("parts", "setup", "ending"):
            self.recorded.__dict__.pop(made, None)
        self.pipe.__dict__.update(self.pipe._modules_of(self.recorded))
        for name, parameter in model.named_parameters():
            self.streams.put(parameter, self.lanes[self._home(name, parameter)].device)
        for buffer in model.buffers():
            users = [
                s for s, stage in enumerate(self.recorded.lowered.stages) if any(b is buffer for b in stage.buffers())
            ]
            self.streams.put(buffer, self.lanes[users[0]].device)
        for tensor in (t for module in others for t in (*module.parameters(), *module.buffers())):
            self.streams.put(tensor, self.lanes[-1].device)

    def _home(self, name: str, parameter: nn.Parameter) -> int:
        lowered = self.recorded.lowered
        users = [s for s, stage in enumerate(lowered.stages) if any(p is parameter for p in stage.parameters())]
        users += [s for s, p in enumerate(lowered.prologues) if p and any(q is parameter for q in p.parameters())]
        return lowered.layout.home[name] if name in lowered.layout.home else [*users, 0][0]

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Log what is called in here; what the caller gives comes from the caller's lane."""
        spread = mock.patch.object(ladder, "_difference", return_value=None)  # the lanes' devices are not there
        caller = mock.patch.object(recorded, "caller_lane", return_value=self.caller)
        with self.engine.recording(), caller, spread:
            yield
        self.streams.collect()

    def put(self, tensor: Tensor) -> Tensor:
        """Return a copy of a tensor that lies on the caller's device, just written there."""
        return self.streams.put(tensor.detach().clone(), self.caller.device).requires_grad_(tensor.requires_grad)

    def outputs(self, value: Tensor) -> list[Tensor]:
        """Run the pipe on a batch that nothing else holds; return copies of the outputs."""
        with self.recording():
            output = self.pipe(self.put(value))
            return [tensor * 1 for tensor in _flat(output)]

    def call(self, value: Tensor, loss: Callable[[Any], Tensor]) -> list[Tensor]:
        """Run forward and backward; return copies of outputs and gradients, read on the caller's streams."""
        with self.recording():
            batch = self.put(value)
            output = _flat(self.pipe(batch))
            loss(output).backward()
            copies = [tensor.detach() * 1 for tensor in output]
            del output
            return [*copies, *self._gradients(batch)]

    def train(self, value: Tensor, target: Any, loss_fn: Any) -> list[Tensor]:
        """Run a training step; return copies of the loss and of gradients, read on the caller's streams."""
        with self.recording():
            batch = self.put(value)
            given = torch.utils._pytree.tree_map_only(Tensor, self.put, target)
            loss = self.pipe.train_step(batch, target=given, loss_fn=loss_fn)
            del given
            return [loss * 1, *self._gradients(batch)]

    def _gradients(self, batch: Tensor) -> list[Tensor]:
        leaves = [*(p for module in self.modules for p in module.parameters()), batch]
        copies = [leaf.grad * 1 for leaf in leaves if leaf.grad is not None]
        for leaf in leaves:
            leaf.grad = None
        return copies


def _flat(output: Any) -> list[Tensor]:
    return list(output) if isinstance(output, tuple) else [output]
