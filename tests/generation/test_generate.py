"""``pipe.generate`` in one process: the plain model's tokens, caches and random state, and how often it records."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache, EncoderDecoderCache, LlamaConfig, LlamaForCausalLM, PreTrainedModel, StaticCache

from autosplit import InputError, PipelinedModule, autosplit
from autosplit.generation.facade import generator_of
from tests.models.generators import FAMILIES, VOCABULARY, prompts

NEW: dict[str, Any] = {"max_new_tokens": 8, "min_new_tokens": 8}
SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 1.5, "top_k": 20}
BEAMS: dict[str, Any] = {"num_beams": 3}

pytestmark = pytest.mark.usefixtures("one_intra_op_thread")
model = functools.cache(lambda family: FAMILIES[family]())


def split(subject: nn.Module, lanes: int = 2) -> PipelinedModule:
    return autosplit(subject, devices=["cpu"] * lanes, chunks=1)


@functools.cache
def shared(family: str) -> PipelinedModule:
    """Return a pipe of a family that tests share; none may leave it another."""
    return split(FAMILIES[family]())


def made(pipe: PipelinedModule) -> int:
    """Return how many recordings a pipe has made to generate."""
    entries = generator_of(pipe)._entries.values()
    assert all(entry.pipe._core.recordings.tree is None for entry in entries)
    return sum(entry.pipe._core.recordings.made for entry in entries)


def both(plain: PreTrainedModel, pipe: Any, *, seed: int = 3, **kwargs: Any) -> Any:
    """Compare tokens and the random state behind ``generate``, and return what the pipe's returns."""
    torch.manual_seed(seed)
    expected, state = plain.generate(**copy.deepcopy(kwargs)), torch.get_rng_state()
    torch.manual_seed(seed)
    result = pipe.generate(**kwargs)
    assert torch.equal(torch.get_rng_state(), state)
    tokens, wanted = (each if isinstance(each, Tensor) else each.sequences for each in (result, expected))
    assert torch.equal(tokens, wanted)
    assert tokens[:, -NEW["max_new_tokens"] :].unique().numel() > 2  # text that repeats one token would prove little
    return result


@pytest.mark.quick
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_the_plain_models(family: str) -> None:
    plain, pipe = model(family), split(FAMILIES[family](), lanes=3)
    for kind in ({}, SAMPLED, {} if family == "recurrent_gemma" else BEAMS):
        both(plain, pipe, **prompts(plain, 5), **NEW, **kind)
    assert made(pipe) >= 2  # of the first call, and of a step: how many more depends on which group comes first


@pytest.mark.quick
def test_the_plan_of_the_first_call_is_for_groups() -> None:
    pipe: Any = autosplit(model("llama"), devices=["cpu"] * 2, chunks=1)
    pipe.generate(**prompts(pipe.unsplit(), 4), max_new_tokens=2)
    assert pipe.plan.chunks == 16


OPTIONS: dict[str, dict[str, Any]] = {
    "sampled": SAMPLED,
    "beams": BEAMS | {"num_return_sequences": 2},
    "sampled beams": SAMPLED | BEAMS,
    "static": {"cache_implementation": "static"},
    "no cache": {"use_cache": False},
    "prefill in pieces": {"prefill_chunk_size": 4},
    "away from a prompt": {"guidance_scale": 1.5, "negative_prompt_ids": torch.arange(3, 23).view(5, 4)},
}


@pytest.mark.parametrize("groups", [None, 1])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options(options: dict[str, Any], groups: int | None) -> None:
    plain, pipe = model("llama"), shared("llama")
    torch.manual_seed(3)
    expected = plain.generate(**prompts(plain, 5), **NEW, **options)
    torch.manual_seed(3)
    assert torch.equal(pipe.generate(**prompts(plain, 5), **NEW, **options, groups=groups), expected)


