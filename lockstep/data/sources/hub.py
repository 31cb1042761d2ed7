"""Data sets of the Hugging Face Hub: downloaded once by the datasets library, then read as its Arrow files.

Must not know what the rows hold. Code that a data set brings along is never run.
"""

from __future__ import annotations

import re
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lockstep.config.data import SourceConfig
from lockstep.data.sources.rows import DataError, SourceFile
from lockstep.data.sources.table_rows import count_arrow_rows

_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
_ANSWER_TIMEOUT_S = 5.0


def find_hub_files(source: SourceConfig) -> list[SourceFile]:
    """The Arrow files of one split, in order."""
    missing = f"{source.path}: no such file or folder"
    if not _NAME.fullmatch(source.path):
        raise DataError(f"{missing}: check data.train, data.validation and data.test")
    if "[" in source.split:
        # The library's files are those of the whole split: reading them would give more rows than asked for.
        raise DataError(
            f"{source.path}: split {source.split!r} is a part of a split: name a whole one, or write the rows you "
            "want to a file and name that"
        )
    try:
        import datasets
    except ImportError as error:
        raise DataError(f"{missing}; to read it from the Hugging Face Hub: pip install 'lockstep[data]'") from error
    with _offline_if_unreachable(datasets) as is_reached:
        try:
            loaded = datasets.load_dataset(
                source.path, name=source.subset, split=source.split, revision=source.revision, keep_in_memory=False
            )
        except Exception as error:  # whatever the library and its network stack raise
            raise DataError(_explain(error, source, is_reached=is_reached)) from error
    files = _name_files(loaded, source)
    if source.revision and not is_reached and not all(source.revision in file.path.parts for file in files):
        # Without the Hub the library takes the newest copy it has, of whatever revision. Folders are named by commit.
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
    """Whether the Hub answers. If not, only what is on this machine is tried: the library's retries take long."""
    was_offline = datasets.config.HF_HUB_OFFLINE
    is_reached = not was_offline and _answers(datasets.config.HF_ENDPOINT)
    datasets.config.HF_HUB_OFFLINE = not is_reached
    try:
        yield is_reached
    finally:
        datasets.config.HF_HUB_OFFLINE = was_offline


def _answers(url: str) -> bool:
    try:
        urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=_ANSWER_TIMEOUT_S).close()
    except urllib.error.HTTPError as error:
        return error.code < 500  # a proxy, or a Hub in trouble
    except urllib.error.URLError as error:
        # Certificates may be set for the library alone.
        return isinstance(error.reason, ssl.SSLError)
    except OSError:
        return False
    return True


def _explain(error: Exception, source: SourceConfig, *, is_reached: bool) -> str:
    missing = f"{source.path}: no such file or folder"
    if not is_reached and isinstance(error, (ConnectionError, FileNotFoundError)):
        return f"{missing}, and the Hugging Face Hub could not be reached: check data.train, or the network"
    if isinstance(error, FileNotFoundError):
        return f"{missing}, and the Hugging Face Hub has no such data set, or not for you: check data.train"
    words = " ".join(str(error).split())
    return f"{source.path}: the Hub's data set cannot be loaded ({words}): check its split, subset and revision"
