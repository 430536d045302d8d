"""What every rank does in a step, sends and receives included, in one global order that is proved to end.

Ranks that exchange messages can wait for each other for ever. Here both send, and neither is where it receives:

    rank 0    0F0  send 0F0     0F1  send 0F1     receive 1B0   0B0
    rank 1    receive 0F0  1F0  1B0  send 1B0     receive 0F1   1F1

The proof takes the strictest model there is. Ranks work through their lists one entry at a time; a send and its receive
wait for each other and end together (rendezvous). What ends under it ends as well where sends or receives only post.
In the order built here each send is directly followed by its receive, so the first pair or action that is not done can
always be done. `check_order` proves it again on the list, whoever wrote it.

    tick        0               1                  2               3          1F1B, two stages and microbatches:
    rank 0      0F0  send       0F1  send               receive    0B0  ...   the actions of a clock tick come first,
    rank 1           receive    1F0  receive       1B0  send       1F1  ...   then what they send

So no rank waits for a message longer than it takes to make, where all actions take equally long.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from autosplit.errors import ScheduleError
from autosplit.runtime.transport import Way
from autosplit.schedule.action import Action, Kind, Schedule

_FORWARD: tuple[Kind, ...] = ("F",)
_BACKWARD: tuple[Kind, ...] = ("B", "I")
"""What makes or takes a message."""


@dataclass(frozen=True, slots=True)
class Send:
    """A rank sends a message to the rank of the way's target."""

    way: Way

    def __str__(self) -> str:
        return f"send {_text(self.way)} to stage {self.way.target}"


@dataclass(frozen=True, slots=True)
class Receive:
    """A rank receives a message, or posts its receive, from the rank of the way's source."""

    way: Way

    def __str__(self) -> str:
        return f"receive {_text(self.way)} for stage {self.way.target}"


Item = Action | Send | Receive


class Entry(NamedTuple):
    """One entry of the global order: a rank and what it does."""

    rank: int
    item: Item


class _Message(NamedTuple):
    """What goes from an action to another, on one rank or between two."""

    way: Way
    producer: Action
    consumer: Action


class _Place(NamedTuple):
    rank: int
    position: int


_AnyItem = TypeVar("_AnyItem", bound=Item)
_Ticks = Sequence[Sequence[tuple[int, Action]]]
"""The actions of each clock tick, by rank."""
_Sent = dict[Action, list[_Message]]
"""What each action sends to other ranks."""


def step_order(
    schedule: Schedule,
    sources: Sequence[AbstractSet[int]],
    loss_sources: Iterable[int] = (),
    *,
    rendezvous: bool = True,
) -> tuple[Entry, ...]:
    """Return the actions of a step with its sends and receives, in one global order that cannot deadlock.

    A rank is a lane of the schedule. An action's sends follow it; between two ranks that is one message per way, and
    none between stages of one rank. On each directed pair of ranks both sides have the messages in the same order.

    Arguments:
        schedule: a legal one (`validate`), or only the forwards or the backwards of one.
        sources: stage ``t`` takes values of the stages ``sources[t]``, and sends gradients back to them.
        loss_sources: the stages that send what the loss takes to the last stage.
        rendezvous: True for transports whose sends may block until they are received: a receive stands where its
            message is sent. False where sends and receives only post and an action waits for what it takes: a receive
            stands one action ahead of its consumer, so messages travel while that action runs, and no earlier (but
            for the order of its pair), so at most the next action's buffers are held.

    Raises ScheduleError that names a cycle of ranks when actions wait for each other.
    """
    places = _places(schedule.lanes)
    needs: dict[Action, list[Action]] = {action: [] for action in places}
    sent: _Sent = {action: [] for action in places}
    for message in _messages(schedule, sources, loss_sources):
        needs[message.consumer].append(message.producer)
        if places[message.producer].rank != places[message.consumer].rank:
            sent[message.producer].append(message)
    ticks = _ticks(schedule, needs, places)
    order = tuple((_at_sends if rendezvous else _posted_ahead)(ticks, sent, places))
    check_order(order, len(schedule.lanes), rendezvous=rendezvous)
    return order


def of_rank(order: Iterable[Entry], rank: int) -> tuple[Item, ...]:
    """Return what one rank does, in order."""
    return tuple(item for owner, item in order if owner == rank)


