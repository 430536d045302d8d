"""Decoders, state-space models and mixtures of experts of transformers."""

from __future__ import annotations

from benchmarks.zoo.case import Case
from benchmarks.zoo.hf import TURNED, text

_GPT2 = {"n_embd": 32, "n_layer": 8, "n_head": 4, "n_positions": 64, "vocab_size": 96, "tiny": False}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "num_local_experts": 4}


def decoders() -> list[Case]:
    """Return decoders."""

    def causal(name: str, family: str, **values: object) -> Case:
        return text(name, f"{family}ForCausalLM", f"{family}Config", kind="decoder", **values)  # type: ignore[arg-type]

    return [
        text("gpt2", "GPT2LMHeadModel", "GPT2Config", kind="decoder", **_GPT2),
        text("gpt2-labels", "GPT2LMHeadModel", "GPT2Config", kind="decoder", labels=True, mask=True, **_GPT2),
        text("gpt2-classifier", "GPT2ForSequenceClassification", "GPT2Config", kind="decoder", **_GPT2, pad_token_id=0),
        causal("llama", "Llama"),
        causal("llama-labels", "Llama", labels=True),
        causal("llama-padded", "Llama", mask=True),
        causal("llama-mask-of-ones", "Llama", mask=True, full=True, checks=TURNED),
        causal("llama-eager", "Llama", attn_implementation="eager"),
        causal("mistral", "Mistral", sliding_window=8),
        causal("qwen2", "Qwen2"),
        causal("qwen3", "Qwen3", head_dim=8),
        causal("gemma", "Gemma", head_dim=8),
        causal("gemma2", "Gemma2", head_dim=8, sliding_window=8, query_pre_attn_scalar=8),
        text("gemma3", "Gemma3ForCausalLM", "Gemma3TextConfig", kind="decoder", head_dim=8, sliding_window=8),
        causal("phi", "Phi"),
        causal("phi3", "Phi3"),
        causal("olmo2", "Olmo2"),
        causal("stablelm", "StableLm"),
        causal("starcoder2", "Starcoder2"),
        causal("granite", "Granite"),
        causal("cohere", "Cohere"),
        causal("smollm3", "SmolLM3"),
        causal("glm", "Glm", head_dim=8),
        causal("nemotron", "Nemotron"),
        causal("gpt-neox", "GPTNeoX"),
        text("gpt-j", "GPTJForCausalLM", "GPTJConfig", kind="decoder", rotary_dim=4, **_GPT2),
        text(
            "gpt-neo",
            "GPTNeoForCausalLM",
            "GPTNeoConfig",
            kind="decoder",
            num_layers=8,
            num_heads=4,
            attention_types=[[["global", "local"], 4]],
            window_size=8,
        ),
        text("opt", "OPTForCausalLM", "OPTConfig", kind="decoder", ffn_dim=64, word_embed_proj_dim=32),
        text("bloom", "BloomForCausalLM", "BloomConfig", kind="decoder", n_layer=8, n_head=4),
        text("falcon", "FalconForCausalLM", "FalconConfig", kind="decoder"),
        text("mpt", "MptForCausalLM", "MptConfig", kind="decoder", d_model=32, n_heads=4, n_layers=8, max_seq_len=64),
        text("codegen", "CodeGenForCausalLM", "CodeGenConfig", kind="decoder", rotary_dim=4, **_GPT2),
        text("ctrl", "CTRLLMHeadModel", "CTRLConfig", kind="decoder", dff=64, **_GPT2),
        text("biogpt", "BioGptForCausalLM", "BioGptConfig", kind="decoder"),
        text(
            "xglm",
            "XGLMForCausalLM",
            "XGLMConfig",
            kind="decoder",
            d_model=32,
            num_layers=8,
            attention_heads=4,
            ffn_dim=64,
        ),
        text("openai-gpt", "OpenAIGPTLMHeadModel", "OpenAIGPTConfig", kind="decoder", **_GPT2),
    ]


