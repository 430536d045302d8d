"""Models that keep state outside their modules, and models of kinds that many tracers cannot read."""

from __future__ import annotations

import collections
import copy
import itertools
import random

import numpy
import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.strangers.hosts import WIDTH, Layer, Residual, Table, linear, vectors

TABLE = Table()
CALLS = 0
ACTIVATIONS: dict[str, list[float]] = {}
LATEST: dict[str, object] = {}


def reset() -> None:
    """Set back what these models keep in globals, classes and functions."""
    global CALLS
    CALLS = 0
    for store in (ACTIVATIONS, LATEST):
        store.clear()
    CountsInClass.total = 0
    noted.times = 0
    seen_by_default.__defaults__[0].clear()


def closed(function):
    """Return a module whose forward is a function that closes over state."""

    class Closure(Layer):
        def __init__(self):
            super().__init__()
            self.call, LATEST["state"] = function()

        def forward(self, x):
            return self.call(self.fc, x)

    Closure.__name__ = Closure.__qualname__ = function.__name__
    return TABLE.odd("outside", reset=reset, outside=lambda: LATEST["state"]())(Closure)


@closed
def closure_counter():
    count = 0

    def call(fc, x):
        nonlocal count
        count += 1
        return fc(x) * count / 4

    return call, lambda: count


@closed
def closure_tensor_in_place():
    mean = torch.zeros(WIDTH, dtype=torch.float64)

    def call(fc, x):
        y = fc(x) - mean
        mean.lerp_(x.detach().reshape(-1, WIDTH).mean(0), 0.1)
        return y

    return call, lambda: mean


@closed
def closure_tensor_replaced():
    mean = torch.zeros(WIDTH, dtype=torch.float64)

    def call(fc, x):
        nonlocal mean
        y = fc(x) - mean
        mean = 0.9 * mean + 0.1 * x.detach().reshape(-1, WIDTH).mean(0)
        return y

    return call, lambda: mean


@closed
def closure_count():
    ids = itertools.count(1)

    def call(fc, x):
        return fc(x) / next(ids)

    return call, lambda: repr(ids)


@closed
def closure_cycle():
    scales = itertools.cycle([1.0, 0.5, 0.25])
    used = []

    def call(fc, x):
        used.append(next(scales))
        return fc(x) * used[-1]

    return call, lambda: used


@closed
def closure_random():
    generators = [random.Random(3)]

    def call(fc, x):
        return fc(x) * generators[0].random()

    return call, lambda: generators


@closed
def closure_numpy():
    state = numpy.random.RandomState(5)

    def call(fc, x):
        return fc(x) + torch.from_numpy(state.standard_normal(WIDTH)) * 0.1

    return call, lambda: state


@closed
def closure_deque():
    recent = collections.deque([1.0], maxlen=3)

    def call(fc, x):
        recent.append(recent[-1] * 0.5)
        return fc(x) * sum(recent)

    return call, lambda: recent


@TABLE.odd("outside", reset=reset, outside=lambda: CALLS)
class GlobalCounter(Layer):
    def forward(self, x):
        global CALLS
        CALLS += 1
        return self.fc(x) * (1.0 if CALLS % 2 else 0.5)


@TABLE.odd("outside", reset=reset, outside=lambda: CountsInClass.total)
class CountsInClass(Layer):
    total = 0

    def forward(self, x):
        CountsInClass.total += 1
        return self.fc(x) / CountsInClass.total


def noted(x):
    """Count the calls on the function itself."""
    noted.times += 1
    return x * noted.times


noted.times = 0


@TABLE.odd("outside", reset=reset, outside=lambda: noted.times)
class CountsOnFunction(Layer):
    def forward(self, x):
        return noted(self.fc(x))


def seen_by_default(x, seen=[]):  # noqa: B006 - the mistake that is under test
    """Remember shapes in a default argument."""
    seen.append(tuple(x.shape))
    return x / len(seen)


@TABLE.odd("outside", reset=reset, outside=lambda: seen_by_default.__defaults__)
class MutableDefault(Layer):
    def forward(self, x):
        return seen_by_default(self.fc(x))


@TABLE.odd("outside", reset=reset, outside=lambda: ACTIVATIONS)
class GlobalRegistry(Layer):
    def forward(self, x):
        y = self.fc(x)
        ACTIVATIONS.setdefault(type(self).__name__, []).append(y.detach().norm(dim=-1))
        return y


