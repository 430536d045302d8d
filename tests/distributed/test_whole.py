"""Whole models as safetensors files: from ranks, into ranks, and to and from Hugging Face's libraries."""

from __future__ import annotations

import json
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from autosplit.distributed.checkpoint import TrustedCheckpoint, load_weights, save, save_weights
from autosplit.errors import InputError
from tests.distributed.parts import Part, check_same, run, state_of
from tests.distributed.processes import error_of
from tests.distributed.test_checkpoint import sharded

SIZES = (1, 2)


class Tied(nn.Module):
    """Has a tied weight, a buffer, a strided and a boolean tensor, and one in half precision."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed, self.first = nn.Embedding(10, 6), nn.Linear(6, 6).to(torch.bfloat16)
        self.norm, self.second, self.head = nn.BatchNorm1d(6), nn.Linear(6, 4), nn.Linear(6, 10)
        self.head.weight = self.embed.weight
        self.second.weight = nn.Parameter(torch.randn(6, 4).t())
        self.norm.register_buffer("mask", torch.rand(3) > 0.5)
        self.norm.register_buffer("scratch", torch.rand(3), persistent=False)
        self.norm.register_buffer("slice", torch.rand(8)[2:5])
        self.norm.running_mean.normal_()


def part_of(whole: nn.Module) -> nn.Module:
    return Part(whole, dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else whole


def written(path: Path, seed: int, limit: int | str) -> dict[str, Any]:
    part = part_of(Tied(seed))
    save_weights(path, part, max_shard_size=limit)
    return values_of(part)


def values_of(part: nn.Module) -> dict[str, Any]:
    return {name: value.detach().float().numpy().copy() for name, value in part.state_dict().items()}


def read(path: Path, seed: int) -> dict[str, Any]:
    part = part_of(Tied(seed))
    load_weights(path, part)
    return values_of(part)


@pytest.mark.parametrize(("name", "limit"), [("x.safetensors", "5GB"), ("whole", "5GB"), ("shards", 200)])
@pytest.mark.parametrize("before", SIZES)
def test_files_of_any_ranks_are_read_by_any(ranks, tmp_path, name, limit, before):
    path = tmp_path / name
    expected = {key: value for one in run(ranks, before, written, path, 1, limit) for key, value in one.items()}
    for after in SIZES:
        check_same(run(ranks, after, read, path, 2), expected)
    assert [found.name for found in tmp_path.iterdir()] == [name]
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    assert [file.name for file in files] == (
        [name]
        if path.is_file()
        else ["model.safetensors"]
        if limit != 200 and before == 1
        else [f"model-{number:05d}-of-{len(files):05d}.safetensors" for number in range(1, len(files) + 1)]
    )
    if limit == 200:
        assert len(files) > 2
    tensors = {key: value for file in files for key, value in load_file(file).items()}
    assert tensors.keys() == expected.keys() - {"head.weight"}
    assert {key: value.dtype for key, value in tensors.items()} == {
        key: value.dtype for key, value in Tied(1).state_dict().items() if key in tensors
    }
    if len(files) > 1:
        index = json.loads((path / "model.safetensors.index.json").read_text())
        assert index["metadata"] == {"total_size": sum(value.nbytes for value in tensors.values())}
        assert {key: path / file for key, file in index["weight_map"].items()} == {
            key: file
            for file in files
            for key in safe_open(file, "pt").keys()  # noqa: SIM118
        }


# -- Hugging Face ----------------------------------------------------------------------------------------------------
def gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=17, n_positions=8))


def t5() -> Any:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, vocab_size=17, decoder_start_token_id=0)
    )


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            vocab_size=17,
            tie_word_embeddings=False,
        )
    )


FAMILIES: dict[str, Callable[[], Any]] = {"gpt2": gpt2, "t5": t5, "llama": llama}


def through_ranks(family: str, folder: Path, limit: int | str) -> None:
    """Read what save_pretrained wrote, and write it again."""
    torch.manual_seed(9)
    part = part_of(FAMILIES[family]())
    load_weights(folder / "theirs", part)
    save_weights(folder / "ours", part, max_shard_size=limit)


@pytest.mark.parametrize("limit", ["5GB", 1500])
@pytest.mark.parametrize(("family", "size"), [("gpt2", 1), ("gpt2", 2), ("t5", 1), ("llama", 2)])
def test_transformers_reads_what_was_written_and_the_other_way(ranks, tmp_path, family, size, limit):
    torch.manual_seed(1)
    model = FAMILIES[family]()
    model.save_pretrained(tmp_path / "theirs", max_shard_size=limit)
    run(ranks, size, through_ranks, family, tmp_path, limit)
    model.config.save_pretrained(tmp_path / "ours")
    again, information = type(model).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(information.values()), information
    check_same([values_of(again)], values_of(model))
    ours, theirs = ({k for f in (tmp_path / n).glob("*.safetensors") for k in load_file(f)} for n in ("ours", "theirs"))
    assert ours == theirs


def test_a_base_model_is_read_from_the_file_of_a_larger_one_and_extra_tensors_are_said(tmp_path):
    model = gpt2()
    save_weights(tmp_path / "whole", model)
    base = gpt2().transformer
    load_weights(tmp_path / "whole", base)
    check_same([values_of(base)], values_of(model.transformer))
    values = {"weight": torch.ones(2, 2), "bias": torch.ones(2), "mask": torch.ones(3)}
    save_file(values, tmp_path / "more.safetensors")
    with pytest.raises(
        InputError, match=r"more.safetensors is of another model: it has 'mask', of shape \(3,\), which"
    ):
        load_weights(tmp_path / "more.safetensors", nn.Linear(2, 2))
    load_weights(tmp_path / "more.safetensors", layer := nn.Linear(2, 2), strict=False)
    assert layer.weight.equal(values["weight"])


def test_different_values_under_the_names_of_a_tied_tensor_are_refused(tmp_path):
    values = {name: torch.ones(2, 2) for name in ("0.weight", "1.weight")} | {
        f"{n}.bias": torch.ones(2) for n in (0, 1)
    }
    tied = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    tied[1].weight = tied[0].weight
    load_weights(values, tied)
    assert tied[1].weight.equal(torch.ones(2, 2))
    with pytest.raises(InputError, match=r"0.weight, 1.weight are different tensors in the weights, and one tied tens"):
        load_weights(values | {"1.weight": torch.zeros(2, 2)}, tied)


# -- shards of tensors, memory, errors -------------------------------------------------------------------------------
def shards_written_and_read(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    model, other = sharded(1), sharded(2)
    save_weights(folder / "x", model, max_shard_size=100)
    load_weights(folder / "x", other)
    return state_of(model), state_of(other)


def test_shards_of_a_parameter_are_written_whole_and_read_in_parts(ranks, tmp_path):
    plain = sharded(1)
    for own, read_back in ranks(2).run(shards_written_and_read, tmp_path):
        check_same([own], state_of(plain))
        check_same([read_back], state_of(plain))
    load_weights(tmp_path / "x", other := sharded(2))
    check_same([state_of(other)], state_of(plain))


def errors(folder: Path) -> list[str]:
    rank, part = dist.get_rank(), part_of(Tied(1))
    return [
        error_of(save_weights, folder / "there", part),
        error_of(save_weights, folder / f"{rank}", part),
        error_of(load_weights, folder / "there", nn.Linear(2, 3) if rank else nn.Module()),
        error_of(load_weights, folder / "nothing", part),
        error_of(save_weights, folder / "new", nn.Linear(2, 2, device="meta") if rank else part),
        error_of(save_weights, folder / "new", part, max_shard_size="much"),
    ]


def test_what_cannot_be_written_or_read_is_an_error_on_every_rank(ranks, tmp_path):
    save_weights(tmp_path / "there", nn.Linear(2, 2))
    first, second = ranks(2).run(errors, tmp_path)
    assert first == second
    texts = (
        "there exists and is not overwritten; save under another name, or delete it first",
        "it has to be the same",
        "there is of another model: 'weight' has shape (3, 2) here and (2, 2) there",
        "nothing' cannot be read",
        "on the meta device there are no values: weight, bias",
        "CheckpointError: rank 0: ValueError: Unit 'CH' not supported",
    )
    assert [text for text, error in zip(texts, first, strict=True) if text not in error] == [], first
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_weights_come_out_of_a_checkpoint_of_a_training(tmp_path):
    plain = Tied(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        save(tmp_path, 1, plain, torch.optim.SGD(plain.parameters(), momentum=0.9))
        load_weights(TrustedCheckpoint(tmp_path / "step-1"), other := Tied(2))
    check_same([values_of(other)], values_of(plain))


def test_a_folder_of_pickles_is_read_where_it_is_trusted_only(tmp_path):
    """A table beside safetensors files, which would run code, is not opened; alone it is refused."""

    class Code:
        def __reduce__(self) -> Any:
            return (tmp_path / "ran").touch, ()

    plain, other = Tied(1), Tied(2)
    save_weights(tmp_path / "whole", plain)
    (tmp_path / "whole" / ".metadata").write_bytes(pickle.dumps(Code()))
    load_weights(tmp_path / "whole", other)
    check_same([values_of(other)], values_of(plain))
    for path in (tmp_path / "whole").glob("model*"):
        path.unlink()
    with pytest.raises(InputError, match=r"whose files are pickles .* give .*TrustedCheckpoint\(folder\)"):
        load_weights(tmp_path / "whole", other)
    assert not (tmp_path / "ran").exists()
