"""The command line: ``autosplit plan``, ``report``, ``verify``, ``profile``, ... (or ``python -m autosplit``).

Exit codes: 0 done; 1 done, and the answer is no (does not fit, not equal); 2 bad usage or input; 130 interrupted.
Stdout carries the result and nothing else; errors, warnings and whatever the model prints go to stderr.

Modules of commands import torch and the like only when their command runs: help and completion are to be quick.
"""

from __future__ import annotations

import typer

from autosplit.cli import plan, profile, report, solve, standalone, verify

EXAMPLES = """Examples:

\b
  autosplit plan hf:config.json --devices 8xH100-SXM5-80GB
  autosplit plan nets.py:make --devices 2xL4-24GB --input "x=float32[64,3,224,224]" --html plan.html
  autosplit report nets.py:make --devices 4 --chunks 8 --input "x=float32[8,3,32,32]"
  autosplit devices

Every command has examples of its own: autosplit plan --help. Completion: autosplit --install-completion.

Exit codes: 0 done; 1 done, and the answer is no; 2 bad usage or input; 130 interrupted.
"""

app = typer.Typer(
    name="autosplit", no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False, epilog=EXAMPLES
)


def main() -> None:
    """Run the command line with the arguments of this process."""
    app(prog_name="autosplit")


@app.callback()
def _commands() -> None:
    """Split a PyTorch model into pipeline stages, and say what they will cost."""


app.command("devices", epilog=standalone.DEVICES_EXAMPLES)(standalone.devices_command)
app.command("diff", epilog=standalone.DIFF_EXAMPLES)(standalone.diff_command)
app.command("plan", epilog=plan.EXAMPLES)(plan.plan_command)
app.command("profile", epilog=profile.EXAMPLES)(profile.profile_command)
app.command("solve", epilog=solve.EXAMPLES)(solve.solve_command)
app.command("report", epilog=report.EXAMPLES)(report.report_command)
app.command("verify", epilog=verify.EXAMPLES)(verify.verify_command)
