"""What measured times depend on: each change of it is another key, and nothing else is."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autosplit.profile import cache as caches
from autosplit.profile.cache import ProfileKey, profile_key
from autosplit.profile.identity import recording_hash
from tests.profile.graphs import Leaf, traced

ROOT = Path(__file__).resolve().parents[2]
ROWS = 4


class Own(Leaf):
    """A module of the model's own, with settings of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.factor = 2.0
        self.table = {"a": [1, 2], "b": torch.nn.functional.relu}

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.factor


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), Own(), nn.Linear(8, 3))


def key_of(net: nn.Module, *, rows: int = ROWS, x: Tensor | None = None) -> ProfileKey:
    graph = traced(net, torch.randn(2, 8, dtype=next(net.parameters()).dtype))
    return profile_key(graph, inputs=[torch.randn(rows, 8) if x is None else x], rows=rows)


def _wider(net: Any) -> None:
    net[3] = nn.Linear(8, 4)


def _other_setting(net: Any) -> None:
    net[1].p = 0.2


def _other_mode(net: Any) -> None:
    net[1].eval()


def _frozen(net: Any) -> None:
    net[0].weight.requires_grad_(False)


def _strided(net: Any) -> None:
    net[0].weight = nn.Parameter(torch.randn(8, 8).t())


def _own_number(net: Any) -> None:
    net[2].factor = 3.0


def _own_table(net: Any) -> None:
    net[2].table["a"][1] = 3


def _hooked(net: Any) -> None:
    net[2].register_forward_hook(lambda *_: None)


def _own_code(net: Any) -> None:
    class Changed(Own):
        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) * self.factor + 1

    Changed.__qualname__, Changed.__module__ = Own.__qualname__, Own.__module__
    net[2].__class__ = Changed


@pytest.mark.parametrize(
    "change",
    [_wider, _other_setting, _other_mode, _frozen, _strided, _own_number, _own_table, _hooked, _own_code],
    ids=lambda change: change.__name__.strip("_"),
)
def test_a_changed_model_is_another_one(change: Callable[[Any], None]) -> None:
    changed = model()
    change(changed)
    assert key_of(model()) == key_of(model())
    assert key_of(changed) != key_of(model())


def test_values_of_weights_do_not_matter() -> None:
    other = model()
    torch.nn.init.zeros_(other[0].weight)
    assert key_of(other) == key_of(model())


@contextlib.contextmanager
def _flag(module: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


@pytest.mark.parametrize(
    "around",
    [
        lambda: torch.autocast("cpu", dtype=torch.bfloat16),
        lambda: _flag(torch.backends.cuda.matmul, "fp32_precision", "tf32"),
        lambda: torch.backends.mkldnn.flags(enabled=False, allow_tf32=None),
        lambda: torch.nn.attention.sdpa_kernel([torch.nn.attention.SDPBackend.MATH]),
        lambda: _flag(torch, "__version__", "9.9.9"),
        lambda: _flag(caches, "version", lambda _: "9.9.9"),
        lambda: _flag(caches, "device_text", lambda _: "another processor"),
    ],
    ids="autocast precision mkldnn attention torch autosplit device".split(),
)
def test_another_mode_version_or_device_is_another_measurement(around: Callable[[], Any]) -> None:
    graph, x = traced(model(), torch.randn(2, 8)), torch.randn(ROWS, 8)
    before = profile_key(graph, inputs=[x], rows=ROWS)
    with around():
        assert profile_key(graph, inputs=[x], rows=ROWS) != before
    assert profile_key(graph, inputs=[x], rows=ROWS) == before


def test_other_inputs_rows_and_threads_are_another_measurement() -> None:
    graph, x = traced(model(), torch.randn(2, 8)), torch.randn(ROWS, 8)
    keys = [
        profile_key(graph, inputs=[x], rows=ROWS),
        profile_key(graph, inputs=[x.clone().requires_grad_()], rows=ROWS),
        profile_key(graph, inputs=[torch.randn(8, ROWS).t()], rows=ROWS),
        profile_key(graph, inputs=[torch.randn(5, 8)], rows=5),
        profile_key(graph, inputs=[x], rows=ROWS, threads=2),
        profile_key(graph, inputs=[x], rows=ROWS, count_bytes=True),
    ]
    assert len({key.file_name for key in keys}) == len(keys)


HASH = """
import torch
from tests.profile.test_identity import key_of, model
print(key_of(model()).recording)
"""


def test_another_process_finds_the_same_recording() -> None:
    environment = os.environ | {"PYTHONHASHSEED": "1"}
    command = [sys.executable, "-c", HASH]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == key_of(model()).recording


def test_a_long_or_circular_setting_is_no_obstacle() -> None:
    net = model()
    net[2].table["own"] = net[2].table
    net[2].long = list(range(100_000))
    assert recording_hash(traced(net, torch.randn(2, 8)), rows=ROWS)
