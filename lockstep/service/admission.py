"""From a request's configuration to one that may run here: data sets by name, paths confined, no code from outside.

Every path is resolved, symlinks included, and must lie in what its sender may read.
"""

from __future__ import annotations

import copy
import glob
import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.config import ConfigError, RunConfig, check_config, resolve_config
from lockstep.config.data import PARTS
from lockstep.config.yaml_text import REQUEST_BOUNDS, check_tree, read_yaml
from lockstep.service.data_dir import DataDir
from lockstep.service.errors import Forbidden, ServiceError, TooLarge
from lockstep.service.schemas import JobRequest

DATASET = "dataset:"
_SOURCE = "the configuration"
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
# Text for people or for the template engine: whatever it looks like, it is never opened as a file.
_FREE_TEXT = {"name", "input_template", "output_template", "columns", "roles", "template_options", "targets"}
_MAX_MATCHES = 10_000


@dataclass(frozen=True)
class Admitted:
    config: RunConfig
    datasets: list[str]


class Admission:
    """`may_use_job` and `find_dataset` answer for the sender: whether a job is theirs, and a data set's file."""

    def __init__(self, data_dir: DataDir, allowed: Sequence[Path] = (), *, allow_code: bool = False) -> None:
        self._data_dir = data_dir
        self._allowed = [data_dir.models, *(Path(path).expanduser().resolve() for path in allowed)]
        self._allow_code = allow_code

    def admit(
        self,
        request: dict[str, Any] | str,
        *,
        find_dataset: Callable[[str], Path],
        may_use_job: Callable[[str], bool],
    ) -> Admitted:
        tree, places = _read(request)
        datasets: list[str] = []
        _name_datasets(tree, find_dataset, datasets)
        files = {str(find_dataset(name)) for name in datasets}
        try:
            config = resolve_config(tree, source=_SOURCE, places=places, directory=self._data_dir.empty)
            resolved = config.model_dump(mode="json")
            json.dumps(resolved, ensure_ascii=False).encode()  # half a character could not be written to any file
            for key, value in _strings(resolved):
                self._check(key, value, may_use_job, files)
        except (ConfigError, ServiceError):
            raise
        except (OSError, ValueError, RecursionError) as error:  # from paths and texts that no file and no encoding has
            raise ServiceError(f"{_SOURCE} holds a name, a text or a nesting that cannot be: {error}") from None
        check_config(config, launch_kinds=("local",))  # jobs run on this machine, beside the service
        if config.model.trust_remote_code and not self._allow_code:
            raise _code_refused("model.trust_remote_code")
        return Admitted(config, sorted(set(datasets)))

    def _check(self, key: str, value: str, may_use_job: Callable[[str], bool], own_files: set[str]) -> None:
        leaf = key.rsplit(".", 1)[-1]
        if leaf == "converter" and not self._allow_code:
            raise _code_refused(key)
        if value in own_files:
            return
        if "\0" in value or "://" in value:
            raise ServiceError(f"{key}: {value!r} is neither a path nor the name of something on the Hub")
        looks_like_path = value.startswith(("/", "~", ".")) or ".." in value.split("/")
        if not looks_like_path:
            if leaf == "path" and not _HUB_ID.fullmatch(value):
                raise ServiceError(f"{key}: {value!r} is neither an absolute path nor the name of something on the Hub")
            return
        for path in _paths_of(value):
            if not self._may_read(path, may_use_job):
                raise Forbidden(
                    f"{key}: {value} is not in a folder that this service may read: upload the rows as a data set, "
                    "name a model of the Hub, or ask the operator for --allow-path"
                )

    def _may_read(self, path: Path, may_use_job: Callable[[str], bool]) -> bool:
        if any(path.is_relative_to(folder.resolve()) for folder in self._allowed):
            return True
        if path.is_relative_to(self._data_dir.jobs):
            parts = path.relative_to(self._data_dir.jobs).parts
            return bool(parts) and may_use_job(parts[0])
        return False


def digest_of(request: JobRequest) -> str:
    """Of what was asked for, so that the same submission again is known to be the same."""
    tree, _ = _read(request.config)
    content = {**request.model_dump(mode="json", exclude={"id"}), "config": tree}
    text = json.dumps(content, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _read(request: dict[str, Any] | str) -> tuple[dict[str, Any], dict[str, str]]:
    """The sections, and where each key was written if they were sent as text."""
    if isinstance(request, str):
        _check_length(len(request))
        tree, lines = read_yaml(request, _SOURCE, REQUEST_BOUNDS)
        if not isinstance(tree, dict):
            raise ConfigError(f"{_SOURCE}: expected sections (model:, data:, ...)")
        return tree, {key: f"{_SOURCE}:{line}" for key, line in lines.items()}
    check_tree(request, _SOURCE, REQUEST_BOUNDS)
    _check_length(len(json.dumps(request, default=str)))
    return copy.deepcopy(request), {}


def _check_length(size: int) -> None:
    if size > REQUEST_BOUNDS.characters:
        raise TooLarge(f"{_SOURCE} has {size:,} characters, and {REQUEST_BOUNDS.characters:,} are allowed")


def _name_datasets(tree: dict[str, Any], find_dataset: Callable[[str], Path], names: list[str]) -> None:
    """`dataset:NAME` becomes the data set's file, wherever a source may be named."""

    def replace(value: object) -> object:
        if isinstance(value, str) and value.startswith(DATASET):
            name = value.removeprefix(DATASET)
            path = str(find_dataset(name))
            names.append(name)
            return path
        if isinstance(value, list):
            return [replace(item) for item in value]
        if isinstance(value, dict) and "path" in value:
            return {**value, "path": replace(value["path"])}
        return value

    data = tree.get("data")
    if isinstance(data, dict):
        tree["data"] = {**data, **{part: replace(data[part]) for part in PARTS if part in data}}


def _strings(value: object, key: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, dict):
        for name, child in value.items():
            if name not in _FREE_TEXT:
                yield from _strings(child, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list):
        for child in value:
            yield from _strings(child, key)


def _paths_of(value: str) -> Iterator[Path]:
    """The path itself, and all that it matches where it is a pattern: each may be a symlink elsewhere."""
    path = Path(value).expanduser()
    if not any(sign in value for sign in "*?["):
        yield path.resolve()
        return
    fixed = Path(*_parts_before_pattern(path))
    yield fixed.resolve()
    for number, match in enumerate(glob.iglob(str(path), recursive=True)):
        if number == _MAX_MATCHES:
            raise ServiceError(f"{value} matches more than {_MAX_MATCHES:,} files: name a folder instead")
        yield Path(match).resolve()


def _parts_before_pattern(path: Path) -> list[str]:
    parts: list[str] = []
    for part in path.parts:
        if any(sign in part for sign in "*?["):
            break
        parts.append(part)
    return parts


def _code_refused(key: str) -> Forbidden:
    return Forbidden(
        f"{key} runs code that comes with a request: this service must be started with --allow-code for it"
    )
