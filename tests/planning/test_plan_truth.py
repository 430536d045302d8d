"""What plans say and do in small things: links, single rows, one device, plain execution."""

from __future__ import annotations

import subprocess
import sys

import torch
from torch import Tensor, nn

from autosplit import Plan, plan
from tests.planning.llama import Llama


def test_the_largest_batch_is_in_the_microbatches_that_were_asked_for() -> None:
    """Also where the sample has fewer rows than that."""
    with torch.device("meta"):
        model, sample = nn.Sequential(nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 512)), torch.empty(32, 512)
    found = plan(model, "2xH100-SXM5-80GB", 48, sample=sample, find="largest_batch", memory_limit="40MiB")
    assert (found.chunks, len(found.microbatch_rows)) == (48, 48)
    assert "fits in 48 microbatches" in found.reasons[0]


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
