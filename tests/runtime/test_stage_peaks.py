"""The peak of every lane of a real pipe is the plan's, under every schedule and every way to recompute."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from autosplit.options import Options
from autosplit.pipelined import PipelinedModule
from benchmarks.memory_pipe import ASKED, lane_bytes
from tests.models.blocks import WideBlock

WIDTH, ROWS, CHUNKS = 64, 32, 8


class Tower(nn.Module):
    """Eight equal blocks between two layers; the first block's input is added behind the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4 * WIDTH)
        self.blocks = nn.ModuleList(WideBlock(WIDTH, norm=True) for _ in range(8))

    def forward(self, value: Tensor) -> Tensor:
        skip = value = self.first(value)
        for block in self.blocks:
            value = block(value)
        return self.last(value + skip)


CASES = [
    ("1f1b", 1, "never"),
    ("1f1b", 1, "except_last"),
    ("gpipe", 1, "block"),
    ("interleaved", 2, "never"),
    ("looped_bfs", 2, "always"),
    ("zb_h1", 1, "except_last"),
    ("zb_v", 2, "block"),
]
FEW = [pytest.param(*case, marks=() if place % 3 == 0 else pytest.mark.slow) for place, case in enumerate(CASES)]


@pytest.mark.parametrize(("schedule", "virtual_stages", "recompute"), FEW)
def test_the_peaks_of_a_pipe_are_the_plans(schedule: str, virtual_stages: int, recompute: str) -> None:
    options = Options(
        (torch.device("cpu"),) * 2,
        CHUNKS,
        schedule=schedule,
        virtual_stages=virtual_stages,
        recompute=(recompute,),
        measure=False,
    )
    batch = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0))
    for predicted, measured in lane_bytes(PipelinedModule(Tower(), options), (batch,)):
        assert abs(predicted / measured - 1) <= ASKED, (predicted, measured)
