"""Rows of JSON: one object per line, or one array of objects read through a window that moves with the rows."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator

from lockstep.data.sources import rows as text_files
from lockstep.data.sources.rows import (
    DataError,
    RawRow,
    SourceFile,
    Stream,
    decode_text,
    json_type,
    not_utf8,
    open_text,
    read_lines,
    too_long,
)

_BLOCK = 2**20
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_SPACE = re.compile(r"[ \t\n\r]*")
# A number, a literal or an escape that the end of the text cuts is an error up to this many characters before it.
_CUT_MARGIN = 16
_TYPE_OF_START = {"[": "an array", '"': "a string", "t": "a boolean", "f": "a boolean", "n": "null"} | dict.fromkeys(
    "-0123456789", "a number"
)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON value")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


def holds_array(file: SourceFile) -> bool:
    """Many tools write JSON lines under the name .json, so the first character decides."""
    with open_text(file) as stream:
        while block := stream.read(4096):
            start = block.lstrip()
            if start:
                return start.startswith(b"[")
    return False


def read_json_lines(file: SourceFile) -> Iterator[RawRow]:
    for number, line in read_lines(file):
        if not line.isspace():
            yield RawRow(number, line)


def parse_json_line(line: bytes, origin: str, *, named_json: bool) -> dict[str, object]:
    """The object on one line. `named_json`: the file's name does not say that it has lines, so errors explain it."""
    text = decode_text(line, origin)
    remedy = "fix or remove the line"
    if text.lstrip().startswith("["):
        remedy = "write one JSON object per line; if the file is one array, name it .json"
    elif named_json:
        remedy += " (a .json file that does not start with [ needs one object per line: save the array of rows alone)"
    try:
        value = _DECODER.decode(text)
    except json.JSONDecodeError as error:
        what = "the line ends too early" if _stops_early(error) else f"{error.msg} at column {error.colno}"
        raise DataError(f"{origin}: not valid JSON ({what}): {remedy}") from error
    except (ValueError, RecursionError) as error:  # NaN, numbers of thousands of digits, thousands of brackets
        raise DataError(f"{origin}: not valid JSON ({error}): {remedy}") from error
    if not isinstance(value, dict):
        remedy = remedy if isinstance(value, list) else "write one JSON object per line"
        raise DataError(f"{origin}: found {json_type(value)} where an object belongs: {remedy}")
    if _SURROGATE.search(text):
        _check_characters(value, origin)
    return value


def read_json_array(file: SourceFile) -> Iterator[RawRow]:
    with open_text(file) as stream:
        window = _Window(stream, file)
        window.take("[")
        num_rows, last_line = 0, 0
        more = window.peek() != "]"
        while more:
            num_rows += 1
            window.peek()  # the line where the object starts, not that of the comma before it
            is_shared, last_line = window.line == last_line, window.line
            yield RawRow(last_line, window.read_object(num_rows), num_rows if is_shared else None)
            more = window.take(",]") == ","
        if not num_rows:
            window.take("]")
        if window.peek():
            raise DataError(f"{file.origin(window.line)}: text after the end of the array: remove it")


class _Window:
    """The part of the file being read. It only moves forward: memory is bounded by the largest row."""

    def __init__(self, stream: Stream, file: SourceFile) -> None:
        self.line = 1
        self._stream = stream
        self._file = file
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._text, self._at, self._ended = "", 0, False

    def peek(self) -> str:
        """Skip white space; the next character, or an empty string at the end of the file."""
        while True:
            space = _SPACE.match(self._text, self._at)
            assert space is not None
            self._advance(space.end())
            if self._at < len(self._text):
                return self._text[self._at]
            if self._ended:
                return ""
            self._grow()

    def take(self, signs: str) -> str:
        """Read one of these characters."""
        sign = self.peek()
        if sign and sign in signs:
            self._advance(self._at + 1)
            return sign
        origin, expected = self._file.origin(self.line), " or ".join(signs)
        if not sign:
            raise DataError(f"{origin}: the file is cut off: the array has no closing ]: copy or write it again")
        raise DataError(f"{origin}: not valid JSON (found {self._near(self._at)} instead of {expected}): fix the file")

    def read_object(self, row: int) -> dict[str, object] | DataError:
        """The object that starts here; an error if it is valid JSON with invalid characters."""
        start = self.peek()
        origin = self._file.origin(self.line, row)
        if start in _TYPE_OF_START:
            raise DataError(
                f"{origin}: found {_TYPE_OF_START[start]} where an object belongs: write an array of JSON objects"
            )
        if start != "{":
            self.take("{")
        value, end = self._decode_object(origin)
        error = None
        if _SURROGATE.search(self._text, self._at, end):
            try:
                _check_characters(value, origin)
            except DataError as invalid:
                error = invalid
        self._advance(end)
        return error or value

    def _decode_object(self, origin: str) -> tuple[dict[str, object], int]:
        while True:
            try:
                return _DECODER.raw_decode(self._text, self._at)
            except json.JSONDecodeError as error:
                if self._ended or not _stops_early(error, _CUT_MARGIN):
                    raise DataError(self._explain(error, origin)) from error
            except (ValueError, RecursionError) as error:
                raise DataError(f"{origin}: not valid JSON ({error}): fix or remove the row") from error
            if len(self._text) - self._at > text_files.MAX_ROW_BYTES:
                raise DataError(too_long(origin, "row"))
            self._grow()

    def _explain(self, error: json.JSONDecodeError, origin: str) -> str:
        if _stops_early(error):
            return f"{origin}: the file is cut off in the middle of this row: copy or write it again"
        origin = self._file.origin(self.line + self._text.count("\n", self._at, error.pos))
        return f"{origin}: not valid JSON ({error.msg} at {self._near(error.pos)}): fix the file"

    def _near(self, at: int) -> str:
        """A few characters: a line number alone does not help where the whole file is one line."""
        return repr(self._text[at : at + 20])

    def _advance(self, to: int) -> None:
        self.line += self._text.count("\n", self._at, to)
        self._at = to

    def _grow(self) -> None:
        """Drop what was read and read more: at least as much as is left, so a long row is decoded only a few times."""
        rest = self._text[self._at :]
        block = self._stream.read(max(_BLOCK, len(rest)))
        self._ended = not block
        try:
            self._text = rest + self._decoder.decode(block, final=self._ended)
        except UnicodeDecodeError as error:
            line = self.line + rest.count("\n") + error.object.count(b"\n", 0, error.start)
            raise DataError(not_utf8(self._file.origin(line), error)) from error
        self._at = 0


def _stops_early(error: json.JSONDecodeError, margin: int = 0) -> bool:
    """Whether more text could have helped."""
    return error.msg.startswith("Unterminated string") or error.pos >= len(error.doc.rstrip()) - margin


def _check_characters(value: object, origin: str) -> None:
    """JSON can escape half of a surrogate pair, which no tokenizer accepts."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = ascii(error.object[error.start])
        raise DataError(f"{origin}: holds {half}, half of a character: fix or remove the row") from error
