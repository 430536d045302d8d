"""Functions for ``parallelize=``, and a model with blocks that they wrap."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from autosplit import autosplit
from autosplit.errors import AutosplitError
from tests.distributed.models import LENGTH, WIDTH, WORDS, few_targets, next_token, tokens
from tests.distributed.processes import error_of
from tests.distributed.replicas import NAMES, mesh_of, replica_of
from tests.distributed.training import Training

CALLS: list[str] = []
"""The blocks that were called by their copies."""


class Layer(nn.Module):
    """Attention and two layers, without dropout."""

    def __init__(self, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.out, self.inner = nn.Linear(WIDTH, WIDTH), inner or nn.Tanh()

    def forward(self, value: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(value)).chunk(3, -1)
        return value + self.out(self.inner(F.scaled_dot_product_attention(q, k, v, is_causal=True)))


class Deep(nn.Module):
    """Blocks between an embedding and a head that is tied to it."""

    def __init__(self, inner: Callable[[], nn.Module] = nn.Tanh) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.scale = nn.Embedding(WORDS, WIDTH), nn.Parameter(torch.tensor(1.5))
        self.shift = nn.Parameter(torch.zeros(1))
        self.layers = nn.ModuleList(Layer(inner()) for _ in range(4))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, words: Tensor) -> Tensor:
        value = self.scale * self.tokens(words) + self.shift
        for layer in self.layers:
            value = layer(value)
        return self.head(value)


DEEP = Training(Deep, tokens, next_token, few_targets)


def blocks_of(part: nn.Module) -> Any:
    return part.get_submodule("layers").named_children()


def replicas_of(mesh: Any) -> Any:
    names = tuple(name for name in mesh.mesh_dim_names if name != "pp")
    return mesh[names]


def in_shards(part: nn.Module, mesh: Any, **options: Any) -> nn.Module:
    """Shard each block, then the rest."""
    options |= {"mesh": replicas_of(mesh)}
    for name, block in blocks_of(part):
        block.register_forward_hook(lambda *_, name=name: CALLS.append(name))
        fully_shard(block, **options)
    scalars = {parameter for parameter in part.parameters() if not parameter.dim()}
    fully_shard(part, **options, ignored_params=scalars)
    return part


def recomputed(part: nn.Module, mesh: Any) -> nn.Module:
    """Have blocks run again in the backward, then shard them."""
    for name, block in list(blocks_of(part)):
        part.get_submodule("layers").register_module(name, checkpoint_wrapper(block))
    return in_shards(part, mesh)


def compiled(part: nn.Module, mesh: Any) -> nn.Module:
    """Compile blocks, without shards."""
    for name, block in list(blocks_of(part)):
        part.get_submodule("layers").register_module(name, torch.compile(block, backend="eager"))
    return part


# -- what is refused -------------------------------------------------------------------------------------------------
def other_names(part: nn.Module, mesh: Any) -> nn.Module:
    return nn.Sequential(part)


def untied(part: nn.Module, mesh: Any) -> nn.Module:
    for module in part.modules():
        if isinstance(module, nn.Embedding):
            module.weight = nn.Parameter(module.weight.detach().clone())
    return part


def in_bfloat16(part: nn.Module, mesh: Any) -> nn.Module:
    return in_shards(part, mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))


def over_all(part: nn.Module, mesh: Any) -> nn.Module:
    fully_shard(part, mesh=mesh, ignored_params={parameter for parameter in part.parameters() if not parameter.dim()})
    return part


def nothing(part: nn.Module, mesh: Any) -> Any:
    return None


def failing(part: nn.Module, mesh: Any) -> nn.Module:
    if torch.distributed.get_rank() == 1:
        raise ValueError("rank 1 cannot")
    return in_shards(part, mesh)


class Gain(nn.Module):
    """Scales features by values in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(WIDTH, dtype=torch.float64))

    def forward(self, value: Tensor) -> Tensor:
        return value * self.gain.to(value.dtype)


