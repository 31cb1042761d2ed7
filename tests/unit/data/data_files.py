"""Small data files for the tests of sources, and what reading them gives."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import pytest

from lockstep.config.data import SourceConfig
from lockstep.data.sources.files import find_files, parse_raw, read_raw
from lockstep.data.sources.rows import DataError, Row


def write(path: Path, content: str | bytes) -> Path:
    content = content.encode() if isinstance(content, str) else content
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def read(path: Path) -> list[Row]:
    (file,) = find_files(SourceConfig(path=str(path)))
    return [parse_raw(file, raw) for raw in read_raw(file)]


def places(path: Path) -> list[str]:
    return [row.origin.removeprefix(str(path)) for row in read(path)]


def refusal(path: Path) -> str:
    """What the reader says about a bad file: always one line that starts with the file."""
    with pytest.raises(DataError) as caught:
        read(path)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(f"{path}:")
    return message.removeprefix(str(path))


def write_table(
    path: Path, rows: list[dict[str, Any]], *, with_index: bool = True, schema: Any = None, batch_rows: int = 2
) -> Path:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    table = pyarrow.Table.from_pylist(rows)
    table = table.cast(schema) if schema else table
    if path.suffix == ".parquet":
        parquet.write_table(table, path, row_group_size=batch_rows)
    else:
        new = pyarrow.ipc.new_file if with_index else pyarrow.ipc.new_stream
        with new(str(path), table.schema) as writer:
            writer.write_table(table, max_chunksize=batch_rows)
    return path
