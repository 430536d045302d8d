"""transformers' ``generate`` on groups of rows, each in a thread, with the result of the call on the whole batch."""

from __future__ import annotations

import contextlib
import copy
import inspect
import logging
import queue
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from autosplit.delegation import INSIDE
from autosplit.generation.noise import GroupMode, SharedNoise, WholeBatch
from autosplit.runtime.lanes.ambient import ThreadState, needs_one_thread, watched
from autosplit.trace.inputs.objects import leaves_of, take_apart

_CALLERS = """logits_processor stopping_criteria prefix_allowed_tokens_fn synced_gpus assistant_model streamer
    negative_prompt_ids custom_generate trust_remote_code""".split()
_OPTIONS = """return_dict_in_generate max_time stop_strings token_healing prompt_lookup_num_tokens
    assistant_early_exit use_mtp""".split()
_LOOPS = ("generate", "_sample", "_beam_search")
_PROMPTS = ("inputs", "input_ids", "inputs_embeds", "encoder_outputs")
_GROUP: ContextVar[int] = ContextVar("group")


def generate(facade: Any, groups: int, args: tuple, kwargs: dict, *, notes: Callable[[str], None]) -> Any:
    """Return what ``generate`` of the facade's class returns; rows run in so many groups where that is the same.

    ``notes`` is called with the reason where it may not be. What runs in a group may raise
    :class:`~autosplit.generation.noise.WholeBatch`: then all rows run again, as a single group.
    """
    if groups > 1:
        try:
            sizes, calls, padding = _split(facade, groups, args, kwargs)
            results = run_groups(facade, sizes, calls)
            longest = max(result.shape[1] for result in results)
            return torch.cat([F.pad(result, (0, longest - result.shape[1]), value=padding) for result in results])
        except WholeBatch as reason:
            notes(str(reason))
    return type(facade).generate(facade, *args, **kwargs)


def _split(facade: Any, groups: int, args: tuple, kwargs: dict) -> tuple[list[int], list[dict[str, Any]], int]:
    """Return the rows of each group, their arguments, and the token behind rows that have ended."""
    from transformers import GenerationMixin

    if any(getattr(type(facade), name) is not vars(GenerationMixin)[name] for name in _LOOPS):
        raise WholeBatch(f"{type(facade).__name__} generates in its own way")
    named = inspect.signature(type(facade).generate).bind(facade, *args, **kwargs).arguments
    more = named.pop("kwargs", {})
    del named["self"]
    config, unused = facade._prepare_generation_config(named.get("generation_config"), **more)
    named |= more
    prompts = leaves_of([named.get(name) for name in (*_PROMPTS, facade.main_input_name)])
    shape = next((leaf.shape for leaf in prompts if isinstance(leaf, Tensor)), torch.Size([1]))
    for reason, holds in _reasons(facade, named, config, shape).items():
        if isinstance(holds, Tensor) or holds:
            raise WholeBatch(reason)
    sizes = rows_of_groups(shape[0], groups)
    count = len(sizes)
    inputs = {name: named[name] for name in named if name in unused or name == "inputs"}
    shares = {name: _shares(name, value, sizes, facade.main_input_name) for name, value in inputs.items()}
    calls = [named | {name: share[group] for name, share in shares.items()} for group in range(count)]
    tokens = [token for token in (config.pad_token_id, config.eos_token_id) if token is not None] or [0]
    tokens = [int(torch.as_tensor(token).flatten()[0]) for token in tokens]
    # Beam search takes a padding token of 0 for none.
    return sizes, calls, tokens[0] if (config.num_beams or 1) == 1 else next(filter(None, tokens), 0)


def _shares(name: str, value: Any, sizes: Sequence[int], main: str) -> Sequence[Any]:
    """Return the rows of an input for each group."""
    if name == "encoder_outputs" and value is not None:
        leaves, structure = take_apart(value)
        shares = [_shares(main, leaf, sizes, main) for leaf in leaves]
        return [structure([share[group] for share in shares]) for group in range(len(sizes))]
    if isinstance(value, Tensor) and (name in ("inputs", main) or name.endswith(("_ids", "_mask", "_embeds"))):
        dim = int(name == "position_ids" and value.dim() == 3)
        if value.dim() > dim and value.shape[dim] == sum(sizes):
            return value.split(list(sizes), dim)
    elif value is None or isinstance(value, (bool, int, float, str)):
        return [value] * len(sizes)
    raise WholeBatch(f"{name} is not known to follow the rows")


