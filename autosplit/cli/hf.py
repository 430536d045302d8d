"""``hf:config.json``: a transformers model built on the meta device from its config file, and inputs that suit it.

Config files come from strangers: they are read as data. Code that a config names (``auto_map``), kernels and backbones
that it would fetch are left out; the model is one of the classes that the installed transformers has.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import inspect
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from autosplit.cli.common import caused_by
from autosplit.cli.inputs import CONFIG_PREFIX, InputSpec, read_config
from autosplit.errors import InputError
from autosplit.planning.explain.extremes import POSITIONS, positions_of
from autosplit.progress import phase
from autosplit.units import format_bytes

MOST_BYTES = 4 * 2**30
"""The parameters that a config's model gets values for; nobody who names a config has asked for more memory."""
_MOST_TOKENS, _TOKENS_UNSAID = 4096, 512
_FETCHES = ("attn_implementation", "_attn_implementation", "experts_implementation", "_experts_implementation")
"""Entries that may name kernels of the hub, which transformers would fetch and run."""
_LANGUAGE_HEADS = (
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING",
    "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING",
    "MODEL_FOR_MASKED_LM_MAPPING",
    "MODEL_FOR_CAUSAL_LM_MAPPING",
)
"""Heads whose labels are tokens."""
_IMAGE_HEAD = "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING"
_HEADS = (*_LANGUAGE_HEADS, _IMAGE_HEAD, "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING", "MODEL_MAPPING")
"""What a config without ``architectures`` becomes: the first that knows it; encoders have a causal head too."""


def build(target: str, *, kwargs: Mapping[str, Any], blank: bool) -> nn.Module:
    """Return the model of a config file, in the config's dtype and without a cache of past keys.

    ``kwargs`` take the place of entries of the config. ``blank``: on the meta device; else with random values on the
    CPU, where these are no more than `MOST_BYTES`. InputError: the file cannot be read, its ``model_type`` is unknown
    to the installed transformers, no model can be made of it, or it is too large for values.
    """
    data = _harmless(read_config(target) | dict(kwargs))
    dtype = _dtype(data.pop("torch_dtype", None), data.pop("dtype", None), target=target)
    with phase("importing"):
        transformers = _transformers()
        config_class = _config_class(transformers, data, target=target)
    try:
        config = config_class.from_dict(data)
        for settings in (config, config.get_text_config()):
            if hasattr(settings, "use_cache"):
                settings.use_cache = False
        with phase("importing"):
            model_class = _model_class(transformers, config)
        with _default_dtype(dtype), torch.device("meta"):
            model: nn.Module = model_class(config)
        size = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
        if not blank and size <= MOST_BYTES:
            with _default_dtype(dtype):
                model = model_class(config)
        if getattr(model, "loss_type", "") is None:
            model.loss_type = "ForCausalLM"  # type: ignore[assignment]  # what transformers takes then, with a warning
    except InputError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {error}{caused_by(error)}"
        raise InputError(f"{target}: transformers makes no {data['model_type']} of this config: {reason}") from error
    if not blank and size > MOST_BYTES:
        raise InputError(
            f"{target} has {format_bytes(size)} of parameters, and a config's model gets values up to "
            f"{format_bytes(MOST_BYTES)}; autosplit plan, and autosplit profile --device NAME, need none"
        )
    return model


def default_inputs(
    model: nn.Module, *, batch: int, sequence: int | None, labels: bool | None = False
) -> list[InputSpec]:
    """Return the inputs of a transformers model as its config describes them; InputError where it does not.

    ``batch`` is the rows of a step, ``sequence`` the tokens of a row (what the model can take, at most 4096). With
    ``labels`` the model makes its loss; None: where it takes them, True: or InputError.
    """
    config: Any = model.config
    text = config.get_text_config()
    main = str(getattr(model, "main_input_name", "input_ids"))
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    vocabulary = getattr(text, "vocab_size", None)
    tokens = _tokens(text) if sequence is None else sequence
    _check_positions(model, text, tokens)
    specs = []
    if main == "input_ids" and vocabulary:
        specs.append(InputSpec.tensor("input_ids", "int64", (batch, tokens), vocabulary))
        taken = inspect.signature(model.forward).parameters
        seen = hasattr(getattr(config, "vision_config", None), "image_size")
        if "return_loss" in taken and "pixel_values" in taken and seen:
            specs.append(_images(config.vision_config, dtype=dtype, batch=batch))  # CLIP and the like compare the two
    elif main == "pixel_values":
        specs.append(_images(config, dtype=dtype, batch=batch))
    elif main == "input_features" and hasattr(config, "max_source_positions"):
        specs.append(InputSpec.tensor(main, dtype, (batch, config.num_mel_bins, 2 * config.max_source_positions)))
        tokens = config.max_target_positions if sequence is None else sequence
    else:
        heard = f", such as {main}={dtype}[{batch},160000] for ten seconds at 16 kHz"
        example = heard if main == "input_values" and hasattr(config, "conv_stride") else ""
        raise InputError(
            f"the config of {type(model).__name__} does not say what its {main} look like; give --input{example}"
        )
    if config.is_encoder_decoder and "decoder_input_ids" in inspect.signature(model.forward).parameters:
        specs.append(InputSpec.tensor("decoder_input_ids", "int64", (batch, tokens), vocabulary))
    if labels is not False:
        specs += _labels(model, batch=batch, tokens=tokens, vocabulary=vocabulary, needed=labels is True)
    return specs


