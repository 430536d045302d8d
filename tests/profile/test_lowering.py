"""What autograd saves under CUDA's kernels, on fake CPU tensors, against formulas."""

from __future__ import annotations

import contextlib
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

from autosplit.profile.lowering import CudaKernels, cuda_autocast
from autosplit.profile.node_costs.ledger import Ledger

HALF = torch.float16


class Saved:
    """Storages that autograd saves, and what the run counted."""

    def __init__(self, make, *inputs, autocast=None, kernels=True, backward=True):
        storages = {}

        def pack(tensor):
            storage = tensor.untyped_storage()
            storages[storage._cdata] = storage, str(tensor.dtype).removeprefix("torch.")
            return tensor

        region = contextlib.nullcontext() if autocast is None else cuda_autocast(autocast)
        with FakeTensorMode() as mode:
            model = make()
        with mode, Ledger(kernels="cuda") as ledger, CudaKernels() if kernels else contextlib.nullcontext():
            with saved_tensors_hooks(pack, lambda tensor: tensor), region:
                given = [make_input() for make_input in inputs]
                out = model(*given)
            self.out = out[0] if isinstance(out, tuple) else out
            forward = len(ledger.operations)
            if backward:
                self.out.backward(torch.empty_like(self.out))
        parameters = {p.untyped_storage()._cdata for p in model.parameters()} if isinstance(model, nn.Module) else set()
        kept = {key: value for key, value in storages.items() if key not in parameters}
        self.sizes = sorted((dtype, storage.nbytes()) for storage, dtype in kept.values())
        self.bytes = sum(size for _, size in self.sizes)
        self.names = [op.name for op in ledger.operations]
        self.forward_flops = sum(op.flops for op in ledger.operations[:forward])
        self.backward_flops = sum(op.flops for op in ledger.operations[forward:])


def given(*shape, dtype=torch.float32):
    return lambda: torch.empty(*shape, dtype=dtype, requires_grad=True)


def heads(dtype, length=70, width=32):
    return [given(2, 4, length, width, dtype=dtype) for _ in range(3)]


def attention(**kwargs):
    return lambda: lambda q, k, v: F.scaled_dot_product_attention(q, k, v, **kwargs)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_flash_attention_saves_its_operands_result_and_logsumexp(dtype):
    saved = Saved(attention(is_causal=True, dropout_p=0.1), *heads(dtype))
    name, one = str(dtype).removeprefix("torch."), 2 * 4 * 70 * 32 * 2
    random_state = [("uint64", 8), ("uint64", 16)]
    assert saved.sizes == sorted([(name, one)] * 4 + [("float32", 2 * 4 * 70 * 4)] + random_state)
    assert saved.forward_flops == 2 * 2 * (2 * 4) * 70 * 70 * 32
    assert saved.backward_flops == 2.5 * saved.forward_flops, "one product of the forward is made again"


def test_efficient_attention_saves_a_padded_logsumexp():
    saved = Saved(attention(is_causal=True), *heads(torch.float32))
    assert saved.sizes == sorted(
        [("float32", 2 * 4 * 70 * 32 * 4)] * 4 + [("float32", 2 * 4 * 96 * 4)] + [("int64", 8)] * 2
    )


def test_a_boolean_mask_becomes_an_additive_one_that_is_saved():
    def masked():
        return lambda q, k, v: F.scaled_dot_product_attention(
            q, k, v, attn_mask=torch.ones(2, 1, 64, 64, dtype=torch.bool)
        )

    saved = Saved(masked, *heads(torch.bfloat16, length=64))
    assert ("bfloat16", 2 * 64 * 64 * 2) in saved.sizes
    assert "_scaled_dot_product_efficient_attention" in saved.names


def test_dropout_keeps_a_mask_of_bytes():
    assert Saved(lambda: nn.Dropout(0.1), given(4, 8, 16)).sizes == [("bool", 512)]
    assert Saved(lambda: nn.Dropout(0.1), given(4, 8, 16), kernels=False).sizes == [("float32", 2048)]
    assert Saved(lambda: nn.Dropout(0.1).eval(), given(4, 8, 16), backward=False).sizes == []


def test_rms_norm_keeps_its_input_and_one_number_per_row():
    saved = Saved(lambda: nn.RMSNorm(16), given(4, 8, 16))
    assert saved.sizes == [("float32", 4 * 8 * 4), ("float32", 4 * 8 * 16 * 4)]
    assert saved.out.shape == (4, 8, 16)


@pytest.mark.parametrize(("autocast", "input_bytes"), [(None, 2), (torch.bfloat16, 4)])
def test_layer_norm_keeps_statistics_in_fp32(autocast, input_bytes):
    dtype = torch.bfloat16 if autocast is None else torch.float32
    saved = Saved(lambda: nn.LayerNorm(16, dtype=dtype), given(4, 8, 16, dtype=dtype), autocast=autocast)
    assert saved.bytes == 2 * 4 * 8 * 4 + 4 * 8 * 16 * input_bytes
    assert saved.sizes.count(("float32", 4 * 8 * 4)) == 2


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_are_one_call_of_cudnn(kind):
    saved = Saved(lambda: kind(16, 24, 2, batch_first=True, bidirectional=True), given(4, 8, 16))
    assert "_cudnn_rnn" in saved.names
    assert "_cudnn_rnn_backward" in saved.names
    assert any(dtype == "uint8" and size > 0 for dtype, size in saved.sizes), "the reserve space"
    weights = sum(weight.numel() for weight in kind(16, 24, 2, bidirectional=True).parameters() if weight.dim() == 2)
    assert saved.forward_flops == 2 * 4 * 8 * weights
    assert saved.backward_flops == 2 * saved.forward_flops


