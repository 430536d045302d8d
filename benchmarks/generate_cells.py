"""What `benchmarks.generate` does with one family: tokens and random state of a pipe against the plain model's.

And how much more two processes compute than one.
"""

from __future__ import annotations

import multiprocessing
import time
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

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
SIZES: dict[str, Any] = {"vocab_size": 97, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
HEADS: dict[str, Any] = SIZES | {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048}
SMALL: dict[str, Any] = HEADS | {"hidden_size": 32, "intermediate_size": 48}


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


def rows_of(count: int, length: int = 8) -> dict[str, Tensor]:
    """Return prompts of one length."""
    return {"input_ids": torch.arange(3, 3 + count * length).view(count, length) % 90 + 3}


def wide_llama() -> Any:
    """Return a Llama of width 512."""
    sizes = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8, "num_attention_heads": 16}
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**(HEADS | sizes | {"num_key_value_heads": 16}))).eval()


def computes(rows: int, new: int, ready: Any, seconds: Any) -> None:
    """Have a plain model generate in a process when others are ready, too, and tell how long that takes."""
    torch.set_num_threads(1)
    model, inputs = wide_llama(), rows_of(rows, 16)
    for _ in range(3):
        ready.wait()
        started = time.perf_counter()
        model.generate(**inputs, **exactly(new))
        seconds.put(time.perf_counter() - started)


def both_at_once(work: Callable[..., None]) -> float:
    """Return by how much two processes do more work per second than one does; of three rounds the best."""
    context, best = multiprocessing.get_context("spawn"), {}
    for count in (1, 2):
        ready, seconds = context.Barrier(count), context.SimpleQueue()
        processes = [context.Process(target=work, args=(ready, seconds)) for _ in range(count)]
        for process in processes:
            process.start()
        taken = [seconds.get() for _ in range(3 * count)]
        for process in processes:
            process.join()
        best[count] = min(max(taken[round : round + count]) for round in range(0, len(taken), count))
    return 2 * best[1] / best[2]


def sizes_of(pipe: Any) -> list[int]:
    """Return how many layers each stage has, by where their caches are."""
    return [len(layers) for layers in layers_of(generator_of(pipe).entry("forward").pipe.plan)]


def layers_of(found: Any) -> list[list[int]]:
    """Return the layers whose attention is on each stage of a plan."""
    paths = [[node.split("#")[0].split(".") for node in s.nodes if "scaled_dot_product" in node] for s in found.stages]
    return [[int(each) for path in stage for each in path if each.isdigit()] for stage in paths]
