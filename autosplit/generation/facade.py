"""``pipe.generate``: transformers' own ``generate`` on an object of the model's class whose calls run on the stages."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable
from typing import Any

from torch import nn

from autosplit.delegation import object_like, one_at_a_time
from autosplit.errors import InputError
from autosplit.generation.attributes import Kept, taken
from autosplit.generation.decode import lanes_of
from autosplit.generation.entry import Entry, Stages
from autosplit.generation.groups import generate as generate_in_groups


class Generator:
    """Generates text with the model of a pipe.

    Attributes:
        model: the module whose ``generate`` is called: the pipe's model, or the one inside of adapters.
    """

    def __init__(self, pipe: Any) -> None:
        self.pipe = pipe
        path, self.model = generating(pipe._core.model)
        self._entries: dict[str, Entry] = {}
        self._path = path
        self._stages, self._making = Stages(), threading.Lock()

    def entry(self, name: str) -> Entry:
        """Return what runs the model's forward, or its encoder's, as a program of the stages."""
        path, kind = self._path, type(self.model)

        def function(model: nn.Module, **inputs: Any) -> Any:
            inner: Any = model.get_submodule(path) if path else model
            # Hooks of the module that generates run around the call of the facade.
            return inner.get_encoder()(**inputs) if name == "encoder" else kind.forward(inner, **inputs)

        with self._making:  # groups ask for it at once
            if name not in self._entries:
                self._entries[name] = self._entry(name, function)
            return self._entries[name]

    def _entry(self, name: str, function: Callable[..., Any]) -> Entry:
        return Entry(self.pipe, function, self._stages)

    def facade(self, kept: Kept) -> Any:
        """Return a new object of the model's class whose calls, and those of its encoder, run on the stages."""
        model = self.model
        if "forward" in vars(model):
            raise InputError(
                f"the forward of this {type(model).__name__} was replaced in the object, as accelerate's prepare() "
                "does; generate with the model as it was, or give prepare() the pipe"
            )

        def call(facade: Any, *args: Any, **kwargs: Any) -> Any:
            named = inspect.signature(model.forward).bind_partial(*args).arguments if args else {}
            return self.entry("forward")(facade.__dict__["_autosplit_kept"], **named, **kwargs)

        def put(facade: Any, name: str, value: Any) -> None:
            for each in (facade, model):  # what a generation leaves in the object is there in the next one
                nn.Module.__setattr__(each, name, value)

        members: dict[str, Any] = {
            "__setattr__": put,
            "forward": _with_signature(call, model),
            "get_encoder": lambda facade: _Encoder(self.entry("encoder"), model.get_encoder()),
            "device": model.device,  # their properties ask parameters, which are stand-ins while another group records
            "dtype": model.dtype,
            "__copy__": _copy,
            "_valid_auto_compile_criteria": lambda facade, *args: False,
        }
        facade = object_like(model, members)
        object.__setattr__(facade, "__dict__", dict(model.__dict__) | {"_autosplit_kept": kept})
        return facade

    def generate(self, *args: Any, groups: int | None = None, **kwargs: Any) -> Any:
        """Run transformers' ``generate`` on groups of rows; by default there are as many as lanes."""
        entry, core = self.entry("forward"), self.pipe._core
        count = 1 if entry.keeps_state else lanes_of(self.pipe) if groups is None else groups
        with taken(core.model, entry.usual) as kept:
            return generate_in_groups(self.facade(kept), count, args, kwargs, notes=core.recordings.of_group)


def generate(twin: Any, *args: Any, **kwargs: Any) -> Any:
    """Generate text by the stages of a pipe: what stands for ``generate`` of its model."""
    return _generate(twin._autosplit_pipe(), *args, **kwargs)


@one_at_a_time
def _generate(pipe: Any, *args: Any, **kwargs: Any) -> Any:
    return generator_of(pipe).generate(*args, **kwargs)


def generator_of(pipe: Any) -> Generator:
    """Return what generates text with a pipe."""
    core = pipe._core
    if core.generator is None:
        core.generator = pipe._generator(pipe)
    generator: Generator = core.generator
    return generator


def _copy(facade: Any) -> Any:
    """Return an object for another group, whose caches in modules are its own."""
    other = object.__new__(type(facade))
    object.__setattr__(other, "__dict__", facade.__dict__ | {"_autosplit_kept": Kept()})
    return other


class _Encoder:
    """What a model calls as its encoder."""

    def __init__(self, entry: Entry, encoder: nn.Module) -> None:
        self.entry, self.encoder = entry, encoder
        self.forward = _with_signature(self, encoder)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        named = inspect.signature(self.encoder.forward).bind_partial(*args).arguments if args else {}
        return self.entry(Kept(), **named, **kwargs)


def _with_signature(call: Callable[..., Any], module: nn.Module) -> Callable[..., Any]:
    @functools.wraps(module.forward)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    return forward


def generating(model: nn.Module) -> tuple[str, Any]:
    """Return the outermost module that generates as transformers' models do, and its path.

    Raises InputError where there is none.
    """
    from transformers import GenerationMixin

    if isinstance(model, GenerationMixin):
        return "", model
    adapters = getattr(model, "peft_config", None)
    if adapters and not any(getattr(config, "is_prompt_learning", False) for config in adapters.values()):
        return next((path, m) for path, m in model.named_modules() if isinstance(m, GenerationMixin))
    raise InputError(
        f"{type(model).__name__} does not generate as transformers' models do, or in its own way (virtual tokens): "
        "call generate() of the model, which pipe.unsplit() gives back"
    )
