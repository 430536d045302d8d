"""The published rows: every one has its answer; torchgpipe's networks are theirs; the devices are played as theirs."""

from __future__ import annotations

import pytest
import torch

from autosplit.memory.pieces import Change, StageTrace, Step
from benchmarks import published
from benchmarks.published_models import unet
from benchmarks.published_torchgpipe import Experiment, Stage, experiments, predicted, stages_of

MIB = 2**20


def parameters(model: torch.nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def test_the_rows_of_torchgpipe_are_all_modelled():
    assert [row["model"] for row in published.rows()] == list(experiments())


def test_a_miss_is_shown_as_one():
    line = published.Line("x", "reserved", "GiB", published=10.0, predicted=8.9, why="because")
    assert (line.within, published.shown(line)["modelled"]) == (False, "yes, misses")
    assert not published.checks([line])[0].ok


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


def stage_of(size: int) -> Stage:
    """A stage of one layer that keeps its input (0) and has one parameter: 1 the output, 3 the gradient."""
    arriving, output, cotangent, gradient, returned = ((number, size) for number in range(5))

    def gone(*changes: Change) -> tuple[Change, ...]:
        return tuple((storage, -count) for storage, count in changes)

    forward = (Step("", (arriving,)), Step("layer", (output,)))
    ending = Step("", gone(cotangent, returned, output, arriving))
    first = (Step("", (cotangent,)), Step("layer", (gradient, returned)), ending)
    later = (first[0], Step("layer", (gradient, returned, *gone(gradient))), ending)
    trace = StageTrace(forward, first, later, {3: "weight"})
    return Stage(trace, trace, (size,), size)


def reserved(chunks: int, stages: int) -> int:
    """Return the MiB of a chain of equal stages whose every storage takes 16 MiB."""
    experiment = Experiment(lambda: unet(convolutions=1, channels=2), 1, 1, (1,) * stages, chunks)
    return predicted(experiment, [stage_of(16 * MIB)] * stages).reserved_bytes // MIB


def test_a_lone_device():
    parameter, output, gathered, gradient, returned, batch = 16, 16, 2 * 16, 16, 16, 2
    assert reserved(1, 1) == parameter + output + gathered + gradient + returned + batch


def test_every_copy_stream_reserves_its_own_segments():
    inputs_of_the_last, cotangents_of_the_first, gathered = 16, 16, 2 * 16
    assert reserved(9, 2) - reserved(8, 2) == inputs_of_the_last + cotangents_of_the_first + gathered


def test_the_33rd_copy_stream_is_the_first_again():
    input_of_the_last, gathered = 16, 2 * 16
    assert reserved(33, 2) - reserved(32, 2) == input_of_the_last + gathered


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
