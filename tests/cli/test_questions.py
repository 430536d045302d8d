"""The guide of questions: each is answered by one command, whose options there are."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import typer

from autosplit.cli import app as cli

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
