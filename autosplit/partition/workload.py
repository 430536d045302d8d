"""Problems from files: the format ``autosplit-workload/1``, a graph of nodes with times, bytes and tensors.

Files come from strangers: what is read is data only, checked before anything is made of it.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import networkx as nx
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from autosplit.errors import InputError
from autosplit.partition.problem import Problem, TensorEdge, Work, devices_of

FORMAT = "autosplit-workload/1"
MOST_MS = 1e12
"""The longest time of a node or a transfer, some thirty years."""
MOST_BYTES = 2**53
"""The most bytes of all nodes together: up to here sums of bytes are exact in floating point."""

_CYCLE_FLOWS = 100
"""Through so many edges of kind f a shorter cycle is looked for than the first."""
_SHOWN_NODES = 12
_SHOWN_CHARACTERS = 60
_EDGE = ("src", "dst", "tensor", "ms", "kind")
_MS_PER_S = 1e3

Ms = Annotated[float, Field(ge=0, le=MOST_MS)]
Bytes = Annotated[float, Field(ge=0, le=MOST_BYTES)]


class _Record(BaseModel):
    # Other fields may stand beside these, for their authors; a misspelt one of ours is refused below.
    model_config = ConfigDict(frozen=True, strict=True, extra="allow", allow_inf_nan=False)


class _Header(_Record):
    """The format alone, read first, so that files of another format get an error that says so."""

    format: str


class _Node(_Record):
    id: int
    name: str
    fwd: Ms
    bwd: Ms
    mem: Bytes
    color: int | str | None = None


_Edge = tuple[int, int, int, Ms, Literal["f", "b", "o"]]


class _WorkloadFile(_Header):
    name: str = ""
    unit: Literal["ms"] = "ms"
    mem_cap: Annotated[float, Field(ge=0)] | None = None
    nodes: tuple[_Node, ...]
    edges: tuple[_Edge, ...]


@dataclass(frozen=True)
class Workload:
    """What a file describes: works in the order of their ids, and the bytes that a stage may have (None: no limit)."""

    name: str
    works: tuple[Work, ...]
    nets: tuple[TensorEdge, ...]
    order: tuple[tuple[int, int], ...]
    capacity_bytes: int | None

    def problem(
        self, *, stages: int, capacity_bytes: int | None = None, microbatches: int = 1, schedule: str = "1f1b"
    ) -> Problem:
        """Return the problem of cutting it into ``stages`` stages; ``capacity_bytes`` replaces the file's own limit."""
        capacity = self.capacity_bytes if capacity_bytes is None else min(capacity_bytes, MOST_BYTES)
        return Problem(
            self.works,
            self.nets,
            order=self.order,
            microbatches=microbatches,
            schedule=schedule,
            devices=None if capacity is None else devices_of((capacity,) * stages),
        )


def load_workload(path: str | Path) -> Workload:
    """Read a workload file; raise InputError, with the position, for anything else."""
    try:
        text = Path(path).read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise InputError(f"cannot read the workload {str(path)!r}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{str(path)!r} is no workload: it is no UTF-8 text; write JSON in {FORMAT}") from error
    return parse_workload(text, source=repr(str(path)))


def parse_workload(text: str, *, source: str = "the workload") -> Workload:
    """Return the workload that JSON text describes; ``source`` is what errors call it."""
    try:
        file_format = _Header.model_validate_json(text).format
        if file_format != FORMAT:
            raise InputError(f"{source} has the format {_short(file_format)}; this autosplit reads {FORMAT!r}")
        file = _WorkloadFile.model_validate_json(text)
    except ValidationError as error:
        raise InputError(f"{source} is no workload: {_first_error(error)}; the format is {FORMAT}") from error
    try:
        return _workload(file)
    except _Refused as refusal:
        raise InputError(f"{source}: {refusal}") from None


class _Refused(Exception):
    """Why a file of the right shape cannot be used."""


