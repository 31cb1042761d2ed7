"""Reading JSON: places are right, memory stays small, and what is wrong with a file is one clear sentence."""

from __future__ import annotations

import json
import pickle
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from data_files import places, read, refusal, write
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.config.data import SourceConfig
from lockstep.data.sources import json_rows
from lockstep.data.sources import rows as text_files
from lockstep.data.sources.files import find_files, parse_raw, read_raw
from lockstep.data.sources.rows import DataError, Row


def test_lines_keep_their_numbers_across_blank_ones(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", '{"a": 1}\n\n  \r\n{"a": 2}\r\n{"a": 3}')
    assert [(row.origin, row.fields["a"]) for row in read(path)] == [
        (f"{path}:1", 1),
        (f"{path}:4", 2),
        (f"{path}:5", 3),
    ]


def test_array_rows_have_the_line_where_they_start(tmp_path: Path) -> None:
    path = write(tmp_path / "a.json", json.dumps([{"a": 1}, {"a": 2}], indent=2))
    assert places(path) == [":2", ":5"]


def test_rows_of_one_line_are_told_apart(tmp_path: Path) -> None:
    path = write(tmp_path / "a.json", '[{"a": 1}, {"a": 2},\n{"a": 3}, {"a": 4}]')
    assert places(path) == [":1", ":1, row 2", ":2", ":2, row 4"]


def test_json_file_may_hold_lines(tmp_path: Path) -> None:
    assert places(write(tmp_path / "a.json", '\n{"a": [1]}\n{"a": 2}\n')) == [":2", ":3"]


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("packing", ["", ".gz"])
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.jsonl", '{"a": "é"}\r\n{"a": ""}\r\n'),
        ("a.json", '[{"a": "é"},\r\n {"a": ""}]\r\n'),
        ("a.csv", 'a\r\né\r\n""\r\n'),
        ("A.TSV", 'a\né\n""'),
    ],
)
def test_text_may_be_packed_and_marked(tmp_path: Path, name: str, text: str, packing: str, mark: bytes) -> None:
    path = write(tmp_path / (name + packing), mark + text.encode())
    assert [row.fields for row in read(path)] == [{"a": "é"}, {"a": ""}]


def test_nulls_that_somebody_wrote_stay(tmp_path: Path) -> None:
    for name, text in (("a.jsonl", '{"a": null, "b": {"c": null}}'), ("a.json", '[{"a": null, "b": {"c": null}}]')):
        assert read(write(tmp_path / name, text))[0].fields == {"a": None, "b": {"c": None}}


def test_lines_are_split_here_and_parsed_elsewhere(tmp_path: Path) -> None:
    (file,) = find_files(SourceConfig(path=str(write(tmp_path / "a.jsonl", 'not json\n{"a": 1}\n'))))
    first, second = read_raw(file)
    assert (first.number, first.payload) == (1, b"not json\n")
    file, second = pickle.loads(pickle.dumps((file, second)))
    assert parse_raw(file, second) == Row(f"{file.name}:2", {"a": 1})


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
json_rows_of_any_kind = st.lists(st.dictionaries(st.text(max_size=3), json_values, max_size=4), min_size=1, max_size=8)
white_space = st.text(alphabet=" \t\n\r", max_size=4)


@settings(max_examples=100, deadline=None)
@given(rows=json_rows_of_any_kind, indent=st.sampled_from([None, 0, 3]), escape=st.booleans(), data=st.data())
def test_whatever_was_written_as_an_array_is_read_back(
    tmp_path_factory: pytest.TempPathFactory, rows: list[Any], indent: int | None, escape: bool, data: st.DataObject
) -> None:
    text = data.draw(white_space) + "["
    lines = []
    for number, row in enumerate(rows):
        text += "," * (number > 0) + data.draw(white_space)
        lines.append(1 + text.count("\n"))
        text += json.dumps(row, indent=indent, ensure_ascii=escape) + data.draw(white_space)
    path = write(tmp_path_factory.mktemp("a") / "a.json", text + "]" + data.draw(white_space))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_rows, "_BLOCK", data.draw(st.integers(1, 40)))  # every row then crosses the window's edge
        found = read(path)
    assert [row.fields for row in found] == rows
    assert [int(row.origin.removeprefix(f"{path}:").partition(",")[0]) for row in found] == lines
    assert len({row.origin for row in found}) == len(rows)


