"""What to say when no partition will do: what binds, and the smallest limit that could be met."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass

import networkx as nx

from autosplit.errors import InfeasibleError, listed
from autosplit.partition.checker import Costs
from autosplit.partition.graph import base_graph
from autosplit.partition.problem import Problem
from autosplit.units import format_bytes

_SHOWN_CHARACTERS = 60
_TRIED = 64
"""Of a great many colocation groups only the largest are tried for whether one alone binds."""


@dataclass(frozen=True)
class _Group:
    """Works that no partition can separate, and the fewest bytes that they need on any device."""

    works: tuple[int, ...]
    bytes: int


def no_fit(
    problem: Problem, *, stages: int, assignment: Sequence[int], costs: Costs, exhaustive: bool, smallest: bool
) -> InfeasibleError:
    """Return the error for a capacity that no partition into ``stages`` stages was found to keep.

    ``assignment`` uses memory most evenly, at ``costs``. ``exhaustive``: no cut was left out when one that fits was
    looked for. ``smallest``: no assignment's fullest device needs less than this one's.
    """
    limit, (capacity, *_), groups = max(costs.stage_bytes), problem.capacity_bytes or (0,), _groups(problem)
    assert capacity is not None
    heaviest = max(groups, key=lambda group: group.bytes)
    static = sum(work.static_bytes for work in problem.works)
    fact = f"no partition fits {stages} stages"
    ways = [f"the smallest limit that {'can be' if smallest else 'was found to be'} met is {_exact(limit)} per device"]
    if heaviest.bytes > capacity:
        why = f"{_needs(problem, heaviest)} on one device, none has more than {_exact(capacity)}"
    elif static > (room := capacity * len(problem.devices or ())):
        why = (
            f"the nodes have {_exact(static)} of static memory, all devices together {_exact(room)}, and "
            f"{_needs(problem, heaviest)} of it"
        )
        ways.append("or use more devices")
    else:
        fact = fact if exhaustive else f"no partition was found that fits {stages} stages"
        over = costs.stage_bytes.index(limit)
        inside = [group for group in groups if assignment[group.works[0]] == over]
        why = (
            f"with the most even use of memory stage {over} needs {_exact(costs.stage_bytes[over])}, its device has "
            f"{_exact(capacity)}, and {_needs(problem, max(inside, key=lambda group: group.bytes))} of it"
        )
        ways.append("or use more devices")
    return InfeasibleError(f"{fact}: {why}; {', '.join(ways)}", smallest_bytes=limit)


def over_capacity(problem: Problem, assignment: Sequence[int], *, stage_bytes: Sequence[int]) -> InfeasibleError:
    """Return the error for stages whose exact bytes exceed their devices, which the search's formula did not show.

    ``assignment`` balances memory best; its stages need ``stage_bytes``, each alone on its device.
    """
    with_limits = zip(stage_bytes, problem.capacity_bytes or (), strict=False)
    pairs = [(needed, needed if capacity is None else capacity) for needed, capacity in with_limits]
    over = max(range(len(pairs)), key=lambda stage: pairs[stage][0] - pairs[stage][1])
    needed, capacity = pairs[over]
    limit = max(stage_bytes)
    largest = max(_groups(problem), key=lambda group: (assignment[group.works[0]] == over, group.bytes))
    what = f"node {_named(problem, largest.works[0])}" if len(largest.works) == 1 else _held(problem, largest)
    return InfeasibleError(
        f"no partition was found that fits {len(pairs)} stages: with the most even use of memory stage {over} needs "
        f"{_exact(needed)} (its largest part that cannot be cut: {what}), its device has {_exact(capacity)}; devices "
        f"of {_exact(limit)} each would hold it, or use more devices or smaller microbatches",
        smallest_bytes=limit,
    )


def require_separable(problem: Problem, *, stages: int) -> None:
    """Raise InfeasibleError where several stages are asked for and colocation groups leave nothing to cut."""
    held = any(work.colocation_group is not None for work in problem.works) or bool(problem.order)
    if stages == 1 or len(problem.works) == 1 or not held:
        return
    groups = _groups(problem)
    if len(groups) == 1:
        raise InfeasibleError(
            f"{stages} stages were asked for, and there is nothing to cut: {_held(problem, groups[0])}; "
            "ask for 1 stage, or make that colocation group smaller"
        )


def _groups(problem: Problem) -> list[_Group]:
    """Return what may be separated, with the bytes that no use of a device goes below."""
    members: dict[int, list[int]] = {}
    group_of = base_graph(problem).group_of
    for work, group in enumerate(group_of):
        members.setdefault(group, []).append(work)
    least = dict.fromkeys(members, 0)
    for hold in problem.holds:
        for group in {group_of[saver] for saver in hold.savers}:
            least[group] += hold.bytes
    for tie in problem.ties:
        for group in {group_of[user] for user in tie.users}:
            least[group] += min(tie.home_bytes, tie.copy_bytes)
    for group, ids in members.items():
        works = [problem.works[work] for work in ids]
        least[group] += sum(work.static_bytes for work in works) + max(work.transient_bytes for work in works)
    return [_Group(tuple(ids), least[group]) for group, ids in sorted(members.items())]


def _needs(problem: Problem, group: _Group) -> str:
    if len(group.works) > 1:
        return f"{_held(problem, group)}, which need at least {_exact(group.bytes)}"
    return f"node {_named(problem, group.works[0])} alone needs at least {_exact(group.bytes)}"


def _held(problem: Problem, group: _Group) -> str:
    """Return which colocation groups hold works together, and the works."""
    holding = _holding(problem, group.works)
    s, holds = ("s", "hold") if len(holding) > 1 else ("", "holds")
    who = f"colocation group{s} {listed(map(_short, holding))} {holds}" if holding else "their order, a cycle, holds"
    names = listed(_named(problem, work) for work in group.works)
    return f"{who} {len(group.works)} nodes together ({names})"


def _holding(problem: Problem, works: Sequence[int]) -> list[Hashable]:
    """Return colocation groups of several works, largest first, that hold them: one if it suffices, otherwise all."""
    counts = Counter(name for work in works if (name := problem.works[work].colocation_group) is not None)
    several = [name for name, count in counts.most_common() if count > 1]
    inside = set(works)
    pairs = [pair for pair in problem.precedence if inside.issuperset(pair)]
    alone = ([], *([name] for name in several[:_TRIED]))
    return next((names for names in alone if _connected(problem, works, pairs, names=names)), several)


def _connected(
    problem: Problem, works: Sequence[int], pairs: Iterable[tuple[int, int]], *, names: Collection[Hashable]
) -> bool:
    """Tell whether works hang together in a cycle when those of each of these colocation groups are one."""
    label: dict[int, object] = {}
    for work in works:
        name = problem.works[work].colocation_group
        label[work] = (name,) if name in names else work
    graph = nx.DiGraph()
    graph.add_nodes_from(label.values())
    graph.add_edges_from((label[tail], label[head]) for tail, head in pairs)
    return bool(nx.is_strongly_connected(graph))


def _named(problem: Problem, work: int) -> str:
    """Return a work's number and its name, in short: names come from strangers."""
    return f"{work} {_short(problem.works[work].name)}"


def _short(name: object) -> str:
    text = repr(name)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[: _SHOWN_CHARACTERS - 3]}..."


def _exact(count: int) -> str:
    return f"{format_bytes(count)} ({count:,} bytes)"