def test_a_prompt_of_one_token_one_row_and_embeddings() -> None:
    plain, pipe = model("llama"), shared("llama")
    inputs = prompts(plain, 4, left_padded=False)
    both(plain, pipe, input_ids=inputs["input_ids"][:, :1], **NEW)
    both(plain, pipe, input_ids=inputs["input_ids"][:1], **NEW)
    embeddings = plain.get_input_embeddings()(inputs["input_ids"]).detach()
    both(plain, pipe, inputs_embeds=embeddings, attention_mask=inputs["attention_mask"], **NEW)
    assert torch.equal(pipe.generate(inputs["input_ids"], **NEW), plain.generate(inputs["input_ids"], **NEW))


def test_what_guesses_tokens_ahead() -> None:
    plain, pipe, row = model("llama"), shared("llama"), prompts(model("llama"), 1)
    both(plain, pipe, **row, **NEW, prompt_lookup_num_tokens=3)
    both(plain, pipe, **row, **NEW, assistant_model=model("stablelm"))


@pytest.mark.quick
# What is a single token long is recorded apart from what is longer, so an encoder-decoder takes a token more.
@pytest.mark.parametrize(("family", "tokens"), [("llama", 3), ("gpt2", 3), ("t5", 4)])
def test_nothing_is_recorded_after_the_third_token(family: str, tokens: int) -> None:
    plain, pipe, counts = model(family), split(FAMILIES[family]()), []
    for rows, length, new in ((4, 9, tokens), (4, 9, 60), (6, 9, 8), (6, 12, 8), (4, 10, 8), (5, 17, 8)):
        both(plain, pipe, **prompts(plain, rows, length=length), max_new_tokens=new, min_new_tokens=new)
        counts.append(made(pipe))
    assert counts[0] == counts[1] == counts[2]
    # Prompts of a second length are recorded so that they may have any, and are the last that are.
    assert counts[3] == counts[4] == counts[5]
    if family != "t5":
        assert counts[3] == counts[2] + 1


@pytest.mark.quick
@pytest.mark.parametrize("cache", [None, "static"])
def test_a_window_that_fills_while_it_decodes(cache: str | None) -> None:
    plain, pipe = model("mistral"), shared("mistral")
    assert plain.config.sliding_window == 6
    inputs = prompts(plain, 4, left_padded=False, length=3)
    both(plain, pipe, **inputs, max_new_tokens=12, min_new_tokens=12, cache_implementation=cache)
    before = made(pipe)
    both(plain, pipe, **inputs, max_new_tokens=40, min_new_tokens=40, cache_implementation=cache)
    assert made(pipe) == before


def equal_caches(one: Any, other: Any) -> None:
    assert one.get_seq_length() == other.get_seq_length()
    for mine, plains in zip(one.layers, other.layers, strict=True):
        assert torch.equal(mine.keys, plains.keys)
        assert torch.equal(mine.values, plains.values)


@pytest.mark.quick
@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_a_cache_goes_in_and_out(kind: str) -> None:
    plain, pipe = model("llama"), shared("llama")
    caches = [
        DynamicCache(config=plain.config) if kind == "dynamic" else StaticCache(config=plain.config, max_cache_len=64)
        for _ in range(2)
    ]
    layers, inputs = caches[1].layers, prompts(plain, 3)
    ids = plain.generate(**inputs, **NEW, past_key_values=caches[0])
    assert torch.equal(pipe.generate(**inputs, **NEW, past_key_values=caches[1]), ids)
    assert caches[1].layers is layers
    equal_caches(caches[1], caches[0])
    more = torch.cat([ids, torch.full((3, 4), 7)], 1)
    mask = torch.cat([inputs["attention_mask"], torch.ones(3, 12, dtype=torch.int64)], 1)
    results = [
        each.generate(more, attention_mask=mask, past_key_values=cache, **NEW, return_dict_in_generate=True)
        for each, cache in zip((plain, pipe), caches, strict=True)
    ]
    assert torch.equal(results[1].sequences, results[0].sequences)
    assert results[1].past_key_values is caches[1]
    equal_caches(caches[1], caches[0])
    # A cache is the caller's: the plain model goes on with what the pipe has left.
    longer = {"attention_mask": torch.ones(3, results[0].sequences.shape[1], dtype=torch.int64), **NEW}
    again = [plain.generate(results[0].sequences, past_key_values=cache, **longer) for cache in caches]
    assert torch.equal(*again)


