"""Signals that ask a process to stop wait until somebody looks, and end neither it nor what it starts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from lockstep.processes.stop_notice import SAVE_ON_SIGTERM_VARIABLE

LISTEN = """
import os, signal, subprocess, sys
from lockstep.processes.stop_notice import StopNotice
with StopNotice.listening() as notice:
    assert not notice.asked()
    number = int(sys.argv[1])
    os.kill(os.getpid(), number)
    assert notice.asked() and notice.asked()
    child = subprocess.run([sys.executable, "-c", f"import os; os.kill(os.getpid(), {number})"])
    assert child.returncode == 0
assert not notice.asked()
print("goes on", flush=True)
os.kill(os.getpid(), number)
"""


def listen(number: int, *, ignored: bool = False, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", LISTEN, str(int(number))]
    if ignored:
        command = [
            "sh",
            "-c",
            f"trap '' {signal.Signals(number).name.removeprefix('SIG')}; exec \"$@\"",
            "sh",
            *command,
        ]
    return subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True)


@pytest.mark.parametrize("ignored", [False, True])
def test_sigusr1_is_a_notice_and_ends_nobody(ignored: bool) -> None:
    ended = listen(signal.SIGUSR1, ignored=ignored)
    assert ended.stdout == "goes on\n", ended.stderr
    assert ended.returncode == -signal.SIGUSR1, "afterwards it is a signal as any other"


def test_sigterm_is_one_where_the_launcher_says_so() -> None:
    assert listen(signal.SIGTERM, **{SAVE_ON_SIGTERM_VARIABLE: "1"}).stdout == "goes on\n"
    without = listen(signal.SIGTERM)
    assert (without.stdout, without.returncode) == ("", -signal.SIGTERM)
