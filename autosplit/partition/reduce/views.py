"""A graph as merges must see it where devices differ and more than works, tensors and storages cost.

The rules for merging compare a group's seconds with its tensors' on one stage. Other devices weigh them differently:

* A merge that must not make any stage worse has to be right on every device, so the group that moves counts with the
  most seconds, per second of tensors, that it has on any (`cautious`).
* A merge of what a bound forbids to separate has to be forbidden on every device, so all counts least (`cheapest`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from autosplit.partition.goal import PLAIN, Goal, Terms
from autosplit.partition.graph import Graph, merge
from autosplit.partition.ideals.stage_costs import block_bytes, recompute_fractions
from autosplit.partition.problem import Problem
from autosplit.partition.reduce.condense import MergeObjective, condense, merge_inseparable


def lossless(graph: Graph, *, goal: Goal, loads: bool, bytes_: bool) -> Graph:
    """Return the graph condensed as `condense` does, for the devices of the goal."""
    seen = graph if goal.plain else _cautious(graph, goal)
    pinned: frozenset[int] = frozenset()
    if goal.extras is not None:
        pinned = _pinned(goal.extras, bytes_=bytes_)
    coarse = condense(seen, concern=MergeObjective(loads=loads, bytes=bytes_, pinned=pinned))
    return graph if coarse.size == graph.size else merge(graph, labels(graph, coarse))


def glued(graph: Graph, *, goal: Goal, bound_s: float) -> Graph:
    """Return the graph glued as `merge_inseparable` does, for the devices of the goal."""
    if goal.terms is None:
        return merge_inseparable(graph, bound_s=bound_s)
    work, net = min(terms.work for terms in goal.terms), min(terms.net for terms in goal.terms)
    tensors = tuple(replace(tensor, cost_s=net * tensor.cost_s) for tensor in graph.tensors)
    cheapest = replace(graph, times_s=tuple(work * time_s for time_s in graph.times_s), tensors=tensors)
    return merge(graph, labels(graph, merge_inseparable(cheapest, bound_s=bound_s)))


def without_small(graph: Graph, *, goal: Goal, small_s: float) -> Graph:
    """Return the graph with costs below ``small_s`` at zero: no load grows, so its best value is a lower bound."""
    terms = goal.terms or (PLAIN,)
    work, net = max(own.work for own in terms), max(own.net for own in terms)
    tensors = tuple(tensor for tensor in graph.tensors if net * tensor.cost_s >= small_s)
    return replace(
        graph,
        times_s=tuple(time_s if work * time_s >= small_s else 0.0 for time_s in graph.times_s),
        tensors=tensors,
    )


def labels(graph: Graph, coarse: Graph) -> list[int]:
    """Return for each group of ``graph`` its group in ``coarse``, which was merged from it."""
    found = [0] * graph.size
    for fine, group in zip(graph.group_of, coarse.group_of, strict=True):
        found[fine] = group
    return found


def _cautious(graph: Graph, goal: Goal) -> Graph:
    forward_s, sync_s = [0.0] * graph.size, [0.0] * graph.size
    again = 0.0
    transient = graph.transient_bytes
    if goal.extras is not None:
        again = max(share for _, share in recompute_fractions(goal.extras))
        for work, group in enumerate(graph.group_of):
            forward_s[group] += goal.extras.works[work].forward_s
            sync_s[group] += goal.extras.works[work].sync_s
        if "block" in goal.extras.recompute:
            transient = tuple(block_bytes(goal.extras, graph.group_of, size=graph.size))
    terms = set(goal.terms or (PLAIN,))
    brought = zip(graph.times_s, forward_s, sync_s, strict=True)
    return replace(
        graph,
        times_s=tuple(
            max(_in_tensors(own, time_s + again * forward, sync) for own in terms) for time_s, forward, sync in brought
        ),
        transient_bytes=transient,
    )


def _in_tensors(terms: Terms, works_s: float, sync_s: float) -> float:
    """Return how many seconds of tensors weigh as much as these works."""
    seconds = terms.work * works_s + terms.sync * sync_s
    if not seconds:
        return 0.0
    return seconds / terms.net if terms.net else math.inf


def _pinned(problem: Problem, *, bytes_: bool) -> frozenset[int]:
    """Return the works that may not move: users of ties, and what blocks and whole stages weigh differently."""
    found = {user for tie in problem.ties for user in tie.users}
    if bytes_ and "block" in problem.recompute and problem.recompute != ("block",):
        transients: Sequence[int] = [work.transient_bytes for work in problem.works]
        found |= {work for work, bytes_held in enumerate(transients) if bytes_held > min(transients)}
    return frozenset(found)