def _workload(file: _WorkloadFile) -> Workload:
    _check_spelling("the file", file.model_extra, known=("mem_cap", "unit", "nodes", "edges"))
    if not file.nodes:
        raise _Refused("nodes is empty; a workload has at least one")
    for index, node in enumerate(file.nodes):
        _check_spelling(f"nodes[{index}]", node.model_extra, known=("fwd", "bwd", "mem", "color"))
        _check_id(file.nodes, index)
    total = sum(node.mem for node in file.nodes)
    if total > MOST_BYTES:
        raise _Refused(
            f"the mem of all nodes adds up to {total:.3g} bytes; at most {MOST_BYTES:,} can be added exactly"
        )
    nets, order = _nets(file)
    return Workload(
        name=file.name,
        works=tuple(
            Work(
                node.name,
                forward_s=node.fwd / _MS_PER_S,
                backward_s=node.bwd / _MS_PER_S,
                static_bytes=math.ceil(node.mem),
                colocation_group=node.color,
            )
            for node in file.nodes
        ),
        nets=nets,
        order=order,
        capacity_bytes=None if file.mem_cap is None else min(math.floor(file.mem_cap), MOST_BYTES),
    )


def _check_spelling(where: str, extra: Mapping[str, object] | None, *, known: Sequence[str]) -> None:
    for name in extra or ():
        near = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.8)
        if near:
            raise _Refused(f"{where} has {_short(name)}, which is nothing here; did you mean {near[0]!r}?")


def _check_id(nodes: Sequence[_Node], index: int) -> None:
    id_ = nodes[index].id
    if id_ == index:
        return
    again = f", and so is that of nodes[{id_}]" if 0 <= id_ < len(nodes) and nodes[id_].id == id_ else ""
    raise _Refused(f"the id of nodes[{index}] is {_number(id_)}{again}; an id is the node's place in the list, {index}")


def _nets(file: _WorkloadFile) -> tuple[tuple[TensorEdge, ...], tuple[tuple[int, int], ...]]:
    """Return the tensors, each one net whatever the kinds of its edges, and the pairs that only order demands.

    Where only some of a tensor's edges set an order, the net is without one, and these edges are pairs: so the tensor
    still costs a stage once. Edges of kind o alone may form cycles: such nodes must be in one stage.
    """
    tensors: dict[int, list[tuple[int, _Edge]]] = {}
    order: dict[tuple[int, int], None] = {}
    flows: dict[tuple[int, int], None] = {}
    for index, edge in enumerate(file.edges):
        _check_edge(index, edge, nodes=len(file.nodes))
        tail, head, tensor, _, kind = edge
        if kind == "o":
            order[tail, head] = None
        else:
            tensors.setdefault(tensor, []).append((index, edge))
        if kind == "f":
            flows[tail, head] = None
    cycle = shortest_cycle(flows, order)
    if cycle is not None:
        raise _Refused(
            f"edges of kind f and o form a cycle: {_named(file.nodes, cycle)}; nodes that need each other's results "
            "cannot be ordered: drop an edge, call a gradient's kind b, or make one node of them"
        )
    nets = []
    for edges in tensors.values():
        net, pairs = _net(edges)
        order |= dict.fromkeys(pairs)
        if net is not None:
            nets.append(net)
    return tuple(nets), tuple(order)


def _check_edge(index: int, edge: _Edge, *, nodes: int) -> None:
    tail, head, tensor, _, kind = edge
    for end, node in (("src", tail), ("dst", head)):
        if not 0 <= node < nodes:
            raise _Refused(f"edges[{index}] has {end} {_number(node)}; the nodes are 0 to {nodes - 1}")
    if tensor < -1 or (tensor == -1) != (kind == "o"):
        raise _Refused(
            f"edges[{index}] has kind {kind!r} and tensor {_number(tensor)}; kinds 'f' and 'b' carry a "
            "tensor, numbered from 0, and kind 'o' carries none, which is -1"
        )


