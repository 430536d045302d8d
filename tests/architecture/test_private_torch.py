"""Private names of torch: each is listed in ``docs/private-torch-apis.md``, with its file, and is there in this torch.

``--update-golden`` writes the files of each name into the list and drops names that nothing uses.
"""

from __future__ import annotations

import ast
import importlib
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
LIST = ROOT / "docs" / "private-torch-apis.md"
ROW = re.compile(r"^\| `(?P<name>[\w.]+)` \| (?P<files>[^|]*) \| (?P<rest>[^|]+ \| [\d., ]+) \|$", re.MULTILINE)
MOST_SHARED = 10
"""How many of the listed names may be used in more than one file: what there is today, to be lowered."""


def private_names(path: Path) -> set[str]:
    """Return the private names of torch that a file uses, from ``torch`` on."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    bound: dict[str, str] = {}
    used: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            used |= {alias.name for alias in node.names}
            bound |= {alias.asname: alias.name for alias in node.names if alias.asname}
            bound |= dict.fromkeys([alias.name.split(".")[0] for alias in node.names if not alias.asname], "")
        elif isinstance(node, ast.ImportFrom):
            names = {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
            bound |= names
            used |= set(names.values())
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        parts: list[str] = []
        if id(node) in inner:
            continue
        while isinstance(node, ast.Attribute):
            parts.insert(0, node.attr)
            node = node.value
        if parts and isinstance(node, ast.Name) and node.id in bound:
            used.add(".".join((bound[node.id] or node.id, *parts)))
    return {name for name in used if name.startswith("torch.") and re.search(r"\._(?!_)", name)}


def uses() -> dict[str, set[str]]:
    """Return the files that use each listed name, or a name below it; what is not listed stands by itself."""
    listed = sorted((row["name"] for row in ROW.finditer(LIST.read_text(encoding="utf-8"))), key=len, reverse=True)
    found: dict[str, set[str]] = defaultdict(set)
    for path in sorted(file for folder in ("autosplit", "examples") for file in (ROOT / folder).rglob("*.py")):
        for name in private_names(path):
            if any(own.startswith(f"{name}.") for own in listed):
                continue  # the module of a listed name
            row = next((own for own in listed if name == own or name.startswith(f"{own}.")), name)
            found[row].add(str(path.relative_to(ROOT)))
    return dict(found)


def shown(files: set[str]) -> str:
    return ", ".join(f"`{file.removeprefix('autosplit/')}`" for file in sorted(files))


def written(row: re.Match[str], found: dict[str, set[str]]) -> str:
    """Return a row with the files of today; nothing where there are none."""
    files = found.get(row["name"])
    return f"| `{row['name']}` | {shown(files)} | {row['rest']} |\n" if files else ""


def test_private_names_are_listed_with_their_files(request: pytest.FixtureRequest) -> None:
    found, text = uses(), LIST.read_text(encoding="utf-8")
    if request.config.getoption("--update-golden"):
        text = re.sub(ROW.pattern + r"\n", lambda row: written(row, found), text, flags=re.MULTILINE)
        LIST.write_text(text, encoding="utf-8")
    listed = {row["name"]: row["files"] for row in ROW.finditer(text)}
    assert {name: shown(files) for name, files in found.items()} == listed


def test_a_private_name_is_used_in_one_file() -> None:
    shared = sorted(name for name, files in uses().items() if len(files) > 1)
    assert len(shared) <= MOST_SHARED, shared


@pytest.mark.parametrize("name", [row["name"] for row in ROW.finditer(LIST.read_text(encoding="utf-8"))])
def test_listed_names_are_there(name: str) -> None:
    parts = name.split(".")
    value: Any = importlib.import_module("torch")
    for depth, part in enumerate(parts[1:], start=2):
        if not hasattr(value, part):
            importlib.import_module(".".join(parts[:depth]))
        value = getattr(value, part)
