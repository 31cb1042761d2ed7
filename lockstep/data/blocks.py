"""Mapped files whose bytes are verified, block by block, when they are first read: a start stays fast."""

from __future__ import annotations

import hashlib
import os
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lockstep.data.sources.rows import DataError

BLOCK_BYTES = 1 << 18  # small, because rows come in random order: each may be the first of its block
_DIGEST_BYTES = 16


class DamagedCache(DataError):
    """What is in the cache is not what was written; `what` is a clause that says where."""

    exit_code = 1  # no mistake of the user: the launcher starts the run again

    def __init__(self, what: str) -> None:
        super().__init__(f"{what}: the entry is removed, and the next start compiles it again")
        self.what = what


def digest_block(block: bytes) -> bytes:
    return hashlib.sha256(block).digest()[:_DIGEST_BYTES]


class BlockDigests:
    """Of a file that is being written."""

    def __init__(self) -> None:
        self._digests: list[bytes] = []
        self._begun = bytearray()

    def update(self, raw: bytes) -> None:
        self._begun += raw
        whole = len(self._begun) - len(self._begun) % BLOCK_BYTES
        for start in range(0, whole, BLOCK_BYTES):
            self._digests.append(digest_block(bytes(self._begun[start : start + BLOCK_BYTES])))
        del self._begun[:whole]

    def finish(self) -> str:
        """In hexadecimal, one after the other."""
        last = [digest_block(bytes(self._begun))] if self._begun else []
        return b"".join([*self._digests, *last]).hex()


class MappedFile:
    """The values of a file, mapped. No block of it is given out before its bytes have been verified."""

    def __init__(self, path: Path, dtype: str, digests: str) -> None:
        self.path = path
        # As a plain array: every slice of np.memmap costs microseconds more.
        mapped = np.memmap(path, dtype=dtype, mode="r").view(np.ndarray) if digests else np.empty(0, dtype)
        self._values: npt.NDArray[Any] = mapped
        self._digests = bytes.fromhex(digests)
        self._size = mapped.itemsize
        self._verified = bytearray(len(self._digests) // _DIGEST_BYTES)
        self._num_left = len(self._verified)
        # Kept open: what another process removes meanwhile can still be verified.
        self._descriptor = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._descriptor)

    def part(self, start: int, stop: int) -> npt.NDArray[Any]:
        if self._num_left and stop > start:
            first, last = start * self._size // BLOCK_BYTES, (stop * self._size - 1) // BLOCK_BYTES
            if self._verified.find(0, first, last + 1) >= 0:
                self._verify(first, last)
        return self._values[start:stop]

    def _verify(self, first: int, last: int) -> None:
        """Read, not through the map: a disk that fails is then an error and not a signal."""
        for block in range(first, min(last + 1, len(self._verified))):
            if self._verified[block]:
                continue
            start = block * BLOCK_BYTES
            expected = self._digests[block * _DIGEST_BYTES : (block + 1) * _DIGEST_BYTES]
            if digest_block(os.pread(self._descriptor, BLOCK_BYTES, start)) != expected:
                raise DamagedCache(
                    f"the data cache is damaged: {self.path} does not hold from byte {start:,} on what was written"
                )
            self._verified[block] = 1
            self._num_left -= 1
