"""A plan on paper has microbatches of one row for a model that leaves an expand out there, as transformers' Llama."""

from __future__ import annotations

import subprocess
import sys

import torch
from torch import Tensor

from autosplit import plan
from tests.planning.llama import Llama


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
