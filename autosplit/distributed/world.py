"""The processes that run one pipe: who they are, and what they have to agree on.

    mesh (dp 2, pp 3)    replica 0: ranks 0 1 2     a pipeline: messages, and words of one rank for the others
                         replica 1: ranks 3 4 5     all of them: what a call is, and what each one says of it

With a dimension "tp" each replica has several pipelines, the columns. Their ranks of one stage share its tensors.

Small Python values travel by the CPU, one collective each: a block of fixed size, and a second one only where a value
does not fit. What one rank raises is raised on every rank, so that none waits for another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from autosplit.distributed import words
from autosplit.distributed.board import EVERYONE
from autosplit.distributed.groups import new_group
from autosplit.distributed.mesh import Layout
from autosplit.distributed.watch import Watch
from autosplit.errors import InputError, as_known

_VOTE = bytes(words.HEAD)
"""What a vote begins with; any other value has a length there."""
RECORDS = "records a new kind of call, as what its Python reads of the model or of inputs is new there"
"""What the ranks of a replica may do while others wait for them."""


class _Said(NamedTuple):
    """What a rank says when all agree; ``own`` are facts of its replica."""

    facts: dict[str, int]
    own: dict[str, int]
    error: BaseException | None
    word: Any


@dataclass(frozen=True)
class World:
    """The processes of one pipe: a pipeline, or several replicas of it, each of one or several columns.

    Attributes:
        replica: the number of this process's replica.
        rank: the number of this process in its pipeline; so are ranks that methods take.
        columns: by column, replica and rank, the ranks of ``torch.distributed``.
        column: the number of this process's column.
        device: this rank's device.
        axes: the groups over which all ranks gather what they tell each other, one after the other, by the CPU: one
            of all ranks, or those along the pipeline, the replicas and the columns, which take fewer hops.
        control: the group for what the ranks of a pipeline tell each other.
        payload: the group that carries its tensors where no pair of ranks has one of its own.
        across: the group of the ranks with the same part of the model; None where there is one replica.
        tensor: the group of the ranks that share the tensors of a stage; None where there is one column.
        label: tells the groups of this world from those of others.
        accelerated: whether tensors lie on an accelerator, as for NCCL, which has no tags: each sender and receiver
            have a group, and the host reads no losses.
        pairs: these groups; None where this rank is in none of them.
        stages: the groups of ranks that are replicas of one stage.
        watch: ends every rank when one fails.
        hosts: the number of each rank's host, ascending, in the first replica.
    """

    replica: int
    rank: int
    columns: tuple[Layout, ...]
    column: int
    device: torch.device
    axes: tuple[Any, ...]
    control: Any
    payload: Any
    watch: Watch
    across: Any = None
    tensor: Any = None
    hosts: tuple[int, ...] = ()
    label: str = ""
    accelerated: bool = False
    pairs: dict[tuple[int, int], Any] = field(default_factory=dict)
    stages: dict[tuple[int, ...], Any] = field(default_factory=dict)

    @property
    def layout(self) -> Layout:
        """By replica and rank, the ranks of ``torch.distributed`` in this column."""
        return self.columns[self.column]

    @property
    def first(self) -> int:
        """The rank of ``torch.distributed`` that plans for all."""
        return self.columns[0][0][0]

    @property
    def tensor_ranks(self) -> int:
        """How many ranks share the tensors of a stage."""
        return len(self.columns)

    @property
    def pipelines(self) -> int:
        """How many pipelines there are: replicas times columns."""
        return self.replicas * self.tensor_ranks

    def of_replica(self, replica: int) -> tuple[int, ...]:
        """Return the ranks of ``torch.distributed`` in all columns of a replica."""
        return tuple(number for layout in self.columns for number in layout[replica])

    @property
    def size(self) -> int:
        """How many ranks a pipeline has."""
        return len(self.layout[0])

    @property
    def replicas(self) -> int:
        """How many replicas there are."""
        return len(self.layout)

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks of ``torch.distributed`` in this pipeline."""
        return self.layout[self.replica]

    @property
    def number(self) -> int:
        """This process's rank in ``torch.distributed``."""
        return self.members[self.rank]

    @cached_property
    def _order(self) -> list[int]:
        """Where each rank's word is in what was gathered over all axes."""
        numbers = [number for layout in self.columns for members in layout for number in members]
        if len(self.axes) == 1:
            numbers = dist.get_process_group_ranks(self.axes[0])
        return sorted(range(len(numbers)), key=numbers.__getitem__)

    def holders(self, rank: int) -> frozenset[int]:
        """Return the ranks of ``torch.distributed`` that have a rank's part of the model."""
        return frozenset(members[rank] for members in self.layout)

    def open(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Make a group for each sender and receiver of every pipeline; a rank asks for them while it records.

        Ranks that wait meanwhile make theirs too, all in one order.
        """
        if (asked := frozenset(pairs)) - self.pairs.keys():
            self.gather(RECORDS, asked)

    def _open(self, pair: tuple[int, int]) -> None:
        """Make the group of a sender and a receiver; its first use makes it ready."""
        purpose, rows = f"{self.label} from {pair[0]} to {pair[1]}", [[self.members[rank] for rank in pair]]
        self.pairs[pair] = new_group(purpose, rows, self.device.type, self.payload)
        if self.rank in pair:
            probe = torch.zeros(1, device=self.device)
            work = self.isend(probe, pair[1]) if self.rank == pair[0] else self.irecv(probe, pair[0])
            work.wait()

    def isend(self, tensor: torch.Tensor, target: int, tag: int = 0) -> Any:
        """Send a tensor to a rank; return at once. NCCL has no tags: what a rank sends another comes in its order."""
        group = self.pairs.get((self.rank, target)) or self.payload
        return group.send([tensor], dist.get_group_rank(group, self.members[target]), tag)

    def irecv(self, tensor: torch.Tensor, source: int, tag: int = 0) -> Any:
        """Receive a tensor from a rank; return at once."""
        group = self.pairs.get((source, self.rank)) or self.payload
        return group.recv([tensor], dist.get_group_rank(group, self.members[source]), tag)

    def waiting(self, what: str, *ranks: int) -> AbstractContextManager[None]:
        """Say for what, and for which ranks, this one waits; a lost connection is raised with the cause of it."""
        return self._waiting(what, tuple(self.members[rank] for rank in ranks))

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """Give every rank the values of a tensor without gaps that one rank has."""
        with self.waiting(f"values of rank {source}", *([] if source == self.rank else [source])):
            dist.broadcast(tensor, group_src=source, group=self.payload)

    @contextmanager
    def _waiting(self, what: str, numbers: tuple[int, ...]) -> Iterator[None]:
        before = self.watch.doing(what, numbers)
        try:
            yield
        except RuntimeError as error:
            raise self.watch.explain(error) from error
        self.watch.doing(*before)

    def others(self) -> tuple[int, ...]:
        """Return the other ranks of the pipeline."""
        return tuple(rank for rank in range(self.size) if rank != self.rank)

    def begin_to_add(self, tensor: torch.Tensor) -> Any:
        """Begin to add a tensor's values over the replicas, in place; return what `wait_for` takes."""
        return dist.all_reduce(tensor, group=self.across, async_op=True) if self.replicas > 1 else None

    def wait_for(self, what: str, work: Any) -> None:
        """Wait for the other replicas until values have been added."""
        if work is not None:
            with self._waiting(what, tuple(self.holders(self.rank) - {self.number})):
                work.wait()

    def combine(self, what: str, tensor: torch.Tensor, group: Any, op: Any = dist.ReduceOp.SUM) -> None:
        """Combine a tensor's values over the ranks of a group, in place; None: there is this rank alone."""
        if group is not None and group.size() > 1:
            with self._waiting(what, tuple(n for n in dist.get_process_group_ranks(group) if n != self.number)):
                dist.all_reduce(tensor, op, group=group)

    def with_others(self) -> AbstractContextManager[None]:
        """Say that this rank waits for those with which it shares tensors."""
        sharing = tuple(layout[self.replica][self.rank] for layout in self.columns)
        return self._waiting("parts of tensors", tuple(n for n in sharing if n != self.number))

    def gather(self, doing: str, value: Any, judge: Callable[[list[Any]], Any] = lambda values: None) -> list[Any]:
        """Return the value of every rank of all replicas, by its number in ``torch.distributed``.

        Raises on every rank where they are about to do different things, and the error that ``judge`` returns.
        """
        while True:
            rows = self._rows(doing, value)
            values = [row for _, row in rows]
            if (error := judge(values) or self._different_calls(rows)) is not None:
                raise as_known(error)
            if not self._waits_for_recording(rows):
                return values

    def vote(self, doing: str, *numbers: int) -> bool:
        """Tell whether all ranks vote, for the same numbers; what ranks meet for instead they meet for once more."""
        return len(set(self._gathered(doing, _VOTE + repr(numbers).encode(), words.BLOCK))) == 1

    def _rows(self, doing: str, value: Any) -> list[tuple[str, Any]]:
        message = words.packed((doing, value))
        texts = self._gathered(doing, message[: words.BLOCK], words.BLOCK)
        if any(text.startswith(_VOTE) for text in texts):  # of ranks that meet the others now
            texts = self._gathered(doing, message[: words.BLOCK], words.BLOCK)
        ends = [words.end(text) for text in texts]
        if max(ends) > words.BLOCK:
            rest = self._gathered(doing, message[words.BLOCK :], max(ends) - words.BLOCK)
            texts = [text + more for text, more in zip(texts, rest, strict=True)]
        read = {text: words.unpacked(text) for text in set(texts)}  # many ranks say the same
        rows = [read[text] for text in texts]
        asked = {pair for does, pairs in rows if does == RECORDS and isinstance(pairs, frozenset) for pair in pairs}
        for pair in sorted(asked - self.pairs.keys()):
            self._open(pair)
        return rows

    def _gathered(self, doing: str, text: bytes, size: int) -> list[bytes]:
        gathered = words.block(text, size)
        with self._waiting(f"what ranks agree in (it {doing})", EVERYONE if len(self._order) > 1 else ()):
            for group in self.axes:
                blocks = torch.empty(group.size(), gathered.numel(), dtype=torch.uint8)
                dist.all_gather(list(blocks.unbind()), gathered, group=group)
                gathered = blocks.view(-1)
        every = gathered.numpy().tobytes()
        return [every[size * index : size * (index + 1)] for index in self._order]

    def _waits_for_recording(self, rows: list[tuple[str, Any]]) -> bool:
        """Tell whether another replica records a new kind of call, and this one asks again when it has."""
        return rows[self.number][0] != RECORDS and any(does == RECORDS for does, _ in rows)

    def _different_calls(self, rows: list[tuple[str, Any]]) -> BaseException | None:
        """Return an error where ranks are about to do different things; whole replicas may record meanwhile."""
        replicas = [self.of_replica(replica) for replica in range(self.replicas)]
        compared = [n for members in replicas if {rows[n][0] for n in members} != {RECORDS} for n in members]
        for number in compared:
            if rows[number][0] != rows[compared[0]][0]:
                return InputError(
                    f"the ranks make different calls: rank {compared[0]} {rows[compared[0]][0]}, rank {number} "
                    f"{rows[number][0]}"
                )
        return None

    def share(self, source: int, make: Callable[[], Any]) -> Any:
        """Return on every rank what ``make`` returns on one; what it raises there is raised on every rank."""
        return self.told(source, *(attempt(make) if self.rank == source else ()))

    def told(self, source: int, value: Any = None, error: BaseException | None = None) -> Any:
        """Return on every rank the value that one has; its error is raised on every rank."""
        said = self._broadcast(source, (value, words.portable(error)))
        if self.rank != source:
            value, error = said
            if error is not None:
                error.add_note(f"raised on rank {self.members[source]}")
        if error is not None:
            raise as_known(error) if self.pipelines == 1 else error
        return value

    def _broadcast(self, source: int, value: Any) -> Any:
        message = words.packed(value)
        received = self._sent(source, message[: words.BLOCK], words.BLOCK)
        if (end := words.end(received)) > words.BLOCK:
            received += self._sent(source, message[words.BLOCK :], end - words.BLOCK)
        return words.unpacked(received)

    def _sent(self, source: int, text: bytes, size: int) -> bytes:
        block = words.block(text, size)
        with self.waiting(f"word of rank {source}", *([] if source == self.rank else [source])):
            dist.broadcast(block, group_src=source, group=self.control)
        return block.numpy().tobytes()

    def agree(
        self,
        doing: str,
        facts: Mapping[str, Any],
        error: BaseException | None = None,
        word: Any = None,
        *,
        replica_facts: Mapping[str, Any] = MappingProxyType({}),
    ) -> list[Any]:
        """Raise on every rank where one has an error, or where ranks differ in a fact: which, and what each has.

        ``doing`` says what a rank is about to do, where another may be about to do something else. The ranks of a
        replica agree in ``replica_facts``. What is raised is `known_to_all`. Returns the ``word`` of every rank of
        all replicas, by its number in ``torch.distributed``.
        """

        def judge(said: list[Any]) -> BaseException | None:
            if not all(isinstance(row, _Said) for row in said):
                return None
            return self._differing(said, {**facts, **replica_facts}) or self._raised(said, error)

        said = _Said(words.digests(facts), words.digests(replica_facts), words.portable(error), word)
        return [row.word for row in self.gather(doing, said, judge)]

    def _raised(self, said: list[_Said], error: BaseException | None) -> BaseException | None:
        """Return the error of the first rank that has one."""
        for number, row in enumerate(said):
            if row.error is not None and number == self.number:
                return error
            if row.error is not None:
                row.error.add_note(f"raised on rank {number}")
                return row.error
        return None

    def _differing(self, said: list[_Said], facts: Mapping[str, Any]) -> BaseException | None:
        """Return in what a rank differs from the first one of its replica, or of all, by the facts that both have."""
        rows = [[(number, said[number].own) for number in self.of_replica(r)] for r in range(self.replicas)]
        rows.append([(number, row.facts) for number, row in enumerate(said)])
        if (difference := next(filter(None, map(words.first_difference, rows)), None)) is None:
            return None
        name, first, other = difference
        texts = self.gather(f"shows {name}", words.text(facts.get(name)))
        return InputError(words.difference(name, (first, texts[first]), (other, texts[other])))


def attempt(make: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    """Return what a function returns, or what it raises."""
    try:
        return make(), None
    except Exception as error:
        return None, error
