"""Stages with replicas: against every cut and every number of replicas, counted by hand."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, combinations, pairwise

import numpy as np
import pytest

from autosplit.partition.replication import Replication, StageSeconds, between, flushed, replicate, stages_only


@dataclass(frozen=True)
class Layer:
    """What one minibatch costs a layer: forward and backward, what goes on from it, what its replicas exchange."""

    seconds: float
    output_bytes: float = 0.0
    parameter_bytes: float = 0.0


def pipedream(layers: Sequence[Layer], *, devices: int, bandwidth_bytes_per_s: float) -> StageSeconds:
    """Return what stages of a line take by PipeDream's formula, the transfer behind them included.

    Replicas exchange ``2 (m - 1) / m`` times the bytes of their gradients, each, beside their work. What crosses a cut
    goes there, and its gradient back.
    """
    works_s, parameters, sent = (
        np.array([0.0, *(getattr(layer, name) for layer in layers)])
        for name in ("seconds", "parameter_bytes", "output_bytes")
    )
    sent[-1] = 0.0  # what the last layer makes goes nowhere
    sent_s = 2 * sent / bandwidth_bytes_per_s
    work_s, gradients_s = between(works_s), between(parameters / bandwidth_bytes_per_s)

    @cache
    def own_s(replicas: int) -> np.ndarray:
        own: np.ndarray = np.maximum(work_s, 2 * (replicas - 1) / replicas * gradients_s) / replicas
        return stages_only(np.maximum(own, sent_s))

    return lambda replicas, ahead: own_s(replicas)


def splits(count: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Yield every way to split a count into so many parts of at least one, in order."""
    for inner in combinations(range(1, count), parts - 1):
        bounds = (0, *inner, count)
        yield tuple(stop - start for start, stop in pairwise(bounds))


def slowest_s(layers: Sequence[Layer], sizes: Sequence[int], replicas: Sequence[int], bandwidth: float) -> float:
    """Return what the slowest stage or transfer takes, straight from the paper's formula."""
    times, begin = [], 0
    for size, m in zip(sizes, replicas, strict=True):
        own = layers[begin : begin + size]
        exchange = 2 * (m - 1) / m * sum(layer.parameter_bytes for layer in own) / bandwidth
        times.append(max(sum(layer.seconds for layer in own), exchange) / m)
        begin += size
        if begin < len(layers):
            times.append(2 * own[-1].output_bytes / bandwidth)
    return max(times)


def drawn(rng: random.Random) -> tuple[list[Layer], int, float]:
    layers = [
        Layer(rng.choice([0.0, 1.0, rng.uniform(0, 9)]), rng.uniform(0, 4), rng.choice([0.0, rng.uniform(0, 40)]))
        for _ in range(rng.randint(1, 6))
    ]
    return layers, rng.randint(1, 6), rng.choice([0.3, 1.0, 5.0, 100.0])


def test_the_slowest_stage_is_as_fast_as_any_cut_with_any_replicas():
    for seed in range(400):
        layers, devices, bandwidth = drawn(random.Random(seed))
        least = min(
            slowest_s(layers, sizes, replicas, bandwidth)
            for stages in range(1, min(len(layers), devices) + 1)
            for sizes in splits(len(layers), stages)
            for replicas in splits(devices, stages)
        )
        found = replicate(pipedream(layers, devices=devices, bandwidth_bytes_per_s=bandwidth), devices=devices)
        assert found is not None
        sizes = np.diff(found.bounds).tolist()
        assert (found.bounds[0], found.bounds[-1], sum(found.replicas)) == (0, len(layers), devices)
        assert found.bottleneck_s == pytest.approx(least, rel=1e-12), seed
        assert slowest_s(layers, sizes, found.replicas, bandwidth) == pytest.approx(least, rel=1e-12), seed


@pytest.mark.parametrize("seed", range(60))
def test_a_step_with_a_flush_is_as_short_as_with_any_cut_and_any_replicas(seed):
    rng = random.Random(seed)
    layers, devices, _ = drawn(rng)
    minibatches = rng.randint(devices, 9)
    works, gradients = ([0.0, *(getattr(own, name) for own in layers)] for name in ("seconds", "parameter_bytes"))
    sent = [0.0, *(own.output_bytes for own in layers[:-1]), 0.0]

    def waits_s(begin: int, stop: int, m: int) -> float:
        own_s = (math.ceil(minibatches / m) - 1) * sum(works[begin + 1 : stop + 1])
        exchange_s = 2 * (m - 1) / m * sum(gradients[begin + 1 : stop + 1])
        return max(own_s + exchange_s, minibatches / m * max(sent[begin], sent[stop]))

    least = min(
        max(waits_s(stop - size, stop, m) for stop, size, m in zip(accumulate(sizes), sizes, replicas, strict=True))
        for stages in range(1, min(len(layers), devices) + 1)
        for sizes in splits(len(layers), stages)
        for replicas in splits(devices, stages)
    )
    stage_s = flushed(np.array(works), np.array(gradients), np.array(sent), minibatches=minibatches)
    found = replicate(stage_s, devices=devices)
    assert found is not None
    assert found.bottleneck_s == pytest.approx(least, rel=1e-12)


def test_a_stage_that_is_twice_as_slow_gets_a_replica():
    layers = [Layer(1.0), Layer(2.0), Layer(1.0)]
    found = replicate(pipedream([*layers, Layer(0.0)], devices=4, bandwidth_bytes_per_s=1.0), devices=4)
    assert found is not None
    assert found.bottleneck_s == 1.0
    heavy = [Layer(own.seconds, 0.4, 50.0 * (n != 1)) for n, own in enumerate(layers)]
    assert replicate(pipedream(heavy, devices=4, bandwidth_bytes_per_s=1.0), devices=4) == Replication(
        (0, 1, 2, 3), (1, 2, 1), 1.0
    )


def test_of_equally_fast_ones_there_are_no_more_stages_than_need_be():
    alike = pipedream([Layer(1.0)] * 4, devices=4, bandwidth_bytes_per_s=1.0)
    assert replicate(alike, devices=4) == Replication((0, 4), (4,), 1.0)


def test_what_is_not_allowed_is_left_out():
    free = pipedream([Layer(1.0)] * 4, devices=4, bandwidth_bytes_per_s=1.0)

    def held(replicas: int, ahead: int) -> np.ndarray:
        """Stages hold as many minibatches per layer as devices work from them on, per replica; there is room for 4."""
        layers = np.arange(5)[None, :] - np.arange(5)[:, None]
        return np.where(layers * math.ceil(ahead / replicas) > 4, np.inf, free(replicas, ahead))

    assert replicate(lambda m, n: np.where(np.arange(5) > 0, np.inf, free(m, n)), devices=4) is None
    found = replicate(held, devices=4)
    assert found == Replication((0, 4), (4,), 1.0)
    straight = replicate(lambda m, n: held(m, n) if m == 1 else np.full((5, 5), np.inf), devices=4)
    assert straight == Replication((0, 1, 2, 3, 4), (1, 1, 1, 1), 1.0)
