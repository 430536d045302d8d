"""What parameters cost beside the activations: gradients, master weights, optimizer state, and what a step needs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, get_args

from autosplit.errors import InputError
from autosplit.memory.events import Change, Step

Precision = Literal["fp32", "amp_bf16", "amp_fp16", "bf16", "bf16_fp32_master"]
Implementation = Literal["forloop", "foreach"]

_FP32_BYTES = 4
_MOMENTS: Mapping[str, int] = MappingProxyType({"none": 0, "sgd": 0, "momentum": 1, "adam": 2, "adamw": 2})


@dataclass(frozen=True, slots=True)
class ParameterBytes:
    """What one trainable parameter keeps from step to step.

    Attributes:
        moments: storages of the optimizer's state, each as large as what it updates.
        counter_bytes: Adam's step count, an fp32 scalar on the host.
    """

    elements: int
    parameter_bytes: int
    gradient_bytes: int
    master_bytes: int
    moments: tuple[int, ...]
    counter_bytes: int

    @property
    def updated_bytes(self) -> int:
        """What the optimizer updates: the master weight where there is one, else the parameter."""
        return self.master_bytes or self.parameter_bytes

    @property
    def optimizer_bytes(self) -> int:
        """Master weight and moments."""
        return self.master_bytes + sum(self.moments)


@dataclass(frozen=True)
class Optimizer:
    """An optimizer with torch's defaults, or one that keeps ``name`` bytes per parameter.

    Attributes:
        name: "sgd", "momentum", "adam", "adamw", "none", or bytes of state per parameter.
        implementation: torch's default is "foreach" on CUDA, "forloop" on the CPU.
    """

    name: str | float
    implementation: Implementation = "foreach"

    def __post_init__(self) -> None:
        known = isinstance(self.name, (int, float)) and not isinstance(self.name, bool) and self.name >= 0
        if not known and self.name not in _MOMENTS:
            raise InputError(
                f"there is no optimizer {self.name!r}; choose one of {', '.join(map(repr, _MOMENTS))}, "
                "or give bytes of state per parameter"
            )
        if self.implementation not in get_args(Implementation):
            raise InputError(
                f"there is no implementation {self.implementation!r}; choose one of "
                f"{', '.join(map(repr, get_args(Implementation)))}"
            )


def parameter_bytes(
    elements: int, *, element_bytes: int, optimizer: Optimizer, precision: Precision | None = None
) -> ParameterBytes:
    """Return what a trainable parameter of ``elements`` elements keeps.

    ``element_bytes`` is its own size per element and counts where ``precision`` is None (as the model is). Bytes per
    element with Adam: fp32 and autocast 16 (autocast's casts are activations of the step, not state); bf16 8;
    bf16 with fp32 masters 2 + 2 + 4 + 8 = 16, the count of ZeRO (Rajbhandari et al. 2020, section 3.1) for fp16.
    """
    if precision is not None and precision not in get_args(Precision):
        raise InputError(
            f"there is no precision {precision!r}; choose None (as the model is) or one of "
            f"{', '.join(map(repr, get_args(Precision)))}"
        )
    own = element_bytes
    if precision is not None:
        own = 2 if precision in ("bf16", "bf16_fp32_master") else _FP32_BYTES
    master = _FP32_BYTES if precision == "bf16_fp32_master" else 0
    moments: tuple[int, ...]
    if isinstance(optimizer.name, str):
        moments = (elements * (master or own),) * _MOMENTS[optimizer.name]
    else:
        moments = (round(elements * optimizer.name),) if optimizer.name else ()
    return ParameterBytes(
        elements=elements,
        parameter_bytes=elements * own,
        gradient_bytes=elements * own,
        master_bytes=elements * master,
        moments=moments,
        counter_bytes=_FP32_BYTES if optimizer.name in ("adam", "adamw") else 0,
    )


def optimizer_steps(
    parameters: Sequence[ParameterBytes], *, optimizer: Optimizer, first: bool, on_cpu: bool = False
) -> tuple[Step, ...]:
    """Return what one ``optimizer.step()`` allocates and frees on a device, in order.

    State that the first step makes stays; everything else is freed. ``on_cpu``: the device is the host, where Adam's
    step counts live. Read from ``torch/optim/adam.py`` and ``sgd.py`` of torch 2.13 with their default arguments, all
    parameters of one dtype:

    - foreach: Adam holds the square roots of all second moments at once, one list as large as the parameters; SGD works
      in place, its first step with momentum makes the state.
    - forloop: Adam makes a square root and its quotient per parameter, while the quotient of the parameter before it
      still lives (``denom`` is overwritten only then); SGD works in place.

    How an optimizer that is given in bytes per parameter works is unknown: only its state is counted. The same holds
    for casts between a bf16 parameter and its master weight, for which torch has no implementation to read.
    """
    ids = _Ids()
    changes: list[Change] = []
    if first:
        for parameter in parameters:
            sizes = ((parameter.counter_bytes,) if on_cpu else ()) + parameter.moments
            changes += (ids.new(count) for count in sizes if count)
    if optimizer.name in ("adam", "adamw"):
        sizes = tuple(parameter.updated_bytes for parameter in parameters)
        if optimizer.implementation == "foreach":
            roots = [ids.new(count) for count in sizes]
            changes += [*roots, *map(_freed, roots)]
        else:
            changes += _adam_forloop(sizes, ids)
    return (Step("optimizer", tuple(changes)),)


class _Ids:
    """Storage ids for temporaries, from zero."""

    def __init__(self) -> None:
        self._next = 0

    def new(self, count: int) -> Change:
        self._next += 1
        return self._next - 1, count


def _freed(change: Change) -> Change:
    return change[0], -change[1]


def _adam_forloop(sizes: Sequence[int], ids: _Ids) -> Iterator[Change]:
    quotient: Change | None = None
    for count in sizes:
        root, result = ids.new(count), ids.new(count)
        yield from (root, result, _freed(root))
        if quotient is not None:
            yield _freed(quotient)
        quotient = result
    if quotient is not None:
        yield _freed(quotient)
