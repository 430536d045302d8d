"""Files are written whole or not at all."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from autosplit.files import write_text


@contextmanager
def _disk_of(count: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (count, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_write_that_is_cut_off_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    write_text(path, "old")
    path.chmod(0o640)
    with _disk_of(100), pytest.raises(OSError, match="File too large"):
        write_text(path, "new" * 1000)
    assert path.read_text() == "old"
    write_text(path, "new\r\n")
    assert path.read_bytes() == b"new\r\n"
    assert path.stat().st_mode & 0o777 == 0o640
    assert list(tmp_path.iterdir()) == [path]


def test_links_and_devices_stay_what_they_are(tmp_path: Path) -> None:
    file, link = tmp_path / "file", tmp_path / "link"
    link.symlink_to(file)
    write_text(link, "text")
    assert link.is_symlink()
    assert file.read_text() == "text"
    write_text("/dev/null", "text")
    assert Path("/dev/null").is_char_device()
