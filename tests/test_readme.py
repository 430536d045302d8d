"""What the README and ``docs/`` say is so: programs run, output is real, commands, files and links exist."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml
from torch.distributed.run import get_args_parser
from typer.testing import CliRunner

import autosplit
from autosplit.cli.app import app
from benchmarks.gpu import races, run
from tests.planning.test_jobs import megatron

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
    for path in (ROOT / "README.md", *sorted(DOCS.rglob("*.md")))
}
README = PAGES["README.md"]
MANY_PROCESSES = "docs/guides/many-processes.md"
"""Its code is run by ``tests/distributed/test_guide.py``."""
TEXT = "\n".join(text for name, text in PAGES.items() if not name.startswith("docs/decisions"))


def without_code(page: str) -> str:
    return re.sub(r"^```.*?^```$", "", page, flags=re.DOTALL | re.MULTILINE)


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page, flags=re.DOTALL | re.MULTILINE)


def commands(page: str, name: str) -> list[str]:
    """Return what is said of a command in code, from its name to the end of the line."""
    spans = re.findall(r"`([^`\n]+)`", without_code(page))
    lines = [*spans, *(line for block in blocks(page, "sh") for line in block.splitlines())]
    found = (re.match(rf"(?:\.venv/bin/)?{name} (.*)", line.partition("#")[0].strip()) for line in lines)
    return [match[1].strip() for match in found if match]


def lines_without_numbers(text: str) -> list[str]:
    """Return the lines of a report that no measurement and no machine changes: its titles and column heads."""
    sections = text.partition("\n\nNotes\n")[0]
    return [
        " ".join(line.split())
        for line in sections.splitlines()
        if re.search("[a-z]", line) and not re.search(r"\d", line)
    ]


def assert_same_form(printed: str, shown: str) -> None:
    """Compare two reports but for what is measured."""
    assert lines_without_numbers(printed) == lines_without_numbers(shown)
    assert printed.splitlines()[:4] == [line for line in shown.splitlines()[:4] if line]


@pytest.fixture
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ``devices=4`` mean lanes on every machine."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def _fresh_accelerate() -> Iterator[None]:
    """Leave no process-wide state of accelerate behind."""
    from accelerate.state import AcceleratorState

    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.usefixtures("_no_gpu", "_fresh_accelerate")
@pytest.mark.parametrize(
    "name", [name for name, text in PAGES.items() if blocks(text, "python") and name != MANY_PROCESSES]
)
def test_the_python_blocks_of_a_page_run_in_order_and_print_what_is_shown(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "readme"}
    printed: list[str] = []
    for number, block in enumerate(blocks(PAGES[name], "python")):
        exec(compile(block, f"{name}, python block {number}", "exec"), names)
        printed.append("\n".join(line.rstrip() for line in capsys.readouterr().out.splitlines()))
    for shown in blocks(PAGES[name], "text"):
        if shown.startswith("def forward"):
            assert shown.strip() in "\n".join(printed)
        elif not commands(PAGES[name], r"autosplit report"):
            assert_same_form(next(text for text in printed if text.startswith(shown.splitlines()[0])), shown)


@pytest.mark.usefixtures("_no_gpu")
def test_the_report_of_a_command_has_the_form_that_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    page = PAGES["docs/guides/planning.md"]
    [shown] = [block for block in blocks(page, "text") if block.startswith("Partition of")]
    command, *_ = (text for text in commands(page, "autosplit") if text.startswith("report "))
    result = CliRunner().invoke(app, [word.strip('"') for word in command.split()])
    assert result.exit_code == 0, result.output
    assert_same_form(result.stdout, shown)


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, flags=re.MULTILINE))
    named = {text.split()[0] for text in commands(TEXT, "make")}
    assert {"demo", "test", "docs"} <= named <= targets


def test_command_line_options_exist() -> None:
    commands = ("plan", "report", "verify", "profile", "compare", "diff", "solve", "devices")
    helps = [CliRunner().invoke(app, [*name, "--help"]) for name in ((), *((name,) for name in commands))]
    assert [result.exit_code for result in helps] == [0] * len(helps)
    others = (run.parser(), races.parser(), get_args_parser(), megatron())
    known = "".join((*(result.stdout for result in helps), *(parser.format_help() for parser in others)))
    named = set(re.findall(r"--[a-z][a-z-]+", TEXT))
    assert {"--devices", "--chunks", "--input", "--json", "--save"} <= named
    assert [option for option in named if option not in known] == []


def test_the_commands_for_a_gpu_can_be_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = [text.split() for text in commands(TEXT, "python -m benchmarks.gpu.run")]
    assert len(given) >= 4
    for words in given:
        asked = run.parser().parse_args(words)
        assert asked.list or run.is_there(asked.part)
    monkeypatch.chdir(tmp_path)
    dry = next(words for words in given if "--small" in words)
    threads = torch.get_num_threads()
    run.main(dry)
    assert torch.get_num_threads() == threads
    assert (tmp_path / "measured.json").is_file()


def test_files_exist_and_no_example_is_left_out() -> None:
    named = set(re.findall(r"\b(?:examples|tests|docs|autosplit|cost_models|benchmarks)/[\w/.-]*[\w/]", TEXT))
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []
    scripts = {
        f"examples/{path.name}"
        for path in (ROOT / "examples").glob("*.py")
        if '__name__ == "__main__"' in path.read_text(encoding="utf-8")
    }
    assert len(scripts) > 5
    assert scripts <= named


def anchors(page: str) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and mkdocs make them."""
    headings = re.findall(r"^#+ (.*)$", without_code(page), flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_somewhere(name: str) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(PAGES[name])):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        file = (ROOT / name).parent / path if path else ROOT / name
        assert file.is_file(), target
        if anchor:
            assert anchor in anchors(file.read_text(encoding="utf-8")), target


def test_the_site_has_every_page_and_every_public_name() -> None:
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    listed = set(re.findall(r"[\w/-]+\.md", str(settings["nav"])))
    assert listed == {name.removeprefix("docs/") for name in PAGES if re.match(r"docs/(?!decisions/\d)", name)}
    documented = re.findall(r"^::: ([\w.]+)$", PAGES["docs/reference.md"], flags=re.MULTILINE)
    names = {name for name in autosplit.__all__ if not name.endswith("Error")}
    assert {name.rpartition(".")[2] for name in documented} == names | {
        "errors",
        "MasterWeights",
        "MicrobatchesFromAccumulation",
    }


def test_the_readme_and_the_glossary_are_short() -> None:
    assert len(README.splitlines()) <= 250
    assert len(re.findall(r"^\| [a-z]", PAGES["docs/glossary.md"], flags=re.MULTILINE)) <= 31


def test_the_metric_is_the_suites_own() -> None:
    metric = (ROOT / "tests" / "equivalence" / "equality.py").read_text(encoding="utf-8")
    assert "TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}" in metric
    assert "within 1e-12" in README
    assert "within 1e-5" in README
