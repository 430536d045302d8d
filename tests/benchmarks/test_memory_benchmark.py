"""Predicted memory is what the allocator gave out: a tiny model through the whole benchmark."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.families import Family
from benchmarks.family_transformers import Chain, ClassHead, Patches, PreNormBlock
from benchmarks.memory_step import Way, step_lines
from benchmarks.memory_subject import Subject, recorded


def _make() -> Chain:
    blocks = [PreNormBlock(64, 2, causal=False, dropout=0.1) for _ in range(4)]
    return Chain(Patches(64, 8, 32), *blocks, ClassHead(64, 10))


def _images(rows: int) -> tuple[Tensor, ...]:
    return (torch.randn(rows, 3, 32, 32),)


TINY = Family("tiny", "transformer", 8, _make, _images, lambda rows: torch.randint(0, 10, (rows,)), F.cross_entropy)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def subject() -> Subject:
    return recorded(TINY, "fp32")


def test_a_step_takes_what_was_predicted(subject):
    sgd, adam = step_lines(subject, Way("fp32", "never", rows=8), optimizers=["sgd", "adam"])
    assert abs(sgd.dynamic_error) < 0.005
    assert abs(adam.dynamic_error) < 0.005
    trained = sum(parameter.numel() for parameter in subject.model.parameters())
    counters = len(list(subject.model.parameters()))
    assert adam.static_bytes - sgd.static_bytes == 8 * trained + 4 * counters
    block = step_lines(subject, Way("fp32", "block", rows=8), optimizers=["sgd"])[0]
    assert abs(block.error) < 0.005
    assert block.measured_bytes < 0.8 * sgd.measured_bytes
