"""From a request's configuration to one that may run here: files by name, and nothing reached that is not allowed.

What a text leads to is listed in `lockstep.config.reach`; what the operator allows is in `Allowed`. Every path is
resolved, links included, and must lie in what its sender may read or write.
"""

from __future__ import annotations

import copy
import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.config import ConfigError, RunConfig, check_config, resolve_config
from lockstep.config.reach import ReachingText, reach_of, texts_of
from lockstep.config.yaml_text import REQUEST_BOUNDS, check_tree, read_yaml
from lockstep.service.data_dir import DataDir
from lockstep.service.endpoints import Endpoints
from lockstep.service.errors import Forbidden, ServiceError, TooLarge
from lockstep.service.places import DATASET, Places, files_read
from lockstep.service.schemas import JobRequest

_SOURCE = "the configuration"
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_HUB_NAME = re.compile(r"[\w+-][\w.+=,@() -]*(/[\w+-][\w.+=,@() -]*)*")  # no part of it begins with a dot
_MAX_NAME = 1000


@dataclass(frozen=True)
class Allowed:
    """What the operator lets requests reach, besides the Hub, data sets, their senders' jobs and models/."""

    read: tuple[Path, ...] = ()
    write: tuple[Path, ...] = ()
    endpoints: tuple[str, ...] = ()
    code: bool = False


NOTHING_MORE = Allowed()


@dataclass(frozen=True)
class Admitted:
    config: RunConfig
    datasets: list[str]


@dataclass(frozen=True)
class _Sender:
    """`may_use_job`: whether a job is theirs. `files`: of the data sets that the configuration names."""

    may_use_job: Callable[[str], bool]
    files: frozenset[str]


class Admission:
    """`may_use_job` and `find_dataset` answer for the sender: whether a job is theirs, and a data set's file."""

    def __init__(self, data_dir: DataDir, allowed: Allowed = NOTHING_MORE) -> None:
        self._data_dir = data_dir
        self._allows_code = allowed.code
        self._endpoints = Endpoints(allowed.endpoints)
        self.places = Places(data_dir, allowed.read, allowed.write)

    def admit(
        self,
        request: dict[str, Any] | str,
        *,
        find_dataset: Callable[[str], Path],
        may_use_job: Callable[[str], bool],
    ) -> Admitted:
        tree, lines = _read(request)
        datasets: dict[str, Path] = {}

        def locate(value: str, reach: str) -> str:
            if reach == "rows" and value.startswith(DATASET):
                name = value.removeprefix(DATASET)
                datasets[name] = find_dataset(name)
                return str(datasets[name])
            return str(self.places.locate(value) or value)

        try:
            tree = _locate_all(tree, locate)
            sender = _Sender(may_use_job, frozenset(map(str, datasets.values())))
            config = resolve_config(tree, source=_SOURCE, places=lines, directory=self._data_dir.empty)
            json.dumps(config.model_dump(mode="json"), ensure_ascii=False).encode()  # half a character fits no file
            config = self._check_reach(config, sender)
        except (ConfigError, ServiceError):
            raise
        except (OSError, ValueError, RecursionError) as error:  # from paths and texts that no file and no encoding has
            raise ServiceError(f"{_SOURCE} holds a name, a text or a nesting that cannot be: {error}") from None
        check_config(config, launch_kinds=("local",))  # where jobs run, here or on a cluster, is the operator's choice
        return Admitted(config, sorted(datasets))

    def check_again(self, config: RunConfig, files: list[Path]) -> None:
        """Before an admitted configuration is started: what is allowed, and where links lead, may have changed since.

        Whose jobs it names was decided when it was admitted.
        """
        self._check_reach(config, _Sender(lambda job: True, frozenset(map(str, files))))

    def _check_reach(self, config: RunConfig, sender: _Sender) -> RunConfig:
        """The configuration with addresses as the operator wrote them, or the first refusal."""
        for text in texts_of(config):
            if text.reach == "text":
                continue
            if "\0" in text.value or len(text.value) > _MAX_NAME:
                raise ServiceError(f"{text.key}: {text.value[:80]!r} cannot be a name")
            match text.reach:
                case "code":
                    self._check_code(text)
                case "cluster":
                    raise Forbidden(f"{text.key}: the operator of this service decides that for all jobs: leave it out")
                case "address":
                    config = self._endpoints.settle(config, text)
                case "hub":
                    _check_hub_name(text)
                case "folder":
                    self._check_folder(text)
                case "file":
                    self._check_files(text, None)
                case "model" | "rows":
                    self._check_source(text, sender)
        return config

    def _check_code(self, text: ReachingText) -> None:
        if not self._allows_code:
            raise Forbidden(
                f"{text.key}: {text.value} would run code that this service was not told to trust: leave it out, or "
                "ask the operator to start the service with --allow-code"
            )

    def _check_source(self, text: ReachingText, sender: _Sender) -> None:
        """A data set's file may only be rows: nothing else is made of what others have uploaded."""
        if text.reach == "rows" and text.value in sender.files:
            return
        if _looks_like_path(text.value):
            self._check_files(text, sender.may_use_job)
        elif not _HUB_ID.fullmatch(text.value):
            raise ServiceError(
                f"{text.key}: {text.value!r} is neither an absolute path nor the name of something on the Hub"
            )

    def _check_files(self, text: ReachingText, may_use_job: Callable[[str], bool] | None) -> None:
        for path in files_read(text.value):
            if not self.places.may_read(path, may_use_job):
                raise Forbidden(
                    f"{text.key}: {text.value} is not in a folder that this service may read for this, or a link in it "
                    "leads out: upload the rows as a data set, name a model of the Hub, or ask the operator for "
                    "--allow-path"
                )

    def _check_folder(self, text: ReachingText) -> None:
        if not self.places.may_write(Path(text.value).expanduser().resolve()):
            raise Forbidden(
                f"{text.key}: {text.value} is not in a folder that jobs may write to: leave it out, or ask the "
                "operator for --allow-write"
            )


def _looks_like_path(value: str) -> bool:
    return value.startswith(("/", "~", ".")) or ".." in value.split("/")


def _check_hub_name(text: ReachingText) -> None:
    if not _HUB_NAME.fullmatch(text.value):
        raise ServiceError(f"{text.key}: {text.value!r} is no name of a branch, split or subset")


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


def _locate_all(value: Any, locate: Callable[[str, str], str], key: str = "") -> Any:
    """The tree with `dataset:NAME`, `job:ID` and the like as the files they stand for, wherever a file may be named."""
    if isinstance(value, dict):
        return {
            name: _locate_all(child, locate, f"{key}.{name}" if key else str(name)) for name, child in value.items()
        }
    if isinstance(value, list):
        return [_locate_all(child, locate, key) for child in value]
    reach = reach_of(key) if isinstance(value, str) else None
    return locate(value, reach) if reach in ("model", "rows", "file", "folder") else value
