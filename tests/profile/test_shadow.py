"""The twin of a module tree: other tensors, same structure, nothing that leaks back."""

from __future__ import annotations

from types import MethodType

import torch
from torch import Tensor, nn

from autosplit.profile.node_costs.shadow import shadow


def twin_of(module: nn.Module) -> nn.Module:
    return shadow(module, replace=lambda t: nn.Parameter(t.detach() + 1, requires_grad=False)).module


def test_tensors_are_replaced_once_per_object():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.BatchNorm1d(3))
    model[1].weight = model[0].weight
    twin = twin_of(model)
    assert twin[0].weight is twin[1].weight
    assert list(twin.state_dict()) == list(model.state_dict())
    assert all(torch.equal(t, model.state_dict()[name] + 1) for name, t in twin.state_dict().items())


def test_what_runs_on_the_twin_stays_there():
    model = nn.BatchNorm1d(3)
    model.seen, model.count = [], 0
    twin = shadow(model, replace=lambda t: nn.Parameter(t.detach().clone(), requires_grad=False)).module
    twin(torch.randn(4, 3))
    twin.seen.append(1)
    twin.count += 1
    twin.extra = nn.Linear(1, 1)
    assert (model.seen, model.count) == ([], 0)
    assert not hasattr(model, "extra")
    assert model.num_batches_tracked == 0
    assert twin.num_batches_tracked == 1


def test_tensors_in_attributes_and_bound_methods_are_followed():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(2))
            self.tables = {"scales": [torch.zeros(2), torch.zeros(2)]}

        def patched(self, x: Tensor) -> Tensor:
            return x + self.weight + self.tables["scales"][1]

    model = Model()
    model.forward = MethodType(Model.patched, model)
    assert model(torch.zeros(2)).tolist() == [0, 0]
    assert twin_of(model)(torch.zeros(2)).tolist() == [2, 2]
