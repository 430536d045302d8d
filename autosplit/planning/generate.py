"""Generating text on paper: weights and caches that fit, and how fast prompts are read and tokens are made.

    prefill   all prompts, in groups of rows through the stages           bound by arithmetic
    decode    a token of each row; every group's turn reads the weights   bound by bytes: weights + the group's cache
              and its rows' cache, which is copied as it grows

A stage keeps the cache of its layers. What that is says the model: its forward is recorded on meta, with a cache, at a
few lengths, and the sizes of the tensors that come back are read. The cut is the decode's, and the prefill is costed
with it. Decoding is recorded at one token and without a cache: what is read of it is added to the costs.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn
from torch.overrides import TorchFunctionMode

from autosplit.adapters import Adapters
from autosplit.errors import InputError, TraceError
from autosplit.options import Options, Sample
from autosplit.planning.explain.changes import Request, least
from autosplit.planning.explain.explain import assumed
from autosplit.planning.paper import prepare, search_space
from autosplit.planning.plan.fields import Generation
from autosplit.planning.plan.plan import Plan
from autosplit.planning.profiled.problem import RecordedModel
from autosplit.planning.search.make import recosted
from autosplit.profile.node_costs.ledger import Operation
from autosplit.profile.node_costs.work import cost_model_of, work_of
from autosplit.profile.types import Profile, StateProfile
from autosplit.trace.graph import INFO, NodeClass
from autosplit.trace.inputs.inputs import batch_rows, flatten
from autosplit.trace.inputs.objects import leaves_of
from autosplit.trace.ladder import Trace
from autosplit.trace.reads.reads import MetaValueReader
from autosplit.trace.recording.recording import Ref, Unexpected
from autosplit.trace.recording.run import FlatInputs, run_python
from autosplit.trace.scope import Scope
from cost_models.specs import DeviceSpec

_MOST = 2**24
"""No batch and no context is looked for beyond this."""
_SHORT, _LONG = 8, 2**20
"""Tokens at which caches are read, beside the prompt's: what a token adds, and whether a window ends that."""
_LOOPS = 4
"""A recording of so many times the calls of a short one is of a loop over tokens; it is not waited for."""
_ROWS = 2
"""Of such a recording."""


