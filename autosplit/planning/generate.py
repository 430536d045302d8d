"""Generating text on paper: weights and caches that fit, and how fast prompts are read and tokens are made.

    prefill   all prompts, in groups of rows through the stages           bound by arithmetic
    decode    a token of each row; every group's turn reads the weights   bound by bytes: weights + the group's cache
              and what the cache has of its rows

The batch becomes as many groups as there are stages, so that all of them work. A stage keeps the cache of its layers.
The cut is the decode's, and the prefill is costed with it. Decoding is recorded at one token, without a cache: each
attention reads a buffer in its place that has the cache's bytes. Launches by the host are not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from autosplit.adapters import Adapters
from autosplit.errors import InputError
from autosplit.options import Options, Sample
from autosplit.planning.explain.changes import Request, least
from autosplit.planning.explain.explain import assumed
from autosplit.planning.paper import OnPaper, prepare, search_space
from autosplit.planning.plan.fields import Generation
from autosplit.planning.plan.plan import Plan
from autosplit.planning.search.make import recosted
from autosplit.trace.inputs.objects import mapped, take_apart

_MOST = 2**24
"""No batch and no context is looked for beyond this."""


@dataclass(frozen=True)
class LayerCache:
    """What an attention keeps of each token of a row: elements, of so many last tokens at most (None: of all)."""

    module: str
    token_elements: int
    window: int | None = None

    def elements(self, tokens: int) -> int:
        """Return what a row of so many tokens has."""
        return self.token_elements * min(tokens, self.window or tokens)


def caches_of(model: nn.Module) -> list[LayerCache]:
    """Return the cache of each layer, by the model's config; InputError where that does not say what it keeps."""
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    layers, heads = getattr(config, "num_hidden_layers", 0), getattr(config, "num_attention_heads", 0)
    stack = next((m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == layers > 0), None)
    if stack is None or not heads or getattr(config, "is_encoder_decoder", False):
        raise InputError(
            f"generate=: {type(model).__name__} has no config of a decoder that says its layers and heads "
            "(num_hidden_layers, num_attention_heads), which its cache follows from"
        )
    paths = {id(module): path for path, module in model.named_modules()}
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    key = getattr(config, "qk_nope_head_dim", 0) + getattr(config, "qk_rope_head_dim", 0) or width
    elements = (getattr(config, "num_key_value_heads", None) or heads) * (key + getattr(config, "v_head_dim", width))
    window, kinds = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    found = []
    for index, layer in enumerate(stack):
        attention = next((m for m in layer.modules() if "Attention" in type(m).__name__), None)
        slides = kinds is None or "full" not in kinds[index]
        if attention is not None:
            found.append(LayerCache(paths[id(attention)], elements, window if slides else None))
    return found


class _Cached:
    """An attention that has a cache of the batch, and reads so many elements of it for each of its rows."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the attention's result."""
        result = super().forward(*args, **kwargs)  # type: ignore[misc]
        cache, read = self.autosplit_cache, self.autosplit_read  # type: ignore[attr-defined]
        first, *rest = result if isinstance(result, tuple) else (result,)
        sums = torch.mv(cache.expand(first.shape[0], -1)[:, :read], cache[0, :read])
        first = first + sums.view(-1, *[1] * (first.dim() - 1))
        return (first, *rest) if isinstance(result, tuple) else first


def add_caches(
    model: nn.Module, caches: Sequence[LayerCache], *, rows: int, tokens: int, read: int, group: int
) -> None:
    """Give each attention of a model on meta a cache for so many rows and tokens.

    A ``group`` of rows takes as long as it takes to read ``read`` tokens of each: by a product of a matrix and a
    vector, of which the vector is one more row.
    """
    kinds: dict[type, type] = {}
    dtype = next(parameter.dtype for parameter in model.parameters() if parameter.is_floating_point())
    for each in caches:
        module = model.get_submodule(each.module)
        kind = type(module)
        module.__class__ = kinds.setdefault(kind, type(kind.__name__, (_Cached, kind), {}))
        module.register_buffer(
            "autosplit_cache", torch.empty(1, rows * each.elements(tokens), dtype=dtype, device="meta")
        )
        module.__dict__["autosplit_read"] = each.elements(read) * group // (group + 1)


