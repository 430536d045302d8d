"""Traps of callers: their hooks, what they change between calls, and arguments that differ from call to call."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.strangers.compare import Batch, Subject
from benchmarks.strangers.hosts import vectors
from benchmarks.strangers.traps_state import LOG, Net, declared, fresh

SUBJECTS: list[Subject] = []
trap = declared(SUBJECTS)


def between(kind: str, **more: Any) -> Callable:
    """Declare a change that the caller makes before every round."""

    def declare(change: Callable[[Net, int], None]):
        outside = {"between": change, "outside": lambda: list(LOG)}
        SUBJECTS.append(Subject(change.__name__, kind, fresh(Net), vectors, **outside, **more))
        return change

    return declare


# --- items 5 and 6: the caller's hooks and what they keep -----------------------------------------------------------


def joined() -> Any:
    """Return what hooks logged as one value.

    Hooks of inner modules fire once per microbatch, and again where it is recomputed, with the same bits.
    """
    if LOG and isinstance(LOG[0], torch.Tensor):
        return torch.cat([entry.flatten() for entry in LOG]) if LOG[0].dim() else torch.stack(LOG).unique().sum()
    return sorted(set(LOG))


def hooked(register: Callable[[Net], None]) -> Callable:
    """Declare hooks that the caller sets before the split."""

    def build() -> nn.Module:
        net = Net()
        register(net)
        return net

    SUBJECTS.append(Subject(register.__name__, "hooks", fresh(build), vectors, outside=joined))
    return register


@hooked
def logs_activations_of_a_block(net):
    net.blocks[1].register_forward_hook(lambda module, args, output: LOG.append(output.detach().norm(dim=-1).sum()))


@hooked
def logs_the_models_output(net):
    net.register_forward_hook(lambda module, args, output: LOG.append(output.detach()))


@hooked
def logs_before_the_model(net):
    net.register_forward_pre_hook(lambda module, args: LOG.append(args[0].detach().clone()))


@hooked
def logs_parameter_gradients(net):
    net.head.weight.register_hook(lambda grad: LOG.append(grad.clone()))


@hooked
def logs_accumulated_gradients(net):
    net.head.weight.register_post_accumulate_grad_hook(lambda parameter: LOG.append(parameter.grad.clone()))


@hooked
def changes_activations(net):
    net.blocks[0].register_forward_hook(lambda module, args, output: output * 0.5)


@hooked
def changes_inputs(net):
    net.blocks[1].register_forward_pre_hook(lambda module, args: (args[0] + 0.1,))


@hooked
def counts_backward_of_the_model(net):
    net.register_full_backward_hook(lambda module, inputs, outputs: LOG.append(len(outputs)))


@hooked
def logs_block_names(net):
    net.blocks[2].register_forward_pre_hook(lambda module, args: LOG.append("block 2"))


# --- item 7 and late binding: what changes between calls ------------------------------------------------------------


@between("between calls")
def freezes_and_unfreezes(net, round_):
    net.stem.requires_grad_(round_ != 1)


@between("between calls")
def changes_dropout(net, round_):
    net.dropout.p = 0.1 * round_


@between("between calls")
def evaluates_one_block(net, round_):
    net.blocks[0].train(round_ == 0)


@between("between calls")
def replaces_a_module(net, round_):
    if round_ == 1:
        net.blocks[1] = copy.deepcopy(net.blocks[0])


@between("between calls")
def replaces_a_parameter(net, round_):
    if round_ == 2:
        net.head.weight = nn.Parameter(net.head.weight.detach() * 0.5)


@between("between calls")
def loads_a_state(net, round_):
    net.load_state_dict({name: value * 0.9 for name, value in net.state_dict().items()}, assign=round_ == 1)


@between("between calls")
def adds_a_hook(net, round_):
    if round_ == 1:
        net.blocks[1].register_forward_hook(lambda module, args, output: output * 2)


@between("between calls")
def replaces_an_activation(net, round_):
    net.act = nn.LeakyReLU(0.1) if round_ == 0 else nn.Tanh()


@between("between calls")
def replaces_a_forward(net, round_):
    if round_ == 1:
        net.blocks[0].forward = lambda x: x * 2


def with_callable(rows: int) -> Batch:
    """Pass a lambda that is made anew, often at the address of the last one."""
    factor = rows / 10
    return vectors(rows)[0], {"activation": lambda h: h * factor}


@trap("keys", with_callable)
class TakesCallable(Net):
    def forward(self, x, activation):
        return activation(super().forward(x))


def with_mode(rows: int) -> Batch:
    """Pass another string, number and flag."""
    return vectors(rows)[0], {"mode": "double" if rows == 5 else "single", "scale": rows / 7, "deep": rows > 5}


@trap("keys", with_mode)
class TakesScalars(Net):
    def forward(self, x, mode="single", scale=1.0, deep=True):
        x = super().forward(x) * scale
        x = x * 2 if mode == "double" else x
        return torch.tanh(x) if deep else x


def with_optional(rows: int) -> Batch:
    """Pass a mask in the second batch size only."""
    return vectors(rows)[0], {} if rows != 5 else {"mask": torch.rand(rows, 1).double() > 0.5}


@trap("keys", with_optional)
class TakesMask(Net):
    def forward(self, x, mask=None):
        out = super().forward(x)
        return out if mask is None else out.masked_fill(mask, 0.0)


@trap(
    "keys",
    lambda rows: (vectors(rows)[0], {"bias": torch.full((3,), rows / 7).double()}),
    options={"batch_dims": {"bias": None}},
)
class TakesSharedTensor(Net):
    def forward(self, x, bias):
        return super().forward(x) + F.softplus(bias)
