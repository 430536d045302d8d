"""LoRA on plain and on quantised bases: 20 families of transformers as PEFT adapts them, split over lanes and ranks.

    python -m benchmarks.finetune [--family llama gpt2] [--base none int8 nf4] [--cells "2 lanes" "2 ranks"]

Each cell trains PEFT's model three steps with AdamW, plain and split, and compares outputs, losses, gradients of the
adapters and the adapters after each step, in float32 or float64. Then it saves the split model's adapters by PEFT's
``save_pretrained`` and compares a plain model that has loaded them with the plain one that was trained.

    int8   a frozen weight of int8 codes and a scale per row, dequantised in the forward
    nf4    two codes of four bits in a byte, a maximum per 64 of them, dequantised in an autograd function, whole while
           the product runs, in the forward and again in the backward: as bitsandbytes' ``MatMul4Bit``

Peaks are those of `benchmarks.memory_pipe`, with and without the model's gradient checkpointing.
"""

from __future__ import annotations

import copy
import itertools
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from autosplit import Sample, autosplit
from benchmarks import pairs
from benchmarks.memory_pipe import Peak, lane_bytes
from benchmarks.zoo.case import Shape
from benchmarks.zoo.hf import token_batch
from benchmarks.zoo.hf_text import decoders
from tests.distributed.processes import Ranks


class Kind(NamedTuple):
    """Where a cell runs."""

    lanes: int
    dtype: str
    ranks: int = 1


