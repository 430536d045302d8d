"""Tiny models of transformers families, built from their configs with random weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

SIZE = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 29}
KEYS = {**SIZE, "num_key_value_heads": 2, "max_position_embeddings": 32, "pad_token_id": 0, "attention_dropout": 0.0}
QUIET = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
BERT = {**SIZE, **QUIET, "max_position_embeddings": 32, "type_vocab_size": 2}
IMAGE = {**QUIET, "image_size": 8, "patch_size": 4, "num_channels": 3}
VIT = {key: value for key, value in SIZE.items() if key != "vocab_size"} | IMAGE
NO_DROPOUT = {"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0}
BART = {
    **NO_DROPOUT,
    "d_model": 16,
    "vocab_size": 29,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "max_position_embeddings": 40,
    "pad_token_id": 0,
}
HIDDEN, ATTENTION, CACHE, ROUTER = "output_hidden_states", "output_attentions", "use_cache", "output_router_logits"
TEXT = (HIDDEN, ATTENTION)
CAUSAL = (*TEXT, CACHE)


@dataclass(frozen=True)
class Family:
    """A model class, its config, which inputs it takes and which outputs a caller may switch on."""

    model: str
    config: Mapping[str, Any]
    inputs: str = "ids"
    switches: tuple[str, ...] = CAUSAL
    config_class: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)

    def build(self) -> nn.Module:
        """Return the model in training mode; dropout is 0 in its config."""
        import transformers

        config_class = getattr(
            transformers, self.config_class or getattr(transformers, self.model).config_class.__name__
        )
        config = config_class(**self.config)
        config._experts_implementation = "eager"  # the grouped kernel has no float64
        if ATTENTION in self.switches:
            config._attn_implementation = "eager"
        torch.manual_seed(0)
        return getattr(transformers, self.model)(config)

    def batch(self, rows: int, length: int) -> dict[str, torch.Tensor]:
        """Return keyword inputs of so many rows, and tokens where there are any."""
        ids = torch.randint(3, 29, (rows, length))
        if self.inputs == "images":
            size = self.config.get("image_size", 32)
            return {"pixel_values": torch.randn(rows, 3, size, size, dtype=torch.float64)}
        if self.inputs == "sequences":
            return {"input_ids": ids, "decoder_input_ids": torch.randint(3, 29, (rows, length - 2))}
        if self.inputs == "masked":
            mask = torch.ones_like(ids)
            mask[::2, -2:] = 0
            return {"input_ids": ids, "attention_mask": mask}
        return {"input_ids": ids}


GPT2 = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32, "vocab_size": 29}
GPT2 |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
MOE = {**KEYS, "num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaForCausalLM", KEYS),
    "llama without cache": Family("LlamaForCausalLM", {**KEYS, CACHE: False}),
    "llama masked": Family("LlamaForCausalLM", {**KEYS, CACHE: False}, "masked"),
    "mistral": Family("MistralForCausalLM", {**KEYS, "sliding_window": 4, CACHE: False}),
    "qwen2": Family("Qwen2ForCausalLM", {**KEYS, CACHE: False}),
    "qwen3": Family("Qwen3ForCausalLM", {**KEYS, "head_dim": 8}),
    "gemma": Family("GemmaForCausalLM", {**KEYS, "head_dim": 8}),
    "gemma2": Family("Gemma2ForCausalLM", {**KEYS, "head_dim": 8, "sliding_window": 4}),
    "phi": Family("PhiForCausalLM", {**KEYS, "resid_pdrop": 0.0, CACHE: False}),
    "olmo": Family("OlmoForCausalLM", KEYS),
    "stablelm": Family("StableLmForCausalLM", {**KEYS, CACHE: False}),
    "gpt2": Family("GPT2LMHeadModel", GPT2),
    "gpt2 without cache": Family("GPT2LMHeadModel", {**GPT2, CACHE: False}),
    "gpt_neox": Family("GPTNeoXForCausalLM", {**SIZE, "max_position_embeddings": 32, "hidden_dropout": 0.0}),
    "opt": Family(
        "OPTForCausalLM",
        {
            **SIZE,
            **NO_DROPOUT,
            "ffn_dim": 32,
            "word_embed_proj_dim": 16,
            "max_position_embeddings": 32,
            "pad_token_id": 1,
        },
    ),
    "bloom": Family(
        "BloomForCausalLM",
        {
            "hidden_size": 16,
            "n_layer": 2,
            "n_head": 2,
            "vocab_size": 29,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
        },
    ),
    "falcon": Family(
        "FalconForCausalLM",
        {**SIZE, "hidden_dropout": 0.0, "attention_dropout": 0.0, "new_decoder_architecture": False},
    ),
    "mixtral": Family("MixtralForCausalLM", {**KEYS, "num_local_experts": 3, CACHE: False}, switches=(*CAUSAL, ROUTER)),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", {**MOE, "head_dim": 8}, switches=(*CAUSAL, ROUTER)),
    "olmoe": Family("OlmoeForCausalLM", MOE, switches=(*CAUSAL, ROUTER)),
    "mamba": Family(
        "MambaForCausalLM",
        {"hidden_size": 16, "num_hidden_layers": 2, "vocab_size": 29, "state_size": 4, "time_step_rank": 2},
        switches=(HIDDEN, CACHE),
    ),
    "bert": Family("BertForMaskedLM", BERT, switches=TEXT),
    "roberta": Family("RobertaForSequenceClassification", BERT, "masked", switches=TEXT),
    "electra": Family("ElectraForTokenClassification", {**BERT, "embedding_size": 8}, switches=TEXT),
    "albert": Family("AlbertModel", {**BERT, "embedding_size": 8}, switches=TEXT),
    "distilbert": Family(
        "DistilBertForMaskedLM",
        {"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 32, "vocab_size": 29, "dropout": 0.0}
        | {"attention_dropout": 0.0, "max_position_embeddings": 32},
        switches=TEXT,
    ),
    "deberta_v2": Family(
        "DebertaV2Model", {**BERT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]}, switches=TEXT
    ),
    "t5": Family(
        "T5ForConditionalGeneration",
        {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "vocab_size": 29, "dropout_rate": 0.0},
        "sequences",
    ),
    "bart": Family("BartForConditionalGeneration", BART, "sequences"),
    "pegasus": Family("PegasusForConditionalGeneration", BART, "sequences"),
    "vit": Family("ViTForImageClassification", VIT, "images", TEXT),
    "deit": Family("DeiTForImageClassification", VIT, "images", TEXT),
    "dinov2": Family("Dinov2Model", {**VIT, "drop_path_rate": 0.0}, "images", TEXT),
    "swin": Family(
        "SwinModel",
        {
            **IMAGE,
            "image_size": 16,
            "patch_size": 2,
            "embed_dim": 8,
            "depths": [1, 1],
            "num_heads": [2, 2],
            "window_size": 4,
        }
        | {"drop_path_rate": 0.0},
        "images",
        TEXT,
    ),
    "convnext": Family(
        "ConvNextModel",
        {"image_size": 32, "hidden_sizes": [8, 8, 8, 8], "depths": [1, 1, 1, 1], "num_stages": 4},
        "images",
        (HIDDEN,),
    ),
}
