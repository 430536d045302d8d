"""Where a cut falls between modules, and what it must gain to fall inside one (decision 20).

A cut lies between modules in front of a repeated block, and outside of blocks in front of a module with parameters. So
none falls inside a block, and none between a head and what is made of its output, such as the loss. Inside a block
there may be narrow places, such as between a layer's attention and its MLP, where no more crosses than in front of it;
they come before any others.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from autosplit.planning.profiled.problem import ProfiledProblem
from autosplit.planning.profiled.units import sent_bytes
from autosplit.profile.types import Profile

INSIDE = 0.02
"""A cut falls inside a module where the step gets shorter by at least this part of it."""
WIDE = 0.1
"""And so much shorter where more crosses there than between modules: that takes memory and links from all else."""
_WIDER = 1.1
"""So many times what crosses between modules may cross a narrow place inside one."""


@dataclass(frozen=True)
class Pieces:
    """The piece of each work of a problem: what lies between two places where it may be cut.

    Attributes:
        modules: with cuts between modules alone.
        narrow: with cuts in front of any module with parameters where hardly more crosses than between modules.
        places: the groups in front of which the narrow ones begin.
    """

    modules: tuple[int, ...]
    narrow: tuple[int, ...]
    places: tuple[int, ...]


def pieces_of(case: ProfiledProblem, group_of: Sequence[int]) -> Pieces:
    """Return the pieces of a problem whose groups of works are in an order that may be cut anywhere."""
    members: list[list[int]] = [[] for _ in range(max(group_of) + 1)]
    for work, group in enumerate(group_of):
        members[group].append(work)
    owners, crossing = _owners(case.costs), [0, *sent_bytes(case, group_of)]
    entered, modules = [], []
    for group, (before, works) in enumerate(pairwise(members), start=1):
        blocks = [case.problem.works[work].block for work in (before[-1], works[0])]
        enters = _enters(case, before[-1], works[0], owners)
        if enters if blocks[1] is None else blocks[0] != blocks[1]:
            modules.append(group)
        elif enters:
            entered.append(group)
    ends = [0, *modules, max(group_of) + 1]
    narrow = set(modules)
    for group in entered:
        after = bisect(ends, group)
        limit = max(crossing[end] for end in (ends[after - 1], ends[min(after, len(ends) - 1)]))
        if crossing[group] <= _WIDER * limit:
            narrow.add(group)
    places = tuple(sorted(narrow))
    return Pieces(_runs(group_of, modules), _runs(group_of, places), places)


def _runs(group_of: Sequence[int], places: Collection[int]) -> tuple[int, ...]:
    """Return the run of groups between two places that each work lies in."""
    starts = [0] * (max(group_of) + 1)
    for start in places:
        starts[start] = 1
    piece = list(accumulate(starts))
    return tuple(piece[group] for group in group_of)


def note_on_inside(pieces: Sequence[int], assignment: Sequence[int], *, longer: float | None) -> str:
    """Return what is to be said of a plan that cuts inside modules; "" where it does not.

    ``longer`` is how much longer, relatively, the step would be with cuts between modules; None: there is no such cut.
    """
    stages: dict[int, set[int]] = {}
    for piece, stage in zip(pieces, assignment, strict=True):
        stages.setdefault(piece, set()).add(stage)
    inside = sum(len(among) - 1 for among in stages.values())
    if not inside:
        return ""
    cuts = f"{inside} of {max(assignment)} cuts lie{'s' * (inside == 1)} inside modules"
    if longer is None:
        return f"{cuts}: with cuts between modules alone no such plan fits or has work for every stage"
    return f"{cuts}: between modules the step would be {longer:.1%} longer (cut='modules' allows that from 2% on)"


def _enters(case: ProfiledProblem, before: int, after: int, owners: Collection[str]) -> bool:
    """Tell whether a work is of a call of a module with parameters that the work before it has no part in."""
    call, last = (case.names[work][0].partition("/")[0] for work in (after, before))
    path, outer = call.partition("#")[0], last.partition("#")[0]
    leaves = not path or outer.startswith(f"{path}.")
    return call != last and not leaves and path in owners


def _owners(costs: Profile) -> set[str]:
    """Return the paths of the modules in or below which a node uses a parameter, or where one lies."""
    paths = {state.name.rpartition(".")[0] for state in costs.state.values() if state.is_parameter}
    paths |= {name.partition("#")[0] for state in costs.state.values() if state.is_parameter for name in state.uses}
    every = [path.split(".") for path in paths]
    return {".".join(parts[:count]) for parts in every for count in range(1, len(parts) + 1)}
