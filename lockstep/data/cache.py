"""The cache of compiled rows: entries named by everything that can change them, built by one process at a time."""

from __future__ import annotations

import atexit
import contextlib
import errno
import hashlib
import importlib.util
import json
import os
import shutil
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from lockstep.config.data import DataConfig, SourceConfig
from lockstep.data.chat_template import Template
from lockstep.data.lock import Holder, Lock, Watch, break_lock, read_holder, try_lock
from lockstep.data.sources.files import digest_file
from lockstep.data.sources.rows import DataError, SourceFile
from lockstep.types import ImageProcessor, Tokenizer

Manifest = dict[str, Any]
Build = Callable[[Path, Callable[[int], None]], Manifest]
"""Writes an entry's files into a folder, reports the number of rows done now and then, and returns the manifest."""

# Settings that change compiled rows. Seed, weights, fractions, shuffling and the number of processes do not.
_SOURCE_SETTINGS = ("format", "columns", "roles", "input_template", "output_template", "converter")
_DATA_SETTINGS = ("train_on", "max_length", "truncate", "on_bad_row", "template_options")
_LIBRARIES = ("tokenizers", "transformers", "jinja2")
# Modules of this room that only read compiled rows, or have nothing to do with them.
NOT_COMPILING = ("answer_match.py", "inspect.py", "order.py", "packing.py", "prompts.py")
_POLL_S = 0.2
_REPORT_EVERY_S = 5.0
_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS)


def fingerprint(
    config: DataConfig,
    files: Sequence[tuple[SourceConfig, SourceFile]],
    tokenizer_digest: str,
    template: Template | None,
    images: ImageProcessor | None = None,
) -> str:
    """One key for all files of a split, each with the settings it is read with.

    Image files are not part of it: each is compared with its digest when it is read.
    """
    inputs: dict[str, object] = {
        "code": digest_code(),
        "libraries": {name: metadata.version(name) for name in _LIBRARIES},
        "tokenizer": tokenizer_digest,
        "template": None if template is None else template.source,
        "settings": {name: getattr(config, name) for name in _DATA_SETTINGS},
        "files": [_describe_file(source, file) for source, file in files],
    }
    if images is not None:
        inputs["images"] = [images.digest, config.image_folder, config.image_urls]
    return _digest(json.dumps(inputs, sort_keys=True, default=repr))


def digest_tokenizer(tokenizer: Tokenizer) -> str:
    """Of everything that decides its tokens."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    # The text starts with padding and truncation, which every call sets anew: they are left out.
    model = backend.to_str().partition('"added_tokens":')[2] if backend is not None else repr(tokenizer)
    special = {name: str(value) for name, value in tokenizer.special_tokens_map.items()}
    return _digest(json.dumps([type(tokenizer).__name__, _digest(model), special], sort_keys=True))


def _describe_file(source: SourceConfig, file: SourceFile) -> dict[str, object]:
    return {
        "name": file.name,
        "kind": file.kind,
        "digest": digest_file(file),
        "settings": {name: getattr(source, name) for name in _SOURCE_SETTINGS},
        "converter": _digest_converter(source.converter),
    }


def _digest_converter(converter: str | None) -> str | None:
    """Of the file of the user's module, without what that module imports."""
    if converter is None:
        return None
    module = converter.partition(":")[0]
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError, AttributeError):
        spec = None
    finally:
        sys.path.remove(here)
    if spec is None or spec.origin is None or not Path(spec.origin).is_file():
        return "not found"  # reading the rows will raise
    return hashlib.sha256(Path(spec.origin).read_bytes()).hexdigest()


