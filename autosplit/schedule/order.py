"""What every device does in a step, sends and receives included, in one global order that is proved to end.

Processes that exchange messages can wait for each other for ever. Here both send, and neither is where it receives:

    device 0   0F0       0SEND_F0  0F1       0SEND_F1  0RECV_B0  0B0
    device 1   1RECV_F0  1F0       1B0       1SEND_B0  1RECV_F1  1F1

The proof takes sends that wait until their receives are posted (rendezvous); what ends so ends as well where sends are
buffered. A receive only posts, and the action that takes its message waits for it. The order goes by clock ticks, in
which every action takes one and starts as early as it can. A tick's receives come first, then its actions, then their
sends. So an action and a send wait only for what stands before them, and a message travels while its receiver runs.
In a first step a message is preceded by its description, for which its receive waits. There a tick's actions come
first, then its messages, one after the other: each receive with its send.

    tick       0                    1                       2                      3
    device 0             0F0 SEND             0F1 SEND      RECV                   0B0    1F1B, two stages and
    device 1   RECV                 RECV 1F0                              1B0 SEND 1F1    microbatches

Further passes add what is done with parameters and gradients: sums behind last backwards, updates at the end.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import accumulate, chain, pairwise
from typing import Literal, NamedTuple

import networkx as nx

from autosplit.errors import ScheduleError
from autosplit.schedule.action import Action, Schedule
from autosplit.schedule.entry import Entry, Issued, Receive, Reduce, Reshard, Route, Send, Unshard, Update, parse_entry

Receives = Literal["ahead", "described", "taken"]
"""Where receives stand. "ahead": posted when their messages begin to be made. "described": with their sends, which
begin with a description of the message, as in a first step. "taken": right before the action that takes the message, as
on lanes of one process, where a message lies in memory until then and its send waits for nobody."""
_Need = tuple[Entry, Entry]
"""An entry that has to end before another one can."""
_OfStage = Reduce | Unshard | Reshard | Update


class _Delivery(NamedTuple):
    """What goes from an action to another, on one device or between two."""

    route: Route
    producer: Action
    consumer: Action


class _Crossing(NamedTuple):
    """The device of each action, the messages between devices by the action that makes or takes them, all needs."""

    device_of: dict[Entry, int]
    sent: dict[Entry, list[_Delivery]]
    taken: dict[Entry, list[_Delivery]]
    needs: list[_Need]


def step_order(
    schedule: Schedule,
    sources: Sequence[AbstractSet[int]],
    loss_sources: Iterable[int] = (),
    *,
    receives: Receives = "ahead",
) -> tuple[Issued, ...]:
    """Return the actions of a step with its sends and receives, in one global order that cannot deadlock.

    A device is a lane of the schedule. An action's sends follow it; between two devices that is one message per route,
    and none between stages of one device. On each directed pair of devices both have the messages in the same order.

    Arguments:
        schedule: a legal one (`validate`), or only the forwards or the backwards of one.
        sources: stage ``t`` takes values of the stages ``sources[t]``, and sends gradients back to them.
        loss_sources: the stages that send what the loss takes to the last stage.
        receives: where receives stand, see `Receives`.

    Raises ScheduleError that names a cycle of devices when actions wait for each other.
    """
    crossing = _crossing(schedule, sources, loss_sources)
    device_of, sent, taken = crossing.device_of, crossing.sent, crossing.taken

    def receive(message: _Delivery) -> Issued:
        return Issued(device_of[message.consumer], Receive(message.route))

    def send(message: _Delivery) -> Issued:
        return Issued(device_of[message.producer], Send(message.route))

    order: list[Issued] = []
    for tick in _ticks(f"schedule {schedule.name!r}", schedule.lanes, crossing.needs, device_of):
        messages = [message for action in tick for message in sent[action]]
        actions = [Issued(device_of[action], action) for action in tick]
        if receives == "ahead":
            order += [*map(receive, messages), *actions, *map(send, messages)]
        elif receives == "described":
            order += [*actions, *chain.from_iterable((receive(message), send(message)) for message in messages)]
        else:
            for issued in actions:
                order += [*map(receive, taken[issued.entry]), issued, *map(send, sent[issued.entry])]
    check_order(order, len(schedule.lanes), receives=receives)
    return tuple(order)


def lane_lists(
    schedule: Schedule, sources: Sequence[AbstractSet[int]], loss_sources: Iterable[int] = ()
) -> tuple[tuple[Entry, ...], ...]:
    """Return what each device does, with receives "taken", in linear time: without the order that proves it."""
    _, sent, taken, _ = _crossing(schedule, sources, loss_sources)
    receives = {action: [Receive(message.route) for message in messages] for action, messages in taken.items()}
    sends = {action: [Send(message.route) for message in messages] for action, messages in sent.items()}
    return tuple(
        tuple(entry for action in lane for entry in (*receives.get(action, ()), action, *sends.get(action, ())))
        for lane in schedule.lanes
    )


def in_clock_order(schedule: Schedule, lists: Iterable[Sequence[Entry]]) -> tuple[Entry, ...]:
    """Return the lists of all devices, with receives "taken", as one thread performs them: actions by clock tick.

    A receive stands right before its device's next action, everything else right behind the one before it.
    """
    before, behind = defaultdict[Entry | None, list[Entry]](list), defaultdict[Entry | None, list[Entry]](list)
    for entries in lists:
        received, last = list[Entry](), None
        for entry in entries:
            if isinstance(entry, Receive):
                received.append(entry)
            elif isinstance(entry, Action):
                before[entry], received, last = received, [], entry
            else:
                behind[last].append(entry)
    rows = ((*before[action], action, *behind[action]) for action in schedule.issue_order)
    return (*behind[None], *chain.from_iterable(rows))


def of_device(order: Iterable[Issued], device: int) -> tuple[Entry, ...]:
    """Return what one device does, in order."""
    return tuple(entry for owner, entry in order if owner == device)


def with_marks(entries: Sequence[Entry], marks: Sequence[tuple[int, str]]) -> tuple[Entry, ...]:
    """Return a device's list with what its schedule's file says of parameters and gradients (`Schedule.marks`)."""
    behind: dict[int, list[Entry]] = defaultdict(list)
    for count, text in marks:
        behind[count].append(parse_entry(text))
    numbers = accumulate(isinstance(entry, Action) for entry in entries)
    marked = ((e, *(behind[n] if isinstance(e, Action) else ())) for n, e in zip(numbers, entries, strict=True))
    return (*behind[0], *chain.from_iterable(marked))


def with_reductions(entries: Sequence[Entry]) -> tuple[Entry, ...]:
    """Return a device's list with a `Reduce` of each of its stages, behind the stage's last backward.

    That is its last W if the backward is split. All replicas begin their sums in descending order of the stages,
    whatever their number of microbatches. A list that already has sums is returned as it is.
    """
    if any(isinstance(entry, Reduce) for entry in entries):
        return tuple(entries)
    behind: dict[int, list[Entry]] = defaultdict(list)
    index = 0
    for stage, last in sorted(_last_backwards(entries).items(), reverse=True):
        index = max(index, last)
        behind[index].append(Reduce(stage))
    return tuple(chain.from_iterable((entry, *behind[index]) for index, entry in enumerate(entries)))


def with_gathers(entries: Sequence[Entry], *, each_action: bool) -> tuple[Entry, ...]:
    """Return a device's list where replicas have shards of its stages' parameters, and gather them.

    ``each_action``: around each action of a stage. Otherwise they are gathered before all of them, and kept.
    """
    if not each_action:
        stages = sorted({entry.stage for entry in entries if isinstance(entry, Action)})
        return (*map(Unshard, stages), *entries, *map(Reshard, stages))
    around = ((Unshard(e.stage), e, Reshard(e.stage)) if isinstance(e, Action) else (e,) for e in entries)
    return tuple(chain.from_iterable(around))


def with_updates(entries: Sequence[Entry]) -> tuple[Entry, ...]:
    """Return a device's list of a training step with the update of each of its stages at the end, ascending."""
    return (*entries, *map(Update, sorted(_last_backwards(entries))))


