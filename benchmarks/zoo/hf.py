"""How models of transformers come into the zoo: tiny configs, no cache, no dropout, nothing downloaded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from benchmarks.zoo.case import Case, Shape, tokens, without_dropout
from tests.equivalence.equality import Batch

VOCABULARY = 96
TINY: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SEQ2SEQ: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "encoder_layers": 4,
    "decoder_layers": 4,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}
"""Sizes of an encoder and decoder as Bart's code names them."""
TOWER: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
}
"""Sizes of a tower of images."""
LONG = ("eval", "train", "rows", "length")
FIXED = ("eval", "train", "rows")
EVAL = ("eval", "rows")
TURNED = ("eval", "train", "rows", "length", "values")


def text(
    name: str,
    model: str,
    config: str,
    *,
    kind: str,
    blocks: int = 8,
    labels: bool = False,
    mask: bool = False,
    full: bool = False,
    inputs: Callable[[Shape], Batch] | None = None,
    checks: tuple[str, ...] = LONG,
    tiny: bool = True,
    call: dict[str, Any] | None = None,
    **values: Any,
) -> Case:
    """Return a case with token inputs, see :func:`token_batch`; ``values`` change the config."""
    return Case(
        name,
        "transformers",
        lambda: build(model, config, (TINY | values) if tiny else values),
        inputs or (lambda shape: token_batch(shape, labels=labels, mask=mask, full=full, call=call)),
        checks,
        blocks,
        ends,
        kind,
    )


def other(
    name: str,
    model: str,
    config: str,
    inputs: Callable[[Shape], Batch],
    *,
    kind: str,
    blocks: int = 0,
    checks: tuple[str, ...] = FIXED,
    **values: Any,
) -> Case:
    """Return a case whose inputs are not just tokens."""
    return Case(name, "transformers", lambda: build(model, config, values), inputs, checks, blocks, ends, kind)


def build(model: str, config: str, values: dict[str, Any]) -> nn.Module:
    """Make a model from its config class and values, with all dropout off and no cache returned."""
    made = getattr(transformers, config)(**values)
    quiet(made)
    kind = getattr(transformers, model)
    return without_dropout(kind._from_config(made) if model.startswith("Auto") else kind(made))


def quiet(config: Any) -> None:
    """Set every dropout probability of a config and of the configs in it to zero, and switch caches off."""
    for name, value in list(vars(config).items()):
        if isinstance(value, transformers.PreTrainedConfig):
            quiet(value)
        elif isinstance(value, float) and ("drop" in name or name.endswith("pdrop")):
            setattr(config, name, 0.0)
    if getattr(config, "use_cache", False):
        config.use_cache = False


def token_batch(
    shape: Shape, *, labels: bool = False, mask: bool = False, full: bool = False, call: dict[str, Any] | None = None
) -> Batch:
    """Return random tokens; a mask leaves out the end of some rows, a full one of none; labels ignore what it does."""
    found = tokens(shape)
    given: dict[str, Any] = {"input_ids": found}
    if mask:
        attention = torch.ones_like(found)
        if not full or shape.turned:
            attention[1 : shape.rows // 2, shape.length - 4 :] = 0
        given["attention_mask"] = attention
    if labels:
        given["labels"] = found.masked_fill(given["attention_mask"] == 0, -100) if mask else found.clone()
    return Batch((), given | (call or {}))


def seq2seq(shape: Shape, *, labels: bool = False) -> Batch:
    """Return tokens for an encoder and for a decoder, or labels from which the model makes the latter."""
    target = tokens(Shape(shape.rows, 6))
    return Batch((), {"input_ids": tokens(shape), ("labels" if labels else "decoder_input_ids"): target})


def pixels(size: int, channels: int = 3, **more: Any) -> Callable[[Shape], Batch]:
    """Return what makes batches of random images for keyword ``pixel_values``."""
    return lambda shape: Batch((), {"pixel_values": torch.randn(shape.rows, channels, size, size), **more})


def ends(model: nn.Module) -> Sequence[str]:
    """Return the names of a transformers model's embeddings and head."""
    chosen: list[nn.Module] = []
    for name in ("get_input_embeddings", "get_output_embeddings"):
        try:
            chosen.append(getattr(model, name)())
        except (NotImplementedError, AttributeError):
            continue
    heads = (
        *("lm_head", "classifier", "score", "qa_outputs", "cls", "head"),
        *("embeddings", "embedder", "embed_tokens", "patch_embed"),
    )
    names = [n for n, m in model.named_modules() if any(m is c for c in chosen) or n.rpartition(".")[2] in heads]
    return [n for n in names if n]


def floats(*sizes: int) -> Tensor:
    """Return normal numbers."""
    return torch.randn(*sizes)
