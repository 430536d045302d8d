"""LoRA on a base of 8 bits, by PEFT and transformers' Trainer, on two devices of unequal memory.

The model is a tiny Llama from a config, whose frozen linear layers are quantised here; with bitsandbytes or torchao
their layers take the place of ``Int8Linear``, and nothing else changes. On a machine with GPUs ``--devices 2`` are two
of them. The first device has twice the second's limit; what a plan needs is within both.
"""

from __future__ import annotations

import copy
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from autosplit import autosplit
from examples import comparison, data
from examples.comparison import Devices, Outcome


class Int8Linear(nn.Linear):
    """A frozen linear layer of 8 bits: a byte per element and a scale per row, made whole while its product runs."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        self.register_buffer("scales", linear.weight.detach().abs().amax(1, keepdim=True) / 127)
        codes = (linear.weight.detach() / self.scales).round().to(torch.int8)
        self.weight = nn.Parameter(codes, requires_grad=False)

    def forward(self, value: Tensor) -> Tensor:
        """Return the product with the weight in the input's dtype."""
        return F.linear(value, self.weight.to(value.dtype) * self.scales)


def quantised(model: nn.Module, *, leave: str = "lm_head") -> nn.Module:
    """Replace the linear layers of a model, but for the head."""
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear and not name.endswith(leave):
            path, _, last = name.rpartition(".")
            setattr(model.get_submodule(path), last, Int8Linear(module))
    return model


def adapted(config: LlamaConfig) -> Any:
    """Return the quantised model with adapters, as one writes it for a single device."""
    model = prepare_model_for_kbit_training(quantised(LlamaForCausalLM(config)))
    return get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear"))


def trained(model: nn.Module, rows: Sequence[dict[str, Tensor]], *, batch: int, steps: int) -> tuple[float, ...]:
    """Return the losses of a run of transformers' Trainer."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            per_device_train_batch_size=batch,
            max_steps=steps,
            learning_rate=1e-3,
            logging_steps=1,
            report_to="none",
            disable_tqdm=True,
            save_strategy="no",
            use_cpu=not torch.cuda.is_available(),
        )
        trainer = Trainer(model=model, args=arguments, train_dataset=rows)
        trainer.train()
        return tuple(entry["loss"] for entry in trainer.state.log_history if "loss" in entry)


def run(*, devices: Devices, chunks: int, steps: int, config: LlamaConfig, batch: int, limits: list[str]) -> Outcome:
    """Train plain and pipelined, and compare losses and outputs."""
    comparison.prepare()
    texts = data.text_batches(data.python_text(), rows=1, length=32, count=batch * steps)
    rows = [{"input_ids": text.inputs[0], "labels": text.inputs[0]} for text in texts]
    model = adapted(config)
    plain = comparison.place(copy.deepcopy(model), devices=devices)
    sample = {name: torch.stack([row[name] for row in rows[:batch]]) for name in rows[0]}
    pipe = autosplit(model, devices=devices, chunks=chunks, memory_limit=limits, sample=sample)
    assert pipe.plan is not None
    print(pipe.report())
    losses = {name: trained(net, rows, batch=batch, steps=steps) for name, net in (("plain", plain), ("pipe", pipe))}
    with tempfile.TemporaryDirectory() as folder:
        pipe.save_pretrained(folder)  # the adapters alone, as PEFT saves them
        assert Path(folder, "adapter_model.safetensors").is_file()
    with torch.no_grad():
        outputs = [{"logits": net.eval()(**sample).logits} for net in (plain, pipe)]
    differences = {
        "losses": comparison.loss_difference(losses["plain"], losses["pipe"]),
        "outputs of the trained models": comparison.tensor_difference(*outputs),
    }
    return Outcome(losses, differences, {"stages": float(len(pipe.plan.stages))})


def main(argv: Sequence[str] | None = None) -> Outcome:
    """Run with the arguments of a command line."""
    parser = comparison.parser(__doc__, devices="2", chunks=4, steps=8)
    parser.add_argument("--limits", default="4MiB,2MiB", help="bytes of each device")
    options = parser.parse_args(argv)
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4
    )
    outcome = run(
        devices=options.devices,
        chunks=options.chunks,
        steps=options.steps,
        config=config,
        batch=8,
        limits=options.limits.split(","),
    )
    comparison.print_losses(outcome.losses)
    comparison.print_verdict(outcome)
    return outcome


if __name__ == "__main__":
    sys.exit(main().exit_code)
