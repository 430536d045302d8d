"""Models of transformers for two modalities."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks.zoo.case import Case, Shape, tokens
from benchmarks.zoo.hf import LONG, TINY, TOWER, floats, other
from tests.equivalence.equality import Batch

_TOWER_TEXT = {key: value for key, value in TINY.items() if key != "num_key_value_heads"} | {"num_hidden_layers": 4}
_TEXT = _TOWER_TEXT | {"num_hidden_layers": 8, "max_position_embeddings": 128}


def _pair(shape: Shape, **more: Any) -> Batch:
    found = tokens(shape)
    found[:, -1] = 2
    return Batch((), {"input_ids": found, "pixel_values": floats(shape.rows, 3, 32, 32)} | more)


def _with_image_tokens(count: int, token: int = 3) -> Callable[[Shape], Batch]:
    """Return what makes prompts that begin with one image's placeholder tokens."""

    def make(shape: Shape) -> Batch:
        image = torch.full((shape.rows, count), token)
        ids = torch.cat([image, tokens(shape)], 1)
        return Batch(
            (),
            {"input_ids": ids, "pixel_values": floats(shape.rows, 3, 32, 32), "attention_mask": torch.ones_like(ids)},
        )

    return make


def cases() -> list[Case]:
    """Return the cases of this file."""
    both = partial(other, kind="multimodal", blocks=8, checks=LONG)
    towers = {"text_config": _TOWER_TEXT, "vision_config": TOWER, "projection_dim": 16}

    def with_loss(shape: Shape) -> Batch:
        return _pair(shape, return_loss=True)

    return [
        both("clip", "CLIPModel", "CLIPConfig", _pair, **towers),
        both("clip-loss", "CLIPModel", "CLIPConfig", with_loss, **towers),
        both("siglip", "SiglipModel", "SiglipConfig", _pair, text_config=_TOWER_TEXT, vision_config=TOWER),
        both("chinese-clip", "ChineseCLIPModel", "ChineseCLIPConfig", _pair, **towers),
        both("clipseg", "CLIPSegModel", "CLIPSegConfig", _pair, **towers),
        both("owlvit", "OwlViTModel", "OwlViTConfig", _pair, **towers),
        both("visual-bert", "VisualBertModel", "VisualBertConfig", _visual_bert, **_TEXT, visual_embedding_dim=16),
        both(
            "lxmert",
            "LxmertModel",
            "LxmertConfig",
            _lxmert,
            **{k: v for k, v in _TEXT.items() if k != "num_hidden_layers"},
            l_layers=4,
            x_layers=2,
            r_layers=2,
            visual_feat_dim=16,
        ),
        both(
            "llava",
            "LlavaForConditionalGeneration",
            "LlavaConfig",
            _with_image_tokens(16),
            text_config={"model_type": "llama", **_TEXT, "num_key_value_heads": 2},
            vision_config={"model_type": "clip_vision_model", **TOWER, "projection_dim": 16},
            image_token_index=3,
            image_token_id=3,
            vision_feature_layer=-2,
        ),
        both(
            "paligemma",
            "PaliGemmaForConditionalGeneration",
            "PaliGemmaConfig",
            _with_image_tokens(16),
            checks=("eval", "rows", "length"),
            text_config={"model_type": "gemma", **_TEXT, "num_key_value_heads": 2, "head_dim": 8},
            vision_config={"model_type": "siglip_vision_model", **TOWER, "vision_use_head": False},
            image_token_index=3,
            image_token_id=3,
            projection_dim=32,
        ),
        both("git", "GitForCausalLM", "GitConfig", _pair, **_TEXT, vision_config=TOWER),
        both(
            "blip",
            "BlipForConditionalGeneration",
            "BlipConfig",
            _pair,
            text_config=_TOWER_TEXT | {"encoder_hidden_size": 32, "sep_token_id": 2},
            vision_config=TOWER,
            projection_dim=32,
        ),
    ]


def _visual_bert(shape: Shape) -> Batch:
    return Batch((), {"input_ids": tokens(shape), "visual_embeds": floats(shape.rows, 5, 16)})


def _lxmert(shape: Shape) -> Batch:
    return Batch(
        (),
        {
            "input_ids": tokens(shape),
            "visual_feats": floats(shape.rows, 5, 16),
            "visual_pos": torch.rand(shape.rows, 5, 4),
        },
    )