def state_space() -> list[Case]:
    """Return state-space and recurrent models."""
    mamba = {"state_size": 8, "expand": 2, "conv_kernel": 4, "time_step_rank": 4}
    mamba2 = {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 2, "chunk_size": 8}
    return [
        text("mamba", "MambaForCausalLM", "MambaConfig", kind="ssm", **mamba),
        text("falcon-mamba", "FalconMambaForCausalLM", "FalconMambaConfig", kind="ssm", **mamba),
        text("mamba2", "Mamba2ForCausalLM", "Mamba2Config", kind="ssm", **mamba2),
        text("rwkv", "RwkvForCausalLM", "RwkvConfig", kind="ssm", attention_hidden_size=32, context_length=64),
        text(
            "recurrent-gemma",
            "RecurrentGemmaForCausalLM",
            "RecurrentGemmaConfig",
            kind="ssm",
            lru_width=32,
            attention_window_size=8,
        ),
        text("lfm2", "Lfm2ForCausalLM", "Lfm2Config", kind="ssm", full_attn_idxs=[1, 3, 5, 7], conv_L_cache=3),
        text("xlstm", "xLSTMForCausalLM", "xLSTMConfig", kind="ssm", num_heads=4, num_blocks=8, embedding_dim=32),
        text(
            "qwen3-next",
            "Qwen3NextForCausalLM",
            "Qwen3NextConfig",
            kind="ssm",
            head_dim=8,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=8,
            linear_value_head_dim=8,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=16,
            shared_expert_intermediate_size=16,
        ),
    ]


def mixtures() -> list[Case]:
    """Return mixtures of experts."""

    def moe(name: str, family: str, **values: object) -> Case:
        return text(name, f"{family}ForCausalLM", f"{family}Config", kind="moe", **{**_MOE, **values})  # type: ignore[arg-type]

    return [
        moe("mixtral", "Mixtral"),
        moe("mixtral-aux-loss", "Mixtral", labels=True, call={"output_router_logits": True}),
        moe("qwen2-moe", "Qwen2Moe", shared_expert_intermediate_size=32),
        moe("qwen3-moe", "Qwen3Moe", head_dim=8),
        moe("olmoe", "Olmoe"),
        moe("phimoe", "Phimoe", checks=("eval", "rows", "length")),  # draws random numbers while training
        moe("granite-moe", "GraniteMoe"),
        moe(
            "deepseek-v3",
            "DeepseekV3",
            n_routed_experts=4,
            n_shared_experts=1,
            n_group=2,
            topk_group=1,
            q_lora_rank=16,
            kv_lora_rank=16,
            qk_rope_head_dim=4,
            qk_nope_head_dim=8,
            v_head_dim=8,
            first_k_dense_replace=1,
            num_key_value_heads=4,
        ),
        text(
            "gpt-oss",
            "GptOssForCausalLM",
            "GptOssConfig",
            kind="moe",
            num_local_experts=4,
            num_experts_per_tok=2,
            head_dim=8,
            sliding_window=8,
        ),
        text(
            "jetmoe",
            "JetMoeForCausalLM",
            "JetMoeConfig",
            kind="moe",
            num_local_experts=4,
            num_experts_per_tok=2,
            kv_channels=8,
        ),
        text(
            "jamba",
            "JambaForCausalLM",
            "JambaConfig",
            kind="moe",
            num_experts=4,
            mamba_d_state=8,
            mamba_dt_rank=4,
            attn_layer_period=4,
            attn_layer_offset=1,
            use_mamba_kernels=False,
        ),
        text(
            "switch-transformer-encoder",
            "SwitchTransformersEncoderModel",
            "SwitchTransformersConfig",
            kind="moe",
            d_model=32,
            d_kv=8,
            d_ff=64,
            num_layers=4,
            num_heads=4,
            num_experts=4,
            blocks=4,
            router_jitter_noise=0.0,
        ),
    ]


def cases() -> list[Case]:
    """Return the cases of this file."""
    return [*decoders(), *state_space(), *mixtures()]
