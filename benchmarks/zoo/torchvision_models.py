"""Models of torchvision: classification, segmentation, video, optical flow and detection."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.zoo.case import Case, Shape, images, without_dropout
from benchmarks.zoo.vision_ops import import_torchvision
from tests.equivalence.equality import Batch

import_torchvision()

_EVAL = ("eval", "rows")
_ALL = ("eval", "train", "rows")

_CLASSIFIERS: tuple[tuple[str, int, int, tuple[str, ...], dict[str, Any]], ...] = (
    ("alexnet", 64, 0, _ALL, {}),
    ("squeezenet1_1", 64, 8, _ALL, {}),
    ("convnext_tiny", 32, 18, _ALL, {"stochastic_depth_prob": 0.0}),
    ("vit_b_16", 32, 12, _ALL, {"image_size": 32}),
    ("swin_t", 32, 12, _ALL, {}),
    ("swin_v2_t", 32, 12, _ALL, {}),
    ("resnet18", 64, 8, _EVAL, {}),
    ("resnet50", 64, 16, _EVAL, {}),
    ("resnext50_32x4d", 64, 16, _EVAL, {}),
    ("wide_resnet50_2", 32, 16, _EVAL, {}),
    ("densenet121", 64, 58, _EVAL, {}),
    ("googlenet", 64, 9, _EVAL, {"init_weights": False, "aux_logits": False}),
    ("googlenet-aux", 64, 9, _EVAL, {"init_weights": False, "aux_logits": True}),
    ("inception_v3", 96, 0, _EVAL, {"init_weights": False, "aux_logits": False}),
    ("mobilenet_v2", 64, 17, _EVAL, {}),
    ("mobilenet_v3_small", 64, 11, _EVAL, {}),
    ("mobilenet_v3_large", 64, 15, _EVAL, {}),
    ("mnasnet0_5", 64, 17, _EVAL, {}),
    ("shufflenet_v2_x0_5", 64, 16, _EVAL, {}),
    ("efficientnet_b0", 64, 16, _EVAL, {}),
    ("efficientnet_v2_s", 32, 40, _EVAL, {}),
    ("regnet_x_400mf", 64, 22, _EVAL, {}),
    ("regnet_y_400mf", 64, 16, _EVAL, {}),
)


def _plain(name: str, values: dict[str, Any], **more: Any) -> Callable[[], nn.Module]:
    models = importlib.import_module("torchvision.models")
    classes = {} if "num_classes" in more else {"num_classes": 5}
    return lambda: without_dropout(models.get_model(name.split("-")[0], weights=None, **(classes | values | more)))


def _ends(model: nn.Module) -> tuple[str, ...]:
    return tuple(n for n, _ in model.named_modules() if n.rpartition(".")[2] in ("fc", "classifier", "heads", "head"))


def _video(shape: Shape) -> Batch:
    return Batch((torch.randn(shape.rows, 3, 8, 32, 32),))


def _two_images(shape: Shape) -> Batch:
    return Batch(tuple(torch.rand(shape.rows, 3, 128, 128) for _ in range(2)))


def _image_list(shape: Shape) -> Batch:
    return Batch(([torch.rand(3, 48 + 4 * (i % 3), 64) for i in range(min(shape.rows, 3))],))


def others() -> list[Case]:
    """Return segmentation, video, optical flow and detection models."""
    small = {"weights_backbone": None}
    boxes = small | {"min_size": 64, "max_size": 96, "num_classes": 4}
    entries: list[tuple[str, Callable[[Shape], Batch], int, dict[str, Any]]] = [
        ("fcn_resnet50", images(64), 16, small),
        ("deeplabv3_mobilenet_v3_large", images(64), 15, small),
        ("lraspp_mobilenet_v3_large", images(64), 15, small),
        ("r3d_18", _video, 8, {}),
        ("mc3_18", _video, 8, {}),
        ("r2plus1d_18", _video, 8, {}),
        ("retinanet_resnet50_fpn", _image_list, 16, boxes),
        ("fcos_resnet50_fpn", _image_list, 16, boxes),
        ("ssdlite320_mobilenet_v3_large", _image_list, 15, small | {"num_classes": 4}),
    ]
    found = [
        Case(name, "torchvision", _plain(name, values), inputs, _EVAL, blocks, _ends, "image")
        for name, inputs, blocks, values in entries
    ]
    flow = Case("raft_small", "torchvision", _flow, _two_images, _EVAL, 0, _ends, "image")
    return [*found, flow]


def _flow() -> nn.Module:
    models = importlib.import_module("torchvision.models.optical_flow")
    model: nn.Module = models.raft_small(weights=None)
    return without_dropout(model)


def cases() -> list[Case]:
    """Return the cases of this file."""
    classifiers = [
        Case(name, "torchvision", _plain(name, values), images(size), checks, blocks, _ends, "image")
        for name, size, blocks, checks, values in _CLASSIFIERS
    ]
    return [*classifiers, *others()]
