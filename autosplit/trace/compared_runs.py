"""What makes two runs of a model comparable, as `verify` needs it; and one call with its backward, run.

    norms     pipe   bn1: 3 rows, 3 rows, 2 rows     a training BatchNorm normalises each microbatch by itself
              model  bn1: 8 rows ─► 3, 3, 2          its own forward on the whole batch, its norms in the same pieces
    draws     bernoulli 1    uniform: the middle    normal: half a deviation above the mean    integers: the lowest
              dropout keeps every value and scales it    permutations keep the order    choices take the likeliest

Nothing else of the model's forward changes. Running statistics take the whole batch in at once, as ever.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self
from unittest.mock import patch

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from autosplit.options import Sample
from autosplit.trace.borrowed.state import gradients_aside
from autosplit.trace.check import cotangent, seed_all
from autosplit.trace.inputs.objects import fresh, leaves_of, take_apart
from autosplit.trace.recording.random_watch import named_arguments
from autosplit.trace.recording.recording import by_name


@dataclass(frozen=True)
class Left:
    """What a run left behind, and the states of torch's generators.

    ``drawn`` are the states after the forward (of a training step: after all of it), ``drew`` whether they differ from
    those before.
    """

    tensors: dict[tuple[str, str], Any]
    drew: bool
    drawn: list[bytes]


def run_once(
    call: Callable[..., Any],
    model: nn.Module,
    sample: Sample,
    leaves: Mapping[str, torch.Tensor],
    of_loss: Mapping[str, torch.Tensor] | None,
    seed: int,
) -> Left:
    """Call, go backward, and collect what that left.

    ``of_loss``: None where ``call`` returns outputs; where it returns a loss whose backward has been done, the loss's
    own leaves.
    """
    inputs, build = take_apart((sample.args, sample.kwargs))
    copies = [fresh(leaf) for leaf in inputs]
    args, kwargs = build(copies)
    wrt = {**leaves, **(of_loss or {})}
    wrt |= {f"input {i}": t for i, t in enumerate(copies) if isinstance(t, torch.Tensor) and t.requires_grad}
    seed_all(seed)
    before = _drawn()
    with gradients_aside((of_loss or {}).values()):
        output = call(*args, **kwargs)
        drawn = _drawn()
        flat = leaves_of(output)
        roots = [value for value in flat if isinstance(value, torch.Tensor) and value.requires_grad]
        if roots:
            torch.autograd.backward(roots, [cotangent(root) for root in roots])
        tensors: dict[tuple[str, str], Any] = {("gradient", name): _host(leaf.grad) for name, leaf in wrt.items()}
    kind = "output" if of_loss is None else "loss"
    tensors |= {(kind, str(number)): _host(value) for number, value in enumerate(flat)}
    if (container := type(output)) not in (torch.Tensor, nn.Parameter):
        tensors[kind, "type"] = container.__name__
    tensors |= {("input", str(i)): _host(leaf) for i, leaf in enumerate(copies) if isinstance(leaf, torch.Tensor)}
    tensors |= {("buffer", name): _host(buffer) for name, buffer in model.named_buffers()}
    return Left(tensors, before != drawn, drawn)


def _host(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value


def _drawn() -> list[bytes]:
    states = [torch.get_rng_state()]
    if torch.cuda.is_initialized():
        states += torch.cuda.get_rng_state_all()
    return [state.numpy().tobytes() for state in states]


Pieces = Mapping[str, Sequence[Sequence[int]]]
"""By running mean, for each update of it, how many values per channel were normalised at once, part by part."""


@contextlib.contextmanager
def updates_noted(model: nn.Module, uses: type) -> Iterator[Pieces]:
    """Yield the parts of all updates of running means of a model, which ``uses.updates(use, each=...)`` returns."""
    names = {buffer.data_ptr(): name for name, buffer in model.named_buffers()}
    pieces: dict[str, list[list[int]]] = defaultdict(list)
    plain = uses.__dict__["updates"]

    def updates(use: Any, *, each: bool) -> Any:
        result = plain(use, each=each)
        pieces[names.get(use.running[0].data_ptr(), "")] += [[piece.values for piece in parts] for parts in result]
        return result

    with patch.object(uses, "updates", updates):
        yield pieces


class CutNorms(TorchFunctionMode):
    """Has batch norms in training normalise pieces of the batch by themselves; running means see all of it at once.

    Enter it when the model holds the tensors that it will run with: norms are told apart by those.

    Attributes:
        cut: the running means of those that did, and the sizes of the pieces along the first dimension.
    """

    def __init__(self, model: nn.Module, pieces: Pieces) -> None:
        super().__init__()
        self.cut: dict[str, list[int]] = {}
        self._model, self._pieces = model, pieces
        self._left: dict[int, tuple[str, Iterator[Sequence[int]]]] = {}

    def __enter__(self) -> Self:
        named = ((name, buffer) for name, buffer in self._model.named_buffers() if name in self._pieces)
        self._left = {buffer.data_ptr(): (name, iter(self._pieces[name])) for name, buffer in named}
        super().__enter__()
        return self

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.batch_norm:
            return func(*args, **(kwargs or {}))
        named = by_name(func, args, kwargs or {})
        value, mean = named["input"], named["running_mean"]
        name, left = self._left.get(0 if mean is None else mean.data_ptr(), ("", iter(())))
        counts = next(left, ()) if named["training"] else ()
        if len(counts) < 2:
            return func(**named)
        self.cut[name] = sizes = [value.shape[0] * count // sum(counts) for count in counts]
        with torch.no_grad():
            func(**named)  # for what it leaves in the running statistics
        alone = named | {"running_mean": None, "running_var": None}
        return torch.cat([func(**alone | {"input": chunk}) for chunk in value.split(sizes)])


class FixedDraws(TorchDispatchMode):
    """Replace what random operations draw by constants; ``unknown`` names those for which it cannot."""

    def __init__(self) -> None:
        super().__init__()
        self.unknown: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        named = named_arguments(func, args, kwargs)
        name = func._schema.name.removeprefix("aten::")
        if name in _REPLACED:
            return _REPLACED[name](named)
        if "dropout" in named or "dropout_p" in named:
            return func(**{key: 0.0 if key in ("dropout", "dropout_p") else value for key, value in named.items()})
        drawn = func(*args, **kwargs)
        if (constant := _CONSTANTS.get(name.rstrip("_").removesuffix("_like"))) is None:
            self.unknown.add(name)
            return drawn
        return drawn.copy_(torch.as_tensor(constant(named), device=drawn.device))


def _dropout(named: dict[str, Any]) -> Any:
    value, share = named["input"], named["p"] if named["train"] is not False else 0.0
    kept = torch.ones_like(value, dtype=torch.bool)
    return value * (1 / (1 - share) if share < 1 else 0.0), kept


def _rrelu(named: dict[str, Any]) -> torch.Tensor:
    value, noise = named["self"], named["noise"]
    slope = (float(named["lower"]) + float(named["upper"])) / 2
    noise.copy_(torch.where(value <= 0, slope, 1.0))
    return value * noise


def _multinomial(named: dict[str, Any]) -> torch.Tensor:
    weights, count = named["self"], named["num_samples"]
    order = weights.argsort(dim=-1, descending=True, stable=True)
    return order[..., :1].expand(*order.shape[:-1], count).clone() if named["replacement"] else order[..., :count]


_REPLACED: dict[str, Callable[[dict[str, Any]], Any]] = {
    "native_dropout": _dropout,
    "rrelu_with_noise": _rrelu,
    "multinomial": _multinomial,
}
_CONSTANTS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "bernoulli": lambda named: 1,
    "rand": lambda named: 0.5,
    "randn": lambda named: 0.5,
    "uniform": lambda named: (named["from"] + named["to"]) / 2,
    "normal": lambda named: named["mean"] + 0.5 * named["std"],
    "randint": lambda named: named.get("low", 0),
    "random": lambda named: named.get("from", 0),
    "randperm": lambda named: torch.arange(named["n"]),
    "exponential": lambda named: 1 / named["lambd"],
    "geometric": lambda named: 1,
    "poisson": lambda named: named["self"].round(),
    "binomial": lambda named: (named["count"] * named["prob"]).round(),
}