class Recurring(nn.Module):
    """A recurrent layer's outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, value: Tensor) -> Tensor:
        return self.lstm(value)[0]


def wide_gradients() -> nn.Module:
    model = Deep()
    next(model.parameters()).grad_dtype = torch.float64
    return model


REFUSED: dict[str, tuple[Any, tuple[int, ...], Callable[[], nn.Module], str]] = {
    "a word": ("ddp", (2, 2), Deep, "parallelize is 'ddp'; give 'fsdp'"),
    "no replicas": ("fsdp", (4,), Deep, "the mesh has no dimension dp"),
    "other names": (other_names, (2, 2), Deep, "with other parameters than the part"),
    "no module": (nothing, (2, 2), Deep, "returned a NoneType"),
    "untied": (untied, (4, 1), Deep, "are one parameter in the model, and two"),
    "mixed precision": (in_bfloat16, (2, 2), Deep, "with mp_policy=, or torch.autocast"),
    "other ranks": (over_all, (2, 2), Deep, "its replicas are ranks"),
    "two dtypes": ("fsdp", (4, 1), lambda: Deep(Gain), "shards what lies in 'layers.0' together"),
    "wide gradients": ("fsdp", (4, 1), wide_gradients, "have a grad_dtype"),
    "recurrent": ("fsdp", (4, 1), lambda: Deep(Recurring), "is of LSTM, whose kernel takes"),
    "dropout in blocks": (in_shards, (2, 2), lambda: Deep(lambda: nn.Dropout(0.5)), "draws random numbers"),
    "batch norm in blocks": (in_shards, (4, 1), lambda: Deep(lambda: nn.BatchNorm1d(LENGTH)), "the whole batch"),
    "blocks of tp": (in_shards, (1, 2, 1, 2), Deep, "wraps whole blocks, and tp=2 shares"),
    "one rank's error": (failing, (2, 2), Deep, "rank 1 cannot"),
}


def refused() -> dict[str, str]:
    """Return what was not refused as it is to be; called in every process."""
    found = {}
    for name, (parallelize, shape, make, text) in REFUSED.items():
        names = ("pp",) if name == "no replicas" else NAMES[len(shape)]
        mesh = torch.distributed.init_device_mesh("cpu", shape, mesh_dim_names=names)
        words = tokens(4).args[0]

        def train(made: nn.Module, **how: Any) -> None:
            autosplit(made, chunks=2, **how).train_step(how["sample"], target=how["sample"], loss_fn=next_token)

        said = error_of(train, make(), mesh=mesh, sample=words, parallelize=parallelize)
        found |= {} if text in said else {name: said}
    return found


# -- what a pipe with shards is --------------------------------------------------------------------------------------
def used(shape: tuple[int, ...], reshard: str) -> list[str]:
    """Return what is not right of a pipe in shards; called in every process."""
    found = []
    plain, mesh = Deep(), mesh_of(*shape)
    how = {"parallelize": "fsdp", "fsdp_reshard": reshard}
    pipe = autosplit(Deep(), mesh=mesh, chunks=2, sample=tokens(4).args[0], **how)
    own = dict(pipe.named_parameters())
    scale = {name: value for name, value in own.items() if not isinstance(value, DTensor)}
    if set(scale) - {"scale"}:
        found.append(f"whole on each replica: {sorted(scale)}")
    held = sum(value.to_local().numel() for value in own.values() if isinstance(value, DTensor))
    whole = sum(value.numel() for value in own.values() if isinstance(value, DTensor))
    if held > whole * 0.53:
        found.append(f"{held} of {whole} elements lie here")
    values = {name: 2 * value for name, value in plain.state_dict().items()}
    plain.load_state_dict(values)
    pipe.load_state_dict(values)
    rows = slice(3 * replica_of(mesh), 3 * replica_of(mesh) + 3)
    for length in (LENGTH, LENGTH - 2):  # the second is recorded when there are shards
        words = tokens(6).args[0][:, :length]
        output = pipe.eval_step(words[rows])
        if output is not None and (output - (whole := plain(words))[rows]).abs().max() > 1e-6 * whole.abs().max():
            found.append(f"another output at length {length}")
        loss = pipe.train_step(words[rows], target=words[rows], loss_fn=next_token)
        right = next_token(plain(words), words)
        right.backward()
        if not torch.allclose(loss, right):
            found.append(f"loss {loss} for {right} at length {length}")
    with torch.inference_mode():
        pipe(words[rows])
    for order in (2.0, torch.inf):
        norm = pipe.clip_grad_norm_(1.0, order)
        if not torch.allclose(norm, torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0, order)):
            found.append(f"norm {norm} of order {order}")
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    optimizer.step()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    model = pipe.unsplit()
    for name, value in model.named_parameters():
        if isinstance(value, DTensor) or not torch.allclose(value, plain.get_parameter(name), atol=1e-6):
            found.append(f"{name} after unsplit()")
    if model.head.weight is not model.tokens.weight:
        found.append("the tie is gone")
    try:
        pipe(tokens(4).args[0])
        found.append("a call after unsplit() was not refused")
    except AutosplitError as error:
        if "split it anew" not in str(error):
            found.append(str(error))
    return found
