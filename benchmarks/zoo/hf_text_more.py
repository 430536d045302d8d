"""Encoders and encoder-decoders of transformers."""

from __future__ import annotations

from typing import Any

from benchmarks.zoo.case import Case, Shape
from benchmarks.zoo.hf import FIXED, LONG, SEQ2SEQ, TURNED, seq2seq, text

_BART = SEQ2SEQ | {"max_position_embeddings": 64}
_T5: dict[str, Any] = {
    "vocab_size": 96,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 64,
    "num_layers": 4,
    "num_decoder_layers": 4,
    "num_heads": 4,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "decoder_start_token_id": 0,
}


def encoders() -> list[Case]:
    """Return encoders."""

    def masked(name: str, family: str, **values: Any) -> Case:
        return text(name, f"{family}ForMaskedLM", f"{family}Config", kind="encoder", **values)

    return [
        masked("bert", "Bert"),
        masked("bert-padded", "Bert", mask=True),
        masked("bert-mask-of-ones", "Bert", mask=True, full=True, checks=TURNED),
        masked("bert-labels", "Bert", mask=True, labels=True),
        masked("roberta", "Roberta"),
        text(
            "distilbert",
            "DistilBertForMaskedLM",
            "DistilBertConfig",
            kind="encoder",
            dim=32,
            n_layers=8,
            n_heads=4,
            hidden_dim=64,
        ),
        masked("albert", "Albert", embedding_size=16),
        masked("electra", "Electra", embedding_size=16),
        masked("deberta", "Deberta", relative_attention=True, pos_att_type=["c2p", "p2c"]),
        masked("deberta-v2", "DebertaV2", relative_attention=True, pos_att_type=["c2p", "p2c"]),
        masked("mpnet", "MPNet"),
        masked("roformer", "RoFormer", embedding_size=32),
        masked("mobilebert", "MobileBert", embedding_size=16, intra_bottleneck_size=16, num_feedforward_networks=2),
        masked("squeezebert", "SqueezeBert", embedding_size=32),
        masked("fnet", "FNet"),
        text(
            "funnel",
            "FunnelBaseModel",
            "FunnelConfig",
            kind="encoder",
            d_model=32,
            n_head=4,
            d_head=8,
            d_inner=64,
            block_sizes=[2, 2],
            blocks=4,
            vocab_size=96,
            tiny=False,
        ),
        masked("longformer", "Longformer", attention_window=4, max_position_embeddings=80),
        masked("big-bird", "BigBird", attention_type="original_full"),
        masked("nystromformer", "Nystromformer", num_landmarks=4, segment_means_seq_len=12, checks=FIXED),
        masked("convbert", "ConvBert", embedding_size=32, head_ratio=2, conv_kernel_size=3),
        masked("megatron-bert", "MegatronBert"),
        masked("ernie", "Ernie"),
        masked("modernbert", "ModernBert", local_attention=8, global_attn_every_n_layers=2),
        masked("esm", "Esm", mask_token_id=3, position_embedding_type="rotary"),
        masked("rembert", "RemBert", input_embedding_size=16, output_embedding_size=16),
        text(
            "xlnet",
            "XLNetLMHeadModel",
            "XLNetConfig",
            kind="encoder",
            d_model=32,
            n_layer=8,
            n_head=4,
            d_inner=64,
            vocab_size=96,
            tiny=False,
            call={"use_mems": False},
        ),
        text(
            "canine",
            "CanineModel",
            "CanineConfig",
            kind="encoder",
            local_transformer_stride=4,
            downsampling_rate=4,
            num_hash_buckets=64,
            checks=FIXED,
        ),
        masked("eurobert", "EuroBert"),
    ]


def translators() -> list[Case]:
    """Return encoder-decoders."""

    def pair(name: str, model: str, config: str, values: dict[str, Any], *, labels: bool = False, **more: Any) -> Case:
        def inputs(shape: Shape) -> Any:
            return seq2seq(shape, labels=labels)

        blocks = more.pop("blocks", 8)
        return text(
            name, model, config, kind="seq2seq", tiny=False, inputs=inputs, blocks=blocks, checks=LONG, **values, **more
        )

    return [
        pair("t5", "T5ForConditionalGeneration", "T5Config", _T5),
        pair("t5-labels", "T5ForConditionalGeneration", "T5Config", _T5, labels=True),
        pair("mt5", "MT5ForConditionalGeneration", "MT5Config", _T5),
        pair("umt5", "UMT5ForConditionalGeneration", "UMT5Config", _T5),
        pair("longt5", "LongT5ForConditionalGeneration", "LongT5Config", _T5, local_radius=4),
        pair(
            "switch-transformer",
            "SwitchTransformersForConditionalGeneration",
            "SwitchTransformersConfig",
            _T5,
            num_experts=4,
            router_jitter_noise=0.0,
        ),
        pair("bart", "BartForConditionalGeneration", "BartConfig", _BART),
        pair("pegasus", "PegasusForConditionalGeneration", "PegasusConfig", _BART),
        pair("marian", "MarianMTModel", "MarianConfig", _BART),
        pair("mbart", "MBartForConditionalGeneration", "MBartConfig", _BART),
        pair("m2m100", "M2M100ForConditionalGeneration", "M2M100Config", _BART),
        pair(
            "led",
            "LEDForConditionalGeneration",
            "LEDConfig",
            _BART
            | {"attention_window": 4, "max_encoder_position_embeddings": 64, "max_decoder_position_embeddings": 64},
        ),
        pair("blenderbot", "BlenderbotForConditionalGeneration", "BlenderbotConfig", _BART),
        pair("plbart", "PLBartForConditionalGeneration", "PLBartConfig", _BART),
        pair(
            "nllb-moe",
            "NllbMoeForConditionalGeneration",
            "NllbMoeConfig",
            _BART | {"num_experts": 4, "encoder_sparse_step": 2, "decoder_sparse_step": 2},
        ),
        pair(
            "prophetnet",
            "ProphetNetForConditionalGeneration",
            "ProphetNetConfig",
            {
                "vocab_size": 96,
                "hidden_size": 32,
                "encoder_ffn_dim": 64,
                "decoder_ffn_dim": 64,
                "num_encoder_layers": 4,
                "num_decoder_layers": 4,
                "num_encoder_attention_heads": 4,
                "num_decoder_attention_heads": 4,
                "max_position_embeddings": 64,
                "ngram": 2,
                "pad_token_id": 0,
            },
        ),
    ]


def cases() -> list[Case]:
    """Return the cases of this file."""
    return [*encoders(), *translators()]
