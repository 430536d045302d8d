"""The peak of every rank of a mesh in its training step: predicted by `plan`, measured by the rank's allocator.

    python -m benchmarks.memory_mesh [--subject mlp transformer] [--json FILE]

`plan` is asked on paper for four CPU lanes in three meshes; four processes train its cut over gloo. Each records its
own allocator in steps in the steady state: gradients are None when one begins, and the optimizer's step, Adam's, is
part of it. Measured is the least of four steps, as gloo's threads let go of a value late where cores are taken, and
what was there before: parameters and the optimizer's state. Nothing is fitted.
"""

from __future__ import annotations

import gc
import itertools
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from autosplit import Plan, autosplit, plan
from autosplit.devices import Allocations
from benchmarks import pairs
from benchmarks.layout_models import Layer, gpt
from benchmarks.memory_subject import bytes_of

ASKED = 0.03
MESHES = ({"dp": 2, "pp": 2}, {"pp": 2, "tp": 2}, {"tp": 4})
RANKS = 4
WARM_UP, STEPS = 2, 4
CHUNKS = 4


@dataclass(frozen=True)
class Subject:
    """A model and the values of so many rows; a replica has ``rows``."""

    make: Callable[[], nn.Module]
    values: Callable[[int], Tensor]
    rows: int

    def batch(self, replicas: int) -> Tensor:
        """Return the rows of all replicas."""
        return self.values(self.rows * replicas)


def _mlp() -> nn.Module:
    layers = [nn.Sequential(nn.Linear(1024, 2048), nn.GELU(), nn.Linear(2048, 1024)) for _ in range(8)]
    return nn.Sequential(*layers)


def _transformer() -> nn.Module:
    return nn.Sequential(*(Layer(gpt(1, 256, 4, 0, 64)) for _ in range(8)))


SUBJECTS = {
    "mlp": Subject(_mlp, lambda rows: torch.randn(rows, 1024), 1024),
    "transformer": Subject(_transformer, lambda rows: torch.randn(rows, 64, 256), 32),
}


@dataclass(frozen=True)
class Peak:
    """One rank's peak in a step."""

    subject: str
    mesh: str
    rank: int
    predicted_bytes: int
    measured_bytes: int

    @property
    def error(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted_bytes / self.measured_bytes - 1


def planned(subject: Subject, mesh: Mapping[str, int]) -> Plan:
    """Return the plan of a mesh on paper."""
    asked: dict[str, Any] = {"schedule": "1f1b", "recompute": "never", "chunks": CHUNKS, "optimizer": "adam"}
    sample = subject.batch(mesh.get("dp", 1)).to("meta")
    with torch.device("meta"):
        model = subject.make()
    return plan(model, f"{RANKS}xcpu-lane", sample=sample, mesh=mesh, zero=0, loss_fn=F.mse_loss, **asked)


def rank(number: int, folder: Path, name: str, degrees: Mapping[str, int]) -> None:
    """Train as one rank of the mesh; write its stage, and the bytes of its peak."""
    torch.set_num_threads(1)
    store = f"file://{folder / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=number, world_size=RANKS)
    mesh = init_device_mesh("cpu", tuple(degrees.values()), mesh_dim_names=tuple(degrees))
    subject = SUBJECTS[name]
    torch.manual_seed(0)
    x = subject.batch(1)
    pipe: Any = autosplit(subject.make(), mesh=mesh, sample=x, plan=folder / "plan.json")
    optimizer, target = torch.optim.Adam(pipe.parameters(), lr=0.0), torch.zeros_like(x)

    def step() -> None:
        pipe.train_step(x, target=target, loss_fn=F.mse_loss)
        optimizer.step()

    peak_bytes = []
    for _ in range(WARM_UP + STEPS):
        optimizer.zero_grad()
        gc.collect()
        with Allocations() as run:
            step()
        peak_bytes.append(run.peak_bytes)
    state = [value for own in optimizer.state.values() for value in own.values() if isinstance(value, Tensor)]
    static = sum(bytes_of([*pipe.parameters(), *pipe.buffers(), *state]))
    stage = mesh.get_local_rank("pp") if "pp" in degrees else 0
    (folder / f"{number}").write_text(f"{stage} {static + min(peak_bytes[WARM_UP:])}")
    dist.destroy_process_group()


def peaks(name: str, mesh: Mapping[str, int]) -> list[Peak]:
    """Return what the plan says and what the allocators did, rank by rank."""
    made, found = planned(SUBJECTS[name], mesh), []
    with tempfile.TemporaryDirectory() as folder:
        made.save(Path(folder) / "plan.json")
        mp.start_processes(rank, (Path(folder), name, mesh), nprocs=RANKS, start_method="spawn")
        for number in range(RANKS):
            lane, measured = map(int, (Path(folder) / f"{number}").read_text().split())
            predicted = max(own.memory.peak_bytes for own in made.stages if own.lane == lane)
            found.append(Peak(name, str(made.mesh), number, predicted, measured))
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a line per rank and what is asked, and write all figures as JSON."""
    parser = pairs.parser(__doc__)
    parser.add_argument("--subject", nargs="*", default=list(SUBJECTS))
    asked = parser.parse_args(arguments)
    found = []
    for name, mesh in itertools.product(asked.subject, MESHES):
        for peak in peaks(name, mesh):
            found.append(peak)
            both = f"{peak.predicted_bytes / 2**20:9.2f} MiB predicted {peak.measured_bytes / 2**20:9.2f} MiB measured"
            print(f"{name:12} {peak.mesh:16} rank {peak.rank}  {both} {peak.error:+.2%}", flush=True)
    checks = [pairs.at_most(f"{own.subject} {own.mesh} rank {own.rank}", ASKED, abs(own.error)) for own in found]
    settings = {"meshes": MESHES, "chunks": CHUNKS, "rows": {name: SUBJECTS[name].rows for name in asked.subject}}
    figures = [asdict(peak) | {"error": peak.error} for peak in found]
    pairs.conclude(
        asked.json, benchmark="memory_mesh", settings=settings, machine=pairs.facts(), figures=figures, checks=checks
    )


if __name__ == "__main__":
    main()