@TABLE.root("outside", vectors)
class Momentum(nn.Module):
    """BYOL: the target network follows the online one by ``p.data = …`` in forward."""

    def __init__(self):
        super().__init__()
        self.online = nn.Sequential(nn.Linear(6, WIDTH), Residual(), Residual())
        self.target = copy.deepcopy(self.online).requires_grad_(False)
        self.predictor = nn.Sequential(Residual(), linear())

    def forward(self, x):
        with torch.no_grad():
            for target, online in zip(self.target.parameters(), self.online.parameters(), strict=True):
                target.data = target.data * 0.9 + online.data * 0.1
        return F.normalize(self.predictor(self.online(x)), dim=-1) - F.normalize(self.target(x), dim=-1).detach()


# --- what is hard to read -------------------------------------------------------------------------------------------


@TABLE.odd("hard to read")
class SparseAdjacency(Layer):
    def __init__(self):
        super().__init__()
        self.register_buffer("adjacency", torch.eye(WIDTH).roll(1, 0).to_sparse())

    def forward(self, x):
        return self.fc(torch.sparse.mm(self.adjacency, x.reshape(-1, WIDTH).T).T.view_as(x))


@TABLE.odd("hard to read")
class Lazy(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden, self.out = nn.LazyLinear(2 * WIDTH), nn.LazyLinear(WIDTH)

    def forward(self, x):
        return self.out(torch.relu(self.hidden(x)))


@TABLE.odd("hard to read")
class PerRow(Layer):
    def forward(self, x):
        return torch.vmap(lambda row: torch.tanh(self.fc(row)) / (1 + row.norm()))(x.reshape(-1, WIDTH)).view_as(x)


@TABLE.odd("hard to read")
class RegistersParameter(nn.Module):
    def forward(self, x):
        if "scale" not in self._parameters:
            self.register_parameter("scale", nn.Parameter(torch.ones(x.shape[-1], dtype=x.dtype)))
        return x * self.scale


@TABLE.odd("hard to read")
class RegistersBuffer(Layer):
    def forward(self, x):
        if not hasattr(self, "window"):
            self.register_buffer("window", torch.hann_window(x.shape[-1], dtype=x.dtype))
        return self.fc(x * self.window)


@TABLE.odd("hard to read")
class ReplacesBias(Layer):
    def __init__(self):
        super().__init__()
        self.register_buffer("bias", torch.zeros(WIDTH))

    def forward(self, x):
        if "bias" in self._buffers:
            del self.bias
            self.bias = torch.full((WIDTH,), 0.1, dtype=x.dtype)
        return self.fc(x) + self.bias


@TABLE.odd("hard to read")
class Energy(nn.Module):
    """A force: the gradient of an energy inside the forward."""

    def __init__(self):
        super().__init__()
        self.energy = nn.Sequential(linear(), nn.Softplus(), nn.Linear(WIDTH, 1))

    def forward(self, x):
        with torch.enable_grad():
            place = x if x.requires_grad else x.detach().requires_grad_()
            return -torch.autograd.grad(self.energy(place).sum(), place, create_graph=True)[0]


@TABLE.root("hard to read", vectors)
class TiesInForward(nn.Module):
    """An autoencoder that ties its decoder when it first runs."""

    def __init__(self):
        super().__init__()
        self.encode = nn.Linear(6, WIDTH)
        self.blocks = nn.Sequential(Residual(), Residual(), Residual())
        self.decode, self.shadow = nn.Linear(6, WIDTH, bias=False), nn.Linear(6, WIDTH, bias=False)

    def forward(self, x):
        self.shadow.weight = self.decode.weight
        return self.blocks(self.encode(x)) @ self.shadow.weight


@TABLE.root("hard to read", vectors)
class Functional(nn.Module):
    """One block's code, run with a mixture of two blocks' parameters."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(6, WIDTH)
        self.blocks = nn.ModuleList(Residual() for _ in range(3))

    def forward(self, x):
        x = self.stem(x)
        first, second = (dict(block.named_parameters()) for block in self.blocks[:2])
        mixed = {name: 0.5 * (first[name] + second[name]) for name in first}
        return self.blocks[2](torch.func.functional_call(self.blocks[0], mixed, (x,)))
