"""Rows of tables: CSV and TSV, Parquet, and Arrow's file and stream formats, a batch of rows at a time."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

from lockstep.data.sources import rows as text_files
from lockstep.data.sources.rows import DataError, RawRow, SourceFile, decode_text, read_lines

_BATCH_ROWS = 1000
_BUFFER_BYTES = 2**20
_ARROW_FILE_MAGIC = b"ARROW1"


def read_csv(file: SourceFile) -> Iterator[RawRow]:
    # The csv module's own limit, 128 KiB for a cell, is less than one long conversation. It is global to the process.
    csv.field_size_limit(max(csv.field_size_limit(), text_files.MAX_ROW_BYTES))
    lines = (decode_text(line, file.origin(number)) for number, line in read_lines(file))
    delimiter = "\t" if ".tsv" in _suffixes(file.path) else ","
    records = csv.reader(lines, delimiter=delimiter, strict=True)
    header: list[str] | None = None
    while True:
        number = records.line_num + 1
        try:
            cells = next(records, None)
        except csv.Error as error:
            what = "a quote is not closed" if "end of data" in str(error) else str(error)
            raise DataError(f"{file.origin(number)}: not valid CSV ({what}): fix the quotes of this row") from error
        if cells is None:
            return
        if not cells:  # a blank line
            continue
        if header is None:
            header = _check_header(cells, file.origin(number))
            continue
        yield RawRow(number, _name_cells(header, cells, file.origin(number)))


def _suffixes(path: Path) -> list[str]:
    return [suffix.lower() for suffix in path.suffixes[-2:]]


def _check_header(names: list[str], origin: str) -> list[str]:
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise DataError(f"{origin}: the header names the column {repeated[0]!r} twice: give columns different names")
    if len(names) == 1 and any(sign in names[0] for sign in ",;\t"):
        raise DataError(
            f"{origin}: the header is one column, {names[0]!r}: separate columns with commas in .csv, tabs in .tsv"
        )
    return names


def _name_cells(header: list[str], cells: list[str], origin: str) -> dict[str, object] | DataError:
    if len(cells) != len(header):
        return DataError(
            f"{origin}: {len(cells)} cells where the header has {len(header)}: "
            "put quotes around cells that hold the separator, or fix the row"
        )
    return dict(zip(header, cells))


def read_parquet(file: SourceFile) -> Iterator[RawRow]:
    parquet = _import_pyarrow(file, "parquet")
    # Reading ahead would hold a whole row group, and many files are one row group.
    with parquet.ParquetFile(file.path, buffer_size=_BUFFER_BYTES, pre_buffer=False) as table:
        yield from _plain_rows(table.iter_batches(batch_size=_BATCH_ROWS))


def read_arrow(file: SourceFile) -> Iterator[RawRow]:
    yield from _plain_rows(_read_batches(file))


def count_arrow_rows(file: SourceFile) -> int:
    return sum(batch.num_rows for batch in _read_batches(file))


def _read_batches(file: SourceFile) -> Iterator[Any]:
    pyarrow = _import_pyarrow(file)
    with file.path.open("rb") as stream:
        has_index = stream.read(len(_ARROW_FILE_MAGIC)) == _ARROW_FILE_MAGIC
    with pyarrow.memory_map(str(file.path)) as stream:
        if has_index:
            batches = pyarrow.ipc.open_file(stream)
            yield from (batches.get_batch(i) for i in range(batches.num_record_batches))
        else:
            yield from pyarrow.ipc.open_stream(stream)


def _plain_rows(batches: Iterator[Any]) -> Iterator[RawRow]:
    numbers = count(1)
    for batch in batches:
        unpack = _struct_unpacker(batch.schema)
        for start in range(0, batch.num_rows, _BATCH_ROWS):
            for fields in batch.slice(start, _BATCH_ROWS).to_pylist():
                fields = _drop_nulls(fields)
                yield RawRow(next(numbers), unpack(fields) if unpack else fields)


def _unpacker(kind: Any) -> Callable[[Any], Any] | None:
    """Parses the JSON inside a value of this Arrow type; None if there is none.

    The datasets library stores objects whose keys differ from row to row (the arguments of tools) as JSON text.
    """
    from pyarrow import types

    if getattr(kind, "extension_name", None) == "arrow.json":
        return json.loads
    if types.is_struct(kind):
        return _struct_unpacker(kind)
    is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    unpack = _unpacker(kind.value_type) if is_list else None
    return (lambda items: [item if item is None else unpack(item) for item in items]) if unpack else None


def _struct_unpacker(fields: Iterable[Any]) -> Callable[[Any], Any] | None:
    inner = {field.name: unpack for field in fields if (unpack := _unpacker(field.type))}
    if not inner:
        return None
    return lambda value: {name: inner[name](field) if name in inner else field for name, field in value.items()}


def _import_pyarrow(file: SourceFile, part: str = "") -> Any:
    try:
        import pyarrow
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError as error:
        raise DataError(f"{file.name}: {file.kind} files need pyarrow: pip install 'lockstep[data]'") from error
    return getattr(pyarrow, part) if part else pyarrow


def _drop_nulls(value: Any) -> Any:
    """Without the keys that have no value, at any depth.

    A column has every key that any of its rows has, so null means "absent" in a table. In JSON files null is kept.
    """
    if isinstance(value, dict):
        return {key: _drop_nulls(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [_drop_nulls(inner) for inner in value]
    return value