def test_outputs_beside_the_tokens() -> None:
    plain, pipe = model("llama"), shared("llama")
    asked = {
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_logits": True,
        "output_hidden_states": True,
    }
    expected, result = (each.generate(**prompts(plain, 3), **NEW, **asked) for each in (plain, pipe))
    assert type(result) is type(expected)
    assert result.keys() == expected.keys()
    for name in ("scores", "logits", "hidden_states"):
        leaves = [torch.utils._pytree.tree_leaves(each[name]) for each in (result, expected)]
        assert len(leaves[0]) == len(leaves[1])
        assert all(map(torch.equal, *leaves))
    assert type(result.past_key_values) is DynamicCache
    equal_caches(result.past_key_values, expected.past_key_values)


@pytest.mark.parametrize("family", ["t5", "bart"])
def test_an_encoder_and_a_decoder(family: str) -> None:
    plain, pipe = model(family), shared(family)
    both(plain, pipe, **prompts(plain, 5), **NEW)
    both(plain, pipe, **prompts(plain, 5), **NEW, **BEAMS)
    result = both(plain, pipe, **prompts(plain, 2), **NEW, return_dict_in_generate=True)
    assert type(result.past_key_values) is EncoderDecoderCache
    assert set(generator_of(pipe)._entries) == {"encoder", "forward"}


@pytest.mark.parametrize("family", ["mamba", "bamba", "jamba"])
def test_states_that_are_no_keys(family: str) -> None:
    plain, pipe = model(family), split(FAMILIES[family]())
    both(plain, pipe, **prompts(plain, 4), **NEW)
    before = made(pipe)
    both(plain, pipe, **prompts(plain, 4), max_new_tokens=20, min_new_tokens=20, **SAMPLED)
    assert made(pipe) == before


def states(subject: nn.Module) -> dict[str, Tensor]:
    """Return the tensors in the attributes of modules, which no table of theirs has."""
    found = {}
    for path, module in subject.named_modules():
        found |= {f"{path}.{name}": value for name, value in vars(module).items() if isinstance(value, Tensor)}
    return found


def test_caches_in_attributes_are_left_as_the_plain_model_leaves_them() -> None:
    plain, subject = FAMILIES["recurrent_gemma"](), FAMILIES["recurrent_gemma"]()
    pipe: Any = split(subject)
    for rows, options in ((4, SAMPLED), (4, {}), (2, {})):
        both(plain, pipe, **prompts(plain, rows), **NEW, **options)
        assert states(subject).keys() == states(plain).keys() != set()
        for name, value in states(plain).items():
            torch.testing.assert_close(states(subject)[name], value)
    recordings = generator_of(pipe).entry("forward").pipe._core.recordings
    before = recordings.made
    both(plain, pipe, **prompts(plain, 4), **NEW)
    assert recordings.made == before


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, contextlib.nullcontext])
def test_modes(mode: Callable[[], Any]) -> None:
    plain, pipe = model("llama"), shared("llama")
    with mode():
        both(plain, pipe, **prompts(plain, 4), **NEW)
    both(plain, pipe, **prompts(plain, 4), **NEW)
    assert not pipe.generate(**prompts(plain, 4), **NEW).is_inference()


