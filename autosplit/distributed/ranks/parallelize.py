"""What wraps a rank's part of the model: ``parallelize=``, ``fsdp_reshard=`` and ``mp_policy=`` of the caller."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from autosplit.checks import FSDP_RESHARD, choose
from autosplit.distributed.mesh import replicas_of
from autosplit.errors import InputError, TraceError, listed
from autosplit.profile.stage_trace.stage_graph import block_paths
from autosplit.recorded import PreparedStep
from autosplit.trace.scope import Casts

FSDP, ALWAYS = "fsdp", "always"


@dataclass(frozen=True)
class Parallelize:
    """The ``parallelize=`` of the caller.

    Attributes:
        name: the text that ranks compare.
        wrap: returns this rank's part of the model, wrapped.
        whole: whether the graph calls the model's blocks as modules, since wrappers act in a module's call.
        by_units: whether parameters are gathered unit by unit in every action, and not once per step.
        policy: in what parameters are gathered and computed with.
        reduce_dtype: in what gradients are added up at least.
    """

    name: str
    wrap: Callable[[nn.Module], nn.Module]
    whole: bool
    by_units: bool = False
    policy: MixedPrecisionPolicy | None = None
    reduce_dtype: torch.dtype | None = None

    def recorded(self, model: nn.Module) -> dict[str, Any]:
        """Return how a model is recorded: the modules that are one call, and what inputs and outputs are cast to."""
        return {"blocks": self.blocks_of(model), "casts": self.casts(model)}

    def dtypes(self, model: nn.Module) -> dict[int, torch.dtype]:
        """Return what parameters are gathered in, by their identity, where that is set."""
        if self.policy is None or (dtype := self.policy.param_dtype) is None:
            return {}
        return {id(p): dtype for p in model.parameters() if _in_shards(p) and p.is_floating_point()}

    def casts(self, model: nn.Module) -> dict[str, Casts]:
        """Return what inputs and outputs of units are cast to, as ``fully_shard`` does in their calls."""
        if (policy := self.policy) is None:
            return {}
        casts = Casts(policy.param_dtype if policy.cast_forward_inputs else None, policy.output_dtype)
        return dict.fromkeys(("", *_units(model)), casts)

    def blocks_of(self, model: nn.Module) -> tuple[str, ...]:
        """Return the paths of the modules that the graph calls."""
        return block_paths(model, [path for path, _ in model.named_modules()]) if self.whole else ()

    def check(self, step: PreparedStep, model: nn.Module) -> None:
        """Raise TraceError for what a model may not do wrapped."""
        if step.recorded.changes_python:
            raise TraceError("the model's forward changes its Python state, which needs a pipe without parallelize=")
        blocks = self.blocks_of(model)
        taped = {node.name for node in step.lowered.tape} if step.state.tape is not None else set()
        for node, info in step.lowered.traced.compute_nodes():
            if info.name in taped and info.module in blocks and node.op == "call_module":
                raise TraceError(
                    f"{info.module!r} draws random numbers, and runs as a whole by what parallelize= has made of it, "
                    "which may draw anew in the backward; use rng='counter', or parallelize='fsdp'"
                )


def parallelizing(
    asked: Any, mesh: Any, reshard: Any, compiled: Mapping[str, Any] | None, policy: Any, dtype: torch.dtype | None
) -> Parallelize | None:
    """Return what wraps a rank's part; raise InputError for what nothing is known of.

    Gradients are added up in ``dtype`` at least.
    """
    choose("fsdp_reshard", reshard, FSDP_RESHARD)
    if policy is not None and asked != FSDP:
        raise InputError(f"mp_policy= with parallelize={asked!r}; it is for parallelize={FSDP!r}")
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
        return Parallelize(_name_of(asked), lambda module: asked(module, mesh), whole=True, reduce_dtype=dtype)
    if asked != FSDP:
        raise InputError(f"parallelize is {asked!r}; give {FSDP!r}, a function (part, mesh) -> part, or None")
    if not (names := replicas_of(mesh)):
        raise InputError(f"parallelize={FSDP!r} shards over replicas, and the mesh has no dimension dp")
    wrap = partial(sharded, mesh=mesh[names], policy=policy)
    name = f"{asked} {reshard} {policy or ''}".rstrip()
    return Parallelize(name, wrap, whole=False, by_units=reshard == ALWAYS, policy=policy, reduce_dtype=dtype)


def dtype_of_reductions(asked: Any, policy: MixedPrecisionPolicy | None) -> torch.dtype | None:
    """Return what gradients are added up in at least; None: in their parameter's dtype."""
    if policy is None:
        return choose("reduce_dtype", asked, (None, torch.float32))
    if not isinstance(policy, MixedPrecisionPolicy):
        raise InputError(f"mp_policy={policy!r}; give a torch.distributed.fsdp.MixedPrecisionPolicy")
    if asked is not None or policy.reduce_dtype not in (None, policy.param_dtype, torch.float32):
        raise InputError(
            f"reduce_dtype={asked} and mp_policy.reduce_dtype={policy.reduce_dtype}: give mp_policy alone, and in it "
            "torch.float32, the param_dtype or None"
        )
    return policy.reduce_dtype


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


