"""Op graphs of Llama's shape in any length, for the partitioner: 50 nodes per layer and 16 around them.

    problem = llama_problem(layers=100)      # 5,016 nodes

Times are a roofline's, of one microbatch on one device in bf16, with a seeded scatter of ±10%, as measured times have
it; transfers are those of the network between two hosts. Layers are as wide as Llama-70B's.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from autosplit.partition.problem import Hold, Problem, TensorEdge, Work
from cost_models import OpWork, Roofline, machine

MACHINE = "2x8xH100-SXM5-80GB"
TOKENS, WIDTH, INNER, WORDS = 4096, 8192, 28672, 32000
KV_WIDTH = WIDTH // 8
AROUND, PER_LAYER = 16, 50

_ACTIVATION, _KV, _GATED = 2 * TOKENS * WIDTH, 2 * TOKENS * KV_WIDTH, 2 * TOKENS * INNER
_ROW, _LOGITS = 4 * TOKENS, 2 * TOKENS * WORDS
_BYTES_PER_PARAMETER = 16
"""bf16 weight and gradient, fp32 master weight and two moments."""


@dataclass
class _Builder:
    scatter: float
    works: list[Work] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    consumers: list[list[int]] = field(default_factory=list)
    savers: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        found = machine(MACHINE)
        self.roofline, self.link = Roofline(found.devices[0]), found.link(0, len(found.devices) - 1)
        self.chance = random.Random(0)

    def add(
        self, name: str, size: int, *inputs: int, kind: str = "elementwise", saves: bool = True, **parts: int
    ) -> int:
        """Add a node that makes one tensor of ``size`` bytes; ``flops`` and ``parameters`` are given by name."""
        flops, parameters = parts.get("flops", 0), parts.get("parameters", 0)
        moved = size + sum(self.sizes[tensor] for tensor in inputs) + 2 * parameters
        forward_s, backward_s = (
            0.0
            if kind == "view"
            else self.roofline.seconds(OpWork(kind=kind, flops=times * flops, bytes=times * moved, dtype="bf16"))
            * self.chance.uniform(1 - self.scatter, 1 + self.scatter)
            for times in (1, 2)
        )
        index = len(self.works)
        self.works.append(
            Work(f"{name}_{index}", forward_s, backward_s, _BYTES_PER_PARAMETER * parameters, transient_bytes=size)
        )
        self.sizes.append(size)
        self.consumers.append([])
        self.savers.append([])
        for tensor in inputs:
            self.consumers[tensor].append(index)
            if saves and kind != "view":
                self.savers[tensor].append(index)
        return index

    def linear(self, name: str, tensor: int, wide: int, tall: int, *, size: int) -> int:
        return self.add(name, size, tensor, kind="matmul", flops=2 * TOKENS * wide * tall, parameters=wide * tall)

    def norm(self, tensor: int) -> int:
        wide = self.add("to_f32", 2 * _ACTIVATION, tensor, kind="copy", saves=False)
        mean = self.add("mean", _ROW, self.add("pow", 2 * _ACTIVATION, wide), kind="reduction", saves=False)
        scale = self.add("rsqrt", _ROW, self.add("add_eps", _ROW, mean, saves=False))
        narrow = self.add(
            "to_bf16", _ACTIVATION, self.add("mul", 2 * _ACTIVATION, wide, scale), kind="copy", saves=False
        )
        return self.add("mul_w", _ACTIVATION, narrow, parameters=WIDTH)

    def heads(self, name: str, tensor: int, wide: int) -> int:
        size = 2 * TOKENS * wide
        flat = self.add("view", size, self.linear(name, tensor, WIDTH, wide, size=size), kind="view")
        return self.add("transpose", size, flat, kind="view")

    def rotated(self, tensor: int, cos: int, sin: int) -> int:
        size = self.sizes[tensor]
        left = self.add("slice", size // 2, tensor, kind="view")
        right = self.add("neg", size // 2, self.add("slice", size // 2, tensor, kind="view"), saves=False)
        turned = self.add("cat", size, right, left, kind="copy", saves=False)
        straight = self.add("mul_cos", size, tensor, cos)
        return self.add("add", size, straight, self.add("mul_sin", size, turned, sin), saves=False)

    def layer(self, tensor: int, cos: int, sin: int, mask: int) -> int:
        start = self.norm(tensor)
        query, key = self.heads("q_proj", start, WIDTH), self.heads("k_proj", start, KV_WIDTH)
        value = self.heads("v_proj", start, KV_WIDTH)
        query, key = self.rotated(query, cos, sin), self.rotated(key, cos, sin)
        flops = 2 * TOKENS * TOKENS * WIDTH
        mixed = self.add("sdpa", _ACTIVATION, query, key, value, mask, kind="attention", flops=flops)
        flat = self.add("reshape", _ACTIVATION, self.add("transpose", _ACTIVATION, mixed, kind="view"), kind="view")
        out = self.linear("o_proj", flat, WIDTH, WIDTH, size=_ACTIVATION)
        middle = self.add("add", _ACTIVATION, tensor, out, saves=False)
        start = self.norm(middle)
        gate, up = (self.linear(name, start, WIDTH, INNER, size=_GATED) for name in ("gate", "up"))
        product = self.add("mul", _GATED, self.add("silu", _GATED, gate), up)
        down = self.linear("down", product, INNER, WIDTH, size=_ACTIVATION)
        return self.add("add", _ACTIVATION, middle, down, saves=False)

    def problem(self, microbatches: int) -> Problem:
        nets, holds = [], []
        for producer, consumers in enumerate(self.consumers):
            if consumers:
                size = self.sizes[producer]
                transfer_s = self.link.latency_s + size / self.link.bandwidth_bytes_per_s
                nets.append(TensorEdge(producer, tuple(consumers), transfer_s, transfer_s))
                holds.append(Hold(size, producer, tuple(consumers), tuple(self.savers[producer])))
        return Problem(tuple(self.works), tuple(nets), tuple(holds), microbatches=microbatches)


def llama_problem(*, layers: int, microbatches: int = 256, scatter: float = 0.1) -> Problem:
    """Return the graph with 16 + 50 · ``layers`` nodes."""
    graph = _Builder(scatter)
    tokens = graph.add("input_ids", 8 * TOKENS, kind="view")
    state = graph.add("embed", _ACTIVATION, tokens, kind="embedding", parameters=WORDS * WIDTH)
    positions = graph.add("arange", 8 * TOKENS)
    cos, sin = (graph.add(name, 2 * TOKENS * 128, positions) for name in ("cos", "sin"))
    mask = graph.add("mask", 2 * TOKENS * TOKENS // 8, tokens)
    for _ in range(layers):
        state = graph.layer(state, cos, sin, mask)
    logits = graph.linear("lm_head", graph.norm(state), WIDTH, WORDS, size=_LOGITS)
    graph.add("loss", 4, logits, kind="reduction")
    assert len(graph.works) == AROUND + PER_LAYER * layers
    return graph.problem(microbatches)
