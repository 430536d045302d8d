"""``autosplit plan --script``: a program that trains by the plan, and the line that starts it."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import autosplit
from autosplit.cli.script import commands
from autosplit.planning.plan.plan import Plan
from cost_models import machine
from tests.cli.conftest import NETS, command, error_of
from tests.report.plans import make_plan, make_stage

X = ("--input", "x=float32[8,16]")
TWO = ("--devices", "2xL4-24GB", "--chunks", "4")
run = command("plan")


def losses(script: Path, *launcher: str) -> list[float]:
    """Run a program from another folder, and return the losses that it prints."""
    own = {"PYTHONPATH": str(Path(autosplit.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    where: dict[str, Any] = {"cwd": script.parent.parent, "env": {**os.environ, **own}}
    asked = [sys.executable, *launcher, str(script)]
    done = subprocess.run(asked, **where, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return [float(loss) for loss in re.findall(r"^step \d+: loss (\S+)$", done.stdout, re.MULTILINE)]


def inner(folder: Path) -> Path:
    """Return a new folder in a folder, so that a program can be started from outside of it."""
    (folder / "own").mkdir()
    return folder / "own"


def test_the_program_trains_by_the_plan(tmp_path: Path) -> None:
    script = inner(tmp_path) / "train.py"
    asked = ("--loss", f"{NETS}:squared", "--optimizer", "sgd", "--precision", "bf16", "--eval")
    result = run(f"{NETS}:make_mlp", *TWO, *X, *asked, "--script", str(script))
    assert result.exit_code == 0, result.output
    assert {f"wrote {script}", f"wrote {script.with_suffix('.json')}"} <= set(result.stderr.splitlines())
    text = script.read_text()
    for line in (
        "devices=2, plan=HERE / 'train.json', sample=batch)",
        "Sample(x=torch.randn((8, 16), dtype=torch.bfloat16))",
        ".train(False).to(torch.bfloat16)",
        "torch.optim.SGD(parameters, lr=1e-4)",
    ):
        assert line in text
    assert text.endswith("# Run it with\n#     python train.py\n")
    found = losses(script)
    assert len(found) == 10
    assert found[0] > found[-1] > 0


def test_fp32_masters_of_bf16_parameters_are_what_the_program_updates(tmp_path: Path) -> None:
    """Steps too small for bf16 add up in the masters, as in a plain loop; pure bf16 would stay where it is."""
    script = inner(tmp_path) / "train.py"
    asked = ("--loss", f"{NETS}:squared", "--optimizer", "sgd", "--precision", "bf16_fp32_master", "--chunks", "1")
    result = run(f"{NETS}:make_mlp", *TWO, *X, *asked, "--eval", "--script", str(script))
    assert result.exit_code == 0, result.output
    script.write_text(script.read_text().replace("lr=1e-4", "lr=2e-3"))
    found = losses(script)
    program = runpy.run_path(str(script))
    torch.manual_seed(0)
    model = program["load_model"](f"{NETS}:make_mlp").eval().to(torch.bfloat16)
    batch, loss_fn = program["make_batch"](), program["loss_fn"]
    masters = [parameter.detach().float() for parameter in model.parameters()]
    for loss in found:
        model.zero_grad()
        expected = loss_fn(model(**batch.kwargs))
        expected.backward()
        assert loss == pytest.approx(float(expected.detach()), rel=1e-5)
        for parameter, master in zip(model.parameters(), masters, strict=True):
            master -= 2e-3 * parameter.grad.float()
            parameter.data.copy_(master)
    assert len(found) == 10
    assert found[-1] < found[0]


def test_all_kinds_of_inputs_are_written(tmp_path: Path) -> None:
    places = ("batch.x=float32[8,16]", "batch.mask=bool[8]", "targets[0].boxes=float32[8,16]", "pair.0=float32[8,16]")
    places += ("targets[1]['boxes']=float32[8,16]", "pair.1=float32[8,16]", "act='tanh'")
    inputs = [part for place in places for part in ("--input", place)]
    script = inner(tmp_path) / "train.py"
    saved = tmp_path / "plan.json"
    result = run(f"{NETS}:Detector", *TWO, *inputs, "--script", str(script), "--save", str(saved))
    assert result.exit_code == 0, result.output
    text = script.read_text()
    assert "plan=HERE / '../plan.json'" in text
    assert "'mask': torch.randint(2, (8,)).to(torch.bool)" in text
    assert "Return the mean of the first output" in text
    assert not script.with_suffix(".json").exists()
    assert len(losses(script)) == 10


def test_with_processes_the_program_is_torchruns(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    asked = ("--devices", "2x2xL4-24GB", "--chunks", "4", "--batch-dims", "0", "--precision", "amp_bf16")
    result = run(f"{NETS}:make_mlp", *asked, *X, "--processes", "--script", str(script), "--json")
    assert result.exit_code == 0, result.output
    plan = Plan.load(script.with_suffix(".json"))
    assert plan == Plan.model_validate_json(result.stdout)
    assert plan.processes
    text = script.read_text()
    compile(text, str(script), "exec")
    assert "autosplit(model, devices='torchrun', plan=HERE / 'train.json', sample=batch, batch_dims=0)" in text
    assert 'with torch.autocast("cuda" if torch.cuda.is_available() else "cpu", torch.bfloat16):' in text
    line = "torchrun --nnodes 2 --node-rank $NODE_RANK --nproc-per-node 2 --master-addr $MASTER_ADDR train.py"
    assert text.endswith(f"# Run it with\n#     {line}\n")


@pytest.mark.slow
def test_the_program_trains_the_same_under_torchrun(tmp_path: Path) -> None:
    script = inner(tmp_path) / "train.py"
    result = run(f"{NETS}:make_mlp", *TWO, *X, "--processes", "--script", str(script))
    assert result.exit_code == 0, result.output
    text = script.read_text()
    line = "torchrun --standalone --nproc-per-node 2 train.py"
    assert text.endswith(f"# Run it with\n#     {line}\n")
    found = losses(script, "-m", "torch.distributed.run", *line.split()[1:-1])
    alone = script.with_name("alone.py")
    alone.write_text(text.replace("devices='torchrun'", "devices=2"))
    assert len(found) == 10
    assert found == losses(alone)


def test_on_a_mesh_each_replica_has_its_rows(tmp_path: Path) -> None:
    script = inner(tmp_path) / "train.py"
    asked = ("--devices", "4xL4-24GB", "--mesh", "dp=2,pp=2", "--zero", "3", "--chunks", "2", *X)
    result = run(f"{NETS}:make_mlp", *asked, "--script", str(script))
    assert result.exit_code == 0, result.output
    text = script.read_text()
    kind = '"cuda" if torch.cuda.is_available() else "cpu"'
    mesh = f"mesh=init_device_mesh({kind}, (2, 2), mesh_dim_names=('pp', 'dp')), parallelize=\"fsdp\""
    assert f"autosplit(model, {mesh}, plan=HERE / 'train.json', sample=batch)" in text
    assert "Sample(x=torch.randn((4, 16), dtype=torch.float32))" in text
    assert 'loss_fn=loss_fn, loss_reduction="mean")' in text
    assert text.endswith("#     torchrun --standalone --nproc-per-node 4 train.py\n")
    other = run(f"{NETS}:make_mlp", *asked, "--runtime", "megatron", "--script", str(script))
    assert "--runtime plans megatron; use --export for that" in error_of(other)


@pytest.mark.slow
def test_the_program_of_a_mesh_trains_as_one_process_does(tmp_path: Path) -> None:
    script = inner(tmp_path) / "train.py"
    asked = ("--devices", "4xL4-24GB", "--mesh", "dp=2,pp=2", "--zero", "0", "--chunks", "2", *X)
    assert run(f"{NETS}:make_mlp", *asked, "--loss", f"{NETS}:squared", "--script", str(script)).exit_code == 0
    found = losses(script, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4")
    assert len(found) == 10
    assert found[0] > found[-1] > 0


def stages(count: int, *, processes: bool = True) -> Plan:
    made = tuple(make_stage(index) for index in range(count))
    return make_plan(devices=("cpu",) * count, stages=made, boundaries=(), processes=processes)


def test_each_host_starts_its_own_processes() -> None:
    eight, two = machine("8xH100-SXM5-80GB"), machine("2x4xL4-24GB")
    assert commands(stages(3, processes=False), "t.py", eight) == ["python t.py"]
    assert commands(stages(8), "t.py", eight) == ["torchrun --standalone --nproc-per-node 8 t.py"]
    assert commands(stages(3), "t.py", two) == ["torchrun --standalone --nproc-per-node 3 t.py"]
    first, second = commands(stages(6), "t.py", two)
    assert first == "torchrun --nnodes 2 --node-rank 0 --nproc-per-node 4 --master-addr $MASTER_ADDR t.py"
    assert second == first.replace("rank 0", "rank 1").replace("node 4", "node 2")


@pytest.mark.parametrize(
    ("target", "arguments", "message"),
    [
        ("WithExample", (), "--script writes the inputs that --input gives, and none is given"),
        ("make_mlp", (*X, "--schedule", "forward"), "--script writes a training, and schedule forward has none"),
        (
            "make_mlp",
            (*X, "--precision", "fp8", "--mesh", "dp=1"),
            "--script writes no training in fp8, for which torch has no modules",
        ),
        ("make_mlp", (*X, "--largest-batch"), "--script trains on the inputs that are given"),
        ("make_mlp", (*X, "--script", "absent/train.py"), "--script 'absent/train.py': there is no folder 'absent'"),
    ],
)
def test_what_cannot_be_written_is_said_first(
    tmp_path: Path, target: str, arguments: tuple[str, ...], message: str
) -> None:
    script = () if "--script" in arguments else ("--script", str(tmp_path / "train.py"))
    assert message in error_of(run(f"{NETS}:{target}", *TWO, *arguments, *script))
    assert list(tmp_path.iterdir()) == []
