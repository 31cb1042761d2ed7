"""From a source's settings to files, and from a file to rows, one at a time, each with the place it came from.

Reads JSON lines, JSON arrays, CSV, Parquet and Arrow; a file, a folder, a glob or a Hub data set.
Must not know what the fields of a row mean.
"""

from __future__ import annotations

import glob
import gzip
import hashlib
import json
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from lockstep.config.data import SUFFIXES, SourceConfig, is_local
from lockstep.data.sources.hub import find_hub_files
from lockstep.data.sources.json_rows import holds_array, parse_json_line, read_json_array, read_json_lines
from lockstep.data.sources.rows import DataError, Kind, RawRow, Row, SourceFile, json_type
from lockstep.data.sources.table_rows import read_arrow, read_csv, read_parquet

__all__ = [
    "DataError",
    "RawRow",
    "Row",
    "SourceFile",
    "digest_file",
    "find_files",
    "json_type",
    "parse_raw",
    "read_raw",
]

_KIND_OF_SUFFIX: dict[str, Kind] = {
    ".jsonl": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
    ".arrow": "arrow",
}
assert set(_KIND_OF_SUFFIX) == set(SUFFIXES)
_TEXT_KINDS = ("jsonl", "json", "csv")
_READERS: dict[Kind, Callable[[SourceFile], Iterator[RawRow]]] = {
    "jsonl": read_json_lines,
    "json": read_json_array,
    "csv": read_csv,
    "parquet": read_parquet,
    "arrow": read_arrow,
}
_OTHER_PACKING = (".zst", ".xz", ".bz2", ".zip")
_KNOWN = f"{', '.join(SUFFIXES)}, text also as .gz"
_CHECK_PATHS = "check data.train, data.validation and data.test"
# datasets.save_to_disk describes its folders in these.
_STATE, _INFO, _SPLITS = "state.json", "dataset_info.json", "dataset_dict.json"


def find_files(source: SourceConfig) -> list[SourceFile]:
    """The files of a source in a fixed order, each once."""
    if not is_local(source.path, Path()):
        return find_hub_files(source)
    root = Path(source.path).expanduser()
    try:
        if root.is_dir():
            paths = _walk_folder(root, source.split)
        elif root.exists() or not any(sign in source.path for sign in "*?["):
            paths = [root]
        else:
            paths = _expand_glob(str(root), source.split)
        files: dict[str, SourceFile] = {}
        for path in paths:
            files.setdefault(os.path.realpath(path), _describe(path))
    except OSError as error:
        raise DataError(f"{root}: cannot be read: {error.strerror or error}") from error
    return list(files.values())


def _describe(path: Path) -> SourceFile:
    kind = _kind_of(path)
    if not path.exists():
        raise DataError(f"{path}: no such file: {_CHECK_PATHS}")
    if kind is None:
        raise DataError(f"{path}: unknown kind of file: use {_KNOWN}")
    file = SourceFile(str(path), path, kind)
    if kind != "json":
        return file
    with _clear_errors(file):
        return file if holds_array(file) else SourceFile(str(path), path, "jsonl")


def _kind_of(path: Path) -> Kind | None:
    name = path.name.lower()
    kind = _KIND_OF_SUFFIX.get(Path(name.removesuffix(".gz")).suffix)
    return None if kind not in _TEXT_KINDS and name.endswith(".gz") else kind


def _expand_glob(pattern: str, split: str) -> list[Path]:
    paths: list[Path] = []
    matches = [Path(match) for match in sorted(glob.glob(pattern, recursive=True))]
    for match in matches:
        if match.is_dir():
            # "**" gives a folder and also what is in it: what is doubled is dropped by the caller.
            paths += _list_folder(match, split)
        elif _is_read(match):
            paths.append(match)
    if not matches:
        raise DataError(f"{pattern}: no file matches: {_CHECK_PATHS}")
    if not paths:
        raise DataError(f"{pattern}: matches no file of a known kind ({_KNOWN}), only {_name_some(matches)}")
    return sorted(paths)


