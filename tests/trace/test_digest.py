"""Digests: equal bits are equal, everything else is apart, by as much as it is."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autosplit.compare import digest, distance

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.int64, torch.bool)


def values(count: int, dtype: torch.dtype) -> torch.Tensor:
    drawn = torch.randn(count, generator=torch.Generator().manual_seed(count))
    return (drawn * 100).to(dtype) if dtype != torch.bool else drawn > 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0,), (), (7,), (1024,), (3, 1025), (1100, 1000)])
def test_equal_tensors_are_equal(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = values(math.prod(shape), dtype).reshape(shape)
    other = tensor.t().contiguous().t() if tensor.dim() == 2 else tensor.clone()
    assert digest(tensor).kind == digest(other).kind == (shape, dtype)
    assert distance(digest(tensor), digest(other)) == 0.0


@given(st.data(), st.sampled_from(DTYPES))
def test_one_element_that_differs_is_seen(data: st.DataObject, dtype: torch.dtype) -> None:
    count = data.draw(st.integers(1, 3000))
    place = data.draw(st.integers(0, count - 1))
    tensor = values(count, dtype)
    other = tensor.clone()
    other[place] = ~other[place] if dtype == torch.bool else other[place] + 1 + other[place].abs()
    assert distance(digest(other), digest(tensor)) > 0.0


@given(st.data())
def test_two_elements_that_change_places_are_seen(data: st.DataObject) -> None:
    count = data.draw(st.integers(2, 3000))
    first, second = data.draw(st.lists(st.integers(0, count - 1), min_size=2, max_size=2, unique=True))
    tensor = torch.arange(count, dtype=torch.float32)
    other = tensor.clone()
    other[first], other[second] = tensor[second], tensor[first]
    assert distance(digest(other), digest(tensor)) > 0.0


@pytest.mark.parametrize("size", [1e-4, 1e-7, 1e-10])
def test_the_distance_is_a_share_of_the_size(size: float) -> None:
    tensor = values(5000, torch.float64)
    noise = torch.randn(5000, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    apart = distance(digest(tensor * (1 + size * noise)), digest(tensor))
    assert size / 10 < apart < size * 10


def test_what_is_not_finite() -> None:
    tensor = values(3000, torch.float32)
    other = tensor.clone()
    other[17] = math.nan
    assert distance(digest(other), digest(tensor)) == math.inf
    assert distance(digest(other), digest(other.clone())) == 0.0
    moved = tensor.clone()
    moved[2900] = math.inf
    assert distance(digest(other), digest(moved)) == math.inf


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch 2.11 gives one although they are asked for
def test_other_kinds_of_tensors() -> None:
    indices, entries = torch.tensor([[0, 2], [1, 0]]), torch.tensor([1.0, 2.0])
    sparse = torch.sparse_coo_tensor(indices, entries, (3, 2), check_invariants=True)
    moved = torch.sparse_coo_tensor(indices.flip(1), entries, (3, 2), check_invariants=True)
    assert distance(digest(sparse), digest(sparse.clone())) == 0.0
    assert distance(digest(sparse), digest(moved)) > 0.0
    assert digest(torch.empty(3, device="meta")).numbers is None
    assert digest(torch.ones(2), True).kind != digest(torch.ones(2), False).kind
