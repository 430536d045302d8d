"""A device for machines without an accelerator: tensors on ``card`` compute on the CPU and insist on their kind.

A tensor of the card holds one of the CPU. An operation of both kinds raises, as on an accelerator: numbers, and indices
in ``[...]``, may be the CPU's. The device is torch's for other people's backends, which a process registers for good.
So what is asked of it runs in a process of its own, ``python -m tests.trace.card``, and prints what came out as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from autosplit.errors import TraceError
from autosplit.options import Sample
from autosplit.runtime.lower.split import lower
from autosplit.trace.graph import Length
from autosplit.trace.ladder import Trace, trace, widen
from tests.trace.placed_models import MODELS, MOVES, PLACES, WIDTH, Hides, Steps

CPU = torch.device("cpu")
_MOVES = ("_to_copy", "copy_", "_copy_from")
_INDEXED = ("index", "index_put", "index_put_", "_index_put_impl_")


class Card(Tensor):
    """A tensor on the card."""

    raw: Tensor

    @staticmethod
    def __new__(cls, raw: Tensor) -> Card:
        made = Tensor._make_wrapper_subclass(
            cls,
            raw.shape,
            strides=raw.stride(),
            storage_offset=raw.storage_offset(),
            dtype=raw.dtype,
            device=torch.device("card", 0),
        )
        made.raw = raw
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    def tolist(self) -> Any:
        return self.raw.tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})


def run(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operation on the CPU; raise where its tensors are of both kinds."""
    flat, spec = pytree.tree_flatten((args, kwargs))
    name = func._schema.name.split("::")[1]
    cards = [value for value in flat if isinstance(value, Card)]
    if cards and name not in _MOVES:
        for value in flat:
            apart = isinstance(value, Tensor) and not isinstance(value, Card) and value.dim() > 0
            if apart and (name not in _INDEXED or value is args[0] or value.is_floating_point()):
                raise RuntimeError(
                    f"Expected all tensors to be on the same device: {name} has some on card, some on cpu"
                )
    raw = [
        value.raw if isinstance(value, Card) else CPU if isinstance(value, torch.device) else value for value in flat
    ]
    args_of, kwargs_of = pytree.tree_unflatten(raw, spec)
    made = func(*args_of, **kwargs_of)
    given = kwargs.get("device")
    here = bool(cards) if name not in _MOVES else isinstance(args[0], Card)
    if not (here if given is None else torch.device(given).type == "card"):
        return made
    known = {id(card.raw): card for card in cards}
    return pytree.tree_map_only(Tensor, lambda own: known[id(own)] if id(own) in known else Card(own), made)


def _raw(value: Any) -> Any:
    return value.raw if isinstance(value, Card) else CPU if isinstance(value, torch.device) else value


class _Module:
    """What torch asks of a backend's module."""

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return False

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        pass

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]


def register() -> list[torch.library.Library]:
    """Make ``card`` a device of this process, as long as what is returned lives."""
    _setup_privateuseone_for_python_backend("card", backend_module=_Module())
    every, own = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")

    def empty(size: Any, *, dtype: Any = None, **others: Any) -> Card:
        return Card(torch.empty(size, dtype=dtype, device=CPU))

    def empty_strided(size: Any, stride: Any, *, dtype: Any = None, **others: Any) -> Card:
        return Card(torch.empty_strided(size, stride, dtype=dtype, device=CPU))

    def arange(*ends: Any, dtype: Any = None, **others: Any) -> Card:
        return Card(torch.arange(*ends, dtype=dtype, device=CPU))

    def copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Any:
        return run(torch.ops.aten.copy_.default, (target, source), {})

    every.fallback(lambda func, *args, **kwargs: run(func, args, kwargs), "PrivateUse1")
    own.impl("empty.memory_format", empty, "PrivateUse1")
    own.impl("empty_strided", empty_strided, "PrivateUse1")
    for kind in ("arange", "arange.start", "arange.start_step"):
        own.impl(kind, arange, "PrivateUse1")
    own.impl("_copy_from", copy_from, "PrivateUse1")
    return [every, own]


# -- what is asked -----------------------------------------------------------------------------------------------------
def found(traced: Trace) -> list[Any]:
    """Return what the probe found, and what the graph calls."""
    findings = traced.findings
    called = [node.name for node in traced.graph.graph.nodes]
    return [sorted(findings.suspects), sorted(findings.mixing), sorted(findings.alone), called]


def places(model: nn.Module) -> list[str]:
    return [tensor.device.type for tensor in (*model.parameters(), *model.buffers())]


def traced_at(make: Callable[[], nn.Module], model_at: str, batch_at: str) -> tuple[Trace, nn.Module]:
    """Record a model and a batch that lie somewhere; ``spread``: the model's first child lies on the card alone."""
    torch.manual_seed(0)
    model, batch = make(), torch.randn(4, WIDTH)
    if model_at == "spread":
        next(model.children()).to("card")
    else:
        model.to(model_at)
    before = places(model)
    traced = trace(model, Sample(batch.to(batch_at)))
    assert places(model) == before
    return traced, model


def widened(model_at: str, moved: str, batch_at: str) -> bool:
    """Tell whether a recording becomes one for all lengths after parts of the model have moved to the card."""
    model, inputs = Steps().to(model_at), [torch.randn(4, length, WIDTH) for length in (6, 9)]
    base = trace(model, Sample(inputs[0]))
    (model.first if moved == "first" else model).to("card")
    length = Length("dim0", ((0, 1),))
    wide = widen(model, base, Sample(inputs[1].to(batch_at)), lengths=(length,), before=[tuple(inputs[0].shape)])
    return wide is not None


def names_card(traced: Trace) -> bool:
    """Tell whether a stage on the CPU names the card."""
    names = {info.name: 0 for _, info in traced.graph.compute_nodes()}
    seen: list[str] = []
    for node in lower(traced.graph, names, [CPU]).stages[0].graph.nodes:
        fx.node.map_aggregate((node.args, node.kwargs), lambda value: seen.append(str(value)))
    return any("card" in text for text in seen)


def main() -> None:
    libraries = register()
    results: dict[str, Any] = {}
    for name, make in MODELS.items():
        results[f"{name}, cpu, cpu"] = found(traced_at(make, "cpu", "cpu")[0])
        for place in PLACES:
            results[f"{name}, {place}"] = found(traced_at(make, *place.split(", "))[0])
    traced, model = traced_at(MODELS["positions"], "card", "card")
    results["a stage on the CPU names the card"] = names_card(traced)
    first = next(model.children())
    for key, parameter in list(first._parameters.items()):
        first._parameters[key] = nn.Parameter(parameter.detach().to(CPU)) if parameter is not None else None
    traced.check_rows(model, Sample(torch.randn(7, WIDTH)), 7)
    for place in ("cpu, cpu", "card, cpu"):
        try:
            traced_at(Hides, *place.split(", "))
        except TraceError as error:
            results[f"hides, {place}"] = str(error)
    traced, model = traced_at(MODELS["reads"], "cpu", "cpu")
    for place in ("first on the card", "all on the card"):
        (next(model.children()) if place == "first on the card" else model).to("card")
        inputs = torch.randn(4, WIDTH), torch.full((4, WIDTH), torch.nan)
        guard = traced.guard
        assert guard is not None
        results[f"held, {place}"] = [guard.holds([x.to(at)], 4) for x in inputs for at in ("cpu", "card")]
    for place in MOVES:
        results[f"widened, {place}"] = widened(*place.split(", "))
    print(json.dumps(results))
    del libraries


if __name__ == "__main__":
    main()
