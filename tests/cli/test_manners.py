"""The command line as a process: quick help, progress on a terminal only, Ctrl-C, closed pipes, paths; its guide."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from autosplit import progress
from autosplit.cli import app as cli
from autosplit.cli.outputs import OutputOptions
from autosplit.errors import InputError

ROOT = Path(cli.__file__).parents[2]
NETS = Path(__file__).parent / "nets.py"
COMMANDS = ("compare", "devices", "diff", "plan", "profile", "solve", "report", "verify")
WORKLOAD = ROOT / "benchmarks" / "data" / "workloads" / "pd_gnmt_bw1e10.json"
SOLVE = ("solve", str(WORKLOAD), "--stages", "4", "--json")
WAITS = "import os, signal, time\ndef make():\n    os.kill(os.getpid(), signal.{})\n    time.sleep(60)\n"


@pytest.fixture
def _heeded() -> Iterator[None]:
    """Let children heed a Ctrl-C, also where the tests were started in the background and ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def environment(**more: str) -> dict[str, str]:
    names = ("NO_COLOR", "TERM", "FORCE_COLOR", "COLUMNS")
    return {k: v for k, v in os.environ.items() if k not in names} | {"PYTHONPATH": str(ROOT)} | more


def autosplit(*arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "autosplit", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment(**more), check=False)


class Terminal:
    """A process whose stderr, or all of it, is a terminal."""

    def __init__(self, *arguments: str, stdout: Any = subprocess.PIPE, **more: str) -> None:
        self.mine, theirs = os.openpty()
        command = [sys.executable, "-m", "autosplit", *arguments]
        self.process = subprocess.Popen(
            command, stdin=theirs, stdout=stdout, stderr=theirs, env=environment(**{"TERM": "xterm"} | more)
        )
        os.close(theirs)
        self.seen = b""

    def read(self) -> str:
        """Return what is written up to the end."""
        while True:
            try:
                found = os.read(self.mine, 65536)
            except OSError:  # the other side is closed
                break
            if not found:
                break
            self.seen += found
        return self.seen.decode()

    def end(self) -> tuple[int, str]:
        """Return the exit code and stdout."""
        out = self.process.stdout.read().decode() if self.process.stdout is not None else ""
        code = self.process.wait()
        os.close(self.mine)
        if self.process.stdout is not None:
            self.process.stdout.close()
        return code, out


def test_help_imports_nothing_that_is_slow() -> None:
    code = "import sys\nfrom autosplit.cli import app as cli\nimport typer.main\ntyper.main.get_command(cli.app)\n"
    code += "print(*(n for n in 'torch numpy pydantic tabulate rich cost_models'.split() if n in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment(), check=True)
    assert done.stdout.strip() == ""


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_examples_and_exit_codes(command: str) -> None:
    result = CliRunner().invoke(cli.app, [command, "--help"])
    assert result.exit_code == 0
    assert f"\n    autosplit {command} " in result.stdout
    assert "Exit codes: 0 " in result.stdout


def test_solving_and_devices_need_no_torch() -> None:
    code = "import sys\nfrom autosplit.cli import app as cli\ntry: cli.main()\nexcept SystemExit: pass\n"
    code += "assert 'torch' not in sys.modules"
    for arguments in (["devices", "L4-24GB"], SOLVE):
        command = [sys.executable, "-c", code, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, env=environment(), check=False)
        assert (done.returncode, done.stderr) == (0, "")


def test_a_terminal_sees_progress_and_stdout_does_not() -> None:
    terminal = Terminal(*SOLVE)
    shown = terminal.read()
    code, out = terminal.end()
    assert code == 0
    assert "solving" in shown
    assert "\x1b[32m" in shown
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l"), "the cursor is back"
    assert out.startswith("{")
    assert "\x1b" not in out


def test_no_color_and_a_dumb_terminal() -> None:
    terminal = Terminal(*SOLVE, NO_COLOR="1")
    shown = terminal.read()
    assert terminal.end()[0] == 0
    assert "solving" in shown
    assert "\x1b[32m" not in shown
    dumb = Terminal(*SOLVE, TERM="dumb")
    assert dumb.read() == ""
    assert dumb.end()[0] == 0


