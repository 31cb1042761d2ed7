"""How this process gets its memory from the system. Must not know models or steps."""

from __future__ import annotations

import ctypes
import os

# Of glibc's malloc.h, where they have been since its beginning.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEPT_BYTES, _LARGEST_BYTES = 2**31 - 1, 2**27


def keep_freed_memory() -> None:
    """What a step gives back, the next step wants again: on a CPU getting it anew costs about a tenth of the time.

    Does nothing without glibc, and where whoever started this process has settled it.
    """
    if "MALLOC_TRIM_THRESHOLD_" in os.environ or "MALLOC_MMAP_THRESHOLD_" in os.environ:
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