@pytest.mark.quick
def test_steps_of_training_between_two_calls() -> None:
    plain, subject = FAMILIES["llama"](), FAMILIES["llama"]()
    pipe = split(subject)
    first, inputs = both(plain, pipe, **prompts(plain, 4), **NEW), prompts(plain, 4, left_padded=False)
    before, generated = made(pipe), []
    for each in (plain, pipe):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.5)
        each(**inputs, labels=inputs["input_ids"]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    for left, right in zip(plain.parameters(), subject.parameters(), strict=True):
        torch.testing.assert_close(right, left, rtol=1e-5, atol=1e-6)
    with torch.no_grad():
        for left, right in zip(plain.parameters(), subject.parameters(), strict=True):
            left.copy_(right)
    generated = both(plain, pipe, **prompts(plain, 4), **NEW)
    assert not torch.equal(generated, first)
    assert made(pipe) == before


def test_dropout_in_training_mode() -> None:
    plain, pipe = FAMILIES["gpt2"]().train(), split(FAMILIES["gpt2"]().train())
    quiet = model("gpt2").generate(**prompts(plain, 3), **NEW)
    noisy = both(plain, pipe, **prompts(plain, 3), **NEW)
    assert not torch.equal(noisy, quiet)
    both(plain, pipe, **prompts(plain, 3), **NEW, **SAMPLED)
    pipe.eval()
    assert torch.equal(pipe.generate(**prompts(plain, 3), **NEW), quiet)


def test_adapters_on_and_off() -> None:
    def adapted() -> Any:
        torch.manual_seed(0)
        config = peft.LoraConfig(
            r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM"
        )
        return peft.get_peft_model(FAMILIES["llama"](), config).eval()

    plain, subject = adapted(), adapted()
    pipe = split(subject)
    on = both(plain, pipe, **prompts(plain, 4), **NEW)
    with plain.disable_adapter(), subject.disable_adapter():
        off = both(plain, pipe, **prompts(plain, 4), **NEW)
    assert not torch.equal(on, off)
    assert torch.equal(off, model("llama").generate(**prompts(plain, 4), **NEW))
    before = made(pipe)
    assert torch.equal(both(plain, pipe, **prompts(plain, 4), **NEW), on)
    assert made(pipe) == before


def test_nothing_of_a_call_stays() -> None:
    plain, pipe = model("llama"), shared("llama")
    pipe.generate(**prompts(plain, 4), **NEW)

    def tensors() -> int:
        gc.collect()
        return sum(issubclass(type(each), Tensor) for each in gc.get_objects())

    before = tensors()
    for length in (9, 11):
        pipe.generate(**prompts(plain, 4, length=length), max_new_tokens=20, min_new_tokens=20)
    assert tensors() == before


def test_why_rows_stay_together_is_noted() -> None:
    plain, pipe = model("mixtral"), split(FAMILIES["mixtral"]())
    both(plain, pipe, **prompts(plain, 4), **NEW)
    assert "one group" not in pipe.report()
    pipe.generate(**prompts(plain, 1), **NEW)
    assert "one group, with one lane at work: the batch has a single row" in pipe.report()


def test_a_model_that_does_not_generate() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

        def forward(self, value: Tensor) -> Tensor:
            return self.layers(value)

        def generate(self, ids: Tensor) -> Tensor:
            return ids

    with pytest.raises(InputError, match="Net does not generate as transformers' models do"):
        split(Net()).generate(torch.ones(1, 2, dtype=torch.int64))


def test_errors_of_transformers_are_raised_and_the_pipe_goes_on() -> None:
    plain, pipe = model("llama"), shared("llama")
    with pytest.raises(ValueError, match="num_beams"):
        pipe.generate(**prompts(plain, 2), num_beams=2, num_return_sequences=3)
    with pytest.raises((IndexError, ValueError)):
        pipe.generate(torch.full((2, 4), VOCABULARY + 3), max_new_tokens=3)
    both(plain, pipe, **prompts(plain, 4), **NEW)


def test_a_model_with_a_class_of_its_own() -> None:
    class Doubled(LlamaForCausalLM):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            output = super().forward(*args, **kwargs)
            output.logits = -output.logits
            return output

    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "pad_token_id": 0, "eos_token_id": 2}
    plain = Doubled(LlamaConfig(**sizes)).eval()
    both(plain, split(copy.deepcopy(plain)), **prompts(plain, 3), **NEW)
