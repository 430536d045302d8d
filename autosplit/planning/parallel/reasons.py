"""Which mesh is chosen of those that were searched, and why it is as it is, in words."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from autosplit.parallel import Parallel
from autosplit.planning.plan.fields import MeshAlternative, MeshDegrees
from autosplit.planning.plan.plan import Plan

_Of = Callable[[MeshDegrees], bool]
_ERROR = 0.033
"""By how much a mesh must be faster than a simpler one to be chosen.

Ten published rows of one source were predicted with a mean error of 3.3% after one constant (NeMo, decision 27).
"""


class Weighed(NamedTuple):
    """A mesh that was searched: how surely its best plan fits (0: for sure, 1: it is predicted to), and its step."""

    sureness: float
    step_s: float
    parallel: Parallel


def simplest(weighed: Sequence[Weighed]) -> int:
    """Return which mesh is the simplest of those that fit most surely and are as fast as the best, but for an error."""
    surest = min(entry.sureness for entry in weighed)
    least_s = min(entry.step_s for entry in weighed if entry.sureness == surest)
    near = [
        index
        for index, (sureness, step_s, _) in enumerate(weighed)
        if sureness == surest and step_s <= least_s * (1 + _ERROR)
    ]
    return min(near, key=lambda index: (_ways(weighed[index].parallel), weighed[index].step_s))


def _ways(mesh: Parallel | MeshDegrees) -> int:
    """Return how many ways to share the model a mesh has beside plain data parallelism."""
    return (mesh.tp > 1) + (mesh.pp > 1) + (mesh.zero == 3)


def mesh_reasons(plan: Plan) -> Iterator[str]:
    """Yield what a plan's mesh gains over others that were weighed; nothing where there were none."""
    mesh = plan.mesh
    if mesh is None or not plan.meshes:
        return
    if plan.verdict == "no":
        yield f"no mesh of these devices holds a step of this batch; {mesh} comes closest"
        return
    if mesh.tp == mesh.pp == 1:
        how = "FSDP" if mesh.zero == 3 else "plain data parallelism"
        yield f"{how} alone is enough ({mesh}): {_against(plan, lambda m: m.tp * m.pp > 1, 'the best other mesh')}"
    else:
        yield f"{mesh}: {_against(plan, lambda mesh: mesh.tp == mesh.pp == 1, 'data parallelism alone')}"
    if mesh.tp > 1:
        yield f"tp={mesh.tp}: {_against(plan, lambda mesh: mesh.tp == 1, 'the best mesh without tensor parallelism')}"
    if mesh.pp > 1:
        yield f"pp={mesh.pp}: {_against(plan, lambda mesh: mesh.pp == 1, 'the best mesh without a pipeline')}"
    others = [each for each in plan.meshes if not each.bound and each.verdict == "fits"]
    faster = [each for each in others if each.step_s < plan.step_s and _ways(each.mesh) > _ways(mesh)]
    if faster:
        gain = 1 - faster[0].step_s / plan.step_s
        yield f"{faster[0].mesh} is {gain:.1%} faster, within the error of predictions: the simpler mesh is taken"
    slower = [each for each in others if each.step_s >= plan.step_s and _degrees(each.mesh) != _degrees(mesh)]
    if slower:
        yield f"the next best mesh that was planned, {slower[0].mesh}, takes {_longer(slower[0].step_s, plan.step_s)}"


def _longer(step_s: float, than_s: float) -> str:
    return f"{step_s / than_s - 1:.0%} longer" if step_s / than_s >= 1.005 else "about as long"


def _degrees(mesh: MeshDegrees) -> tuple[int, int, int]:
    return mesh.dp, mesh.tp, mesh.pp


def _against(plan: Plan, among: _Of, what: str) -> str:
    """Return how a plan compares with the best of some other meshes."""
    others = [each for each in plan.meshes if among(each.mesh)]
    if not others:
        return f"{what} is not possible with these devices and this batch"
    best = min(others, key=_rank)
    if best.verdict == "no":
        return f"{what} ({best.mesh}) does not fit"
    longer = best.step_s / plan.step_s - 1
    fits = " and fits" if plan.verdict == "fits" else ""
    if best.bound:
        least = "about as fast as" if longer < 0.005 else f"{longer:.0%} faster than"
        return f"at least {least} {what} ({best.mesh}) can be{fits}"
    if longer >= 0:
        return f"{longer:.0%} faster than {what} ({best.mesh}){fits}"
    return f"{what} ({best.mesh}) is {-longer:.0%} faster and {_VERDICTS[best.verdict or 'fits']}"


_VERDICTS = {"fits": "fits", "borderline": "only borderline", "no": "does not fit"}


def _rank(other: MeshAlternative) -> tuple[bool, float]:
    return other.verdict == "no", other.step_s
