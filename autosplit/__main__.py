"""``python -m autosplit`` is ``autosplit``."""

from __future__ import annotations

from autosplit.cli import main

if __name__ == "__main__":
    main()