def test_the_phases_of_a_report(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG", "autosplit")
    options = ("--devices", "cpu,cpu", "--chunks", "2", "--input", "x=float32[4,16]")
    result = CliRunner().invoke(cli.app, ["report", f"{NETS}:make_mlp", *options])
    assert result.exit_code == 0, result.output
    names = [record.message for record in caplog.records]
    expected = ["making the model", "tracing the forward", "tracing: do rows meet", "tracing: is it the model"]
    assert [name for name in dict.fromkeys(names) if name in expected] == expected
    assert {"profiling", "measuring", "searching", "replaying memory"} <= set(names)


@pytest.mark.slow
@pytest.mark.usefixtures("_heeded")
def test_ctrl_c_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "waits.py").write_text(WAITS.format("SIGINT"), encoding="utf-8")
    terminal = Terminal("plan", f"{tmp_path / 'waits.py'}:make", "--input", "x=float32[4]")
    shown = terminal.read()
    assert terminal.end() == (130, "")
    assert "Traceback" not in shown
    assert shown.endswith("interrupted\r\n")
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")


def test_a_reader_that_leaves_is_no_error() -> None:
    command = [sys.executable, "-m", "autosplit", "devices", "--json"]
    pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, env=environment(), text=True, **pipe) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait() == 1


def test_paths_are_tried_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    OutputOptions(save=tmp_path / "new.json", html=tmp_path / "file").check()
    assert not (tmp_path / "new.json").exists()
    for path, reason in [
        (tmp_path, "is a folder; name a file in it"),
        (tmp_path / "no" / "plan.json", "there is no folder"),
        (tmp_path / "file" / "plan.json", "there is no folder"),
    ]:
        with pytest.raises(InputError, match=f"^--save .*{reason}"):
            OutputOptions(save=path).check()


def test_a_path_that_cannot_be_written_is_said_before_the_model_is_made(tmp_path: Path) -> None:
    (tmp_path / "loud.py").write_text("raise SystemError('imported')\n", encoding="utf-8")
    result = CliRunner().invoke(
        cli.app, ["plan", f"{tmp_path / 'loud.py'}:make", "--input", "x=float32[4]", "--html", str(tmp_path)]
    )
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == f"error: --html {str(tmp_path)!r}: is a folder; name a file in it\n"


def test_long_work_is_told_in_a_line_per_phase_without_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def work() -> str:
        with progress.lines():
            for name in ("tracing", "searching", "tracing", "pricing"):
                with progress.phase(name):
                    pass
        shown = capsys.readouterr()
        assert shown.out == ""
        return shown.err

    assert work() == "", "work of less than a second is not told"
    monkeypatch.setattr(progress, "_QUIET_S", 0.0)
    assert [line.split("s  ")[1] for line in work().splitlines()] == ["tracing", "searching", "pricing"]


def test_phases_are_logged_where_there_is_no_terminal(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG", "autosplit")

    @progress.phase("inner")
    def work() -> None:
        progress.update(1, 2)

    with progress.shown("outer"):
        work()
    found = [(record.levelname, record.message.rpartition(": ")[0] or record.message) for record in caplog.records]
    assert found == [("INFO", "outer"), ("DEBUG", "inner"), ("DEBUG", "inner"), ("INFO", "outer")]


GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "questions.md"


def test_every_question_has_one_command_with_known_options() -> None:
    commands = typer.main.get_command(cli.app).commands  # type: ignore[attr-defined]
    questions = GUIDE.read_text(encoding="utf-8").split("\n## ")[1:]
    assert len(questions) >= 12
    for question in questions:
        [block] = re.findall(r"```sh\n(.*?)```", question, re.DOTALL)
        name, *words = shlex.split(block.replace("\\\n", " "))[1:]
        known = {
            option for parameter in commands[name].params for option in (*parameter.opts, *parameter.secondary_opts)
        }
        assert {word for word in words if word.startswith("--")} <= known, question
        assert "```text\n" in question
