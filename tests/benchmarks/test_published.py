"""The published rows: every one has its answer; torchgpipe's networks are theirs; the devices are played as theirs."""

from __future__ import annotations

import pytest
import torch

from benchmarks import published
from benchmarks.published_models import unet
from benchmarks.published_torchgpipe import Experiment, experiments, stages_of


def parameters(model: torch.nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def test_the_rows_of_torchgpipe_are_all_modelled():
    assert [row["model"] for row in published.rows()] == list(experiments())


@pytest.mark.parametrize(
    ("name", "layers", "millions"),
    [
        ("U-Net (11,128) chunks32 [505]", 505, 2213.8),
        ("U-Net (24,128) chunks32 [526,551]", 1077, 4993.9),
        ("AmoebaNet-D (18,208)", 24, 81.5),
        ("AmoebaNet-D (18,544) [16,8]", 24, 542.7),
    ],
)
def test_the_networks_are_torchgpipes(name, layers, millions):
    experiment = experiments()[name]
    with torch.device("meta"):
        model = experiment.make()
    assert len(model.layers) == layers == sum(experiment.balance or (layers,))
    assert parameters(model) / 1e6 == pytest.approx(millions, rel=1e-3)


def test_stages_share_out_the_model_and_hand_over_what_the_other_takes():
    experiment = Experiment(lambda: unet(convolutions=1, channels=4), 4, 64, (32, 33), 2)
    first, last = stages_of(experiment)
    with torch.device("meta"):
        assert sum(first.parameters) + sum(last.parameters) == 4 * parameters(experiment.make())
    arriving = [size for step in last.recomputed.forward[:1] for _, size in step.changes if not step.node]
    assert sum(arriving) == first.output_bytes
    assert len(arriving) == 6
    assert last.output_bytes == 4 * 2 * 64 * 64
    assert set(first.recomputed.gradients.values()).isdisjoint(last.recomputed.gradients.values())
