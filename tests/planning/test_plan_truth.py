"""What plans say and do in small things: links, single rows, one device, plain execution."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn

from autosplit import Plan, plan
from autosplit.options import Options
from autosplit.planning.profiled.specs import link_seconds
from cost_models import registry
from tests.planning.llama import Llama

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
    sent = {boundary.producer: boundary.bytes for boundary in found.boundaries}
    inside = registry.link("H100-SXM5-80GB", "H100-SXM5-80GB").transfer_s(sent[0])
    assert seconds[0, 1] == seconds[2, 3] == pytest.approx(inside, rel=1e-6)
    assert seconds[1, 2] == pytest.approx(network_s(sent[1]), rel=1e-6)


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


def options(*devices: str) -> Options:
    return Options(tuple(map(torch.device, devices)), chunks=2)


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {"cuda:0": "NVIDIA H200", "cuda:1": "NVIDIA H200", "cuda:2": "NVIDIA Unheard-of 9000"}
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: names[str(device)])


@pytest.mark.usefixtures("cards")
def test_a_link_is_that_of_the_cards_which_the_driver_names() -> None:
    count = 2**30
    assert link_seconds(options("cuda:0", "cuda:1"), count) == registry.link(*("H200-SXM-141GB",) * 2).transfer_s(count)
    assert link_seconds(options("cpu", "cuda:0"), count) == registry.link("cpu-lane", "H200-SXM-141GB").transfer_s(
        count
    )
    assert link_seconds(options("cpu", "cpu"), count) == 0.0


@pytest.mark.usefixtures("cards")
def test_the_slowest_link_of_a_row_counts() -> None:
    count = 2**30
    row = link_seconds(options("cuda:0", "cuda:1", "cuda:2", "cuda:2"), count)
    assert row == link_seconds(options("cuda:1", "cuda:2"), count) > link_seconds(options("cuda:0", "cuda:1"), count)


def planned(devices: str, *, width: int = 256, **choices: object) -> Plan:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(8)))
        return plan(model, devices, 8, sample=torch.empty(64, 128, width), **choices)


def said(found: Plan) -> list[str]:
    return [reason for reason in found.reasons if "data parallel" in reason]


def test_a_small_model_is_told_of_data_parallel() -> None:
    [words] = said(planned("4xH100-SXM5-80GB"))
    assert words.startswith("one H100-SXM5-80GB holds the model with room (about ")
    assert "data parallel (DDP) over the 4 has no bubble" in words


def test_one_device_kinds_that_differ_and_full_ones_are_not() -> None:
    assert not said(planned("H100-SXM5-80GB"))
    assert not said(planned("H100-SXM5-80GB+L4-24GB"))
    assert not said(planned("4xH100-SXM5-80GB", schedule="forward"))
    assert not said(planned("4xL4-24GB", width=12288))


class Packed(Llama):
    """Looks for the starts of packed sequences in its positions, as transformers does to make the mask."""

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1], device=ids.device)[None]
        if ids.shape[0] != places.shape[0]:
            places = places.expand(ids.shape[0], -1)
        starts = torch.diff(places, prepend=places[:, :1] - 1, dim=-1) != 1
        return super().forward(ids + starts.cumsum(-1))


def test_microbatches_of_one_row_are_planned() -> None:
    with torch.device("meta"):
        model, ids = Packed(width=64, inner=96, layers=3, heads=4, groups=2), torch.empty(6, 32, dtype=torch.int64)
    made = plan(model, "2xL4-24GB", sample=ids, chunks=6, schedule="1f1b", recompute="never")
    assert made.microbatch_rows == (1,) * 6


def test_planning_imports_nothing_that_only_pipelines_need() -> None:
    code = (
        "import sys, torch, autosplit\n"
        "model = torch.nn.Sequential(*[torch.nn.Linear(4, 4, device='meta') for _ in range(3)])\n"
        "autosplit.plan(model, '2xL4-24GB', sample=torch.empty(4, 4, device='meta'), chunks=2)\n"
        "print(*(n for n in 'pipelined measured recordings lower report runtime.lanes.lanes runtime.step'.split() "
        "if f'autosplit.{n}' in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr
