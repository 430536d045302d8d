"""The zoo's groups, each from a library of its own."""

from __future__ import annotations

import importlib
import importlib.util

from benchmarks.zoo.case import Case

_GROUPS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "transformers": (("transformers",), ("hf_text", "hf_text_more", "hf_vision", "hf_audio", "hf_multimodal")),
    "timm": (("timm", "torchvision"), ("timm_models",)),
    "torchvision": (("torchvision",), ("torchvision_models",)),
}
GROUPS = tuple(_GROUPS)


def cases(groups: tuple[str, ...] = ()) -> list[Case]:
    """Return the cases of some groups; of all whose library is installed when none are given.

    Raises ImportError for a group that was asked for and whose library is missing.
    """
    found: list[Case] = []
    for group in groups or GROUPS:
        libraries, modules = _GROUPS[group]
        if not groups and any(importlib.util.find_spec(library) is None for library in libraries):
            continue
        for module in modules:
            found += importlib.import_module(f"benchmarks.zoo.{module}").cases()
    return found