CELLS = {
    "2 lanes": Kind(2, "float32"),
    "3 lanes": Kind(3, "float32"),
    "float64": Kind(3, "float64"),
    "2 ranks": Kind(2, "float32", 2),
}
PEAK = 0.02
FAMILIES = (
    *("gpt2", "llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "phi", "phi3", "olmo2", "stablelm"),
    *("starcoder2", "granite", "cohere", "smollm3", "gpt-neox", "opt", "bloom", "falcon"),
)
BASES = ("none", "int8", "nf4")
ASKED = {"float32": 1e-6, "float64": 1e-10}
STEPS, BATCH, CHUNKS, BLOCK = 3, 5, 3, 64
NF4 = (
    *(-1.0, -0.6961928, -0.52507305, -0.39491749, -0.28444138, -0.18477343, -0.09105004, 0.0),
    *(0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0),
)


# -- quantised layers ------------------------------------------------------------------------------------------------
class Int8Linear(nn.Linear):
    """A linear layer of int8 codes with a scale per row."""

    def __init__(self, weight: Tensor, bias: nn.Parameter | None) -> None:
        super().__init__(weight.shape[1], weight.shape[0], bias=False, device="meta")
        scale = weight.abs().amax(1, keepdim=True) / 127
        self.weight = nn.Parameter((weight / scale).round().to(torch.int8), requires_grad=False)
        self.bias = bias
        self.register_buffer("scale", scale)

    def forward(self, value: Tensor) -> Tensor:
        return F.linear(value, self.weight.to(value.dtype) * self.scale, self.bias)


class Product(torch.autograd.Function):
    """A product with a weight of four bits, which is not saved whole."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, codes: Tensor, maxima: Tensor, table: Tensor, shape: torch.Size) -> Tensor:
        ctx.save_for_backward(codes, maxima, table)
        ctx.shape = shape
        return F.linear(value, dequantised(codes, maxima, table, shape))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] @ dequantised(*ctx.saved_tensors, ctx.shape), None, None, None, None


def dequantised(codes: Tensor, maxima: Tensor, table: Tensor, shape: torch.Size) -> Tensor:
    """Return the weight that two codes in a byte stand for."""
    halves = torch.stack((codes >> 4, codes & 15), -1).long()
    return (table[halves].view(-1, BLOCK) * maxima).view(shape)


class NF4Linear(nn.Linear):
    """A linear layer of packed codes of four bits with a maximum per block."""

    def __init__(self, weight: Tensor, bias: nn.Parameter | None) -> None:
        super().__init__(weight.shape[1], weight.shape[0], bias=False, device="meta")
        blocks, self.shape = weight.reshape(-1, BLOCK), weight.shape
        maxima, table = blocks.abs().amax(1, keepdim=True), torch.tensor(NF4, dtype=weight.dtype)
        codes = (blocks / maxima).unsqueeze(-1).sub(table).abs().argmin(-1).to(torch.uint8).view(-1, 2)
        self.weight = nn.Parameter(codes[:, 0] << 4 | codes[:, 1], requires_grad=False)
        self.bias = bias
        self.register_buffer("maxima", maxima)
        self.register_buffer("table", table)

    def forward(self, value: Tensor) -> Tensor:
        product = Product.apply(value, self.weight, self.maxima, self.table, self.shape)
        return product if self.bias is None else product + self.bias


def quantised(model: nn.Module, make: Callable[[Tensor, nn.Parameter | None], nn.Module]) -> nn.Module:
    """Replace the linear layers of the blocks, also transformers' transposed ones; the head stays as it is."""
    head = model.get_output_embeddings()
    for name, module in list(model.named_modules()):
        if isinstance(module, (nn.Linear, Conv1D)) and module is not head:
            weight = module.weight.detach().t() if isinstance(module, Conv1D) else module.weight.detach()
            model.set_submodule(name, make(weight.contiguous(), module.bias))
    return model


LAYERS: Mapping[str, Callable[[Tensor, nn.Parameter | None], nn.Module]] = {"int8": Int8Linear, "nf4": NF4Linear}


# -- cells -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Figure:
    """What one family over one base gave.

    ``split`` says how it ran: "pipelined", or why not. ``worst`` is the largest difference of all that is compared, of
    ``at``; ``loaded`` that of the outputs with the saved adapters. Lanes of several processes are ranks.
    """

    family: str
    base: str
    dtype: str
    lanes: int
    ranks: int
    split: str
    recordings: int
    worst: float
    at: str
    loaded: float
    seconds: float

    @property
    def cell(self) -> str:
        """What it is of, in words."""
        where = f"{self.ranks} ranks" if self.ranks > 1 else f"{self.lanes} lanes"
        return f"{self.family} {self.base} {self.dtype} {where}"


def adapted(family: str, base: str, dtype: torch.dtype) -> Any:
    """Return a family's model as PEFT trains it, with adapters whose effect shows."""
    torch.manual_seed(0)
    model = next(case for case in decoders() if case.name == family).build()
    if base != "none":
        model = quantised(model, LAYERS[base])
    model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear"))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.05)
    return model.to(dtype).train()


def batch_of(step: int) -> dict[str, Tensor]:
    """Return the batch of a step, padded, with labels."""
    torch.manual_seed(10 + step)
    return token_batch(Shape(BATCH, 12), labels=True, mask=True).kwargs


def outputs_of(model: Any, batch: dict[str, Tensor]) -> tuple[Any, Tensor]:
    """Return the outputs and the loss: the model's, or in float64, where that is in float32, the same by torch's."""
    if next(p for p in model.parameters() if p.requires_grad).dtype == torch.float32:
        return (output := model(**batch)), output.loss
    labels = batch.pop("labels")
    output = model(**batch)
    return output, F.cross_entropy(output.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def trained(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Train, and yield what each step leaves."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-4)
    for step in range(STEPS):
        output, loss = outputs_of(model, batch_of(step))
        loss.backward()
        yield f"loss {step}", loss.detach()
        yield f"logits {step}", output.logits.detach()
        yield from ((f"gradient {step} {n}", p.grad.clone()) for n, p in model.named_parameters() if p.requires_grad)
        optimizer.step()
        optimizer.zero_grad()
        yield from ((f"value {step} {n}", p.detach().clone()) for n, p in model.named_parameters() if p.requires_grad)


def distance(actual: Tensor, plain: Tensor) -> float:
    """Return the largest difference, absolute below 1 and relative above it."""
    return float((actual - plain).abs().div(plain.abs().clamp(min=1)).max())


def cell(family: str, base: str, dtype: torch.dtype, lanes: int, folder: str) -> Figure:
    """Return the figure of one cell, on a rank that of its part; ``folder``: where the adapters are saved."""
    began, ranks = time.perf_counter(), dist.get_world_size() if dist.is_initialized() else 1
    model = adapted(family, base, dtype)
    plain, fresh = copy.deepcopy(model), copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if ranks > 1:
            batch = batch_of(0)
            if dtype != torch.float32:
                del batch["labels"]
            pipe: Any = autosplit(model, devices="torchrun", chunks=CHUNKS, sample=Sample(**batch), outputs="all")
        else:
            pipe = autosplit(model, devices=lanes, chunks=CHUNKS)
        results, expected = dict(trained(pipe)), dict(trained(plain))
        apart = {name: distance(value, expected[name]) for name, value in results.items()}
        pipe.save_pretrained(folder)
        again = PeftModel.from_pretrained(fresh.unload(), folder).to(dtype).eval()
    with torch.no_grad():
        loaded = distance(again(**batch_of(0)).logits, plain.eval()(**batch_of(0)).logits)
    at = max(apart, key=lambda name: apart[name])
    return Figure(
        *(family, base, str(dtype).removeprefix("torch."), lanes, ranks, how(pipe, lanes), pipe._core.recordings.made),
        *(apart[at], at, loaded, time.perf_counter() - began),
    )


def how(pipe: Any, lanes: int) -> str:
    """Return "pipelined", or what is less than that."""
    plan, collapsed = pipe.plan, pipe._core.recordings._collapses.found()
    whole = len(plan.stages) < lanes or len(plan.microbatch_rows) < CHUNKS or plan.rung != "recorded"
    return "; ".join(collapsed) or (f"{len(plan.stages)} stages, {plan.rung}" if whole else "pipelined")


class Logits(nn.Module):
    """A model whose output is the logits, which `memory_pipe` takes the mean of."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(input_ids=tokens).logits


def peaks(family: str, base: str, *, checkpoints: bool) -> list[Peak]:
    """Return what the plan says and what the allocator did, lane by lane, of two stages under 1F1B."""
    model = adapted(family, base, torch.float32)
    if checkpoints:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    pipe = autosplit(Logits(model), devices=["cpu"] * 2, chunks=4, schedule="1f1b", lanes="inline")
    found = lane_bytes(pipe, (torch.randint(4, 96, (8, 48)),))
    assert pipe.plan is not None
    again = pipe.plan.stages[0].recompute
    return [Peak(f"{family} {base}", "1f1b", again, lane, *both) for lane, both in enumerate(found)]


def main(argv: Sequence[str] | None = None) -> None:
    """Print a line per cell and what is asked, and write all figures as JSON."""
    parser = pairs.parser(__doc__)
    parser.add_argument("--family", nargs="*", default=FAMILIES)
    parser.add_argument("--base", nargs="*", default=BASES)
    parser.add_argument("--cells", nargs="*", default=list(CELLS), choices=list(CELLS))
    parser.add_argument("--peaks", nargs="*", default=["gpt2", "llama", "gemma2", "opt"], help="families")
    chosen = parser.parse_args(argv)
    torch.set_num_threads(1)
    figures, peak_figures, checks = [], [], []
    processes = Ranks(2)
    for family, base, name in itertools.product(chosen.family, chosen.base, chosen.cells):
        with tempfile.TemporaryDirectory() as folder:
            asked = (family, base, getattr(torch, CELLS[name].dtype), CELLS[name].lanes, folder)
            on_ranks = CELLS[name].ranks > 1
            found = processes.run(cell, *asked, timeout_s=600.0) if on_ranks else [cell(*asked)]
        worst = max(found, key=lambda figure: figure.worst)
        print(worst, flush=True)
        figures.append(worst)
        checks += [
            pairs.at_most(f"{worst.cell}: plain", ASKED[worst.dtype], worst.worst),
            pairs.at_most(f"{worst.cell}: loaded", ASKED["float32"], worst.loaded),
            pairs.at_most(f"{worst.cell}: not pipelined", 0.0, float(worst.split != "pipelined")),
        ]
    processes.close()
    for family, base, checkpoints in itertools.product(chosen.peaks, chosen.base, (False, True)):
        for peak in peaks(family, base, checkpoints=checkpoints):
            print(f"{peak.cell}: {peak.error:+.2%}", flush=True)
            peak_figures.append(peak)
            checks.append(pairs.at_most(peak.cell, PEAK, abs(peak.error)))
    pairs.conclude(
        chosen.json,
        benchmark="finetune",
        settings={"steps": STEPS, "rows": BATCH, "chunks": CHUNKS, "optimizer": "AdamW, 2e-4", "threads": 1},
        machine=pairs.facts(),
        figures=[asdict(f) for f in figures] + [asdict(p) | {"error": p.error} for p in peak_figures],
        checks=checks,
    )


if __name__ == "__main__":
    main()
