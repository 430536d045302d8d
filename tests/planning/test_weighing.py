"""Cuts of all configurations: which of them are moved, and when."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import nn

from autosplit.options import Options, Sample
from autosplit.planning.choose import Space
from autosplit.planning.sweep import Sweep
from autosplit.planning.weighing import Weighing
from autosplit.trace.ladder import Trace, trace

SPACE = Space((2, 4, 8), (("1f1b", 1), ("gpipe", 1), ("interleaved", 2)))


def weighed(model: nn.Module, found: Trace, limit: int | None) -> Weighing:
    options = Options((torch.device("cpu"),) * 3, 8, memory_limit=limit, measure=False)
    own = Weighing(Sweep(model, found, options, SPACE, rows=64), None)
    own.weigh()
    return own


def test_where_moves_would_go_over_the_limits_a_cut_within_them_is_looked_for() -> None:
    widths = (48, 48, 8, 32, 48, 32, 32, 32, 32, 16, 32, 16, 8)
    model = nn.Sequential(*[nn.Linear(*pair) for pair in pairwise(widths)])
    found = trace(model, Sample(torch.zeros(64, 48)))
    entry = weighed(model, found, None).entries[0]
    plain, moved = (entry.best(["never"], None, move=move) for move in (False, True))
    assert plain is not None
    assert moved is not None
    limit = int(max(plain.device_bytes)) + 1
    assert max(moved.device_bytes) > limit
    own = weighed(model, found, limit)
    cuts = [each for each in own.weighed if each.entry.settled == entry.settled]
    assert any(each.room is not None and each.way == ["never"] for each in cuts)
    assert len({tuple(each.way) for each in cuts}) > 1
