"""The models of transformers whose configurations carry a tensor-parallel plan, small enough to record in seconds.

A configuration keeps its own widths where its model can be recorded without values; else it is shrunk and gets values.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from torch import nn

from autosplit.options import Sample
from autosplit.trace.graph import TracedGraph
from autosplit.trace.ladder import trace
from autosplit.trace.recording.recording import FirstCall

ROWS = 2
SMALL = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "head_dim": 32}
SMALL |= {"num_key_value_heads": 4, "moe_intermediate_size": 128, "pad_token_id": 0, "n_group": 1, "topk_group": 1}
SMALL |= dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 8)
SMALL |= {"num_experts_per_tok": 2, "top_k_experts": 2, "n_shared_experts": 1, "index_topk": 16}
SMALL |= dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 32)
SMALL |= {"q_lora_rank": 64, "kv_lora_rank": 64, "vocab_size_per_layer_input": 512}
FEW = {"first_k_dense_replace": 1, "num_dense_layers": 1, "num_kv_shared_layers": 0}
"""Counts of layers that are as large as those of a whole model by default."""
_KINDS = {"layer_types": "full_attention", "mlp_layer_types": "sparse"}
"""Kinds of layers where a configuration has no list of them by default."""
_LAYERS = ("num_hidden_layers", "num_layers", "n_layer", "encoder_layers", "decoder_layers", "depth")
_MOST = 60_000_000
"""Parameters of a model that gets values."""


def families() -> dict[str, type]:
    """Return the configuration classes with a plan of their own, by their folders and names."""
    found: dict[str, type] = {}
    for folder in pkgutil.iter_modules(transformers.models.__path__):
        package = importlib.import_module(f"transformers.models.{folder.name}")
        for file in pkgutil.iter_modules(package.__path__):
            if file.name.startswith("configuration_"):
                module = importlib.import_module(f"{package.__name__}.{file.name}")
                for kind in vars(module).values():
                    own = isinstance(kind, type) and kind.__module__ == module.__name__
                    if own and kind.__dict__.get("base_model_tp_plan"):
                        found[f"{folder.name}:{kind.__name__}"] = kind
    return found


# -- configurations ----------------------------------------------------------------------------------------------------
def model_of(kind: type, **values: Any) -> nn.Module:
    """Return a configuration's base model on meta, with as few layers as have one of each kind, without a cache.

    ``values`` are tried for the settings that it has; those without a default take SMALL's where they are needed.
    """
    error: Exception = ValueError("none of the settings that were tried is a configuration")
    for config in _configurations(kind, values):
        config.use_cache = False
        try:
            with torch.device("meta"):
                return model_class(kind)(config).eval()  # type: ignore[no-any-return]
        except Exception as raised:  # other settings are tied to these
            error = raised
    raise error


def _configurations(kind: type, values: dict[str, Any]) -> Iterator[Any]:
    config = kind()
    known = {name: value for name, value in (FEW | values).items() if _get(config, name) is not None}
    if _get(config, "kv_lora_rank") and "num_key_value_heads" in known:  # each head has keys of its own
        known["num_key_value_heads"] = known["num_attention_heads"]
    empty = {name: value for name, value in SMALL.items() if _get(config, name, value) is None}
    layers = _fewer_layers(config)
    count = layers.get("num_hidden_layers", 2)
    empty |= {name: [one] * count for name, one in _KINDS.items() if _get(config, name, one) is None}
    for settings in (known | layers, known | layers | empty, layers, layers | empty):
        with contextlib.suppress(Exception):  # other settings are tied to these
            config = kind(**settings)
            for name in getattr(kind, "sub_configs", {}):
                if (part := _get(config, name)) is not None:
                    setattr(config, name, next(_configurations(type(part), values)))
            yield config


def _fewer_layers(config: Any) -> dict[str, Any]:
    """Return settings that leave the first layer of each kind, two layers at least."""
    chosen: dict[str, Any] = {}
    for name in _LAYERS:
        count = _get(config, name)
        if isinstance(count, int) and count > 2:
            lists = {key: v for key, v in vars(config).items() if isinstance(v, list) and len(v) == count}
            numbers = {key for key, v in lists.items() if v == [*range(count)]}
            layers = _one_of_each(count, [v for key, v in lists.items() if key not in numbers])
            chosen[name] = len(layers)
            for key, v in lists.items():
                chosen[key] = [*range(len(layers))] if key in numbers else [v[n] for n in layers]
    return chosen


def _get(config: Any, name: str, default: Any = None) -> Any:
    with contextlib.suppress(Exception):  # settings that differ by layer raise
        return getattr(config, name, default)
    return default


def _one_of_each(count: int, lists: list[list[Any]]) -> list[int]:
    """Return the first layer of each kind, two at least."""
    first: dict[Any, int] = {}
    for layer, kind in enumerate(zip(*lists, strict=True) if lists else [()] * count):
        first.setdefault(str(kind), layer)
    layers = sorted(first.values())
    return layers if len(layers) > 1 else list(range(min(2, count)))


def model_class(kind: type) -> type:
    """Return the base model of a configuration class."""
    if kind in transformers.MODEL_MAPPING:
        return transformers.MODEL_MAPPING[kind]  # type: ignore[no-any-return]
    module = importlib.import_module(kind.__module__.replace("configuration_", "modeling_"))
    found = [c for c in vars(module).values() if isinstance(c, type) and c.__module__ == module.__name__]
    found = [c for c in found if c.__dict__.get("config_class") is kind or _annotated(c) is kind]
    found = [
        c for c in found if issubclass(c, transformers.PreTrainedModel) and not c.__name__.endswith("PreTrainedModel")
    ]
    return min(found, key=lambda c: len(c.__name__))


def _annotated(kind: type) -> Any:
    hint = inspect.get_annotations(kind).get("config")
    return getattr(importlib.import_module(kind.__module__), hint, None) if isinstance(hint, str) else hint


# -- recordings --------------------------------------------------------------------------------------------------------
def recorded(kind: type, *, length: int = 64) -> tuple[nn.Module, TracedGraph, str]:
    """Return a base model and its recording: on meta with its own widths, or small with values where that fails."""
    try:
        model = model_of(kind)
        return model, recording(model, inputs(model, length)).graph, "own widths"
    except Exception as first:  # what cannot be recorded without values, such as a forward that reads one
        try:
            model = model_with_values(kind)
            return model, recording(model, inputs(model, length)).graph, "small"
        except Exception as second:
            said = f"own widths: {_said(first)}; small: {_said(second)}; without a recording {_plain(kind, length)}"
            raise RuntimeError(said) from second


def _plain(kind: type, length: int) -> str:
    """Say whether a small model runs by itself."""
    try:
        model = model_with_values(kind)
        sample = inputs(model, length)
        with torch.no_grad():
            model(*sample.args, **sample.kwargs)
    except Exception as error:  # the model's own
        return _said(error)
    return "it runs"


def recording(model: nn.Module, sample: Sample) -> Any:
    """Return what recording a model gives, after a first call where it needs one."""
    try:
        return trace(model, sample)
    except FirstCall:
        with torch.no_grad():
            model(*sample.args, **sample.kwargs)
        return trace(model, sample)


def _said(error: Exception) -> str:
    text = re.sub(r"/\S*/site-packages/", "", str(error))
    return f"{type(error).__name__}: {text[:160]}"


def model_with_values(kind: type) -> nn.Module:
    """Return a small base model with values."""
    model = model_of(kind, **SMALL)
    count = sum(p.numel() for p in model.parameters())
    if count > _MOST:
        raise ValueError(f"its smallest model has {count} parameters")
    torch.manual_seed(0)
    return type(model)(model.config).eval()  # type: ignore[no-any-return]


def inputs(model: nn.Module, length: int) -> Sample:
    """Return tokens or pixels for a model, on its device."""
    device = next(model.parameters()).device
    names = inspect.signature(model.forward).parameters
    if "input_ids" in names:
        return Sample(input_ids=torch.arange(ROWS * length, device=device).view(ROWS, length) % 97 + 3)
    size = getattr(model.config, "image_size", None)
    if "pixel_values" not in names or size is None:
        raise ValueError(f"it takes neither tokens nor images of one size: {', '.join(names)}")
    return Sample(pixel_values=torch.zeros(ROWS, 3, size, size, device=device))
