"""Random programs: modules written as source text, each trained three rounds by a call and by `train_step`.

    python -m benchmarks.strangers.programs [--json FILE] [--only REGEX] [--seed N] [--count 1000] [--shrink]

Counted are programs that the plain model runs. Any that is wrong or ends in a raw error is printed, with ``--shrink``
after statements were left out one by one for as long as it stays so. ``--only`` takes the names of programs.
"""

from __future__ import annotations

import linecache
import random
import re
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from benchmarks.strangers.compare import SETUPS, Batch, Result, Setup, Subject, loss_by_hand, loss_of_torch, run_subject
from benchmarks.strangers.run import BAD, exit_code, line, options, write
from benchmarks.strangers.statements import Statement, draw, draw_root

SEEN: list[Any] = []
STATES: list[Any] = []
RETURNS = (
    "x",
    "(x, kept)",
    "{'logits': x, 'extra': [kept, x.mean(-1)]}",
    "(x, x.shape[1], None)",
    "[x, (kept.tanh(), x)]",
)
HEAD = "forward(self, x, y=None, scale=1.0, flag=False, mask=None):"


class Scaled(torch.autograd.Function):
    """Multiplies by a Python number, and the gradient by its square."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x * factor

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.factor**2, None


def counting():
    """Return a function that divides by how often it was called."""
    calls = 0

    def scale(x):
        nonlocal calls
        calls += 1
        return x / calls

    STATES.append(lambda: calls)
    return scale


def averaging():
    """Return a function that keeps a moving average in a closure's tensor."""
    mean = torch.zeros(8, dtype=torch.float64)

    def center(x):
        y = torch.tanh(x - mean)
        mean.lerp_(x.detach().mean((0, 1)), 0.1)
        return y

    STATES.append(lambda: mean)
    return center


@dataclass(frozen=True)
class Program:
    """Blocks and a root as statements, which blocks the root calls where, and what it returns."""

    seed: int
    blocks: tuple[tuple[Statement, ...], ...]
    root: tuple[Statement | int, ...]
    returned: str
    arguments: tuple[str, ...]
    writes_input: bool

    @classmethod
    def random(cls, seed: int) -> Program:
        """Draw a program."""
        source = random.Random(seed)
        numbers = iter(range(1000))
        blocks = tuple(
            tuple(draw(source, next(numbers)) for _ in range(source.randint(2, 5))) for _ in range(source.randint(2, 3))
        )
        root: list[Statement | int] = [draw(source, next(numbers)) for _ in range(source.randint(0, 3))]
        for block in range(len(blocks)):
            for _ in range(source.choice((1, 1, 1, 2))):
                root.insert(source.randint(0, len(root)), block)
        arguments = tuple(name for name in ("y", "scale", "flag", "mask") if source.random() < 0.15)
        if arguments:
            drawn = (draw_root(source, next(numbers)) for _ in range(12))
            uses = [each for each in drawn if any(re.search(rf"\b{name}\b", each.done[0]) for name in arguments)]
            root[1:1] = [each for each in uses if "y[" not in each.done[0] or "y" in arguments][:3]
        return cls(seed, blocks, tuple(root), source.choice(RETURNS), arguments, source.random() < 0.04)

    def source(self) -> str:
        """Return the program as Python."""
        parts = [_module(f"Block{index}", "forward(self, x):", "x", block) for index, block in enumerate(self.blocks)]
        uses = "".join(str(each) for block in self.blocks for each in block)
        made = [f"self.block{index} = Block{index}()" for index in range(len(self.blocks))]
        made += ["self.shared = nn.Parameter(torch.randn(8, 8) * 0.3)"] * ("self.shared" in str(self.root))
        made += [f"self.block{i}.shared = nn.Parameter(torch.randn(8, 8) * 0.3)" for i in range(len(self.blocks))][
            :1
        ] * ("self.shared" in uses)
        made += [f"self.block{i}.shared = self.block0.shared" for i in range(1, len(self.blocks))] * (
            "self.shared" in uses
        )
        opening = ("x.mul_(0.5)",) if self.writes_input else ()
        parts.append(_module("Root", HEAD, self.returned, self.root, made, opening))
        return "\n\n".join(parts) + "\n"

    def batch(self, rows: int) -> Batch:
        """Return inputs, and those of the arguments that the program is given."""
        given = {
            "y": torch.randn(rows, 8, dtype=torch.float64),
            "scale": rows / 7,
            "flag": rows == 5,
            "mask": torch.rand(rows) > 0.5,
        }
        x = torch.randn(rows, 4, 8, dtype=torch.float64)
        return (x,), {name: given[name] for name in self.arguments}

    def smaller(self) -> Iterator[Program]:
        """Yield the programs that lack one statement, one call, or the other outputs."""
        for index, block in enumerate(self.blocks):
            for place in range(len(block)):
                shorter = (*block[:place], *block[place + 1 :])
                yield replace(self, blocks=(*self.blocks[:index], shorter, *self.blocks[index + 1 :]))
        for place in range(len(self.root)):
            yield replace(self, root=(*self.root[:place], *self.root[place + 1 :]))
        if self.returned != "x":
            yield replace(self, returned="x")

    def subject(self) -> Subject:
        """Return the program as a subject."""
        text = self.source()
        filename = f"<program {self.seed} {hash(text):x}>"
        linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
        names = {"torch": torch, "nn": nn, "F": F, "checkpoint": checkpoint, "Scaled": Scaled, "SEEN": SEEN}
        names |= {"counting": counting, "averaging": averaging, "__name__": f"program_{self.seed}"}
        exec(compile(text, filename, "exec"), names)

        def build() -> nn.Module:
            SEEN.clear()
            STATES.clear()
            return names["Root"]()

        return Subject(
            name=f"program {self.seed}",
            kind="program",
            build=build,
            batch=self.batch,
            loss=loss_by_hand if self.seed % 2 else loss_of_torch,
            outside=lambda: (sorted(set(SEEN)), [state() for state in STATES]),
            leaf_inputs=not self.writes_input,
        )

    def setup(self) -> Setup:
        """Return the setup of a program."""
        return SETUPS[self.seed % len(SETUPS)]


