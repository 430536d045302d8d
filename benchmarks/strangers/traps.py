"""Traps of state and rows, under lanes and recompute: every one is equal to the plain model or refused by name.

    python -m benchmarks.strangers.traps [--json FILE] [--only REGEX] [--seed N] [--setups N]

Each trap trains three rounds by a call and by `train_step`, in either order, under the first N of six setups
(threads or inline, recompute never, always or by block, with or without a sample).
"""

from __future__ import annotations

import sys

from benchmarks.strangers import traps_callers, traps_rows, traps_state
from benchmarks.strangers.compare import SETUPS
from benchmarks.strangers.run import exit_code, options, run_all, table

SUBJECTS = [*traps_state.SUBJECTS, *traps_callers.SUBJECTS, *traps_rows.subjects()]


def main() -> int:
    parser = options(__doc__ or "")
    parser.add_argument("--setups", type=int, default=len(SETUPS))
    chosen = parser.parse_args()
    cases = [
        (subject, SETUPS[(index + turn) % len(SETUPS)])
        for turn in range(chosen.setups)
        for index, subject in enumerate(SUBJECTS)
    ]
    results = run_all(cases, only=chosen.only, seed=chosen.seed, json_file=chosen.json)
    print(table(results))
    return exit_code(results)


if __name__ == "__main__":
    sys.exit(main())
