"""Groups of rows, each in a thread: the tokens and the random state of one call on the whole batch."""

from __future__ import annotations

import _thread
import functools
import logging
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    StoppingCriteriaList,
    TextStreamer,
)

from autosplit.generation.groups import generate
from autosplit.generation.noise import WholeBatch, outside_group
from autosplit.runtime.lanes.ambient import watched
from tests.models.generators import EOS, FAMILIES, VOCABULARY, prompts

model = functools.cache(lambda family: FAMILIES[family]())
SAMPLED = {"do_sample": True, "temperature": 1.5, "top_k": 0}
BEAMS = {"num_beams": 3}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": SAMPLED,
    "beams": BEAMS,
    "sampled beams": SAMPLED | BEAMS,
    "several sampled": SAMPLED | {"num_return_sequences": 3},
    "several beams": BEAMS | {"num_return_sequences": 2},
}
ROWS_GROUPS = [(5, 2), (7, 3), (6, 4)]


@pytest.fixture(autouse=True)
def _no_thread_is_left(one_intra_op_thread: None) -> Iterator[None]:
    before = threading.active_count()
    yield
    assert threading.active_count() == before


def both(
    subject: PreTrainedModel, groups: int, *args: Any, notes: list[str] | None = None, seed: int = 3, **kwargs: Any
) -> Tensor:
    """Compare tokens and the random state with those of a plain call; return the tokens.

    ``notes`` gets the reasons for a single group; without it there must be none.
    """
    torch.manual_seed(seed)
    plain, state = subject.generate(*args, **kwargs), torch.get_rng_state()
    said: list[str] = []
    torch.manual_seed(seed)
    grouped = generate(subject, groups, args, kwargs, notes=said.append)
    assert torch.equal(torch.get_rng_state(), state)
    if notes is None:
        assert said == []
    else:
        notes += said
    tokens, expected = (result if isinstance(result, Tensor) else result.sequences for result in (grouped, plain))
    assert tokens.dtype == expected.dtype
    assert torch.equal(tokens, expected)
    return expected


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2", "mamba", "bamba", "t5", "bart"])
def test_tokens_are_those_of_the_whole_batch(family: str, kind: str) -> None:
    rows, groups = ROWS_GROUPS[(len(family) + len(kind)) % 3]
    both(model(family), groups, **prompts(model(family), rows), max_new_tokens=6, **KINDS[kind])


@pytest.mark.campaign
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "recurrent_gemma"])
def test_every_family(family: str, kind: str) -> None:
    for rows, groups in ROWS_GROUPS:
        both(model(family), groups, **prompts(model(family), rows), max_new_tokens=12, **KINDS[kind])