def _net(edges: Sequence[tuple[int, _Edge]]) -> tuple[TensorEdge | None, list[tuple[int, int]]]:
    """Return the net of one tensor's edges, None where all stay with its producer, and the pairs that it orders."""
    first, (producer, _, tensor, cost_ms, _) = edges[0]
    for index, (tail, _, _, ms, _) in edges:
        both = f"edges[{first}] and edges[{index}] carry tensor {_number(tensor)}"
        if tail != producer:
            raise _Refused(
                f"{both} from nodes {producer} and {tail}; a tensor has one producer: give each its own number"
            )
        if ms != cost_ms:
            raise _Refused(f"{both} for {cost_ms} and {ms} ms; a tensor has one cost: give each its own number")
    ordered = {head for _, (_, head, _, _, kind) in edges if kind == "f"}
    consumers = tuple(dict.fromkeys(head for _, (_, head, _, _, _) in edges if head != producer))
    if not consumers:
        return None, []
    cost_s = cost_ms / _MS_PER_S
    forward_s, backward_s = (cost_s, 0.0) if ordered else (0.0, cost_s)
    if ordered.issuperset(consumers):
        return TensorEdge(producer, consumers, forward_s, backward_s), []
    pairs = [(producer, head) for head in consumers if head in ordered]
    return TensorEdge(producer, consumers, forward_s, backward_s, ordered=False), pairs


def shortest_cycle(flows: Iterable[tuple[int, int]], order: Iterable[tuple[int, int]]) -> list[int] | None:
    """Return a shortest cycle of ``flows`` and ``order`` that has a flow in it, begun with one; None without one.

    Where very many flows lie on cycles it is the shortest through some of them.
    """
    flows = sorted(flows)
    graph = nx.DiGraph([*flows, *order])
    component = {node: index for index, scc in enumerate(nx.strongly_connected_components(graph)) for node in scc}
    inside = [(tail, head) for tail, head in flows if component[tail] == component[head]]
    ways = (nx.shortest_path(graph, head, tail) for tail, head in inside[:_CYCLE_FLOWS])
    path = min(ways, key=len, default=None)
    return None if path is None else [path[-1], *path[:-1]]


def _named(nodes: Sequence[_Node], cycle: Sequence[int]) -> str:
    """Return ``3 'conv' -> 5 'relu' -> 3``, shortened where it is long."""
    shown = [f"{index} {_short(nodes[index].name)}" for index in cycle[:_SHOWN_NODES]]
    if len(cycle) > len(shown):
        shown.append(f"... ({len(cycle)} nodes in all)")
    return " -> ".join((*shown, str(cycle[0])))


def _first_error(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_context=False)[0]
    path = ""
    for step, key in enumerate(first["loc"][:3]):
        if isinstance(key, str):
            path += f".{key}" if path else key
        else:
            path += f".{_EDGE[key]}" if step == 2 and first["loc"][0] == "edges" and key < len(_EDGE) else f"[{key}]"
    scalar = isinstance(first["input"], (int, float, str, bool, type(None))) and first["type"] != "json_invalid"
    value = f" is {_short(first['input'])}" if scalar else ""
    text = first["msg"][0].lower() + first["msg"][1:]
    more = f" (problems in all: {error.error_count()})" if error.error_count() > 1 else ""
    return f"{path or 'the file'}{value}: {text}{more}"


def _number(value: int) -> str:
    """Return a number in short: a stranger's may have thousands of digits."""
    return str(value) if abs(value) < 10**18 else f"a number of {value.bit_length()} bits"


def _short(value: object) -> str:
    """Return a short printable form of a value of the file."""
    if isinstance(value, int):
        return _number(value)
    text = ascii(value) if not isinstance(value, str) else repr(value[: _SHOWN_CHARACTERS + 1])
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[: _SHOWN_CHARACTERS - 3]}..."