def arrivals(order: Sequence[Entry], rank: int) -> dict[Way, tuple[Way, ...]]:
    """Return, for each message that a rank receives, those of its own that have been taken when it has that one.

    The sender had taken them by then, since its actions come in their order.
    """
    own = {item.way for owner, item in order if owner == rank and isinstance(item, Receive)}
    sent: dict[tuple[int, bool, int], list[Way]] = {}
    taken: dict[int, list[Way]] = {}
    found: dict[Way, tuple[Way, ...]] = {}
    for owner, item in order:
        if isinstance(item, Action):
            if owner != rank and item.kind != "W":
                ways = sent.pop((item.stage, item.kind != "F", item.microbatch), [])
                taken.setdefault(owner, []).extend(ways)
        elif isinstance(item, Send) and owner == rank:
            sent.setdefault((item.way.target, item.way.backward, item.way.microbatch), []).append(item.way)
        elif isinstance(item, Send) and item.way in own:
            found[item.way] = tuple(taken.pop(owner, ()))
    return found


def check_order(order: Iterable[Entry], ranks: int, *, rendezvous: bool = True) -> None:
    """Prove that ranks which work through their entries of an order all come to their end, by running it once.

    Takes time linear in the entries. Only each rank's own order matters, not how the ranks' entries are interleaved.
    In which order a rank's own actions may run is not asked here (`validate` does).

    Arguments:
        order: the entries of all ranks.
        ranks: how many there are.
        rendezvous: True: a send and its receive wait for each other. False: both only post, and an action waits until
            what its rank receives for it has been sent. Either way a pair's messages are taken in the order in which
            they are sent, as by an NCCL communicator.

    Raises ScheduleError when an entry stands there twice; a message is not sent by one rank and received by another;
    is sent before it is made or received after it is taken; a pair's messages have different orders on its two ranks;
    or ranks wait for each other, and then names them and what they are at.
    """
    lists: list[list[Item]] = [[] for _ in range(ranks)]
    for rank, item in order:
        if not 0 <= rank < ranks:
            raise ScheduleError(f"'{item}' is of rank {rank}; there are {ranks} ranks, 0 on")
        lists[rank].append(item)
    places = _places(lists)
    needs = _check_messages(places)
    if rendezvous:
        ways = [item.way for item in places if isinstance(item, Send)]
        needs = {Send(way): [Receive(way)] for way in ways}
        needs |= {Receive(way): [Send(way)] for way in ways}
    _run(lists, places, needs)


def _messages(
    schedule: Schedule, sources: Sequence[AbstractSet[int]], loss_sources: Iterable[int]
) -> Iterator[_Message]:
    """Yield what the schedule's actions give each other; an action's own by stage, for the loss last."""
    last, there, back = schedule.stages - 1, set(schedule), schedule.input_gradient
    links = [(source, target, False) for target, taken in enumerate(sources) for source in sorted(taken)]
    links += [(source, last, True) for source in sorted(set(loss_sources) - {last})]
    for m in range(schedule.microbatches):
        for source, target, loss in links:
            way = Way(source, target, m, loss)
            forward = _Message(way, Action(source, "F", m), Action(target, "F", m))
            for message in (forward, _Message(way.back, back(target, m), back(source, m))):
                if message.producer in there:
                    yield message


def _ticks(schedule: Schedule, needs: Mapping[Action, Sequence[Action]], places: Mapping[Action, _Place]) -> _Ticks:
    """Return the actions by clock tick: each as early as it can, where every one takes a tick and messages none."""
    ticks: list[list[tuple[int, Action]]] = []
    position, done = [0] * len(schedule.lanes), set[Action]()
    while True:
        following = enumerate(zip(schedule.lanes, position, strict=True))
        heads = [(rank, lane[place]) for rank, (lane, place) in following if place < len(lane)]
        ready = [(rank, action) for rank, action in heads if done.issuperset(needs[action])]
        if not ready:
            break
        for rank, action in ready:
            position[rank] += 1
            done.add(action)
        ticks.append(ready)
    waits = {rank: (action, next(need for need in needs[action] if need not in done)) for rank, action in heads}
    if waits:
        raise ScheduleError(f"schedule {schedule.name!r}: {_cycle(waits, places)}; reorder one of these lanes")
    return ticks


def _at_sends(ticks: _Ticks, sent: _Sent, places: Mapping[Action, _Place]) -> Iterator[Entry]:
    """Yield the actions of each tick, then their messages, each receive directly behind its send."""
    for tick in ticks:
        yield from (Entry(rank, action) for rank, action in tick)
        for rank, action in tick:
            for message in sent[action]:
                yield Entry(rank, Send(message.way))
                yield Entry(places[message.consumer].rank, Receive(message.way))


