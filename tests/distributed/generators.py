"""Small models of transformers that generate, on ranks, held against the plain model."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import nn

from autosplit import autosplit
from autosplit.generation.facade import generator_of
from autosplit.options import Sample
from tests.distributed.processes import error_of

_SIZES: dict[str, Any] = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4}
_HEADS: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
_MAMBA: dict[str, Any] = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 4, "state_size": 8}
_GPT2: dict[str, Any] = {"vocab_size": 97, "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 256}
_T5: dict[str, Any] = {"vocab_size": 97, "d_model": 32, "d_ff": 64, "d_kv": 8, "num_layers": 3, "num_heads": 4}


def make(name: str) -> nn.Module:
    """Return a model, its values from a seed."""
    torch.manual_seed(0)
    models: dict[str, Any] = {
        "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**_SIZES, **_HEADS)),
        "mistral": lambda: transformers.MistralForCausalLM(
            transformers.MistralConfig(**_SIZES, **_HEADS, sliding_window=6)
        ),
        "mamba": lambda: transformers.MambaForCausalLM(transformers.MambaConfig(**_MAMBA)),
        "gpt2": lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(**_GPT2)),
        "t5": lambda: transformers.T5ForConditionalGeneration(transformers.T5Config(**_T5, decoder_start_token_id=0)),
    }
    return models[name]().eval()


def prompts(rows: int = 4, length: int = 7) -> dict[str, torch.Tensor]:
    """Return prompts of several lengths, padded on the left."""
    ids = torch.randint(3, 96, (rows, length), generator=torch.Generator().manual_seed(rows))
    mask = torch.ones_like(ids)
    for row in range(rows):
        ids[row, : row % 3], mask[row, : row % 3] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "top_k": 20},
    "beams": {"do_sample": False, "num_beams": 3},
    "static": {"do_sample": False, "cache_implementation": "static"},
}


def sample_of(name: str) -> Sample:
    """Return a call that a plan is made for."""
    ids = prompts()["input_ids"]
    return Sample(ids, decoder_input_ids=ids[:, :3]) if name == "t5" else Sample(ids)


def _asked(way: str, new: int = 12, rows: int = 4) -> dict[str, Any]:
    return {**prompts(rows), "pad_token_id": 0, "eos_token_id": 96, "max_new_tokens": new, **WAYS[way]}


def _pair(name: str) -> tuple[Any, Any]:
    """Return the plain model and a pipe of ranks."""
    return make(name), autosplit(make(name), devices="torchrun", sample=sample_of(name))


def same_tokens(name: str, way: str, groups: int | None = None) -> list[bool]:
    """Generate twice; tell whether the tokens, and the random numbers behind, are the plain model's; keep nothing."""
    plain, pipe = _pair(name)
    found = []
    for seed in range(2):
        torch.manual_seed(seed)
        wanted = plain.generate(**_asked(way)), torch.rand(3)
        torch.manual_seed(seed)
        given = pipe.generate(**_asked(way), groups=groups), torch.rand(3)
        found += [torch.equal(a, b) for a, b in zip(wanted, given, strict=True)]
    return [*found, not generator_of(pipe).exchange.kept]


def trained_between(name: str) -> list[bool]:
    """Generate, take a step, and generate with the trained weights."""
    plain, pipe = _pair(name)
    found = []
    for _ in range(2):
        found.append(torch.equal(plain.generate(**_asked("greedy")), pipe.generate(**_asked("greedy"))))
        ids = prompts()["input_ids"]
        for model in (plain.train(), pipe.train()):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
            torch.manual_seed(3)
            if model is plain:
                model(input_ids=ids, labels=ids).loss.backward()
            else:
                pipe.train_step(input_ids=ids, labels=ids)
            optimizer.step()
            optimizer.zero_grad()
        plain.eval(), pipe.eval()
    return found


