"""Text out of a pipe: tokens of 31 families, throughput of groups of rows, host time and memory of caches.

    OMP_NUM_THREADS=1 python -m benchmarks.generate PART ... [--json FILE] [--family llama] [--cells "2 lanes"]

    families    tiny models of transformers, random weights, 5 rows padded on one side: tokens and random state of
                ``pipe.generate`` against ``generate``; greedy, sampled with a seed, beams of 3. Cells say where.
    sleeping    12 layers that sleep for each row, on S lanes: as S and as 2 S groups of rows, over a single group, of
                which one lane works at a time. Sleeping needs no core. Asked: 0.9 S.
    computing   a Llama of width 512 that computes, on two lanes, each with a thread: two groups over the same groups
                one at a time. Asked: 1.6. The bound: two plain models, one after the other, over both at once, each
                in a process: what two cores that share a memory do.
    host        CPU seconds per token of tiny models, a single group over the plain model. Asked: 1.1.
    memory      1,000 tokens: bytes of the caches of each stage against ``autosplit.plan(generate=)`` (asked: within
                2%); what a step takes on top, beside the plain model's step; what else is alive at token 1,000 that was
                not at token 10 (asked: nothing); at which tokens something was recorded (asked: none after the third,
                but where a window fills: one for its first step).

Each part may be run alone: a file of figures keeps those of the others.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from autosplit import autosplit, plan
from autosplit.devices import Clock
from autosplit.generation.facade import generator_of
from autosplit.trace.inputs.objects import leaves_of
from benchmarks import pairs
from benchmarks.generate_cells import (
    CELLS,
    KINDS,
    SIZES,
    SMALL,
    both_at_once,
    cell,
    computes,
    exactly,
    how,
    layers_of,
    rows_of,
    sizes_of,
    split,
    wide_llama,
)
from tests.distributed.processes import Ranks
from tests.models.generators import FAMILIES

LAYERS = 12
"""Layers that sleep: as many for each of 2, 3 and 4 stages."""
ASKED_SLEEPING, ASKED_COMPUTING, ASKED_HOST, ASKED_CACHES = 0.9, 1.6, 1.1, 0.02
TOKENS, EARLY = 1000, 10
Part = tuple[list[dict[str, Any]], list[pairs.Check]]
"""Figures, and what is asked of them."""


@torch.library.custom_op("autosplit_benchmarks::sleep_rows", mutates_args=())
def sleep_rows(value: Tensor, seconds: float) -> Tensor:
    """Return the same value, later: so many seconds for each row."""
    time.sleep(seconds * value.shape[0])
    return value.clone()


@sleep_rows.register_fake
def _(value: Tensor, seconds: float) -> Tensor:
    return torch.empty_like(value)


sleep_rows.register_autograd(lambda ctx, gradient: (gradient, None))


class Sleeping(nn.Module):
    """A layer's part that sleeps for each row."""

    def __init__(self, inner: nn.Module, seconds: float) -> None:
        super().__init__()
        self.inner, self.seconds = inner, seconds

    def forward(self, value: Tensor) -> Tensor:
        """Return the output of the inner one, later."""
        return sleep_rows(self.inner(value), self.seconds)


def families(options: argparse.Namespace) -> Part:
    """Compare the tokens of each family in each cell."""
    figures, checks = [], []
    processes: dict[int, Ranks] = {}
    for name in options.cells:
        lanes, ranks = CELLS[name]
        for family in options.family:
            if ranks > 1:
                found = processes.setdefault(ranks, Ranks(ranks)).run(cell, family, lanes, timeout_s=600.0)
            else:
                found = [cell(family, lanes)]
            worst = max(found, key=lambda figure: [figure[kind] for kind in KINDS].count("OTHER"))
            figures.append({"cell": name, **worst})
            print(figures[-1], flush=True)
            others = sum(worst[kind] == "OTHER" for kind in KINDS)
            checks.append(pairs.at_most(f"{name}, {family}: runs with other tokens", 0, others))
            checks.append(pairs.at_most(f"{name}, {family}: less than stages", 0, float(bool(worst["less"]))))
    for each in processes.values():
        each.close()
    return figures, checks


