"""``python -m autosplit`` is ``autosplit``."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line; a Ctrl-C while it is imported is one line too."""
    try:
        from autosplit.cli.app import main as run

        run()
    except KeyboardInterrupt:
        sys.exit("interrupted")


if __name__ == "__main__":
    main()
