"""The examples of several processes run as a user starts them, and train as one process does."""

from __future__ import annotations

import copy
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from autosplit.distributed import checkpoint
from examples.models import GPT, GPTConfig

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
pytestmark = pytest.mark.slow
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")


def output(*command: object, limit_s: float = 240.0) -> str:
    """Run Python with some arguments and return what it printed; it and its processes end within ``limit_s``."""
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_RANK")}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(EXAMPLES.parent)}
    started = subprocess.Popen(
        [sys.executable, *map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    try:
        printed, errors = started.communicate(timeout=limit_s)
    finally:
        started.terminate()  # what torchrun or spawn has started ends with it
        started.wait(60.0)
    assert started.returncode == 0, errors
    return printed


@pytest.mark.parametrize(
    ("start", "splits"),
    [
        pytest.param((*TORCHRUN, 2), (1, 2, 4, 8), id="torchrun"),
        pytest.param((), (2,), id="spawn"),
    ],
)
def test_dist_resnet50_prints_a_time_per_number_of_splits_and_has_the_plain_losses(
    start: tuple[object, ...], splits: tuple[int, ...]
) -> None:
    size = ("--blocks", 1, 1, 1, 1, "--steps", 3)
    printed = output(*start, EXAMPLES / "dist_resnet50.py", *size, "--splits", *splits)
    times = re.findall(r"^number of splits = (\d+), execution time = (\d+\.\d+)$", printed, flags=re.MULTILINE)
    assert [int(count) for count, _ in times] == list(splits)
    assert all(float(seconds) > 0 for _, seconds in times)
    verdicts = re.findall(r"^  losses over 3 steps, number of splits = (\d+) .*  equal$", printed, flags=re.MULTILINE)
    assert [int(count) for count in verdicts] == list(splits)


def test_a_driver_trains_two_workers_by_remote_calls() -> None:
    printed = output(EXAMPLES / "rpc_driver.py", "--blocks", 1, 1, 1, 1, "--steps", 3)
    assert re.search(r"^  +3  +\d\.\d+  +\d\.\d+  ", printed, flags=re.MULTILINE)
    assert re.search(r"^  loss +\S+  equal$", printed, flags=re.MULTILINE)


def test_replicas_have_the_numbers_of_one_process() -> None:
    printed = output(*TORCHRUN, 4, EXAMPLES / "data_parallel.py", "--steps", 10)
    assert sorted(re.findall(r"input size \[(\d), 5\] output size \[(\d), 2\]", printed)) == [(n, n) for n in "7788"]
    assert len(re.findall(r"^  .*  equal$", printed, flags=re.MULTILINE)) == 3


@pytest.mark.parametrize("processes", [2, 4])
def test_tensor_parallel_blocks_have_the_numbers_of_one_process(processes: int) -> None:
    printed = output(EXAMPLES / "tensor_parallel.py", "--processes", processes)
    assert [int(n) for n in re.findall(r"(\d+) of \d+ parameters per process", printed)] == [16, 36 * processes]
    assert len(re.findall(r"^  .* (?:losses|parameters) .*  equal$", printed, flags=re.MULTILINE)) == 4


def trained(processes: int, folder: Path, *, start: int) -> list[str]:
    """Run the training script for 4 steps; return what it prints of each, from the one after ``start``."""
    size = ("--steps", 4, "--save-every", 2, "--folder", folder)
    printed = output(*TORCHRUN, processes, EXAMPLES / "train_torchrun.py", *size)
    assert re.findall(r"^goes on after step (\d)$", printed, flags=re.MULTILINE) == ([str(start)] if start else [])
    lines = re.findall(r"^step .*$", printed, flags=re.MULTILINE)
    assert [line.partition(":")[0] for line in lines] == [f"step {step}" for step in range(start + 1, 5)]
    return lines


@pytest.mark.campaign
def test_training_under_torchrun_and_after_a_restart_has_the_numbers_of_one_process(tmp_path: Path) -> None:
    one, two = (trained(size, tmp_path / str(size), start=0) for size in (1, 2))
    assert two == one
    model = GPT(GPTConfig())
    checkpoint.restore(tmp_path / "1", model)
    expected = copy.deepcopy(model.state_dict())
    shutil.rmtree(tmp_path / "1" / "step-4")
    assert trained(2, tmp_path / "1", start=2) == one[2:]
    checkpoint.restore(tmp_path / "1", model)
    assert all(torch.equal(expected[name], value) for name, value in model.state_dict().items())
