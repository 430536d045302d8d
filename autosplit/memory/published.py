"""Published formulas of a transformer's memory: what a prediction is held against.

Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models" (arXiv 2205.05198), for a layer
of GPT: layer norm, attention with dropout of its s x s scores, layer norm, an MLP four times as wide, two dropouts;
16-bit activations, masks of one byte.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TransformerShape:
    """What one microbatch brings to a layer: s, b, h and a of the paper, and over how many devices t a layer is cut."""

    sequence: int
    batch: int
    hidden: int
    heads: int
    tensor_parallel: int = 1

    @property
    def stream_elements(self) -> int:
        """Elements of one copy of the residual stream: s b h."""
        return self.sequence * self.batch * self.hidden


def layer_activation_bytes(
    shape: TransformerShape, *, sequence_parallel: bool = False, selective_recompute: bool = False
) -> float:
    """Return what a layer saves for its backward, per device and microbatch (2205.05198, section 4).

    ``s b h (34 + 5 a s / h)`` on one device: 11 s b h + 5 a s^2 b for attention, 19 for the MLP, 4 for two layer norms.
    Tensor parallelism cuts all but the 10 of layer norms, dropouts and block inputs by t, sequence parallelism these
    too; selective recompute leaves the 5 a s / h of softmax, its dropout and the scores to the backward.
    """
    scores = 0.0 if selective_recompute else 5 * shape.heads * shape.sequence / shape.hidden
    cut = (24 + scores) / shape.tensor_parallel
    whole = 10 / shape.tensor_parallel if sequence_parallel else 10
    return shape.stream_elements * (whole + cut)


def first_device_activation_bytes(
    shape: TransformerShape,
    *,
    layers: int,
    stages: int,
    virtual_stages: int = 1,
    sequence_parallel: bool = False,
    selective_recompute: bool = False,
) -> float:
    """Return what the first pipeline device saves under (interleaved) 1F1B (2205.05198, section 4).

    It holds ``stages`` microbatches of its ``layers / stages`` layers, so all layers once; interleaved
    ``1 + (stages - 1) / (stages * virtual_stages)`` times as much.
    """
    layer = layer_activation_bytes(shape, sequence_parallel=sequence_parallel, selective_recompute=selective_recompute)
    interleaved = 1 + (stages - 1) / (stages * virtual_stages) if virtual_stages > 1 else 1.0
    return layers * layer * interleaved


def layer_parameters(hidden: int) -> int:
    """Return a layer's weights, 4 h^2 in attention and 8 h^2 in the MLP, without biases and norms."""
    return 12 * hidden * hidden