def _walk_folder(folder: Path, split: str) -> list[Path]:
    paths = _list_folder(folder, split)
    if not paths:
        found = _name_some(list(folder.iterdir()))
        raise DataError(f"{folder}: this folder has no file of a known kind ({_KNOWN}), only {found}")
    return paths


def _list_folder(folder: Path, split: str) -> list[Path]:
    """Files of rows in a folder and below; links to folders are followed, each folder once."""
    paths: list[Path] = []
    seen: set[str] = set()
    for place, folders, names in os.walk(folder, followlinks=True):
        here = Path(place)
        if os.path.realpath(here) in seen:
            folders.clear()
            continue
        seen.add(os.path.realpath(here))
        if _SPLITS in names:
            folders[:] = [_choose_split(here, split)]
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        if _STATE in names and _INFO in names:
            paths += _read_state(here)
        else:
            paths += [here / name for name in sorted(names) if _is_read(here / name)]
    return sorted(paths)


def _is_read(path: Path) -> bool:
    """Whether a file that was found, not named, is taken for rows."""
    if path.name.startswith(".") or path.name in (_STATE, _INFO, _SPLITS):
        return False
    if path.suffix.lower() in _OTHER_PACKING and _kind_of(path.with_suffix("")) is not None:
        raise DataError(f"{path}: unknown kind of file: unpack it, or use .gz, or move it out of the folder")
    return _kind_of(path) is not None


def _read_state(folder: Path) -> list[Path]:
    """The data files of datasets.save_to_disk; what lies beside them is left over from computations."""
    try:
        entries = json.loads((folder / _STATE).read_bytes())["_data_files"]
        return [folder / entry["filename"] for entry in entries]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{folder / _STATE}: does not list the data files: save the data set again") from error


def _choose_split(folder: Path, split: str) -> str:
    """A saved DatasetDict has a folder for each split; reading all of them would train on the test rows."""
    if not (folder / split).is_dir():
        splits = sorted(entry.name for entry in folder.iterdir() if entry.is_dir())
        raise DataError(f"{folder}: has no split {split!r}: set split to one of {', '.join(splits)}")
    return split


def _name_some(paths: list[Path]) -> str:
    names = sorted(path.name for path in paths)
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more if names else "nothing"


def read_raw(file: SourceFile) -> Iterator[RawRow]:
    """Every row in order; memory does not grow with the file. A file without rows is an error."""
    found = False
    with _clear_errors(file):
        if file.path.stat().st_size:
            for raw in _READERS[file.kind](file):
                found = True
                yield raw
    if not found:
        raise DataError(f"{file.name}: no rows: remove the file from the configuration or fill it")


def parse_raw(file: SourceFile, raw: RawRow) -> Row:
    """The fields of a row, checked to be an object of plain values."""
    origin = file.origin(raw.number, raw.row)
    if isinstance(raw.payload, DataError):
        raise raw.payload
    if isinstance(raw.payload, bytes):
        named_json = ".json" in (suffix.lower() for suffix in file.path.suffixes[-2:])
        return Row(origin, parse_json_line(raw.payload, origin, named_json=named_json))
    return Row(origin, raw.payload)


def digest_file(file: SourceFile) -> str:
    """The SHA-256 of the file's bytes."""
    with _clear_errors(file), file.path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


@contextmanager
def _clear_errors(file: SourceFile) -> Iterator[None]:
    """What goes wrong below a row, in the disk, the packing or the table, as one sentence about the file."""
    try:
        yield
    except DataError:
        raise
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{file.name}: not a whole gzip file ({error}): copy or pack it again") from error
    except FileNotFoundError as error:
        raise DataError(f"{file.name}: no such file: {_CHECK_PATHS}") from error
    except (OSError, ValueError, NotImplementedError) as error:  # pyarrow raises each of them for a file it cannot read
        if isinstance(error, OSError) and error.errno:
            raise DataError(f"{file.name}: cannot be read: {error.strerror}") from error
        if file.kind in _TEXT_KINDS:
            raise
        words = " ".join(str(error).split())[:200]
        raise DataError(f"{file.name}: not a whole {file.kind} file ({words}): copy or write it again") from error