OPTIONS: list[dict[str, Any]] = [
    {"min_new_tokens": 5, "eos_token_id": list(range(2, 40))},
    {"repetition_penalty": 1.7},
    {"no_repeat_ngram_size": 2},
    {"bad_words_ids": [[5], [7, 8]]},
    {"sequence_bias": [[[5], 3.0], [[7, 8], -9.0]]},
    {"suppress_tokens": [9, 10], "begin_suppress_tokens": [11]},
    {"forced_bos_token_id": 4, "forced_eos_token_id": 2},
    {"exponential_decay_length_penalty": (2, 1.5)},
    {"guidance_scale": 1.5},
    {"remove_invalid_values": True, "renormalize_logits": True},
    {"use_cache": False},
    {"cache_implementation": "static"},
    {"prefill_chunk_size": 4},
    {"max_length": 15, "max_new_tokens": None},
    {"max_new_tokens": None, "min_length": 15, "max_length": 20},
    {"pad_token_id": 7, "eos_token_id": list(range(8, 30))},
    {"watermarking_config": {"bias": 2.5, "seeding_scheme": "selfhash"}, "generators": True},
    SAMPLED | {"top_k": 5},
    SAMPLED | {"top_p": 0.7},
    SAMPLED | {"min_p": 0.1},
    SAMPLED | {"typical_p": 0.6},
    SAMPLED | {"top_h": 0.5},
    SAMPLED | {"epsilon_cutoff": 0.01, "eta_cutoff": 0.02},
    SAMPLED | BEAMS | {"top_k": 3, "eos_token_id": list(range(2, 6))},
    BEAMS | {"early_stopping": True, "eos_token_id": list(range(2, 8))},
    BEAMS | {"early_stopping": False, "eos_token_id": list(range(2, 8)), "num_return_sequences": 3},
    BEAMS | {"early_stopping": "never", "eos_token_id": list(range(2, 8)), "length_penalty": 2.0},
    BEAMS | {"early_stopping": "never", "eos_token_id": list(range(2, 8)), "length_penalty": -1.0},
    BEAMS | {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "min_new_tokens": 4},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_options_work_by_rows(options: dict[str, Any]) -> None:
    notes: list[str] | None = [] if options.get("generators") else None
    options = {name: value for name, value in options.items() if name != "generators"}
    both(model("llama"), 3, **prompts(model("llama"), 7), **({"max_new_tokens": 8} | options), notes=notes)
    assert notes is None or notes == ["it draws from a generator of its own"]


@pytest.mark.parametrize("options", [{"encoder_repetition_penalty": 1.5}, {"encoder_no_repeat_ngram_size": 2}], ids=str)
@pytest.mark.parametrize("kind", [{}, BEAMS], ids=["greedy", "beams"])
def test_options_of_encoders(options: dict[str, Any], kind: dict[str, Any]) -> None:
    both(model("t5"), 3, **prompts(model("t5"), 7), max_new_tokens=6, **options, **kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["gpt_neox", "bart"])
def test_rows_that_end_early_are_padded_to_the_longest_group(family: str, kind: str) -> None:
    subject, lengths = model(family), []
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed + 10)
        ends = (torch.randperm(VOCABULARY - 3, generator=generator)[:18] + 3).tolist()
        options = prompts(subject, 5) | KINDS[kind] | {"eos_token_id": ends, "max_new_tokens": 14}
        options |= {"pad_token_id": (96, 0)[seed % 2], "early_stopping": "num_beams" in options}
        tokens = both(subject, 2, **options, seed=seed)
        padding = ends[0] if seed % 2 and "num_beams" in options else options["pad_token_id"]
        groups = tokens.split([len(tokens) // 5 * 3, len(tokens) // 5 * 2])
        lengths.append([int((rows != padding).any(0).nonzero().max()) for rows in groups])
    assert any(first > second for first, second in lengths)
    assert len({max(pair) for pair in lengths}) > 1


def test_prompts_of_one_length_and_without_a_mask() -> None:
    for family in ("llama", "bart"):
        both(model(family), 2, prompts(model(family), 3, left_padded=False)["input_ids"], max_new_tokens=4)
        both(model(family), 2, inputs=prompts(model(family), 3)["input_ids"], max_new_tokens=4, **SAMPLED)


def test_groups_are_as_many_as_rows_at_most() -> None:
    assert both(model("llama"), 9, **prompts(model("llama"), 3), max_new_tokens=4, **SAMPLED).shape[0] == 3


def test_a_config_of_the_callers_stays_as_it_is() -> None:
    config = GenerationConfig(max_new_tokens=5, do_sample=True, pad_token_id=0, eos_token_id=EOS)
    before = config.to_dict()
    both(model("llama"), 2, generation_config=config, **prompts(model("llama"), 4))
    assert config.to_dict() == before


def test_embeddings_and_outputs_of_the_encoder_are_split() -> None:
    llama, bart = model("llama"), model("bart")
    inputs = prompts(llama, 5)
    embeds = llama.get_input_embeddings()(inputs["input_ids"]).detach()
    both(llama, 2, inputs_embeds=embeds, attention_mask=inputs["attention_mask"], max_new_tokens=5)
    both(llama, 2, **inputs, inputs_embeds=embeds, max_new_tokens=5, **SAMPLED)
    inputs = prompts(bart, 5)
    with torch.no_grad():
        encoded = bart.get_encoder()(**inputs)
    both(bart, 2, encoder_outputs=encoded, attention_mask=inputs["attention_mask"], max_new_tokens=5)
    starts = torch.arange(10).view(5, 2) + 20
    both(bart, 2, **inputs, decoder_input_ids=starts, max_new_tokens=5)


class Bias:
    """A processor of logits that has seen all rows."""

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        return scores + scores.mean(0)


def stop(ids: Tensor, scores: Any, **_: Any) -> Tensor:
    return torch.full((len(ids),), ids.shape[1] > 12)


class Quiet(TextStreamer):
    def __init__(self) -> None:
        pass

    def put(self, value: Tensor) -> None:
        pass

    def end(self) -> None:
        pass


@pytest.mark.parametrize(
    ("reason", "options"),
    [
        ("logits_processor", {"logits_processor": LogitsProcessorList([Bias()])}),
        ("stopping_criteria", {"stopping_criteria": StoppingCriteriaList([stop])}),
        ("prefix_allowed_tokens_fn", {"prefix_allowed_tokens_fn": lambda row, ids: [row + 3, 9]}),
        ("custom_generate", {"custom_generate": lambda model, input_ids, **_: input_ids.flip(0)}),
        ("streamer", {"streamer": Quiet()}),
        ("return_dict_in_generate", {"return_dict_in_generate": True, "output_scores": True}),
        ("max_time", {"max_time": 100.0}),
        ("input_ids|single row", {"input_ids": prompts(model("llama"), 1)["input_ids"], "attention_mask": None}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_may_look_at_all_rows_has_them_in_one_group(reason: str, options: dict[str, Any]) -> None:
    notes: list[str] = []
    both(model("llama"), 2, **(prompts(model("llama"), 4) | {"max_new_tokens": 5} | options), notes=notes)
    assert len(notes) == 1
    assert any(word in notes[0] for word in reason.split("|"))


def test_a_cache_that_is_handed_in_keeps_rows_together() -> None:
    llama, ids = model("llama"), prompts(model("llama"), 4, left_padded=False)["input_ids"]
    results, notes = [], []
    grouped = functools.partial(generate, llama, 2, (), notes=notes.append)
    for run in (lambda kwargs: llama.generate(**kwargs), grouped):
        with torch.no_grad():
            cache = llama(ids[:, :-1], use_cache=True).past_key_values
        results.append((run({"input_ids": ids, "past_key_values": cache, "max_new_tokens": 4}), cache.layers[0].keys))
    assert notes == ["past_key_values is not known to follow the rows"]
    assert all(map(torch.equal, *results))


def test_rotary_frequencies_that_follow_the_longest_row() -> None:
    scaled = FAMILIES["llama"]()
    scaled.config.rope_parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    scaled.config.max_position_embeddings = 12
    inner = type(scaled.model.rotary_emb)(scaled.config)
    scaled.model.rotary_emb = inner
    notes: list[str] = []
    both(scaled, 2, **prompts(scaled, 5), max_new_tokens=8, notes=notes)
    assert notes == ["its rotary frequencies follow the longest row"]


def test_a_model_of_text_and_images_keeps_positions_of_all_rows() -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    words = {"vocab_size": VOCABULARY, "intermediate_size": 48, "pad_token_id": 0, "eos_token_id": EOS}
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    image = {"depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 4}
    config = Qwen2VLConfig(text_config=sizes | words | {"rope_parameters": rope}, vision_config=image)
    subject, notes = Qwen2VLForConditionalGeneration(config).eval(), []
    both(subject, 2, **prompts(subject, 5), max_new_tokens=4, notes=notes)
    assert notes == ["its images or sounds stand between tokens"]


def test_other_random_numbers_have_all_rows_run_again() -> None:
    noisy, notes = FAMILIES["gpt2"]().train(), []
    both(noisy, 2, **prompts(noisy, 5), max_new_tokens=5, **SAMPLED, notes=notes)
    both(noisy, 2, **prompts(noisy, 5), max_new_tokens=5, notes=notes)
    assert notes == ["it draws other random numbers than those of sampling"] * 2


def calling(family: str, act: Callable[[int, int], None]) -> PreTrainedModel:
    """Return a model that calls ``act`` with the number of rows and of the thread's call before each forward."""
    subject, calls = FAMILIES[family](), threading.local()

    def before(module: Any, args: Any, kwargs: Any) -> None:
        calls.number = getattr(calls, "number", 0) + 1
        act(kwargs["input_ids"].shape[0], calls.number)

    subject.register_forward_pre_hook(before, with_kwargs=True)
    return subject


def test_groups_run_in_the_state_of_the_callers_thread() -> None:
    variable: ContextVar[int] = ContextVar("variable", default=0)
    seen = set()

    def act(rows: int, number: int) -> None:
        seen.add((torch.is_inference_mode_enabled(), torch.get_autocast_dtype("cpu"), variable.get()))

    variable.set(7)
    with torch.inference_mode(), torch.autocast("cpu", torch.float16):
        both(calling("llama", act), 2, **prompts(model("llama"), 4), max_new_tokens=5, **SAMPLED)
    assert seen == {(True, torch.float16, 7)}


def test_groups_write_to_copies_of_the_facade() -> None:
    subject = FAMILIES["llama"]()
    before = dict(vars(subject))
    kwargs = prompts(subject, 4) | {"max_new_tokens": 3, "cache_implementation": "static"}
    generate(subject, 2, (), kwargs, notes=pytest.fail)
    assert vars(subject) == before
    subject.generate(**kwargs)
    assert vars(subject) != before


@pytest.mark.parametrize("options", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_the_first_error_is_raised_and_nothing_runs_on(options: dict[str, Any]) -> None:
    steps: list[int] = []

    def act(rows: int, number: int) -> None:
        steps.append(number)
        time.sleep(0.002)
        if rows == 1 and number == 3:
            raise ValueError("the third step of the second group")

    subject, state = calling("llama", act), torch.get_rng_state()
    with pytest.raises(ValueError, match="the third step of the second group"):
        generate(subject, 2, (), prompts(subject, 3) | {"max_new_tokens": 60, **options}, notes=pytest.fail)
    assert max(steps) < 50
    assert torch.equal(torch.get_rng_state(), state)
    subject._forward_pre_hooks.clear()
    both(subject, 2, **prompts(subject, 4), max_new_tokens=4, **SAMPLED)


def test_an_interrupt_ends_all_groups() -> None:
    steps: list[int] = []

    def act(rows: int, number: int) -> None:
        steps.append(number)
        time.sleep(0.005)
        if rows == 1 and number == 3:
            _thread.interrupt_main()

    subject = calling("llama", act)
    with pytest.raises(KeyboardInterrupt):
        generate(subject, 2, (), prompts(subject, 3) | {"max_new_tokens": 100}, notes=pytest.fail)
    assert max(steps) < 90


def test_a_facade_may_ask_for_the_whole_batch() -> None:
    def act(rows: int, number: int) -> None:
        if rows < 4 and number == 2:
            raise WholeBatch("its layers keep state")

    subject, notes = calling("llama", act), []
    both(subject, 2, **prompts(subject, 4), max_new_tokens=5, **SAMPLED, notes=notes)
    assert notes == ["its layers keep state"]


def test_stages_run_without_the_mode_of_a_group() -> None:
    seen = set()

    def act(rows: int, number: int) -> None:
        with outside_group(), outside_group():
            seen.add((threading.current_thread().daemon, watched()))
        seen.add((threading.current_thread().daemon, watched()))

    both(calling("llama", act), 2, **prompts(model("llama"), 4), max_new_tokens=3, **SAMPLED)
    assert seen == {(True, False), (True, True), (False, False)}  # outside, in a group, and the plain call


def test_what_is_said_once_is_said_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    def act(rows: int, number: int) -> None:
        warnings.warn(f"call {number}", stacklevel=1)
        logging.getLogger("transformers.test").error("call %s", number)

    def said(run: Callable[..., Any]) -> list[str]:
        subject = calling("llama", act)
        subject.generation_config.pad_token_id = None
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run(subject, {"input_ids": prompts(subject, 6)["input_ids"], "max_new_tokens": 3})
        messages = [*(str(warning.message) for warning in caught), *caplog.messages]
        caplog.clear()
        return sorted(messages)

    library = logging.getLogger("transformers")
    monkeypatch.setattr(library, "propagate", False)  # transformers has it propagate where CI is set
    library.addHandler(caplog.handler)
    try:
        said(lambda subject, kwargs: subject.generate(**kwargs))  # what is said once by a process
        plain = said(lambda subject, kwargs: subject.generate(**kwargs))
        grouped = said(lambda subject, kwargs: generate(subject, 3, (), kwargs, notes=pytest.fail))
    finally:
        library.removeHandler(caplog.handler)
    assert grouped == plain
    assert plain.count("call 3") == 2  # a warning and an entry of the log
    assert any("attention mask" in message for message in plain)
    assert not library.handlers[0].filters
