"""Text out of a pipe of ranks: the plain model's tokens, caches that stay on their ranks, errors that all have."""

from __future__ import annotations

import pytest

from tests.distributed import generators
from tests.distributed.processes import Pool, Ranks
from tests.pairwise import mostly_slow

CASES = [
    (name, way, size)
    for name, ways in {"llama": 3, "gpt2": 3, "t5": 3, "mistral": 3, "mamba": 1}.items()
    for way in [*generators.WAYS][:ways]
    for size in (2, 3)
]


@pytest.mark.quick
@pytest.mark.parametrize("case", mostly_slow(CASES, ("llama", "sampled", 2), ("t5", "beams", 3)), ids=str)
def test_tokens_are_the_plain_models(ranks: Pool, case: tuple[str, str, int]) -> None:
    name, way, size = case
    for found in ranks(size).run(generators.same_tokens, name, way):
        assert found == [True] * 5


@pytest.mark.slow
@pytest.mark.parametrize(("name", "way"), [("mistral", "beams"), ("gpt2", "greedy"), ("t5", "sampled")])
def test_tokens_are_the_plain_models_without_tags(nccl_ranks: Pool, name: str, way: str) -> None:
    for found in nccl_ranks(2).run(generators.same_tokens, name, way):
        assert found == [True] * 5


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_trained_weights_generate(ranks: Pool, name: str) -> None:
    assert ranks(2).run(generators.trained_between, name) == [[True] * 2] * 2


@pytest.mark.slow
def test_a_tied_weight_is_lent_where_only_later_stages_use_it(ranks: Pool) -> None:
    assert ranks(3).run(generators.trained_behind_the_encoder, "t5") == [[True] * 3] * 3


@pytest.mark.slow
def test_calls_go_on_with_a_cache(ranks: Pool) -> None:
    assert ranks(2).run(generators.goes_on, "llama") == [[True] * 3] * 2


@pytest.mark.slow
def test_caches_are_let_go_of(ranks: Pool) -> None:
    served, last = ranks(2).run(generators.most_kept, "llama", 100)
    assert last == 0
    assert 0 < served <= 2 * 2 * 4 * 2, "two groups, old and new, at most all layers of the model, keys and values"


@pytest.mark.slow
def test_all_ranks_raise_what_one_does(ranks: Pool) -> None:
    for processor, refused, unlike, same in ranks(2).run(generators.errors, "gpt2"):
        assert processor.startswith("ArithmeticError: no score is good enough")
        assert "pipe.eval()" in refused
        assert "differ in their arguments" in unlike
        assert same == "True"


@pytest.mark.slow
def test_error_of_one_rank_ends_all() -> None:
    ranks = Ranks(2)
    with pytest.raises(RuntimeError, match=r"rank 0: (.|\n)*KeyError"):
        ranks.run(generators.lost_cache, "llama", timeout_s=90.0)


@pytest.mark.slow
def test_groups_share_the_recordings_of_all_ranks(ranks: Pool) -> None:
    assert ranks(2).run(generators.asked_at_once, "gpt2") == [[True] * 2] * 2
