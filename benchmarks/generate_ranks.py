"""Text of tiny models on ranks: each family's tokens on every rank, held against transformers' own generate().

    python -m benchmarks.generate_ranks [--json FILE] [--ranks 2 3] [--only NAME ...] [--limit-s 180]

31 families; 5 prompts of several lengths, 10 new tokens: greedy, sampled with a seed, and 3 beams. Processes of one
gloo group; a cell that raises, or takes too long, is noted, and the next one begins with new processes.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from typing import Any

import torch

from autosplit import Sample, autosplit
from benchmarks import pairs
from tests.distributed.processes import Ranks
from tests.models.generators import FAMILIES, prompts

ROWS, NEW = 5, 10
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "top_k": 20},
    "beams": {"do_sample": False, "num_beams": 3},
}
_PIPES: dict[str, tuple[Any, Any]] = {}
"""The plain model and the pipe of the family that is tried, in a rank."""


def same_tokens(family: str, way: str) -> bool:
    """Generate on ranks; tell whether the tokens, and the random numbers behind, are the plain model's on this one."""
    if family not in _PIPES:
        _PIPES.clear()
        plain, model = FAMILIES[family](), FAMILIES[family]()
        ids = prompts(plain, ROWS)["input_ids"]
        more = {"decoder_input_ids": ids[:, :3]} if plain.config.is_encoder_decoder else {}
        _PIPES[family] = plain, autosplit(model, devices="torchrun", sample=Sample(ids, **more))
    results = []
    for model in _PIPES[family]:
        asked = prompts(_PIPES[family][0], ROWS) | {"max_new_tokens": NEW, "min_new_tokens": NEW // 2} | WAYS[way]
        torch.manual_seed(7)
        results.append((model.generate(**asked), torch.rand(3)))
    return all(map(torch.equal, *results))


def tried(ranks: Ranks, family: str, way: str, limit_s: float) -> str:
    """Return "equal" or how a cell differs: by its tokens, or by an error's first line."""
    try:
        equal = ranks.run(same_tokens, family, way, timeout_s=limit_s)
    except RuntimeError as error:
        raised = re.search(r"^[\w.]+(Error|Exception): .*", str(error), re.MULTILINE)
        return (raised[0] if raised else str(error).splitlines()[0])[:200]
    return "equal" if all(equal) else f"other tokens on ranks {[rank for rank, same in enumerate(equal) if not same]}"


def main(argv: Sequence[str] | None = None) -> int:
    """Try what the command line asks for."""
    parser = pairs.parser(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--only", nargs="+", default=[*FAMILIES])
    parser.add_argument("--limit-s", type=float, default=180.0)
    options = parser.parse_args(argv)
    figures: list[dict[str, Any]] = []
    for size in options.ranks:
        ranks = Ranks(size)
        for family in options.only:
            for way in WAYS:
                result = tried(ranks, family, way, options.limit_s)
                figures.append({"family": family, "way": way, "ranks": size, "tokens": result})
                print(*figures[-1].values(), flush=True)
        ranks.close()
    wrong = sum(each["tokens"] != "equal" for each in figures)
    checks = [pairs.at_most("cells whose tokens are not the plain model's", 0, wrong)]
    settings = {"rows": ROWS, "new": NEW, "ways": [*WAYS]}
    machine = pairs.facts()
    pairs.conclude(
        options.json, benchmark="generate-ranks", settings=settings, machine=machine, figures=figures, checks=checks
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