@dataclass(frozen=True)
class CachedTensor:
    """What a module keeps of a row between two calls, in bytes, at a few lengths, as `Prompts.length` has them.

    Attributes:
        first: before the first new token.
        moves: how often a token reads or writes it: 1 where attention reads it, 3 where it is copied to be longer, too.
    """

    module: str
    dtype: torch.dtype
    known: Mapping[int, int]
    first: int = 0
    moves: int = 3

    def bytes(self, length: int) -> int:
        """Return what a row has: it grows with the tokens if it does at all, up to what longer rows have."""
        near, size = min(self.known.items())
        longer = [each for known, each in self.known.items() if known >= length]
        return min([size * length // near if max(self.known.values()) > size else size, *longer])


class Prompts:
    """The prompts of a sample, at any length: of a decoder, or of an encoder with a decoder behind it.

    Attributes:
        rows, tokens: of the table of prompts.
        grows: whether new tokens stand behind the prompts, and not behind what a decoder begins with.
        encoded: whether there is an encoder, of which a decoder keeps what does not grow.
    """

    def __init__(self, model: nn.Module, sample: Sample, batch_dims: Any = None) -> None:
        """Raise InputError for a sample without a table of tokens."""
        self.model, self.batch_dims = model, batch_dims
        kwargs = self._settings(use_cache=False) | sample.kwargs
        if getattr(getattr(model, "config", None), "is_encoder_decoder", False) and "decoder_input_ids" not in kwargs:
            rows = batch_rows(flatten(model, sample, batch_dims))
            kwargs["decoder_input_ids"] = torch.zeros(rows, 1, dtype=torch.int64)
        self.sample = Sample(*sample.args, **kwargs)
        self.flat = flatten(model, self.sample, batch_dims)
        tables = {index: leaf for index in self.flat.tensors() if (leaf := self.flat.leaves[index]).dim() == 2}
        decoder = {index for index in tables if self.flat.names[index].startswith("decoder_")}
        ids = [index for index, leaf in tables.items() if leaf.dtype == torch.int64]
        if not ids:
            raise InputError("generate=: the sample has no table of tokens; give prompts of one length, a row each")
        first = next((index for index in ids if index not in decoder), ids[0])
        self.rows, self.tokens = tables[first].shape
        like = {index for index, leaf in tables.items() if leaf.shape == tables[first].shape}
        self.encoded, self.grows = bool(decoder), first in decoder or not decoder
        self.read, self.made = (decoder or like, decoder or like) if self.grows else (like - decoder, decoder)

    def _settings(self, **asked: bool) -> dict[str, bool]:
        """Return those of the settings that the forward takes."""
        taken = inspect.signature(self.model.forward).parameters
        anything = hasattr(self.model, "generate") and any(each.kind is each.VAR_KEYWORD for each in taken.values())
        return {name: value for name, value in asked.items() if anything or name in taken}

    def length(self, tokens: int, new: int) -> int:
        """Return by what caches are known: a row's tokens and the new ones, but for the last; or an encoder's alone."""
        return tokens + new - 1 if self.grows else tokens

    def _with(self, sizes: Mapping[int, int], **settings: bool) -> Sample:
        pairs = enumerate(self.flat.leaves)
        leaves = [leaf.new_zeros(len(leaf), sizes[n], device="meta") if n in sizes else leaf for n, leaf in pairs]
        args, kwargs = self.flat.rebuild(leaves)
        return Sample(*args, **(kwargs | settings))

    def at(self, tokens: int, new: int) -> FlatInputs:
        """Return inputs with prompts of so many tokens and all that is made behind them but the last token."""
        sizes = {index: self.flat.leaves[index].shape[1] for index in self.made} | dict.fromkeys(self.read, tokens)
        sizes |= {index: sizes[index] + new - 1 for index in self.made}
        sample = self._with(sizes, **self._settings(use_cache=True, return_dict=True))
        return flatten(self.model, sample, self.batch_dims)

    def turn(self) -> Sample:
        """Return a sample of one token of each row."""
        return self._with(dict.fromkeys(self.made, 1))

    def once(self, trace: Trace) -> frozenset[str]:
        """Return the nodes that follow from a prompt and not from the tokens that are made, such as an encoder's."""
        made = {f"input/{self.flat.names[index]}" for index in self.made}
        follows: dict[fx.Node, bool] = {}
        for node in trace.graph.graph.nodes:
            if node.op == "placeholder" and INFO in node.meta:
                follows[node] = node.meta[INFO].name in made
            elif sources := [follows[source] for source in node.all_input_nodes if source in follows]:
                follows[node] = any(sources)
        return frozenset(node.meta[INFO].name for node, new in follows.items() if not new and INFO in node.meta)


class _Counted(TorchFunctionMode):
    """Counts calls, and raises TraceError where there are too many."""

    count, most = 0, math.inf

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        if self.count == self.most + 1:  # once: what cleans up calls, too
            raise TraceError("a loop over tokens")
        return func(*args, **(kwargs or {}))


def caches_of(model: nn.Module, prompts: Prompts, new: int) -> list[CachedTensor]:
    """Return what the modules of a model on meta keep of the tokens of prompts and of ``new`` further ones.

    Raises InputError where nothing comes back that the next call would take, and where no recording follows it.
    """

    def refusal(reason: str) -> InputError:
        words = f"generate=: the cache of {type(model).__name__} cannot be followed: {reason}"
        return InputError(f"{words}; the model's own generate() runs it, on one device or by its device_map")

    counted, made, tokens = _Counted(), 1 if prompts.grows else new, prompts.tokens
    short, full, long = (_SHORT, made), (tokens, new), (_LONG, made)
    runs: dict[tuple[int, int], list[tuple[str, torch.dtype, int]]] = {}
    for asked in dict.fromkeys([short, full, *([] if prompts.grows else [(tokens, 1)]), long, (2 * _SHORT, made)]):
        if asked[0] == 2 * _SHORT and full in runs and long in runs:
            continue
        counted.count = 0
        tables = torch.device("meta") if asked == long else contextlib.nullcontext()  # of positions, some GiB of it
        try:
            with tables:
                runs[asked] = _kept(model, prompts.at(*asked), counted)
        except (TraceError, Unexpected) as error:
            if asked in (short, full) and counted.count <= counted.most:
                raise refusal(str(error)) from error
        counted.most = min(counted.most, _LOOPS * counted.count)
    if not runs[short] or len({len(run) for run in runs.values()}) > 1:
        raise refusal("its forward returns nothing that the next call takes, or not always as much")
    caches = []
    for index, (module, dtype, _) in enumerate(runs[short]):
        known = {prompts.length(*at): run[index][2] for at, run in runs.items() if prompts.grows or at[1] == new}
        cache = CachedTensor(module, dtype, known)
        last = cache.bytes(prompts.length(tokens, new))
        first = runs[tokens, 1][index][2] if (tokens, 1) in runs else cache.bytes(prompts.length(tokens, 1))
        caches.append(replace(cache, first=first, moves=1 if prompts.encoded and first == last else 3))
    return caches


def _kept(model: nn.Module, flat: FlatInputs, counted: _Counted) -> list[tuple[str, torch.dtype, int]]:
    """Return the tensors that a forward keeps for the next: the modules that make them, and the bytes of a row.

    They come back under the name of an input, or stay in the modules.
    """
    inputs = {flat.names[index]: flat.leaves[index] for index in flat.tensors()}
    reader = MetaValueReader(model, inputs)
    with counted:
        recording = run_python(model, flat, rows=_ROWS, scope=Scope(), reader=reader).recording
    output, returned = recording.output, len(recording.output) - recording.kept
    value = recording.unflatten(range(returned))
    asked = [each for each in model.modules() if each is model or hasattr(each, "generate")]
    taken = [name for each in asked for name in inspect.signature(each.forward).parameters]
    back = [value[name] for name in value if name in taken] if isinstance(value, Mapping) else []
    left = range(returned, len(output)) if back or not hasattr(model, "generate") else ()
    refs = [ref.index for place in (*leaves_of(back), *left) if isinstance(ref := output[place], Ref)]
    calls = [call for index in dict.fromkeys(refs) if (call := recording.calls[index]).shapes[0]]
    return [
        (call.module, dtype := call.dtypes[0], math.prod(call.shapes[0]) * dtype.itemsize // _ROWS) for call in calls
    ]


class _WithCaches(RecordedModel):
    """A recording whose modules have caches of all rows; a token reads and writes them, with half of the new ones.

    Attributes:
        homes: of each cache the node that it lies with.
        once: the nodes that take no time for a token; None where prompts are read.
    """

    def __init__(
        self, recorded: RecordedModel, caches: Sequence[CachedTensor], prompts: Prompts, new: int, once: Any = None
    ) -> None:
        super().__init__(recorded.model, recorded.trace)
        self.caches, self.full, self.all_rows = caches, prompts.length(prompts.tokens, new), prompts.rows
        nodes = [info.name for _, info in self.trace.graph.compute_nodes() if info.node_class is NodeClass.MICRO]
        first = {path: name for name in reversed(nodes) for path in _upwards(name.partition("#")[0])}
        self.homes = [next(first[path] for path in _upwards(each.module) if path in first) for each in caches]
        self.once = once

    def _profiled(self, options: Options, sizes: tuple[int, ...], device: DeviceSpec | str) -> Profile:
        costs = super()._profiled(options, sizes, device)
        once, model = self.once or (), cost_model_of(device)
        nodes = {
            name: replace(node, forward_operations=(), forward_s=0.0, output_bytes=0) if name in once else node
            for name, node in costs.nodes.items()
        }
        state = dict(costs.state)
        for number, (cache, home) in enumerate(zip(self.caches, self.homes, strict=True)):
            name, held = f"{cache.module}.cache_{number}", self.all_rows * cache.bytes(self.full)
            state[name] = StateProfile(name, held // cache.dtype.itemsize, held, False, False, (home,))
            if self.once is not None:
                count = sizes[0] * cache.moves * (cache.first + cache.bytes(self.full)) // 2
                moved, node = Operation("cat", 0, count, cache.dtype), nodes[home]
                operations = (*node.forward_operations, moved)
                time_s = node.forward_s + model.seconds(work_of(moved))
                nodes[home] = replace(node, forward_operations=operations, forward_s=time_s)
        return replace(costs, nodes=nodes, state=state)


def _upwards(path: str) -> Iterator[str]:
    """Yield the path of a module, and those of the modules around it, the root's last."""
    while path:
        yield path
        path = path.rpartition(".")[0]
    yield ""


def generated(
    model: nn.Module, sample: Sample, options: Options, adapters: Adapters | None, *, new: int, chunks: int | str
) -> Plan:
    """Return the plan of reading a sample's prompts, with what ``new`` further tokens of each take (`Generation`).

    The caches have room for all tokens from the beginning; on average a token reads half of the new ones. Raises
    InputError where the sample has no tokens, or the model's cache cannot be followed.
    """
    prompts = Prompts(model, sample, options.batch_dims)
    groups = min(len(options.devices), prompts.rows) if chunks == "auto" else options.chunks
    options = replace(options, chunks=groups)
    adapters = adapters or Adapters(None, None)  # nothing is trained
    turn, paper = (prepare(model, each, options, adapters=adapters) for each in (prompts.turn(), prompts.sample))
    caches = caches_of(turn.recorded.model, prompts, new)
    decoding = _WithCaches(turn.recorded, caches, prompts, new, prompts.once(turn.recorded.trace))
    space = search_space(turn.options, rows=prompts.rows, free_chunks=False)
    decode = Request(replace(turn, recorded=decoding), space, prompts.rows).plan()
    plan = recosted(_WithCaches(paper.recorded, caches, prompts, new), paper.options, decode)
    figures = _figures(plan, decode, decoding, turn.options, prompts, new=new)
    return assumed(plan.model_copy(update={"generation": figures}), paper)


def _pace(plan: Plan) -> float:
    """Return the seconds from one token of all rows to the next: a stage has all groups, a group has all stages."""
    turns = [stage.forward_s for stage in plan.stages]
    through_s = sum(turns) + sum(transfer.forward_s for transfer in plan.transfers)
    return max(len(plan.microbatch_rows) * max(turns), through_s)


def _figures(
    plan: Plan, decode: Plan, decoding: _WithCaches, options: Options, prompts: Prompts, *, new: int
) -> Generation:
    rows, groups, stage_of = prompts.rows, len(decode.microbatch_rows), decode.stage_of()
    stages: list[list[CachedTensor]] = [[] for _ in decode.stages]
    for cache, home in zip(decoding.caches, decoding.homes, strict=True):
        stages[stage_of[home]].append(cache)
    issues = [stage.forward_issue_s for stage in decode.stages]

    def in_groups(count: int) -> Plan:
        if count == groups:
            return decode
        return recosted(decoding, replace(options, chunks=count), decode.model_copy(update={"chunks": count}))

    def held(tokens: int) -> list[int]:
        return [sum(each.bytes(prompts.length(tokens, new)) for each in stage) for stage in stages]

    def fits(batch: int, tokens: int) -> bool:
        grown = (batch * tokens - rows) / (rows * max(prompts.tokens - 1, 1))  # a decode has a token of each row, too
        sizes = zip(held(prompts.tokens), held(tokens), stages, strict=True)
        for stage, other, (before, now, caches) in zip(plan.stages, decode.stages, sizes, strict=True):
            memory, lean = stage.memory, other.memory
            states = memory.parameter_bytes + memory.buffer_bytes
            fixed = lean.transient_bytes + (lean.high_bytes or lean.peak_bytes) - lean.peak_bytes
            moving = max(0, (memory.high_bytes or memory.peak_bytes) - states - fixed)
            longest = max((each.bytes(prompts.length(tokens, new)) for each in caches if each.moves > 1), default=0)
            copies = 2 * longest * -(-batch // groups)  # keys and values, where a token makes them longer
            needed = states - rows * before + batch * now + fixed + max(moving * grown, copies)
            if memory.capacity_bytes is not None and needed > memory.capacity_bytes - memory.reserve_bytes:
                return False
        return True

    batch = least(lambda count: not fits(count, prompts.tokens), guess=rows, low=1, high=_MOST)
    length = least(lambda count: not fits(rows, count), guess=prompts.tokens, low=1, high=_MOST)
    return Generation(
        prompt=prompts.tokens,
        new=new,
        groups=groups,
        cache_bytes=tuple(rows * each for each in held(prompts.tokens)),
        decode_s=_pace(decode),
        throughput_s=_pace(in_groups(min(len(decode.stages), rows) if groups == 1 else groups)),
        latency_s=_pace(in_groups(1)),
        issue_s=groups * (max(issues) if plan.processes else sum(issues)),
        largest_batch=None if batch is None else batch - 1,
        largest_prompt=None if length is None else length - 1,
    )
