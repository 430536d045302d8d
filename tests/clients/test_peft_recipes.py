"""PEFT's recipes as its users write them: the plain model's losses, gradients and adapters, in a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from peft import (
    IA3Config,
    LoraConfig,
    PeftModel,
    PrefixTuningConfig,
    VeraConfig,
    get_peft_model,
    prepare_model_for_kbit_training,
)
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.finetune import LAYERS, quantised
from tests.clients.models import TOLERANCE, batches, gpt2, llama, split
from tests.clients.test_trainer import trainer

pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning:transformers", "ignore:torch.utils.checkpoint. the use_reentrant"
)
TARGETS = ["q_proj", "v_proj"]
MODULES = {"target_modules": TARGETS, "task_type": "CAUSAL_LM"}


def adapted(model: nn.Module | None = None, kind: Any = LoraConfig, **options: Any) -> Any:
    """Return a model with adapters whose effect shows."""
    rank = {"r": 2} if kind in (LoraConfig, VeraConfig) else {}
    torch.manual_seed(0)
    return shown(get_peft_model(llama() if model is None else model, kind(**(MODULES | rank | options))))


def shown(model: Any) -> Any:
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    return model.train()


def base(kind: str) -> nn.Module:
    return quantised(llama(hidden_size=64, intermediate_size=64), LAYERS[kind])


def prepared(kind: str, **options: Any) -> Any:
    """Return adapters over a quantised base, with PEFT's preparation of one."""
    model: Any = base(kind)
    model.is_loaded_in_8bit = True
    model = prepare_model_for_kbit_training(model, **options)
    model.is_loaded_in_8bit = False  # its layers are not those of bitsandbytes
    return adapted(model)


def checkpointing(reentrant: bool, model: Any = None) -> Any:
    model = adapted() if model is None else model
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    return model


def tied() -> Any:
    """Return a model whose embedding, which the head shares, lets its output require gradients."""
    return checkpointing(True, adapted(gpt2(), target_modules=["c_attn"], fan_in_fan_out=True))


def several() -> Any:
    model = adapted()
    model.add_adapter("other", LoraConfig(r=4, lora_alpha=3, **(MODULES | {"target_modules": ["k_proj"]})))
    return shown(model)


# -- loops -----------------------------------------------------------------------------------------------------------
def stepped(model: Any, loss: Tensor, optimizer: Any) -> Iterator[Tensor]:
    loss.backward()
    yield loss.detach()
    yield from (p.grad.clone() for p in model.parameters() if p.grad is not None)
    optimizer.step()
    optimizer.zero_grad()
    yield from (p.detach().clone() for p in model.parameters() if p.requires_grad)


def optimizer_of(model: Any) -> Any:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)


def trains(model: Any) -> Iterator[Tensor]:
    torch.manual_seed(7)
    optimizer = optimizer_of(model)
    for batch in batches(3):
        output = model(**batch)
        yield output.logits.detach()
        yield from stepped(model, output.loss, optimizer)


def switches(model: Any) -> Iterator[Tensor]:
    for name in ("default", "other", "default", "other"):
        model.set_adapter(name)
        yield from trains(model)


def merges(model: Any) -> Iterator[Tensor]:
    [batch] = batches(1)
    yield from trains(model)
    model.merge_adapter()
    with torch.no_grad():
        yield model.eval()(**batch).logits
    model.unmerge_adapter()
    yield from trains(model.train())


def prefers(model: Any, *, reference_first: bool) -> Iterator[Tensor]:
    """Direct preference optimisation: rows in pairs, and the model without its adapters as the reference."""
    optimizer = optimizer_of(model)

    def reference(batch: dict[str, Tensor]) -> Tensor:
        with torch.no_grad(), model.disable_adapter():
            return scores(batch)

    def scores(batch: dict[str, Tensor]) -> Tensor:
        labels = batch["labels"][:, 1:]
        logs = model(input_ids=batch["input_ids"]).logits[:, :-1].log_softmax(-1)
        return (logs.gather(2, labels.clamp(min=0)[..., None])[..., 0] * (labels != -100)).sum(-1)

    for batch in batches(3):
        before = reference(batch) if reference_first else None
        policy = scores(batch)
        ratio = policy - (reference(batch) if before is None else before)
        yield policy.detach()
        yield from stepped(model, -F.logsigmoid(0.1 * (ratio[::2] - ratio[1::2])).mean(), optimizer)


