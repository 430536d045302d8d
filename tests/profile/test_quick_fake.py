"""Operations on fake tensors told again: what comes out looks, and shares storages, as if each had been worked out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from autosplit.options import Sample
from autosplit.profile.quick_fake import QuickFake
from autosplit.profile.stage_graph import stage_graph
from autosplit.profile.stage_trace import How, trace_stage
from autosplit.trace.ladder import trace


class Twice(TorchDispatchMode):
    """Runs every operation by a :class:`QuickFake`, after it was run once for it to know."""

    def __init__(self, quick: QuickFake) -> None:
        super().__init__()
        self.quick = quick

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.quick.run(func, args, kwargs or {})


def looks(value: Any) -> Any:
    if isinstance(value, Tensor):
        base = None if value._base is None else tuple(value._base.shape)
        look = tuple(value.shape), value.stride(), value.storage_offset(), value.dtype, value.device, base
        return (*look, value.untyped_storage().nbytes(), value.requires_grad, value.is_leaf)
    return [looks(item) for item in value] if isinstance(value, (list, tuple)) else value


def shares(value: Any, given: Tensor) -> list[bool]:
    tensors = value if isinstance(value, (list, tuple)) else [value]
    own = given.untyped_storage()._cdata
    return [isinstance(t, Tensor) and t.untyped_storage()._cdata == own for t in tensors]


CALLS: dict[str, Callable[[Tensor], Any]] = {
    "new": lambda x: x.exp(),
    "types": lambda x: (x.to(torch.bfloat16), x.double(), x > 0),
    "view": lambda x: x.transpose(0, 1)[1:],
    "views": lambda x: x.chunk(3, -1),
    "unbound": lambda x: x.unbind(0),
    "reshaped": lambda x: x.transpose(0, 1).reshape(-1),
    "flat": lambda x: x.reshape(-1),
    "in place": lambda x: x.clone().mul_(2.0),
    "in place on a view": lambda x: x.clone()[0].add_(1.0),
    "strided": lambda x: x.as_strided((2, 2), (1, 3), 1),
    "expanded": lambda x: x[:1].expand(5, -1) + 1,
    "unsqueezed in place": lambda x: x.clone().unsqueeze_(0),
    "taken when unsqueezed in place": lambda x: (x.exp() + 1, x.exp().unsqueeze_(0) + 1),
    "resized": lambda x: torch.empty(0).resize_(x.shape),
    "complex": lambda x: torch.view_as_real(torch.fft.rfft(x)),
    "several": lambda x: torch.max(x, 0),
    "normed": lambda x: F.layer_norm(x, x.shape[-1:]),
    "attention": lambda x: F.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None]),
    "factory": lambda x: (torch.zeros_like(x), torch.arange(4), x.new_ones(2)),
    "number": lambda x: torch.tensor(3.0) * x,
    "out": lambda x: torch.add(x.detach(), 1, out=torch.empty(4, 6)),
    "dropout": lambda x: F.dropout(x, 0.5),
    "gradient": lambda x: torch.autograd.grad((x.tanh() @ x.t()).sum(), x)[0],
    "indexed": lambda x: x[torch.zeros(2, dtype=torch.long)],
    "empty": lambda x: x[:0] * 2,
}


@pytest.mark.parametrize("name", CALLS)
def test_a_second_call_gives_what_the_first_gave(name: str) -> None:
    call, quick = CALLS[name], QuickFake()
    for mode in (FakeTensorMode(), FakeTensorMode()):  # what is known of one mode's tensors holds for another's
        with mode:
            x = torch.empty(4, 6, requires_grad=True)
            plain = call(x)
            with Twice(quick):
                results = [call(x), call(x)]
            assert [looks(result) for result in results] == [looks(plain)] * 2
            assert [shares(result, x) for result in results] == [shares(plain, x)] * 2
            for value in results[1] if isinstance(results[1], (list, tuple)) else [results[1]]:
                assert value.fake_mode is mode


def test_other_numbers_are_other_calls() -> None:
    quick = QuickFake()
    with FakeTensorMode(), Twice(quick):
        x = torch.empty(4, 6)
        assert [x.narrow(0, 0, size).shape[0] for size in (1, 2, 3)] == [1, 2, 3]
        assert [torch.add(x, other).dtype for other in (1, 1.0, True)] == [torch.float32] * 3
        whole = torch.empty(4, 6, dtype=torch.long)
        assert [torch.add(whole, other).dtype for other in (1, 1.0, True)] == [torch.long, torch.float32, torch.long]
        assert [x.sum(dim, keepdim=keep).shape for dim in (0, 1) for keep in (False, True)] == [
            (6,),
            (1, 6),
            (4,),
            (4, 1),
        ]


class Counting(QuickFake):
    """Counts the operations that are worked out."""

    worked = 0

    def _worked_out(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        self.worked += 1
        return super()._worked_out(func, args, kwargs)


def test_only_views_depend_on_where_an_operand_begins() -> None:
    def steps(x: Tensor) -> list[Tensor]:
        return [part for i in range(5) for part in (torch.cumsum(x[i], 0), x[i].t(), x[i].as_strided((2,), (1,), i))]

    quick = Counting()
    with FakeTensorMode():
        x = torch.empty(5, 3, 4)
        plain = steps(x)
        with Twice(quick):
            again = steps(x)
    assert looks(again) == looks(plain)
    assert [shares(each, x) for each in again] == [shares(each, x) for each in plain]
    assert quick.worked == 1 + 3 * 5, "one sum, and three views of every place"


class Slow(QuickFake):
    """Works everything out."""

    def run(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return func(*args, **kwargs)


class Mixed(nn.Module):
    """Convolution, norm, attention, an embedding of what came before, a recurrent layer."""

    def __init__(self) -> None:
        super().__init__()
        self.pixels, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.mix, self.cells, self.words = (
            nn.MultiheadAttention(8, 2, batch_first=True),
            nn.LSTM(8, 8),
            nn.Embedding(9, 8),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(torch.relu(self.norm(self.pixels(x))), 2).flatten(2).transpose(1, 2)
        x = x + self.mix(x, x, x)[0]
        return self.cells(x)[0] + self.words(x.argmax(-1)) + F.dropout(x, 0.1)


@pytest.mark.parametrize("kernels", ["cpu", "cuda"])
@pytest.mark.parametrize("whole", [False, True])
def test_a_trace_is_what_it_was(kernels: Any, *, whole: bool) -> None:
    stage = stage_graph(trace(Mixed(), Sample(torch.zeros(2, 3, 8, 8))).graph)
    how = How(2, kernels=kernels, whole=whole, apart=True)
    quick = QuickFake()
    slow = trace_stage(stage, how, quick=Slow())
    assert trace_stage(stage, how, quick=quick) == slow
    assert trace_stage(stage, how, quick=quick) == slow
