"""FLOPs against torch's own counter on real kernels: equal where it counts, above it where it wrongly counts zero."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from autosplit.profile.node_costs.ledger import Ledger, Operation
from autosplit.profile.node_costs.shadow import shadow
from autosplit.profile.node_costs.work import work_of
from benchmarks.families import families

UNCOUNTED = (
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention_for_cpu_backward",
    "mkldnn_rnn_layer",
    "mkldnn_rnn_layer_backward",
)


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


def counted(run: Callable[[], object]) -> tuple[int, list[Operation]]:
    """Torch's count of one run, and the operations that the ledger saw in the same run."""
    with FlopCounterMode(display=False) as counter, Ledger() as ledger:
        run()
    return counter.get_total_flops(), ledger.operations


def total(operations: list[Operation]) -> int:
    return sum(operation.flops for operation in operations)


def test_causal_attention_computes_about_half_of_its_products():
    """FLOPs stay those of all products, by which utilisation is counted; times count the tiles up to the diagonal."""

    def listed(length, *, causal):
        query, key, value = (torch.empty(1, 2, length, 64, requires_grad=True) for _ in range(3))
        with Ledger() as ledger:
            F.scaled_dot_product_attention(query, key, value, is_causal=causal).sum().backward()
        return [operation for operation in ledger.operations if "attention" in operation.name]

    with FakeTensorMode():
        whole, half, short = listed(4096, causal=False), listed(4096, causal=True), listed(128, causal=True)
    assert [operation.sides for operation in half] == [(2, 4096, 4096, 64)] * 2
    assert [operation.flops for operation in half] == [operation.flops for operation in whole]
    assert [operation.computed for operation in whole + short] == [1.0] * 4
    assert [work_of(operation).flops / operation.flops for operation in half] == [pytest.approx(33 / 64)] * 2


@pytest.mark.parametrize("name", families())
def test_a_family_counts_as_torch_does_and_more_where_torch_counts_nothing(name):
    family = families()[name]
    model, inputs, target = family.make(), family.batch(1), family.target(1)
    if name in ("resnet50", "unet"):
        inputs = (inputs[0][..., :64, :64],)
        target = target[..., :64, :64] if name == "unet" else target
    model.eval()

    def run(model: nn.Module, *tensors: Tensor) -> None:
        family.loss(model(*tensors), target if tensors[0] is inputs[0] else faked_target).backward()

    torchs, operations = counted(lambda: run(model, *inputs))
    missing = [operation for operation in operations if operation.name in UNCOUNTED]
    assert total(operations) - total(missing) == torchs > 0
    assert all(operation.flops > 0 for operation in missing)
    assert bool(missing) == (name not in ("resnet50", "unet"))

    with FakeTensorMode() as mode:
        twin = shadow(model, replace=mode.from_tensor).module
        fakes = [mode.from_tensor(tensor) for tensor in inputs]
        faked_target = mode.from_tensor(target)
        with Ledger() as ledger:
            run(twin, *fakes)
    assert total(ledger.operations) == total(operations), "a fake run counts what a real one does"


