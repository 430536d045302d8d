"""What every rank does in a step, sends and receives included, in one global order that is proved to end.

Ranks that exchange messages can wait for each other for ever. Here both send, and neither is where it receives:

    rank 0    0F0  send 0F0     0F1  send 0F1     receive 1B0   0B0
    rank 1    receive 0F0  1F0  1B0  send 1B0     receive 0F1   1F1

The proof takes sends that wait until their receives are posted (rendezvous); what ends so ends as well where sends are
buffered. A receive only posts, and the action that takes its message waits for it. The order goes by clock ticks, in
which every action takes one and starts as early as it can. A tick's receives come first, then its actions, then their
sends. So an action and a send wait only for what stands before them, and a message travels while its receiver runs.
In a first step a message is preceded by its description, for which its receive waits. There a tick's actions come
first, then its messages, one after the other: each receive with its send.

    tick        0                 1                        2                  3         1F1B, two stages and
    rank 0           0F0 send          0F1 send            receive                0B0   microbatches
    rank 1      receive           receive 1F0                      1B0 send       1F1
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import NamedTuple

import networkx as nx

from autosplit.errors import ScheduleError
from autosplit.runtime.transport import Way
from autosplit.schedule.action import Action, Schedule


@dataclass(frozen=True)
class _End:
    way: Way


class Send(_End):
    """A rank sends a message to the rank of the way's target."""

    def __str__(self) -> str:
        return f"send {_text(self.way)} to stage {self.way.target}"


class Receive(_End):
    """A rank posts the receive of a message from the rank of the way's source."""

    def __str__(self) -> str:
        return f"receive {_text(self.way)} for stage {self.way.target}"


@dataclass(frozen=True)
class Reduce:
    """A rank begins to add its gradients of a stage to those of the other replicas of the pipeline.

    ``beside``: the stage's last backward, which makes them meanwhile; None: they are complete.
    """

    stage: int
    beside: Action | None = None

    def __str__(self) -> str:
        return f"{self.beside or ''} {self.stage}REDUCE_GRAD".strip()


Item = Action | _End


class Entry(NamedTuple):
    """One entry of the global order: a rank and what it does."""

    rank: int
    item: Item


_Need = tuple[Item, Item]
"""An item that has to end before another one can."""


class _Message(NamedTuple):
    """What goes from an action to another, on one rank or between two."""

    way: Way
    producer: Action
    consumer: Action


def step_order(
    schedule: Schedule,
    sources: Sequence[AbstractSet[int]],
    loss_sources: Iterable[int] = (),
    *,
    described: bool = True,
) -> tuple[Entry, ...]:
    """Return the actions of a step with its sends and receives, in one global order that cannot deadlock.

    A rank is a lane of the schedule. An action's sends follow it; between two ranks that is one message per way, and
    none between stages of one rank. On each directed pair of ranks both sides have the messages in the same order.

    Arguments:
        schedule: a legal one (`validate`), or only the forwards or the backwards of one.
        sources: stage ``t`` takes values of the stages ``sources[t]``, and sends gradients back to them.
        loss_sources: the stages that send what the loss takes to the last stage.
        described: whether receivers know what comes; if not, each send begins with a description of its message.

    Raises ScheduleError that names a cycle of ranks when actions wait for each other.
    """
    rank_of: dict[Item, int] = {action: rank for rank, lane in enumerate(schedule.lanes) for action in lane}
    sent: dict[Item, list[_Message]] = defaultdict(list)
    needs: list[_Need] = []
    for message in _messages(schedule, sources, loss_sources):
        needs.append((message.producer, message.consumer))
        if rank_of[message.producer] != rank_of[message.consumer]:
            sent[message.producer].append(message)
    order: list[Entry] = []
    for tick in _ticks(f"schedule {schedule.name!r}", schedule.lanes, needs, rank_of):
        messages = [message for action in tick for message in sent[action]]
        receives = [Entry(rank_of[message.consumer], Receive(message.way)) for message in messages]
        actions = [Entry(rank_of[action], action) for action in tick]
        sends = [Entry(rank_of[message.producer], Send(message.way)) for message in messages]
        pairs = chain.from_iterable(zip(receives, sends, strict=True))
        order += [*receives, *actions, *sends] if described else [*actions, *pairs]
    check_order(order, len(schedule.lanes), described=described)
    return tuple(order)


def of_rank(order: Iterable[Entry], rank: int) -> tuple[Item, ...]:
    """Return what one rank does, in order."""
    return tuple(item for owner, item in order if owner == rank)


def with_reductions(items: Sequence[Item]) -> tuple[Item | Reduce, ...]:
    """Return what a rank does with the sums of its stages' gradients: each beside the last backward of the stage.

    Where weights' gradients come last, it stands behind these. Sums are begun in descending order of the stages, on
    every replica, however many microbatches it has.
    """
    last = {item.stage: place for place, item in enumerate(items) if isinstance(item, Action) and item.kind in "BW"}
    found: list[list[Item | Reduce]] = [[item] for item in items]
    place = 0
    for stage in sorted(last, reverse=True):
        place = max(place, last[stage])
        if found[place] == [action := items[place]] and isinstance(action, Action) and action[:2] == (stage, "B"):
            found[place] = [Reduce(stage, action)]
        else:
            found[place].append(Reduce(stage))
    return tuple(chain.from_iterable(found))


