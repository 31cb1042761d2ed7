"""From a source (a file, a folder, a glob or a Hub data set) to its files, and from a file to rows, one at a time."""

from __future__ import annotations

import glob
import gzip
import hashlib
import json
import os
import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lockstep.config.data import SUFFIXES, SourceConfig, is_local
from lockstep.config.hub import is_hub_up
from lockstep.data.sources.json_rows import holds_array, parse_json_line, read_json_array, read_json_lines
from lockstep.data.sources.rows import DataError, Kind, RawRow, Row, SourceFile
from lockstep.data.sources.table_rows import count_arrow_rows, read_arrow, read_csv, read_parquet

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
            # "**" matches a folder and also what is in it: the caller removes duplicates.
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
        others = _name_some(list(folder.iterdir()))
        if not others:
            raise DataError(f"{folder}: this folder is empty: {_CHECK_PATHS}")
        raise DataError(f"{folder}: this folder has no file of a known kind ({_KNOWN}), only {others}")
    return paths


def _list_folder(folder: Path, split: str) -> list[Path]:
    """Files of rows in a folder and below; links to folders are followed, each folder once."""
    paths: list[Path] = []
    seen: set[str] = set()
    for root, folders, names in os.walk(folder, followlinks=True):
        here = Path(root)
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
    """Whether a file that was found in a folder, not named by the user, holds rows."""
    if path.name.startswith(".") or path.name in (_STATE, _INFO, _SPLITS):
        return False
    if path.suffix.lower() in _OTHER_PACKING and _kind_of(path.with_suffix("")) is not None:
        raise DataError(f"{path}: unknown kind of file: unpack it, or use .gz, or move it out of the folder")
    return _kind_of(path) is not None


def _read_state(folder: Path) -> list[Path]:
    """The data files of datasets.save_to_disk; other files beside them are left over from computations."""
    try:
        entries = json.loads((folder / _STATE).read_bytes())["_data_files"]
        names = [str(entry["filename"]) for entry in entries]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{folder / _STATE}: does not list the data files: save the data set again") from error
    for name in names:
        if "/" in name or name == "..":  # a data set of others must not choose which files of ours are read
            raise DataError(f"{folder / _STATE}: names {name!r}, which is not in its folder: save the data set again")
    return [folder / name for name in names]


def _choose_split(folder: Path, split: str) -> str:
    """A saved DatasetDict has a folder for each split; reading all of them would train on the test rows."""
    if "/" in split or split in (".", "..") or not (folder / split).is_dir():
        splits = sorted(entry.name for entry in folder.iterdir() if entry.is_dir())
        raise DataError(f"{folder}: has no split {split!r}: set split to one of {', '.join(splits)}")
    return split


def _name_some(paths: list[Path]) -> str:
    names = sorted(path.name for path in paths)
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more


def read_raw(file: SourceFile) -> Iterator[RawRow]:
    """Every row in order; memory does not grow with the file. A file without rows is an error."""
    is_empty = True
    with _clear_errors(file):
        if file.path.stat().st_size:
            for raw in _READERS[file.kind](file):
                is_empty = False
                yield raw
    if is_empty:
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
    """Errors of the disk, gzip or pyarrow as one sentence about the file."""
    try:
        yield
    except DataError:
        raise
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{file.name}: not a whole gzip file ({error}): copy or pack it again") from error
    except FileNotFoundError as error:
        raise DataError(f"{file.name}: no such file: {_CHECK_PATHS}") from error
    except (OSError, ValueError, NotImplementedError) as error:  # pyarrow raises each of these
        if isinstance(error, OSError) and error.errno:
            raise DataError(f"{file.name}: cannot be read: {error.strerror}") from error
        if file.kind in _TEXT_KINDS:
            raise
        reason = " ".join(str(error).split())[:200]
        raise DataError(f"{file.name}: not a whole {file.kind} file ({reason}): copy or write it again") from error


_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