def _last_backwards(entries: Sequence[Entry]) -> dict[int, int]:
    """Return the index of each stage's last B or W in a list."""
    return {e.stage: index for index, e in enumerate(entries) if isinstance(e, Action) and e.kind in "BW"}


def check_state(entries: Sequence[Entry]) -> None:
    """Prove that a device's list uses parameters and gradients of its stages only while they are there.

    Raises ScheduleError when a stage is summed up or updated before its last backward or twice, updated before it is
    summed up, gathered twice without a release between, released when it is not gathered, or works while it is not
    gathered and its list gathers it at all.
    """
    last = _last_backwards(entries)
    sharded = {entry.stage for entry in entries if isinstance(entry, (Unshard, Reshard))}
    summed = {entry.stage for entry in entries if isinstance(entry, Reduce)}
    gathered, done = set[int](), set[Entry]()
    for index, entry in enumerate(entries):
        stage = entry.stage
        if isinstance(entry, (Reduce, Update)):
            if entry in done:
                raise ScheduleError(f"'{entry}' stands twice; remove one")
            if index < last.get(stage, -1):
                raise ScheduleError(f"'{entry}' stands before '{entries[last[stage]]}'; put it behind that")
            if isinstance(entry, Update) and stage in summed and Reduce(stage) not in done:
                raise ScheduleError(f"'{entry}' stands before '{Reduce(stage)}'; put it behind that")
            done.add(entry)
        elif isinstance(entry, Unshard):
            if stage in gathered:
                raise ScheduleError(f"'{entry}' stands where stage {stage} is gathered already; remove it")
            gathered.add(stage)
        elif isinstance(entry, Reshard):
            if stage not in gathered:
                raise ScheduleError(f"'{entry}' stands where stage {stage} is not gathered; remove it")
            gathered.remove(stage)
        elif isinstance(entry, Action) and stage in sharded - gathered:
            raise ScheduleError(f"'{entry}' stands where stage {stage} is not gathered; put '{Unshard(stage)}' before")


