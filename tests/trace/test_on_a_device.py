"""A model that lies on an accelerator, or on several devices, is recorded and probed as on the CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.trace.placed_models import MODELS, MOVES, PLACES

pytestmark = pytest.mark.slow
"""A process that makes a device and records all these models takes long."""


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """Return what a process found that has a device of its own; see :mod:`tests.trace.card`."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.trace.card"]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    results: dict[str, Any] = json.loads(done.stdout)
    return results


@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("name", MODELS)
def test_a_model_and_its_batch_may_lie_anywhere(found: dict[str, Any], name: str, places: str) -> None:
    assert found[f"{name}, {places}"] == found[f"{name}, cpu, cpu"]


def test_a_stage_on_the_cpu_makes_its_tensors_there(found: dict[str, Any]) -> None:
    assert found["a stage on the CPU names the card"] is False


def test_a_batch_elsewhere_does_not_keep_the_graph_from_being_held_against_the_model(found: dict[str, Any]) -> None:
    assert "does not reproduce the model" in found["hides, cpu, cpu"]
    assert found["hides, card, cpu"] == found["hides, cpu, cpu"]


@pytest.mark.parametrize("place", ["first on the card", "all on the card"])
def test_value_reads_are_asked_again_wherever_the_model_was_moved(found: dict[str, Any], place: str) -> None:
    assert found[f"held, {place}"] == [True, True, False, False]


@pytest.mark.parametrize("place", MOVES)
def test_a_recording_becomes_one_for_all_lengths_wherever_the_model_was_moved(
    found: dict[str, Any], place: str
) -> None:
    assert found[f"widened, {place}"] is True
