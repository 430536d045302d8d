"""What a generation holds and leaves: caches, buffers that a model writes, attributes of the model."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache

from autosplit.runtime.step.cells import Cells
from tests.generation.test_generate import NEW, both, split
from tests.models.generators import FAMILIES, prompts

pytestmark = pytest.mark.usefixtures("one_intra_op_thread")


class Averaged(nn.Module):
    """A layer beside an average that it writes in place."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.register_buffer("mean", torch.zeros(32))

    def forward(self, value: Tensor) -> Tensor:
        self.mean.mul_(0.9).add_(0.1 * value.mean((0, 1)).detach())
        result: Tensor = self.layer(value) + self.mean
        return result


def test_a_layer_that_averages_in_place() -> None:
    plain, subject = FAMILIES["llama"](), FAMILIES["llama"]()
    for each in (plain, subject):
        each.model.layers[1].mlp = Averaged(each.model.layers[1].mlp)
    pipe = split(subject)
    for length in (5, 7):
        both(plain, pipe, **prompts(plain, 1, length=length), **NEW)
    assert torch.equal(subject.model.layers[1].mlp.mean, plain.model.layers[1].mlp.mean)


def test_a_static_cache_is_as_long_as_the_longest() -> None:
    plain, pipe = FAMILIES["llama"](), split(FAMILIES["llama"]())
    for new in (4, 9, 3):
        options: Any = {"max_new_tokens": new, "cache_implementation": "static", "return_dict_in_generate": True}
        caches = [each.generate(**prompts(plain, 4), **options).past_key_values for each in (plain, pipe)]
        assert caches[0].layers[0].keys.shape == caches[1].layers[0].keys.shape


@pytest.mark.quick
def test_a_stage_lets_go_of_its_old_cache_before_the_next_one_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    forward, plain = Cells.forward, FAMILIES["llama"]()
    pipe, cache, alive = split(FAMILIES["llama"](), lanes=2), DynamicCache(), []
    old = prompts(plain, 4)["input_ids"].shape[1] + 4  # tokens in the cache that the last step begins with

    def watched(cells: Cells, stage: int, microbatch: int) -> Any:
        every = [each for each in gc.get_objects() if issubclass(type(each), Tensor) and each.dim() == 4]
        alive.append(sum(each.shape[2] == old for each in every))
        return forward(cells, stage, microbatch)

    both(plain, pipe, **prompts(plain, 4), max_new_tokens=6)
    gc.collect()
    monkeypatch.setattr(Cells, "forward", watched)
    gc.disable()  # what waits for it is not let go of
    try:
        pipe.generate(**prompts(plain, 4), max_new_tokens=6, past_key_values=cache)
    finally:
        gc.enable()
    layers = len(cache.layers)
    assert alive[-2:] == [2 * layers, layers]