@settings(max_examples=100, deadline=None)
@given(rows=json_rows_of_any_kind, escape=st.booleans(), data=st.data())
def test_whatever_was_written_as_lines_is_read_back(
    tmp_path_factory: pytest.TempPathFactory, rows: list[Any], escape: bool, data: st.DataObject
) -> None:
    text, lines = "", []
    for row in rows:
        text += data.draw(white_space)
        lines.append(1 + text.count("\n"))
        text += json.dumps(row, ensure_ascii=escape) + data.draw(st.sampled_from(["\n", "\r\n", " \n"]))
    path = write(tmp_path_factory.mktemp("a") / data.draw(st.sampled_from(["a.json", "a.jsonl"])), text)
    found = read(path)
    assert [row.fields for row in found] == rows
    assert [row.origin for row in found] == [f"{path}:{line}" for line in lines]


@pytest.mark.parametrize(
    ("name", "content", "place", "words"),
    [
        ("a.jsonl", '{"a": 1}\n\n{"a" 1}\n', ":3: ", "not valid JSON (Expecting ':' delimiter at column 6)"),
        ("a.jsonl", '{"a": 1}\n{"a": "cut o', ":2: ", "the line ends too early"),
        ("a.jsonl", '{"a": 1}\n{"a": \n{"a": 2}\n', ":2: ", "the line ends too early"),
        ("a.jsonl", '{"a": 1}\n[1, 2]\n', ":2: ", "found an array where an object belongs"),
        ("a.jsonl", '[\n{"a": 1}\n]\n', ":1: ", "if the file is one array, name it .json"),
        ("a.jsonl", '"text"\n', ":1: ", "found a string where an object belongs: write one JSON object per line"),
        ("a.jsonl", b'{"a": 1}\n{"a": "\xff"}\n', ":2: ", "not UTF-8 text (byte 0xff at offset 7)"),
        ("a.jsonl", '{"a": 1}\n'.encode("utf-16"), ": ", "UTF-16 text: convert the file to UTF-8"),
        ("a.jsonl", '{"a": "\\ud83d\\ude00"}\n{"a": "\\ud83d"}\n', ":2: ", "half of a character"),
        ("a.jsonl", '{"a": ' + "[" * 200_000 + "}\n", ":1: ", "not valid JSON"),
        ("a.jsonl", '{"a": NaN}\n', ":1: ", "NaN is no JSON value"),
        ("a.jsonl", "", ": ", "no rows"),
        ("a.jsonl", "\n \n", ": ", "no rows"),
        ("a.jsonl.gz", "", ": ", "no rows"),
        ("a.json", " ", ": ", "no rows"),
        ("a.json", "[ ]", ": ", "no rows"),
        ("a.json", '{\n  "data": [\n    {"a": 1}\n  ]\n}\n', ":1: ", "save the array of rows alone"),
        ("a.json", '[\n{"a": 1},\n{"a" 2}\n]', ":3: ", "not valid JSON (Expecting ':' delimiter at '2}"),
        ("a.json", '[\n{"a": 1},\n{"a": 2,\n "b" 3}\n]', ":4: ", "not valid JSON"),
        ("a.json", '[\n{"a": 1}\n{"a": 2}\n]', ":3: ", "instead of , or ]"),
        ("a.json", '[\n{"a": 1},\n]', ":3: ", "found ']' instead of {"),
        ("a.json", '[{"a": 1}, 7]', ":1, row 2: ", "found a number where an object belongs"),
        ("a.json", '[\n{"a": 1},\n["b"]]', ":3, row 2: ", "found an array where an object belongs"),
        ("a.json", '[{"a": 1}]\n[{"a": 2}]', ":2: ", "text after the end of the array"),
        ("a.json", '[{"a": 1},\n{"a": "\\ud83d"}, {"a": 2}]', ":2, row 2: ", "half of a character"),
        ("a.json", '[{"a": 1},\n{"a": -Infinity}]', ":2, row 2: ", "-Infinity is no JSON value"),
        ("a.json", '[{"a": 1},\n{"a": ' + "[" * 200_000, ":2, row 2: ", "not valid JSON"),
        ("a.json", b'[{"a": 1},\n{"a": "\xe9"}]', ":2: ", "not UTF-8 text (byte 0xe9)"),
        ("a.json", '[{"a": 1}]'.encode("utf-16"), ": ", "UTF-16"),
        ("a.json", '[\n{"a": 1},\n{"a": 2,\n', ":3, row 2: ", "the file is cut off in the middle of this row"),
        ("a.json", '[\n{"a": 1},\n{"a": "some tex', ":3, row 2: ", "the file is cut off in the middle of this row"),
        ("a.json", '[\n{"a": 1}', ":2: ", "the file is cut off: the array has no closing ]"),
        ("a.json", '[\n{"a": 1},\n', ":3: ", "the file is cut off: the array has no closing ]"),
    ],
)
@pytest.mark.parametrize("block", [1, 2**20])
def test_wrong_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: str | bytes, place: str, words: str, block: int
) -> None:
    monkeypatch.setattr(json_rows, "_BLOCK", block)
    message = refusal(write(tmp_path / name, content))
    assert message.startswith(place)
    assert words in message


