"""What a model has before it is sharded, and what is changed of it afterwards: kept, or refused on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from autosplit import autosplit
from tests.distributed.processes import error_of
from tests.distributed.replicas import mesh_of, replica_of

LOSS = nn.MSELoss()


class Small(nn.Module):
    """Two blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(4, 4)
        self.others: list[Tensor] = []

    def forward(self, value: Tensor) -> Tensor:
        for block in self.blocks:
            value = block(value)
        return self.head(value) + sum(other.sum() for other in self.others)


PLANS: dict[Any, Any] = {}
"""The plans of this process, which measured times take long to make."""


def piped(model: nn.Module, parallelize: Any = "fsdp") -> Any:
    options = {"mesh": mesh_of(2), "sample": torch.ones(2, 4), "parallelize": parallelize}
    plan = PLANS.get(parallelize)
    pipe = autosplit(model, **options, **({"chunks": 1} if plan is None else {"plan": plan}))
    PLANS[parallelize] = pipe.plan
    return pipe


def rows() -> tuple[Tensor, Tensor]:
    """Return inputs and targets of all replicas."""
    made = torch.randn(2, 4, 4, generator=torch.Generator().manual_seed(1))
    return made[0], made[1]


def trained(pipe: Any) -> None:
    inputs, targets = rows()
    own = slice(2 * replica_of(mesh_of(2)), 2 * replica_of(mesh_of(2)) + 2)
    pipe.train_step(inputs[own], target=targets[own], loss_fn=LOSS)


# -- before ----------------------------------------------------------------------------------------------------------
def hooked() -> Any:
    model = Small()
    model.head.weight.register_hook(lambda gradient: gradient * 2)
    return piped(model)


def held_twice() -> Any:
    model = Small()
    model.others.append(model.head.weight)
    return piped(model)


class Around(nn.Module):
    """Calls a block through DistributedDataParallel, and has the block's own names."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.__dict__["call"] = DistributedDataParallel(block)
        for name, child in block.named_children():
            self.register_module(name, child)

    def forward(self, value: Tensor) -> Tensor:
        return self.call(value)


def in_ddp(part: nn.Module, mesh: Any) -> nn.Module:
    blocks = part.get_submodule("blocks")
    for name, block in list(blocks.named_children()):
        blocks.register_module(name, Around(block))
    return part


# -- after -----------------------------------------------------------------------------------------------------------
def set_by_data() -> Any:
    pipe = piped(Small())
    for parameter in pipe.parameters():
        parameter.data = parameter.data * 1.1
    trained(pipe)


def assigned() -> Any:
    pipe = piped(model := Small())
    model.head.bias = nn.Parameter(torch.ones(4))
    trained(pipe)


def loaded_by_assigning() -> Any:
    pipe = piped(Small())
    pipe.load_state_dict(Small().state_dict(), assign=True)
    pipe.unsplit()


def optimized_as_before() -> Any:
    model = Small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trained(piped(model))
    optimizer.step()


def optimized_as_in_shards() -> Any:
    pipe = piped(Small())
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    pipe.unsplit()
    optimizer.step()


def as_it_is(part: nn.Module, mesh: Any) -> nn.Module:
    return part


def hooked_afterwards() -> Any:
    pipe = piped(model := Small(), as_it_is)
    trained(pipe)
    model.blocks[0].register_forward_hook(lambda module, inputs, output: output * 2)
    trained(pipe)


def referring() -> Any:
    model = Small()
    model.blocks[0].root = [model]
    return piped(model, as_it_is)


REFUSED: dict[Callable[[], Any], str] = {
    hooked: "head.weight have hooks",
    held_twice: "'others' holds 'head.weight' too",
    hooked_afterwards: "'blocks.0' has other hooks or attributes",
    referring: "'blocks.0' refers to a module outside of it by 'root'",
    lambda: piped(Small(), in_ddp): "DistributedDataParallel",
    set_by_data: "'blocks.0.0.weight' was set to another tensor",
    assigned: "'head.bias' was set to another tensor",
    loaded_by_assigning: "was set to another tensor",
    optimized_as_before: "make the optimizer of pipe.parameters()",
    optimized_as_in_shards: "make the optimizer of model.parameters()",
}


def changed() -> list[str]:
    """Return what is not right; called in every process."""
    found = [f"{text}: {said}" for act, text in REFUSED.items() if text not in (said := error_of(act))]
    plain, pipe, calls = Small(), piped(Small()), list[Tensor]()
    pipe.get_parameter("head.weight").register_hook(calls.append)
    trained(pipe)
    model = pipe.unsplit()
    inputs, targets = rows()
    LOSS(plain(inputs), targets).backward()
    for name, parameter in model.named_parameters():
        right = plain.get_parameter(name).grad
        if parameter.grad is None or not torch.allclose(parameter.grad, right):
            found.append(f"gradient of {name} after unsplit()")
    LOSS(model(inputs), targets).backward()
    return found if len(calls) == 2 else [*found, f"{len(calls)} calls of a hook"]