def find_hub_files(source: SourceConfig) -> list[SourceFile]:
    """The Arrow files of one split, in order."""
    missing = f"{source.path}: no such file or folder"
    if not _NAME.fullmatch(source.path):
        raise DataError(f"{missing}: check data.train, data.validation and data.test")
    if "[" in source.split:
        # The library's files are those of the whole split: reading them would give more rows than requested.
        raise DataError(
            f"{source.path}: split {source.split!r} is a part of a split: name a whole one, or write the rows you "
            "want to a file and name that"
        )
    try:
        import datasets
    except ImportError as error:
        raise DataError(f"{missing}; to read it from the Hugging Face Hub: pip install 'lockstep[data]'") from error
    with _offline_if_unreachable(datasets) as is_reachable, _own_files_only(datasets):
        try:
            loaded = datasets.load_dataset(
                source.path, name=source.subset, split=source.split, revision=source.revision, keep_in_memory=False
            )
        except Exception as error:  # the library and its network stack raise anything
            raise DataError(_explain(error, source, is_reachable=is_reachable)) from error
    files = _name_files(loaded, source)
    if source.revision and not is_reachable and not all(source.revision in file.path.parts for file in files):
        # Without the Hub the library takes its newest copy, of any revision. Folders are named by commit.
        raise DataError(
            f"{source.path}: the Hugging Face Hub could not be reached, and the copy on this machine is not known "
            f"to be revision {source.revision}: check the network, or name the full commit"
        )
    return files


def _name_files(loaded: Any, source: SourceConfig) -> list[SourceFile]:
    label = f"{source.path}{'/' + source.subset if source.subset else ''}[{source.split}]"
    paths = [Path(entry["filename"]) for entry in loaded.cache_files]
    names = [label] if len(paths) == 1 else [f"{label} file {number}" for number, _ in enumerate(paths, start=1)]
    files = [SourceFile(name, path, "arrow") for name, path in zip(names, paths)]
    num_rows = sum(count_arrow_rows(file) for file in files)
    if num_rows != loaded.num_rows or not files:
        raise DataError(
            f"{label}: its files hold {num_rows} rows, the split {loaded.num_rows}: save the split with to_parquet and "
            "name that file"
        )
    return files


@contextmanager
def _offline_if_unreachable(datasets: Any) -> Iterator[bool]:
    """Whether the Hub answers. If not, only local copies are tried: the library's retries take long."""
    was_offline = datasets.config.HF_HUB_OFFLINE
    is_reachable = not was_offline and is_hub_up(datasets.config.HF_ENDPOINT)
    datasets.config.HF_HUB_OFFLINE = not is_reachable
    try:
        yield is_reachable
    finally:
        datasets.config.HF_HUB_OFFLINE = was_offline


@contextmanager
def _own_files_only(datasets: Any) -> Iterator[None]:
    """A data set's card names its files, and the library takes any path of this machine and any address there.

    So that whoever writes a card does not choose what is read here. Can go when the library refuses it itself.
    """
    module = datasets.data_files
    resolve: Callable[..., list[str]] = module.resolve_pattern

    def resolve_own(pattern: str, base_path: str, *rest: object, **options: object) -> list[str]:
        is_remote = pattern.startswith("hf://") and "::" not in pattern
        if ".." in pattern.split("/") or (not is_remote and (":" in pattern or pattern.startswith(("/", "~", "\\")))):
            raise DataError(f"its card names {pattern}, which is not a file of the data set")
        return resolve(pattern, base_path, *rest, **options)

    module.resolve_pattern = resolve_own
    try:
        yield
    finally:
        module.resolve_pattern = resolve


def _explain(error: Exception, source: SourceConfig, *, is_reachable: bool) -> str:
    missing = f"{source.path}: no such file or folder"
    if not is_reachable and isinstance(error, (ConnectionError, FileNotFoundError)):
        return f"{missing}, and the Hugging Face Hub could not be reached: check data.train, or the network"
    if isinstance(error, FileNotFoundError):
        return f"{missing}, and the Hugging Face Hub has no such data set, or not for you: check data.train"
    reason = " ".join(str(error).split())
    return f"{source.path}: the Hub's data set cannot be loaded ({reason}): check its split, subset and revision"
