"""Through how many source files of autosplit a call goes: the first call of a pipe, and a repeated one.

    python -m benchmarks.files_passed [--names] [--cost]

Counted by ``sys.setprofile`` in the calling thread, once with the lanes in threads and once inline. With ``--cost`` it
says where the seconds of a node go, from the cost model to the plan and the plan's to the report: in how many files a
function holds them or what is computed from them, and in objects of which types.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from pydantic import BaseModel
from torch import nn

import autosplit
from autosplit.report.sections import render
from cost_models.roofline import Roofline

PACKAGE = str(Path(autosplit.__file__).parent)


def files_passed(call: Callable[[], Any]) -> list[str]:
    """Return the files of autosplit of which functions run in a call."""
    seen: set[str] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            seen.add(frame.f_code.co_filename)

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return sorted(str(Path(file).relative_to(PACKAGE)) for file in seen if file.startswith(PACKAGE))


class _Marked(float):
    """Seconds that come from a node's, through any arithmetic."""


def _marking(name: str) -> Callable[..., Any]:
    plain = getattr(float, name)

    def operator(*args: Any) -> Any:
        found = plain(*args)
        return found if found is NotImplemented else _Marked(found)

    return operator


for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv"):
    setattr(_Marked, f"__{_name}__", _marking(f"__{_name}__"))


def _has_marked(value: Any) -> bool:
    each = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else (value,)
    return any(isinstance(own, _Marked) for own in each)


def cost_passed() -> tuple[list[str], list[str]]:
    """Return the files and types through which the seconds of a node go when a model is planned and reported."""
    files, types = set[str](), set[str]()

    def note(frame: FrameType, event: str, result: Any) -> None:
        file = frame.f_code.co_filename
        if event != "return" or not file.startswith(PACKAGE):
            return
        values = [*frame.f_locals.values(), result]
        each = [own for value in values for own in (value if isinstance(value, (list, tuple)) else (value,))]
        records = [own for own in each if hasattr(type(own), "__dataclass_fields__") or isinstance(own, BaseModel)]
        holding = [own for own in records if any(map(_has_marked, getattr(own, "__dict__", {}).values()))]
        types.update(type(own).__qualname__ for own in holding)
        if holding or any(map(_has_marked, values)):
            files.add(str(Path(file).relative_to(PACKAGE)))

    with torch.device("meta"):
        model, x = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.ReLU()) for _ in range(4))), torch.empty(8, 32)
    seconds = Roofline.seconds
    Roofline.seconds = lambda self, work: _Marked(seconds(self, work))  # type: ignore[method-assign]
    sys.setprofile(note)
    try:
        plan = autosplit.plan(model, "2xL4-24GB", 4, sample=x)
        stages = (  # pydantic copies floats: the plan's are marked again
            own.model_copy(update={"forward_s": _Marked(own.forward_s), "backward_s": _Marked(own.backward_s)})
            for own in plan.stages
        )
        render(plan.model_copy(update={"stages": tuple(stages)}))
    finally:
        sys.setprofile(None)
        Roofline.seconds = seconds  # type: ignore[method-assign]
    return sorted(files), sorted(types)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--names", action="store_true", help="list the files")
    parser.add_argument("--cost", action="store_true", help="follow a node's seconds from profile to report")
    names = (asked := parser.parse_args()).names
    if asked.cost:
        files, types = cost_passed()
        print(f"a node's seconds: {len(files)} files, {len(types)} types: {', '.join(types)}")
        print(*(files if names else ()), sep="\n")
        return
    for lanes in ("inline", "threads"):
        model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.ReLU()) for _ in range(4)))
        pipe, x = autosplit.autosplit(model, devices=2, chunks=4, lanes=lanes), torch.randn(8, 32)
        first, again = files_passed(lambda: pipe(x)), files_passed(lambda: pipe(x))  # noqa: B023
        step = files_passed(lambda: pipe.train_step(x, target=x, loss_fn=nn.functional.mse_loss))  # noqa: B023
        for what, files in (("first call", first), ("repeated call", again), ("train_step", step)):
            print(f"{lanes:8} {what:14} {len(files):3} files", *(files if names else ()), sep="\n    " if names else "")


if __name__ == "__main__":
    main()
