"""What an operation on the meta device gives is the same whether its kernel ran or its result was known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.nn import functional as F

from autosplit.trace.meta_kernels import MetaKernels

CASES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "sum of two types": lambda x, y: x + y.to(torch.bfloat16),
    "number operands": lambda x, y: (x * 2, x * 2.0, y + True, x.int() / 2, x.int() * 2, x.int() * 2.0),
    "product": lambda x, y: x @ y.t(),
    "strides": lambda x, y: (x.t() + y.t(), x.t().contiguous(), x.t().clone(), torch.empty_like(x.t())),
    "offset": lambda x, y: (x[1:].exp(), x[:, 1:].exp(), x[:, 1:].clone()),
    "several results": lambda x, y: torch.nn.functional.layer_norm(x, (6,)) + torch.topk(y, 2)[0].sum(),
    "views": lambda x, y: (x.view(-1), x.transpose(0, 1), x.expand(2, 4, 6), y.split(3, 1)),
    "views that are none": lambda x, y: (torch.ops.aten._unsafe_view(x, (3, -1)), (x[None] @ y.t()).relu_()),
    "in place": lambda x, y: x.clone().add_(y).mul_(2),
    "dropout that does nothing": lambda x, y: (F.dropout(x, 0.5, training=False), F.dropout(x, 0.5)),
    "the same again": lambda x, y: (x.to(x.dtype), x.contiguous(), x.reshape(4, 6)),
    "another device": lambda x, y: (torch.zeros(2, device="cpu"), torch.arange(3, device="meta")),
    "attention": lambda x, y: F.scaled_dot_product_attention(x[None], y[None], y[None]),
    "complex": lambda x, y: torch.view_as_complex(x.reshape(4, 3, 2)).conj() * 2,
    "lists": lambda x, y: (torch.cat([x, y]), torch.stack((x, y), 1)),
}


def kind(value: Any) -> Any:
    """Return all that later code can see of a result."""
    if not isinstance(value, Tensor):
        return value
    storage = value.untyped_storage().nbytes()
    own = (tuple(value.shape), value.stride(), value.storage_offset(), value.dtype, value.device, storage)
    return (*own, value.requires_grad, type(value.grad_fn), value._base is None, value._version, value.is_conj())


def sharing(operands: tuple[Tensor, ...], result: Any) -> list[int]:
    """Number the storages of operands and results in the order in which they come up."""
    tensors = [*operands, *(leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor))]
    numbers: dict[int, int] = {}
    return [numbers.setdefault(tensor.untyped_storage()._cdata, len(numbers)) for tensor in tensors]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("wants_gradient", [False, True])
def test_known_results_are_those_of_the_kernels(name: str, wants_gradient: bool) -> None:
    operands = tuple(torch.empty(4, 6, device="meta", requires_grad=wants_gradient) for _ in range(2))
    plain = CASES[name](*operands)
    with MetaKernels() as kernels:
        for _ in range(3):
            known = CASES[name](*operands)
            assert pytree.tree_map(kind, known) == pytree.tree_map(kind, plain)
            assert sharing(operands, known) == sharing(operands, plain)
    assert kernels._known or name in ("views", "another device", "the same again")


def test_a_kernel_runs_once_per_kind_of_operands() -> None:
    ran = []
    x, y = torch.empty(4, 6, device="meta"), torch.empty(4, 6, device="meta", dtype=torch.float64)

    def kernel(*args: Any) -> Tensor:
        ran.append(args)
        return torch.ops.aten.add.Tensor(*args)

    kernel.namespace, kernel._schema, kernel.tags = "aten", torch.ops.aten.add.Tensor._schema, []  # type: ignore[attr-defined]
    kernel.name = torch.ops.aten.add.Tensor.name  # type: ignore[attr-defined]
    kernels = MetaKernels()
    pairs = [(x, x), (x, x), (x, y), (x, x.t().contiguous().t()), (x, 1), (x, 1.0), (x, True), (x, 1), (x, x[0])]
    for pair in pairs:
        kernels.call(kernel, pair, {})
    assert len(ran) == len(pairs) - 2


def test_the_default_dtype_is_part_of_what_is_known() -> None:
    given = []
    before = torch.get_default_dtype()
    with MetaKernels():
        for dtype in (torch.float32, torch.float64, torch.float32):
            torch.set_default_dtype(dtype)
            try:
                given.append(torch.ones(2, device="meta").dtype)
            finally:
                torch.set_default_dtype(before)
    assert given == [torch.float32, torch.float64, torch.float32]
