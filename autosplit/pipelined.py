"""The module that the caller gets: the model's own state, and a pipelined program that runs it."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import torch
from torch import fx, nn

from autosplit.delegation import (
    Delegating,
    PlacedModule,
    forward_like,
    forward_overrides,
    free_names,
    one_at_a_time,
    refuse_tracers,
    refuse_unplanned,
)
from autosplit.generation.decode import Decoding
from autosplit.generation.facade import Generator, generate
from autosplit.locate import Locate
from autosplit.measured import Profiled
from autosplit.microbatches import Training
from autosplit.options import Options, Sample, check_seconds
from autosplit.planning.plan.plan import Plan
from autosplit.planning.request import sizes_of
from autosplit.planning.timeline import StepTimeline
from autosplit.recorded import (
    SHARED,
    FoundCall,
    PreparedStep,
    PreparedTree,
    Recorded,
    call_state,
    lane_of_caller,
)
from autosplit.recordings import Recordings
from autosplit.runtime.lanes.ambient import needs_one_thread
from autosplit.runtime.lanes.lanes import Lane
from autosplit.runtime.lanes.threads import LaneThreads
from autosplit.runtime.loss.proof import Proofs
from autosplit.runtime.lower.once import emit_ending, emit_setup
from autosplit.runtime.lower.program import STATE, emit
from autosplit.runtime.step import engine, middle
from autosplit.runtime.step_log import StepLog
from autosplit.runtime.tree import TreeRun
from autosplit.stream.flight import OpenStream
from autosplit.stream.stream import Streaming
from autosplit.tensor.part import refuse_parts
from autosplit.trace.borrowed.state import RECORDING, eval_mode, random_state
from autosplit.trace.graph import lengths_in
from autosplit.trace.inputs.objects import call_apart, leaves_of, with_counts
from autosplit.trace.recording.recording import FirstCall


@dataclass
class _Core:
    model: nn.Module
    options: Options
    recordings: Recordings
    stream: OpenStream
    """The stream whose minibatches are in flight."""
    compiled: weakref.WeakKeyDictionary[fx.Graph, Any] = field(default_factory=weakref.WeakKeyDictionary)
    edited: weakref.WeakSet[fx.Graph] = field(default_factory=weakref.WeakSet)
    """Programs that were compiled again by the caller."""
    proofs: Proofs = field(default_factory=Proofs)
    threads: LaneThreads | None = None
    own_python: fx.Graph | None = None
    off_tape: tuple[str, ...] = ()
    """The random operations of the kind of call that was prepared last whose numbers are not the plain model's."""
    names: dict[str, str] = field(default_factory=dict)
    stages: tuple[fx.GraphModule, ...] = ()
    """Those of the call that was prepared last."""
    measured: StepTimeline | None = None
    """What the profiled steps found."""
    untraced: Any = None
    """What `torch.compile` calls as it is; None until dynamo is there."""
    twin: Any = None
    """The ``self`` of the model's methods; None until one is asked for."""
    generator: Any = None
    """What generates text; None until some is asked for."""
    decoder: Any = None


