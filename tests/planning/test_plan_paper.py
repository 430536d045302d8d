"""Plans for devices that nobody has to have: nothing is allocated, and the model is as it was."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autosplit import DeviceError, InputError, Sample, plan
from tests.models.blocks import wide_blocks


def blocks(count: int = 6, width: int = 64) -> nn.Sequential:
    return wide_blocks(count, width, norm=True)


def test_the_same_model_with_and_without_values_has_the_same_plan() -> None:
    with torch.device("meta"):
        blank = blocks()
    real = blocks()
    asked = {"devices": "2xL4-24GB", "chunks": 4}
    with_values = plan(real, sample=torch.randn(8, 64), **asked)
    assert with_values == plan(blank, sample=torch.empty(8, 64, device="meta"), **asked)
    assert with_values.machine == "2xL4-24GB"
    assert with_values.devices == ("L4-24GB", "L4-24GB")
    assert with_values.verdict == "fits"


def test_a_reserve_is_of_the_devices_and_a_limit_is_literal() -> None:
    def capacities(**asked: object) -> list[tuple[int | None, int]]:
        made = plan(blocks(4), ["A100-SXM4-80GB", "L4-24GB"], 2, sample=torch.randn(4, 64), schedule="1f1b", **asked)
        return [(stage.memory.capacity_bytes, stage.memory.reserve_bytes) for stage in made.stages]

    whole = [size for size, _ in capacities()]
    assert whole[0] > 3 * whole[1] > 60 * 2**30
    assert capacities() == capacities(reserve="3%") == [(size, round(0.03 * size)) for size in whole]
    assert capacities(reserve="2GiB") == [(size, 2 * 2**30) for size in whole]
    assert capacities(reserve=0) == [(size, 0) for size in whole]
    assert capacities(memory_limit="1GiB") == [(2**30, 0)] * 2
    assert capacities(memory_limit="1GiB", reserve="24MiB") == [(2**30, 24 * 2**20)] * 2


def test_the_peak_falls_with_the_limit() -> None:
    with torch.device("meta"):
        blocks = [nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8)) for _ in range(3)]
        model, sample = nn.Sequential(*blocks), torch.randn(64, 8)
    limits = (66_000, 53_000, 49_000, 40_500, 36_500)
    plans = [plan(model, "1xcpu-lane", sample=sample, memory_limit=limit) for limit in limits]
    peaks = [found.stages[0].memory.peak_bytes for found in plans]
    assert all(peak <= limit for peak, limit in zip(peaks, limits, strict=True))
    assert peaks == sorted(peaks, reverse=True)
    assert len(set(peaks)) == len(peaks)


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        ("8xH100-SXM5-90GB", "H100-SXM5-80GB"),
        (["A100-SXM4-80GB", "T5-16GB"], "T4-16GB"),
        (4, "names no devices to plan for"),
        ([torch.device("cpu")], "names no devices to plan for"),
        ([], "a machine has at least one device"),
    ],
)
def test_devices_that_are_not_known_are_told(devices: object, message: str) -> None:
    with pytest.raises(DeviceError, match=message):
        plan(blocks(2), devices, sample=torch.randn(4, 64))


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"sample": None}, "no inputs are known for Sequential"),
        ({"chunks": "many"}, "chunks='many'"),
        ({"chunks": 0}, "chunks=0"),
        ({"precision": "int8"}, "precision='int8'"),
        ({"reserve": "-1GiB"}, "is no size in bytes"),
        ({"reserve": -1}, "reserve=-1"),
        ({"reserve": "three%"}, "reserve='three%' is no percentage"),
        ({"reserve": "100%"}, "from 0% to less than 100% of a device"),
        ({"reserve": "30GiB"}, r"30\.0 GiB\) leaves nothing of the 21\.6 GiB that L4-24GB may use"),
        ({"reserve": 8, "memory_limit": 8}, r"reserve=8 \(8 B\) leaves nothing of the 8 B"),
        ({"optimizer": "shampoo"}, "optimizer='shampoo'"),
        ({"recompute": "some"}, "recompute='some'"),
        ({"sample": Sample(torch.randn(0, 64))}, "the batch is empty"),
    ],
)
def test_arguments_that_cannot_be_used_are_told(asked: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        plan(blocks(2), "2xL4-24GB", **{"sample": torch.randn(4, 64), **asked})


def test_a_forward_that_hangs_on_values_is_planned_with_them() -> None:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = blocks(4)
            self.gate = nn.Parameter(torch.ones(1))

        def forward(self, value: torch.Tensor) -> torch.Tensor:
            return self.layers(value) if self.gate.item() > 0 else value

    found = plan(Gated(), "2xL4-24GB", 2, sample=torch.randn(4, 64))
    assert sum(stage.parameters for stage in found.stages) == 1 + sum(own.numel() for own in blocks(4).parameters())


def test_chunks_and_schedules_are_searched_where_they_are_left_open() -> None:
    asked = {"sample": torch.empty(16, 512), "precision": "bf16", "devices": "2xH100-SXM5-80GB"}
    found = plan(blocks(4, 512), **asked)
    assert found.step_s <= min(plan(blocks(4, 512), chunks=count, schedule="1f1b", **asked).step_s for count in (2, 16))


def test_a_plan_of_an_evaluation_has_no_backward_and_no_step_of_an_optimizer() -> None:
    asked = {"sample": torch.randn(64, 64), "devices": "2xL4-24GB", "chunks": 4}
    trained, evaluated = (plan(blocks(), **asked, schedule=schedule) for schedule in ("1f1b", "forward"))
    assert {(s.backward_s, s.weight_s, s.backward_issue_s) for s in evaluated.stages} == {(0.0, 0.0, 0.0)}
    longest = max(stage.forward_s for stage in evaluated.stages)
    assert evaluated.bottleneck_s == pytest.approx(longest + sum(own.forward_s for own in evaluated.transfers))
    for stage in evaluated.stages:
        assert (stage.memory.gradient_bytes, stage.memory.activation_bytes) == (0, 0)
        assert 0 < stage.memory.transient_bytes < stage.memory.parameter_bytes, "AdamW's step has a list as large"
    assert sum(s.memory.optimizer_bytes for s in evaluated.stages) == sum(
        s.memory.optimizer_bytes for s in trained.stages
    )


class Masked(nn.Module):
    """Asks whether positions of the whole batch are in order, as transformers' decoders do."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.places = nn.Embedding(32, 8), nn.Embedding(2048, 8)
        self.blocks = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)])
        self.head = nn.Linear(8, 32)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        places = torch.arange(ids.shape[1], device=ids.device).expand(ids.shape[0], -1)
        packed = (torch.diff(places, prepend=places[:, :1] - 1, dim=-1) != 1).cumsum(-1)
        value = self.embedding(ids) + self.places(places)
        if not (packed[:, -1] == 0).all():
            value = value * packed.unsqueeze(-1)
        return self.head(self.blocks(value))


def test_a_large_batch_on_meta_is_planned_with_what_sizes_decide() -> None:
    with torch.device("meta"):
        model, ids = Masked(), torch.zeros(2048, 2048, dtype=torch.long)
    found = plan(model, devices="2xH100-SXM5-80GB", chunks=8, sample=Sample(ids))
    assert found.chunks == 8
    assert found.tokens_per_s == pytest.approx(2048 * found.rows_per_s)
