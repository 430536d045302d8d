"""Vision models of transformers."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from benchmarks.zoo.case import Case, Shape
from benchmarks.zoo.hf import EVAL, FIXED, TOWER, floats, other, pixels
from tests.equivalence.equality import Batch

_SWIN: dict[str, Any] = {
    "image_size": 32,
    "patch_size": 2,
    "embed_dim": 16,
    "depths": [2, 6],
    "num_heads": [2, 4],
    "window_size": 4,
    "drop_path_rate": 0.0,
}
_TOWER = TOWER | {"num_hidden_layers": 8}
_VIT = _TOWER | {"num_labels": 5}


def cases() -> list[Case]:
    """Return the cases of this file."""
    vision = partial(other, kind="vision", blocks=8)

    def image(name: str, family: str, *, blocks: int = 8, size: int = 32, **values: Any) -> Case:
        checks = values.pop("checks", FIXED)
        model, config = f"{family}ForImageClassification", f"{family}Config"
        return vision(name, model, config, pixels(size), blocks=blocks, checks=checks, **values)

    return [
        image("vit", "ViT", **_VIT),
        image("deit", "DeiT", **_VIT),
        image("beit", "Beit", **_VIT, drop_path_rate=0.0, use_relative_position_bias=True),
        image("data2vec-vision", "Data2VecVision", **_VIT, drop_path_rate=0.0),
        image("dinov2", "Dinov2", **{k: v for k, v in _VIT.items() if k != "intermediate_size"}, mlp_ratio=2),
        image("swin", "Swin", **_SWIN),
        image("swinv2", "Swinv2", **_SWIN),
        image("convnext", "ConvNext", depths=[2, 2, 4, 2], hidden_sizes=[8, 16, 24, 32], drop_path_rate=0.0),
        image("convnextv2", "ConvNextV2", depths=[2, 2, 4, 2], hidden_sizes=[8, 16, 24, 32], drop_path_rate=0.0),
        image(
            "pvt",
            "Pvt",
            size=64,
            image_size=64,
            drop_path_rate=0.0,
            hidden_sizes=[16, 32, 40, 64],
            num_attention_heads=[1, 2, 4, 8],
            depths=[2, 2, 2, 2],
        ),
        image(
            "segformer",
            "Segformer",
            size=64,
            hidden_sizes=[16, 32, 40, 64],
            num_attention_heads=[1, 2, 4, 8],
            drop_path_rate=0.0,
            depths=[2, 2, 2, 2],
        ),
        image(
            "mobilevit",
            "MobileViT",
            size=64,
            image_size=64,
            hidden_sizes=[16, 24, 32],
            neck_hidden_sizes=[8, 8, 8, 16, 16, 16, 24],
            checks=EVAL,
        ),
        image(
            "poolformer", "PoolFormer", size=64, hidden_sizes=[16, 24, 32, 40], depths=[2, 2, 2, 2], drop_path_rate=0.0
        ),
        image("resnet", "ResNet", embedding_size=8, hidden_sizes=[16, 24, 32, 40], depths=[2, 2, 2, 2], checks=EVAL),
        image(
            "regnet",
            "RegNet",
            embedding_size=8,
            hidden_sizes=[16, 24, 32, 40],
            depths=[2, 2, 2, 2],
            groups_width=8,
            checks=EVAL,
        ),
        image(
            "focalnet",
            "FocalNet",
            size=32,
            image_size=32,
            embed_dim=16,
            depths=[2, 4, 2],
            focal_levels=[1, 1, 1],
            focal_windows=[3, 3, 3],
            patch_size=2,
            drop_path_rate=0.0,
        ),
        image(
            "hiera",
            "Hiera",
            image_size=[32, 32],
            patch_size=[3, 3],
            patch_stride=[2, 2],
            patch_padding=[1, 1],
            embed_dim=16,
            depths=[2, 6],
            num_heads=[1, 2],
            masked_unit_size=[4, 4],
            query_stride=[2, 2],
            num_query_pool=1,
            drop_path_rate=0.0,
        ),
        image("mobilenet-v2", "MobileNetV2", depth_multiplier=0.35, checks=EVAL, blocks=16),
        vision(
            "vit-mae",
            "ViTMAEForPreTraining",
            "ViTMAEConfig",
            _masked_images,
            **_TOWER,
            decoder_hidden_size=16,
            decoder_num_hidden_layers=2,
            decoder_num_attention_heads=2,
            decoder_intermediate_size=32,
        ),
        vision(
            "yolos",
            "YolosForObjectDetection",
            "YolosConfig",
            pixels(32),
            **(_VIT | {"image_size": [32, 32]}),
            num_detection_tokens=5,
        ),
        vision(
            "dpt",
            "DPTForDepthEstimation",
            "DPTConfig",
            pixels(32),
            **_TOWER,
            backbone_out_indices=[1, 3, 5, 7],
            neck_hidden_sizes=[8, 8, 16, 16],
            fusion_hidden_size=16,
            is_hybrid=False,
            checks=EVAL,
        ),
        vision(
            "videomae", "VideoMAEForVideoClassification", "VideoMAEConfig", _video, **_VIT, num_frames=4, tubelet_size=2
        ),
        vision(
            "segformer-segmentation",
            "SegformerForSemanticSegmentation",
            "SegformerConfig",
            pixels(64),
            hidden_sizes=[16, 32, 40, 64],
            num_attention_heads=[1, 2, 4, 8],
            decoder_hidden_size=16,
            drop_path_rate=0.0,
            checks=EVAL,
        ),
    ]


def _masked_images(shape: Shape) -> Batch:
    return Batch((), {"pixel_values": floats(shape.rows, 3, 32, 32), "noise": torch.rand(shape.rows, 16)})


def _video(shape: Shape) -> Batch:
    return Batch((), {"pixel_values": floats(shape.rows, 4, 3, 32, 32)})
