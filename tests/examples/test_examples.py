"""Every example runs, and its pipelined model is the plain one: losses, gradients, parameters."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from examples import (
    convnet_four_devices,
    demo,
    finetune_lora,
    gpt_tied,
    pipedream,
    resnet50_two_stages,
    seed_blocks,
    sequential_pipe,
    toy_model,
    unet_skips,
)
from examples.comparison import TOLERANCE, Outcome


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    """Give back the number of threads that the examples change."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def check(outcome: Outcome) -> None:
    assert outcome.differences
    assert max(outcome.differences.values()) <= TOLERANCE, outcome.differences
    assert outcome.equal
    assert outcome.exit_code == 0


def falls(losses: tuple[float, ...], *, by: float) -> bool:
    return losses[-1] < losses[0] * (1 - by)


def test_toy_model_has_the_losses_and_parameters_of_the_unsplit_one() -> None:
    outcome = toy_model.main(["--steps", "4"])
    check(outcome)
    assert {len(curve) for curve in outcome.losses.values()} == {4}
    assert sum("parameters" in what for what in outcome.differences) == 2


@pytest.mark.slow
def test_convnet_has_one_loss_curve_in_three_ways_and_learns() -> None:
    outcome = convnet_four_devices.main(["--steps", "28"])
    check(outcome)
    assert len(outcome.losses) == 3
    assert all(falls(curve, by=0.1) for curve in outcome.losses.values())
    assert outcome.figures["stages"] == 4
    accuracies = [figure for what, figure in outcome.figures.items() if what.startswith("accuracy")]
    assert len(accuracies) == 3
    assert max(accuracies) - min(accuracies) < 0.002
    assert min(accuracies) > 0.3


def test_convnet_agrees_in_float32_as_well() -> None:
    outcome = convnet_four_devices.main(["--steps", "4", "--dtype", "float32"])
    check(outcome)
    assert max(outcome.differences.values()) < 2e-6


@pytest.mark.slow
def test_resnet_agrees_with_the_plain_model_on_the_same_microbatches() -> None:
    outcome = resnet50_two_stages.main(["--width", "8", "--steps", "3"])
    check(outcome)
    assert outcome.figures["stages"] == 2
    assert all(falls(curve, by=0.01) for curve in outcome.losses.values())


def test_sequential_pipe_has_the_outputs_and_gradients_of_the_sequential() -> None:
    outcome = sequential_pipe.main([])
    check(outcome)
    kinds = {"outputs", "gradients"}
    assert set(outcome.differences) == kinds | {f"{kind} of Pipe" for kind in kinds}


def test_tied_gpt_keeps_one_parameter_with_the_plain_gradient() -> None:
    outcome = gpt_tied.main(["--steps", "12", "--rows", "8"])
    check(outcome)
    assert set(outcome.losses) == {"plain", "pipelined", "train_step"}
    assert outcome.figures["tied"] == 1.0
    assert outcome.figures["stages"] == 4
    assert all(falls(curve, by=0.1) for curve in outcome.losses.values())
    assert sum("tied table" in what for what in outcome.differences) == 2


@pytest.mark.slow
def test_unet_is_split_across_its_skips_and_learns() -> None:
    outcome = unet_skips.main(["--steps", "8", "--rows", "16"])
    check(outcome)
    assert outcome.figures["stages"] == 4
    assert outcome.figures["values that cross several cuts"] >= 1
    assert all(falls(curve, by=0.3) for curve in outcome.losses.values())


def test_blocks_of_the_tensor_and_data_parallel_explanations() -> None:
    outcome = seed_blocks.main(["--steps", "20"])
    check(outcome)
    assert {what.partition(":")[0] for what in outcome.differences} == {"MLP", "SelfAttention", "Model", "Net"}


def test_asynchronous_training_is_shown_beside_synchronous_training(capsys: pytest.CaptureFixture[str]) -> None:
    accuracies = pipedream.main(["--epochs", "2", "--rows", "600", "--seeds", "0"])
    assert [tuple(runs.shape) for runs in accuracies.values()] == [(1, 2)] * 4
    for epoch, line in enumerate(line for line in capsys.readouterr().out.splitlines() if line.endswith("|")):
        shown = [f"{float(runs[0, epoch]):.2f}" for runs in accuracies.values()]
        assert line.partition("|")[0].split() == [str(epoch + 1), *shown]
    assert epoch == 1


@pytest.mark.slow
def test_asynchronous_training_ends_at_the_accuracy_of_synchronous_training() -> None:
    accuracies = pipedream.main([])
    assert accuracies["synchronous"][:, -1].min() > 95
    assert min(pipedream.differences(accuracies).values()) >= -pipedream.TOLERANCE


def test_demo_says_that_both_models_train_alike(capsys: pytest.CaptureFixture[str]) -> None:
    outcome = demo.main(["--steps", "8", "--rows", "32"])
    check(outcome)
    assert "exactly as they train plain" in capsys.readouterr().out
    assert falls(outcome.losses["GPT, pipelined"], by=0.05)


def test_lora_on_a_quantised_base_trains_as_the_plain_model_within_unequal_limits() -> None:
    outcome = finetune_lora.main(["--steps", "3"])
    check(outcome)
    assert outcome.figures["stages"] == 2