def test_a_bad_character_costs_one_row_of_an_array(tmp_path: Path) -> None:
    path = write(tmp_path / "a.json", '[{"a": 1}, {"a": "\\ud83d"}, {"a": 3}]')
    (file,) = find_files(SourceConfig(path=str(path)))
    first, bad, last = read_raw(file)
    assert (parse_raw(file, first).fields, parse_raw(file, last).fields) == ({"a": 1}, {"a": 3})
    with pytest.raises(DataError, match="half of a character"):
        parse_raw(*pickle.loads(pickle.dumps((file, bad))))


# --- long rows and long files ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "frame"), [("a.jsonl", "{}\n"), ("a.json", "[{}]"), ("a.csv", "text\n{}\n")])
def test_a_row_of_ten_megabytes(tmp_path: Path, name: str, frame: str) -> None:
    text = "longer " * 1_500_000
    row = text if name == "a.csv" else json.dumps({"text": text})
    assert read(write(tmp_path / name, frame.replace("{}", row)))[0].fields == {"text": text}


def test_a_long_object_is_decoded_a_few_times_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_rows, "_BLOCK", 64)
    sizes = []

    class CountingDecoder(json.JSONDecoder):
        def raw_decode(self, s: str, idx: int = 0) -> Any:
            sizes.append(len(s) - idx)
            return super().raw_decode(s, idx)

    monkeypatch.setattr(json_rows, "_DECODER", CountingDecoder())
    path = write(tmp_path / "a.json", json.dumps([{"a": list(range(20_000))}]))
    assert read(path)[0].fields == {"a": list(range(20_000))}
    assert sum(sizes) < 4 * path.stat().st_size


@pytest.mark.parametrize(
    ("name", "start", "place"),
    [
        ("a.jsonl", '{"a": 1}\n{"a": "', ":2: this line is longer"),
        ("a.json", '[{"a": 1},\n{"a": "', ":2, row 2: this row is longer"),
        ("a.csv", "a\n1\n", ":3: this line is longer"),
    ],
)
def test_endless_rows_are_refused_before_they_fill_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, start: str, place: str
) -> None:
    monkeypatch.setattr(text_files, "MAX_ROW_BYTES", 10_000)
    monkeypatch.setattr(json_rows, "_BLOCK", 1000)
    path = write(tmp_path / name, start + "b" * 5_000_000)
    tracemalloc.start()
    message = refusal(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert message.startswith(place)
    assert peak < 1_000_000


def test_a_mistake_is_found_where_it_is_and_not_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_files, "MAX_ROW_BYTES", 10_000)
    monkeypatch.setattr(json_rows, "_BLOCK", 1000)
    message = refusal(write(tmp_path / "a.json", '[\n{"a" 1},\n' + '{"a": 2},\n' * 10_000 + '{"a": 3}]'))
    assert message.startswith(":2: not valid JSON")


@pytest.mark.parametrize(("name", "frame"), [("a.jsonl", "\n"), ("a.json", ",\n"), ("a.csv", "\n")])
def test_memory_does_not_grow_with_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, frame: str
) -> None:
    monkeypatch.setattr(json_rows, "_BLOCK", 2**14)
    text = frame.join(["b" * 200 if name == "a.csv" else json.dumps({"a": "b" * 200})] * 20_001)
    path = write(tmp_path / name, f"[{text}]" if name == "a.json" else text)
    (file,) = find_files(SourceConfig(path=str(path)))
    tracemalloc.start()
    num_rows = sum(1 for _ in read_raw(file))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert num_rows >= 20_000
    assert peak < path.stat().st_size / 10
