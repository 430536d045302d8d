"""The benchmarks run, and their readings are what they say."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import pairs, published
from benchmarks.families import Family
from benchmarks.family_transformers import Chain, ClassHead, Patches, PreNormBlock
from benchmarks.layout_models import SHAPES, build
from benchmarks.layouts import Row, machine_of, rows
from benchmarks.memory_step import Way, step_lines
from benchmarks.memory_subject import recorded
from benchmarks.pairs import Reading, Spread
from benchmarks.published_models import unet
from benchmarks.published_torchgpipe import Experiment, experiments, stages_of


def test_a_spread_is_the_median_and_the_quartiles():
    assert Spread.of([5.0, 1.0, 4.0, 2.0, 3.0]) == Spread(median=3.0, low=2.0, high=4.0)
    assert Spread.of([7.0]) == Spread(7.0, 7.0, 7.0)
    assert Spread(0.002, 0.001, 0.0035).scaled(1e3).text() == "2.0 [1.0, 3.5]"


def test_a_reading_is_the_mean_of_its_calls_on_three_clocks(monkeypatch):
    now = {"wall": 100.0, "process": 50.0, "thread": 10.0}
    clocks = {
        "perf_counter": lambda: now["wall"],
        "process_time": lambda: now["process"],
        "thread_time": lambda: now["thread"],
    }
    monkeypatch.setattr(pairs, "time", SimpleNamespace(**clocks))

    def work() -> None:
        now.update(wall=now["wall"] + 4.0, process=now["process"] + 2.0, thread=now["thread"] + 1.0)

    assert pairs.read(work, calls=3) == Reading(wall_s=4.0, process_s=2.0, thread_s=1.0)


def test_every_reading_stands_beside_one_of_its_reference():
    calls: list[str] = []
    contenders = {name: lambda name=name: calls.append(name) for name in "ab"}
    references = {name: lambda name=name: calls.append(f"{name}'") for name in "ab"}
    found = pairs.paired(contenders, references, repeats=2, calls=1, warmups=1)
    assert calls[:4] == ["a", "b", "a'", "b'"]
    assert calls[4:] == ["a'", "a", "b'", "b", "b", "b'", "a", "a'"]
    assert all(len(pair.ours) == len(pair.reference) == 2 for pair in found.values())


def test_figures_are_written_as_plain_json(tmp_path):
    path = tmp_path / "figures.json"
    figures = [{"name": "a", "wall_s": Spread(0.123456789, 0.1, 0.2), "parts": [1, 2.0, None]}]
    checks = [pairs.at_most("a", 10.0, 9.0)]
    given = {"benchmark": "b", "settings": {"repeats": 3}, "machine": {"cores": 2}, "checks": checks}
    pairs.write(path, figures=figures, **given)
    content = json.loads(path.read_text(encoding="utf-8"))
    assert list(content) == ["benchmark", "machine", "settings", "checks", "figures"]
    assert content["figures"] == [
        {"name": "a", "wall_s": {"median": 0.12346, "low": 0.1, "high": 0.2}, "parts": [1, 2.0, None]}
    ]
    assert content["checks"] == [{"name": "a", "asked": "<= 10", "measured": 9.0, "ok": True}]
    assert content["machine"]["cores"] == 2
    with pytest.raises(ValueError, match="not JSON compliant"):
        pairs.write(path, figures=[{"wall_s": float("nan")}], **given)


def test_every_row_is_modelled_or_says_why_not() -> None:
    """Devices, batch and degrees of a modelled row fit together; the others have no batches."""
    every = list(rows())
    modelled = [own for own in every if isinstance(own, Row)]
    assert len(modelled) == 35
    assert {own[1] for own in every if isinstance(own, tuple)} == {
        "neither its microbatches nor its stages per device are published with it",
    }
    for row in modelled:
        assert len(machine_of(row)) == row.parallel.ranks
        assert row.batch % (row.parallel.dp * row.micro_batch) == 0


def test_a_shape_has_about_as_many_parameters_as_its_name_says() -> None:
    assert parameters(build(SHAPES["GPT3-5B"])) / 1e9 == pytest.approx(5.25, rel=0.03)


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


def _make() -> Chain:
    blocks = [PreNormBlock(64, 2, causal=False, dropout=0.1) for _ in range(4)]
    return Chain(Patches(64, 8, 32), *blocks, ClassHead(64, 10))


def _images(rows: int) -> tuple[Tensor, ...]:
    return (torch.randn(rows, 3, 32, 32),)


TINY = Family("tiny", "transformer", 8, _make, _images, lambda rows: torch.randint(0, 10, (rows,)), F.cross_entropy)


@pytest.mark.usefixtures("one_intra_op_thread")
def test_a_step_takes_what_was_predicted():
    subject = recorded(TINY, "fp32")
    sgd, adam = step_lines(subject, Way("fp32", "never", rows=8), optimizers=["sgd", "adam"])
    assert abs(sgd.dynamic_error) < 0.005
    assert abs(adam.dynamic_error) < 0.005
    trained = sum(parameter.numel() for parameter in subject.model.parameters())
    counters = len(list(subject.model.parameters()))
    assert adam.static_bytes - sgd.static_bytes == 8 * trained + 4 * counters
    block = step_lines(subject, Way("fp32", "block", rows=8), optimizers=["sgd"])[0]
    assert abs(block.error) < 0.005
    assert block.measured_bytes < 0.8 * sgd.measured_bytes
