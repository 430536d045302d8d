"""What a rank's pipe refuses, and what is found out between ranks: models, losses, copies, wrappers, other pipes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from autosplit import autosplit
from tests.distributed.models import TRAININGS, Dropping, flat
from tests.distributed.processes import Pool, error_of
from tests.distributed.training import squares, without_gradients


class _Returning(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))

    def forward(self, value: Tensor) -> tuple[Tensor, Tensor]:
        return self.layers(value), self.layers[0].weight


def returned_parameter() -> str:
    return error_of(lambda: autosplit(_Returning(), devices="torchrun", chunks=4, sample=flat(8).args))


def drawn_between() -> list[float]:
    """Draw a number between a call with dropout and its backward, and one behind that."""
    pipe = autosplit(Dropping(), devices="torchrun", chunks=4, sample=flat(8).args, outputs="all")
    torch.manual_seed(3)
    loss = squares(pipe(*flat(8).args))
    drawn = [float(torch.rand(()))]
    loss.backward()
    return [*drawn, float(torch.rand(()))]


def penalty(name: str) -> str:
    """Penalise a weight of the first rank in the loss."""
    training = TRAININGS[name]
    model, batch = training.make(), without_gradients(training.batch(8))
    pipe = autosplit(model, devices="torchrun", chunks=4, sample=batch.args)
    weight = next(p for n, p in model.named_parameters() if n.endswith("0.weight"))

    def loss(output: Any, _: None = None) -> Tensor:
        return squares(output) + 0.1 * weight.square().sum()

    return error_of(lambda: pipe.train_step(*batch.args, loss_fn=loss, loss_reduction="mean"))


class _Holder(nn.Module):
    """A module that holds a pipe, as a LightningModule does."""

    def __init__(self, pipe: nn.Module) -> None:
        super().__init__()
        self.inner = pipe


def _chain(**how: Any) -> Any:
    torch.manual_seed(0)
    model = how.pop("model", None) or nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])
    return autosplit(model, devices="torchrun", chunks=2, sample=torch.ones(4, 8), **how)


def held() -> list[bool]:
    """Ask for the state of a module that holds a pipe, and for names with a prefix."""
    pipe = _chain()
    own = [f"inner.{name}" for name in pipe.state_dict()]
    kept = {"other": torch.ones(1)}
    assert pipe.state_dict(kept, "inner.") is kept
    named = [name for name, _ in pipe.named_parameters("inner")]
    return [list(_Holder(pipe).state_dict()) == own, [*kept] == ["other", *own], named == own, 0 < len(own) < 8]


def refusals() -> list[str]:
    """Ask a rank's pipe for what takes the whole model or its whole output."""
    holder = _chain(model=_Saving())
    hooked = _chain()
    hooked.register_forward_hook(lambda module, args, output: output * 10)
    given = {"target": torch.ones(4, 8), "loss_fn": nn.functional.mse_loss}
    edited = _chain()
    edited.graph.lint()
    edited.recompile()
    asked = [
        lambda: edited.eval_step(torch.ones(4, 8)),
        lambda: hooked.train_step(torch.ones(4, 8), **given),
        holder.saved,
        lambda: _chain().train_step(microbatches=[torch.ones(4, 8)] * 2, target=[torch.ones(4, 8)] * 2),
        lambda: nn.parallel.DistributedDataParallel(_chain()),
    ]
    assert _chain().to("cpu:0") is not None
    return [error_of(ask) for ask in asked]


class _Saving(nn.Sequential):
    """A model with a method that saves its state, as ``save_pretrained`` does."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 8), nn.Linear(8, 8))

    def saved(self) -> dict[str, Any]:
        return self.state_dict()


def shared_by_pipes() -> list[str]:
    """Train a model, and use a part of it, which another pipe has on another rank."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])
    whole, part = _chain(model=model), _chain(model=model[:2])
    given = {"target": torch.ones(4, 8), "loss_fn": nn.functional.mse_loss}
    used = [lambda: part.eval_step(torch.ones(4, 8)), lambda: whole.train_step(torch.ones(4, 8), **given)]
    found = [error_of(used[0]), error_of(used[1]), error_of(used[0])]
    part = _chain(model=model[:2])  # nothing has changed: no optimizer has stepped
    return [*found, *(error_of(use) for use in (used[0], used[1], used[0]))]


def test_a_module_that_holds_a_pipe_has_the_ranks_part(ranks: Pool) -> None:
    assert ranks(2).run(held) == [[True] * 4] * 2


def test_what_takes_the_whole_model_is_refused_on_ranks(ranks: Pool) -> None:
    for graph, hooks, saving, microbatches, copies in ranks(2).run(refusals):
        assert "its graph was edited" in graph
        assert "the pipe has hooks" in hooks
        assert "asks for its whole state" in saving
        assert "microbatches= runs in one process" in microbatches
        assert "DistributedDataParallel" in copies


def test_what_another_pipe_has_trained_on_another_rank_is_not_used(ranks: Pool) -> None:
    for found in ranks(2).run(shared_by_pipes):
        for before, trained, stale in (found[:3], found[3:]):
            assert before == trained == "nothing was raised"
            assert "another pipe has trained '1." in stale


def test_a_model_that_returns_a_parameter_is_refused(ranks: Pool) -> None:
    found = ranks(2).run(returned_parameter)
    assert all("returns its own 'layers.0.weight'" in text for text in found), found


def test_numbers_drawn_between_forward_and_backward_are_the_same_on_every_rank(ranks: Pool) -> None:
    one, other = ranks(2).run(drawn_between)
    assert one == other
    assert len(set(one)) == 2


def test_a_loss_of_microbatches_that_does_ends_all_ranks() -> None:
    pool = Pool()
    try:
        found = pool(2).run(penalty, "chain")
    except RuntimeError as error:  # they may have ended before they could answer
        found = [str(error)]
    finally:
        pool.close()
    assert not any("nothing was raised" in text for text in found)
