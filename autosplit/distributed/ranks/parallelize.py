"""What wraps a rank's part of the model, as the caller asks for it: ``parallelize=`` and ``fsdp_reshard=``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from autosplit.checks import FSDP_RESHARD, choose
from autosplit.distributed.mesh import replicas_of
from autosplit.errors import InputError, TraceError, listed
from autosplit.profile.stage_trace.stage_graph import block_paths
from autosplit.recorded import PreparedStep

if TYPE_CHECKING:
    from autosplit.distributed.ranks.wrapped import WrappedPart

FSDP, ALWAYS = "fsdp", "always"


@dataclass(frozen=True)
class Parallelize:
    """The ``parallelize=`` of the caller.

    Attributes:
        name: the text that ranks compare.
        wrap: returns this rank's part of the model, wrapped.
        whole: whether the graph calls the model's blocks as modules, since wrappers act in a module's call.
        by_units: whether parameters are gathered unit by unit in every action, and not once per step.
    """

    name: str
    wrap: Callable[[nn.Module], nn.Module]
    whole: bool
    by_units: bool = False

    def blocks_of(self, model: nn.Module) -> tuple[str, ...]:
        """Return the paths of the modules that the graph calls."""
        return block_paths(model, [path for path, _ in model.named_modules()]) if self.whole else ()

    def check(self, step: PreparedStep, model: nn.Module, wrapped: WrappedPart | None) -> None:
        """Raise InputError where the part has given its parameters back, TraceError for what it may not do wrapped."""
        if wrapped is not None and wrapped.given_back:
            raise InputError("unsplit() gave the model plain parameters again, in the place of shards; split it anew")
        if wrapped is not None:
            wrapped.check_unchanged()
        if step.recorded.changes_python:
            raise TraceError("the model's forward changes its Python state, which needs a pipe without parallelize=")
        if wrapped is not None and wrapped.units is not None:
            wrapped.units.note(step.lowered)
        blocks = self.blocks_of(model)
        taped = {node.name for node in step.lowered.tape} if step.state.tape is not None else set()
        for node, info in step.lowered.traced.compute_nodes():
            if info.name in taped and info.module in blocks and node.op == "call_module":
                raise TraceError(
                    f"{info.module!r} draws random numbers, and runs as a whole by what parallelize= has made of it, "
                    "which may draw anew in the backward; use rng='counter', or parallelize='fsdp'"
                )


def parallelizing(asked: Any, mesh: Any, reshard: Any, compiled: Mapping[str, Any] | None) -> Parallelize | None:
    """Return what wraps a rank's part; raise InputError for what nothing is known of."""
    choose("fsdp_reshard", reshard, FSDP_RESHARD)
    if reshard == ALWAYS and asked != FSDP:
        raise InputError(f"fsdp_reshard={ALWAYS!r} is for parallelize={FSDP!r}, and that is {asked!r}; give both")
    if reshard == ALWAYS and compiled is not None:
        raise InputError(
            f"fsdp_reshard={ALWAYS!r} gathers parameters between the layers of a stage, which compile= makes one piece "
            "of; leave compile= out, or give fsdp_reshard='never'"
        )
    if asked is None:
        return None
    if mesh is None:
        raise InputError(f"parallelize={asked!r} is for a mesh of ranks; give mesh= too")
    if callable(asked):
        return Parallelize(_name_of(asked), lambda module: asked(module, mesh), whole=True)
    if asked != FSDP:
        raise InputError(f"parallelize is {asked!r}; give {FSDP!r}, a function (part, mesh) -> part, or None")
    if not (names := replicas_of(mesh)):
        raise InputError(f"parallelize={FSDP!r} shards over replicas, and the mesh has no dimension dp")
    by_units = reshard == ALWAYS
    return Parallelize(f"{asked} {reshard}", partial(sharded, mesh=mesh[names]), whole=False, by_units=by_units)


def _name_of(asked: Any) -> str:
    """Return what tells a function from others in every process."""
    if isinstance(asked, partial):
        return f"{_name_of(asked.func)} {sorted(asked.keywords.items())}"
    line = getattr(getattr(asked, "__code__", None), "co_firstlineno", "")
    return f"{getattr(asked, '__qualname__', type(asked).__qualname__)} {line}"


def check_plain(model: nn.Module) -> None:
    """Raise InputError for a model whose parameters are in shards already."""
    if shards := [name for name, parameter in model.named_parameters() if isinstance(parameter, DTensor)]:
        raise InputError(
            f"{listed(shards)} of the model are DTensors already; give the plain model and parallelize=, and one that "
            "a pipe has sharded after its unsplit()"
        )


def sharded(module: nn.Module, mesh: Any) -> nn.Module:
    """Shard a part by FSDP2 over the replicas of a mesh: each repeated block by itself, then the rest.

    Blocks that are never called, and those that share parameters with others, go with the rest; parameters that cannot
    be sharded (without dimensions) stay whole on every replica.
    """
    named = [(name, parameter) for name, parameter in module.named_parameters(remove_duplicate=False)]
    options: dict[str, Any] = {
        "mesh": mesh,
        "reshard_after_forward": False,
        "ignored_params": {parameter for _, parameter in named if not parameter.dim() or not parameter.is_contiguous()},
    }
    for path in block_paths(module, [path for path, _ in module.named_modules()]):
        block = module.get_submodule(path)
        others = {id(parameter) for name, parameter in named if not name.startswith(f"{path}.")}
        parameters = list(block.parameters())
        runs = not isinstance(block, nn.ModuleList | nn.ModuleDict)
        if runs and parameters and not any(id(parameter) in others for parameter in parameters):
            fully_shard(block, **options)
    fully_shard(module, **options)
    return module
