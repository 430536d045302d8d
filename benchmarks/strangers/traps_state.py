"""Traps of state: what calls set, what changes before the backward, what is written into inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrizations

from benchmarks.strangers.compare import Batch, Subject
from benchmarks.strangers.hosts import WIDTH, Residual, vectors

SUBJECTS: list[Subject] = []
LOG: list[Any] = []


class Net(nn.Module):
    """Blocks and a head; traps add their own to it."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, WIDTH)
        self.blocks = nn.ModuleList([Residual(), Residual(), Residual()])
        self.act = nn.LeakyReLU(0.1)
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = self.act(self.dropout(block(x)))
        return self.head(x)


def fresh(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """Return a builder that also empties the log."""

    def made() -> nn.Module:
        LOG.clear()
        return build()

    return made


def declared(subjects: list[Subject]) -> Callable:
    """Return a decorator that adds a class, or a function that makes a model, to the subjects."""

    def trap(kind: str, batch: Callable[[int], Batch] = vectors, **more: Any) -> Callable:
        def declare(build):
            subjects.append(Subject(build.__name__, kind, fresh(build), batch, outside=lambda: list(LOG), **more))
            return build

        return declare

    return trap


trap = declared(SUBJECTS)


def mid_step(kind: str) -> Callable:
    """Declare a change that the caller makes between the forward and the backward of a call."""

    def declare(change: Callable[[nn.Module], None]):
        def extra(model: nn.Module) -> torch.Tensor:
            change(model)
            return torch.zeros((), dtype=torch.float64)

        def restore(model: nn.Module, round_: int) -> None:
            model.train()
            model.dropout.p, model.act.negative_slope = 0.2, 0.1

        SUBJECTS.append(Subject(change.__name__, kind, fresh(Net), vectors, between=restore, extra_loss=extra))
        return change

    return declare


# --- item 1: what calls set, with another call's arguments ----------------------------------------------------------


def with_hidden_later(rows: int) -> Batch:
    """Ask for the hidden states in the second batch size only."""
    return vectors(rows)[0], {"return_hidden": rows == 5}


@trap("second call", with_hidden_later)
class CapturesByHooks(nn.Module):
    """Sets capturing hooks in its first call, as transformers does."""

    def __init__(self):
        super().__init__()
        self.net = Net()
        self.captured, self.ready = [], False

    def forward(self, x, return_hidden=False):
        if not self.ready:
            for block in self.net.blocks:
                block.register_forward_hook(lambda module, args, output: self.captured.append(output))
            self.ready = True
        self.captured.clear()
        output = self.net(x)
        return (output, tuple(self.captured)) if return_hidden else (output,)


@trap("second call", with_hidden_later)
class CollectsLater(Net):
    def forward(self, x, return_hidden=False):
        hidden = []
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
            hidden.append(x)
        return {"output": self.head(x), "hidden": hidden} if return_hidden else {"output": self.head(x)}


@trap("second call", with_hidden_later)
class WrapsForward(Net):
    """Replaces a child's forward in its first call."""

    def forward(self, x, return_hidden=False):
        if "wrapped" not in self.__dict__:
            original = self.head.forward
            self.head.forward = lambda h: original(h) * 2
            self.wrapped = True
        return super().forward(x)


@trap("second call")
class AddsHookOnce(Net):
    def forward(self, x):
        if not self.head._forward_hooks:
            self.head.register_forward_hook(lambda module, args, output: output * 0.5)
        return super().forward(x)


@trap("second call")
class ChangesClass(Net):
    """A child becomes another class in the first call, as parametrisations do."""

    def forward(self, x):
        if not hasattr(self.head, "parametrizations"):
            parametrizations.weight_norm(self.head)
        return super().forward(x)


@trap("second call")
class TiesWeights(Net):
    def forward(self, x):
        self.blocks[1].norm.weight = self.blocks[0].norm.weight
        return super().forward(x)


@trap("second call", with_hidden_later)
class FlagByArgument(Net):
    """A later argument sets an attribute that still later calls read."""

    scale = 1.0

    def forward(self, x, return_hidden=False):
        if return_hidden:
            self.scale = 0.5
        return super().forward(x) * self.scale


# --- item 3: read, then changed before the backward -----------------------------------------------------------------


@mid_step("changed before backward")
def evaluates_before_backward(model):
    model.eval()


@mid_step("changed before backward")
def changes_dropout_before_backward(model):
    model.dropout.p = 0.9


@mid_step("changed before backward")
def changes_slope_before_backward(model):
    model.act.negative_slope = 0.7


@mid_step("changed before backward")
def moves_generator_before_backward(model):
    torch.rand(3)


class Buffered(Net):
    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(WIDTH))


@trap("changed before backward")
class WrittenByNextBlock(Buffered):
    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x) * self.scale.sqrt()
            self.scale.mul_(0.9)
        return self.head(x)


@trap("changed before backward")
class WrittenInEpilogue(Buffered):
    def forward(self, x):
        x = self.blocks[1](self.blocks[0](self.stem(x)) * self.scale.exp())
        out = self.head(x)
        self.scale.lerp_(x.detach().mean(0), 0.2)
        return out - out.mean(0)


@trap("changed before backward", options={"batch_norm": "full"})
class NormTwice(Net):
    """One BatchNorm layer, called twice."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x):
        x = self.norm(self.blocks[0](self.stem(x)))
        return self.head(self.norm(self.blocks[1](x)))


@trap("changed before backward")
class WritesViaView(Buffered):
    def forward(self, x):
        x = self.blocks[0](self.stem(x)) * self.scale.sin()
        half = self.scale[: WIDTH // 2]
        half.add_(0.1)
        return self.head(self.blocks[1](x))


@trap("changed before backward")
class SpectralNorm(Net):
    def __init__(self):
        super().__init__()
        parametrizations.spectral_norm(self.head)


# --- item 4: writes into inputs and targets -------------------------------------------------------------------------


@trap("in-place", leaf_inputs=False)
class ScalesInputTwice(Net):
    def forward(self, x):
        return super().forward(x.mul_(0.5).mul_(0.5)) + x.sum(-1, keepdim=True)


@trap("in-place", lambda rows: ((list(vectors(rows)[0]) * 2,), {}))
class WritesListEntry(Net):
    def forward(self, pair):
        pair[0] = pair[0] * 2
        pair[1].add_(1.0)
        return super().forward(pair[0]) + pair[1].sum(-1, keepdim=True)


@trap("in-place", lambda rows: (({"x": vectors(rows)[0][0]},), {}))
class AddsDictEntry(Net):
    def forward(self, batch):
        batch["hidden"] = self.stem(batch.pop("x"))
        return self.head(self.blocks[0](batch["hidden"]))


@trap("in-place", leaf_inputs=False)
class ReturnsItsInput(Net):
    def forward(self, x):
        x.mul_(2)
        return super().forward(x), x


def loss_that_writes(output, target):
    target.mul_(0.5)
    return ((output.mean(1) - target) ** 2).mean()


SUBJECTS.append(Subject("loss_writes_target", "in-place", fresh(Net), vectors, loss=loss_that_writes))
