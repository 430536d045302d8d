"""The memory of a whole training step on a CUDA device, by the same recording: allocated and reserved.

The prediction lowers the kernels to CUDA's and plays the step's changes through the simulated caching allocator: two
steps, since the first one makes the optimizer's state and leaves its segments. What is measured are
``torch.cuda.max_memory_allocated`` and ``max_memory_reserved`` from before the model is there, in a process that did
nothing on the device before: libraries keep a workspace once they made it.
"""

from __future__ import annotations

import gc
import itertools
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from autosplit.profile.lowering import cuda_autocast
from autosplit.profile.stage_trace.stage_graph import Stages
from autosplit.profile.stage_trace.stage_trace import How
from autosplit.profile.workspaces import cublas_workspace_bytes
from autosplit.schedule.catalog import build
from autosplit.schedule.memory.allocator import device_changes, simulate_allocator
from autosplit.schedule.memory.replay import StaticBytes
from autosplit.schedule.memory.updates import optimizer_changes, state_sizes
from benchmarks.families import Family
from benchmarks.memory_step import OPTIMIZERS, Way
from benchmarks.memory_subject import Precision, Subject, Training, held_by, recomputed, traces, updated

STEPS = 2


def predicted_cuda(
    subject: Subject, way: Way, *, optimizer: str, workspaces: bool = False, capability: tuple[int, int] = (9, 0)
) -> tuple[int, int]:
    """Return the peaks of allocated and reserved bytes, from the recording alone.

    ``workspaces`` adds what cuBLAS keeps on a device of this compute capability, for the forward's thread and for
    autograd's, where the model has products: without it the libraries are taken to have theirs already.
    """
    units = subject.units if way.recompute == "block" else ()
    with cuda_autocast(torch.bfloat16) if way.precision == "amp_bf16" else nullcontext():
        how = How(way.rows, units=units, kernels="cuda")
        stage = traces(Stages(subject.graph).of(), how, recompute=way.recompute)
    trained = updated(subject.model)
    step = optimizer_changes(trained, name=optimizer, foreach=True)
    state = enumerate((size for tensor in trained for size in state_sizes(optimizer, tensor)), start=len(step))
    finishes = [(*state, *step), *[step] * (STEPS - 1)]
    schedule = build("gpipe", stages=1, microbatches=1)
    static = [StaticBytes(parameters=held_by([subject.model]))]
    changes = device_changes(schedule, {0: stage}, static, device=0, finishes=finishes)
    kept = cublas_workspace_bytes(capability) if workspaces and _has_products(subject.model) else 0
    found = simulate_allocator(itertools.chain(((-1, kept), (-2, kept)), changes))
    return found.allocated_peak_bytes, found.reserved_peak_bytes


def measured_cuda(family: Family, way: Way, *, optimizer: str) -> tuple[int, int]:
    """Return the peaks of allocated and reserved bytes on the current device, from an empty cache on."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    torch.manual_seed(0)
    model = Training(family.make(), family.loss).train().cuda()
    inputs = [tensor.cuda() for tensor in (family.target(way.rows), *family.batch(way.rows))]
    stepping = OPTIMIZERS[optimizer](model.parameters(), lr=1e-4)
    with recomputed(family.blocks(model.model) if way.recompute == "block" else []):
        for _ in range(STEPS):
            with _autocast(way.precision):
                model(*inputs).backward()
            stepping.step()
            stepping.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()


def clear_workspaces() -> None:
    """Give back what cuBLAS keeps, so that a measurement is as in a process that did nothing before.

    ``torch._C._cuda_clearCublasWorkspaces`` has no public name (CUDA graphs of torch.compile use it); used in this file
    only, as torch 2.11 to 2.15 have it.
    """
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()


def _has_products(model: nn.Module) -> bool:
    """Tell whether cuBLAS is called: convolutions and LSTMs are cuDNN's."""
    return any(isinstance(module, (nn.Linear, nn.MultiheadAttention)) for module in model.modules())


def _autocast(precision: Precision) -> AbstractContextManager[object]:
    return torch.autocast("cuda", torch.bfloat16, enabled=precision == "amp_bf16")