class Recipe(NamedTuple):
    make: Callable[[], Any]
    loop: Callable[[Any], Iterator[Tensor]] = trains
    recordings: int = 1
    recompute: str = "never"


def recipe(name: str, *fields: Any, quick: bool = False, **more: Any) -> Any:
    return pytest.param(Recipe(*fields, **more), id=name, marks=() if quick else pytest.mark.slow)


@pytest.mark.quick
@pytest.mark.parametrize(
    "given",
    [
        recipe("prepared", partial(prepared, "nf4"), recompute="block", quick=True),
        recipe(
            "prepared, not reentrant",
            partial(prepared, "nf4", gradient_checkpointing_kwargs={"use_reentrant": False}),
            recompute="block",
        ),
        recipe("prepared, no checkpoints", partial(prepared, "int8", use_gradient_checkpointing=False)),
        recipe("checkpointing, reentrant", partial(checkpointing, True), recompute="block"),
        recipe("checkpointing", partial(checkpointing, False), recompute="block"),
        recipe("tied embeddings", tied, recompute="block"),
        recipe("DoRA", partial(adapted, use_dora=True, lora_dropout=0.1)),
        recipe("DoRA on int8", lambda: adapted(base("int8"), use_dora=True)),
        recipe("dropout", partial(adapted, lora_dropout=0.2)),
        recipe("rslora", partial(adapted, use_rslora=True)),
        recipe("bias", partial(adapted, bias="all")),
        recipe("modules_to_save", partial(adapted, modules_to_save=["lm_head", "embed_tokens"])),
        recipe("embeddings", partial(adapted, target_modules=["q_proj", "embed_tokens", "lm_head"])),
        recipe("switched", several, switches, 2),
        recipe("merged", adapted, merges, 2),
        recipe("DPO", adapted, partial(prefers, reference_first=False), 2, quick=True),
        recipe("DPO, reference first", adapted, partial(prefers, reference_first=True), 2),
        recipe("IA3", partial(adapted, kind=IA3Config, feedforward_modules=[])),
        recipe(
            "prefix",
            lambda: shown(get_peft_model(llama(), PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))),
        ),
        recipe("VeRA", partial(adapted, kind=VeraConfig, target_modules=["q_proj"])),
    ],
)
def test_recipes_are_those_of_the_plain_model(given: Recipe) -> None:
    pipe = split(given.make())
    found, expected = list(given.loop(pipe)), list(given.loop(given.make()))
    assert len(found) == len(expected)
    for own, other in zip(found, expected, strict=True):
        torch.testing.assert_close(own, other, rtol=0, atol=TOLERANCE)
    assert [stage.recompute for stage in pipe.plan.stages] == [given.recompute] * 2
    assert all(len(stage.nodes) > 20 for stage in pipe.plan.stages)
    assert "collapsed" not in pipe.report()
    assert len(pipe.recordings) == given.recordings
    assert isinstance(pipe, PeftModel)


@pytest.mark.slow
def test_trainer_saves_adapters_resumes_and_loads_the_best(tmp_path: Path) -> None:
    options = {"max_steps": 4, "save_strategy": "steps", "eval_strategy": "steps", "save_steps": 2, "eval_steps": 2}
    options |= {"load_best_model_at_end": True, "learning_rate": 0.1}
    first = trainer(split(adapted()), tmp_path, **options)
    plain = trainer(adapted(), tmp_path / "plain", **options)
    first.train()
    plain.train()
    second = trainer(split(adapted()), tmp_path, **options)
    second.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    best = Path(first.state.best_model_checkpoint or "")
    assert best.name == Path(plain.state.best_model_checkpoint or "").name
    [batch] = batches(1)
    expected = plain.model.eval()(**batch).logits
    for model in (first.model, second.model, PeftModel.from_pretrained(llama(), best)):
        torch.testing.assert_close(model.eval()(**batch).logits, expected, rtol=0, atol=1e-5)