@cache
def digest_code() -> str:
    """Of the code that compiles rows: after a change nothing that older code compiled is opened."""
    digest = hashlib.sha256()
    package = Path(__file__).parent
    for path in sorted(package.rglob("*.py")):
        if path.name not in NOT_COMPILING:
            digest.update(str(path.relative_to(package)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _digest_bytes(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", errors="surrogatepass")).hexdigest()


@dataclass(frozen=True)
class Entry:
    """A complete entry. `warning` says why it is not in the cache, or why it was built again."""

    path: Path
    manifest: Manifest
    warning: str | None = None


@dataclass(frozen=True)
class Patience:
    """How long to wait for another process: `silent_s` without a heartbeat, `stuck_s` without new rows."""

    stuck_s: float = 600.0
    silent_s: float = 30.0
    beat_s: float = 2.0


def cache_folder(setting: str | None) -> Path:
    """`setting` is DataConfig.cache_dir."""
    if setting is not None:
        return Path(setting).expanduser()
    root = os.environ.get("LOCKSTEP_CACHE")
    return (Path(root).expanduser() if root else Path.home() / ".cache" / "lockstep") / "data"


def obtain(
    folder: Path, key: str, build: Build, *, patience: Patience, on_wait: Callable[[Holder], None] | None = None
) -> Entry:
    """The entry of this key: opened, built here, or built by another process while this one waits."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        while True:
            if (entry := open_entry(folder / key)) is not None:
                return entry
            lock = try_lock(_lock_path(folder, key), beat_s=patience.beat_s)
            if lock is None:
                _wait(folder, key, patience, on_wait)
                continue
            try:
                return _build_locked(folder, key, build, lock)
            finally:
                lock.release()
    except OSError as error:
        # The entry may exist: another process may have thought this one dead, removed its folder and built the entry.
        return open_entry(folder / key) or _build_elsewhere(folder, build, error)


def open_entry(path: Path) -> Entry | None:
    """None where there is no entry, or it is not as its manifest says. Files with digests of their blocks are verified
    when they are read, and here only their sizes."""
    try:
        manifest = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
        if manifest.pop("sha256") != _digest(json.dumps(manifest, sort_keys=True)):
            return None
        sizes = {name: (path / name).stat().st_size for name in manifest["sizes"]}
        digests = {name: _digest_bytes(path / name) for name in manifest["digests"]}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return Entry(path, manifest) if (sizes, digests) == (manifest["sizes"], manifest["digests"]) else None


def discard(entry: Entry) -> None:
    """Remove an entry that was found damaged, unless another process has already put a new one in its place."""
    current = open_entry(entry.path)
    if current is None or current.manifest["made"] == entry.manifest["made"]:
        with contextlib.suppress(OSError):
            _remove(entry.path)


def _build_locked(folder: Path, key: str, build: Build, lock: Lock) -> Entry:
    if (entry := open_entry(folder / key)) is not None:  # finished between our check and our lock
        return entry
    sweep(folder)
    warning = None
    if (folder / key).exists():  # damaged, or open_entry would have returned it
        _remove(folder / key)
        warning = f"compiled rows in the data cache {folder} were damaged, and have been compiled again"
    partial = folder / f"{key}.making-{lock.token}"
    try:
        partial.mkdir()
        manifest = _build_into(partial, build, lock)
        os.rename(partial, folder / key)
        return Entry(folder / key, manifest, warning)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _build_into(folder: Path, build: Build, lock: Lock | None) -> Manifest:
    def on_rows(rows: int) -> None:
        if lock is not None:
            lock.rows = rows

    manifest = build(folder, on_rows)
    written = sorted(folder.iterdir())
    manifest["made"] = uuid.uuid4().hex
    manifest["sizes"] = {path.name: path.stat().st_size for path in written}
    others = [path for path in written if path.name not in manifest.get("blocks", {})]
    manifest["digests"] = {path.name: _digest_bytes(path) for path in others}
    with (folder / "manifest.json").open("w", encoding="utf-8") as file:
        json.dump({**manifest, "sha256": _digest(json.dumps(manifest, sort_keys=True))}, file)
        file.flush()
        os.fsync(file.fileno())
    return manifest


def _build_elsewhere(folder: Path, build: Build, reason: OSError) -> Entry:
    """Where the cache cannot be written: in a temporary folder that is removed when this process ends."""
    temporary: Path | None = None
    try:
        temporary = Path(tempfile.mkdtemp(prefix="lockstep-data-"))
        manifest = _build_into(temporary, build, None)
    except BaseException as error:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
        if not isinstance(error, OSError) or (temporary is not None and error.errno not in _UNWRITABLE):
            raise
        raise DataError(
            f"compiled rows can be written neither to {folder} ({reason.strerror or reason}) nor to a temporary folder "
            f"({error.strerror or error}): free some space, or set data.cache_dir to a folder you may write to"
        ) from error
    atexit.register(shutil.rmtree, temporary, ignore_errors=True)
    return Entry(
        temporary,
        manifest,
        f"the data cache {folder} cannot be written ({reason.strerror or reason}), so rows are compiled again at "
        "every start: set data.cache_dir to a folder with space that you may write to",
    )


def _wait(folder: Path, key: str, patience: Patience, on_wait: Callable[[Holder], None] | None) -> None:
    """Until the entry exists, the lock is free, or its holder is dead. A holder without progress is an error."""
    path = _lock_path(folder, key)
    watch = Watch(path)
    reported_at = float("-inf")
    while path.exists() and open_entry(folder / key) is None:
        holder = watch.holder
        if watch.silent_s > patience.silent_s or (holder is not None and holder.is_gone):
            break_lock(path, holder)
            return
        if holder is not None and watch.stuck_s > patience.stuck_s:
            raise DataError(
                f"{holder.host} (process {holder.pid}) prepares the data but has finished no row for "
                f"{patience.stuck_s:g} s, {holder.rows:,} so far: check that process, or end it and start again"
            )
        if on_wait is not None and holder is not None and time.monotonic() - reported_at >= _REPORT_EVERY_S:
            reported_at = time.monotonic()
            on_wait(holder)
        time.sleep(min(_POLL_S, patience.silent_s / 4, patience.stuck_s / 4))
        watch.look()


def sweep(folder: Path) -> None:
    """Remove partial entries of dead processes. A living one holds the lock with its folder's token."""
    for partial in folder.glob("*.making-*"):
        key, _, token = partial.name.partition(".making-")
        lock = _lock_path(folder, key)
        holder = read_holder(lock)
        if holder is None and lock.exists():
            continue  # being written right now
        if holder is not None and holder.token == token:
            if not holder.is_gone:
                continue
            break_lock(lock, holder)
        shutil.rmtree(partial, ignore_errors=True)


def _lock_path(folder: Path, key: str) -> Path:
    return folder / f"{key}.lock"


def _remove(path: Path) -> None:
    """Renamed first: a folder must never be seen half removed."""
    aside = path.with_name(f"{path.name}.making-{uuid.uuid4().hex}")
    with contextlib.suppress(FileNotFoundError):
        os.rename(path, aside)
        shutil.rmtree(aside, ignore_errors=True)
