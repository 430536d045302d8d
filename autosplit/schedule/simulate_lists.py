"""When each entry of the devices' lists starts and ends.

    compute   0F0   0F1        0B0        0B1          0UPDATE
    copy         0SEND_F0 0SEND_F1                                       messages do not wait for each other
    reduce                                  bucket, bucket               0REDUCE_GRAD behind 0B1, begun beside it

A device issues its list in order, and is busy while it computes. What it sends, gathers and sums goes on beside that.
An action waits for its messages and for its stage's gathers, an update for its stage's sums.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from autosplit.errors import ScheduleError
from autosplit.schedule.action import Action
from autosplit.schedule.entry import Entry, Receive, Reduce, Route, Send, Unshard, Update


@dataclass(frozen=True)
class EntrySpan:
    """One entry on the clock; the span of a receive is that of its message."""

    entry: Entry
    start_s: float
    end_s: float


def simulate_lists(
    lists: Iterable[Sequence[Entry]],
    *,
    seconds: Callable[[Entry], float],
    buckets_s: Mapping[int, Sequence[float]] | None = None,
) -> tuple[tuple[EntrySpan, ...], ...]:
    """Return the spans of each device's entries, in the order of its list.

    Arguments:
        lists: by device, its entries.
        seconds: how long an entry takes; not asked for receives and sums.
        buckets_s: by stage, how long the sum of each bucket of its gradients takes. Behind the last B of a stage a
            bucket is begun when its part of that is done, all buckets being equal parts; elsewhere all are complete.

    Raises ScheduleError when an action waits for a message that is never sent.
    """
    devices = [_Device(entries, seconds, buckets_s or {}) for entries in lists]
    sent: dict[Route, EntrySpan] = {}
    running = [(device, device.run(sent)) for device in devices]
    while running:
        before = len(sent)
        left = [(device, run) for device, run in running if next(run, None) is not None]
        if (len(left), len(sent)) == (len(running), before):
            waits = " and ".join(f"'{device.entries[len(device.spans)]}'" for device, _ in left)
            raise ScheduleError(f"the lists have no message that {waits} can go on with; send what it takes before")
        running = left
    return tuple(
        tuple(
            replace(sent[span.entry.route], entry=span.entry) if isinstance(span.entry, Receive) else span
            for span in device.spans
        )
        for device in devices
    )


class _Device:
    """A device on its way through its list."""

    def __init__(
        self, entries: Sequence[Entry], seconds: Callable[[Entry], float], buckets_s: Mapping[int, Sequence[float]]
    ) -> None:
        self.entries, self.seconds, self.buckets_s = entries, seconds, buckets_s
        self.spans: list[EntrySpan] = []
        self.computed_s = self.reduced_s = 0.0
        """When what it has begun to compute, and to gather or sum up, has ended."""
        self.gathered_s: dict[int, float] = {}
        self.summed_s: dict[int, float] = {}

    def run(self, sent: dict[Route, EntrySpan]) -> Iterator[Route]:
        """Add the spans of all entries, and to ``sent`` the messages; yield a message as long as it is waited for."""
        posted: dict[tuple[int, bool, int], list[Route]] = defaultdict(list)
        made_s: dict[tuple[int, bool, int], float] = {}
        for entry in self.entries:
            start_s = self.computed_s
            if isinstance(entry, Receive):
                posted[entry.route.target, entry.route.backward, entry.route.microbatch].append(entry.route)
                end_s = start_s
            elif isinstance(entry, Send):
                start_s = made_s[entry.route.source, entry.route.backward, entry.route.microbatch]
                end_s = start_s + self.seconds(entry)
                sent[entry.route] = EntrySpan(entry, start_s, end_s)
            elif isinstance(entry, Action):
                key = entry.stage, entry.kind != "F", entry.microbatch
                for route in posted.pop(key, ()):
                    while route not in sent:
                        yield route
                    start_s = max(start_s, sent[route].end_s)
                start_s = max(start_s, self.gathered_s.get(entry.stage, 0.0))
                self.computed_s = end_s = start_s + self.seconds(entry)
                made_s.setdefault(key, end_s)  # W makes no message
            elif isinstance(entry, Reduce):
                start_s, end_s = self._summed(entry.stage)
            elif isinstance(entry, Unshard):
                start_s = max(start_s, self.reduced_s)
                self.gathered_s[entry.stage] = self.reduced_s = end_s = start_s + self.seconds(entry)
            else:
                if isinstance(entry, Update):
                    start_s = max(start_s, self.summed_s.get(entry.stage, 0.0))
                self.computed_s = end_s = start_s + self.seconds(entry)
            self.spans.append(EntrySpan(entry, start_s, end_s))

    def _summed(self, stage: int) -> tuple[float, float]:
        """Return when a stage's sum starts and ends, bucket by bucket."""
        last, buckets_s = self.spans[-1], self.buckets_s.get(stage, ())
        beside = isinstance(last.entry, Action) and last.entry[:2] == (stage, "B")
        begun_s = last.start_s if beside else self.computed_s
        start_s = end_s = max(self.reduced_s, self.computed_s)
        for number, bucket_s in enumerate(buckets_s, start=1):
            there_s = begun_s + (self.computed_s - begun_s) * number / len(buckets_s)
            from_s = max(self.reduced_s, there_s)
            start_s = from_s if number == 1 else start_s
            self.reduced_s = end_s = from_s + bucket_s
        self.summed_s[stage] = end_s
        return start_s, end_s