def goes_on(name: str) -> list[bool]:
    """Go on with the cache of a first call, and crop it on the way."""
    plain, pipe = _pair(name)
    found, caches = [], [None, None]
    ids = [prompts(1)["input_ids"][:, 2:]] * 2
    for _ in range(2):
        for at, model in enumerate((plain, pipe)):
            options = _asked("greedy", 6, 1) | {"input_ids": ids[at], "attention_mask": torch.ones_like(ids[at])}
            result = model.generate(**options, past_key_values=caches[at], return_dict_in_generate=True)
            ids[at], caches[at] = result.sequences, result.past_key_values
        found.append(torch.equal(*ids))
        ids = [torch.cat([each, prompts(1)["input_ids"]], 1) for each in ids]
    options = _asked("greedy", 20, 1) | {"prompt_lookup_num_tokens": 3}
    return [*found, torch.equal(plain.generate(**options), pipe.generate(**options))]


def most_kept(name: str, new: int) -> int:
    """Return the most tensors of caches that this rank has kept while it generated so many tokens."""
    _, pipe = _pair(name)
    exchange, counts = generator_of(pipe).exchange, [0]
    run = exchange._run

    def counting(*args: Any) -> Any:
        counts.append(len(exchange.kept))
        return run(*args)

    exchange._run = counting
    pipe.generate(**_asked("greedy", new) | {"eos_token_id": None})
    assert len(counts) > new
    return max(counts)


def raises(tokens: Any, scores: Any) -> Any:
    """Stand for a processor of the caller's that fails."""
    raise ArithmeticError("no score is good enough")


def errors(name: str) -> list[str]:
    """Return what ranks raise: of one rank's processor, in training mode, for unlike prompts; the pipe stays usable."""
    plain, pipe = _pair(name)
    found = [error_of(pipe.generate, **_asked("greedy"), logits_processor=[raises])]
    with torch.no_grad():
        found.append(error_of(pipe.train().generate, **_asked("greedy")))
    asked = _asked("greedy")
    found.append(error_of(pipe.eval().generate, **asked | {"input_ids": asked["input_ids"] + dist.get_rank()}))
    same = torch.equal(plain.generate(**asked), pipe.generate(**asked))
    return [*found, str(same)]


def lost_cache(name: str) -> None:
    """Generate where the first rank loses a tensor of its cache."""
    _, pipe = _pair(name)
    exchange = generator_of(pipe).exchange
    run = exchange._run

    def losing(call: Any, *args: Any) -> Any:
        if call.number == 3:
            exchange.kept.clear()
        return run(call, *args)

    exchange._run = losing
    pipe.generate(**_asked("greedy"))


def asked_at_once(name: str) -> list[bool]:
    """Generate where both groups ask for what runs their calls while it is being made; tell whether that is one."""
    plain, pipe = _pair(name)
    generator, made = generator_of(pipe), list[int]()
    make_entry = generator._entry

    def slow(*args: Any) -> Any:
        made.append(len(made))
        time.sleep(0.5 + 2.0 * made[-1])
        return make_entry(*args)

    generator._entry = slow
    return [torch.equal(plain.generate(**_asked("greedy")), pipe.generate(**_asked("greedy"))), made == [0]]


def trained_behind_the_encoder(name: str) -> list[bool]:
    """Take a step from tokens, and one from what an encoder made of them; tell whether that is the plain model's."""
    plain, pipe = _pair(name)
    encoded = transformers.modeling_outputs.BaseModelOutput(torch.randn(4, 7, 32, generator=torch.Generator()))
    labels, found = prompts()["input_ids"], []
    for inputs in ({"input_ids": labels}, {"encoder_outputs": encoded}):
        losses = []
        for model in (plain, pipe):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
            losses.append(model(**inputs, labels=labels).loss if model is plain else None)
            if model is plain:
                losses[0].backward()
            else:
                losses[1] = pipe.train_step(**inputs, labels=labels)
            optimizer.step()
            optimizer.zero_grad()
        found.append(torch.allclose(*losses))
    state = pipe.unsplit().state_dict()
    return [*found, all(torch.allclose(value, state[name], atol=1e-6) for name, value in plain.state_dict().items())]
