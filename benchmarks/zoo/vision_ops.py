"""torchvision on a torch without CUDA: its extension from the package index does not load there.

Importing torchvision then fails at "torchvision::nms does not exist". :func:`import_torchvision` defines the operators
first, with the one that one-stage detection needs in plain torch, and says to torchvision that it has them.
"""

from __future__ import annotations

import functools
import importlib
import sys

import torch
from torch import Tensor

_SCHEMAS = (
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "roi_align(Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, SymInt pooled_width, "
    "int sampling_ratio, bool aligned) -> Tensor",
    "_roi_align_backward(Tensor grad, Tensor rois, float spatial_scale, SymInt pooled_height, SymInt pooled_width, "
    "SymInt batch_size, SymInt channels, SymInt height, SymInt width, int sampling_ratio, bool aligned) -> Tensor",
    "roi_pool(Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, SymInt pooled_width) "
    "-> (Tensor, Tensor)",
    "ps_roi_align(Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, SymInt pooled_width, "
    "int sampling_ratio) -> (Tensor, Tensor)",
    "ps_roi_pool(Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, SymInt pooled_width) "
    "-> (Tensor, Tensor)",
    "deform_conv2d(Tensor input, Tensor weight, Tensor offset, Tensor mask, Tensor bias, SymInt stride_h, "
    "SymInt stride_w, SymInt pad_h, SymInt pad_w, SymInt dilation_h, SymInt dilation_w, SymInt groups, "
    "SymInt offset_groups, bool use_mask) -> Tensor",
)


@functools.cache
def import_torchvision() -> tuple[torch.library.Library, ...]:
    """Import torchvision; return the library that holds the operators defined here, if they were needed."""
    try:
        importlib.import_module("torchvision")
    except RuntimeError as error:
        if "does not exist" not in str(error):
            raise
    else:
        return ()
    for name in [n for n in sys.modules if n.split(".")[0] == "torchvision"]:
        del sys.modules[name]
    library = torch.library.Library("torchvision", "DEF")
    for schema in _SCHEMAS:
        library.define(schema)
    library.impl("nms", _nms, "CPU")
    importlib.import_module("torchvision")
    importlib.import_module("torchvision.extension")._has_ops = lambda: True
    return (library,)


def _nms(boxes: Tensor, scores: Tensor, iou_threshold: float) -> Tensor:
    """Greedy non-maximum suppression: indices of the kept boxes, best first."""
    overlap = importlib.import_module("torchvision.ops").box_iou(boxes, boxes)
    kept: list[int] = []
    for index in scores.argsort(descending=True, stable=True).tolist():
        if not kept or float(overlap[index, kept].max()) <= iou_threshold:
            kept.append(index)
    return torch.tensor(kept, dtype=torch.int64)