def _module(name, head, returned, statements, made=(), opening=()) -> str:
    init = ["super().__init__()", *made]
    done = [*opening, "kept = x"]
    for each in statements:
        if isinstance(each, int):
            done.append(f"x = self.block{each}(x)")
        else:
            init += each.made
            done += each.done
    body = ["def __init__(self):", *(f"    {text}" for text in init), f"def {head}", *(f"    {text}" for text in done)]
    return f"class {name}(nn.Module):\n" + textwrap.indent("\n".join([*body, f"    return {returned}"]), "    ")


def shrunk(program: Program, found: Result) -> tuple[Program, Result]:
    """Return the smallest program on the way that fails as the first one did."""
    progress = True
    while progress:
        progress = False
        for candidate in program.smaller():
            result = run_subject(candidate.subject(), program.setup())
            if result.outcome == found.outcome and result.error[:40] == found.error[:40]:
                program, found, progress = candidate, result, True
                break
    return program, found


def main() -> int:
    parser = options(__doc__ or "")
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--shrink", action="store_true")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    results: list[Result] = []
    seed = 1_000_000 * chosen.seed
    while len(results) < chosen.count and seed < 1_000_000 * chosen.seed + 2 * chosen.count:
        program, seed = Program.random(seed), seed + 1
        if not re.search(chosen.only, f"program {program.seed}"):
            continue
        result = run_subject(program.subject(), program.setup())
        if result.outcome == "plain fails":
            print(line(result)[:200], flush=True)
            continue
        results.append(result)
        print(line(result), flush=True)
        if result.outcome in BAD:
            if chosen.shrink:
                program, smallest = shrunk(program, result)
                print(f"shrunk: {line(smallest)}")
            print(textwrap.indent(program.source(), "    "), flush=True)
        if chosen.json is not None:
            write(chosen.json, results)
    print(dict(Counter(result.outcome for result in results)))
    return exit_code(results)


if __name__ == "__main__":
    sys.exit(main())