def arrivals(order: Iterable[Issued], device: int) -> dict[Route, tuple[Route, ...]]:
    """Map each message that a device receives to the messages it sent before that must have arrived by then.

    The sender had taken them before it sent this one, since its actions run in order.
    """
    sent: dict[tuple[int, bool, int], list[Route]] = defaultdict(list)
    taken: dict[int, list[Route]] = defaultdict(list)
    arrived: dict[Route, tuple[Route, ...]] = {}
    for owner, entry in order:
        if isinstance(entry, Action):
            taken[owner] += sent.pop((entry.stage, entry.kind != "F", entry.microbatch), ())
        elif isinstance(entry, Receive) and owner == device:
            arrived[entry.route] = ()
        elif isinstance(entry, Send) and owner == device:
            sent[entry.route.target, entry.route.backward, entry.route.microbatch].append(entry.route)
        elif isinstance(entry, Send) and entry.route in arrived:
            arrived[entry.route] = tuple(taken.pop(owner, ()))
    return arrived


def check_order(order: Iterable[Issued], devices: int, *, receives: Receives = "ahead") -> None:
    """Prove that an order has no deadlock: every device that works through its entries in order comes to the end.

    A send waits until its receive is posted, and an action until the messages that it takes have been sent. With
    receives "described", a receive also waits until its sender has done all that stands before the send; with "taken",
    it waits for its send, which does not wait. The messages of a pair of devices are taken in the order in which they
    are sent, as by an NCCL communicator. Takes time linear in the entries. Only the order within each device matters,
    not how the devices' entries are interleaved. `validate` checks the order of a device's actions, `check_state` that
    of its sums, updates and gathers.

    Raises ScheduleError when an entry stands there twice; a message is not sent where it is made and received where it
    is taken, or these are one device; a pair's messages have different orders on its two devices; or entries wait for
    each other, and then names them and their devices. A message that is sent before it is made waits for itself.
    """
    lists: list[list[Entry]] = [[] for _ in range(devices)]
    device_of: dict[Entry, int] = {}
    for device, entry in order:
        if not 0 <= device < devices:
            raise ScheduleError(f"'{entry}' is of device {device}; there are {devices} devices, 0 on")
        if isinstance(entry, _OfStage):
            continue
        if entry in device_of:
            raise ScheduleError(f"device {device_of[entry]} has '{entry}', and device {device} once more; remove one")
        device_of[entry] = device
        lists[device].append(entry)
    before = {entry: previous for entries in lists for previous, entry in pairwise(entries)}
    needs: list[_Need] = []
    pairs: dict[tuple[int, int], tuple[list[Send | Receive], list[Send | Receive]]] = defaultdict(lambda: ([], []))
    for entry, device in device_of.items():
        if not isinstance(entry, (Send, Receive)):
            continue
        route = entry.route
        producer, consumer = (_action(stage, route, device_of) for stage in (route.source, route.target))
        sends = isinstance(entry, Send)
        action = producer if sends else consumer
        other: Entry = Receive(route) if sends else Send(route)
        if device_of.get(action) != device:
            verb = "makes" if sends else "takes"
            raise ScheduleError(f"device {device} has '{entry}', and not the action that {verb} it")
        if device_of.get(other, device) == device:
            raise ScheduleError(f"device {device} has '{entry}', and no other device has '{other}'")
        pair = (device, device_of[other]) if sends else (device_of[other], device)
        pairs[pair][not sends].append(entry)
        needs.append((entry, consumer))
        if sends:
            needs.append((producer, entry))
        if sends != (receives == "taken"):
            needs.append((other, entry))
        if sends and receives == "described":
            needs.append((before.get(entry, producer), other))
    for (source, target), both in pairs.items() if receives != "taken" else ():
        for send, receive in zip(*both, strict=True):
            if send.route != receive.route:
                raise ScheduleError(
                    f"device {source} has '{send}' where device {target} has '{receive}'; "
                    "receive from a device in the order in which it sends"
                )
    _ticks("order", lists, needs, device_of)


