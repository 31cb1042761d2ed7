"""Reading tables: CSV with its quotes, Parquet and Arrow with their nulls, and what a damaged one says."""

from __future__ import annotations

from pathlib import Path

import pytest
from data_files import read, refusal, write, write_table

from lockstep.config.data import SourceConfig
from lockstep.data.sources.files import find_files, parse_raw, read_raw
from lockstep.data.sources.rows import DataError


def test_csv_records_have_the_line_where_they_start(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", 'ask,tell\r\n"two\r\nlines","a, ""b"""\r\n\r\n1,\r\n')
    assert [(row.origin, row.fields) for row in read(path)] == [
        (f"{path}:2", {"ask": "two\r\nlines", "tell": 'a, "b"'}),
        (f"{path}:5", {"ask": "1", "tell": ""}),
    ]


def test_tsv_cells_may_hold_commas(tmp_path: Path) -> None:
    assert read(write(tmp_path / "a.tsv", "ask\ttell\na, b\tc\n"))[0].fields == {"ask": "a, b", "tell": "c"}


@pytest.mark.parametrize(
    ("content", "place", "words"),
    [
        ("a,b\n1,2\n1,2,3\n", ":3: ", "3 cells where the header has 2"),
        ('a,b\n"1\n\n",2\n7\n', ":5: ", "1 cells where the header has 2"),
        ('a,b\n1,2\n"open,3\n4,5\n', ":3: ", "a quote is not closed"),
        ('a,b\n"1"x,2\n', ":2: ", "not valid CSV"),
        ("a,b,a\n1,2,3\n", ":1: ", "names the column 'a' twice"),
        ("a;b\n1;2\n", ":1: ", "separate columns with commas"),
        ("a,b\n", ": ", "no rows"),
        (b"a,b\n1,2\n\xff,3\n", ":3: ", "not UTF-8 text (byte 0xff at offset 0)"),
        ("a,b\n1,2\n".encode("utf-16"), ": ", "UTF-16 text"),
    ],
)
def test_wrong_csv(tmp_path: Path, content: str | bytes, place: str, words: str) -> None:
    message = refusal(write(tmp_path / "a.csv", content))
    assert message.startswith(place)
    assert words in message


def test_a_ragged_row_costs_one_row(tmp_path: Path) -> None:
    (file,) = find_files(SourceConfig(path=str(write(tmp_path / "a.csv", "a,b\n1,2\n3\n5,6\n"))))
    first, ragged, last = read_raw(file)
    assert [parse_raw(file, raw).fields for raw in (first, last)] == [{"a": "1", "b": "2"}, {"a": "5", "b": "6"}]
    with pytest.raises(DataError, match="1 cells"):
        parse_raw(file, ragged)


TABLE = [
    {"id": 1, "input": None, "messages": [{"role": "user", "content": "a", "calls": None}]},
    {"id": 2, "input": "b", "messages": [{"role": "assistant", "content": None, "calls": [{"name": "f"}]}]},
    {"id": 3, "input": "", "messages": [None]},
]


@pytest.mark.parametrize(("name", "with_index"), [("a.parquet", True), ("a.arrow", True), ("a.arrow", False)])
def test_tables_give_plain_rows_without_the_keys_that_others_have(tmp_path: Path, name: str, with_index: bool) -> None:
    path = write_table(tmp_path / name, TABLE, with_index=with_index)
    assert [(row.origin, row.fields) for row in read(path)] == [
        (f"{path}:row 1", {"id": 1, "messages": [{"role": "user", "content": "a"}]}),
        (f"{path}:row 2", {"id": 2, "input": "b", "messages": [{"role": "assistant", "calls": [{"name": "f"}]}]}),
        (f"{path}:row 3", {"id": 3, "input": "", "messages": [None]}),
    ]


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_objects_stored_as_json_text_are_objects(tmp_path: Path, name: str) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    kind = pyarrow.struct({"role": pyarrow.string(), "call": pyarrow.json_()})
    schema = pyarrow.schema({"text": pyarrow.string(), "one": pyarrow.json_(), "messages": pyarrow.list_(kind)})
    rows = [
        {"text": '{"a": 1}', "one": None, "messages": [{"role": "a", "call": '{"x": null}'}, None]},
        {"text": "b", "one": "[7]", "messages": [{"role": "b", "call": None}]},
    ]
    assert [row.fields for row in read(write_table(tmp_path / name, rows, schema=schema))] == [
        {"text": '{"a": 1}', "messages": [{"role": "a", "call": {"x": None}}, None]},
        {"text": "b", "one": [7], "messages": [{"role": "b"}]},
    ]


@pytest.mark.parametrize("batch_rows", [700, 2500])
@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_rows_of_a_table_are_numbered_across_batches(tmp_path: Path, name: str, batch_rows: int) -> None:
    path = write_table(tmp_path / name, [{"a": number} for number in range(1, 2501)], batch_rows=batch_rows)
    assert [row.origin for row in read(path)] == [f"{path}:row {number}" for number in range(1, 2501)]
    assert [row.fields["a"] for row in read(path)] == list(range(1, 2501))


@pytest.mark.parametrize(("name", "with_index"), [("a.parquet", True), ("a.arrow", True), ("a.arrow", False)])
@pytest.mark.parametrize("damage", ["cut", "other", "empty"])
def test_a_damaged_table(tmp_path: Path, name: str, with_index: bool, damage: str) -> None:
    whole = write_table(tmp_path / name, TABLE * 100, with_index=with_index).read_bytes()
    content = {"cut": whole[: len(whole) // 2], "other": b"rows, rows, rows", "empty": b""}[damage]
    message = refusal(write(tmp_path / name, content))
    if damage == "empty":
        assert message.startswith(": no rows")
    else:
        assert message.startswith(f": not a whole {name[2:]} file (")
        assert message.endswith("): copy or write it again")


def test_a_table_without_rows(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"a": pyarrow.array([], pyarrow.int64())}), tmp_path / "a.parquet")
    assert refusal(tmp_path / "a.parquet").startswith(": no rows")
