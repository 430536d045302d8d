"""Models in which rows are independent, and models in which something makes them matter to each other."""

from __future__ import annotations

import importlib
import random
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from autosplit.trace.tree_rows import OutputRows

WIDTH = 4
COUNT = 0
LIST: list[Any] = []


class Helper:
    """A Python object that a model holds."""

    def __init__(self) -> None:
        self.calls = 0
        self.inner = {"deep": [1, 2]}


class Net(nn.Module):
    """A layer, and whatever a test makes of it."""

    total = 0

    def __init__(self, body: Callable[[Net, Tensor], Any], **attributes: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.body = body
        self.register_buffer("seen", torch.zeros(2))
        for name, value in attributes.items():
            setattr(self, name, value)
        self.double()

    def forward(self, x: Tensor, **rest: Any) -> Any:
        return self.body(self, x, **rest)


# -- independent -----------------------------------------------------------------------------------------------------
def per_row(net: Net, x: Tensor) -> Tensor:
    return torch.stack([net.layer(row) for row in x])


def transposed(net: Net, x: Tensor) -> dict[str, Any]:
    y = net.layer(x)
    return {"a": y, "b": [y.T, "text", None, 3], "heads": y.reshape(2 * len(x), WIDTH // 2)}


def gated(net: Net, x: Tensor) -> Tensor:
    return net.layer(x) if net.training or net.layer.weight.sum() > 1e9 else net.layer(-x)


def checkpointed(net: Net, x: Tensor) -> Tensor:
    return checkpoint(net.layer, x, use_reentrant=False)


def importing(net: Net, x: Tensor) -> Tensor:
    sys.modules.pop("tests.trace.imported_late", None)
    importlib.import_module("tests.trace.imported_late")
    return net.layer(x)


def padded(net: Net, x: Tensor) -> Tensor:
    return net.layer(x)[:, torch.tensor([0, 2])]


INDEPENDENT = {
    "loop over rows": (per_row, [OutputRows(0, 1)]),
    "other dimensions": (transposed, [OutputRows(0, 1), OutputRows(1, 1), None, None, None, OutputRows(0, 2)]),
    "reads of weights": (gated, [OutputRows(0, 1)]),
    "checkpoint": (checkpointed, [OutputRows(0, 1)]),
    "an import": (importing, [OutputRows(0, 1)]),
    "indexing": (padded, [OutputRows(0, 1)]),
    "batch norm in eval": (lambda net, x: net.norm(net.layer(x)), [OutputRows(0, 1)]),
    "scratch list of its own": (lambda net, x: torch.stack([*map(net.layer, x)]), [OutputRows(0, 1)]),
}


# -- not independent -------------------------------------------------------------------------------------------------
class Mixing(torch.autograd.Function):
    """The identity; its backward gives every row the mean of all gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.mean(0, keepdim=True).expand_as(gradient).clone()


class Normalising(torch.autograd.Function):
    """A layer's product whose weight gradient is divided by the number of rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradient @ weight.T, x.T @ gradient / len(x)


def counting(net: Net, x: Tensor) -> Tensor:
    global COUNT
    COUNT += 1
    return net.layer(x)


def listing(net: Net, x: Tensor) -> Tensor:
    remember(x)
    y = net.layer(x)
    LIST.pop()
    return y


def remember(x: Tensor) -> None:
    LIST.append(x)


def closing() -> Callable[..., Tensor]:
    calls = 0

    def body(net: Net, x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return net.layer(x)

    return body


def class_attribute(net: Net, x: Tensor) -> Tensor:
    Net.total += 1
    return net.layer(x)


def put_back(net: Net, x: Tensor) -> Tensor:
    net.hidden = x
    y = net.layer(net.hidden)
    net.hidden = None
    return y


def pushed(net: Net, x: Tensor) -> Tensor:
    net.stack.append(x)
    y = net.layer(x)
    net.stack.pop()
    return y


def helped(net: Net, x: Tensor) -> Tensor:
    net.helper.calls += 1
    return net.layer(x)


def deeply(net: Net, x: Tensor) -> Tensor:
    net.helper.inner["deep"].append(1)
    y = net.layer(x)
    net.helper.inner["deep"].pop()
    return y


def array(net: Net, x: Tensor) -> Tensor:
    net.array += 1
    return net.layer(x)


def doubled_if(net: Net, x: Tensor) -> Tensor:
    return net.layer(x) * (2 if len(x) > 5 else 1)


def seen_by_data(net: Net, x: Tensor) -> Tensor:
    net.seen.data += 1
    return net.layer(x)


def clipped(net: Net, x: Tensor) -> Tensor:
    net.layer.weight.data.clamp_(-0.1, 0.1)
    return net.layer(x)


def assigned(net: Net, x: Tensor) -> Tensor:
    net.seen = net.seen + 1
    return net.layer(x)


def inner_backward(net: Net, x: Tensor) -> Tensor:
    net.layer(x).sum().backward()
    return net.layer(x)


def precision(net: Net, x: Tensor) -> Tensor:
    torch.set_default_dtype(torch.float64)
    try:
        return net.layer(x)
    finally:
        torch.set_default_dtype(torch.float32)


def in_place(net: Net, x: Tensor) -> Tensor:
    return net.layer(x.mul_(2))


DEPENDENT: dict[str, tuple[Callable[..., Any], str]] = {
    "item": (lambda net, x: net.layer(x) * x.mean().item(), "reads values"),
    "bool": (lambda net, x: net.layer(x) if x.sum() > 0 else net.layer(-x), "reads values"),
    "float": (lambda net, x: net.layer(x) * float(x.detach().max()), "reads values"),
    "tolist": (lambda net, x: net.layer(x) * x.detach()[0].tolist()[0], "reads values"),
    "numpy": (lambda net, x: net.layer(x) * np.asarray(x.detach())[0, 0], "reads values"),
    "memory": (lambda net, x: net.layer(x) * (x.data_ptr() % 2 + 1), "reads values"),
    "equal": (lambda net, x: net.layer(x) * torch.equal(x, x), "reads values"),
    "nonzero": (lambda net, x: net.layer(x) / (x[:, 0] > 0).nonzero().shape[0], "sizes hang on values"),
    "mask": (lambda net, x: net.layer(x) * x[x > 0].shape[0], "sizes hang on values"),
    "dropout": (lambda net, x: F.dropout(net.layer(x), 0.5), "random"),
    "rand": (lambda net, x: net.layer(x) + torch.rand(WIDTH), "random"),
    "python's random": (lambda net, x: net.layer(x) * random.random(), "random numbers of Python"),
    "numpy's random": (lambda net, x: net.layer(x) * np.random.rand(), "random numbers of Python"),
    "batch norm": (lambda net, x: net.norm(net.layer(x)), "writes to its parameters or buffers"),
    "buffer": (seen_by_data, "writes to its parameters or buffers"),
    "parameter": (clipped, "writes to its parameters or buffers"),
    "buffer assignment": (assigned, "sets the attribute 'seen'"),
    "put back": (put_back, "sets the attribute 'hidden'"),
    "stack": (pushed, "Python state"),
    "helper": (helped, "Python state"),
    "deep helper": (deeply, "Python state"),
    "array": (array, "numpy array"),
    "global": (counting, "counting writes to variables outside of the model"),
    "global list": (listing, "Python state"),
    "closure": (closing(), "writes to variables outside of the model"),
    "class attribute": (class_attribute, "Python state"),
    "mean": (lambda net, x: net.layer(x) - net.layer(x).mean(0), "takes rows of the batch together"),
    "flip": (lambda net, x: net.layer(x.flip(0)), "depends on other rows"),
    "size": (doubled_if, ""),
    "faint": (lambda net, x: net.layer(x) + 1e-12 * x.cumsum(0), "depends on other rows"),
    "sum": (lambda net, x: net.layer(x).sum(), "takes rows of the batch together"),
    "weight": (lambda net, x: (net.layer(x), net.layer.weight * 2), "no dimension that follows the rows"),
    "number": (lambda net, x: (net.layer(x), len(x)), "depends on the batch"),
    "object": (lambda net, x: (net.layer(x), object()), "cannot be put together"),
    "list": (lambda net, x: [net.layer(row) for row in x], ""),
    "gradient": (lambda net, x: Mixing.apply(net.layer(x)), ""),
    "weight's gradient": (lambda net, x: Normalising.apply(x, net.layer.weight), "gradient"),
    "backward": (inner_backward, "gradients"),
    "switch": (precision, "torch's global settings"),
    "its input": (in_place, "changes its inputs"),
}
