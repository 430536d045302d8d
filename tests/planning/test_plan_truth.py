"""A plan says what is so: link times of several hosts, errors as what they are, the fastest recompute that fits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from autosplit import plan
from cost_models import registry

WIDTH, ROWS, CHUNKS = 512, 32, 8


def mlp(layers: int = 8, width: int = WIDTH) -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(layers)))


def rows(width: int = WIDTH) -> Tensor:
    return torch.empty(ROWS, width, device="meta")


def test_hops_inside_a_host_take_nvlinks_time_in_a_plan_of_several_hosts() -> None:
    found = plan(mlp(), "2x2xH100-SXM5-80GB", CHUNKS, sample=rows(), schedule="1f1b")
    seconds = {(one.producer, one.consumer): one.forward_s for one in found.transfers}
    assert set(seconds) == {(0, 1), (1, 2), (2, 3)}
    inside = registry.link("H100-SXM5-80GB", "H100-SXM5-80GB").transfer_s(2**25)
    between = seconds[1, 2]
    assert seconds[0, 1] == seconds[2, 3] < between / 2
    assert seconds[0, 1] / between == pytest.approx(inside / network_s(2**25), rel=1e-6)


def network_s(count: int) -> float:
    import cost_models

    machine = cost_models.machine("2x2xH100-SXM5-80GB")
    link = machine.link(1, 2)
    return link.latency_s + count / link.bandwidth_bytes_per_s


def test_the_largest_batch_is_in_the_microbatches_that_were_asked_for() -> None:
    """Also where the sample has fewer rows than that."""
    found = plan(mlp(2), "2xH100-SXM5-80GB", 48, sample=rows(), find="largest_batch", memory_limit="40MiB")
    assert (found.chunks, len(found.microbatch_rows)) == (48, 48)
    assert "fits in 48 microbatches" in found.reasons[0]
