"""Replicas that share out their parameters by FSDP2 train as the plain model does on all rows."""

from __future__ import annotations

from functools import partial
from itertools import cycle, islice
from typing import Any

import pytest
import torch

from autosplit import autosplit
from tests.distributed.changing import changed
from tests.distributed.models import MixesRows, flat
from tests.distributed.processes import Pool, error_of
from tests.distributed.replicas import adam, compare, mesh_of
from tests.distributed.test_replica_equality import EMPTY, LONG, OF_FOUR, RAGGED, said
from tests.distributed.wrapping import CALLS, DEEP, compiled, in_shards, recomputed, refused, used

FSDP = partial(compare, parallelize="fsdp")
SHAPES = {"fsdp2 x pp2": (2, 2), "fsdp4": (4,), "hsdp 2 x 2": (2, 2, 1)}


@pytest.mark.parametrize("reshard", ["never", "always"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["mlp", "tied gpt with dropout", "relative bias", "experts"])
def test_shards_train_as_the_plain_model_on_all_rows(ranks: Pool, name: str, shape: str, reshard: str) -> None:
    """Dropout, ties, a value shared by stages, ragged rows and replicas without any."""
    rows = RAGGED[:1] + EMPTY if shape == "fsdp2 x pp2" else OF_FOUR
    assert ranks(4).run(FSDP, name, SHAPES[shape], rows, fsdp_reshard=reshard, **said(name))[0] == []


@pytest.mark.parametrize("reshard", ["never", "always"])
@pytest.mark.parametrize(
    "options",
    [{"every": 2, "make": adam}, {"schedule": "zb_h1"}, {"recompute": "always"}],
    ids=["accumulated", "split backward", "recomputed"],
)
def test_optimizers_schedules_and_recomputing(ranks: Pool, options: dict[str, Any], reshard: str) -> None:
    rows = [*RAGGED, [3, 3]]
    assert ranks(4).run(FSDP, "dropout", (2, 2), rows, fsdp_reshard=reshard, **options)[0] == []


def test_the_loss_of_a_whole_batch_on_one_replica(ranks: Pool) -> None:
    assert ranks(2).run(FSDP, "rows that mix", (1, 2), [[6], [5]])[0] == []


def differentiated() -> str:
    """Return why a call cannot be differentiated whose last layer sees the whole batch; called in every process."""
    batch = flat(6).args[0]
    pipe = autosplit(MixesRows(), mesh=mesh_of(1, 2), chunks=3, sample=batch, parallelize="fsdp", outputs="all")
    with torch.no_grad():
        pipe(batch)
    return error_of(pipe, batch)


def test_a_call_whose_last_layer_has_its_parameters_in_shards(ranks: Pool) -> None:
    assert all("'head.weight' is used behind all microbatches" in said for said in ranks(2).run(differentiated))


def wrapped(parallelize: Any, shape: tuple[int, ...], rows: Any) -> list[str]:
    """Compare a training whose blocks the caller wraps; called in every process."""
    CALLS.clear()
    found = compare(DEEP, shape, rows, parallelize=parallelize)
    return found if (len(CALLS) > 0) == (parallelize is not compiled) else [*found, f"{len(CALLS)} calls of blocks"]


@pytest.mark.parametrize("shape", [(2, 2), (4, 1)], ids=["dp2 x pp2", "dp4"])
@pytest.mark.parametrize("parallelize", [in_shards, recomputed, compiled], ids=lambda own: own.__name__)
def test_blocks_that_the_caller_wraps_run_by_their_calls(ranks: Pool, parallelize: Any, shape: tuple[int, ...]) -> None:
    """Shards, shards with recomputing, and compiled blocks; a head is tied across stages."""
    assert ranks(4).run(wrapped, parallelize, shape, EMPTY if shape == (2, 2) else OF_FOUR) == [[]] * 4


@pytest.mark.parametrize("shape", [(2, 2), (1, 2, 1, 2)], ids=["dp2 x pp2", "dp2 x tp2"])
@pytest.mark.parametrize("reshard", ["never", "always"])
def test_a_pipe_in_shards_loads_clips_records_and_gives_the_model_back(ranks: Pool, shape: Any, reshard: str) -> None:
    assert ranks(4).run(used, shape, reshard) == [[]] * 4


def test_what_a_model_had_before_and_what_is_changed_afterwards(ranks: Pool) -> None:
    assert ranks(2).run(changed) == [[]] * 2


def test_what_cannot_be_kept_exact_is_refused_on_every_rank(ranks: Pool) -> None:
    assert ranks(4).run(refused) == [{}] * 4


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", LONG)
def test_20_steps_in_shards(ranks: Pool, name: str, shape: str, dtype: torch.dtype) -> None:
    rows = list(islice(cycle(EMPTY if shape == "fsdp2 x pp2" else OF_FOUR), 20))
    assert ranks(4).run(FSDP, name, SHAPES[shape], rows, dtype=dtype)[0] == []