def _crossing(schedule: Schedule, sources: Sequence[AbstractSet[int]], loss_sources: Iterable[int]) -> _Crossing:
    device_of: dict[Entry, int] = {action: device for device, lane in enumerate(schedule.lanes) for action in lane}
    crossing = _Crossing(device_of, defaultdict(list), defaultdict(list), [])
    for message in _messages(schedule, sources, loss_sources):
        crossing.needs.append((message.producer, message.consumer))
        if device_of[message.producer] != device_of[message.consumer]:
            crossing.sent[message.producer].append(message)
            crossing.taken[message.consumer].append(message)
    return crossing


def _messages(
    schedule: Schedule, sources: Sequence[AbstractSet[int]], loss_sources: Iterable[int]
) -> Iterator[_Delivery]:
    """Yield the messages between the schedule's actions: for each microbatch by stage, those for the loss last."""
    last, there, back = schedule.stages - 1, set(schedule), schedule.input_gradient
    links = [(source, target, False) for target, taken in enumerate(sources) for source in sorted(taken - {target})]
    links += [(source, last, True) for source in sorted(set(loss_sources) - {last})]
    for m in range(schedule.microbatches):
        for source, target, loss in links:
            route = Route(source, target, m, loss)
            forward = _Delivery(route, Action(source, "F", m), Action(target, "F", m))
            for message in (forward, _Delivery(route.back, back(target, m), back(source, m))):
                if message.producer in there and message.consumer in there:
                    yield message


def _ticks(
    what: str, lists: Iterable[Sequence[Entry]], needs: Iterable[_Need], device_of: Mapping[Entry, int]
) -> list[list[Entry]]:
    """Return the entries of each clock tick, by device; every entry takes one tick and starts as early as possible."""
    graph = nx.DiGraph(needs)
    for entries in lists:
        nx.add_path(graph, entries)
    try:
        return [sorted(tick, key=device_of.__getitem__) for tick in nx.topological_generations(graph)]
    except nx.NetworkXUnfeasible:
        waits = set(needs).intersection(nx.find_cycle(graph))
    names = {entry: f"'{entry}' of device {device}" for entry, device in device_of.items()}
    texts = [f"{names[entry]} waits for {names[need]}" for need, entry in waits]
    raise ScheduleError(f"{what}: deadlock: {', '.join(sorted(texts))}; reorder one of these devices")


def _action(stage: int, route: Route, there: Container[Entry]) -> Action:
    """Return the action of a stage that makes or takes a message: I for gradients where the backward is split."""
    if not route.backward:
        return Action(stage, "F", route.microbatch)
    split = Action(stage, "I", route.microbatch)
    return split if split in there else Action(stage, "B", route.microbatch)
