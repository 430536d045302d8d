"""What a GPU's kernels hold beside their results, observed on the training steps of the eight families.

    python -m benchmarks.workspaces --device cuda:0 [--save FILE]

writes a dated file that predictions for that device take: ``cost_models/workspaces/<device>.json``, joined with what is
there.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

import cost_models
from autosplit.devices import Clock, clock_of
from autosplit.profile.workspace_watch import WorkspaceWatch, device_name
from benchmarks.families import Family, families
from cost_models.workspaces import Workspaces


def observed(place: torch.device, clock: Clock, *, chosen: Sequence[Family]) -> WorkspaceWatch:
    """Return what a device's kernels held in a training step of some families, in fp32 and under bf16 autocast."""
    found = WorkspaceWatch(clock)
    for family in chosen:
        torch.manual_seed(0)
        model, target = family.make().to(place), family.target(family.rows).to(place)
        inputs = [tensor.to(place) for tensor in family.batch(family.rows)]
        for low in (False, True):
            with found, torch.autocast(place.type, torch.bfloat16, enabled=low):
                family.loss(model(*inputs), target).backward()
            model.zero_grad(set_to_none=True)
    return found


def observe(place: torch.device, save: Path | None) -> None:
    """Observe a GPU and write what was seen."""
    name = device_name(place)
    seen = observed(place, clock_of(place, threads=1), chosen=list(families().values())).found(name)
    path = save or Path(cost_models.__path__[0]) / "workspaces" / f"{name}.json"
    both = Workspaces.load(path).joined(seen) if path.is_file() else seen
    both.save(path)
    most = max(both.operations.values(), default=0)
    print(f"{len(both.operations)} operations on {name}, most scratch {most} bytes, kept {both.kept_bytes}: {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", type=torch.device, required=True, help="a CUDA device whose kernels are observed")
    parser.add_argument("--save", type=Path, metavar="FILE", help="the file to write")
    chosen = parser.parse_args()
    observe(chosen.device, chosen.save)


if __name__ == "__main__":
    main()
