"""The command line as a process: quick help, progress on a terminal only, Ctrl-C, closed pipes, completion, paths."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from autosplit import progress
from autosplit.cli import app as cli
from autosplit.cli.outputs import Outputs
from autosplit.errors import InputError

ROOT = Path(cli.__file__).parents[2]
NETS = Path(__file__).parent / "nets.py"
COMMANDS = ("devices", "diff", "plan", "profile", "solve", "report", "verify")
WORKLOAD = ROOT / "benchmarks" / "data" / "workloads" / "pd_gnmt_bw1e10.json"
SOLVE = ("solve", str(WORKLOAD), "--stages", "4", "--json")
WAITS = "import os, signal, time\ndef make():\n    os.kill(os.getpid(), signal.{})\n    time.sleep(60)\n"
PLAN = ("--devices", "2xL4-24GB", "--chunks", "4", "--input", "x=float32[8,16]")


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


def test_the_phases_of_a_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    names: list[str] = []

    class Names:
        def began(self, name: str, total: int | None) -> Names:
            names.append(name)
            return self

        def moved(self, done: int, total: int | None) -> None:
            assert total is None or done <= total

        def ended(self) -> None:
            pass

    options = ("--devices", "cpu,cpu", "--chunks", "2", "--input", "x=float32[4,16]")
    with progress.listening(Names()):
        result = CliRunner().invoke(cli.app, ["report", f"{NETS}:make_mlp", *options])
    assert result.exit_code == 0, result.output
    expected = ["making the model", "tracing the forward", "tracing: do rows meet", "tracing: is it the model"]
    assert [name for name in dict.fromkeys(names) if name in expected] == expected
    assert {"profiling", "measuring", "solving", "replaying memory"} <= set(names)


@pytest.mark.usefixtures("_heeded")
def test_ctrl_c_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "waits.py").write_text(WAITS.format("SIGINT"), encoding="utf-8")
    terminal = Terminal("plan", f"{tmp_path / 'waits.py'}:make", "--input", "x=float32[4]")
    shown = terminal.read()
    assert terminal.end() == (130, "")
    assert "Traceback" not in shown
    assert shown.endswith("interrupted\r\n")
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")


@pytest.mark.usefixtures("_heeded")
def test_ctrl_c_that_an_import_swallows_is_still_heeded(tmp_path: Path) -> None:
    swallows = "import os, signal\ntry: os.kill(os.getpid(), signal.SIGINT)\nexcept BaseException: pass\n"
    swallows += "def make():\n    from torch import nn\n    return nn.Linear(4, 4)\n"
    (tmp_path / "swallows.py").write_text(swallows, encoding="utf-8")
    page = tmp_path / "plan.html"
    options = ("--devices", "1xL4-24GB", "--input", "input=float32[4,4]", "--html", str(page))
    done = autosplit("plan", f"{tmp_path / 'swallows.py'}:make", *options)
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr.endswith("interrupted\n")
    assert not page.exists()


@pytest.mark.usefixtures("_heeded")
def test_ctrl_c_in_code_that_was_a_text_has_its_exit_code(tmp_path: Path) -> None:
    (tmp_path / "waits.py").write_text(WAITS.format("SIGINT"), encoding="utf-8")
    (tmp_path / "text.py").write_text("from waits import make\ndef made():\n    exec('make()')\n", encoding="utf-8")
    done = autosplit("plan", f"{tmp_path / 'text.py'}:made", *PLAN)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


@pytest.mark.usefixtures("_heeded")
def test_ctrl_c_between_the_lines_of_typer_says_so_too() -> None:
    code = "import os, signal, time\nfrom autosplit import __main__\n"
    code += "from autosplit.cli import devices\nimport typer.core\n"
    code += "def parse(*_):\n    os.kill(os.getpid(), signal.SIGINT)\n    time.sleep(60)\n"
    code += "typer.core.TyperCommand.parse_args = parse\n__main__.main()\n"
    done = subprocess.run([sys.executable, "-c", code, "devices"], capture_output=True, text=True, env=environment())
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


@pytest.mark.parametrize(("name", "code", "word"), [("SIGTERM", 143, "terminated"), ("SIGHUP", 129, "hung up")])
def test_the_systems_signals_unwind_the_work(name: str, code: int, word: str, tmp_path: Path) -> None:
    cleans = WAITS.format(name).replace("    os.kill", "  try:\n    os.kill")
    cleans += "  finally:\n    print('cleaned')\n"
    (tmp_path / "waits.py").write_text(cleans, encoding="utf-8")
    done = autosplit("plan", f"{tmp_path / 'waits.py'}:make", *PLAN)
    assert (done.returncode, done.stdout, done.stderr) == (code, "", f"cleaned\n{word}\n")


def test_a_signal_that_the_caller_ignores_stays_ignored(tmp_path: Path) -> None:
    waits = WAITS.format("SIGHUP").replace("time.sleep(60)", "return __import__('torch').nn.Linear(16, 16)")
    (tmp_path / "waits.py").write_text(waits, encoding="utf-8")
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        done = autosplit("plan", f"{tmp_path / 'waits.py'}:make", *PLAN[:4], "--input", "0=float32[8,16]", "--json")
    finally:
        signal.signal(signal.SIGHUP, before)
    assert (done.returncode, done.stdout[:1]) == (0, "{")


@pytest.mark.parametrize("folder", ["is there", "went away"])
def test_a_plan_that_is_not_written_leaves_nothing_half(folder: str, tmp_path: Path) -> None:
    """The disk is full, as far as a process can tell that may write 1 KiB; or the folder is gone when it is written."""
    (tmp_path / "out").mkdir()
    old = tmp_path / "out" / "plan.json"
    old.write_text("old", encoding="utf-8")
    makes = "import resource, shutil\nfrom torch import nn\ndef make():\n"
    if folder == "is there":
        makes += "    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, 1024))\n"
    else:
        makes += f"    shutil.rmtree({str(old.parent)!r})\n"
    (tmp_path / "nets.py").write_text(f"{makes}    return nn.Linear(16, 16)\n", encoding="utf-8")
    options = ("--devices", "2xL4-24GB", "--input", "0=float32[8,16]", "--chunks", "4", "--json")
    done = autosplit("plan", f"{tmp_path / 'nets.py'}:make", *options, "--save", str(old), PYTHONDONTWRITEBYTECODE="1")
    reason = "File too large" if folder == "is there" else "No such file or directory"
    assert (done.returncode, done.stdout[:1]) == (2, "{")
    assert done.stderr.endswith(f"error: --save {str(old)!r}: {reason}\n")
    if folder == "is there":
        assert [path.name for path in old.parent.iterdir()] == ["plan.json"]
        assert old.read_text(encoding="utf-8") == "old"


def test_a_full_disk_behind_stdout_is_said() -> None:
    with open("/dev/full", "w", encoding="utf-8") as full:
        command = [sys.executable, "-m", "autosplit", "devices"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, env=environment(), check=False)
    said = "error: the answer could not be written to stdout: No space left on device\n"
    assert (done.returncode, done.stderr) == (2, said)


def test_who_does_not_hear_stderr_gets_the_answer(tmp_path: Path) -> None:
    def run(redirected: str) -> tuple[int, str]:
        command = f'"$0" -m autosplit "$@" {redirected}'
        (tmp_path / "plan.json").unlink(missing_ok=True)
        arguments = ["plan", f"{NETS}:Mlp", *PLAN, "--json", "--save", str(tmp_path / "plan.json")]
        done = subprocess.run(
            ["sh", "-c", command, sys.executable, *arguments],
            capture_output=True,
            text=True,
            env=environment(),
            check=False,
        )
        assert (tmp_path / "plan.json").is_file()
        return done.returncode, done.stdout[:1]

    assert run("2>/dev/full") == (0, "{")
    assert run("2>&-") == (0, "{")
    assert run(">&-") == (0, "")


def test_a_reader_that_leaves_is_no_error() -> None:
    command = [sys.executable, "-m", "autosplit", "devices", "--json"]
    pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, env=environment(), text=True, **pipe) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait() == 141


@pytest.mark.parametrize(
    ("words", "found"),
    [("autosplit re", "report"), ("autosplit plan x.py:f --schedule zb", "zb_h1"), ("autosplit devices L4", "L4-24GB")],
)
def test_completion(words: str, found: str) -> None:
    more = {"COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1), "_AUTOSPLIT_COMPLETE": "complete_bash"}
    done = autosplit(**more)
    assert found in done.stdout.split()
    assert done.stderr == ""


def test_paths_are_tried_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    Outputs.of(save=tmp_path / "new.json", html=tmp_path / "file", trace=None)
    assert not (tmp_path / "new.json").exists()
    for path, reason in [
        (tmp_path, "is a folder; name a file in it"),
        (tmp_path / "no" / "plan.json", "there is no folder"),
        (tmp_path / "file" / "plan.json", "is no folder"),
        (Path("x" * 300), "File name too long"),
    ]:
        with pytest.raises(InputError, match=f"^--save .*{reason}"):
            Outputs.of(save=path)
    with pytest.raises(InputError, match=r"--save and --html name the same file"):
        Outputs.of(save=tmp_path / "a", html=tmp_path / ".." / tmp_path.name / "a")


def test_a_path_that_cannot_be_written_is_said_before_the_model_is_made(tmp_path: Path) -> None:
    (tmp_path / "loud.py").write_text("raise SystemError('imported')\n", encoding="utf-8")
    result = CliRunner().invoke(
        cli.app, ["plan", f"{tmp_path / 'loud.py'}:make", "--input", "x=float32[4]", "--html", str(tmp_path)]
    )
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == f"error: --html {str(tmp_path)!r}: is a folder; name a file in it\n"


def test_phases_reach_who_listens_and_nobody_else() -> None:
    told: list[Any] = []

    class Told:
        def began(self, name: str, total: int | None) -> Told:
            told.append((name, total))
            return self

        def moved(self, done: int, total: int | None) -> None:
            told.append((done, total))

        def ended(self) -> None:
            told.append("ended")

    @progress.phase("inner")
    def work() -> None:
        progress.update(1, 2)

    work()
    with progress.listening(Told()), progress.phase("outer", total=3):
        work()
        progress.update(3)
    with pytest.raises(ZeroDivisionError), progress.listening(Told()), progress.phase("fails"):
        raise ZeroDivisionError
    work()
    outer = [("outer", 3), ("inner", None), (1, 2), "ended", (3, None), "ended"]
    assert told == [*outer, ("fails", None), "ended"]