def sleeping(options: argparse.Namespace) -> Part:
    """Time groups of rows on lanes that sleep."""
    figures, checks = [], []
    for lanes in options.lanes:
        rows = 2 * lanes
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**SMALL, num_hidden_layers=LAYERS)).eval()
        for layer in model.model.layers:
            # Two rows, which are a group of the smallest number of groups, take `--layer-s`.
            layer.mlp.down_proj = Sleeping(layer.mlp.down_proj, options.layer_s / 2)
        pipe: Any = split(model, lanes)
        inputs = rows_of(rows)

        def run(
            groups: int, new: int = options.new, pipe: Any = pipe, inputs: dict[str, Tensor] = inputs
        ) -> Callable[[], Tensor]:
            return lambda: pipe.generate(**inputs, **exactly(new), groups=groups)

        with mock.patch.object(Clock, "__init__", _wall):  # a sleep takes no CPU seconds
            tokens = [run(groups, 3)() for groups in (1, lanes, rows)]
        assert all(torch.equal(each, tokens[0]) for each in tokens)
        contenders = {f"{groups} groups": run(groups) for groups in (1, lanes, rows)}
        seconds = walls(pairs.interleave(contenders, repeats=options.repeats, warmups=0))
        alone = seconds.pop("1 groups")
        for name, each in seconds.items():
            gains = pairs.Spread.of([one / other for one, other in zip(alone, each, strict=True)])
            figures.append({"stages": lanes, "groups": name, "over one group": gains, "of S": gains.median / lanes})
            figures[-1] |= {"seconds": pairs.Spread.of(each), "stages of layers": sizes_of(pipe)} | how(pipe, lanes)
            checks.append(pairs.at_least(f"{lanes} lanes, {name}: of S", ASKED_SLEEPING, gains.median / lanes))
            print(figures[-1], flush=True)
    return figures, checks


def _wall(clock: Clock, *, threads: int) -> None:
    clock._now_s = time.perf_counter


def walls(readings: dict[str, list[pairs.Reading]]) -> dict[str, list[float]]:
    """Return the seconds on the clock."""
    return {name: [reading.wall_s for reading in each] for name, each in readings.items()}


