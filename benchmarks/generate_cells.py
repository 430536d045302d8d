"""What `benchmarks.generate` does with one family: tokens and random state of a pipe against the plain model's."""

from __future__ import annotations

import time
import warnings
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from autosplit import PipelinedModule, Sample, autosplit
from autosplit.generation.facade import generator_of
from tests.models.generators import FAMILIES, prompts


class Where(NamedTuple):
    """Where a cell runs."""

    lanes: int
    ranks: int = 1


CELLS = {"2 lanes": Where(2), "3 lanes": Where(3), "2 ranks": Where(2, 2), "3 ranks": Where(3, 3)}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"do_sample": True, "temperature": 1.5, "top_k": 20},
    "beams": {"num_beams": 3},
}
ROWS, NEW = 5, 8


def split(model: nn.Module, lanes: int) -> PipelinedModule:
    """Return a pipe of so many lanes, the caller's rows whole."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return autosplit(model, devices=["cpu"] * lanes, chunks=1)


def made(pipe: Any) -> int:
    """Return how many recordings a pipe has made to generate."""
    return sum(entry.pipe._core.recordings.made for entry in generator_of(pipe)._entries.values())


def exactly(new: int, **more: Any) -> dict[str, Any]:
    """Return options of ``generate`` for so many tokens."""
    return {"max_new_tokens": new, "min_new_tokens": new, "pad_token_id": 0, **more}


def cell(family: str, lanes: int) -> dict[str, Any]:
    """Return what one family gives, on a rank what it gives there."""
    plain, subject, began = FAMILIES[family](), FAMILIES[family](), time.perf_counter()
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    inputs: dict[str, Any] = prompts(plain, ROWS)
    if ranks > 1:
        ids = inputs["input_ids"]
        sample = Sample(ids, decoder_input_ids=ids[:, :3]) if plain.config.is_encoder_decoder else Sample(ids)
        pipe: Any = autosplit(subject, devices="torchrun", sample=sample)
    else:
        pipe = split(subject, lanes)
    figure: dict[str, Any] = {"family": family}
    for kind, options in KINDS.items():
        try:
            torch.manual_seed(3)
            expected, state = plain.generate(**inputs, **exactly(NEW, **options)), torch.get_rng_state()
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            figure[kind] = f"transformers: {type(error).__name__}: {error}"[:100]
            continue
        torch.manual_seed(3)
        tokens: Any = pipe.generate(**inputs, **exactly(NEW, **options))
        same = torch.equal(tokens, expected) and torch.equal(torch.get_rng_state(), state)
        figure[kind] = "same" if same else "OTHER"
        figure[f"{kind}: different tokens"] = expected[:, -NEW:].unique().numel()
    return figure | how(pipe, lanes) | {"seconds": time.perf_counter() - began}


def how(pipe: Any, lanes: int) -> dict[str, Any]:
    """Return what runs a pipe's ``generate``: recordings, whether stages were less, and why rows stay together."""
    generator = generator_of(pipe)
    recordings = {name: entry.pipe._core.recordings for name, entry in generator._entries.items()}
    less = [f"{name}: module by module" for name, each in recordings.items() if each.tree is not None]
    less += [f"{name}: {line}" for name, each in recordings.items() for line in each._collapses.found()]
    stages = [len(each.plan.stages) for each in recordings.values() if each.plan is not None]
    less += [] if max(stages, default=lanes) == lanes else [f"{max(stages)} stages"]
    together = [line for line in pipe._core.recordings._collapses.found() if "one group" in line]
    return {"recordings": made(pipe), "less": "; ".join(less), "one group": "; ".join(together)}
