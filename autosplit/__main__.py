"""``python -m autosplit`` is ``autosplit``."""

from __future__ import annotations

import contextlib
import gc
import signal
import sys
from typing import NoReturn


def main() -> None:
    """Run the command line; whoever interrupts it, even while it starts or ends, sees one line and no traceback."""
    try:
        from autosplit.cli.app import main as run

        run()
    except KeyboardInterrupt:
        _interrupted()
    except SystemExit as end:  # typer makes one of a Ctrl-C between its own lines, and says nothing
        if isinstance(getattr(end.__context__, "__cause__", None), KeyboardInterrupt):
            _interrupted()
        raise
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        gc.freeze()  # else the interpreter looks through all objects of torch's for garbage as it ends: half a second
        # A Ctrl-C that went through code in a text, as that of a dataclass, is remembered by CPython until it runs the
        # next such code, and ends the process by the signal, whatever its exit code (run_eval_code_obj, pythonrun.c).
        exec("")


def _interrupted() -> NoReturn:
    with contextlib.suppress(OSError):
        print("interrupted", file=sys.stderr)
    sys.exit(130)


if __name__ == "__main__":
    main()
