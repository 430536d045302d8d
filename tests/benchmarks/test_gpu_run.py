"""The GPU benchmark: every part runs here on tiny sizes, its file has the form of results, and its checks follow."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks.gpu import measured, part, run, step, subjects
from benchmarks.gpu.part import Found, Setting
from tests.pairwise import in_turn

CPU = Setting(torch.device("cpu"), small=True)
TWINS = [name for name in run.PARTS if name.startswith("twin_")]
RUN_HERE = [name for name in run.PARTS if name not in TWINS[:-1]]
"""Twins of other models differ in the model only."""


pytestmark = pytest.mark.usefixtures("one_intra_op_thread")


def follows(check: dict) -> bool:
    """Return what ``ok`` must be, from the two figures beside it."""
    word, text = check["asked"].split()
    return {"<=": check["measured"] <= float(text), ">=": check["measured"] >= float(text)}[word]


@in_turn(share=(0, 2), name=list(RUN_HERE))
def test_every_part_runs_here_and_its_file_has_the_form_of_results(name, tmp_path, capsys):
    path = tmp_path / f"{name}.json"
    run.main(["--part", name, "--device", "cpu", "--small", "--json", str(path)])
    content = json.loads(path.read_text(encoding="utf-8"))
    assert {"benchmark", "device", "date", "dry_run", "missing", "machine", "settings", "checks", "figures"} <= set(
        content
    )
    assert (content["benchmark"], content["device"], content["dry_run"]) == (name, "cpu", run.DRY)
    assert content["machine"]["torch"] == torch.__version__
    assert content["failed"] == []
    assert content["figures"] or content["missing"]
    assert content["checks"] or content["missing"]
    for check in content["checks"]:
        assert set(check) == {"name", "asked", "measured", "ok"}
        assert check["ok"] is follows(check), check
    assert len({check["name"] for check in content["checks"]}) == len(content["checks"])
    printed = capsys.readouterr().out
    assert all(check["name"] in printed for check in content["checks"])
    assert all(text in printed for text in content["missing"])


def test_a_step_with_other_gradients_is_not_timed():
    made = next(iter(subjects.steps(small=True).values())).make(CPU.device, chunks=2)
    made.loop()
    expected = made.gradients()
    step.same(made, made.loop, expected, "the loop")
    with pytest.raises(ValueError, match="the gradients of half of it are off by"):
        step.same(made, made.loop, [2 * gradient for gradient in expected], "half of it")


def test_an_error_is_noted_and_the_part_goes_on(monkeypatch, tmp_path):
    def half(setting: Setting) -> Found:
        found = Found(figures=[{"x_s": 1.0}])
        with found.going_on("the first half"):
            raise RuntimeError("no such kernel")
        found.checks.append(part.at_most("the second half", 1.0, 0.5))
        return found

    monkeypatch.setattr(step, "run", half)
    path = tmp_path / "step.json"
    with pytest.raises(SystemExit, match="1"):
        run.main(["--part", "step", "--device", "cpu", "--small", "--json", str(path)])
    content = json.loads(path.read_text(encoding="utf-8"))
    assert "the first half: RuntimeError: no such kernel (test_gpu_run.py" in content["failed"][0]
    assert [check["name"] for check in content["checks"]] == ["the second half"]


def test_what_was_found_is_in_the_file_when_the_run_is_cut_off(monkeypatch, tmp_path):
    def cut_off(setting: Setting) -> Found:
        found = Found()
        with found.going_on("the first half"):
            found.figures.append({"x_s": 1.0})
        raise KeyboardInterrupt

    monkeypatch.setattr(step, "run", cut_off)
    path = tmp_path / "step.json"
    with pytest.raises(KeyboardInterrupt):
        run.main(["--part", "step", "--device", "cpu", "--small", "--json", str(path)])
    content = json.loads(path.read_text(encoding="utf-8"))
    assert content["figures"] == [{"x_s": 1.0}]
    assert content["finished"] is False
    assert Found.save is None
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--part", "step", "--device", "cpu"], "a CPU gives no figures of a GPU"),
        (["--part", "step", "--device", "cuda:99"], "there is no cuda:99"),
        (["--part", "step", "--device", "meta"], "neither cpu nor a CUDA device"),
    ],
)
def test_a_device_that_is_not_there_is_said(arguments, said):
    with pytest.raises(SystemExit, match=said):
        run.main(arguments)


def test_a_plan_that_splits_backwards_is_measured(monkeypatch):
    pipe = subjects.Made.pipe
    monkeypatch.setattr(subjects.Made, "pipe", lambda made, devices: pipe(made, devices, schedule="zb_h1"))
    found = measured.run(CPU)
    assert found.failed == []
    assert all(
        figure["forward_s"] + figure["backward_s"] == pytest.approx(figure["alone_s"]) for figure in found.figures
    )
