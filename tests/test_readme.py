"""What the README says is so: its programs run, its output is real, its commands and files exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from autosplit.cli import app
from benchmarks.gpu import races, run

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    """Return the fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", README, flags=re.DOTALL | re.MULTILINE)


def commands(name: str) -> list[str]:
    """Return what is said of a command in code, from its name to the end of the line."""
    spans = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", README, flags=re.DOTALL | re.MULTILINE))
    lines = [*spans, *(line for block in blocks("sh") for line in block.splitlines())]
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


@pytest.fixture
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ``devices=4`` mean lanes on every machine."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.usefixtures("_no_gpu")
def test_the_python_blocks_run_in_order_and_print_the_program_that_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "readme"}
    for number, block in enumerate(blocks("python")):
        exec(compile(block, f"README.md, python block {number}", "exec"), names)
    printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert (tmp_path / "plan.json").is_file()
    assert any("no partition was found that fits 4 stages" in line for line in printed)
    [program] = [block for block in blocks("text") if block.startswith("def forward")]
    assert program.strip() in "\n".join(printed)


@pytest.mark.usefixtures("_no_gpu")
def test_the_report_has_the_form_that_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    [shown] = [block for block in blocks("text") if block.startswith("Partition of")]
    command, *_ = (text for text in commands("autosplit") if text.startswith("report "))
    result = CliRunner().invoke(app, [word.strip('"') for word in command.split()])
    assert result.exit_code == 0, result.output
    assert lines_without_numbers(result.stdout) == lines_without_numbers(shown)
    head = [line for line in shown.splitlines()[:4] if line]
    assert result.stdout.splitlines()[:4] == head


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z]+):", makefile, flags=re.MULTILINE))
    named = {text.split()[0] for text in commands("make")}
    assert {"demo", "test"} <= named <= targets


def test_command_line_options_exist() -> None:
    commands = ("plan", "report", "verify", "profile", "diff", "solve", "devices")
    helps = [CliRunner().invoke(app, [*name, "--help"]) for name in ((), *((name,) for name in commands))]
    assert [result.exit_code for result in helps] == [0] * len(helps)
    known = "".join(result.stdout for result in helps) + run.parser().format_help() + races.parser().format_help()
    named = set(re.findall(r"--[a-z][a-z-]+", README))
    assert {"--devices", "--chunks", "--input", "--json", "--save"} <= named
    assert [option for option in named if option not in known] == []


def test_the_commands_for_a_gpu_can_be_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = [text.split() for text in commands("python -m benchmarks.gpu.run")]
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
    named = set(re.findall(r"\b(?:examples|tests|docs|autosplit|cost_models)/[\w/.]*", README)) | set(
        re.findall(r"\]\(([^#)]+)\)", README)
    )
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []
    scripts = {
        f"examples/{path.name}"
        for path in (ROOT / "examples").glob("*.py")
        if '__name__ == "__main__"' in path.read_text(encoding="utf-8")
    }
    assert len(scripts) > 5
    assert scripts <= named


def test_the_metric_is_the_suites_own() -> None:
    metric = (ROOT / "tests" / "equivalence" / "equality.py").read_text(encoding="utf-8")
    assert "TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}" in metric
    assert "within 1e-12" in README
    assert "within 1e-5" in README