def arrivals(order: Iterable[Entry], rank: int) -> dict[Way, tuple[Way, ...]]:
    """Return, for each message that a rank receives, those of its own that have been taken when it has that one.

    The sender had taken them by then, since its actions come in their order.
    """
    sent: dict[tuple[int, bool, int], list[Way]] = defaultdict(list)
    taken: dict[int, list[Way]] = defaultdict(list)
    found: dict[Way, tuple[Way, ...]] = {}
    for owner, item in order:
        if isinstance(item, Action):
            taken[owner] += sent.pop((item.stage, item.kind != "F", item.microbatch), ())
        elif isinstance(item, Receive) and owner == rank:
            found[item.way] = ()
        elif isinstance(item, Send) and owner == rank:
            sent[item.way.target, item.way.backward, item.way.microbatch].append(item.way)
        elif isinstance(item, Send) and item.way in found:
            found[item.way] = tuple(taken.pop(owner, ()))
    return found


def check_order(order: Iterable[Entry], ranks: int, *, described: bool = True) -> None:
    """Prove that ranks which work through their entries of an order all come to their end.

    A send waits until its receive is posted, and an action until what its rank receives for it has been sent. Without
    ``described`` a receive waits until its sender has done what stands before the send, which describes it. A pair's
    messages are taken in the order in which they are sent, as by an NCCL communicator. Takes time linear in the
    entries. Only each rank's own order matters, not how the ranks' entries are interleaved. In which order a rank's own
    actions may run is not asked here (`validate` does).

    Raises ScheduleError when an entry stands there twice; a message is not sent where it is made and received where it
    is taken, or these are one rank; a pair's messages have different orders on its two ranks; or entries wait for each
    other, and then names them and their ranks. A message that is sent before it is made waits for itself.
    """
    lists: list[list[Item]] = [[] for _ in range(ranks)]
    rank_of: dict[Item, int] = {}
    for rank, item in order:
        if not 0 <= rank < ranks:
            raise ScheduleError(f"'{item}' is of rank {rank}; there are {ranks} ranks, 0 on")
        if item in rank_of:
            raise ScheduleError(f"rank {rank_of[item]} has '{item}', and rank {rank} once more; remove one")
        rank_of[item] = rank
        lists[rank].append(item)
    before = {item: previous for items in lists for previous, item in pairwise(items)}
    needs: list[_Need] = []
    pairs: dict[tuple[int, int], tuple[list[_End], list[_End]]] = defaultdict(lambda: ([], []))
    for item, rank in rank_of.items():
        if isinstance(item, Action):
            continue
        producer, consumer = (_action(stage, item.way, rank_of) for stage in (item.way.source, item.way.target))
        sends = isinstance(item, Send)
        own = producer if sends else consumer
        other: _End = Receive(item.way) if sends else Send(item.way)
        if rank_of.get(own) != rank:
            raise ScheduleError(f"rank {rank} has '{item}', and not the action that {'makes' if sends else 'takes'} it")
        if rank_of.get(other, rank) == rank:
            raise ScheduleError(f"rank {rank} has '{item}', and no other rank has '{other}'")
        pair = (rank, rank_of[other]) if sends else (rank_of[other], rank)
        pairs[pair][not sends].append(item)
        needs += [(producer, item), (other, item), (item, consumer)] if sends else [(item, consumer)]
        if sends and not described:
            needs.append((before.get(item, producer), other))
    for (source, target), both in pairs.items():
        for send, receive in zip(*both, strict=True):
            if send.way != receive.way:
                raise ScheduleError(
                    f"rank {source} has '{send}' where rank {target} has '{receive}'; "
                    "receive from a rank in the order in which it sends"
                )
    _ticks("order", lists, needs, rank_of)


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


def _ticks(
    what: str, lists: Iterable[Sequence[Item]], needs: Iterable[_Need], rank_of: Mapping[Item, int]
) -> list[list[Item]]:
    """Return what each clock tick ends, by rank, where every entry takes one and starts as early as it can."""
    graph = nx.DiGraph(needs)
    for items in lists:
        nx.add_path(graph, items)
    try:
        return [sorted(tick, key=rank_of.__getitem__) for tick in nx.topological_generations(graph)]
    except nx.NetworkXUnfeasible:
        waits = set(needs).intersection(nx.find_cycle(graph))
    texts = [f"'{item}' of rank {rank_of[item]} waits for '{need}' of rank {rank_of[need]}" for need, item in waits]
    raise ScheduleError(f"{what}: deadlock: {', '.join(sorted(texts))}; reorder one of these ranks")


def _action(stage: int, way: Way, there: Container[Item]) -> Action:
    """Return the action of a stage that makes or takes a message: I for gradients where the backward is split."""
    split = Action(stage, "I", way.microbatch)
    return split if way.backward and split in there else Action(stage, "B" if way.backward else "F", way.microbatch)


def _text(way: Way) -> str:
    """Return whose message of which microbatch it is: ``0F3``, and ``1B3`` for gradients, of B or of I."""
    return f"{way.source}{'B' if way.backward else 'F'}{way.microbatch}{' of the loss' if way.loss else ''}"
