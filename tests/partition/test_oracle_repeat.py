"""Same input, same cut: in processes whose hashes differ."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.partition.oracle_repeat import cuts

ROOT = Path(__file__).resolve().parents[2]


def cuts_of_a_process(hash_seed: int) -> list[str]:
    environment = os.environ | {"PYTHONHASHSEED": str(hash_seed)}
    command = [sys.executable, "-W", "ignore", "-m", "tests.partition.oracle_repeat"]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    return run.stdout.splitlines()


def test_the_same_problem_gives_the_same_cut_in_every_process() -> None:
    first = cuts_of_a_process(1)
    assert len(first) == 20
    assert sum(line.startswith("(") for line in first) > 12
    assert cuts_of_a_process(2) == first
    assert list(cuts()) == first
