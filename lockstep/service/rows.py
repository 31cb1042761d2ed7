"""Rows on their way in: JSONL or one JSON array, read a piece at a time, checked, and written as JSONL.

Large uploads are checked in a process of their own (`python -m lockstep.service.rows`), which may take little memory
and leaves the service's interpreter free for everybody else.
"""

from __future__ import annotations

import codecs
import errno
import hashlib
import json
import logging
import os
import resource
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from lockstep.service.errors import NoSpace, ServiceError, TooLarge

MAX_ROWS = 10_000_000
_MAX_ROW_BYTES = 16 << 20
_PIECE_BYTES = 1 << 16
_MAX_MEMORY_BYTES = 512 << 20
_TIMEOUT_S = 900.0
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
log = logging.getLogger(__name__)
_ERRORS = {error.code: error for error in (ServiceError, TooLarge, NoSpace)}


@dataclass(frozen=True)
class Written:
    rows: int
    bytes: int
    sha256: str


def write_rows(lines: Iterable[bytes], path: Path, max_bytes: int) -> Written:
    digest, size, count = hashlib.sha256(), 0, 0
    try:
        with path.open("wb") as file:
            for line in lines:
                size, count = size + len(line), count + 1
                if size > max_bytes:
                    raise TooLarge(f"the data set is larger than the {max_bytes / (1 << 20):.4g} MiB allowed")
                if count > MAX_ROWS:
                    raise TooLarge(f"the data set has more than {MAX_ROWS:,} rows: send it in parts")
                digest.update(line)
                file.write(line)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise_if_full(error)
        raise
    if not count:
        raise ServiceError("the data set is empty: send one JSON object per line")
    return Written(count, size, digest.hexdigest())


def raise_if_full(error: OSError) -> None:
    if error.errno in _DISK_FULL:
        raise NoSpace("the service's disk is full: ask its operator, or delete jobs and data sets") from error


def read_rows(stream: BinaryIO) -> Iterator[bytes]:
    """Each row as a line of JSON."""
    start = stream.read(4096)
    stream.seek(0)
    if start.lstrip()[:1] == b"[":
        yield from _read_array(stream)
        return
    for number, line in enumerate(iter(lambda: stream.readline(_MAX_ROW_BYTES + 1), b""), start=1):
        if len(line) > _MAX_ROW_BYTES:
            raise TooLarge(f"line {number} is longer than {_MAX_ROW_BYTES >> 20} MiB")
        if line.strip():
            yield line_of(_parse(line, f"line {number}"), number)


def line_of(row: object, number: int) -> bytes:
    if not isinstance(row, Mapping):
        raise ServiceError(f'row {number} is not an object with columns, such as {{"prompt": ..., "completion": ...}}')
    if not row:
        raise ServiceError(f"row {number} has no columns: leave it out")
    return json.dumps(row, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n"


def _parse(text: bytes, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        problem = error.msg if isinstance(error, json.JSONDecodeError) else "cannot be read"
        raise ServiceError(f"{where} is not JSON: {problem}") from None


# --- an array, one element at a time ---------------------------------------------------------------------------------


class _Text:
    """What has been read and not yet used of a stream of UTF-8."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self.text = ""
        self.place = 0
        self.ended = False

    def read_more(self) -> None:
        """As much again as there is: a long element is then tried only a few times."""
        self.text = self.text[self.place :]
        self.place = 0
        piece = self._stream.read(max(_PIECE_BYTES, len(self.text)))
        self.ended = not piece
        try:
            self.text += self._decoder.decode(piece, final=self.ended)
        except UnicodeDecodeError:
            raise ServiceError("the body is not JSON: it is not UTF-8") from None

    def next_sign(self) -> str:
        """Past white space; empty at the end."""
        while True:
            while self.place < len(self.text) and self.text[self.place] in " \t\r\n":
                self.place += 1
            if self.place < len(self.text) or self.ended:
                return self.text[self.place : self.place + 1]
            self.read_more()


def _read_array(stream: BinaryIO) -> Iterator[bytes]:
    text = _Text(stream)
    text.next_sign()
    text.place += 1  # the opening bracket
    number = 1
    if text.next_sign() == "]":
        text.place += 1
    else:
        while True:
            yield line_of(_read_element(text, number), number)
            sign = text.next_sign()
            text.place += 1
            if sign == "]":
                break
            if sign != ",":
                raise ServiceError(f"the body is not JSON: expected a comma or a closing bracket behind row {number}")
            number += 1
    if text.next_sign():
        raise ServiceError("the body is not JSON: something follows the array")


def _read_element(text: _Text, number: int) -> object:
    if text.next_sign() not in ("{", ""):
        return None  # no object: the caller says so
    decoder = json.JSONDecoder()
    while True:
        try:
            row, text.place = decoder.raw_decode(text.text, text.place)
            return row
        except RecursionError:
            raise ServiceError(f"row {number} is not JSON: cannot be read") from None
        except ValueError as error:
            problem = error.msg if isinstance(error, json.JSONDecodeError) else "cannot be read"
            if text.ended:
                raise ServiceError(f"the body is not JSON: row {number}: {problem}") from None
            if len(text.text) - text.place > _MAX_ROW_BYTES:
                raise ServiceError(f"row {number} is not JSON, or longer than {_MAX_ROW_BYTES >> 20} MiB") from None
        text.read_more()


# --- in a process of its own -----------------------------------------------------------------------------------------


def check_elsewhere(source: BinaryIO, path: Path, max_bytes: int, working_dir: Path) -> Written:
    """The same as write_rows(read_rows(source), path), for a file of any size."""
    source.flush()
    os.lseek(source.fileno(), 0, os.SEEK_SET)
    command = [sys.executable, "-m", "lockstep.service.rows", str(path), str(max_bytes)]
    try:
        done = subprocess.run(
            command, stdin=source, capture_output=True, timeout=_TIMEOUT_S, cwd=working_dir, start_new_session=True
        )
        answer = json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        raise TooLarge(f"the rows could not be checked within {_TIMEOUT_S / 60:.0f} minutes: send fewer") from None
    except ValueError:
        log.error("the rows of an upload could not be checked: %s", done.stderr[-2000:].decode(errors="replace"))
        raise TooLarge("the rows could not be checked, most likely for lack of memory: send smaller ones") from None
    if "error" in answer:
        raise _ERRORS[answer["code"]](answer["error"])
    return Written(**answer)


def main() -> None:
    """Prints what was written, or what is wrong."""
    path, max_bytes = sys.argv[1:]
    os.nice(10)
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_MEMORY_BYTES, _MAX_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    answer: dict[str, object]
    try:
        answer = asdict(write_rows(read_rows(sys.stdin.buffer), Path(path), int(max_bytes)))
    except ServiceError as error:
        answer = {"error": str(error), "code": error.code}
    except MemoryError:
        answer = {"error": "a row takes more memory to read than a row may: make it smaller", "code": TooLarge.code}
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
