"""The names that options take; here, and not beside their checks, so that ``--help`` need not import torch."""

from __future__ import annotations

from autosplit.schedule.catalog import SCHEDULES as _CATALOG

RESERVE = "3%"
"""What every device keeps free: no figure of memory was held against a GPU yet."""
OPTIMIZER_COPIES = {"none": 0, "sgd": 0, "momentum": 1, "adam": 2, "adamw": 2}
"""State tensors of the parameter's own shape and dtype that torch's optimizers keep."""
SCHEDULES = ("auto", *_CATALOG)
LANES = ("auto", "inline", "threads")
BATCH_NORM = ("micro", "full")
"""What a training norm with running statistics normalises at once: a microbatch, or the whole batch."""
RNG = ("auto", "plain", "counter")
COMPILE_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
"""The modes of ``torch.compile``."""
COMPILE_ARGUMENTS = ("backend", "mode", "options", "dynamic")
"""What ``torch.compile`` is given by the caller; a stage is always one graph."""
RECOMPUTE = ("never", "always", "except_last", "block")
"""What a stage does again in its backward: nothing, all, all but for the last microbatch, each of its blocks alone."""
PRECISIONS = ("fp32", "amp_bf16", "amp_fp16", "bf16", "bf16_fp32_master")
"""How training computes and what it keeps, for what it costs: it sets no dtype of what runs."""
CUT = ("modules", "operations")
"""Where cuts fall: between modules where that costs less than 2% of the step, or between any two operations."""
FIND = ("best", "smallest", "largest_batch")
"""What a plan on paper answers: the best for these devices, the fewest devices, the largest batch."""
EXPORTS = ("torch-csv", "torchtitan", "megatron")
"""The forms in which other tools take a plan: torch's schedule, torchtitan's modules, Megatron's layout."""
