"""What holds for every file of the tree; the layers are import-linter's, in ``make check``."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("autosplit", "cost_models")
PUBLIC = {ROOT / "autosplit", ROOT / "autosplit" / "compat", ROOT / "cost_models"}
"""Packages whose names users import."""
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
GENERATED = ("build", "dist")
FOLDERS = ("home", "root", "tmp", "work", "Users", "opt", "mnt")
MACHINE_PATH = re.compile(r"(?<![\w.~-])/(?:" + "|".join(FOLDERS) + r")/\w")
UNOWNED = re.compile(r"\b(?:TO" + r"DO|FIX" + r"ME)\b(?!\(\w+\))")
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def project_files() -> list[Path]:
    """Every file of the project: hidden folders other than ``.ci`` and what tools leave behind do not count.

    ``.git`` is a file in a linked worktree.
    """
    tops = [top for top in ROOT.iterdir() if top.name != ".git" and (top.is_file() or top.name[:1] != ".")]
    tops.append(ROOT / ".ci")
    found = [top for top in tops if top.is_file()]
    found += [path for top in tops if top.name not in GENERATED for path in top.rglob("*") if path.is_file()]
    return sorted(path for path in found if "__pycache__" not in path.parts)


FILES = project_files()
TEXTS = {path: path.read_text(encoding="utf-8") for path in FILES if path.suffix not in {".png", ".gif", ".pt"}}
PYTHON = [path for path in FILES if path.suffix == ".py"]
SOURCES = [path for path in PYTHON if path.relative_to(ROOT).parts[0] in PACKAGES]


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(ast.parse(TEXTS[path])):
        if isinstance(node, FUNCTIONS):
            yield node


def matching_lines(pattern: re.Pattern[str]) -> list[str]:
    return [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path, text in TEXTS.items()
        for number, line in enumerate(text.splitlines(), start=1)
        if pattern.search(line)
    ]


def test_the_tree_is_seen():
    assert ROOT / "pyproject.toml" in FILES
    assert Path(__file__) in PYTHON
    assert {path.relative_to(ROOT).parts[0] for path in SOURCES} == set(PACKAGES)


def test_files_are_short():
    lengths = {str(path.relative_to(ROOT)): len(TEXTS[path].splitlines()) for path in PYTHON}
    assert {name: lines for name, lines in lengths.items() if lines >= MAX_FILE_LINES} == {}


def code_lines(node):
    """Count a function's lines without its docstring: a public one gives shapes, units, errors and sources."""
    first = node.body[0]
    documented = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and len(node.body) > 1
    return node.end_lineno - node.lineno + 1 - (first.end_lineno - first.lineno + 1 if documented else 0)


def test_functions_are_short():
    long = [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"
        for path in PYTHON
        if not path.match("benchmarks/zoo/hf_*.py")  # lists of models, as long as there are models
        for node in functions(path)
        if code_lines(node) >= MAX_FUNCTION_LINES
    ]
    assert long == []


def test_no_file_names_a_path_of_some_machine():
    assert matching_lines(MACHINE_PATH) == []


def test_what_is_left_to_do_has_an_owner():
    assert matching_lines(UNOWNED) == []


@pytest.mark.parametrize("text", ["open('" + "/" + "root/x')", "-I" + " /" + "tmp/x", '"' + "/" + 'home/me"'])
def test_the_pattern_finds_machine_paths(text):
    assert MACHINE_PATH.search(text)


@pytest.mark.parametrize("text", ["a/work/b", "framework/tmp/x", "https://example.org/home/x", "../work/x"])
def test_the_pattern_leaves_other_paths_alone(text):
    assert not MACHINE_PATH.search(text)


def test_the_pattern_finds_unowned_notes():
    assert UNOWNED.search("# TO" + "DO later")
    assert not UNOWNED.search("# TO" + "DO(ada) later")


def test_subpackages_hold_a_docstring_only():
    inits = [path for path in SOURCES if path.name == "__init__.py" and path.parent not in PUBLIC]
    assert len(inits) >= 8
    for path in inits:
        body = ast.parse(TEXTS[path]).body
        assert len(body) == 1, path
        assert isinstance(body[0], ast.Expr), path
        assert isinstance(body[0].value, ast.Constant), path


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_are_typed(package):
    assert (ROOT / package / "py.typed").is_file()


def test_sources_are_typed_without_evaluation():
    without = [path.relative_to(ROOT) for path in SOURCES if _imports(path) and not _postpones(path)]
    assert without == []


def _imports(path: Path) -> bool:
    return any(isinstance(node, ast.Import | ast.ImportFrom) for node in ast.parse(TEXTS[path]).body)


def _postpones(path: Path) -> bool:
    return "from __future__ import annotations" in TEXTS[path]


def test_constraints_pin_everything_exactly():
    lines = [line for line in TEXTS[ROOT / "constraints.txt"].splitlines() if line and not line.startswith("#")]
    assert [line for line in lines if not re.fullmatch(r"[\w.-]+==[\w.]+", line)] == []
    assert lines[-1] == "torch==2.13.0"