def computing(options: argparse.Namespace) -> Part:
    """Time two groups on two lanes that compute."""
    pipe, inputs, new = split(wide_llama(), 2), rows_of(options.rows, 16), 48
    plain, whole, grouped, alone = "plain", "pipe, 1 group", "pipe, 2 groups", "pipe, the groups one at a time"
    halves = [{name: value.chunk(2)[half] for name, value in inputs.items()} for half in (0, 1)]
    contenders: dict[str, Callable[[], Any]] = {
        plain: lambda: pipe.unsplit().generate(**inputs, **exactly(new)),
        whole: lambda: pipe.generate(**inputs, **exactly(new), groups=1),
        grouped: lambda: pipe.generate(**inputs, **exactly(new), groups=2),
        alone: lambda: [pipe.generate(**half, **exactly(new), groups=1) for half in halves],
    }
    assert torch.equal(contenders[plain](), contenders[grouped]())
    seconds = walls(pairs.interleave(contenders, repeats=options.repeats))
    gains = [one / other for one, other in zip(seconds[alone], seconds[grouped], strict=True)]
    of_plain = [one / other for one, other in zip(seconds[plain], seconds[grouped], strict=True)]
    of_pipe = [one / other for one, other in zip(seconds[whole], seconds[grouped], strict=True)]
    figure = {
        "rows": options.rows,
        "stages of layers": sizes_of(pipe),
        "two groups over one at a time": pairs.Spread.of(gains),
        "best pair": max(gains),
    }
    figure |= {"two groups over plain": pairs.Spread.of(of_plain)}
    figure |= {"two processes over one": both_at_once(functools.partial(computes, options.rows // 2, new))}
    figure |= {"two groups over one": pairs.Spread.of(of_pipe)}
    figure |= {"seconds": {name: pairs.Spread.of(each) for name, each in seconds.items()}} | how(pipe, 2)
    print(figure, flush=True)
    check = pairs.at_least(
        "computing lanes: two groups over the same groups one at a time", ASKED_COMPUTING, statistics.median(gains)
    )
    return [figure], [check]


def host(options: argparse.Namespace) -> Part:
    """Compare the CPU seconds of a token."""
    old = SIZES | {"n_embd": 32, "n_head": 4, "n_positions": 256}
    models: dict[str, Callable[[], Any]] = {}
    for layers in (12, 4):
        llama = LlamaConfig(**SMALL, num_hidden_layers=layers)
        models[f"llama, {layers} layers"] = functools.partial(LlamaForCausalLM, llama)
        models[f"gpt2, {layers} layers"] = functools.partial(GPT2LMHeadModel, GPT2Config(**old, n_layer=layers))
    figures, checks, new = [], [], 32
    for name, make in models.items():
        torch.manual_seed(0)
        pipe, inputs = split(make().eval(), 2), rows_of(2)
        plain = pipe.unsplit()
        contenders = {
            "plain": lambda plain=plain, inputs=inputs: plain.generate(**inputs, **exactly(new)),
            "pipe": lambda pipe=pipe, inputs=inputs: pipe.generate(**inputs, **exactly(new), groups=1),
        }
        readings = pairs.interleave(contenders, repeats=max(9, options.repeats))
        cpu_s = {which: [reading.process_s / new for reading in each] for which, each in readings.items()}
        ratio = pairs.Spread.of([ours / one for one, ours in zip(cpu_s["plain"], cpu_s["pipe"], strict=True)])
        spreads = {f"{which}, us per token": pairs.Spread.of(each).scaled(1e6) for which, each in cpu_s.items()}
        figures.append({"model": name, "pipe over plain": ratio, **spreads, **how(pipe, 2)})
        checks.append(pairs.at_most(f"{name}: CPU time per token over the plain model's", ASKED_HOST, ratio.median))
        print(figures[-1], flush=True)
    return figures, checks


class Watched:
    """Stands for what runs the forwards of a generation; notes what is alive behind some of them."""

    def __init__(self, pipe: Any, at: Iterable[int]) -> None:
        self.inner, self._at = generator_of(pipe).entry("forward"), set(at)
        self.recorded_at: list[int] = []
        self.alive: dict[int, tuple[int, int]] = {}
        """By the number of the call: how many tensors there are beside the cache, and their bytes."""
        self.last = LastStep()
        self.cache: Any = None
        self.calls = 0
        generator_of(pipe)._entries["forward"] = self  # type: ignore[assignment]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def __call__(self, kept: Any, /, **inputs: Any) -> Any:
        """Run a forward."""
        self.calls, before = self.calls + 1, self.inner.pipe._core.recordings.made
        output = self.last.run(lambda: self.inner(kept, **inputs), max(self._at) - self.calls)
        self.cache = output["past_key_values"]
        if self.inner.pipe._core.recordings.made > before:
            self.recorded_at.append(self.calls)
        if self.calls in self._at:
            gc.collect()
            every = [each for each in gc.get_objects() if issubclass(type(each), Tensor)]
            # Tokens, masks and positions are integers, which `generate` makes longer.
            floats = storages(each for each in every if each.device.type == "cpu" and each.is_floating_point())
            sizes = [size for place, size in floats.items() if place not in storages(leaves_of(self.cache))]
            self.alive[self.calls] = len(sizes), sum(sizes)
        return output


def storages(values: Iterable[Any]) -> dict[int, int]:
    """Return the bytes of the storages of tensors, by where they are."""
    found = [each.untyped_storage() for each in values if isinstance(each, Tensor)]
    return {storage.data_ptr(): storage.nbytes() for storage in found}


class LastStep:
    """Watches the allocator in the last call; in the one before, too: of older memory it does not know the size."""

    def __init__(self) -> None:
        self.peak = 0
        """Bytes that the last call had at most on top of what it began with."""
        self._record = profile(activities=[ProfilerActivity.CPU], profile_memory=True)

    def run(self, call: Callable[[], Any], left: int) -> Any:
        """Run a call that is followed by so many."""
        if left == 1:
            self._record.__enter__()
        with record_function("last step") if left == 0 else contextlib.nullcontext():
            output = call()
        if left == 0:
            self._record.__exit__(None, None, None)
            events: list[Any] = sorted(self._record.profiler.kineto_results.events(), key=lambda each: each.start_ns())
            began = next(each.start_ns() for each in events if each.name() == "last step")
            memory = [each for each in events if each.name() == "[memory]"]
            before = [each.nbytes() for each in memory if each.start_ns() < began]
            self.peak = max(itertools.accumulate(each.nbytes() for each in memory[len(before) :]), default=0)
        return output


def memory(options: argparse.Namespace) -> Part:
    """Compare caches with the plan, token by token."""
    old = SIZES | {"n_embd": 32, "n_head": 4, "n_positions": 2048, "n_layer": 4}
    models: dict[str, Callable[[], Any]] = {
        "llama": lambda: LlamaForCausalLM(LlamaConfig(**SMALL, num_hidden_layers=4)),
        "gpt2": lambda: GPT2LMHeadModel(GPT2Config(**old)),
        "mistral, window of 64": lambda: MistralForCausalLM(
            MistralConfig(**SMALL, num_hidden_layers=4, sliding_window=64)
        ),
    }
    figures, checks = [], []
    for name, make in models.items():
        torch.manual_seed(0)
        model, inputs = make().eval(), rows_of(4)
        meta = make().eval().to("meta")
        sample = {"input_ids": inputs["input_ids"].to("meta"), "logits_to_keep": 1}
        paper = plan(meta, "2xL40S", sample=sample, generate=options.tokens)
        pipe = autosplit(model, devices=["cpu"] * 2, plan=paper)
        watched = Watched(pipe, (EARLY, options.tokens - 1, options.tokens))
        pipe.generate(**inputs, **exactly(options.tokens), groups=1)
        assert paper.generation is not None
        layers = [sum(storages(leaves_of(each)).values()) for each in watched.cache.layers]
        held = [sum(layers[number] for number in stage) for stage in layers_of(watched.inner.pipe.plan)]
        errors = [abs(a - b) / b for a, b in zip(held, paper.generation.cache_bytes, strict=True)]
        (count, size), (last, last_size) = watched.alive[EARLY], watched.alive[options.tokens - 1]
        recorded = watched.recorded_at
        figure: dict[str, Any] = {
            "model": name,
            "held by stage": held,
            "planned by stage": list(paper.generation.cache_bytes),
        }
        figure |= {"off": max(errors), "peak of the last step over the caches": watched.last.peak / sum(held)}
        figure |= {"peak of the plain step over the caches": plain_peak(model, inputs, options.tokens) / sum(held)}
        figure |= {"more tensors": last - count, "their bytes": last_size - size, "recorded in calls": recorded}
        figures.append(figure | how(pipe, 2))
        print(figures[-1], flush=True)
        filling = 1 if "window" in name else 0
        checks.append(pairs.at_most(f"{name}: caches of a stage off the plan", ASKED_CACHES, max(errors)))
        checks.append(pairs.at_most(f"{name}: more bytes beside the caches", 0, last_size - size))
        late = sum(call > 3 for call in recorded)
        checks.append(pairs.at_most(f"{name}: recordings after the third token", filling, late))
    return figures, checks


def plain_peak(model: Any, inputs: dict[str, Tensor], tokens: int) -> int:
    """Return what the plain model's last step has at most on top of what it begins with."""
    last, left, forward = LastStep(), tokens, type(model).forward

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal left
        left -= 1
        return last.run(lambda: forward(model, *args, **kwargs), left)

    model.forward = call
    model.generate(**inputs, **exactly(tokens))
    del model.forward
    return last.peak


PARTS = {each.__name__: each for each in (families, sleeping, computing, host, memory)}


def others_of(options: argparse.Namespace) -> Part:
    """Return the figures and checks of a file that are of other parts, or of other families and cells."""
    if options.json is None or not options.json.is_file():
        return [], []
    content = json.loads(options.json.read_text(encoding="utf-8"))
    cells = [f"families: {cell}, {family}:" for cell in options.cells for family in options.family]
    begins = tuple(f"{part}:" for part in options.parts if part != "families")
    begins += tuple(cells) if "families" in options.parts else ()

    def name_of(figure: dict[str, Any]) -> str:
        return f"{figure['part']}: {figure['cell']}, {figure['family']}:" if "cell" in figure else f"{figure['part']}:"

    figures = [figure for figure in content["figures"] if not name_of(figure).startswith(begins)]
    return figures, [pairs.Check(**each) for each in content["checks"] if not each["name"].startswith(begins)]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the parts that the command line asks for."""
    parser = pairs.parser(__doc__)
    parser.add_argument("parts", nargs="*", default=list(PARTS), metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--family", nargs="+", default=list(FAMILIES), choices=list(FAMILIES), metavar="NAME")
    parser.add_argument("--cells", nargs="+", default=["2 lanes", "3 lanes"], choices=list(CELLS))
    parser.add_argument("--lanes", type=int, nargs="+", default=[2, 3, 4], help="sleeping lanes")
    parser.add_argument("--layer-s", type=float, default=0.02, help="seconds that a layer sleeps for two rows")
    parser.add_argument("--new", type=int, default=32, help="tokens on sleeping lanes")
    parser.add_argument("--rows", type=int, default=128, help="rows on computing lanes")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="tokens whose memory is watched")
    parser.add_argument("--repeats", type=int, default=3, help="rounds of what is timed; of host time 9 at least")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    machine = pairs.facts()
    figures, checks = others_of(options)
    for part in options.parts:
        load = pairs.facts()["load"]
        found, asked = PARTS[part](options)
        figures += [{"part": part, "load": load, **figure} for figure in found]
        checks += [pairs.Check(f"{part}: {each.name}", each.asked, each.measured, each.ok) for each in asked]
    settings = {name: value for name, value in vars(options).items() if name not in ("json", "parts")}
    print(pairs.facts_text(machine))
    pairs.conclude(
        options.json, benchmark="generate", settings=settings, machine=machine, figures=figures, checks=checks
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