def generated(
    model: nn.Module, sample: Sample, options: Options, adapters: Adapters | None, *, new: int, chunks: int | str
) -> Plan:
    """Return the plan of reading a sample's prompts, with what ``new`` further tokens of each take (`Generation`).

    The caches have room for all tokens from the beginning, as static ones do; on average a token reads half of the new
    ones. Raises InputError where the sample has no tokens, or the model's config does not say what is cached.
    """
    leaves, _ = take_apart((sample.args, sample.kwargs))
    prompts = next((t for t in leaves if isinstance(t, torch.Tensor) and t.dim() == 2 and t.dtype == torch.int64), None)
    if prompts is None:
        raise InputError("generate=: the sample has no table of tokens; give prompts of one length, a row each")
    rows, length = prompts.shape
    caches, groups = caches_of(model), min(len(options.devices), rows) if chunks == "auto" else options.chunks

    def on_paper(inputs: Sample, read: int) -> OnPaper:
        each: dict[str, Any] = {"rows": rows, "tokens": length + new, "read": read, "group": -(-rows // groups)}
        asked = replace(options, chunks=groups)
        return prepare(
            model,
            inputs,
            asked,
            adapters=adapters or Adapters(None, None),
            then=partial(add_caches, caches=caches, **each),
        )

    turn = on_paper(_one_token(sample, length), length + new // 2)
    decode = Request(turn, search_space(turn.options, rows=rows, free_chunks=False), rows).plan()
    paper = on_paper(sample, 1)
    plan = recosted(paper.recorded, paper.options, decode)
    itemsize = next(p.element_size() for p in paper.recorded.model.parameters() if p.is_floating_point())
    figures = _figures(plan, decode, _by_stage(plan, caches), new=new, prompt=length, itemsize=itemsize)
    return assumed(plan.model_copy(update={"generation": figures}), paper)


def _one_token(sample: Sample, length: int) -> Sample:
    """Return a sample of the first token of each row."""

    def first(leaf: Any) -> Any:
        is_table = isinstance(leaf, torch.Tensor) and leaf.dim() == 2 and leaf.shape[1] == length
        return leaf[:, :1] if is_table else leaf

    args, kwargs = mapped(first, (sample.args, sample.kwargs))
    return Sample(*args, **kwargs)


def _by_stage(plan: Plan, caches: Sequence[LayerCache]) -> list[list[LayerCache]]:
    """Return the caches of each stage: where an attention begins."""
    stages: list[list[LayerCache]] = [[] for _ in plan.stages]
    first: dict[str, int] = {}
    for node, stage in plan.stage_of().items():
        path = node.partition("#")[0]
        first.setdefault(path, stage)
    for each in caches:
        inside = (stage for path, stage in first.items() if f"{path}.".startswith(f"{each.module}."))
        stages[min(inside)].append(each)
    return stages


def _figures(
    plan: Plan, decode: Plan, caches: Sequence[Sequence[LayerCache]], *, new: int, prompt: int, itemsize: int
) -> Generation:
    rows, groups = sum(plan.microbatch_rows), len(plan.microbatch_rows)
    turns = [stage.forward_s for stage in decode.stages]
    through_s = sum(turns) + sum(transfer.forward_s for transfer in decode.transfers)
    issues = [stage.forward_issue_s for stage in decode.stages]

    def held(tokens: int) -> list[int]:
        return [itemsize * sum(each.elements(tokens) for each in stage) for stage in caches]

    def fits(batch: int, length: int) -> bool:
        grown = (batch * length - rows) / (rows * max(prompt - 1, 1))  # a decode has a token of each row, too
        sizes = zip(held(prompt + new), held(length + new), strict=True)
        for stage, other, (before, now) in zip(plan.stages, decode.stages, sizes, strict=True):
            memory, lean = stage.memory, other.memory
            states = memory.parameter_bytes + memory.buffer_bytes
            fixed = lean.transient_bytes + (lean.high_bytes or lean.peak_bytes) - lean.peak_bytes
            moving = max(0, (memory.high_bytes or memory.peak_bytes) - states - fixed)
            needed = states + fixed - rows * before + batch * now + moving * grown
            if memory.capacity_bytes is not None and needed > memory.capacity_bytes - memory.reserve_bytes:
                return False
        return True

    batch = least(lambda count: not fits(count, prompt), guess=rows, low=1, high=_MOST)
    length = least(lambda count: not fits(rows, count), guess=prompt, low=1, high=_MOST)
    return Generation(
        prompt=prompt,
        new=new,
        groups=groups,
        cache_bytes=tuple(rows * each for each in held(prompt + new)),
        decode_s=max(groups * max(turns), through_s),
        issue_s=groups * (max(issues) if plan.processes else sum(issues)),
        largest_batch=None if batch is None else batch - 1,
        largest_prompt=None if length is None else length - 1,
    )
