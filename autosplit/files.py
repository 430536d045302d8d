"""Text files that are written whole or not at all."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def write_text(path: str | Path, text: str) -> None:
    """Write a text file; one that is there is replaced only when all of the new text is on the disk.

    Links and what is no plain file, such as ``/dev/stdout``, are written in place. Raises OSError.
    """
    path = Path(path)
    in_place = path.is_symlink() or (path.exists() and not path.is_file())
    target = path if in_place else path.with_name(f".{path.name}.{os.getpid()}")
    try:
        target.write_text(text, encoding="utf-8", newline="")
        if not in_place:
            if path.exists():
                shutil.copymode(path, target)
            os.replace(target, path)
    except BaseException:
        if not in_place:
            target.unlink(missing_ok=True)
        raise