def _posted_ahead(ticks: _Ticks, sent: _Sent, places: Mapping[Action, _Place]) -> Iterator[Entry]:
    """Yield each action between the receives of the next one on its rank and its own sends.

    A receive goes further ahead only where one that its pair's sender sends later has to.
    """
    posted: dict[_Place, list[Way]] = {}
    first: dict[tuple[int, int], int] = {}
    for message in reversed([message for tick in ticks for _, action in tick for message in sent[action]]):
        source, (target, position) = places[message.producer].rank, places[message.consumer]
        ahead = first[source, target] = min(first.get((source, target), position), max(position - 1, 0))
        posted.setdefault(_Place(target, ahead), []).append(message.way)
    for tick in ticks:
        for rank, action in tick:
            yield from (Entry(rank, Receive(way)) for way in reversed(posted.get(places[action], ())))
            yield Entry(rank, action)
            yield from (Entry(rank, Send(message.way)) for message in sent[action])


def _places(lists: Sequence[Sequence[_AnyItem]]) -> dict[_AnyItem, _Place]:
    """Return where each entry stands, in each rank's order; raise ScheduleError when one stands there twice."""
    places: dict[_AnyItem, _Place] = {}
    for rank, items in enumerate(lists):
        for position, item in enumerate(items):
            if item in places:
                raise ScheduleError(f"rank {places[item].rank} has '{item}', and rank {rank} once more; remove one")
            places[item] = _Place(rank, position)
    return places


def _check_messages(places: Mapping[Item, _Place]) -> dict[Item, list[Item]]:
    """Check that each message joins two ranks, what makes it and what takes it, and each directed pair's their order.

    Returns by action the sends of what it takes.
    """
    taken: dict[Item, list[Item]] = {}
    orders: dict[tuple[int, int], tuple[list[Send | Receive], list[Send | Receive]]] = {}
    for item, (rank, position) in places.items():
        if isinstance(item, Action):
            continue
        way, sends = item.way, isinstance(item, Send)
        other = Receive(way) if sends else Send(way)
        if other not in places or places[other].rank == rank:
            raise ScheduleError(f"rank {rank} has '{item}', and no other rank has '{other}'")
        stage, kinds = way.source if sends else way.target, _BACKWARD if way.backward else _FORWARD
        own = [a for a in (Action(stage, k, way.microbatch) for k in kinds) if a in places and places[a].rank == rank]
        if not own or (places[own[0]].position > position) == sends:
            where = "behind the action that makes it" if sends else "before the action that takes it"
            raise ScheduleError(f"rank {rank} has '{item}' in a wrong place; put it {where}, on that one's rank")
        pair = (rank, places[other].rank) if sends else (places[other].rank, rank)
        orders.setdefault(pair, ([], []))[not sends].append(item)
        if not sends:
            taken.setdefault(own[0], []).append(other)
    for (source, target), both in orders.items():
        for send, receive in zip(*both, strict=True):
            if send.way != receive.way:
                raise ScheduleError(
                    f"rank {source} has '{send}' where rank {target} has '{receive}'; "
                    "receive from a rank in the order in which it sends"
                )
    return taken


def _run(lists: Sequence[Sequence[Item]], places: Mapping[Item, _Place], needs: Mapping[Item, Sequence[Item]]) -> None:
    """Run every rank's list, where an entry ends once all that it needs has been reached."""
    position, reached = [0] * len(lists), set[Item]()
    waits: dict[int, tuple[Item, Item]] = {}
    waiting: dict[Item, list[int]] = {}
    running = list(range(len(lists)))
    while running:
        rank = running.pop()
        waits.pop(rank, None)
        for place in range(position[rank], len(lists[rank])):
            item = lists[rank][place]
            reached.add(item)
            running += waiting.pop(item, ())
            missing = next((need for need in needs.get(item, ()) if need not in reached), None)
            if missing is not None:
                position[rank], waits[rank] = place, (item, missing)
                waiting.setdefault(missing, []).append(rank)
                break
    if waits:
        raise ScheduleError(f"{_cycle(waits, places)}; reorder the entries of one of these ranks")


def _cycle(waits: Mapping[int, tuple[_AnyItem, _AnyItem]], places: Mapping[_AnyItem, _Place]) -> str:
    """Describe a cycle among blocked ranks: what a rank waits for stands behind what another, blocked too, is at."""
    rank, path = min(waits), list[int]()
    while rank not in path:
        path.append(rank)
        rank = places[waits[rank][1]].rank
    cycle = [(rank, *waits[rank]) for rank in path[path.index(rank) :]]
    return "deadlock: " + ", ".join(
        f"rank {rank} is at '{at}' and waits for '{need}' of rank {places[need].rank}" for rank, at, need in cycle
    )


def _text(way: Way) -> str:
    """Return whose message of which microbatch it is: ``0F3``, and ``1B3`` for gradients, of B or of I."""
    return f"{way.source}{'B' if way.backward else 'F'}{way.microbatch}{' of the loss' if way.loss else ''}"