def _labels(model: nn.Module, *, batch: int, tokens: int, vocabulary: int | None, needed: bool) -> Iterator[InputSpec]:
    """Yield what the model of a language or of images makes its loss from, where it has such a head."""
    config: Any = model.config
    kind = next((head for head, classes in _heads(config) if type(model) in classes), None)
    classes = getattr(config, "num_labels", None)
    if "labels" in inspect.signature(model.forward).parameters:
        if kind == _IMAGE_HEAD and classes:
            yield InputSpec.tensor("labels", "int64", (batch,), classes)
            return
        if kind in _LANGUAGE_HEADS and vocabulary:
            yield InputSpec.tensor("labels", "int64", (batch, tokens), vocabulary)
            return
    if needed:
        raise InputError(f"it is not known which labels {type(model).__name__} makes a loss from; give --input")


def _heads(config: Any) -> Iterator[tuple[str, tuple[type, ...]]]:
    """Yield the heads that transformers has for a config, and their classes."""
    modeling = _transformers().models.auto.modeling_auto
    for head in _HEADS:
        mapping = getattr(modeling, head, {})
        if type(config) in mapping:
            classes = mapping[type(config)]
            yield head, classes if isinstance(classes, tuple) else (classes,)


def _tokens(config: Any) -> int:
    named = (getattr(config, key, None) for key in POSITIONS)
    positions = next((count for count in named if isinstance(count, int) and count > 0), _TOKENS_UNSAID)
    # The two first positions of RoBERTa's table stand for padding, and no row may be as long as the table.
    special = 2 if config.model_type in ("roberta", "xlm-roberta", "camembert", "longformer") else 0
    return max(1, min(positions - special, _MOST_TOKENS))


def _check_positions(model: nn.Module, config: Any, tokens: int) -> None:
    """Raise InputError for more tokens than a table of learned positions has; warn where the config names fewer."""
    positions = positions_of(model)
    if positions is None or tokens <= positions:
        return
    name = next(key for key in POSITIONS if getattr(config, key, None) == positions)
    text = f"rows of {tokens} tokens, and the config has {name}={positions}"
    sizes = {module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)}
    if any(positions <= size <= positions + 2 for size in sizes - {getattr(config, "vocab_size", None)}):
        raise InputError(
            f"{text}, which a table of learned positions has; give fewer, or --kwargs '{{\"{name}\": ...}}'"
        )
    warnings.warn(text, stacklevel=2)


def _images(config: Any, *, dtype: str, batch: int) -> InputSpec:
    frames = [config.num_frames] if hasattr(config, "num_frames") else []
    shape = (batch, *frames, getattr(config, "num_channels", None) or 3, *_image_size(config))
    return InputSpec.tensor("pixel_values", dtype, shape)


def _image_size(config: Any) -> tuple[int, int]:
    size = getattr(config, "image_size", None) or 224
    if isinstance(size, dict):
        size = (size.get("height"), size.get("width"))
    height, width = size if isinstance(size, (list, tuple)) and len(size) == 2 else (size, size)
    if not (isinstance(height, int) and isinstance(width, int)):
        raise InputError(f"the config has image_size={size!r}, no number of pixels; give --input")
    return height, width


def _harmless(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config's entries without those that make transformers fetch something."""
    kept = {name: _harmless(value) if isinstance(value, dict) else value for name, value in data.items()}
    for name in _FETCHES:
        kept.pop(name, None)
    return kept | ({"use_pretrained_backbone": False} if "use_pretrained_backbone" in kept else {})


def _dtype(*named: Any, target: str) -> torch.dtype:
    name = next((text for text in named if text not in (None, "auto")), "float32")
    dtype = getattr(torch, str(name).removeprefix("torch."), None)
    if dtype not in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        raise InputError(f"{target}: dtype {name!r} is none of float32, float64, float16, bfloat16")
    return dtype


def _transformers() -> Any:
    try:
        return importlib.import_module("transformers")
    except Exception as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name == "transformers"
        way_out = "; pip install transformers" if missing else ""
        raise InputError(
            f"{CONFIG_PREFIX} needs transformers: {type(error).__name__}: {error}{caused_by(error)}{way_out}"
        ) from error


def _config_class(transformers: Any, data: Mapping[str, Any], *, target: str) -> Any:
    family = data.get("model_type")
    if not isinstance(family, str):
        raise InputError(f"{target} names no model_type, so it is no config of transformers; add one, such as llama")
    known = transformers.CONFIG_MAPPING
    if family not in known:
        near = difflib.get_close_matches(family, list(known.keys()), n=3)
        hint = f"; near it: {', '.join(near)}" if near else ""
        note = "; the code that its auto_map names is not run" if "auto_map" in data else ""
        raise InputError(
            f"{target}: transformers {transformers.__version__} has no model_type {family!r}{hint}{note}; write a "
            "factory that builds the model, and name it as file.py:factory"
        )
    return known[family]


def _model_class(transformers: Any, config: Any) -> Any:
    named = next(iter(config.architectures or ()), None)
    candidate = getattr(transformers, named, None) if isinstance(named, str) else None
    is_model = isinstance(candidate, type) and issubclass(candidate, transformers.PreTrainedModel)
    if is_model and getattr(candidate, "config_class", None) in (None, type(config)):
        return candidate
    for _, (chosen, *_) in _heads(config):
        if named is not None:
            warnings.warn(f"transformers has no {named} for this config; {chosen.__name__} is taken", stacklevel=2)
        return chosen
    raise InputError(f"transformers has no model for a config of {config.model_type}; name one in its architectures")


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