class PipelinedModule(Delegating, Training, Decoding, Profiled, Streaming, PlacedModule, fx.GraphModule):
    """A model that runs as a pipeline over several devices; made by :func:`autosplit.autosplit`.

    It shares the model's own tree: parameters, buffers and child modules are the same objects under the same names, so
    ``state_dict()``, optimizers made before the split and ``load_state_dict(assign=True)`` work as with the model. It
    records the model at its first call of each kind (modes, shapes without the batch, dtypes, keywords), plans at the
    very first, and runs a program whose text is :attr:`code`.
    """

    instead: ClassVar[Mapping[str, Callable[..., Any]]] = {"generate": generate}
    _generator: Callable[[Any], Any] = Generator

    _lineno_map = None
    """What torch.compile reads of graph modules: the lines of the program's nodes, which it does not trace."""

    def __init__(self, model: nn.Module, options: Options, plan: Plan | None = None, own_plan: bool = False) -> None:
        if (error := refuse_parts(model)) is not None:
            raise error
        graph = fx.Graph()
        graph.output(graph.call_function(refuse_unplanned))
        super().__init__(nn.Module(), graph, "PipelinedModule")
        self.__dict__.update({name: model.__dict__[name] for name in SHARED if name in model.__dict__})
        self.__dict__["training"] = model.training
        forward_overrides(self, model)
        type(self).forward = forward_like(model)
        recordings = Recordings(model, options, plan, fits=own_plan)
        self.__dict__["_autosplit"] = _Core(model, options, recordings, OpenStream(model))

    # -- what the caller sees ------------------------------------------------------------------------------------
    @property
    def plan(self) -> Plan | None:
        """The plan; None before the first call when no sample was given."""
        return self._core.recordings.plan

    @property
    def stages(self) -> tuple[fx.GraphModule, ...]:
        """The stages of the last call, as GraphModules; empty before the first call and for the module tree."""
        return self._core.stages

    @one_at_a_time
    def prepare(self, sample: Sample) -> None:
        """Record, plan and compile for a kind of call without running it.

        Raises what the recording and the planning raise; the model is then as it was.
        """
        with RECORDING, random_state():
            step = self._prepare(sample.args, sample.kwargs, runs=False)
        if isinstance(step, PreparedTree):
            self._show_tree(step)
        else:
            self._show(self._program(step), self._modules_of(step.recorded))

    @property
    def lane_timeout_s(self) -> float | None:
        """How many seconds one action may run on a lane's thread before the step is given up; None: no limit."""
        return self._core.options.lane_timeout_s

    @lane_timeout_s.setter
    def lane_timeout_s(self, seconds: float | None) -> None:
        self._core.options = replace(self._core.options, lane_timeout_s=check_seconds("lane_timeout_s", seconds))
        if self._core.threads is not None:
            self._core.threads.timeout_s = seconds

    def unsplit(self) -> nn.Module:
        """Return the model itself, and stop the lanes' threads; a later call of the pipe starts new ones."""
        core = self._core
        core.stream.drain()
        if core.threads is not None:
            core.threads.close()
        return core.model

    @one_at_a_time
    def eval_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run forward in eval mode without gradients, and return the model's output for the whole batch.

        The lanes work through forwards only. Every module is in its own mode again at the end, also after an exception.
        """
        with eval_mode(self._core.model, self), torch.no_grad():
            return self(*args, **kwargs)

    def train(self, mode: bool = True) -> PipelinedModule:
        """Set training or eval mode of the pipe and of the model."""
        self._core.model.train(mode)
        self.__dict__["training"] = mode
        return self

    # -- running -------------------------------------------------------------------------------------------------
    @property
    def _core(self) -> _Core:
        return self.__dict__["_autosplit"]

    def recompile(self) -> Any:
        """Compile the program of :attr:`graph`; calls go on choosing the program by their signature."""
        program = fx.GraphModule(nn.Module(), fx.Graph())
        program._graph = self._graph
        code = program.recompile()
        self.__dict__["_code"] = code.src
        core = self.__dict__.get("_autosplit")
        if core is not None:
            if self._graph in core.compiled:
                core.edited.add(self._graph)
            core.compiled[self._graph] = type(program).forward, code.src
        return code

    @one_at_a_time
    def _train_step(
        self, args: Any, kwargs: Any, target: Any, loss_fn: Any, reduction: str, log: StepLog | None = None
    ) -> torch.Tensor:
        self._core.recordings.check_backward()
        engine.check_loss(target, loss_fn, reduction)

        def at_once(call: Callable[[], Any], why: str, lanes: Sequence[Lane] | None = None) -> torch.Tensor:
            """Run a step as one call and one backward."""
            caller = lane_of_caller(leaves_of((args, kwargs)))
            return engine.whole_step(
                call,
                target=target,
                loss_fn=loss_fn,
                lanes=lambda: lanes or (*(self._core.recordings.lanes or (caller,)), caller),
                why=why,
                log=log,
            )

        if self._is_hooked:
            return at_once(lambda: self(*args, **kwargs), "the pipe has hooks, which want its whole output")
        try:
            step = self._prepare(args, kwargs)
        except FirstCall:
            return at_once(lambda: self._core.model(*args, **kwargs), "the call completes the model")
        if isinstance(step, PreparedTree):
            why = "the model runs by its own Python, whose backward is one"
            return at_once(lambda: self._call(step), why, step.lanes)
        if step.recorded.traced.kept:
            why = "the model keeps tensors of the whole batch, which the loss may read"
            return at_once(lambda: self._call(step), why, step.lanes)
        step.log = log
        step.threads = None if needs_one_thread() or (log is not None and log.in_turn) else self._core.threads
        loss = engine.train_step(
            step,
            target=target,
            loss_fn=loss_fn,
            reduction=reduction,
            proofs=self._core.proofs,
            whole=lambda: step.recorded.traced.unflatten(self._run(replace(step, state=step.state.fresh()))),
        )
        self._core.recordings.leave(step, ())
        return loss

    @property
    def _is_hooked(self) -> Any:
        """Whether hooks of the pipe want its whole output."""
        return self._forward_hooks or self._forward_pre_hooks or self._backward_hooks or self._backward_pre_hooks

    @one_at_a_time
    def _dispatch(self, *args: Any, **kwargs: Any) -> Any:
        try:
            step = self._prepare(args, kwargs)
        except FirstCall:  # the model is complete after this call; the next one is planned
            return self._core.model(*args, **kwargs)
        return self._call(step)

    def _call(self, step: PreparedStep | PreparedTree) -> Any:
        """Run a call and leave in Python what the model's own would have left."""
        if isinstance(step, PreparedTree):
            self._show_tree(step)
            return step.call()
        traced, flat = step.recorded.traced, self._run(step)
        self._core.recordings.leave(step, flat[len(flat) - traced.kept :])
        return traced.unflatten(flat)

    def _run(self, step: PreparedStep) -> list[Any]:
        """Run the program of a call and return its flat outputs."""
        graph, modules = self._program(step), self._modules_of(step.recorded)
        self._show(graph, modules)
        step.threads = self._threads(step, graph)
        if step.threads is not None:
            return list(middle.call(step))
        program, edited = self._core.compiled[graph][0], graph in self._core.edited
        modules |= {} if edited else step.codes_by(self._core.names)
        try:
            with step.entered() as handed:
                flat = program(self if edited else SimpleNamespace(**modules), *step.program_inputs())
                handed += flat
        except BaseException as error:
            step.locate(error)
            raise
        return list(flat)

    def _threads(self, step: PreparedStep, graph: fx.Graph) -> LaneThreads | None:
        """Return the lanes' threads for a call, None where the program itself has to run in the caller's thread.

        That is: one microbatch, where nothing overlaps; a program that was edited; and what :func:`needs_one_thread`
        tells.
        """
        alone = len(step.sizes) == 1 or graph in self._core.edited or needs_one_thread()
        return None if alone else self._core.threads

    def _program(self, step: PreparedStep) -> fx.Graph:
        programs, count = step.recorded.programs, len(step.sizes)
        if count not in programs:
            programs[count] = emit(step.recorded.lowered, step.forwards, attributes=self._core.names)
        return programs[count]

    def _show(self, graph: fx.Graph, modules: Mapping[str, Any]) -> None:
        """Make ``graph`` the one that ``.graph`` and ``.code`` show, and ``modules`` what it names."""
        if self._graph is graph:
            return
        self.__dict__.update(modules, _graph=graph)
        if graph in self._core.compiled:
            self.__dict__["_code"] = self._core.compiled[graph][1]
        else:
            graph.owning_module = cast(fx.GraphModule, weakref.proxy(self))  # a dropped pipe ends at once
            self.recompile()

    def _show_tree(self, step: PreparedTree) -> None:
        """Show that the model's own Python runs."""
        core, name = self._core, self._core.names["module_tree"]
        if core.own_python is None:
            graph = core.own_python = fx.Graph()
            args, kwargs = graph.placeholder("*args"), graph.placeholder("**kwargs")
            graph.output(graph.call_module(name, (args, kwargs)))
        self._show(core.own_python, {name: step.tree})

    def _modules_of(self, recorded: Recorded) -> dict[str, nn.Module]:
        """Return what the programs of a recording name: the modules that they call, and the model that they read."""
        return {STATE: recorded.traced.root} | {self._core.names[name]: m for name, m in recorded.parts.items()}

    def _prepare(self, args: Any, kwargs: Any, *, runs: bool = True) -> PreparedStep | PreparedTree:
        core = self._core
        core.stream.drain()
        recorded, key, sample, python, tensors = self._find(args, kwargs)
        if isinstance(recorded, TreeRun):
            core.off_tape, core.stages = (), ()
            lanes, leave = (*core.recordings.lanes, lane_of_caller(tensors)), core.recordings.leave_tree
            return PreparedTree(recorded, args, kwargs, lanes, leave)
        core.off_tape, core.stages = recorded.lowered.off_tape, recorded.lowered.stages
        rows = recorded.kind.rows_in(key)
        sizes = sizes_of(rows, core.options.chunks, recorded.traced.min_rows, like=core.options.microbatches)
        if runs:
            core.recordings.check_norms(recorded.traced, sizes)
        lengths = lengths_in(recorded.traced.lengths, [tensor.shape for tensor in tensors])
        return PreparedStep(
            recorded.lowered,
            partial(emit_setup, recorded.lowered, recorded.parts),
            partial(emit_ending, recorded.lowered, recorded.parts),
            Locate(recorded.lowered, core.recordings.plan, recorded.lanes, sizes),
            tensors,
            rows,
            lengths,
            sizes,
            (*recorded.lanes, lane_of_caller(tensors)),
            call_state(recorded.lowered, core.options, sizes, lengths),
            core.recordings.schedule_for,
            recorded.orders,
            recorded,
            key,
            sample,
            python,
            replicas=recorded.replicas,
        )

    def _find(self, args: Any, kwargs: Any) -> FoundCall:
        """Return the recording of a call."""
        core = self._core
        kwargs = with_counts(kwargs)
        leaves, spec = call_apart(args, kwargs)
        refuse_tracers(leaves)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        key, sample = core.recordings.python.key_of(leaves, spec), Sample(*args, **kwargs)
        recorded, python = core.recordings.find(key, sample)
        self._settle(core.recordings.lanes)
        return FoundCall(recorded, key, sample, python, tensors)

    def _settle(self, lanes: Sequence[Lane]) -> None:
        """Name the program's parts and start the lanes' threads, once the plan says how many there are."""
        core = self._core
        if core.names:
            return
        plan = core.recordings.plan
        assert plan is not None, "lanes come with a plan"
        core.names = free_names(core.model, len(lanes))
        if core.options.lanes == "threads":
            core.threads = LaneThreads(len(plan.devices), timeout_s=core.options.lane_timeout_s)
            weakref.finalize(self, core.threads.close)  # the lanes' threads end with the pipe

    def _of_function(self, function: nn.Module) -> PipelinedModule:
        """Return a pipe, with the plan of this one, of a module with the model's attributes and another forward."""
        core = self._core
        options = replace(core.options, chunks=1, batch_dims=None, lanes="inline")
        pipe = PipelinedModule(function, options)
        pipe._core.recordings.share(core.recordings)
        return pipe

    # -- copies and moves ----------------------------------------------------------------------------------------
    def __deepcopy__(self, memo: dict[int, Any]) -> PipelinedModule:
        kind, (model, *rest) = self.__reduce__()
        twin = kind(copy.deepcopy(model, memo), *rest)
        memo[id(self)] = twin
        return twin

    def __copy__(self) -> PipelinedModule:
        kind, arguments = self.__reduce__()
        return kind(*arguments)

    def __reduce__(self) -> Any:
        core = self._core
        core.stream.drain()
        return PipelinedModule, (core.model, core.options, core.recordings.plan, core.recordings.fits)
