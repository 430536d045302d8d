"""The processes that run one pipe: who they are, and what they have to agree on.

Small Python values travel over a gloo group of our own, one collective each: a block of fixed size, and a second one
only where a value does not fit. What one rank raises is raised on every rank, so that none waits for another.
"""

from __future__ import annotations

import os
import pickle
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, rendezvous  # type: ignore[attr-defined]

from autosplit.distributed.watch import Watch
from autosplit.errors import AutosplitError, DeviceError, InputError

_BLOCK = 1024
"""Bytes of one rank's value in the first collective, its length among them."""
_HEAD = 8
_KNOWN = "known to all ranks"
_SHOWN = 300
"""How many characters of a value that differs are shown."""


class _Said(NamedTuple):
    """What a rank says when all agree."""

    facts: dict[str, int]
    error: BaseException | None
    word: Any


@dataclass(frozen=True)
class World:
    """The processes of one pipe.

    Attributes:
        rank: the number of this process.
        size: how many there are.
        device: this rank's device.
        control: the gloo group for what ranks tell each other.
        payload: the group that carries tensors where no pair of ranks has one of its own.
        pairs: the groups of sender and receiver; NCCL keeps the order of a group's messages, and has no tags.
        watch: ends every rank when one fails.
        hosts: the number of each rank's host, ascending.
    """

    rank: int
    size: int
    device: torch.device
    control: Any
    payload: Any
    watch: Watch
    hosts: tuple[int, ...] = ()
    pairs: dict[tuple[int, int], Any] = field(default_factory=dict)

    def open(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Make a group for each sender and receiver, in one order on all ranks; its first use makes it ready."""
        for pair in sorted(set(pairs) - self.pairs.keys()):
            group = dist.new_group(sorted(pair))
            self.pairs[pair] = group
            if self.rank in pair:
                probe = torch.zeros(1, device=self.device)
                work = self.isend(probe, pair[1]) if self.rank == pair[0] else self.irecv(probe, pair[0])
                work.wait()

    def isend(self, tensor: torch.Tensor, target: int, tag: int = 0) -> Any:
        """Send a tensor to a rank; return at once."""
        group = self.pairs.get((self.rank, target), self.payload)
        return dist.isend(tensor, target, group=group, tag=tag)

    def irecv(self, tensor: torch.Tensor, source: int, tag: int = 0) -> Any:
        """Receive a tensor from a rank; return at once."""
        group = self.pairs.get((source, self.rank), self.payload)
        return dist.irecv(tensor, source, group=group, tag=tag)

    @contextmanager
    def waiting(self, what: str, *ranks: int) -> Iterator[None]:
        """Say for what, and for which ranks, this one waits; a lost connection is raised with the cause of it."""
        before = self.watch.doing(what, ranks)
        try:
            yield
        except RuntimeError as error:
            raise self.watch.explain(error) from error
        self.watch.doing(*before)

    def others(self) -> tuple[int, ...]:
        """Return the other ranks."""
        return tuple(rank for rank in range(self.size) if rank != self.rank)

    def gather(self, doing: str, value: Any) -> list[Any]:
        """Return every rank's value, by rank; raise on every rank where they are about to do different things."""
        rows = self._rows(doing, value)
        if (found := _different_calls(rows)) is not None:
            raise _known(found)
        return [row for _, row in rows]

    def _rows(self, doing: str, value: Any) -> list[tuple[str, Any]]:
        own = _packed((doing, value))
        found = self._gathered(own[:_BLOCK], _BLOCK)
        ends = [_end(text) for text in found]
        if max(ends) > _BLOCK:
            rest = self._gathered(own[_BLOCK:], max(ends) - _BLOCK)
            found = [text + more for text, more in zip(found, rest, strict=True)]
        return [pickle.loads(text[_HEAD:end]) for text, end in zip(found, ends, strict=True)]

    def _gathered(self, text: bytes, size: int) -> list[bytes]:
        blocks = [torch.empty(size, dtype=torch.uint8) for _ in range(self.size)]
        with self.waiting("what ranks agree in", *self.others()):
            dist.all_gather(blocks, _block(text, size), group=self.control)
        return [block.numpy().tobytes() for block in blocks]

    def share(self, source: int, make: Callable[[], Any]) -> Any:
        """Return on every rank what ``make`` returns on one; what it raises there is raised on every rank."""
        return self.send(source, *attempt(make)) if self.rank == source else self.receive(source)

    def send(self, source: int, value: Any, error: BaseException | None = None) -> Any:
        """Tell every other rank a value, or an error, which is raised here too."""
        self._broadcast(source, (value, _portable(error)))
        if error is not None:
            raise _known(error)
        return value

    def receive(self, source: int) -> Any:
        """Return what a rank sends; raise its error."""
        value, error = self._broadcast(source, None)
        if error is not None:
            error.add_note(f"raised on rank {source}")
            raise _known(error)
        return value

    def _broadcast(self, source: int, value: Any) -> Any:
        own = _packed(value) if self.rank == source else b""
        found = self._sent(source, own[:_BLOCK], _BLOCK)
        if (end := _end(found)) > _BLOCK:
            found += self._sent(source, own[_BLOCK:], end - _BLOCK)
        return pickle.loads(found[_HEAD:end])

    def _sent(self, source: int, text: bytes, size: int) -> bytes:
        block = _block(text, size)
        with self.waiting(f"word of rank {source}", *([] if source == self.rank else [source])):
            dist.broadcast(block, group_src=source, group=self.control)
        return block.numpy().tobytes()

    def agree(
        self, doing: str, facts: Mapping[str, Any], error: BaseException | None = None, word: Any = None
    ) -> list[Any]:
        """Raise on every rank where one has an error, or where ranks differ in a fact: which, and what each has.

        ``doing`` says what a rank is about to do, where another may be about to do something else. What is raised is
        `known_to_all`. Returns each rank's ``word``.
        """
        own = {name: digest(fact) for name, fact in facts.items()}
        rows = self._rows(doing, _Said(own, _portable(error), word))
        said = [row for _, row in rows if isinstance(row, _Said)]
        found = None
        if len(said) == self.size:
            found = self._differing(said, facts) or self._raised(said, error)
        found = found or _different_calls(rows)
        if found is not None:
            raise _known(found)
        return [row.word for row in said]

    def _raised(self, said: list[_Said], error: BaseException | None) -> BaseException | None:
        """Return the error of the first rank that has one."""
        for rank, (_, raised, _) in enumerate(said):
            if raised is not None and rank == self.rank:
                return error
            if raised is not None:
                raised.add_note(f"raised on rank {rank}")
                return raised
        return None

    def _differing(self, said: list[_Said], facts: Mapping[str, Any]) -> BaseException | None:
        """Return in what a rank differs from rank 0, by the facts that all have."""
        own = said[0].facts
        for name in (name for name in own if all(name in row.facts for row in said)):
            other = next((rank for rank, row in enumerate(said) if row.facts[name] != own[name]), None)
            if other is not None:
                texts = self.gather(f"shows {name}", _text(facts[name]))
                return InputError(_difference(name, texts[0], texts[other], other))
        return None


def _different_calls(rows: list[tuple[str, Any]]) -> BaseException | None:
    first = rows[0][0]
    for rank, (does, _) in enumerate(rows):
        if does != first:
            return InputError(f"the ranks make different calls: rank 0 {first}, rank {rank} {does}")
    return None


def _known(error: BaseException) -> BaseException:
    error.__dict__[_KNOWN] = True
    return error


def known_to_all(error: BaseException) -> bool:
    """Tell whether an error was raised on every rank at once."""
    return bool(error.__dict__.get(_KNOWN))


def _packed(value: Any) -> bytes:
    """Return a value as bytes, their number first."""
    data = pickle.dumps(value)
    return len(data).to_bytes(_HEAD, "little") + data


def _end(text: bytes) -> int:
    return _HEAD + int.from_bytes(text[:_HEAD], "little")


def _block(text: bytes, size: int) -> torch.Tensor:
    return torch.frombuffer(bytearray(text.ljust(size, b"\0")), dtype=torch.uint8)


def attempt(make: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    """Return what a function returns, or what it raises."""
    try:
        return make(), None
    except Exception as error:
        return None, error


def digest(fact: Any) -> int:
    """Return a number for a fact, the same in every process; an int stands for itself."""
    return fact if isinstance(fact, int) else _checksum(_text(fact))


@lru_cache(maxsize=64)
def _checksum(text: str) -> int:
    return zlib.crc32(text.encode())


def _text(fact: Any) -> str:
    return fact if isinstance(fact, str) else repr(fact)


def _difference(name: str, first: str, other: str, rank: int) -> str:
    one, two = first.splitlines(), other.splitlines()
    place = next((n for n, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))
    left, right = (lines[place][:_SHOWN] if place < len(lines) else "nothing" for lines in (one, two))
    return f"the ranks differ in {name}: rank 0 has {left}, rank {rank} has {right}"


def _portable(error: BaseException | None) -> BaseException | None:
    """Return an error that another process can read."""
    if error is None:
        return None
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        public = next((kind for kind in type(error).__mro__ if kind.__module__ == AutosplitError.__module__), None)
        return public(str(error)) if public is not None else RuntimeError(f"{type(error).__name__}: {error}")
    return error


_JOINED: dict[Any, World] = {}
"""The world of the default process group, which is made once."""


def join() -> World:
    """Return this process's world; initialise torch.distributed by torchrun's environment where nobody has.

    Raises DeviceError where the process was not started as one of several, and where two ranks have one device.
    """
    if not dist.is_available():
        raise DeviceError("devices='torchrun' needs torch.distributed, which this torch is built without")
    if not dist.is_initialized():
        missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
        if missing:
            raise DeviceError(
                f"devices='torchrun' is for a process that torchrun has started, and {', '.join(missing)} is not set; "
                "run torchrun --nproc-per-node N script.py, or call torch.distributed.init_process_group first"
            )
        store, rank, size = next(rendezvous("env://"))
        attempt_number = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # a restart may get the former one's store
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=PrefixStore(attempt_number, store), rank=rank, world_size=size)
    default = dist.group.WORLD
    if default not in _JOINED:
        _JOINED.clear()
        _JOINED[default] = _joined()
    return _JOINED[default]


def _joined() -> World:
    rank, size = dist.get_rank(), dist.get_world_size()
    watch = Watch(rank, size)
    control = dist.new_group(backend="gloo")
    device = _device(rank)
    config = dist.get_backend_config(dist.group.WORLD)
    payload = control if device.type == "cpu" else dist.group.WORLD
    world = World(rank, size, device, control, payload, watch)
    places = world.gather("joins", (os.uname().nodename, str(device), device.type != "cpu"))
    for other, place in enumerate(places):
        if place[2] and places.index(place) != other:
            raise DeviceError(
                f"ranks {places.index(place)} and {other} have one device, {place[1]} of {place[0]}; start as many "
                "processes per host as it has devices"
            )
    if device.type != "cpu" and device.type not in config:
        raise DeviceError(
            f"this process has {device}, and torch.distributed was initialised with {config}, which carries no "
            f"{device.type} tensors; initialise it with 'cpu:gloo,cuda:nccl', or leave that to autosplit"
        )
    if len({place[2] for place in places}) > 1:
        raise DeviceError("some ranks have a CUDA device and others have none; give every rank a device of one kind")
    names = [place[0] for place in places]
    order = list(dict.fromkeys(names))
    return replace(world, hosts=tuple(order.index(name) for name in names))


def _device(rank: int) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    count = torch.cuda.device_count()
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank % count)) % count)
