"""Random schedules on random graphs, and a simulator of ranks that exchange messages."""

from __future__ import annotations

import itertools
import random
from collections import defaultdict, deque
from typing import Any, NamedTuple

from autosplit.runtime.lanes.threads import backwards, forwards
from autosplit.schedule.action import Action, Schedule
from autosplit.schedule.catalog import SCHEDULES, build, stages_per_device
from autosplit.schedule.entry import Entry, Issued, Receive, Route, Send
from autosplit.schedule.order import Receives, of_device, step_order
from autosplit.schedule.validate import validate

Lists = list[list[Entry]]


class Case(NamedTuple):
    """A schedule, whose values each stage takes, and which stages the loss looks at."""

    schedule: Schedule
    sources: list[set[int]]
    losses: set[int]

    @property
    def ranks(self) -> int:
        return len(self.schedule.lanes)

    def order(self, *, receives: Receives = "ahead") -> tuple[Issued, ...]:
        return step_order(self.schedule, self.sources, self.losses, receives=receives)

    def lists(self, *, receives: Receives = "ahead") -> Lists:
        order = self.order(receives=receives)
        return [list(of_device(order, rank)) for rank in range(self.ranks)]

    def takes(self, action: Action) -> dict[Route, Action]:
        """Return what an action takes of other stages, on whatever rank, and what makes it."""
        stage, kind, m = action
        last, gradient = len(self.sources) - 1, self.schedule.input_gradient
        found: dict[Route, Action] = {}
        if kind == "F":
            found = {Route(s, stage, m): Action(s, "F", m) for s in self.sources[stage]}
            if stage == last:
                found |= {Route(s, last, m, loss=True): Action(s, "F", m) for s in self.losses - {last}}
        elif kind != "W":
            users = [t for t, taken in enumerate(self.sources) if stage in taken]
            found = {Route(t, stage, m, backward=True): gradient(t, m) for t in users}
            if stage in self.losses - {last}:
                found[Route(last, stage, m, loss=True, backward=True)] = gradient(last, m)
        there = set(self.schedule)
        return {route: maker for route, maker in found.items() if maker in there}

    def crossing(self) -> dict[Action, dict[Route, Action]]:
        """Return what each action takes of other ranks, and what makes it."""
        rank = {action: rank for rank, lane in enumerate(self.schedule.lanes) for action in lane}
        return {
            action: {route: maker for route, maker in self.takes(action).items() if rank[maker] != rank[action]}
            for action in rank
        }


def chain(stages: int) -> list[set[int]]:
    return [set(range(stage - 1, stage)) & set(range(stages)) for stage in range(stages)]


def graph(stages: int, chance: random.Random) -> tuple[list[set[int]], set[int]]:
    """Return whose values stages take, with skips and several ends, and which of them the loss looks at."""
    density = chance.random()
    sources = [{s for s in range(t) if chance.random() < density} for t in range(stages)]
    return sources, {s for s in range(stages) if chance.random() < 0.3}


def catalogued(name: str, chance: random.Random) -> Case:
    """Return a schedule of the catalogue, whole or a call's forwards or backwards, on a random graph."""
    least = stages_per_device(name)
    virtual = chance.choice([2, 3]) if SCHEDULES[name].virtual_stages is None else least
    stages = virtual * chance.randint(1, 6 // virtual)
    schedule = build(name, stages=stages, microbatches=chance.randint(1, 9), virtual_stages=virtual)
    part = chance.choice([validate, validate, forwards, backwards])
    return Case(part(schedule), *graph(stages, chance))


def shuffled(chance: random.Random) -> Case:
    """Return a random order that a random graph allows, dealt out to lanes: what a user's file may hold.

    Some microbatches' backwards are split; B and W of a stage ascend, as `validate` wants.
    """
    stages, lanes, microbatches = chance.randint(1, 6), chance.randint(1, 4), chance.randint(1, 9)
    actions = [
        Action(stage, kind, microbatch)
        for stage, microbatch in itertools.product(range(stages), range(microbatches))
        for kind in (("F", "I", "W") if chance.random() < 0.3 else ("F", "B"))
    ]
    every = Case(Schedule("every", (tuple(actions),), (0,) * stages), *graph(stages, chance))
    before = {action: {action._replace(kind="I" if action.kind == "W" else "F")} - {action} for action in actions}
    for action in actions:
        before[action] |= set(every.takes(action).values())
        if action.kind in "BW":
            before[action] |= {action._replace(kind=kind, microbatch=action.microbatch - 1) for kind in "BW"}
    left, order = set(actions), list[Action]()
    while left:
        order.append(chance.choice([action for action in actions if action in left and not before[action] & left]))
        left.remove(order[-1])
    place = tuple(chance.randrange(lanes) for _ in range(stages))
    dealt = (tuple(action for action in order if place[action.stage] == lane) for lane in range(lanes))
    return every._replace(schedule=Schedule("shuffled", tuple(dealt), place))


def drawn(name: str, chance: random.Random) -> Case:
    return shuffled(chance) if name == "shuffled" else catalogued(name, chance)


def ends(case: Case, lists: Lists, chance: random.Random, *, rendezvous: bool, receives: Receives = "ahead") -> bool:
    """Tell whether all ranks come to their end, in one random interleaving of what may happen.

    From rank to rank leads a channel that knows no names: it brings the next message that is sent to the next receive
    that is posted. Under rendezvous a rank stands at its send until then, otherwise it goes on. Where receives do not
    stand ahead, a rank stands at a receive until its send has begun. What is sent must have been made, what arrives
    must be what was wanted, and an action waits for all that it takes.
    """
    taken = case.crossing()
    maker = {route: action for routes in taken.values() for route, action in routes.items()}
    home = {item: rank for rank, items in enumerate(lists) for item in items}
    left = [deque(items) for items in lists]
    sent, wanted = defaultdict[Any, deque[Route]](deque), defaultdict[Any, deque[Route]](deque)
    done, arrived, begun = set[Action](), set[Route](), set[Route]()

    def can_go_on(item: Entry) -> bool:
        if isinstance(item, Action):
            return arrived.issuperset(taken[item])
        if isinstance(item, Receive):
            return receives == "ahead" or item.route in begun
        return item.route not in begun or item.route in arrived

    while any(left):
        able = [rank for rank, items in enumerate(left) if items and can_go_on(items[0])]
        together = [channel for channel, routes in sent.items() if routes and wanted[channel]]
        if not able and not together:
            return False
        if together and (not able or chance.random() < 0.5):
            channel = chance.choice(together)
            route = sent[channel].popleft()
            if wanted[channel].popleft() != route:
                return False
            arrived.add(route)
            continue
        rank = chance.choice(able)
        item = left[rank][0]
        if isinstance(item, Action):
            done.add(item)
        elif item.route not in begun or isinstance(item, Receive):
            (sent if isinstance(item, Send) else wanted)[home[Send(item.route)], home[Receive(item.route)]].append(
                item.route
            )
            if isinstance(item, Send):
                begun.add(item.route)
                if maker[item.route] not in done:
                    return False
                if rendezvous:
                    continue
        left[rank].popleft()
    return True
