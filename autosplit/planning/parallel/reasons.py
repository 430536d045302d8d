"""Why a mesh is as it is, in words: against the best without each way to be parallel, and against the next best."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from autosplit.planning.plan.fields import MeshAlternative, MeshDegrees
from autosplit.planning.plan.plan import Plan

_Of = Callable[[MeshDegrees], bool]


def mesh_reasons(plan: Plan) -> Iterator[str]:
    """Yield what a plan's mesh gains over others that were weighed; nothing where there were none."""
    mesh = plan.mesh
    if mesh is None or not plan.meshes:
        return
    if plan.verdict == "no":
        yield f"no mesh of these devices holds a step of this batch; {mesh} comes closest"
        return
    if mesh.tp == mesh.pp == 1:
        yield f"pure data parallel ({mesh}): {_against(plan, lambda m: m.tp * m.pp > 1, 'the best other mesh')}"
    else:
        pure = "pure data parallel"
        yield f"{mesh}: {_against(plan, lambda mesh: mesh.tp == mesh.pp == 1, pure)}"
    if mesh.tp > 1:
        yield f"tp={mesh.tp}: {_against(plan, lambda mesh: mesh.tp == 1, 'the best mesh without tensor parallelism')}"
    if mesh.pp > 1:
        yield f"pp={mesh.pp}: {_against(plan, lambda mesh: mesh.pp == 1, 'the best mesh without a pipeline')}"
    others = [each for each in plan.meshes if _degrees(each.mesh) != _degrees(mesh)]
    if others and others[0].verdict in ("fits", None):
        longer, least = others[0].step_s / plan.step_s - 1, "at least " if others[0].verdict is None else ""
        more = f"{least}{longer:.0%} longer" if longer >= 0.005 else f"{least}about as long"
        yield f"the next best mesh, {others[0].mesh}, takes {more}"


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
    least = "at least " if best.verdict is None else ""
    fits = " and fits" if plan.verdict == "fits" else ""
    if longer < 0.005 and best.verdict is None:
        return f"{least}about as fast as {what} ({best.mesh}){fits}"
    if longer >= 0:
        return f"{least}{longer:.0%} faster than {what} ({best.mesh}){fits}"
    return f"{what} ({best.mesh}) is {-longer:.0%} faster and {_VERDICTS[best.verdict or 'fits']}"


_VERDICTS = {"fits": "fits", "borderline": "only borderline", "no": "does not fit"}


def _rank(other: MeshAlternative) -> tuple[bool, float]:
    return other.verdict == "no", other.step_s