COUNTED: dict[str, Callable[[], Tensor]] = {
    "linear": lambda: F.linear(leaf(2, 3, 4), leaf(5, 4), leaf(5)),
    "bmm": lambda: leaf(2, 3, 4) @ leaf(2, 4, 5),
    "baddbmm": lambda: torch.baddbmm(leaf(2, 3, 5), leaf(2, 3, 4), leaf(2, 4, 5)),
    "einsum": lambda: torch.einsum("bhid,bhjd->bhij", leaf(2, 3, 4, 5), leaf(2, 3, 6, 5)),
    "tensordot": lambda: torch.tensordot(leaf(3, 4), leaf(4, 5), 1),
    "conv1d": lambda: F.conv1d(leaf(2, 4, 16), leaf(6, 4, 3)),
    "conv2d strided": lambda: F.conv2d(leaf(2, 4, 9, 9), leaf(6, 4, 3, 3), stride=2),
    "conv3d": lambda: F.conv3d(leaf(2, 4, 6, 6, 6), leaf(6, 4, 3, 3, 3)),
    "transposed": lambda: F.conv_transpose2d(leaf(2, 4, 8, 8), leaf(4, 6, 3, 3), stride=2),
    "gru": lambda: nn.GRU(8, 16, batch_first=True)(leaf(3, 5, 8))[0],
    "rnn": lambda: nn.RNN(8, 16)(leaf(5, 3, 8))[0],
    "lstm with projection": lambda: nn.LSTM(8, 16, proj_size=4)(leaf(5, 3, 8))[0],
    "lstm cell": lambda: nn.LSTMCell(8, 16)(leaf(3, 8), (leaf(3, 16), leaf(3, 16)))[0],
    "multi-head attention": lambda: nn.MultiheadAttention(16, 4)(leaf(5, 2, 16), leaf(5, 2, 16), leaf(5, 2, 16))[0],
    "attention with dropout": lambda: F.scaled_dot_product_attention(
        leaf(2, 3, 8, 4), leaf(2, 3, 8, 4), leaf(2, 3, 8, 4), dropout_p=0.1
    ),
}


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize("name", COUNTED)
def test_what_torch_counts_is_counted_alike(name):
    torchs, operations = counted(lambda: COUNTED[name]().sum().backward())
    assert total(operations) == torchs > 0


