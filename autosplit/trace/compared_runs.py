"""What makes two runs of a model comparable, as `verify` needs it; and one call with its backward, run.

    norms     pipe   bn1: 3 rows, 3 rows, 2 rows     a training BatchNorm normalises each microbatch by itself
              model  bn1: 8 rows ─► 3, 3, 2          its own forward on the whole batch, its norms in the same pieces
    draws     bernoulli 1    uniform: the middle    normal: half a deviation above the mean    integers: the lowest
              dropout keeps every value and scales it    permutations keep the order    choices take the likeliest

Nothing else of the model's forward changes. Running statistics take the whole batch in at once, as ever.

Private torch interface: ``TorchDispatchMode``, since below autograd is the only place where all random operations pass
(dropout, attention and recurrent layers included); tried on torch 2.11, 2.13 and 2.15.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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


@dataclass(frozen=True)
class Left:
    """What a run left behind, the calls of its norms, those that were cut up, and torch's generators.

    ``drawn`` is their state behind the forward (of a training step: behind all of it), ``drew`` whether that is another
    one than before.
    """

    tensors: dict[tuple[str, str], Any]
    norms: Pieces
    cut: frozenset[str]
    drew: bool
    drawn: list[bytes]


def run_once(
    call: Callable[..., Any],
    model: nn.Module,
    sample: Sample,
    leaves: Mapping[str, torch.Tensor],
    watch: NormWatch,
    of_loss: Mapping[str, torch.Tensor] | None,
    seed: int,
) -> Left:
    """Call, go backward, and collect what that left.

    ``of_loss``: None where ``call`` returns outputs; where it returns a loss whose backward has been done, the loss's
    own leaves.
    """
    inputs, build = take_apart((sample.args, sample.kwargs))
    given = [fresh(leaf) for leaf in inputs]
    args, kwargs = build(given)
    own = {**leaves, **(of_loss or {})}
    own |= {f"input {i}": leaf for i, leaf in enumerate(given) if isinstance(leaf, torch.Tensor) and leaf.requires_grad}
    seed_all(seed)
    before = _drawn()
    with gradients_aside((of_loss or {}).values()):
        output = call(*args, **kwargs)
        drawn = _drawn()
        flat = leaves_of(output)
        roots = [value for value in flat if isinstance(value, torch.Tensor) and value.requires_grad]
        if roots:
            torch.autograd.backward(roots, [cotangent(root) for root in roots])
        tensors: dict[tuple[str, str], Any] = {("gradient", name): _host(leaf.grad) for name, leaf in own.items()}
    kind = "output" if of_loss is None else "loss"
    tensors |= {(kind, str(number)): _host(value) for number, value in enumerate(flat)}
    if (container := type(output)) not in (torch.Tensor, nn.Parameter):
        tensors[kind, "type"] = container.__name__
    tensors |= {("input", str(i)): _host(leaf) for i, leaf in enumerate(given) if isinstance(leaf, torch.Tensor)}
    tensors |= {("buffer", name): _host(buffer) for name, buffer in model.named_buffers()}
    return Left(tensors, watch.calls, frozenset(watch.cut), before != drawn, drawn)


def _host(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value


def _drawn() -> list[bytes]:
    states = [torch.get_rng_state()]
    if torch.cuda.is_initialized():
        states += torch.cuda.get_rng_state_all()
    return [state.numpy().tobytes() for state in states]


_SIGNATURE = inspect.signature(F.batch_norm)
Pieces = Mapping[str, Sequence[Sequence[int]]]
"""By norm, for each of its calls in a forward, the sizes of the first dimension of what it normalised at once."""


class NormWatch(TorchFunctionMode):
    """Lists the calls of batch norms that take statistics over the batch; with ``pieces`` it cuts them up.

    Enter it when the model holds the tensors that it will run with: norms are told apart by those.

    Attributes:
        cut: names of the norms whose calls were cut up, by their first tensor.
    """

    def __init__(
        self, model: nn.Module, pieces: Pieces | None = None, *, apart: Callable[..., Any] | None = None
    ) -> None:
        """Watch a model; ``apart`` is what a pipe calls to normalise one microbatch (``norm_and_collect_stats``)."""
        super().__init__()
        self.cut: set[str] = set()
        self._calls: dict[str, dict[str, dict[int, int]]] = defaultdict(dict)
        self._pieces = pieces or {}
        self._apart = apart
        tensors = (*model.named_buffers(), *model.named_parameters())
        self._names = {tensor.data_ptr(): name for name, tensor in tensors if tensor.numel()}

    @property
    def calls(self) -> dict[str, list[tuple[int, ...]]]:
        """The sizes by norm and call, in the order of the first calls and of the microbatches."""
        return {
            name: [tuple(sizes[number] for number in sorted(sizes)) for sizes in uses.values()]
            for name, uses in self._calls.items()
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is self._apart:
            return self._by_microbatch(func, *args)
        if func is not F.batch_norm:
            return func(*args, **kwargs)
        bound = _SIGNATURE.bind(*args, **kwargs)
        bound.apply_defaults()
        named: dict[str, Any] = dict(bound.arguments)
        if not named["training"]:
            return func(**named)
        name = self._name(named["running_mean"], named["weight"])
        number, size = len(self._calls[name]), named["input"].shape[0]
        self._calls[name][str(number)] = {0: size}
        pieces = self._pieces.get(name, ())[number : number + 1]
        if not pieces or len(pieces[0]) < 2 or sum(pieces[0]) != size:
            return func(**named)
        self.cut.add(name)
        if named["running_mean"] is not None:
            with torch.no_grad():
                func(**named)  # for what it leaves in the running statistics
        alone = named | {"running_mean": None, "running_var": None}
        return torch.cat([func(**alone | {"input": part}) for part in named["input"].split(list(pieces[0]))])

    def _name(self, mean: torch.Tensor | None, weight: torch.Tensor | None) -> str:
        holder = weight if mean is None else mean
        return "a norm without state" if holder is None else self._names.get(holder.data_ptr(), "an unknown norm")

    def _by_microbatch(self, func: Any, note: Any, function: Any, value: torch.Tensor, *rest: Any) -> Any:
        """Write down a microbatch of a pipe; one that comes again, for a backward, is the same one."""
        if function is F.batch_norm:
            mean, _, weight, *_ = rest
            self._calls[self._name(mean, weight)].setdefault(note.name, {})[note.microbatch] = value.shape[0]
        return func(note, function, value, *rest)


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
        if name.rstrip("_") not in _CONSTANTS:
            self.unknown.add(name)
            return drawn
        return drawn.copy_(torch.as_tensor(_CONSTANTS[name.rstrip("_")](named), device=drawn.device))


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
    "rand_like": lambda named: 0.5,
    "randn": lambda named: 0.5,
    "randn_like": lambda named: 0.5,
    "uniform": lambda named: (named["from"] + named["to"]) / 2,
    "normal": lambda named: named["mean"] + 0.5 * named["std"],
    "randint": lambda named: named.get("low", 0),
    "randint_like": lambda named: named.get("low", 0),
    "random": lambda named: named.get("from", 0),
    "randperm": lambda named: torch.arange(named["n"]),
    "exponential": lambda named: 1 / named["lambd"],
    "geometric": lambda named: 1,
    "poisson": lambda named: named["self"].round(),
    "binomial": lambda named: (named["count"] * named["prob"]).round(),
}
