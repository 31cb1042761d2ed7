"""A run directory that is kept in an object store, for machines whose own disk goes with them: by fsspec's addresses.

A checkpoint counts there as here once its manifest is there, which is copied last and removed first.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from lockstep.config import ConfigError
from lockstep.rundir import MANIFEST, RunDir

_RESULTS = ("export", "tensorboard", "samples")
_LOOSE = ("config*.yaml", "*.jsonl", "logs/*.log", "logs/*.error.json")


class RunStore:
    """One run's folder at an address. One process keeps it."""

    def __init__(self, address: str) -> None:
        if importlib.util.find_spec("fsspec") is None:
            raise ConfigError("run_store needs fsspec: pip install 'lockstep[kubernetes]'")
        import fsspec

        try:
            self._files, self._root = fsspec.core.url_to_fs(address)
        except (ImportError, ValueError) as error:
            raise ConfigError(f"run_store {address}: {str(error).splitlines()[0]}") from error
        self.address = address
        self._copied: dict[str, tuple[int, int]] = {}  # by name: size and time of what is there

    def restore(self, run_dir: Path) -> int | None:
        """Into a folder that holds no run yet: what the store has. Returns the step it can go on from."""
        if (run_dir / "config.yaml").exists() or not self._files.exists(f"{self._root}/config.yaml"):
            return None
        for name in self._names():
            parts = Path(name).parts
            whole = parts[0] != "checkpoints" or self._files.exists(f"{self._root}/{'/'.join(parts[:2])}/{MANIFEST}")
            if whole and name != "config.yaml":
                self._fetch(name, run_dir)
        self._fetch("config.yaml", run_dir)  # last: with it the folder is a run
        saved = RunDir(run_dir).list_checkpoints()
        return saved[-1].step if saved else None

    def keep(self, run_dir: Path) -> None:
        """Copy what is new. The records are as of before the checkpoints: none names one that is not there."""
        files = [file for pattern in _LOOSE for file in sorted(run_dir.glob(pattern)) if file.is_file()]
        records = [(file, file.read_bytes()) for file in files if self._has_changed(file, run_dir)]
        status = run_dir / "status.json"
        state = status.read_bytes() if status.exists() else None
        for checkpoint in RunDir(run_dir).list_checkpoints():
            self._put_folder(checkpoint.path, run_dir, last=MANIFEST)
        for file, content in records:
            self._put(file, run_dir, content)
        self._forget_checkpoints(run_dir)
        if state is not None:
            self._put(status, run_dir, state)

    def finish(self, run_dir: Path) -> None:
        """Also what is written at the end."""
        for name in _RESULTS:
            self._put_folder(run_dir / name, run_dir)
        self.keep(run_dir)

    def _names(self) -> list[str]:
        root = self._root.rstrip("/")
        found = [str(path).removeprefix(root).lstrip("/") for path in self._files.find(root)]
        return [name for name in found if ".." not in Path(name).parts]

    def _fetch(self, name: str, run_dir: Path) -> None:
        target = run_dir / name
        target.parent.mkdir(parents=True, exist_ok=True)
        self._files.get_file(f"{self._root}/{name}", str(target))

    def _put_folder(self, folder: Path, run_dir: Path, last: str = "") -> None:
        files = [file for file in sorted(folder.rglob("*")) if file.is_file()]
        for file in sorted(files, key=lambda file: file.name == last):
            if self._has_changed(file, run_dir):
                self._put(file, run_dir)

    def _has_changed(self, file: Path, run_dir: Path) -> bool:
        return self._copied.get(_name(file, run_dir)) != _stamp(file)

    def _put(self, file: Path, run_dir: Path, content: bytes | None = None) -> None:
        name, stamp = _name(file, run_dir), _stamp(file)
        target = f"{self._root}/{name}"
        self._files.makedirs(target.rpartition("/")[0], exist_ok=True)
        if content is None:
            self._files.put_file(str(file), target)
        else:
            self._files.pipe_file(target, content)
        self._copied[name] = stamp

    def _forget_checkpoints(self, run_dir: Path) -> None:
        """Those that are gone here. Where none is left, something is wrong here, and they stay."""
        here = {checkpoint.path.name for checkpoint in RunDir(run_dir).list_checkpoints()}
        root = f"{self._root}/checkpoints"
        if not here or not self._files.exists(root):
            return
        for entry in self._folders(root):
            if entry not in here:
                if self._files.exists(f"{root}/{entry}/{MANIFEST}"):
                    self._files.rm_file(f"{root}/{entry}/{MANIFEST}")
                self._files.rm(f"{root}/{entry}", recursive=True)

    def _folders(self, root: str) -> list[str]:
        entries: list[Any] = self._files.ls(root, detail=True)
        return [Path(entry["name"]).name for entry in entries if entry["type"] == "directory"]


def _name(file: Path, run_dir: Path) -> str:
    return file.relative_to(run_dir).as_posix()


def _stamp(file: Path) -> tuple[int, int]:
    found = file.stat()
    return found.st_size, found.st_mtime_ns
