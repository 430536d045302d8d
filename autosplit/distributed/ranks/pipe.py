"""The pipe of one rank: ``autosplit(model, devices="torchrun", sample=x)`` in every process of torchrun.

    every rank   the call's facts ─► do they agree? ─► rank 0 records a new kind of call, the others follow it
                 ─► the last stage's rank says how the loss adds up ─► own actions, with messages ─► one loss for all

What one rank refuses, all refuse, with the same error, before the first message.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any, ClassVar, cast

import torch
from torch import fx, nn
from torch.distributed.tensor import DTensor

from autosplit.backward import leaves_under
from autosplit.delegation import one_at_a_time
from autosplit.distributed.facts import pipe_facts
from autosplit.distributed.feed import bring, like_first, takers_of
from autosplit.distributed.ranks.agreement import Agreement
from autosplit.distributed.ranks.call import WholeCall
from autosplit.distributed.ranks.loss import Elsewhere, RankLoss, Word
from autosplit.distributed.ranks.parallelize import Parallelize, check_plain
from autosplit.distributed.ranks.prepared import PreparedRankStep, is_checked
from autosplit.distributed.ranks.recordings import RankRecordings
from autosplit.distributed.ranks.saving import save_pretrained
from autosplit.distributed.ranks.shards import GradientNorms
from autosplit.distributed.ranks.state import RankState
from autosplit.distributed.ranks.stream import RankStreaming
from autosplit.distributed.ranks.tensors import check_columns
from autosplit.distributed.replicas import Share
from autosplit.distributed.step import seconds_of
from autosplit.distributed.world import World, attempt
from autosplit.errors import InputError, TraceError, known_to_all
from autosplit.options import Options, Sample
from autosplit.pipelined import PipelinedModule
from autosplit.planning.plan.plan import Plan
from autosplit.recorded import FoundCall, PreparedStep, PreparedTree
from autosplit.runtime.loss.outputs import Outputs
from autosplit.runtime.lower.split import named_state
from autosplit.runtime.step import engine, train_cells
from autosplit.runtime.tape import Tape
from autosplit.tensor.part import PARTS, refuse_parts
from autosplit.trace.borrowed.state import random_state
from autosplit.trace.graph import INFO
from autosplit.trace.inputs.objects import mapped, tensors_in


class RankPipe(RankState, RankStreaming, PipelinedModule):
    """A pipe of which this process runs some stages; see :class:`autosplit.pipelined.PipelinedModule`.

    Every rank makes the same calls. :meth:`train_step` returns the same loss on every rank. ``state_dict()``,
    ``parameters()`` and the other iterators have what belongs to this rank, under the model's own names.
    """

    def __init__(
        self,
        model: nn.Module,
        options: Options,
        plan: Plan | None,
        world: World,
        *,
        feed: str = "all",
        outputs: str = "last",
        weights: Any = None,
        parallelize: Parallelize | None = None,
        reduce_dtype: torch.dtype | None = None,
        timeout: Any = None,
        check_inputs: int | None = None,
        own_plan: bool = False,
    ) -> None:
        """``parallelize`` wraps this rank's part of the model; None: it stays as it is."""
        ways: dict[str, Any] = {
            "feed": feed,
            "outputs": outputs,
            "parallelize": parallelize.name if parallelize else "",
        }
        _, error = attempt(lambda: check_plain(model))
        timeout_s, wrong = attempt(lambda: seconds_of(timeout, world.device))
        agreement, unlike = attempt(lambda: Agreement(world, model, feed, check_inputs))
        columns = check_columns(world.tensor_ranks, feed=feed, parallelize=parallelize)
        error = error or wrong or unlike or refuse_parts(model) or columns
        ways |= {"timeout": timeout_s, "check_inputs": check_inputs, "reduce_dtype": reduce_dtype}
        world.agree("makes a pipe", {} if error else pipe_facts(model, options, plan, **ways), error)
        super().__init__(model, options, plan, own_plan)
        self._core.recordings = RankRecordings(model, options, plan, world, fits=own_plan, weights=weights)
        self._core.recordings.parallelize = parallelize
        self.__dict__.update(
            _world=world,
            _feed=feed,
            _outputs=outputs,
            _reduce_dtype=reduce_dtype,
            _timeout_s=timeout_s,
            _agreement=agreement,
            _norms=GradientNorms(world),
        )

    refused: ClassVar[Mapping[str, str]] = {
        **PipelinedModule.refused,
        "state_dict": "a method of the model asks for its whole state, and this process has a part; save with "
        "autosplit.distributed.checkpoint, or call it of the model that pipe.unsplit() gives on every rank",
    }

    instead: ClassVar[Mapping[str, Callable[..., Any]]] = {
        **PipelinedModule.instead,
        "save_pretrained": save_pretrained,
    }

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> Any:
        """What DistributedDataParallel asks a module for before it gives every rank the values of rank 0."""
        raise InputError("DistributedDataParallel wraps copies of one model, and every rank has other parameters here")

    @property
    def _devices(self) -> list[torch.device]:
        return [self._world.device]

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Clip the gradients of all ranks by their norm, as ``torch.nn.utils.clip_grad_norm_`` does; return that."""
        parameters = {n: p for n, p in self.named_parameters() if p.grad is not None}
        total = self._norms.total((n for n, _ in self._core.model.named_parameters()), parameters, norm_type)
        if error_if_nonfinite and not bool(total.isfinite()):
            raise RuntimeError(f"the total norm of order {norm_type} of the gradients is {total.item()}, no number")
        for shards in (True, False):  # which torch's loops over many tensors do not mix
            mine = [parameter for parameter in parameters.values() if isinstance(parameter, DTensor) is shards]
            torch.nn.utils.clip_grads_with_norm_(mine, max_norm, total)
        return total

    def unsplit(self) -> nn.Module:
        """Return the model itself, with the values of all ranks; every rank calls it.

        Raises InputError where the model was built on meta and has values in part.
        """
        self._core.stream.drain()
        error = None
        if any(tensor.is_meta for _, tensor in named_state(self._core.model)):
            error = InputError(
                "the model was built on meta, and every rank has memory for its part; save it with "
                "autosplit.distributed.checkpoint, and restore into a model that has values"
            )
        self._world.agree("takes the model back", {}, error)
        self._agreement.check_copies(self._own_state())
        self._recordings.unwrap()
        self._recordings.share_values()
        self._recordings.guard.end()
        return super().unsplit()

    def __reduce__(self) -> Any:
        raise InputError(
            f"rank {self._world.number} holds a part of the model, and a copy of its pipe would be one of one process; "
            "copy or save pipe.state_dict() (autosplit.distributed.checkpoint for a training)"
        )

    # -- running -------------------------------------------------------------------------------------------------
    def _find(self, args: Any, kwargs: Any) -> FoundCall:
        with self._recordings.guard.opened():
            return super()._find(args, kwargs)

    @one_at_a_time
    def prepare(self, sample: Sample) -> None:
        """Record and plan; this rank's parameters are known, and have values, from then on.

        A sample may be on meta: then nothing is measured.
        """

        def prepared() -> PreparedRankStep:
            inputs = (sample.args, sample.kwargs)
            if any(tensor.is_meta for tensor in tensors_in(inputs)):
                self._recordings.sample = sample
                inputs = mapped(_on_cpu, inputs)
            step = self._on_rank(self._prepare(*inputs, runs=False))
            if self._world.tensor_ranks > 1:  # parts are another kind of call, which a replica without rows finds too
                step = self._on_rank(self._prepare(*inputs, runs=False))
            self._recordings.wrap()
            self._recordings.check_wrapped(step)
            return step

        with self._recordings.preparing(), random_state():
            step, error = attempt(prepared)
            self._recordings.sample = None
            if error is not None and known_to_all(error):
                raise error
            self._world.agree("has prepared a call", {}, error)
            assert step is not None
            self._show(self._program(step), self._modules_of(step.recorded))

    def _agreed(
        self,
        doing: str,
        args: Any,
        kwargs: Any,
        loss: RankLoss | None = None,
        say: Callable[[PreparedRankStep], Any] = lambda step: None,
    ) -> tuple[PreparedRankStep, list[Any]]:
        """Return the step and what each rank says of it; raise on every rank where one cannot, or where they differ."""
        self._check_alone()
        recordings, alone, first = self._recordings, self._feed != "all", self._recordings.ranks[0][0]
        if alone:
            args, kwargs = like_first(self._world, doing, first, args, kwargs)
        unseen = alone and not recordings.reads_no_values(args, kwargs)
        if unseen:
            tensors = tensors_in((args, kwargs))
            bring(self._world, first, tensors, {index: set(range(self._world.size)) for index in range(len(tensors))})

        step, error = attempt(lambda: self._on_rank(self._prepare(args, kwargs), doing, loss))
        if error is not None and known_to_all(error):
            raise error
        word = None
        if step is not None:
            word, error = attempt(lambda: say(step))
        if step is None or error is not None or not self._agreement.stands(doing, step, word):
            facts, of_replica = ({}, {}) if step is None else self._agreement.facts(step, args, kwargs, loss)
            share = step and Share(step.rows, len(step.sizes) if step.rows else 0, step.agreed.number, word)
            shares = self._world.agree(doing, facts, error, share, replica_facts=of_replica)
            assert step is not None
            self._agreement.keep(step.agreed, shares)
        if self._world.replicas > 1:
            step = step.among(step.agreed.shares)
            step.check_empty(changes_python=step.recorded.changes_python)
        if self._core.model.training or torch.is_grad_enabled():
            recordings.trains()
        if alone and not unseen:
            bring(self._world, first, step.tensors, takers_of(step, step.ranks))
        return step, [share.word for share in step.agreed.shares]

    def _on_rank(
        self, step: PreparedStep | PreparedTree, doing: str = "", loss: RankLoss | None = None
    ) -> PreparedRankStep:
        if self.graph in self._core.edited:
            raise InputError("its graph was edited, and ranks run the cells of the plan; this needs one process")
        assert isinstance(step, PreparedStep), "what runs by its own Python is refused when it is recorded"
        if held := [n.target for n in step.lowered.outputs if isinstance(n, fx.Node) and n.op == "get_attr"]:
            raise TraceError(f"the model returns its own {held[0]!r}, which one rank alone holds; use one process")
        if step.recorded.traced.kept:
            raise TraceError("the model keeps tensors of the whole batch for Python to read; this needs one process")
        self._recordings.check_reads(step.recorded)
        self._recordings.check_fresh()
        self._recordings.check_wrapped(step)
        wanting = next((t for t in step.tensors if t.requires_grad), None)
        if wanting is not None and torch.is_grad_enabled():
            raise InputError(
                f"an input of shape {list(wanting.shape)} requires a gradient; ranks give gradients to parameters only"
            )
        agreed, part = self._agreement.known(doing, step, loss), self._recordings.part
        checked, units = is_checked(agreed.calls), part.units if part is not None else None
        rank_step = PreparedRankStep(
            **vars(step),
            world=self._world,
            ranks=self._recordings.ranks,
            parallel=self._planned().parallel,
            group=self._recordings.group,
            timeout_s=self._timeout_s,
            trained=lambda: [t for t in (*self.parameters(), *self.buffers()) if t.requires_grad],
            messages=agreed.messages,
            outcomes=agreed.outcomes,
            agreed=agreed,
            elsewhere=cache(self._elsewhere) if checked or units is not None else None,
            part=part,
            units=units,
            scaled=agreed.scaled and not checked,
        )
        single = max(map(len, rank_step.ranks)) == self._world.replicas == 1
        rank_step.state = replace(step.state, whole=step.state.whole and single)
        rank_step.reduce_dtype = self._reduce_dtype
        if (tape := step.state.tape) is not None:
            layout, stages = step.lowered.layout, rank_step.stages
            here = {n.meta[INFO].name for s in stages for p in (layout.stages, layout.prologues) for n in p[s].nodes}
            here |= {n.meta[INFO].name for n in layout.epilogue} if self._world.rank == rank_step.last else set()
            rank_step.state = replace(rank_step.state, tape=Tape(tape.nodes, step.sizes, step.lengths, here=here))
        return rank_step

    def _elsewhere(self) -> dict[int, str]:
        """Return the names of parameters that other ranks have, all or a part or at times, by their identity."""
        named, part = self._core.model.named_parameters(remove_duplicate=False), self._recordings.part
        every = part is not None and part.units is not None
        return {id(p): name for name, p in named if every or p in PARTS or not self._recordings.is_own(name)}

    @one_at_a_time
    def _dispatch(self, *args: Any, **kwargs: Any) -> Any:
        step, _ = self._agreed("calls the pipe", args, kwargs, say=self._check_rows_apart)
        every, replicas = self._outputs == "all", self._world.replicas
        if not step.rows:
            with step.running():
                step.stand_by_forward()
            return Outputs(step).stand_in(zeros=True) if every or self._world.rank == step.last else None
        with torch.set_grad_enabled(torch.is_grad_enabled() and every and replicas == 1), step.running():
            call = WholeCall(step)
            flat = call.forward(attached=True)
            if every:
                flat = call.everywhere(flat)
        self._core.recordings.leave(step, ())
        return None if flat is None else step.recorded.traced.unflatten(flat)

    def _check_rows_apart(self, step: PreparedRankStep) -> None:
        """Raise InputError if an operation mixes rows of several replicas, or reads shards when the call is over."""
        names = {name for node in step.lowered.layout.epilogue for name in node.meta[INFO].reads}
        sharded = next((n for n, _ in self._core.model.named_parameters() if n in names), None)
        if sharded and step.part is not None and self._outputs == "all" and torch.is_grad_enabled():
            raise InputError(
                f"{sharded!r} is used behind all microbatches, in the part of a call that the caller differentiates, "
                "and parallelize= has it whole inside of the call only; train by train_step, or leave parallelize= out"
            )
        if self._world.replicas > 1 and step.lowered.epilogue is not None:
            mixing = step.lowered.layout.epilogue[0].meta[INFO].name
            raise InputError(
                f"{mixing} mixes the rows of the batch, and replicas have parts of it; leave it out of the model (a "
                "loss goes into loss_fn), or use one replica"
            )

    def _train_microbatches(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse microbatches that the caller cut."""
        raise InputError(
            "microbatches= runs in one process; on ranks give train_step one batch, padded where lengths differ, which "
            "it cuts into chunks= microbatches, or one microbatch at a time"
        )

    @one_at_a_time
    def _train_step(
        self, args: Any, kwargs: Any, target: Any, loss_fn: Any, reduction: str, log: Any = None
    ) -> torch.Tensor:
        loss = RankLoss(target, loss_fn, reduction, self._core.proofs)

        def checked(step: PreparedRankStep) -> Word | None:
            self._core.recordings.check_backward()
            if self._is_hooked:
                raise InputError(
                    "the pipe has hooks, which want the batch and its output in one process; call the pipe with "
                    "outputs='all', or put the hooks on modules of the model, which run where their stage does"
                )
            if self._feed == "all" or self._world.rank == step.last:
                engine.check_loss(target, loss_fn, reduction)
            return loss.find(step) if self._feed == "all" else None

        step, words = self._agreed("takes a step", args, kwargs, loss, checked)
        self._agreement.steps(self._own_state())
        step.log = log
        with step.running():
            word = loss.agree(step, words if self._feed == "all" else None)
            step.loss = word and (word.kind, word.wants)
            if word is None:
                value = step.stand_by()
            elif word.in_cells:
                cell_loss, check = loss.found or (cast(train_cells.Loss, Elsewhere(word.wants)), None)
                value = train_cells.run(step, cell_loss, check).outcome
                step.finish()
            else:
                step.log = None  # the step has no actions, as in one process
                if log is not None:
                    log.start(step.lanes, whole=engine.why_whole(step))
                value = self._whole(step, target=target, loss_fn=loss_fn)
                if log is not None:
                    log.finish(value)
            if step.scaled:
                step.share_overflow()
        step.agreed.scaled = step.scaled
        self._core.recordings.leave(step, ())
        return value

    def _whole(self, step: PreparedRankStep, *, target: Any, loss_fn: Any) -> torch.Tensor:
        """Run a step whose loss wants the whole batch at once."""
        with torch.inference_mode(False), torch.enable_grad():
            call = WholeCall(step)
            flat = call.forward()

            def loss() -> torch.Tensor:
                with step.losing():
                    output = step.recorded.traced.unflatten(flat or [])
                    value = engine.loss_of_whole(output, target, loss_fn, step.lanes)
                step.check_free([leaf for leaf in leaves_under(value) if id(leaf) not in call.leaves])
                if not value.requires_grad:
                    raise RuntimeError("the loss does not depend on any parameter that requires a gradient")
                return value

            value: torch.Tensor = step.outcome(loss)
            if flat is not None:
                with step.adding_gradients():  # to shards of what comes behind the last cell
                    value.backward()
            call.backward()
        return value.detach()


def _on_cpu(leaf: Any) -> Any:
    """Return zeros on the CPU for a tensor on meta."""
    if isinstance(leaf, torch.Tensor) and leaf.is_meta:
        return torch.zeros_like(leaf, device="cpu").requires_grad_(leaf.requires_grad)
    return leaf
