"""Audio and time-series models of transformers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks.zoo.case import Case, Shape, tokens
from benchmarks.zoo.hf import EVAL, SEQ2SEQ, floats, other
from tests.equivalence.equality import Batch

_LAYERS = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 8, "num_attention_heads": 4}
_SPEECH: dict[str, Any] = {
    **_LAYERS,
    "conv_dim": (16, 16, 16),
    "conv_stride": (5, 2, 2),
    "conv_kernel": (10, 3, 3),
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "vocab_size": 32,
    "apply_spec_augment": False,
    "mask_time_prob": 0.0,
    "layerdrop": 0.0,
}
_audio = partial(other, kind="audio", blocks=8)
_series = partial(other, kind="series", blocks=8)


def _waves(samples: int = 600) -> Callable[[Shape], Batch]:
    return lambda shape: Batch((), {"input_values": floats(shape.rows, samples + 50 * (shape.length - 12))})


def audio() -> list[Case]:
    """Return audio models."""

    def speech(name: str, family: str, **values: Any) -> Case:
        model, config = f"{family}ForCTC", f"{family}Config"
        checks = ("eval", "train", "rows", "length")
        return _audio(name, model, config, _waves(), checks=checks, **{**_SPEECH, **values})

    return [
        speech("wav2vec2", "Wav2Vec2"),
        speech("wav2vec2-stable", "Wav2Vec2", do_stable_layer_norm=True, feat_extract_norm="layer"),
        speech("hubert", "Hubert"),
        speech("wavlm", "WavLM"),
        speech("unispeech", "UniSpeech"),
        speech("sew", "SEW", squeeze_factor=2),
        speech("data2vec-audio", "Data2VecAudio", num_conv_pos_embeddings=2, conv_pos_kernel_size=5),
        _conformer(),
        _audio(
            "whisper",
            "WhisperForConditionalGeneration",
            "WhisperConfig",
            _whisper,
            **(SEQ2SEQ | {"decoder_start_token_id": 3}),
            num_mel_bins=8,
            max_source_positions=20,
            max_target_positions=32,
            suppress_tokens=None,
            begin_suppress_tokens=None,
        ),
        _audio(
            "audio-spectrogram",
            "ASTForAudioClassification",
            "ASTConfig",
            lambda shape: Batch((), {"input_values": floats(shape.rows, 32, 16)}),
            **_LAYERS,
            patch_size=8,
            frequency_stride=4,
            time_stride=4,
            max_length=32,
            num_mel_bins=16,
        ),
        _audio(
            "speech-to-text",
            "Speech2TextForConditionalGeneration",
            "Speech2TextConfig",
            lambda shape: Batch(
                (), {"input_features": floats(shape.rows, 32, 8), "decoder_input_ids": tokens(Shape(shape.rows, 6))}
            ),
            **SEQ2SEQ,
            input_feat_per_channel=8,
            conv_channels=16,
            conv_kernel_sizes=(3, 3),
        ),
    ]


def _conformer() -> Case:
    values = _SPEECH | {"position_embeddings_type": "relative", "conv_depthwise_kernel_size": 5}
    return _audio(
        "wav2vec2-conformer", "Wav2Vec2ConformerForCTC", "Wav2Vec2ConformerConfig", _waves(), checks=EVAL, **values
    )


def _whisper(shape: Shape) -> Batch:
    return Batch((), {"input_features": floats(shape.rows, 8, 40), "decoder_input_ids": tokens(Shape(shape.rows, 6))})


def series() -> list[Case]:
    """Return models of time series and of other things."""
    patches = {"num_input_channels": 2, "context_length": 32, "patch_length": 4, "patch_stride": 4}
    patches["prediction_length"] = 4
    return [
        _series(
            "patchtst",
            "PatchTSTForPrediction",
            "PatchTSTConfig",
            lambda shape: Batch((), {"past_values": floats(shape.rows, 32, 2)}),
            checks=EVAL,
            **patches,
            d_model=32,
            num_hidden_layers=8,
            num_attention_heads=4,
            ffn_dim=64,
            distribution_output="normal",
            loss="mse",
        ),
        _series(
            "patchtsmixer",
            "PatchTSMixerForPrediction",
            "PatchTSMixerConfig",
            lambda shape: Batch((), {"past_values": floats(shape.rows, 32, 2)}),
            checks=EVAL,
            **patches,
            d_model=16,
            num_layers=8,
        ),
        _series(
            "decision-transformer",
            "DecisionTransformerModel",
            "DecisionTransformerConfig",
            _decisions,
            state_dim=5,
            act_dim=3,
            hidden_size=32,
            max_ep_len=64,
            n_layer=8,
            n_head=4,
            n_inner=64,
            n_positions=128,
        ),
        _series(
            "perceiver",
            "PerceiverModel",
            "PerceiverConfig",
            lambda shape: Batch((), {"inputs": floats(shape.rows, 20, 16)}),
            d_model=16,
            num_latents=6,
            d_latents=32,
            num_blocks=1,
            num_self_attends_per_block=8,
            num_self_attention_heads=4,
            num_cross_attention_heads=1,
        ),
    ]


def _decisions(shape: Shape) -> Batch:
    rows, length = shape.rows, 6
    steps = torch.arange(length).expand(rows, length).clone()
    return Batch(
        (),
        {
            "states": floats(rows, length, 5),
            "actions": floats(rows, length, 3),
            "rewards": floats(rows, length, 1),
            "returns_to_go": floats(rows, length, 1),
            "timesteps": steps,
            "attention_mask": torch.ones(rows, length, dtype=torch.int64),
        },
    )


def cases() -> list[Case]:
    """Return the cases of this file."""
    return [*audio(), *series()]
