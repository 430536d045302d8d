"""The code of the guide to many processes runs on two ranks."""

from __future__ import annotations

import contextlib
from pathlib import Path

from tests.distributed.processes import Pool
from tests.test_readme import MANY_PROCESSES, PAGES, blocks


def run_blocks(code: list[str], folder: str) -> None:
    """Run pieces of Python in order, in a folder."""
    names: dict[str, object] = {"__name__": "guide"}
    with contextlib.chdir(folder):
        for number, block in enumerate(code):
            exec(compile(block, f"{MANY_PROCESSES}, python block {number}", "exec"), names)


def test_the_python_blocks_of_the_guide_run_on_two_ranks(ranks: Pool, tmp_path: Path) -> None:
    code = blocks(PAGES[MANY_PROCESSES], "python")
    assert len(code) >= 2
    ranks(2).run(run_blocks, code, str(tmp_path))
