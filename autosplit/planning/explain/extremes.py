"""The plan at the edge of what fits, and the one for the longest sequence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import nn

from autosplit.errors import InputError
from autosplit.planning.explain.changes import Request, least
from autosplit.planning.paper import OnPaper, prepare, with_tokens
from autosplit.planning.plan.plan import Plan
from autosplit.planning.search.sweep import Space
from autosplit.trace.inputs.inputs import tokens_per_row

POSITIONS = ("max_position_embeddings", "n_positions")
"""What configs of transformers call the number of their positions."""
MOST_TOKENS = 2**22
"""Of one row."""
_GUESSES, _GRAINS, _GRAIN = 4, 32, 64
"""How many guesses use the cuts of least memory; the length is found to 1 / _GRAINS, in steps of _GRAIN tokens."""


@dataclass(frozen=True)
class Extreme:
    """The plan at the edge, what it was made for, and what is just beyond: in words."""

    plan: Plan
    paper: OnPaper
    words: str


def largest_sequence(paper: OnPaper, space_of: Callable[[OnPaper], Space]) -> Extreme:
    """Return the plan for the longest rows with which the sample's batch surely fits, to about 3%.

    Every length is recorded anew, and judged by the cut that needs the least. The words say where a config of
    transformers names fewer positions. Where not even 64 tokens fit, it is the plan for these. Raises InputError for a
    sample without a table of tokens, for a forward that reads values, and where no capacity is known.
    """
    planned, rows = tokens_per_row(paper.recorded.trace.inputs), paper.recorded.rows
    if planned is None or paper.by_values:
        why = "no input is a table of integers" if planned is None else "the forward decides by values"
        raise InputError(f"the longest sequence is not known: {why}; plan with samples of several lengths")
    if paper.options.room_bytes(0) is None:
        raise InputError("no capacity is known, so any length fits; give memory_limit=, or devices with a known memory")

    @cache
    def request(tokens: int) -> Request:
        sample = with_tokens(paper.sample, planned, tokens)
        longer = prepare(paper.recorded.model, sample, paper.options, loss_fn=paper.loss_fn)
        return Request(longer, space_of(longer), rows)

    leanest = cache(lambda tokens: request(tokens).search().min_memory_cut())
    near = _near(lambda tokens: 8.0 if (cut := leanest(tokens)) is None else cut.fullest, planned)
    grain = max(_GRAIN, near // _GRAINS // _GRAIN * _GRAIN)

    def is_beyond(each: int) -> bool:
        cut = leanest(each * grain)
        return cut is None or not cut.sure

    high = MOST_TOKENS // grain
    beyond = least(is_beyond, guess=near // grain + 1, low=1, high=high) or high + 1
    most = max(beyond - 1, 1) * grain
    words = f"the longest rows that surely fit, {rows} in a batch, have {most} tokens; of {beyond * grain} no cut does"
    positions = positions_of(paper.recorded.model)
    if positions is not None and positions < most:
        words += f"; the model's config names {positions} positions"
    if beyond == 1:
        words = f"not even rows of {grain} tokens surely fit, {rows} in a batch"
    return Extreme(request(most).plan(), request(most).paper, words)


def positions_of(model: nn.Module) -> int | None:
    """Return how many positions the transformers config of a model names; None where it names none."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    named = (getattr(text, key, None) for key in POSITIONS)
    return next((count for count in named if isinstance(count, int) and count > 0), None)


def _near(fullness: Callable[[int], float], planned: int) -> int:
    """Return about how many tokens fill the fullest device: the secant through lengths that were tried."""
    tried = {planned: fullness(planned)}
    for _ in range(_GUESSES):
        lengths = sorted(tried, key=lambda tokens: abs(tried[tokens] - 1))[:2]
        if len(lengths) == 1:
            tokens = planned * 2 if tried[planned] < 1 else planned // 2
        else:
            slope = (tried[lengths[0]] - tried[lengths[1]]) / (lengths[0] - lengths[1])
            tokens = int(lengths[0] + (1 - tried[lengths[0]]) / slope) if slope > 0 else lengths[0] * 2
        tokens = min(max(tokens, _GRAIN), MOST_TOKENS, 8 * max(tried))
        if any(abs(tokens - known) <= known / _GRAINS for known in tried):
            break
        tried[tokens] = fullness(tokens)
    return min(tried, key=lambda tokens: abs(tried[tokens] - 1))
