"""Do the tests see a fault? Seeded faults in functions that two checkouts share, each against the tests of both.

    python -m benchmarks.mutants --before CHECKOUT [--count 100] [--seed 0] [--jobs 2] [--json FILE]

A mutant is one changed expression: a comparison, an operator, a number, a condition or a returned value. It is made in
this checkout in a copy, and the test files that are nearest to the function run until one fails: those that import its
module, then those of its package, at most ``--files`` of them. What survives here is made in the other checkout, in the
same function, against that checkout's tests: a mutant that only they kill is a fault that this suite no longer sees.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

PACKAGES = ("autosplit", "cost_models")
LIMIT_S = 420
"""A run of tests that takes longer hangs: the mutant is killed."""
_SWAPPED: Mapping[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.And: ast.Or,
    ast.Or: ast.And,
}


@dataclass(frozen=True)
class Function:
    """A function or method of a checkout: where it is, and the text of its file."""

    path: str
    name: str
    node: ast.FunctionDef

    @property
    def key(self) -> tuple[str, str]:
        """What is the same in both checkouts: the name and the code, without its place."""
        return self.name, ast.dump(self.node)


@dataclass(frozen=True)
class Mutant:
    """A changed expression in a function, ``index`` among those that can be changed, and what the tests said."""

    function: str
    path: str
    index: int
    change: str
    after: str = ""
    before: str = ""


def functions(checkout: Path) -> Iterator[Function]:
    """Yield the functions of a checkout's packages."""
    for package in PACKAGES:
        for path in sorted((checkout / package).rglob("*.py")):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            for node in ast.walk(tree):
                if isinstance(node, ast.FunctionDef):
                    yield Function(str(path.relative_to(checkout)), node.name, node)


def changes(function: ast.FunctionDef) -> list[tuple[ast.expr, ast.expr]]:
    """Return the expressions of a function that can be changed, each with what it becomes."""
    found: list[tuple[ast.expr, ast.expr]] = []
    for statement in function.body:
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            continue  # a docstring
        for node in ast.walk(statement):
            changed = _changed(node)
            if changed is not None:
                found.append(changed)
    return found


def _changed(node: ast.AST) -> tuple[ast.expr, ast.expr] | None:
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _SWAPPED:
        return node, ast.Compare(node.left, [_SWAPPED[type(node.ops[0])]()], node.comparators)
    if isinstance(node, ast.BinOp) and type(node.op) in _SWAPPED:
        return node, ast.BinOp(node.left, _SWAPPED[type(node.op)](), node.right)
    if isinstance(node, ast.BoolOp):
        return node, ast.BoolOp(_SWAPPED[type(node.op)](), node.values)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return node, node.operand
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node, ast.Constant(node.value + 1)
    if isinstance(node, ast.Return) and node.value is not None and not isinstance(node.value, ast.Constant):
        return node.value, ast.Constant(None)
    if isinstance(node, (ast.If, ast.IfExp)):
        return node.test, ast.UnaryOp(ast.Not(), node.test)
    return None


def mutated(text: str, node: ast.expr, becomes: ast.expr) -> str:
    """Return a file's text with the span of one expression replaced."""
    lines = text.encode().splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    first, last = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
    whole = text.encode()
    return (whole[:first] + f"({ast.unparse(ast.fix_missing_locations(becomes))})".encode() + whole[last:]).decode()


def nearest_tests(checkout: Path, path: str, name: str, most: int) -> list[str]:
    """Return the test files to run for a function: importers of its module first, then those of its package."""
    module = path.removesuffix(".py").replace("/", ".")
    parts = module.split(".")
    package = f"tests/{parts[1]}/" if len(parts) > 2 else "tests/"
    ranked = []
    for file in (checkout / "tests").rglob("test_*.py"):
        text, relative = file.read_text(encoding="utf-8"), str(file.relative_to(checkout))
        imports = f"{module} import" in text or f"from {'.'.join(parts[:-1])} import {parts[-1]}" in text
        rank = 4 * imports + 2 * (name in text) + relative.startswith(package)
        ranked.append((-rank, file.stat().st_size, relative))
    return [relative for _, _, relative in sorted(ranked)[:most]]


def killed(checkout: Path, mutant: Mutant, function: Function, most: int) -> str:
    """Return which test kills a mutant in a copy of a checkout, "time" when it hangs, or "" when it survives."""
    node, becomes = changes(function.node)[mutant.index]
    tests = nearest_tests(checkout, function.path, function.name, most)
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "checkout"
        ignored = shutil.ignore_patterns(".venv*", ".git", "build", "results", "__pycache__")
        shutil.copytree(checkout, copy, ignore=ignored)
        target = copy / function.path
        target.write_text(mutated(target.read_text(encoding="utf-8"), node, becomes), encoding="utf-8")
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
        environment = {**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
        try:
            done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            return "time"
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return "" if done.returncode == 0 else (failed or ["ended"])[0].split(" - ")[0]


def main(argv: Sequence[str] | None = None) -> None:
    """Make the mutants, print a line for each, and what only the other checkout's tests kill."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, required=True, help="a checkout to compare with")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--files", type=int, default=8, help="test files per mutant, at most")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args(argv)
    here = Path(__file__).parents[1]
    before = {function.key: function for function in functions(arguments.before)}
    shared = [function for function in functions(here) if function.key in before and changes(function.node)]
    chance = random.Random(arguments.seed)
    chosen = [
        (function, chance.randrange(len(changes(function.node)))) for function in chance.sample(shared, arguments.count)
    ]

    def judged(choice: tuple[Function, int]) -> Mutant:
        function, index = choice
        node, becomes = changes(function.node)[index]
        change = f"{ast.unparse(node)[:80]} -> {ast.unparse(ast.fix_missing_locations(becomes))[:80]}"
        mutant = Mutant(function.name, function.path, index, change)
        after = killed(here, mutant, function, arguments.files)
        other = "" if after else killed(arguments.before, mutant, before[function.key], arguments.files)
        found = Mutant(function.name, function.path, index, change, after, other)
        print(
            f"{function.path}:{function.name}  {change}\n    after: {after or 'survives'}  before: {other or '-'}",
            flush=True,
        )
        return found

    with ThreadPoolExecutor(arguments.jobs) as pool:
        found = list(pool.map(judged, chosen))
    lost = [mutant for mutant in found if mutant.before]
    survived = sum(not mutant.after for mutant in found)
    print(f"{len(found)} mutants: {len(found) - survived} killed here, {len(lost)} killed by the other tests only")
    if arguments.json:
        content = {
            "seed": arguments.seed,
            "shared_functions": len(shared),
            "mutants": [asdict(mutant) for mutant in found],
        }
        arguments.json.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
