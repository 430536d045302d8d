"""Random problems for the oracles: the same seed makes the same problem everywhere."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from autosplit.partition.problem import Device, Hold, Problem, TensorEdge, Tie, Work, devices_of
from tests.partition.oracle_costs import Rules

_SHAPES = ("chain", "layered", "branches", "wide", "skips")


@dataclass(frozen=True)
class Mix:
    """What a random problem contains; chances are per work or net."""

    count: int
    colours: float = 0.0
    unordered: float = 0.0
    zero: float = 0.3
    whole: bool = True
    static: bool = False
    """Stages hold static bytes alone, as the solver of graphs has it."""
    schedules: tuple[str, ...] = ("1f1b", "gpipe")


def random_problem(seed: int, mix: Mix) -> Problem:
    """Return a random graph of one of several shapes, with nets and holds of mixed weight."""
    chance = random.Random(f"{seed} {mix}")
    edges = _edges(chance, mix.count, shape=chance.choice(_SHAPES))
    heavy = chance.choice((1, 4, 20))
    works = tuple(_work(chance, index, mix) for index in range(mix.count))
    nets, holds = [], []
    for producer, consumers in sorted(edges.items()):
        cost = _seconds(chance, mix) * heavy
        nets.append(TensorEdge(producer, consumers, cost, _seconds(chance, mix) * heavy))
        savers = tuple(end for end in (producer, *consumers) if chance.random() < 0.4)
        holds.append(Hold(chance.randrange(30), producer, consumers, savers))
        if chance.random() < mix.unordered:
            # A gradient of one of the consumers back to the producer, and a value between works of no order.
            nets.append(TensorEdge(consumers[-1], (producer,), 0.0, cost, ordered=False))
            others = tuple(sorted(chance.sample(range(mix.count), min(2, mix.count))))
            nets.append(TensorEdge(chance.randrange(mix.count), others, _seconds(chance, mix), 0.0, ordered=False))
    for _ in range(chance.choice((0, 0, 1, 2))):
        users = tuple(sorted(chance.sample(range(mix.count), min(mix.count, chance.randint(1, 3)))))
        holds.append(Hold(chance.randrange(20), None, users, users[:1] if chance.random() < 0.5 else ()))
    order = [sorted(chance.choices(range(mix.count), k=2)) for _ in range(chance.choice((0, 0, 1, 2)))]
    if mix.static:
        works, holds = tuple(replace(work, transient_bytes=0) for work in works), []
    return Problem(
        works,
        tuple(nets),
        tuple(holds),
        tuple((tail, head) for tail, head in order),
        microbatches=chance.choice((1, 2, 4, 8)),
        schedule=chance.choice(mix.schedules),
    )


def _edges(chance: random.Random, count: int, *, shape: str) -> dict[int, tuple[int, ...]]:
    ends: dict[int, set[int]] = {}
    width = chance.randint(2, 4)
    for head in range(1, count):
        if shape == "chain":
            tails = [head - 1]
        elif shape == "layered":
            tails = [chance.randrange(max(0, head - 3), head) for _ in range(chance.choice((1, 1, 2)))]
        elif shape == "branches":
            tails = [max(0, head - width)] if head % (3 * width) else range(max(0, head - width), head)
        elif shape == "wide":
            tails = [chance.randrange(head)] if chance.random() < 0.7 else []
        else:
            tails = [head - 1, *([chance.randrange(head)] if chance.random() < 0.2 else [])]
        for tail in tails:
            ends.setdefault(tail, set()).add(head)
    return {tail: tuple(sorted(heads)) for tail, heads in ends.items()}


def _seconds(chance: random.Random, mix: Mix) -> float:
    if chance.random() < mix.zero:
        return 0.0
    return float(chance.randint(1, 9)) if mix.whole else chance.uniform(0.1, 9.0)


def _work(chance: random.Random, index: int, mix: Mix) -> Work:
    backward_s = _seconds(chance, mix)
    return Work(
        f"w{index}",
        _seconds(chance, mix) * chance.choice((1, 1, 3)),
        backward_s,
        static_bytes=chance.choice((0, 0, chance.randrange(60))),
        transient_bytes=chance.choice((0, chance.randrange(12))),
        colocation_group=chance.choice("abc") if chance.random() < mix.colours else None,
        weight_s=backward_s * chance.random(),
        block=chance.choice((None, index // 3)),
    )


def limited(problem: Problem, seed: int, *, assignment: Sequence[int], stages: int) -> Problem:
    """Return the problem with a capacity near what the assignment needs, so that it binds."""
    chance = random.Random(f"limits {seed}")
    rules = Rules(problem, stages)
    masks = rules.stage_masks(assignment)
    needed = [rules.option("never", inside, before=0, stage=stage).peak_bytes for stage, inside in enumerate(masks)]
    capacity = max(0, int(chance.choice((0.7, 0.9, 1.0, 1.0, 1.1)) * max(needed)) + chance.randint(-2, 2))
    return replace(problem, devices=devices_of((capacity,) * stages))


def with_devices(problem: Problem, seed: int, *, stages: int, capacities: Sequence[int | None] = ()) -> Problem:
    """Return the problem on devices of two kinds, one twice as slow, with links that differ."""
    chance = random.Random(f"devices {seed}")
    capacities = capacities or (None,) * stages
    devices = tuple(Device(chance.choice((1.0, 2.0)), capacity) for capacity in capacities)
    links = tuple(chance.choice((1.0, 0.5, 3.0)) for _ in range(stages - 1)) if chance.random() < 0.5 else None
    return replace(problem, devices=devices, links=links)


def with_ties(problem: Problem, seed: int) -> Problem:
    """Return the problem with tied parameters."""
    chance, count = random.Random(f"extras {seed}"), len(problem.works)
    found = []
    for _ in range(chance.randint(1, 2)):
        users = tuple(sorted(chance.sample(range(count), min(count, chance.randint(2, 3)))))
        found.append(Tie(users, chance.randrange(40), chance.randrange(25), float(chance.randrange(8))))
    return replace(problem, ties=tuple(found))
