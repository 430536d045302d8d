"""Arguments of ``autosplit`` that cannot be used: the fact, the numbers, the way out."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autosplit import DeviceError, InfeasibleError, InputError, PlanError, autosplit, plan
from autosplit.options import resolve_lanes
from autosplit.schedule import catalog

GPUS = torch.cuda.device_count()
Unchanged = Callable[..., AbstractContextManager[None]]


def chain(depth: int = 4, width: int = 8) -> nn.Sequential:
    return nn.Sequential(*(layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.Tanh())))


def value(rows: int = 8, width: int = 8) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(1))


def split(model: nn.Module, **options: Any) -> nn.Module:
    """Split two ways with a sample, so that planning happens now."""
    return autosplit(model, **({"devices": ["cpu"] * 2, "chunks": 4, "sample": value()} | options))


SCHEDULES = ("schedule", "'auto'", *catalog.SCHEDULES, "the path of an action file")
REFUSED: list[tuple[dict[str, Any], type[Exception], tuple[str, ...]]] = [
    *(({"chunks": chunks}, InputError, (f"chunks={chunks!r}", "at least 1")) for chunks in (0, -2, 1.5, "many")),
    *(({"devices": count}, DeviceError, (f"devices={count}", "at least one")) for count in (0, -1)),
    ({"devices": []}, DeviceError, ("[]", "number", "list")),
    ({"devices": ["cpu", f"cuda:{GPUS}"]}, DeviceError, (f"cuda:{GPUS}", f"{GPUS} CUDA", "'cpu'")),
    ({"devices": "toaster"}, DeviceError, ("toaster", "'cpu'")),
    ({"devices": ["cpu", "toaster"]}, DeviceError, ("toaster", "'cpu'")),
    ({"devices": ["cpu", "meta"]}, DeviceError, ("meta", "'cpu'")),
    ({"schedule": "sideways"}, InputError, ("sideways", *SCHEDULES)),
    ({"lanes": "sideways"}, InputError, ("lanes", "sideways", "'auto'", "'inline'", "'threads'")),
    ({"rng": "sideways"}, InputError, ("rng", "sideways", "'auto'", "'counter'")),
    ({"optimizer": "sideways"}, InputError, ("optimizer", "sideways", "'sgd'", "'adamw'")),
    ({"batch_norm": "sideways"}, InputError, ("batch_norm", "sideways", "'micro'", "'full'")),
    ({"recompute": "sideways"}, InputError, ("recompute", "sideways", "'never'", "'except_last'", "'block'")),
    ({"recompute": ["always"]}, InputError, ("1 entries for 2 stages", "'except_last'")),
    ({"recompute": ["always", "never", "block"]}, InputError, ("3 entries for 2 stages", "'block'")),
    ({"recompute": ["never", "twice"]}, InputError, ("recompute[1]='twice'", "'except_last'", "per stage")),
    ({"recompute": 7}, InputError, ("recompute=7", "'auto'", "a list")),
    ({"precision": "amp_bf16"}, InputError, ("precision=", "valid: ")),
    ({"mesh": "a mesh", "devices": 4}, InputError, ("mesh is a str", "init_device_mesh")),
    ({"compile": "always"}, InputError, ("compile=", "valid: ")),
    ({"compile": {"mood": "default"}}, InputError, ("mood", "backend", "mode", "dynamic")),
    ({"compile": {"mode": "fast"}}, InputError, ("fast", "reduce-overhead", "max-autotune")),
    ({"chunk_size": 4}, TypeError, ("chunk_size",)),
    *(({"memory_limit": limit}, InputError, ("70GiB",)) for limit in ("a lot", 0, -5)),
    ({"plan": "absent.json"}, PlanError, ("absent.json",)),
]


@pytest.mark.parametrize(("options", "kind", "parts"), REFUSED)
def test_what_cannot_be_used_is_said_with_the_way_out_and_leaves_the_model(
    options: dict[str, Any], kind: type[Exception], parts: tuple[str, ...], unchanged: Unchanged
) -> None:
    model = chain()
    with unchanged(model, value()), pytest.raises(kind) as caught:
        split(model, **options)
    for part in parts:
        assert part in str(caught.value)


def test_more_devices_than_the_machine_has_says_how_to_pass_a_list(
    unchanged: Unchanged, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    model = chain()
    with unchanged(model, value()), pytest.raises(DeviceError) as caught:
        split(model, devices=3)
    for part in ("devices=3", "2 CUDA", "['cuda:0', 'cuda:1', 'cuda:0']", "['cpu', 'cpu', 'cpu']"):
        assert part in str(caught.value)


def test_threads_are_for_cpu_lanes_and_the_default_on_several() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda", 0)
    with pytest.raises(InputError, match=r"threads.*cuda:0.*inline"):
        resolve_lanes("threads", (cpu, cuda))
    assert resolve_lanes("auto", (cpu, cpu)) == "threads"
    assert resolve_lanes("auto", (cpu,)) == resolve_lanes("auto", (cpu, cuda)) == "inline"


def test_a_memory_limit_that_cannot_hold_names_the_smallest_that_can(unchanged: Unchanged) -> None:
    model = chain(width=32)
    sample = value(width=32)
    with unchanged(model, sample), pytest.raises(InfeasibleError, match=r"1000 B") as caught:
        split(model, sample=sample, memory_limit=1000)
    smallest = re.search(r"\(([0-9,]+) bytes\) each would hold it", str(caught.value))
    assert smallest is not None, f"no way out in {caught.value}"
    assert re.search(r"largest part that cannot be cut: node \d+ '\w+", str(caught.value))
    limit_bytes = int(smallest[1].replace(",", ""))
    pipe = split(model, sample=sample, memory_limit=limit_bytes)
    assert max(stage.memory.peak_bytes for stage in pipe.plan.stages) <= limit_bytes
    with pytest.raises(InfeasibleError):
        split(model, sample=sample, memory_limit=limit_bytes - 1)
    assert len(pipe.plan.stages) == 2
    torch.testing.assert_close(pipe(sample), model(sample))


def test_as_many_stages_as_devices_wherever_nodes_can_be_separated() -> None:
    for devices in (1, 2, 5, 8):
        plan = split(chain(), devices=["cpu"] * devices).plan
        assert [bool(stage.nodes) for stage in plan.stages] == [True] * devices


@pytest.fixture
def plan_file(tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    split(chain()).plan.save(path)
    return path


def test_a_plan_for_another_model(plan_file: Path, unchanged: Unchanged) -> None:
    for model in (chain(depth=5), nn.Sequential(nn.Linear(8, 8), nn.GELU())):
        with unchanged(model, value()), pytest.raises(PlanError, match=r"(?s)plan was made for .* plan again"):
            split(model, plan=plan_file)


def test_a_model_on_meta_is_refused_with_the_way_out():
    with pytest.raises(InputError, match=r"0\.weight is on the meta device .*initialise"):
        autosplit(nn.Sequential(nn.Linear(4, 4)).to("meta"), devices=1, chunks=1)


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        hidden = self.first(x) if mask is None else self.first(x) * mask[:, None]
        out: Tensor = self.second(hidden)
        return out


@pytest.mark.parametrize("model", [Masked(), nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))])
@pytest.mark.parametrize("loss", [F.cross_entropy, nn.CrossEntropyLoss(), lambda output, labels: output.mean()])
def test_a_target_among_the_inputs_is_told_of_target(model: nn.Module, loss: Any) -> None:
    pipe = autosplit(model, devices=2, chunks=2)
    with pytest.raises(InputError, match=r"train_step\(x, target=y, loss_fn=...\)"):
        pipe.train_step(torch.randn(4, 8), torch.tensor([0, 1, 2, 3]), loss_fn=loss)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_loss_of_the_output_alone_needs_no_target() -> None:
    pipe = autosplit(Masked(), devices=2, chunks=2)
    assert pipe.train_step(torch.randn(4, 8), loss_fn=lambda output, scale=2.0: scale * output.mean()).dim() == 0


def planned(**choices: Any) -> Any:
    return plan(Masked(), "2xH100-SXM5-80GB", 2, sample=torch.randn(4, 8), **choices)


@pytest.mark.parametrize("limit", ["20", " 80 ", "1.5", "1000"])
def test_a_limit_without_a_unit_is_asked_for_one(limit: str) -> None:
    with pytest.raises(InputError, match=rf"bytes; write the unit: '{limit.strip()}GiB', or '{limit.strip()}B'"):
        planned(memory_limit=limit)


def test_limits_that_say_what_they_are_stand() -> None:
    assert planned(memory_limit="20KiB").stages[0].memory.capacity_bytes == 20 * 2**10
    assert planned(memory_limit=str(2**30)).stages[0].memory.capacity_bytes == 2**30


def test_fp16_is_meant_as_amp() -> None:
    with pytest.raises(InputError, match=r"did you mean 'amp_fp16'\?"):
        planned(precision="fp16")
