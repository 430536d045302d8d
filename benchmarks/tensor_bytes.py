"""What a rank sends for one layer of a published model, beside Megatron-LM with sequence parallelism.

    python -m benchmarks.tensor_bytes [NAME ...]

Megatron-LM gathers what each of a layer's two column products takes and scatters each row product's sum, in the forward
and, the other way round, in the backward, which gathers for the weights' gradients again (Korthikanti et al. 2022,
arXiv 2205.05198): ten collectives of s b h elements, each of which sends (t - 1) / t of that. It sums the gradients of
norms' scales once in a step; here that is done for every microbatch.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

import torch
from tabulate import tabulate

from autosplit.options import Sample
from autosplit.tensor.plan import tensor_plan
from autosplit.trace.graph import TracedGraph
from autosplit.trace.ladder import trace
from benchmarks.layout_models import SHAPES, Shape, build

NAMES = ("GPT3-5B", "GPT3-175B", "Llama2-7B", "Llama3-8B", "Llama3-70B", "Nemotron-22B")
LAYER = "layers.2."
"""A layer that has others around it: the first one's inputs and the last one's output may lie otherwise."""


def recorded(shape: Shape) -> TracedGraph:
    """Record a few layers of a decoder, on meta in bf16."""
    model, words = build(replace(shape, layers=5)), torch.zeros(2, shape.length, dtype=torch.int64, device="meta")
    return trace(model.bfloat16(), Sample(words)).graph


def layer_bytes(traced: TracedGraph, shape: Shape, *, ranks: int) -> tuple[float, float]:
    """Return the bytes that a rank sends for a layer and a row: of activations, and of gradients of parameters.

    Both are relative to what Megatron-LM sends of activations.
    """
    draws = {info.name for _, info in traced.compute_nodes() if info.random}
    plan, sent = tensor_plan(traced, ranks=ranks, rows=1, draws=draws), [0.0, 0.0]
    for each in plan.collectives:
        if each.node.startswith((LAYER, f"{LAYER[:-1]}#")):
            sent[each.node in plan.parameters] += each.collective.wire_bytes
    megatron = 10 * shape.length * shape.width * 2 * (ranks - 1) / ranks
    return sent[0] / megatron, sent[1] / megatron


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=NAMES)
    rows = []
    for name in parser.parse_args().names:
        traced = recorded(SHAPES[name])
        rows += [(name, ranks, *layer_bytes(traced, SHAPES[name], ranks=ranks)) for ranks in (2, 4, 8)]
    print(tabulate(rows, ("model", "tp", "activations", "norms, per microbatch of a row"), floatfmt=".5f"))


if __name__ == "__main__":
    main()
