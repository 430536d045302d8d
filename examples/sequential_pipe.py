"""Two linear layers as a pipeline with eight chunks: what ``torch.distributed.pipeline.sync.Pipe`` was used for.

No process group, no RPC, no layer placed by hand; the result is a tensor, not a remote reference. Code that was written
for ``Pipe`` runs too: the same model, its layers placed, in ``autosplit.compat.Pipe``.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import nn

from autosplit import autosplit
from autosplit.compat import Pipe, WithDevice
from examples import comparison
from examples.comparison import Devices, Outcome


def run(*, devices: Devices, chunks: int) -> Outcome:
    """Run one batch forward and backward, plain and pipelined; compare outputs and gradients."""
    comparison.prepare()
    model = nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 4))
    start = copy.deepcopy(model)
    plain = comparison.place(copy.deepcopy(model), devices=devices)
    pipe = autosplit(model, devices=devices, chunks=chunks)
    x = torch.rand(16, 16)
    expected = plain(x.to(next(plain.parameters()).device))
    expected.square().mean().backward()
    outputs = pipe(x)
    outputs.square().mean().backward()
    print(pipe.report())
    print(pipe.code)
    places = [stage.device for stage in pipe.plan.stages]
    placed = (WithDevice(layer, places[n * len(places) // len(start)]) for n, layer in enumerate(start))
    old = Pipe(nn.Sequential(*placed), chunks=chunks)
    old_outputs = old(x.to(old.devices[0])).local_value()
    old_outputs.square().mean().backward()
    old_gradients = dict(zip(comparison.gradients(plain), comparison.gradients(old).values(), strict=True))
    differences = {
        "outputs": comparison.tensor_difference({"outputs": expected}, {"outputs": outputs}),
        "gradients": comparison.tensor_difference(comparison.gradients(plain), comparison.gradients(pipe)),
        "outputs of Pipe": comparison.tensor_difference({"outputs": expected}, {"outputs": old_outputs}),
        "gradients of Pipe": comparison.tensor_difference(comparison.gradients(plain), old_gradients),
    }
    return Outcome({}, differences)


def main(argv: Sequence[str] | None = None) -> Outcome:
    """Run the comparison from the command line."""
    options = comparison.parser(__doc__, devices="2", chunks=8).parse_args(argv)
    outcome = run(devices=options.devices, chunks=options.chunks)
    comparison.print_verdict(outcome)
    return outcome


if __name__ == "__main__":
    sys.exit(main().exit_code)
