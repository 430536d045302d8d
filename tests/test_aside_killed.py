"""A child that works aside ends with its caller, however that ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

KILLED = """
    import os, signal, time
    os.sched_getaffinity = lambda _: {0, 1}
    from autosplit.aside import aside, second_core

    with second_core(), aside(lambda: time.sleep(60)) as other:
        print(other._child.process, flush=True)
        while open(f"/proc/{other._child.process}/stat").read().rpartition(")")[2].split()[0] != "S":
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="children are forked on Linux only")
def test_a_child_does_not_outlive_a_caller_that_is_killed() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", textwrap.dedent(KILLED)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as caller:
        began_s = time.monotonic()
        said, _ = caller.communicate(timeout=90)  # up to the end of the last process that can write there
        assert said.strip().isdigit()
        assert caller.returncode == -signal.SIGKILL
        assert time.monotonic() - began_s < 50, "the child sleeps 60 s"