def test_attention_inside_a_python_function_of_torch_is_seen():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.MultiheadAttention(32, 4, dropout=0.1, batch_first=True)

        def forward(self, x):
            return self.inner(x, x, x, need_weights=False)[0]

    assert "_scaled_dot_product_efficient_attention" in Saved(Attention, given(2, 10, 32)).names
    low = Saved(Attention, given(2, 10, 32), autocast=torch.bfloat16)
    assert "_scaled_dot_product_flash_attention" in low.names
    assert low.out.dtype == torch.bfloat16


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_functions_that_hand_over_to_each_other_end(autocast):
    image, words = given(2, 4, 12, 12), given(5, 6)
    calls = (
        lambda t: F.max_pool2d(t, 2),
        lambda t: F.max_pool2d(t, 2, return_indices=True)[0],
        lambda t: F.adaptive_max_pool2d(t, 3),
        lambda t: F.fractional_max_pool2d(t, 2, output_size=3),
        lambda t: F.interpolate(t, scale_factor=2, mode="bilinear"),
        lambda t: F.pad(F.group_norm(F.instance_norm(t), 2), (1, 1)),
    )
    for call in calls:
        assert Saved(lambda call=call: call, image, autocast=autocast).out.shape[:2] == (2, 4)
    for call in (F.gumbel_softmax, F.normalize, F.glu, lambda t: torch.einsum("ab,cb->ac", t, t), torch.norm):
        Saved(lambda call=call: call, words, autocast=autocast)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_cudas_autocast_list_decides(dtype):
    x = given(4, 32)
    assert Saved(lambda: nn.Linear(32, 8), x, autocast=dtype).out.dtype == dtype
    for call in (torch.exp, torch.log, lambda t: t.softmax(-1), lambda t: t.pow(2), lambda t: t.sum(-1), F.softplus):
        net = Saved(lambda call=call: lambda t: call(t.to(dtype)), x, autocast=dtype)
        assert net.out.dtype == torch.float32, call
    for call in (torch.relu, F.gelu, torch.tanh, torch.sigmoid):
        assert Saved(lambda call=call: lambda t: call(t.to(dtype)), x, autocast=dtype).out.dtype == dtype
    assert not torch.is_autocast_enabled("cuda")


def test_a_weight_is_cast_once_in_a_region():
    layer = nn.Linear(32, 32, bias=False)

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(32, 32, bias=False)

        def forward(self, x):
            return self.layer(self.layer(x))

    saved = Saved(Twice, given(4, 32), autocast=HALF)
    assert saved.sizes.count(("float16", layer.weight.numel() * 2)) == 1


class Layer(nn.Module):
    """A GPT layer as Megatron's paper counts it: biases, two norms, three dropouts (one of them on the scores)."""

    def __init__(self, width, heads, *, flash):
        super().__init__()
        self.heads, self.flash = heads, flash
        self.norms = nn.ModuleList(nn.LayerNorm(width, dtype=HALF) for _ in range(2))
        self.qkv = nn.Linear(width, 3 * width, dtype=HALF)
        self.out = nn.Linear(width, width, dtype=HALF)
        self.up, self.down = nn.Linear(width, 4 * width, dtype=HALF), nn.Linear(4 * width, width, dtype=HALF)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        parts = self.qkv(self.norms[0](x)).view(rows, length, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1) if self.flash else self.scores(q, k, v)
        x = x + F.dropout(self.out(mixed.transpose(1, 2).reshape(rows, length, width)), 0.1)
        return x + F.dropout(self.down(F.gelu(self.up(self.norms[1](x)))), 0.1)

    def scores(self, *parts: Tensor) -> Tensor:
        """Attention by the matrix of scores, as Megatron makes it: one product with the scale in it."""
        q, k, v = (part.reshape(-1, *part.shape[-2:]) for part in parts)
        scores = q.new_empty(q.shape[0], q.shape[1], k.shape[1])
        scores = torch.baddbmm(scores, q, k.transpose(1, 2), beta=0, alpha=q.shape[-1] ** -0.5)
        return (F.dropout(scores.softmax(-1), 0.1) @ v).view(parts[0].shape)


@pytest.mark.parametrize(("rows", "length", "width", "heads"), [(1, 2048, 4096, 32), (2, 2048, 2304, 24)])
def test_a_gpt_layer_saves_what_megatron_counts(rows, length, width, heads):
    """Korthikanti et al., "Reducing Activation Recomputation", 2205.05198, eq. 1: sbh (34 + 5 as / h) bytes.

    The paper leaves out the norms' statistics; with flash attention 5as/h goes, and a logsumexp comes (4abs). The
    attention's result is the projection's input, which is among the 34.
    """
    unit = rows * length * width
    statistics = 2 * 2 * 4 * rows * length
    x = given(rows, length, width, dtype=HALF)
    explicit = Saved(lambda: Layer(width, heads, flash=False), x, backward=False)
    paper = 34 * unit + 5 * heads * length * length * rows
    assert explicit.bytes - statistics == paper
    assert math.isclose(explicit.bytes, paper, rel_tol=1e-4)
    flash = Saved(lambda: Layer(width, heads, flash=True), x, backward=False)
    logsumexp, random_state = 4 * heads * rows * length, 24
    assert flash.bytes == 34 * unit + logsumexp + statistics + random_state