def _in_shards(parameter: nn.Parameter) -> bool:
    return parameter.dim() > 0 and parameter.is_contiguous()


def _units(module: nn.Module) -> list[str]:
    """Return the repeated blocks that run by a call and share no parameter with what lies outside of them."""
    named, units = list(module.named_parameters(remove_duplicate=False)), []
    for path in block_paths(module, [path for path, _ in module.named_modules()]):
        block = module.get_submodule(path)
        others = {id(parameter) for name, parameter in named if not name.startswith(f"{path}.")}
        parameters = list(block.parameters())
        runs = not isinstance(block, nn.ModuleList | nn.ModuleDict)
        if runs and parameters and not any(id(parameter) in others for parameter in parameters):
            units.append(path)
    return units


def sharded(module: nn.Module, mesh: Any, policy: MixedPrecisionPolicy | None = None) -> nn.Module:
    """Shard a part by FSDP2 over the replicas of a mesh: each repeated block by itself, then the rest.

    Blocks that are never called, and those that share parameters with others, go with the rest; parameters that cannot
    be sharded (without dimensions) stay whole on every replica.
    """
    options: dict[str, Any] = {
        "mesh": mesh,
        "reshard_after_forward": False,
        "ignored_params": {parameter for parameter in module.parameters() if not _in_shards(parameter)},
        "mp_policy": policy or MixedPrecisionPolicy(),
    }
    for path in (*_units(module), ""):
        unit = module.get_submodule(path)
        _check_dtypes(unit, f"in {path!r}" if path else "outside of all blocks", options["ignored_params"])
        fully_shard(unit, **options)
    return module


def _check_dtypes(module: nn.Module, what: str, ignored: Collection[nn.Parameter]) -> None:
    """Raise InputError where parameters to be sharded together are trained in several dtypes, or have a grad_dtype."""
    kept = {n: p for n, p in module.named_parameters() if not isinstance(p, DTensor) and p not in ignored}
    if wide := [name for name, parameter in kept.items() if parameter.grad_dtype != parameter.dtype]:
        raise InputError(
            f"{listed(wide)} have a grad_dtype, which shards do not keep; leave it out, or give parameters in fp32 "
            "and mp_policy="
        )
    first = {p.dtype: f"{name!r} in {p.dtype}" for name, p in reversed(kept.items()) if p.requires_grad}
    if len(first) > 1:
        raise InputError(
            f"parallelize={FSDP!r} shards what lies {what} together, in one dtype, and has "
            f"{' and '.join(first.values())}; cast them to one dtype, or give parallelize= a function that shards "
            "those of each dtype by themselves"
        )
