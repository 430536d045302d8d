"""What a caller iterates over: minibatches go in, losses come out in order, and nothing that went in is left undone.

The caller's thread takes minibatches from the loader, draws their random numbers and finds their recording, all in the
loader's order. Lanes run them (:mod:`autosplit.stream.segment`). A minibatch that needs another recording than those
in flight, and everything that reads or changes the model meanwhile, drains the pipeline first.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from autosplit.checks import choose
from autosplit.errors import InputError
from autosplit.options import Sample
from autosplit.recorded import FoundCall, Recorded
from autosplit.runtime.lanes.ambient import ThreadState, needs_one_thread
from autosplit.runtime.ops import enter
from autosplit.runtime.step import engine
from autosplit.schedule.stream import STALENESS, ahead, updates_behind
from autosplit.stream.cells import Minibatch, StreamCells
from autosplit.stream.flight import Flight
from autosplit.stream.lowering import Places, StreamProgram, stream_program
from autosplit.stream.minibatches import StreamStep, checked, inputs_and_target, loss_in, step_of
from autosplit.stream.optimizers import Given, StageOptimizer, check_optimizer, cloned, settings_of, stage_optimizers
from autosplit.stream.segment import Segment
from autosplit.stream.versions import StageWeights
from autosplit.trace.inputs.objects import mapped


class Streaming:
    """What a pipe has for streams; ``_core`` is its model, options, recordings and threads."""

    _core: Any
    _find: Callable[[Any, Any], FoundCall]
    _prepare: Callable[[Any, Any], Any]
    _call: Callable[[Any], Any]

    def train_stream(
        self, loader: Iterable[Any], *, loss_fn: Any = None, optimizer: Given, staleness: str = "stash"
    ) -> Stream:
        """Train on a stream of minibatches without a flush between them (PipeDream); an iterator of their losses.

        Each minibatch is one update of every stage, by gradients that were computed with older weights: see
        :class:`autosplit.stream.stream.Stream`, which also drains the pipeline and says how many versions it holds.

        Args:
            loader: minibatches ``(inputs, target)``; inputs are a tensor, a tuple of positional inputs, a dict of
                keyword inputs, or a `Sample`. Without ``loss_fn`` items are inputs alone.
            loss_fn: ``loss_fn(output, target)`` returns a scalar; None: the model's own loss.
            optimizer: a ``torch.optim.Optimizer``, which is stepped stage by stage, or a function that makes one for a
                list of parameters, called once per stage.
            staleness: "stash": a minibatch uses the newest weights of each stage at its forward, also in its backward;
                "vertical": the same version on all stages; "2bw": minibatches are cut into ``chunks`` microbatches, and
                use the version before the newest, so that a stage holds two.

        Raises:
            InputError: the model or the optimizer cannot be trained stage by stage; nothing has changed.
        """
        core = self._core
        core.stream.drain()
        core.recordings.check_stream()
        core.recordings.still = core.stream.paused
        return self._stream(loader, loss_fn, optimizer, staleness)

    def _stream(self, *args: Any) -> Stream:
        return Stream(self, *args)


class Stream(Iterator[torch.Tensor]):
    """The losses of a stream of minibatches, in order: detached, 0-dim, each the mean or sum that ``loss_fn`` makes.

    A minibatch uses weights that lack the updates of those in flight before it (:mod:`autosplit.schedule.stream`), and
    updates the newest ones. To keep the lanes busy, minibatches are taken from the loader before earlier losses are
    returned; whatever was taken is trained on, also when the loop is left. Options of the optimizer, such as learning
    rates, are those at the time when a minibatch was taken. Between two losses the lanes go on, so weights change:
    :meth:`drain` before reading them. ``state_dict()`` of the model and of the optimizer, and any other call of the
    pipe, drain by themselves. Buffers have no versions: running statistics follow the forwards, in order.

    A forward or a loader that raises leaves all stages as after the minibatch before it, whose losses are returned
    first. A backward or an optimizer that raises leaves later stages ahead of earlier ones: resume from a checkpoint.
    """

    def __init__(self, pipe: Any, loader: Iterable[Any], loss_fn: Any, optimizer: Given, staleness: str) -> None:
        choose("staleness", staleness, STALENESS)
        check_optimizer(optimizer, pipe._core.model)
        self._pipe, self._core = pipe, pipe._core
        self._loss_fn, self._given, self._staleness = loss_fn, optimizer, staleness
        self._items = iter(loader)
        self._programs: dict[int, tuple[Recorded, StreamProgram]] = {}
        self._stage_of: dict[str, int] = {}
        self._places: dict[str, Places] = {}
        self._stages: dict[int, StageWeights] = {}
        """Those that run in this process."""
        self._optimizers: Sequence[StageOptimizer | None] = ()
        self._losses: deque[torch.Tensor] = deque()
        self._error: BaseException | None = None
        self._exhausted = False
        self._flight: Flight | None = None
        self._left = weakref.finalize(self, int)
        """What is done with the minibatches in flight when the stream is dropped, or the interpreter ends."""
        self._loaded: Mapping[str, Any] | None = None
        self._walked: tuple[Any, list[int]] = (None, [])
        """The last token of the model, and the parameters to train there were then."""
        self._before = 0
        """How many minibatches came before the pipeline was last filled."""

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> torch.Tensor:
        """Return the loss of the next minibatch."""
        with self._core.stream.lock:
            return self._next_loss()

    def _next_loss(self) -> torch.Tensor:
        while not self._losses:
            flight = self._current()
            if flight is None and self._error is not None:
                error, self._error = self._error, None
                raise error
            if flight is None and self._exhausted:
                raise StopIteration
            while not self._exhausted and (self._flight is None or self._flight.wants_more()):
                self._take()
            if self._flight is not None and not self._flight.ended:
                self._flight.receive()
        return self._losses.popleft()

    def _current(self) -> Flight | None:
        """Return what is in flight; None where nothing is. What ended it is noted."""
        if (flight := self._flight) is not None and flight.ended:
            self._flight = None
            if flight.error is not None:
                self._error, self._exhausted = flight.error, True
        return self._flight

    @property
    def minibatches(self) -> int:
        """How many minibatches all stages have stepped by; it grows while lanes go on, so drain before you save it."""
        return self._before + min((stage.minibatches for stage in self._stages.values()), default=0)

    @property
    def versions(self) -> tuple[int, ...]:
        """How many versions of its weights each stage has held at once, at most, since the pipeline was last filled."""
        return tuple(stage.most for stage in self._stages.values())

    @property
    def version_bytes(self) -> tuple[int, ...]:
        """The bytes of each stage's weights beside the newest, when it held most."""
        return tuple(stage.version_bytes for stage in self._stages.values())

    @property
    def optimizers(self) -> tuple[Optimizer, ...]:
        """The optimizers that step the stages: one for all, or one per stage that has parameters to train."""
        if isinstance(self._given, Optimizer):
            return (self._given,)
        return tuple({id(each.optimizer): each.optimizer for each in self._optimizers if each is not None}.values())

    def state_dict(self) -> dict[str, Any]:
        """Drain, and return how many minibatches were trained on and the optimizers' states; the model has its own."""
        self.drain()
        states = [o.state_dict() for o in self.optimizers] if self._loaded is None else self._loaded["optimizers"]
        return {"minibatches": self.minibatches, "optimizers": states}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another stream, of the same cut, was saved; before the first minibatch."""
        if self._stages:
            raise InputError("a stream takes a state before its first minibatch; make a new one for the saved state")
        self._before, self._loaded = int(state["minibatches"]), state

    def drain(self) -> None:
        """Finish the minibatches in flight, so that the weights are those after the last one; no more are taken.

        Their losses are returned by later calls of ``next``, which fill the pipeline again.
        """
        if (flight := self._current()) is not None:
            flight.finish()
        self._current()

    def paused(self) -> AbstractContextManager[None]:
        """Return what lets no minibatch in flight go on for as long as it is entered."""
        paused: AbstractContextManager[None] = self._core.stream.paused()
        return paused

    def close(self) -> None:
        """Drain, and take no more minibatches; raise what one in flight has raised."""
        self._exhausted = True
        self.drain()
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    # -- minibatches in ------------------------------------------------------------------------------------------
    def _take(self) -> None:
        """Take a minibatch from the loader and put it in; end where there is none, or where one cannot be run."""
        try:
            self._put(next(self._items))
        except StopIteration:
            self._exhausted = True
        except Exception as error:
            self._exhausted, self._error = True, self._error or error
        if self._exhausted and self._flight is not None:
            self._flight.segment.end()

    def _put(self, item: Any) -> None:
        """Give the lanes a minibatch; if it needs another program, after they have finished the earlier ones."""
        core, (sample, target) = self._core, inputs_and_target(item, self._loss_fn)
        if core.stream.flight is not self._flight:  # another stream's, which was used in between
            core.stream.drain()
        engine.check_loss(target, self._loss_fn, "auto")
        with torch.inference_mode(False), torch.enable_grad():
            call = self._pipe._find(sample.args, sample.kwargs)
            if call.python is not None:  # the first call of its kind; it is refused where the next one differs again
                core.recordings.leave(call, ())
                call = self._pipe._find(sample.args, sample.kwargs)
            program = self._program(checked(call, core.recordings))
            if not program.lowered.changes_inputs:  # the loader may use its memory again
                call = call._replace(tensors=[tensor.clone() for tensor in call.tensors])
            target = mapped(cloned, target)
            step = self._step(call, program, target)
            if step.state.seed and core.threads is not None:
                raise InputError(
                    "the model draws random numbers that are not known before a minibatch runs (rng='counter', or "
                    f"{program.lowered.off_tape}), and lanes draw while the loader does; split with lanes='inline'"
                )
            whole = partial(self._whole, sample)
            loss = loss_in(step, self._loss_fn, target, core.proofs, whole, first=not self._stages)
            under = self._trained_by(), replace(ThreadState.current(), autocast_cache=False)
            if (flight := self._current()) is not None and flight.under != under:
                self.drain()
                flight = self._current()
            if flight is None and self._error is not None:
                return
            flight = flight or self._fill(step, under)
            enter(step.lanes[-1], step.stage_lanes)
            settings = {id(optimizer): settings_of(optimizer) for optimizer in self.optimizers}
            if not flight.put(Minibatch(StreamCells(step, *loss), settings, program.ways)):
                self._exhausted = True

    def _step(self, call: FoundCall, program: StreamProgram, target: Any) -> StreamStep:
        return step_of(call, program, self._core.options, self._core.recordings)

    def _whole(self, sample: Sample) -> Any:
        """Return the model's output for a whole minibatch."""
        return self._pipe._call(self._pipe._prepare(sample.args, sample.kwargs))

    def _segment(self, step: StreamStep) -> Segment:
        return Segment(self._stages, step.counts, self._staleness)

    def _program(self, recorded: Recorded) -> StreamProgram:
        """Return what runs a recording; its parameters are those of the stream from then on."""
        if id(recorded) not in self._programs:
            core, plan = self._core, self._core.recordings.plan
            alone, compiled = self._staleness != "2bw" or core.options.chunks == 1, core.options.compile
            with self.paused():
                program = stream_program(core.model, recorded, plan, alone=alone, compiled=compiled)
                for name, (stage, places) in program.places.items():
                    if self._stage_of.setdefault(name, stage) != stage:
                        raise InputError(
                            f"{name!r} is first used in stage {stage}, and in stage {self._stage_of[name]} in another "
                            "kind of call, so that it has no stage that steps it; give streams one kind of minibatch"
                        )
                    for known, more in zip(self._places.setdefault(name, [[] for _ in places]), places, strict=True):
                        known += [entry for entry in more if entry not in known]
            self._programs[id(recorded)] = recorded, program
        return self._programs[id(recorded)][1]

    def _trained(self) -> list[dict[str, nn.Parameter]]:
        """Return the parameters to train by stage, of all kinds of calls so far."""
        named = dict(self._core.model.named_parameters())
        trained: list[dict[str, nn.Parameter]] = [{} for _ in self._core.recordings.lanes]
        for name, stage in self._stage_of.items():
            if named[name].requires_grad:
                trained[stage][name] = named[name]
        return trained

    def _trained_by(self) -> Any:
        """Return which parameters are trained, and the groups of an optimizer for all stages, by identities."""
        groups = self._given.param_groups if isinstance(self._given, Optimizer) else ()
        if self._walked[0] is not (token := self._core.recordings.python.token):
            self._walked = token, [id(p) for p in self._core.model.parameters() if p.requires_grad]
        return len(self._stage_of), self._walked[1], [list(map(id, group["params"])) for group in groups]

    def _fill(self, step: StreamStep, under: tuple[Any, ThreadState]) -> Flight:
        """Begin to fill the pipeline; raise InputError where its stages cannot be trained one by one."""
        core = self._core
        trained = [parameters if stage in step.stages else {} for stage, parameters in enumerate(self._trained())]
        replicas = step.counts
        behind = updates_behind(self._staleness, replicas)
        if self._staleness == "2bw" and any(core.options.chunks % count for count in replicas):
            raise InputError(
                f"stages of {replicas} replicas share out the {core.options.chunks} microbatches of a minibatch evenly "
                "under staleness='2bw'; give chunks= that all these divide"
            )
        memory: dict[int, str] = {}
        for name, parameter in (pair for parameters in trained for pair in parameters.items()):
            if (other := memory.setdefault(parameter.data_ptr(), name)) != name and parameter.numel():
                raise InputError(
                    f"{name!r} and {other!r} are two parameters of one memory, and versions have memory of their own; "
                    "make them one Parameter"
                )
            if parameter.grad is not None:
                raise InputError(
                    f"{name!r} has a gradient, which is no minibatch's; call zero_grad() before the stream"
                )
        self._optimizers = stage_optimizers(self._given, trained, self._optimizers)
        if self._loaded is not None:
            for optimizer, saved in zip(self.optimizers, self._loaded["optimizers"], strict=True):
                optimizer.load_state_dict(saved)
            self._loaded = None
        for name, parameter in core.model.named_parameters():
            if not parameter.requires_grad:  # nor in minibatches in flight where it is to be trained from now on
                attributes, parameter = vars(parameter), nn.Parameter(parameter.data, requires_grad=False)
                parameter.__dict__ = attributes
            for module, attribute in chain(*self._places.get(name, ())):
                setattr(module, attribute, parameter)
        self._before = self.minibatches
        self._stages = {
            stage: StageWeights(
                trained[stage], self._places, self._optimizers[stage], step.every_lane[stage], behind=behind[stage]
            )
            for stage in step.stages
        }
        segment = self._segment(step)
        lanes, far = [*step.stage_lanes, step.lanes[-1]], ahead(self._staleness, replicas)
        args = core.stream, segment, list(self._stages.values()), self._optimizers, lanes, self._losses
        flight = self._flight = Flight(*args, before=self._before, under=under, ahead=far)
        flight.watch([core.model, *self.optimizers])
        self._left.detach()
        self._left = weakref.finalize(self, flight.leave)
        if core.threads is not None and not needs_one_thread():
            segment.start(core.threads, flight.state)
        else:
            flight.rounds = segment.run_here()
        return flight