MISSED: dict[str, tuple[Callable[[], object], int]] = {
    "mv": (lambda: torch.mv(leaf(3, 4), leaf(4)), 2 * 3 * 4),
    "dot": (lambda: torch.dot(leaf(4), leaf(4)), 2 * 4),
    "addbmm": (lambda: torch.addbmm(leaf(3, 5), leaf(2, 3, 4), leaf(2, 4, 5)), 2 * 2 * 3 * 4 * 5),
    "addr": (lambda: torch.addr(leaf(3, 4), leaf(3), leaf(4)), 2 * 3 * 4),
    "int_mm": (
        lambda: torch._int_mm(torch.ones(32, 16, dtype=torch.int8), torch.ones(16, 8, dtype=torch.int8)),
        2 * 32 * 16 * 8,
    ),
    "bilinear": (lambda: F.bilinear(leaf(7, 4), leaf(7, 5), leaf(6, 4, 5)), 3 * 7 * 6 * 4 * 5),
    "sparse": (lambda: torch.sparse.mm(torch.eye(4).to_sparse(), torch.randn(4, 5)), 2 * 4 * 5),
    "real transform": (lambda: torch.fft.rfft(leaf(4, 64)), int(2.5 * 4 * 64 * 6)),
    "complex transform": (lambda: torch.fft.fft2(torch.randn(4, 8, 8, dtype=torch.complex64)), 5 * 4 * 64 * 6),
    "transform back": (lambda: torch.fft.irfft(torch.randn(4, 33, dtype=torch.complex64)), int(2.5 * 4 * 64 * 6)),
    "cholesky": (lambda: torch.linalg.cholesky(torch.eye(6)), 6**3 // 3),
    "solve": (lambda: torch.linalg.solve(torch.eye(6), torch.ones(6, 2)), 2 * 6**3 // 3 + 2 * 6**2 * 2),
    "inverse": (lambda: torch.linalg.inv(torch.eye(6)), 2 * 6**3),
    "triangle": (lambda: torch.linalg.solve_triangular(torch.eye(6), torch.ones(6, 2), upper=True), 6 * 6 * 2),
    "factors": (lambda: torch.linalg.lu_factor(torch.eye(6)), 2 * 6**3 // 3),
    "qr": (lambda: torch.linalg.qr(torch.randn(6, 3)), 4 * 9 * (6 - 1)),
    "distances": (lambda: torch.cdist(leaf(2, 30, 4), leaf(2, 40, 4)), 3 * 2 * 30 * 40 * 4),
}


@pytest.mark.parametrize("name", MISSED)
def test_what_torch_counts_as_nothing_is_counted(name):
    run, expected = MISSED[name]
    with torch.no_grad():
        torchs, operations = counted(run)
    assert torchs == 0
    assert total(operations) == expected


def test_the_cpu_s_attention_counts_as_its_products():
    query, key = torch.randn(2, 4, 8, 16), torch.randn(2, 4, 12, 16)
    _, fused = counted(lambda: F.scaled_dot_product_attention(query, key, key))
    with sdpa_kernel(SDPBackend.MATH):
        torchs, _ = counted(lambda: F.scaled_dot_product_attention(query, key, key))
    assert total(fused) == torchs == 2 * 2 * (2 * 4) * 8 * 12 * 16


@pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN")
@pytest.mark.parametrize("bidirectional", [False, True])
def test_the_cpu_s_fused_lstm_counts_as_its_products(bidirectional):
    layer, x = nn.LSTM(8, 16, num_layers=2, bidirectional=bidirectional), leaf(5, 3, 8)
    torchs, fused = counted(lambda: layer(x)[0].sum().backward())
    with torch.backends.mkldnn.flags(enabled=False):
        unfused, _ = counted(lambda: layer(x)[0].sum().backward())
    assert torchs == 0
    forward = 2 * 5 * 3 * sum(p.numel() for name, p in layer.named_parameters() if "weight" in name)
    assert total(fused) == 3 * forward
    first_steps = 2 * 3 * 4 * 16 * 16 * 2 * (1 + bidirectional)
    assert 0 <= total(fused) - unfused <= 3 * first_steps, "the cells skip products of a first state that is zero"


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_the_gradients_of_a_grouped_convolution_cost_twice_the_forward(groups):
    for run in (
        lambda: F.conv2d(leaf(2, 4, 8, 8), leaf(8, 4 // groups, 3, 3), groups=groups),
        lambda: F.conv_transpose2d(leaf(2, 4, 8, 8), leaf(4, 8 // groups, 3, 3), groups=groups, stride=2),
    ):
        torchs, operations = counted(lambda run=run: run().sum().backward())
        forward = next(op.flops for op in operations if op.name == "convolution")
        backward = next(op.flops for op in operations if op.name == "convolution_backward")
        assert backward == 2 * forward
        assert forward + backward <= torchs
        assert (forward + backward == torchs) is (groups == 1), "torch counts the weight's gradient once for each group"


KIB = 1024


@pytest.mark.parametrize("fake", [True, False])
def test_storages_live_from_their_operation_to_their_release(fake):
    with FakeTensorMode() if fake else contextlib.nullcontext(), Ledger() as ledger:
        first = torch.zeros(256)
        view = first.view(16, 16)[2:]
        assert ledger.live_bytes == KIB
        second = first + 1
        assert (ledger.live_bytes, ledger.peak_bytes) == (2 * KIB, 2 * KIB)
        del second
        assert (ledger.live_bytes, ledger.peak_bytes) == (KIB, 2 * KIB)
        ledger.open()
        assert ledger.peak_bytes == KIB
        del first
        assert ledger.live_bytes == KIB, "the view holds the storage"
        del view
        assert ledger.live_bytes == 0


def test_operations_say_what_they_move():
    with FakeTensorMode(), Ledger() as ledger:
        left, right = torch.empty(4, 8), torch.empty(8, 2)
        ledger.open()
        product = left @ right
        product.t()[0].detach()
    (operation,) = ledger.operations
    assert (operation.name, operation.flops, operation.dtype) == ("mm", 2 * 4 * 8 * 2, torch.float32)
    assert operation.bytes == 4 * (4 * 8 + 8 * 2 + 4 * 2)


def test_grouped_products_count_each_row_once():
    with FakeTensorMode(), torch.no_grad(), Ledger() as ledger:
        left, right = torch.empty(32, 16, dtype=torch.bfloat16), torch.empty(2, 16, 48, dtype=torch.bfloat16)
        torch._grouped_mm(left, right, torch.empty(2, dtype=torch.int32))
    assert total(ledger.operations) == 2 * 32 * 16 * 48
