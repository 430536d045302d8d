"""``python -m autosplit`` is ``autosplit``."""

from __future__ import annotations

import gc
import signal
import sys


def main() -> None:
    """Run the command line; whoever interrupts it, even while it starts or ends, sees one line and no traceback."""
    try:
        from autosplit.cli import main as run

        run()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        gc.freeze()  # else the interpreter looks through all objects of torch's for garbage as it ends: half a second


if __name__ == "__main__":
    main()
