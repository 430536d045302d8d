"""Where a model's state lies on ranks: owners of what some calls leave out, counters, averages, the model itself."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from autosplit import autosplit
from autosplit.distributed import checkpoint
from tests.distributed.processes import Pool, error_of


class Blocks(nn.Module):
    """Blocks, and behind them what only training uses or only evaluation: statistics, a head, a threshold."""

    def __init__(self, *, head: bool = False) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*[nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)) for _ in range(4)])
        self.aux = nn.Linear(8, 8) if head else None
        self.register_buffer("ema", torch.zeros(8))
        self.register_buffer("bound", torch.zeros(8))

    def reset_parameters(self) -> None:
        self.ema.zero_()
        self.bound.fill_(0.1)

    def forward(self, value: Tensor) -> Any:
        value = self.blocks(value)
        if not self.training:
            return value + self.bound
        self.ema.mul_(0.9).add_(value.detach().mean(0), alpha=0.1)
        return value if self.aux is None else value + self.aux(value)


def _value(rows: int = 8) -> Tensor:
    return torch.randn(rows, 8, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def _on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    with torch.device("meta"):
        return make().double()


def _source(head: bool) -> nn.Module:
    torch.manual_seed(0)
    source = Blocks(head=head).double()
    source.reset_parameters()
    return source


def trained_and_evaluated(where: str, path: Path, *, first_in_eval: bool) -> list[float]:
    """Train and evaluate by turns, save the weights; return how far all is from the plain model's."""
    plain, head = _source(not first_in_eval), not first_in_eval
    given: dict[str, Any] = {"devices": "torchrun", "sample": _value()}
    model = copy.deepcopy(plain)
    if where != "real":
        model = _on_meta(lambda: Blocks(head=head))
        given |= {"weights": plain.state_dict(), "sample": torch.empty(8, 8, device="meta", dtype=torch.float64)}
    if where == "tp":
        del given["devices"]
        given["mesh"] = init_device_mesh("cpu", (1, 2), mesh_dim_names=("pp", "tp"))
    pipe = autosplit(model.train(not first_in_eval), chunks=2, **given)
    pipe.train()
    optimizers = [torch.optim.SGD(module.parameters(), 0.1) for module in (pipe, plain)]
    found = []
    for _ in range(2):
        loss = F.mse_loss(plain(_value()), _value())
        loss.backward()
        found.append(float(loss.detach() - pipe.train_step(_value(), target=_value(), loss_fn=nn.MSELoss())))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        plain.eval()
        if (output := pipe.eval_step(_value())) is not None:
            found.append(float((output - plain(_value())).detach().abs().max()))
        plain.train()
    checkpoint.save_weights(path / "weights.safetensors", pipe)
    checkpoint.save(path, 1, pipe)
    checkpoint.load_weights(path / "weights.safetensors", saved := copy.deepcopy(plain))
    pairs = zip(saved.state_dict().values(), plain.state_dict().values(), strict=True)
    return [*map(abs, found), *(float((a - b).abs().max()) for a, b in pairs)]


@pytest.mark.parametrize("where", ["real", "meta", "tp"])
@pytest.mark.parametrize("first_in_eval", [False, True])
def test_what_some_calls_leave_out_has_one_owner(ranks: Pool, tmp_path: Path, where: str, first_in_eval: bool) -> None:
    for off in ranks(2).run(trained_and_evaluated, where, tmp_path, first_in_eval=first_in_eval):
        assert max(off) < 1e-12


class Router(nn.Module):
    """Two of four experts for each row, by scores with a bias; it counts what each expert gets."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 4)
        self.experts = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])
        self.register_buffer("count", torch.zeros(4))
        self.register_buffer("bias", torch.zeros(4))

    def forward(self, value: Tensor) -> Tensor:
        scores = self.gate(value).sigmoid()
        chosen = F.one_hot((scores + self.bias).topk(2, -1).indices, 4).sum(-2).to(value.dtype)
        with torch.no_grad():
            self.count += chosen.sum(0)
        weights = scores * chosen
        return value + sum(weights[:, i : i + 1] * expert(value) for i, expert in enumerate(self.experts))


def _balance(model: nn.Module) -> None:
    """Move the biases by the counters, as is done before an optimizer's step."""
    with torch.no_grad():
        for router in (module for module in model.modules() if isinstance(module, Router)):
            router.bias.add_(0.1 * torch.sign(router.count.mean() - router.count))
            router.count.zero_()


