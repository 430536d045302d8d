"""Adapters that ranks have trained, saved by the model's own method: one file, which the plain model loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from autosplit import Sample, autosplit
from benchmarks.finetune import LAYERS, quantised
from tests.distributed.processes import error_of

pytest.importorskip("peft")


def adapted(base: str | None, **options: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    from tests.clients.models import llama

    model = llama(hidden_size=64, intermediate_size=64)
    model = get_peft_model(
        quantised(model, LAYERS[base]) if base else model,
        LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj", "down_proj"], **options),
    )
    model.add_adapter("other", LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["o_proj"]))
    return model.train()


def batch() -> dict[str, torch.Tensor]:
    from tests.clients.models import batches

    return batches(1)[0]


def trained(model: Any) -> Any:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    for _ in range(2):
        model(**batch()).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def saved(folder: Path, base: str | None, options: dict[str, Any]) -> list[str]:
    pipe = autosplit(adapted(base, **options), devices="torchrun", chunks=2, sample=Sample(**batch()), outputs="all")
    trained(pipe).save_pretrained(folder / "adapters")
    (folder / "file").touch()
    wrong = error_of(pipe.save_pretrained, folder / "file")
    pipe.get_base_model().config.save_pretrained(folder)  # of the model, on this rank alone
    return [wrong, *pipe.state_dict()]


@pytest.mark.parametrize(("base", "options"), [("nf4", {"modules_to_save": ["lm_head"]}), (None, {"use_dora": True})])
def test_adapters_are_saved_whole(ranks: Any, tmp_path: Path, base: str | None, options: dict[str, Any]) -> None:
    from peft import PeftModel

    (wrong, *first), (_, *second) = ranks(2).run(saved, tmp_path, base, options)
    assert "should be a directory" in wrong
    plain = trained(adapted(base, **options))
    assert sorted({*first, *second}) == sorted(plain.state_dict())
    plain.save_pretrained(tmp_path / "plain")
    for name in ("adapter_model.safetensors", "other/adapter_model.safetensors"):
        ours, theirs = (load_file(tmp_path / folder / name) for folder in ("adapters", "plain"))
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
    base_model = adapted(base, **options).unload()
    again = PeftModel.from_pretrained(base_model, tmp_path / "adapters").eval()
    torch.testing.assert_close(again(**batch()).logits, plain.eval()(**batch()).logits, rtol=0, atol=1e-6)


def saved_model(folder: Path) -> str:
    from tests.clients.models import gpt2

    pipe = autosplit(gpt2(), devices="torchrun", chunks=2, sample=Sample(**batch()))
    pipe.save_pretrained(folder / "model")
    cut = autosplit(
        gpt2(),
        mesh=dist.device_mesh.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)),
        chunks=2,
        sample=Sample(**batch()),
        parallelize="fsdp",
    )
    return error_of(cut.save_pretrained, folder / "cut")


def test_a_model_of_transformers_is_saved_whole(ranks: Any, tmp_path: Path) -> None:
    from tests.clients.models import gpt2

    first, second = ranks(2).run(saved_model, tmp_path)
    assert first == second
    assert "InputError: ranks have parts of" in first
    assert "save_weights" in first
    model = gpt2()
    again = type(model).from_pretrained(tmp_path / "model")
    assert all(torch.equal(again.state_dict()[name], value) for name, value in model.state_dict().items())
    model.save_pretrained(tmp_path / "plain")
    ours, theirs = (load_file(tmp_path / folder / "model.safetensors") for folder in ("model", "plain"))
    assert ours.keys() == theirs.keys()
