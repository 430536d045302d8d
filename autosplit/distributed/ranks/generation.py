"""Text out of a pipe whose stages are processes: the last stage's rank generates, the others serve its calls.

    rank of the last stage    transformers' generate ─► call 0 ─► call 1 ─► ...      samples, tells all what to run
    every rank                its own stages of call 0, of call 1, ...: in one order, with messages between them

So several groups of rows have a call each on its way. What travels back from the last stage are new tokens. Caches stay
on the ranks of their stages; on the last one remote tensors stand for them (:mod:`autosplit.distributed.ranks.remote`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from autosplit.distributed.facts import call_text, checksum
from autosplit.distributed.ranks.agreement import Agreement
from autosplit.distributed.ranks.calls import ServedLayouts
from autosplit.distributed.ranks.pipe import RankPipe
from autosplit.distributed.ranks.recordings import RankRecordings
from autosplit.distributed.ranks.remote import RemoteTensor
from autosplit.distributed.ranks.serving import Exchange
from autosplit.distributed.world import attempt
from autosplit.errors import DeviceError, InputError
from autosplit.generation.attributes import Kept
from autosplit.generation.entry import Entry, Numbers, Stages, State
from autosplit.generation.facade import Generator
from autosplit.options import Options
from autosplit.pipelined import PipelinedModule
from autosplit.recorded import Recorded
from autosplit.trace.inputs.objects import mapped


class TwinRecordings(RankRecordings):
    """The recordings of a function of a model, whose weights lie as those of the model's own pipe do."""

    def __init__(self, outer: RankRecordings, function: nn.Module, options: Options) -> None:
        self.__dict__.update(vars(outer))  # which rank has which weights: the same dicts and sets
        super(RankRecordings, self).__init__(function, options, None, fits=True)
        self.sample, self._findings, self._late = None, None, []

    def check_fresh(self) -> None:
        """Check nothing: that is done once for all calls of a generation."""

    def check_reads(self, recorded: Recorded) -> None:
        """Check a recording once: what it reads stays, as no call trains."""
        if "reads" not in recorded.orders:
            super().check_reads(recorded)
            recorded.orders["reads"] = True


class TwinPipe(RankPipe):
    """A function of a pipe's model on the same ranks."""

    def __init__(self, outer: Any, function: nn.Module) -> None:
        recordings, world, options = outer._recordings, outer._world, outer._core.options
        options = replace(options, chunks=1, batch_dims=None, lanes="inline", microbatches=None)
        PipelinedModule.__init__(self, function, options)
        self._core.recordings = TwinRecordings(recordings, function, options)
        self._core.recordings.share(recordings)
        ways = {"_feed": "all", "_outputs": "last", "_reduce_dtype": None, "_timeout_s": outer._timeout_s}
        self.__dict__.update(ways, _world=world, _agreement=Agreement(world, function, "all", 0))


class RankEntry(Entry):
    """A function of a pipe's model as a program of ranks."""

    def __init__(self, pipe: Any, function: Callable[..., Any], stages: Stages, name: str, exchange: Exchange) -> None:
        super().__init__(pipe, function, stages, None if exchange.leads else ServedLayouts())
        self.name, self._exchange = name, exchange

    def run(self, numbers: Numbers, state: State, inputs: Any, *_: Any) -> Any:
        """Have all ranks run it; see `Entry.run`."""
        return self._exchange.call(self, numbers, state, inputs)

    def prepare(self, numbers: Numbers, state: State, inputs: Any) -> Any:
        """Return a call, ready to run on this rank."""
        recordings, whole = self.pipe._core.recordings, self._whole._core.recordings
        recordings.share(whole)
        step = self.pipe._on_rank(self._step(numbers, state, inputs))
        whole.share(recordings)
        if step.recorded.traced.written:
            raise InputError(f"the model writes to {min(step.recorded.traced.written)!r}, a buffer; use one process")
        return step


class RankGenerator(Generator):
    """Generates text with the model of a pipe of ranks; all of them call it."""

    def __init__(self, pipe: Any) -> None:
        super().__init__(pipe)
        self.exchange = Exchange(pipe._world, self.entry)

    def _entry(self, name: str, function: Callable[..., Any]) -> Entry:
        return RankEntry(self.pipe, function, self._stages, name, self.exchange)

    def facade(self, kept: Kept) -> Any:
        """Return what transformers' ``generate`` is run on, whose device is this rank's.

        What modules keep from call to call ends with the generation, as no rank has it all: it is not in ``kept``.
        """
        with self.pipe._recordings.guard.opened():  # its attributes are as before training
            facade = super().facade(Kept())
        type(facade).device = self.pipe._world.device
        return facade

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Run ``generate`` on the last stage's rank, by its arguments; return its result on every rank.

        Of caches among the result the last stage's rank has all of them, others None in the place of their tensors.
        """
        pipe, world, exchange = self.pipe, self.pipe._world, self.exchange
        _, error = attempt(self._check)
        texts = {name: _text(value) for name, value in (*enumerate(args), *kwargs.items())}
        arguments = "\n".join(f"{name}={text}" for name, text in texts.items() if text)
        agreed = {"their modes": call_text(self.model, (), {}), "their arguments": arguments}
        world.agree("generates text", agreed, error)
        exchange.last = pipe._recordings.ranks[-1][0]
        if exchange.leads:
            with exchange.alone():  # an interrupt is no exception that the others are told of
                result, error = attempt(lambda: super(RankGenerator, self).generate(*args, **kwargs))
            if error is not None and (exchange.broken or isinstance(error, DeviceError)):
                raise error
            exchange.end()
            world.told(exchange.last, (mapped(_on_cpu, result), torch.get_rng_state()), error)
            return result
        with torch.no_grad():
            exchange.serve()
        result, state = world.told(exchange.last)
        torch.set_rng_state(state)
        return mapped(lambda leaf: leaf.to(world.device) if isinstance(leaf, torch.Tensor) else leaf, result)

    def _check(self) -> None:
        world, recordings = self.pipe._world, self.pipe._recordings
        self.pipe._check_alone()
        recordings.check_fresh()
        if world.pipelines > 1 or recordings.parallelize is not None:
            raise InputError("generate() has one pipeline of whole stages: leave replicas, tp and parallelize= out")
        if max(map(len, recordings.ranks)) > 1:
            raise InputError("generate() has one rank per stage, and the plan has stages with several")


def _text(value: Any) -> str:
    """Return text for an argument that has to be the same on all ranks; "" for others, such as a streamer."""
    if isinstance(value, torch.Tensor):
        return f"{value.dtype}{list(value.shape)} {checksum([value])}"
    return repr(value) if isinstance(value, (bool, int, float, str)) else ""


def _on_cpu(leaf: Any) -> Any:
    if isinstance(leaf, RemoteTensor):
        return None
    return leaf.cpu() if isinstance(leaf, torch.Tensor) else leaf
