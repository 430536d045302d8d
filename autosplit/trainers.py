"""transformers' Trainer around a pipe: the batches of an accumulation as microbatches of one schedule.

    Trainer    batch 0: forward, backward               batch 1: forward, backward    ...    clip, optimizer
    here       all batches, in the plan's schedule      batch 1: its loss             ...    clip, optimizer

Trainer fetches the batches of an accumulation before their first step, so they are there to run together. It looks at
each loss at once, for nan: a loss that is computed later, behind an ordinary call of the pipe, would not do.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from autosplit.errors import InputError
from autosplit.options import Sample


class MicrobatchesFromAccumulation:
    """Makes ``gradient_accumulation_steps`` of a Trainer the microbatches of one schedule of its pipe.

    ``class PipelineTrainer(MicrobatchesFromAccumulation, Trainer): ...``, also with a subclass of Trainer that has a
    ``compute_loss``, which may call the model once. Losses, gradients and logs are those of Trainer. All gradients of
    an accumulation are there after its first batch. A model that is no pipe trains as ever.
    """

    def get_batch_samples(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Fetch the batches of an accumulation."""
        fetched = super().get_batch_samples(*args, **kwargs)  # type: ignore[misc]
        self._batches, self._losses = fetched[0], list[Any]()
        return fetched

    def training_step(self: Any, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        """Return the loss of a batch; the first of an accumulation runs all of them."""
        if len(self._batches) < 2 or not hasattr(type(model), "_train_microbatches"):
            return super().training_step(model, inputs, num_items_in_batch)  # type: ignore[misc]
        if not self._losses:
            self._losses = self._train_batches(model, num_items_in_batch)
        return self._losses.pop(0).to(self.args.device)

    def _train_batches(self: Any, model: Any, count: Any) -> Any:
        """Run all batches in one schedule and return their losses."""
        from accelerate.utils import convert_to_fp32  # type: ignore[import-untyped]

        model.train()
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()
        amp, scaler = self.accelerator.native_amp, self.accelerator.scaler
        factor = 1.0 if scaler is None else float(scaler.scale(torch.ones((), device=self.args.device)))
        scaled = getattr(self, "loss_is_scaled_for_ga", None)
        if scaled is None:  # as Trainer decides it
            scaled = (self.model_accepts_loss_kwargs and count is not None) or self.compute_loss_func is not None

        def loss_of(output: Any, batch: Any) -> Any:
            with torch.autocast(self.args.device.type, enabled=False) if amp else contextlib.nullcontext():
                output = convert_to_fp32(output) if amp else output  # as accelerate's forward returns it
                return factor * self.compute_loss(_StandIn(model, output), dict(batch), num_items_in_batch=count)

        def inputs_of(batch: Any) -> Sample:
            try:
                self.compute_loss(_StandIn(model), dict(batch), num_items_in_batch=count)
            except _Called as call:
                return call.inputs
            raise InputError("compute_loss calls another model than the one that it gets; train with Trainer as it is")

        loss_of.takes_all = True  # type: ignore[attr-defined]
        batches = [self._prepare_inputs(batch) for batch in self._batches]
        drawn, reduction = torch.get_rng_state(), "sum" if scaled else "mean"
        calls = [inputs_of(batch) for batch in batches]
        if not torch.equal(drawn, torch.get_rng_state()):
            torch.set_rng_state(drawn)
            raise InputError("compute_loss draws random numbers, and is called twice; train with Trainer as it is")
        with self.compute_loss_context_manager(), self.accelerator.autocast():
            return [loss / factor for loss in model._train_microbatches(calls, batches, loss_of, reduction)]


class _Called(InputError):
    """A call of the model by `compute_loss`."""

    def __init__(self, inputs: Sample) -> None:
        super().__init__(
            "compute_loss calls the model twice, and these calls share no schedule; train with Trainer as it is"
        )
        self.inputs = inputs


class _StandIn:
    """What `compute_loss` has for the model: it returns outputs that are there, and then raises `_Called`."""

    __class__ = property(lambda self: self._model.__class__)

    def __init__(self, model: Any, *outputs: Any) -> None:
        self._model, self._outputs = model, [*outputs]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._outputs:
            raise _Called(Sample(*args, **kwargs))
        return self._outputs.pop()
