"""The model in units: runs of nodes that a cut is moved by, and what each costs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate, takewhile

from autosplit.partition.problem import Problem, Work
from autosplit.planning.plan.record import Unit
from autosplit.planning.profiled.problem import ProfiledProblem


def units_of(case: ProfiledProblem, unit_of: Sequence[int], assignment: Sequence[int]) -> tuple[Unit, ...]:
    """Return the units in model order; one that a cut goes through is one unit per stage.

    ``unit_of`` and ``assignment`` say the unit and the stage of each work.
    """
    problem = case.problem
    pieces = sorted(set(zip(assignment, unit_of, strict=True)))
    index_of = {piece: index for index, piece in enumerate(pieces)}
    of = [index_of[piece] for piece in zip(assignment, unit_of, strict=True)]
    members: list[list[int]] = [[] for _ in pieces]
    for work, piece in enumerate(of):
        members[piece].append(work)
    static, kept, sent = _static(problem, of), _kept(problem, of), sent_bytes(case, of)
    names = _unique([_common([name for work in ids for name in case.names[work]]) for ids in members])
    units = []
    for index, ids in enumerate(members):
        works = [problem.works[work] for work in ids]
        units.append(
            Unit(
                name=names[index],
                stage=pieces[index][0],
                forward_s=sum(work.forward_s for work in works),
                backward_s=sum(work.backward_s for work in works),
                weight_s=sum(work.weight_s for work in works),
                static_bytes=static[index],
                kept_bytes=kept[index],
                transient_bytes=max(work.transient_bytes for work in works),
                sent_bytes=sent[index],
                block=_block(works),
            )
        )
    return tuple(units)


def _block(works: Sequence[Work]) -> int | None:
    """Return the block that contains all works; None if they are in several blocks, or in none."""
    blocks = {work.block for work in works}
    only = blocks.pop() if len(blocks) == 1 else None
    return only if isinstance(only, int) else None


def _static(problem: Problem, of: Sequence[int]) -> Counter[int]:
    static: Counter[int] = Counter()
    for work, piece in zip(problem.works, of, strict=True):
        static[piece] += work.static_bytes
    for tie in problem.ties:
        static[min(of[user] for user in tie.users)] += tie.home_bytes
    return static


def _kept(problem: Problem, of: Sequence[int]) -> Counter[int]:
    """Return what each unit saves; a storage that several save is the first one's."""
    kept: Counter[int] = Counter()
    for hold in problem.holds:
        if hold.savers:
            kept[min(of[saver] for saver in hold.savers)] += hold.bytes
    return kept


def sent_bytes(case: ProfiledProblem, of: Sequence[int]) -> list[int]:
    """Return the bytes of what crosses a cut behind each run of works; ``of`` says the run of each work."""
    change = [0] * (max(of) + 1)
    for net in case.problem.nets:
        first, last = of[net.producer], max(of[consumer] for consumer in net.consumers)
        if last > first:
            size = case.costs.nodes[case.names[net.producer][0]].output_bytes
            change[first] += size
            change[last] -= size
    return list(accumulate(change))


def _common(names: Sequence[str]) -> str:
    """Return the path of the module in which all of the nodes run; of the model's own nodes the first's name."""
    paths = [name.split("#")[0].split(".") for name in names]
    same = [pair[0] for pair in takewhile(lambda parts: len(set(parts)) == 1, zip(*paths, strict=False))]
    return ".".join(same) or names[0].split("#")[0] or names[0]


def _unique(names: Sequence[str]) -> list[str]:
    """Return the names, those that come again with their number."""
    count: Counter[str] = Counter()
    unique = []
    for name in names:
        count[name] += 1
        unique.append(name if count[name] == 1 else f"{name} ({count[name]})")
    return unique