def balanced(dp: int) -> list[float]:
    """Train with experts that are balanced between steps; return how far losses and buffers are from the plain ones."""
    torch.manual_seed(0)
    model = nn.Sequential(*[Router() for _ in range(4)], nn.Linear(8, 4)).double()
    plain = copy.deepcopy(model)
    mesh = init_device_mesh("cpu", (dp, dist.get_world_size() // dp), mesh_dim_names=("dp", "pp"))
    number = mesh.get_local_rank("dp")
    pipe = autosplit(model, mesh=mesh, chunks=4, sample=_value(16 // dp), schedule="1f1b")
    optimizers = [torch.optim.SGD(module.parameters(), 0.05) for module in (pipe, plain)]
    found = []
    for step in range(3):
        value = _value(16) + step / 10
        target = torch.arange(16) % 4
        loss = F.cross_entropy(plain(value), target)
        loss.backward()
        own = slice(number * 16 // dp, (number + 1) * 16 // dp)
        found.append(float(loss.detach() - pipe.train_step(value[own], target=target[own], loss_fn=F.cross_entropy)))
        buffers = dict(plain.named_buffers())
        found += [float((buffer - buffers[name]).abs().max()) for name, buffer in pipe.named_buffers()]
        for module, optimizer in ((model, optimizers[0]), (plain, optimizers[1])):
            _balance(module)
            optimizer.step()
            optimizer.zero_grad()
    return list(map(abs, found))


@pytest.mark.parametrize("dp", [1, 2])
def test_a_counter_of_rows_lies_where_its_module_does(ranks: Pool, dp: int) -> None:
    for off in ranks(2).run(balanced, dp):
        assert max(off) < 1e-12


class Averaging(Router):
    """A router that keeps the mean of what it chooses, which wants the whole batch."""

    def forward(self, value: Tensor) -> Tensor:
        self.count.add_(self.gate(value).detach().mean(0))
        return super().forward(value)


def apart() -> list[str]:
    """Make a pipe whose first router's counter is on the last rank; return what warnings say."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        model = nn.Sequential(Averaging(), Router(), Router(), nn.Linear(8, 4)).double()
        autosplit(model, devices="torchrun", chunks=4, sample=_value(16))
    return [str(own.message) for own in found]


def _average(module: nn.Module) -> AveragedModel:
    return AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(0.5), use_buffers=True)


def averaged(path: Path) -> list[float]:
    """Average a rank's part beside the plain model, save it and run the pipe with it; return how far they are apart."""
    plain = _source(head=True)
    model = copy.deepcopy(plain)
    pipe = autosplit(model, devices="torchrun", chunks=2, sample=_value())
    optimizers = [torch.optim.SGD(module.parameters(), 0.1) for module in (pipe, plain)]
    own, expected = _average(pipe), _average(plain)
    for _ in range(3):
        F.mse_loss(plain(_value()), _value()).backward()
        pipe.train_step(_value(), target=_value(), loss_fn=nn.MSELoss())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        own.update_parameters(pipe)
        expected.update_parameters(plain)
    checkpoint.save_weights(path, own.module)
    checkpoint.load_weights(path, saved := copy.deepcopy(plain))
    pairs = zip(saved.state_dict().values(), expected.module.state_dict().values(), strict=True)
    pipe.load_state_dict(own.module.state_dict())
    output = pipe.eval_step(_value())
    expected.eval()
    off = [] if output is None else [float((output - expected(_value())).detach().abs().max())]
    return [*off, *(float((a - b).abs().max()) for a, b in pairs)]


def test_an_average_of_the_pipe_is_that_of_the_model(ranks: Pool, tmp_path: Path) -> None:
    for off in ranks(2).run(averaged, tmp_path / "average"):
        assert max(off) < 1e-12


def taken_for_whole() -> list[str]:
    """Use the model itself, of which a rank has a part; return what is said, and whether it is whole behind unsplit."""
    model = _source(head=True)
    before = _average(model)
    pipe = autosplit(model, devices="torchrun", chunks=2, sample=_value())
    core = pipe._core
    pipe.train_step(_value(), target=_value(), loss_fn=nn.MSELoss())
    average = _average(pipe)
    uses: list[Callable[[], Any]] = [
        lambda: model(_value()),
        model.state_dict,
        lambda: _average(model),
        lambda: pickle.dumps(model),
        lambda: before.update_parameters(pipe),
        lambda: average(_value()),
    ]
    said = list(map(error_of, uses))
    assert core.recordings.made == 1
    whole = pipe.unsplit()
    copies = copy.deepcopy(whole)(_value()), whole(_value())
    assert torch.equal(*copies)
    assert whole.state_dict().keys() == pickle.loads(pickle.dumps(whole)).state_dict().keys()
    return said


def test_the_model_of_which_a_rank_has_a_part_is_not_taken_for_whole(ranks: Pool) -> None:
    for said in ranks(2).run(taken_for_whole):
        assert all("AveragedModel(pipe)" in text for text in said[:5])
        assert "pipe.unsplit()" in said[0]
        assert "no forward" in said[5]