def rows_of_groups(rows: int, groups: int) -> list[int]:
    """Return the rows of each group: as alike as can be, and none without a row."""
    count = max(1, min(groups, rows))
    return [rows // count + (group < rows % count) for group in range(count)]


def _reasons(facade: Any, named: dict[str, Any], config: Any, shape: Sequence[int]) -> dict[str, Any]:
    """Return why what happens to a row may depend on other rows, and whether that is so."""
    text = facade.config.get_text_config(decoder=True)
    rope = getattr(text, "rope_parameters", None) or {}
    limits = [
        entry.get("original_max_position_embeddings", text.max_position_embeddings)
        for entry in (rope, *rope.values())
        if isinstance(entry, dict) and any(word in str(entry.get("rope_type")) for word in ("dynamic", "longrope"))
    ]
    longest = sum(shape[1:2]) + (config.max_new_tokens or config.max_length or 20)
    mixed = facade.input_modalities not in ("text", ("text",)) and text is not facade.config
    return {
        "the batch has a single row": shape[0] < 2,
        "a mode or hook of the caller's sees every operation": watched() or needs_one_thread(),
        "its kind of cache is for all rows": config.cache_implementation in ("paged", "quantized"),
        "decoder_start_token_id has a token for each row": isinstance(config.decoder_start_token_id, (list, Tensor)),
        "its images or sounds stand between tokens": mixed and facade.main_input_name == "input_ids",
        "its rotary frequencies follow the longest row": any(longest > limit for limit in limits),
        **{f"{name} may look at all rows": named.get(name) for name in _CALLERS},
        **{f"{name} is for all rows": getattr(config, name, None) for name in _OPTIONS},
    }


def run_groups(facade: Any, sizes: Sequence[int], calls: Sequence[dict[str, Any]]) -> list[Tensor]:
    """Return what each group's call returns; each runs in a thread, on a copy of what ``generate`` writes to."""
    noise, state = SharedNoise(sizes), ThreadState.current()
    stream = None if facade.device.type in ("cpu", "meta") else torch.accelerator.current_stream()
    ended: queue.SimpleQueue[int] = queue.SimpleQueue()
    results: list[Any] = [None] * len(sizes)

    def follow(group: int) -> None:
        error = None
        INSIDE.add(threading.get_ident())
        try:
            if stream is not None:
                torch.accelerator.set_stream(stream)
            mine, context = copy.copy(facade), state.context.copy()
            # The experts are the same objects for all groups, so none may switch them to another implementation.
            mine._optimize_model_for_decode = contextlib.nullcontext
            context.run(_GROUP.set, group)
            with state.entered(), GroupMode(noise, group):
                results[group] = context.run(type(facade).generate, mine, **calls[group])
        except BaseException as raised:
            error = raised
        INSIDE.discard(threading.get_ident())
        noise.end(group, error)
        ended.put(group)

    threads = [threading.Thread(target=follow, args=(group,), daemon=True) for group in range(len(sizes))]
    try:
        with _without_repeats():
            for thread in threads:
                thread.start()
            for _ in threads:
                ended.get()
    except BaseException as error:
        noise.end(0, error)
        raise
    finally:
        for thread in threads:
            if thread.ident is not None:
                thread.join()
    noise.settle()
    return results


@contextlib.contextmanager
def _without_repeats() -> Iterator[None]:
    """Pass on what transformers logs or warns of in a group only where no other group has."""
    before: dict[str, int] = {}
    show = warnings.showwarning

    def is_new(message: Any) -> bool:
        group = _GROUP.get(None)
        return group is None or before.setdefault(str(message), group) == group

    def keep(record: logging.LogRecord) -> bool:
        return is_new(record.getMessage())

    handlers = [*logging.getLogger("transformers").handlers, *logging.getLogger().handlers]
    warnings.showwarning = lambda message, *rest: show(message, *rest) if is_new(message) else None
    for handler in handlers:
        handler.addFilter(keep)
    try:
        yield
    finally:
        warnings.showwarning = show
        for handler in handlers:
            handler.removeFilter(keep)
