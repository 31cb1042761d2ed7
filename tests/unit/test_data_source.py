"""Reading rows: places are right, and everything that is wrong with a file is one clear sentence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lockstep.data.source import DataError, read_rows


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def test_lines_keep_their_numbers_across_blank_ones(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", '{"a": 1}\n\n  \r\n{"a": 2}\r\n{"a": 3}')
    assert [(r.origin, r.fields["a"]) for r in read_rows(path)] == [
        (f"{path}:1", 1),
        (f"{path}:4", 2),
        (f"{path}:5", 3),
    ]


def test_array_rows_are_numbered(tmp_path: Path) -> None:
    path = write(tmp_path / "a.json", json.dumps([{"a": 1}, {"a": 2}], indent=2))
    assert [r.origin for r in read_rows(path)] == [f"{path}:row 1", f"{path}:row 2"]


def test_json_file_may_hold_lines(tmp_path: Path) -> None:
    path = write(tmp_path / "a.json", '\n{"a": [1]}\n{"a": 2}\n')
    assert [r.origin for r in read_rows(path)] == [f"{path}:2", f"{path}:3"]


def test_byte_order_mark_is_skipped(tmp_path: Path) -> None:
    for name, text in (("a.jsonl", '{"a": 1}'), ("a.json", '[{"a": 1}]')):
        assert [r.fields for r in read_rows(write(tmp_path / name, b"\xef\xbb\xbf" + text.encode()))] == [{"a": 1}]


def test_reading_is_lazy(tmp_path: Path) -> None:
    rows = read_rows(write(tmp_path / "a.jsonl", '{"a": 1}\nnot json\n'))
    assert next(rows).fields == {"a": 1}


@pytest.mark.parametrize(
    ("name", "content", "place", "words"),
    [
        ("a.jsonl", '{"a": 1}\n\n{"a": \n', ":3: ", "not valid JSON (Expecting value at column"),
        ("a.jsonl", '{"a": 1}\n[1, 2]\n', ":2: ", "found an array where an object belongs"),
        ("a.jsonl", '"text"\n', ":1: ", "found a string where an object belongs"),
        ("a.jsonl", b'{"a": 1}\n{"a": "\xff"}\n', ":2: ", "not UTF-8 text (byte 0xff at offset 7)"),
        ("a.jsonl", '{"a": "\\ud83d\\ude00"}\n{"a": "\\ud83d"}\n', ":2: ", "half of a character"),
        ("a.jsonl", '{"a": ' + "[" * 200_000 + "}\n", ":1: ", "not valid JSON"),
        ("a.jsonl", "", ": ", "no rows"),
        ("a.jsonl", "\n \n", ": ", "no rows"),
        ("a.json", "[]", ": ", "no rows"),
        ("a.json", '[\n{"a": 1},\n{"a" 2}\n]', ":3: ", "not valid JSON"),
        ("a.json", '[{"a": 1}, 7]', ":row 2: ", "found a number where an object belongs"),
        ("a.json", b'[{"a": "\xe9"}]', ": ", "not UTF-8 text"),
    ],
)
def test_wrong_content(tmp_path: Path, name: str, content: str | bytes, place: str, words: str) -> None:
    path = write(tmp_path / name, content)
    with pytest.raises(DataError) as caught:
        list(read_rows(path))
    assert str(caught.value).startswith(f"{path}{place}")
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_file_and_directory(tmp_path: Path) -> None:
    (tmp_path / "folder.json").mkdir()
    for name, words in (("none.jsonl", "no such file"), ("none.json", "no such file"), ("folder.json", "directory")):
        with pytest.raises(DataError, match=words) as caught:
            list(read_rows(tmp_path / name))
        assert str(tmp_path / name) in str(caught.value)
