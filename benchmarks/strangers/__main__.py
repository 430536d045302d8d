"""Models as strangers write them: how many are equal, and how many pipeline.

    python -m benchmarks.strangers [--json FILE] [--only REGEX] [--seed N]

A model pipelines where more than one microbatch runs and at least 70% of the FLOPs are in the stages. The odd thing is
in an inner module of most, in the whole model of some.
"""

from __future__ import annotations

import sys

from benchmarks.strangers import (
    models_autograd,
    models_buffers,
    models_counters,
    models_features,
    models_outside,
    models_packed,
    models_rows,
)
from benchmarks.strangers.compare import CALL_FIRST, STEP_FIRST, Setup
from benchmarks.strangers.run import exit_code, options, run_all, table

MODULES = (
    models_counters,
    models_features,
    models_autograd,
    models_rows,
    models_packed,
    models_buffers,
    models_outside,
)
TABLES = tuple(module.TABLE for module in MODULES)
SUBJECTS = [subject for each in TABLES for subject in each.subjects]
SETUPS = (Setup(order=CALL_FIRST), Setup(order=STEP_FIRST))


def main() -> int:
    chosen = options(__doc__ or "").parse_args()
    cases = [(subject, SETUPS[index % 2]) for index, subject in enumerate(SUBJECTS)]
    results = run_all(cases, only=chosen.only, seed=chosen.seed, json_file=chosen.json)
    print(table(results))
    return exit_code(results)


if __name__ == "__main__":
    sys.exit(main())
