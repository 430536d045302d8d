"""What conftest and the Makefile promise to everyone who writes a test."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
from pathlib import Path

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

ROOT = Path(__file__).resolve().parents[2]


def draws() -> tuple[float, float, float]:
    return random.random(), float(numpy.random.random()), float(torch.rand(()))


@pytest.mark.parametrize("_", range(2))
def test_every_test_starts_from_the_same_seed(_):
    random_, numpy_, torch_ = draws()
    assert (random_, numpy_) == (random.Random(0).random(), numpy.random.RandomState(0).random())
    assert torch_ == float(torch.rand((), generator=torch.Generator().manual_seed(0)))


def test_every_example_starts_from_the_same_seed():
    seen = set()

    @settings(max_examples=5)
    @given(st.integers())
    def example(_: int) -> None:
        seen.add(draws())

    example()
    assert len(seen) == 1


PYTEST = "-m pytest -n auto --maxprocesses 4 --dist worksteal"
"""A process per core, but not more than memory is sure to hold; one that is done takes tests from the others."""


def commands(*arguments: str) -> str:
    """What make would run from nothing, whatever make runs these tests."""
    outer = ("TORCH", "ARGS", "PYTHON")
    environment = {name: value for name, value in os.environ.items() if name not in outer and "MAKE" not in name}
    environment.pop("MFLAGS", None)
    command = ["make", "--dry-run", "--always-make", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout


def test_make_test_checks_first():
    lines = commands("test").splitlines()
    assert lines[-1].strip() == f'.venv/bin/python {PYTEST} -m "not slow"'
    full = '-m "not campaign" --hypothesis-profile=full'
    assert commands("test-all").splitlines()[-1].strip() == f".venv/bin/python {PYTEST} {full}"
    assert commands("campaign").splitlines()[-1].strip() == f".venv/bin/python {PYTEST} --hypothesis-profile=campaign"
    assert [line.split()[0] for line in lines[-5:-1]] == [
        ".venv/bin/ruff",
        ".venv/bin/ruff",
        ".venv/bin/mypy",
        ".venv/bin/lint-imports",
    ]
    assert "cp constraints.txt .venv/constraints.txt" in lines


def test_make_test_looks_for_a_browser_and_says_what_is_skipped_without(tmp_path):
    [found, *_] = commands("test").split("\nelse ")
    assert "command -v chromium" in found
    (tmp_path / "id").write_text("#!/bin/sh\necho 1000\n", encoding="utf-8")
    (tmp_path / "id").chmod(0o755)
    shell = shutil.which("sh")
    recipe = commands("browser").replace("command -v chromium ", "command -v no-such-program ")
    asked = subprocess.run(
        [shell, "-c", recipe], env={"PATH": str(tmp_path)}, capture_output=True, text=True, check=True
    )
    assert "skipped: there is no chromium" in asked.stderr


def test_another_torch_has_an_environment_of_its_own():
    text = commands("test", "TORCH=2.15.0", "ARGS=-k name")
    assert text.splitlines()[-1] == f'.venv-torch-2.15.0/bin/python {PYTEST} -m "not slow" -k name'
    assert "torch==2.15.0" in text
    assert " .venv/" not in text
    assert "ruff" not in text


def test_another_torch_replaces_its_own_section_of_the_pins_only(tmp_path):
    [cut] = [line for line in commands("test", "TORCH=2.15.0").splitlines() if line.startswith("sed ")]
    cut = cut.replace(".venv-torch-2.15.0/constraints.txt", str(tmp_path / "pins.txt"))
    subprocess.run(["sh", "-c", cut], cwd=ROOT, check=True)
    kept = (tmp_path / "pins.txt").read_text(encoding="utf-8")
    assert (ROOT / "constraints.txt").read_text(encoding="utf-8").startswith(kept)
    assert "numpy==" in kept
    assert "pydantic==" in kept
    assert "torch==" not in kept
    assert "setuptools==" not in kept
