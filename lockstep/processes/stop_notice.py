"""Whether this process was asked to stop while there is time to save: by a signal that waits until somebody looks.

SIGUSR1 everywhere, and SIGTERM where the launcher says that a SIGKILL follows only after a while: preemption, eviction.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator

SAVE_ON_SIGTERM_VARIABLE = "LOCKSTEP_SAVE_ON_SIGTERM"
"""In the environment of a rank: any value but an empty one makes SIGTERM a notice, too."""


class StopNotice:
    """The signals are blocked, not handled: they interrupt nothing, and processes that this one starts, which may get
    them as well, are not ended by them."""

    def __init__(self) -> None:
        self._signals = {signal.SIGUSR1}
        if os.environ.get(SAVE_ON_SIGTERM_VARIABLE):
            self._signals.add(signal.SIGTERM)

    @classmethod
    @contextlib.contextmanager
    def listening(cls) -> Iterator[StopNotice]:
        """In the main thread, before others are started: they inherit what is blocked."""
        notice = cls()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, notice._signals)
        ignored = [number for number in notice._signals if signal.getsignal(number) == signal.SIG_IGN]
        for number in ignored:  # a batch script ignores them until here; an ignored one would never be seen
            signal.signal(number, signal.SIG_DFL)
        try:
            yield notice
        finally:
            while notice.asked():
                signal.sigwait(notice._signals)
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def asked(self) -> bool:
        return bool(self._signals & signal.sigpending())
