"""Image models of timm: shrunk where the constructor allows it, small images everywhere."""

from __future__ import annotations

import importlib
from typing import Any

from torch import nn

from benchmarks.zoo.case import Case, images, without_dropout
from benchmarks.zoo.vision_ops import import_torchvision

import_torchvision()  # timm imports it

_EVAL = ("eval", "rows")
_ALL = ("eval", "train", "rows")
_VIT: dict[str, Any] = {"embed_dim": 32, "depth": 8, "num_heads": 4, "patch_size": 8}

_TABLE: tuple[tuple[str, int, int, tuple[str, ...], dict[str, Any]], ...] = (
    # without batch norm
    ("vit_tiny_patch16_224", 32, 8, _ALL, _VIT | {"img_size": 32}),
    ("deit_tiny_distilled_patch16_224", 32, 8, _ALL, _VIT | {"img_size": 32}),
    ("vit_base_patch16_siglip_224", 32, 8, _ALL, _VIT | {"img_size": 32}),
    ("vit_base_patch16_clip_224", 32, 8, _ALL, _VIT | {"img_size": 32}),
    ("vit_relpos_small_patch16_224", 32, 8, _ALL, _VIT | {"img_size": 32}),
    ("eva02_tiny_patch14_224", 32, 8, _ALL, _VIT | {"img_size": 32}),
    ("beit_base_patch16_224", 32, 8, _ALL, _VIT | {"img_size": 32}),
    ("cait_xxs24_224", 32, 8, _ALL, _VIT | {"img_size": 32}),
    (
        "swin_tiny_patch4_window7_224",
        32,
        8,
        _ALL,
        {"img_size": 32, "patch_size": 2, "embed_dim": 16, "depths": (2, 6), "num_heads": (2, 4), "window_size": 4},
    ),
    (
        "swinv2_tiny_window8_256",
        32,
        8,
        _ALL,
        {"img_size": 32, "patch_size": 2, "embed_dim": 16, "depths": (2, 6), "num_heads": (2, 4), "window_size": 4},
    ),
    ("convnext_atto", 32, 8, _ALL, {"depths": (2, 2, 4, 2), "dims": (8, 16, 24, 32)}),
    ("convnextv2_atto", 32, 8, _ALL, {"depths": (2, 2, 4, 2), "dims": (8, 16, 24, 32)}),
    ("mixer_s32_224", 64, 8, _ALL, {"img_size": 64}),
    ("gmlp_ti16_224", 64, 30, _ALL, {"img_size": 64}),
    ("resmlp_12_224", 64, 12, _ALL, {"img_size": 64}),
    ("xcit_nano_12_p16_224", 64, 8, _EVAL, {"img_size": 64, "embed_dim": 32, "depth": 8}),
    ("poolformer_s12", 64, 12, _ALL, {}),
    ("pvt_v2_b0", 64, 8, _ALL, {}),
    ("twins_pcpvt_small", 64, 8, _ALL, {"img_size": 64, "embed_dims": (16, 32, 40, 64), "depths": (2, 2, 2, 2)}),
    (
        "tnt_s_patch16_224",
        32,
        8,
        _ALL,
        {"img_size": 32, "embed_dim": 32, "inner_dim": 8, "depth": 8, "num_heads_outer": 4, "num_heads_inner": 2},
    ),
    ("davit_tiny", 64, 8, _ALL, {"embed_dims": (16, 32, 64, 64), "depths": (2, 2, 2, 2), "num_heads": (2, 4, 8, 8)}),
    ("hiera_tiny_224", 64, 8, _ALL, {"img_size": (64, 64), "embed_dim": 16, "stages": (2, 2, 2, 2)}),
    ("mvitv2_tiny", 64, 10, _ALL, {"img_size": 64}),
    ("nfnet_l0", 64, 12, _ALL, {}),
    # with batch norm: in eval mode only
    ("resnet18", 64, 8, _EVAL, {}),
    ("resnet26d", 64, 8, _EVAL, {}),
    ("resnext26ts", 64, 8, _EVAL, {}),
    ("legacy_seresnet18", 64, 8, _EVAL, {}),
    ("densenet121", 64, 58, _EVAL, {"block_config": (2, 2, 4, 2)}),
    ("regnetx_002", 64, 13, _EVAL, {}),
    ("regnety_002", 64, 13, _EVAL, {}),
    ("efficientnet_b0", 64, 16, _EVAL, {}),
    ("efficientnetv2_rw_t", 64, 20, _EVAL, {}),
    ("mobilenetv2_050", 64, 16, _EVAL, {}),
    ("mobilenetv3_small_050", 64, 11, _EVAL, {}),
    ("mnasnet_small", 64, 10, _EVAL, {}),
    ("ghostnet_050", 64, 16, _EVAL, {}),
    ("repvgg_a0", 64, 20, _EVAL, {}),
    ("hrnet_w18_small", 64, 8, _EVAL, {}),
    ("dla34", 64, 8, _EVAL, {}),
    ("res2net50_14w_8s", 64, 16, _EVAL, {}),
    ("resnest14d", 64, 4, _EVAL, {}),
    ("skresnet18", 64, 8, _EVAL, {}),
    ("dpn48b", 64, 8, _EVAL, {}),
    ("inception_v3", 96, 0, _EVAL, {}),
    ("xception41", 64, 12, _EVAL, {}),
    ("levit_128s", 64, 9, _EVAL, {"img_size": 64}),
    ("mobilevit_xxs", 64, 9, _EVAL, {}),
    ("coatnet_nano_rw_224", 64, 14, _EVAL, {"img_size": 64}),
    ("edgenext_xx_small", 64, 12, _EVAL, {}),
    ("fastvit_t8", 64, 12, _EVAL, {}),
    ("gcvit_xxtiny", 64, 8, _EVAL, {"img_size": 64}),
    ("cspresnet50", 64, 16, _EVAL, {}),
    ("rexnet_100", 64, 16, _EVAL, {}),
    ("tf_efficientnet_lite0", 64, 16, _EVAL, {}),
)


def _build(name: str, values: dict[str, Any]) -> nn.Module:
    timm = importlib.import_module("timm")
    return without_dropout(timm.create_model(name, pretrained=False, num_classes=5, **values))


def _ends(model: nn.Module) -> tuple[str, ...]:
    return tuple(
        n for n, _ in model.named_modules() if n.rpartition(".")[2] in ("head", "fc", "classifier", "patch_embed")
    )


def cases() -> list[Case]:
    """Return the cases of this file."""

    def case(name: str, size: int, blocks: int, checks: tuple[str, ...], values: dict[str, Any]) -> Case:
        return Case(name, "timm", lambda: _build(name, values), images(size), checks, blocks, _ends, "image")

    return [case(*entry) for entry in _TABLE]
