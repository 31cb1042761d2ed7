"""Text files as bytes and lines: unpacks .gz, drops the byte order mark, refuses what is not UTF-8.

Must not know what a line holds.
"""

from __future__ import annotations

import gzip
import io
from collections.abc import Iterator
from contextlib import contextmanager

from lockstep.data.sources.rows import DataError, SourceFile

Stream = gzip.GzipFile | io.BufferedReader
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")
# A longer row is a mistake (a missing line end or quote), found here before it fills the memory.
MAX_ROW_BYTES = 256 * 2**20


@contextmanager
def open_text(file: SourceFile) -> Iterator[Stream]:
    """The file's bytes, unpacked, without byte order mark."""
    is_packed = file.path.suffix.lower() == ".gz"
    with gzip.open(file.path, "rb") if is_packed else file.path.open("rb") as stream:
        start = stream.peek(len(BYTE_ORDER_MARK))
        if start.startswith(UTF16_MARKS):
            raise DataError(f"{file.name}: UTF-16 text: convert the file to UTF-8")
        if start.startswith(BYTE_ORDER_MARK):
            stream.read(len(BYTE_ORDER_MARK))
        yield stream


def read_lines(file: SourceFile) -> Iterator[tuple[int, bytes]]:
    """Every line with its number from 1 and with its line end."""
    with open_text(file) as stream:
        number = 0
        while line := stream.readline(MAX_ROW_BYTES + 1):
            number += 1
            if len(line) > MAX_ROW_BYTES:
                raise DataError(too_long(file.origin(number), "line"))
            yield number, line


def too_long(origin: str, what: str) -> str:
    size = f"{MAX_ROW_BYTES // 2**20} MiB"
    return f"{origin}: this {what} is longer than {size}: look for a missing line end or quote, or split the row"


def decode_text(raw: bytes, origin: str) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(not_utf8(origin, error, f" at offset {error.start}")) from error


def not_utf8(origin: str, error: UnicodeDecodeError, where: str = "") -> str:
    return f"{origin}: not UTF-8 text (byte {error.object[error.start]:#04x}{where}): convert the file to UTF-8"
