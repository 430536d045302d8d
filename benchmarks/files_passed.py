"""Through how many source files of autosplit a call goes: the first call of a pipe, and a repeated one.

    python -m benchmarks.files_passed [--names]

Counted by ``sys.setprofile`` in the calling thread, once with the lanes in threads and once inline.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

import autosplit

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--names", action="store_true", help="list the files")
    names = parser.parse_args().names
    for lanes in ("inline", "threads"):
        model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.ReLU()) for _ in range(4)))
        pipe, x = autosplit.autosplit(model, devices=2, chunks=4, lanes=lanes), torch.randn(8, 32)
        first, again = files_passed(lambda: pipe(x)), files_passed(lambda: pipe(x))  # noqa: B023
        step = files_passed(lambda: pipe.train_step(x, target=x, loss_fn=nn.functional.mse_loss))  # noqa: B023
        for what, files in (("first call", first), ("repeated call", again), ("train_step", step)):
            print(f"{lanes:8} {what:14} {len(files):3} files", *(files if names else ()), sep="\n    " if names else "")


if __name__ == "__main__":
    main()
