"""The run directory: the contract between trainer, command, service and page.

One owner writes (rank 0 of the run, or the launcher once every worker is gone); everybody else reads.
Small files are replaced atomically; a checkpoint exists once its folder carries its final name.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import stat
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from lockstep.config import ConfigError, RunConfig, load_config
from lockstep.config.renames import announce_rename

# Former names of metrics, as runs of before wrote them -> the names of today.
METRIC_ALIASES = {
    "cut": "truncated_frac",
    "length": "completion_length",
    "moved": "policy_shift",
    "logprob_gap": "sampler_trainer_logprob_diff",
    "logprob_gap_max": "sampler_trainer_logprob_diff_max",
    "flat_groups": "zero_std_groups",
    "tainted": "reward_failed",
    "correction": "importance_weight",
}
MANIFEST = "manifest.json"
_CHECKPOINT_NAME = re.compile(r"step-(\d+)$")
_ADDED_CONFIG_NAME = re.compile(r"config-(\d+)\.yaml$")
# interrupted: asked to stop, with a checkpoint of its last step. Its ranks end with EXIT_INTERRUPTED (sysexits.h: try
# again later), so that whoever asked can start it again.
FINISHED_STATES = frozenset({"completed", "failed", "cancelled", "interrupted"})
EXIT_INTERRUPTED = 75
# Fields of status.json that readers compute with or show as text: a value of another kind is taken for none.
_STATUS_COUNTS = frozenset({"step", "total_steps", "epoch", "tokens", "tokens_per_s", "best_step", "ranks"})
_STATUS_LOSSES = frozenset({"loss", "validation_loss", "best_validation_loss", "best_reward", "merge_drift"})
_STATUS_TIMES = frozenset({"started_at", "updated_at", "completed_at"})
_STATUS_NUMBERS = _STATUS_COUNTS | _STATUS_LOSSES | _STATUS_TIMES
_STATUS_TEXTS = frozenset({"state", "phase", "error", "launch", "precision", "export"})
_NOT_THERE = (errno.ENOENT, errno.ENOTDIR)
_NOT_ALLOWED = (errno.EACCES, errno.EPERM, errno.ELOOP)


@dataclass(frozen=True)
class Checkpoint:
    """A committed checkpoint: `extra` is what the loop wrote beside the tensors."""

    path: Path
    step: int
    extra: dict[str, Any]
    validation_loss: float | None = None


class CheckpointUnreadable(ConfigError):
    """The system did not let a checkpoint be read, so whether it is sound is not known. Nothing was changed."""

    def __init__(self, path: Path, error: OSError) -> None:
        where = error.filename or path
        super().__init__(
            f"{where} cannot be read ({error.strerror or error}), so it is not known whether the checkpoint is sound: "
            "make it readable for this user and try again; nothing was changed"
        )
        # Rights are for the user to mend; a disk or a network file system may answer the next time.
        self.exit_code = 2 if error.errno in _NOT_ALLOWED else 1


class MetricRecord(dict[str, Any]):
    """A line of metrics.jsonl by current metric names, whatever names the run wrote; former names can be asked for."""

    def __init__(self, record: Mapping[str, object]) -> None:
        super().__init__({METRIC_ALIASES.get(name, name): value for name, value in record.items()})

    def __missing__(self, name: str) -> Any:
        if name not in METRIC_ALIASES:
            raise KeyError(name)
        return self[current_metric_name(name)]

    def get(self, name: str, default: Any = None) -> Any:
        return super().get(current_metric_name(name), default)


def current_metric_name(name: str) -> str:
    """The name today of a metric that may be asked for by its former name."""
    if name in METRIC_ALIASES:
        announce_rename(f"metric {name}", METRIC_ALIASES[name])
    return METRIC_ALIASES.get(name, name)


class PhaseClock:
    """Seconds of a run by what it did: every phase that is not one of a step or after it belongs to the start."""

    _NAMES: Mapping[str, str] = {
        "evaluating": "evaluation",
        "checkpointing": "checkpoints",
        "exporting": "export",
        **{phase: phase for phase in ("sampling", "training", "publishing")},
    }

    def __init__(self) -> None:
        self.current, self._since = "start", time.monotonic()
        self._seconds: dict[str, float] = {}

    def enter(self, phase: str) -> dict[str, float]:
        """The seconds until now. From now on they are those of `phase`."""
        now = time.monotonic()
        self._seconds[self.current] = self._seconds.get(self.current, 0.0) + now - self._since
        self.current, self._since = self._NAMES.get(phase, "start"), now
        return {name: round(seconds, 3) for name, seconds in self._seconds.items()}


# Fields are merged into what is there, and engines in processes are watched by a thread.
_STATUS_LOCK = threading.RLock()


class RunDir:
    """A run directory opened for reading, or by its one owner for writing."""

    def __init__(self, path: str | Path, *, owner: bool = False) -> None:
        self.path = Path(path)
        self.owner = owner
        self.clock: PhaseClock | None = None
        """Of the process that trains: the status then says how long each phase took."""

    @classmethod
    def create(cls, path: str | Path, config: RunConfig) -> RunDir:
        """Make the directory and write the resolved configuration, once."""
        run = cls(path, owner=True)
        try:
            run.path.mkdir(parents=True, exist_ok=True)
            if run.config_path.exists():
                raise ConfigError(
                    f"{run.path} already holds a run: choose another --run-dir, or continue it with --resume"
                )
            for folder in (run.logs, run.checkpoints):
                folder.mkdir(exist_ok=True)
            write_atomically(run.config_path, config.to_yaml())
        except OSError as error:
            raise ConfigError(f"cannot create the run directory {run.path}: {error.strerror or error}") from error
        run.write_status(state="created")
        return run

    @property
    def config_path(self) -> Path:
        return self.path / "config.yaml"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def export(self) -> Path:
        return self.path / "export"

    def config(self) -> RunConfig:
        """The one in force: config.yaml, or the last that a resume added."""
        if not self.config_path.exists():
            raise ConfigError(f"{self.path} is not a run directory: it has no config.yaml")
        return load_config(self.newest_config_path)

    @property
    def newest_config_path(self) -> Path:
        """config.yaml is the first; a run that went on with other settings also has config-2.yaml and so on."""
        added = [(_ADDED_CONFIG_NAME.match(path.name), path) for path in self.path.glob("config-*.yaml")]
        numbered = [(int(name[1]), path) for name, path in added if name is not None]
        return max(numbered)[1] if numbered else self.config_path

    def add_config(self, config: RunConfig) -> Path:
        """From now on this one is in force. Those before it stay. The owner only."""
        newest = _ADDED_CONFIG_NAME.match(self.newest_config_path.name)
        path = self.path / f"config-{int(newest[1]) + 1 if newest else 2}.yaml"
        if self.owner:
            write_atomically(path, config.to_yaml())
        return path

    # --- status, metrics, events ---------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """Its state is unknown where there is none yet, or none that can be read; the error then says so."""
        path = self.path / "status.json"
        try:
            status = read_json_object(path)
        except FileNotFoundError:
            return {"state": "unknown"}
        except OSError as error:
            return {"state": "unknown", "error": f"{path} cannot be read: {error.strerror or error}"}
        except ValueError as error:  # lost in a power cut, say
            return {"state": "unknown", "error": str(error)}
        sound = {name: value for name, value in status.items() if _is_of_its_kind(name, value)}
        return {"state": "unknown", **sound}

    def write_status(self, **fields: object) -> None:
        """Merge fields into status.json, atomically. The owner only."""
        if self.owner:
            with _STATUS_LOCK:
                self._write_status(fields)

    def _write_status(self, fields: dict[str, object]) -> None:
        if self.clock is not None and "phase" in fields:
            fields["seconds"] = self.clock.enter(str(fields["phase"]))
        text = json.dumps({**self.status(), **fields, "updated_at": time.time()}, indent=1)
        try:
            write_atomically(self.path / "status.json", text, durable=False)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            self.sweep()  # on a full disk, an unfinished checkpoint makes room for the status that says so
            write_atomically(self.path / "status.json", text, durable=False)

    def log_metrics(self, record: Mapping[str, object]) -> None:
        self._append("metrics.jsonl", record)

    def log_event(self, kind: str, /, **fields: object) -> None:
        self._append("events.jsonl", {"time": time.time(), "event": kind, **fields})

    def report_slow(self, message: str) -> None:
        """A fast way that cannot be taken, for everybody who looks: a warning among the events, and in the status. From
        any thread; of a rank that is not the owner, in its own log."""
        if not self.owner:
            warnings.warn(message, stacklevel=2)
            return
        self.log_event("warning", kind="slow", message=message)
        with _STATUS_LOCK:
            self.write_status(slow=[*self.status().get("slow", ()), message])

    def log_sample(self, **fields: object) -> None:
        """An answer of the model in training, for people to read: step, prompt, answer, and what was expected."""
        self._append("samples.jsonl", fields)

    def metrics(self) -> list[MetricRecord]:
        """The record of each (step, split), the latest where a resumed run wrote a step again, in step order."""
        latest: dict[tuple[int, str], MetricRecord] = {}
        for record in read_jsonl(self.path / "metrics.jsonl"):
            if isinstance(record.get("step"), int):
                latest[(record["step"], str(record.get("split", "train")))] = MetricRecord(record)
        return [latest[key] for key in sorted(latest)]

    def events(self) -> list[dict[str, Any]]:
        return list(read_jsonl(self.path / "events.jsonl"))

    def _append(self, name: str, record: Mapping[str, object]) -> None:
        if not self.owner:
            return
        # One write call in append mode: a killed process leaves at most one unfinished last line, which readers skip
        # and the next append closes with a newline of its own.
        path = self.path / name
        try:
            with open_log(path) as file:
                start = "\n" if _lacks_final_newline(path) else ""
                file.write((start + json.dumps(record) + "\n").encode())
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from error

    # --- failures --------------------------------------------------------------------------------------------

    def record_failure(self, rank: int, message: str, exit_code: int = 1, at: float | None = None) -> None:
        """Any rank, into its own file: the launcher shows the first one. `at` is when it failed, if not just now."""
        record = {"time": at or time.time(), "rank": rank, "message": message, "exit_code": exit_code}
        with contextlib.suppress(OSError):
            write_atomically(self.logs / f"rank-{rank}.error.json", json.dumps(record))

    def failures(self) -> list[dict[str, Any]]:
        records: list[dict[str, object]] = []
        for path in self.logs.glob("rank-*.error.json"):
            with contextlib.suppress(OSError, ValueError):
                record = read_json_object(path)
                if isinstance(record.get("time"), (int, float)) and isinstance(record.get("rank"), int):
                    records.append({**record, "message": str(record.get("message", ""))})
        return sorted(records, key=lambda record: record["time"])

    def clear_failures(self, rank: int | None = None) -> None:
        """Of every rank, or of one: a rank that starts must not erase what another has just recorded."""
        for path in self.logs.glob(f"rank-{'*' if rank is None else rank}.error.json"):
            path.unlink(missing_ok=True)

    def record_too_large(self, rank: int, tokens: int) -> None:
        """Any rank: a micro-batch of so many tokens did not fit. The next start takes smaller ones."""
        with contextlib.suppress(OSError):
            write_atomically(self.logs / f"rank-{rank}.too-large.json", json.dumps({"tokens": tokens}))

    def take_too_large(self) -> int | None:
        """The fewest tokens that did not fit, once. The owner only."""
        found: list[int] = []
        for path in self.logs.glob("rank-*.too-large.json"):
            with contextlib.suppress(OSError, ValueError):
                tokens = read_json_object(path).get("tokens")
                found += [tokens] if isinstance(tokens, int) and tokens > 0 else []
            path.unlink(missing_ok=True)
        return min(found, default=None)

    # --- checkpoints -----------------------------------------------------------------------------------------

    def begin_checkpoint(self, step: int) -> Path:
        """The folder in which every rank writes its part. It is not a checkpoint until committed."""
        path = self.checkpoints / f"writing-step-{step}"
        path.mkdir(parents=True, exist_ok=True)
        return path

    def commit_checkpoint(
        self,
        step: int,
        extra: Mapping[str, object],
        validation_loss: float | None = None,
        digests: Mapping[str, str] | None = None,
    ) -> Path:
        """Digest what was written, add the manifest, rename. The owner only, when every rank's part is on disk.

        `digests`: of files whose writer computed them from what it wrote; these are not read again.
        """
        writing, final = self.checkpoints / f"writing-step-{step}", self.checkpoints / f"step-{step}"
        about = {"step": step, "time": time.time(), "validation_loss": validation_loss, "extra": dict(extra)}
        commit_folder(writing, final, about, digests)
        return final

    def list_checkpoints(self) -> list[Checkpoint]:
        """Committed checkpoints in step order, by their manifests; digests are not checked here."""
        committed = []
        with contextlib.suppress(CheckpointUnreadable):
            for step, path in self._checkpoint_folders():
                with contextlib.suppress(OSError, ValueError):
                    committed.append(_as_checkpoint(path, step, _read_manifest(path)))
        return committed

    def latest_checkpoint(self) -> Checkpoint | None:
        """The newest checkpoint whose every file has its digest; damaged ones are passed over.

        The owner also says so and sets them aside: counted among the last ones to keep, they would push out sound ones.
        Raises CheckpointUnreadable for one that may be sound.
        """
        for step, path in reversed(self._checkpoint_folders()):
            problem = damage(path)
            if problem is None:
                return _as_checkpoint(path, step, _read_manifest(path))
            self.log_event("checkpoint_damaged", step=step, problem=problem)
            if self.owner:
                aside = path.with_name(f"damaged-{path.name}")
                shutil.rmtree(aside, ignore_errors=True)
                path.rename(aside)
        return None

    def resume_point(self) -> Checkpoint | None:
        """The checkpoint to go on from; None for a run that has not had one. An error where there was one."""
        latest = self.latest_checkpoint()
        if latest is not None:
            return latest
        damaged = sorted(path.name for path in self.checkpoints.glob("damaged-step-*"))
        recorded = self._recorded_step()
        if not damaged and recorded is None:
            return None
        why = f"all are damaged ({', '.join(damaged)})" if damaged else f"the one of step {recorded} is gone"
        raise ConfigError(
            f"{self.path} has no checkpoint that can be used: {why}; events.jsonl says more. Put one back, or begin "
            "again at step 0 with --start-over, which keeps what is there aside"
        )

    def _recorded_step(self) -> int | None:
        """Of the last checkpoint that the run says it has committed since it began."""
        step = None
        for event in self.events():
            if event.get("event") == "checkpoint":
                step = event.get("step")
            elif event.get("event") == "started_over":
                step = None
        return step

    def start_over(self) -> None:
        """Let the run begin at step 0, with its checkpoints kept aside. The owner only, while no process writes."""
        assert self.owner
        number = 1
        while (aside := self.path / f"checkpoints-aside-{number}").exists():
            number += 1
        with contextlib.suppress(FileNotFoundError):
            self.checkpoints.rename(aside)
        self.checkpoints.mkdir()
        self.log_event("started_over", aside=aside.name if aside.exists() else None)

    def _checkpoint_folders(self) -> list[tuple[int, Path]]:
        try:
            names = os.listdir(self.checkpoints)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise CheckpointUnreadable(self.checkpoints, error) from error
        named = [(_CHECKPOINT_NAME.match(name), self.checkpoints / name) for name in names]
        return sorted((int(name[1]), path) for name, path in named if name is not None)

    def describe_last_checkpoint(self) -> str:
        """For the end of a sentence about why a run could not go on."""
        kept = self.list_checkpoints()
        return f"the last good checkpoint is of step {kept[-1].step}" if kept else "there is no checkpoint yet"

    def abandon_checkpoint(self, step: int) -> None:
        """Remove what was written of a checkpoint that failed: on a full disk, the status needs the room."""
        if self.owner:
            shutil.rmtree(self.checkpoints / f"writing-step-{step}", ignore_errors=True)

    def prune_checkpoints(self, *, keep_last: int, keep_best: int) -> None:
        """Delete what the keep rule does not name. The owner only."""
        if not self.owner:
            return
        committed = self.list_checkpoints()
        keep = {c.step for c in committed[-keep_last:]}
        scored = sorted(
            (c for c in committed if c.validation_loss is not None), key=lambda c: (c.validation_loss, c.step)
        )
        keep |= {c.step for c in scored[:keep_best]}
        for checkpoint in committed:
            if checkpoint.step not in keep:
                # Renamed first, so that a kill in the middle never leaves half a checkpoint under a valid name.
                doomed = checkpoint.path.with_name(f"deleting-{checkpoint.path.name}")
                checkpoint.path.rename(doomed)
                shutil.rmtree(doomed, ignore_errors=True)

    def sweep(self) -> None:
        """Remove what an interrupted write or delete left behind. The owner only, before it writes."""
        if self.owner:
            for pattern in ("writing-step-*", "deleting-*"):
                for path in self.checkpoints.glob(pattern):
                    shutil.rmtree(path, ignore_errors=True)


def commit_folder(
    writing: Path, final: Path, about: Mapping[str, object], digests: Mapping[str, str] | None = None
) -> None:
    """All files of a folder on disk, with a manifest of their digests that `damage` reads, under its final name.

    `digests`: of files whose writer computed them from what it wrote; these are not read again.
    """
    files = {}
    for file in sorted(p for p in writing.rglob("*") if p.is_file()):
        name = str(file.relative_to(writing))
        digest = (digests or {}).get(name) or digest_file(file)
        files[name] = {"bytes": file.stat().st_size, "sha256": digest}
        _fsync(file)
    manifest = {**about, "files": files}
    write_atomically(writing / MANIFEST, json.dumps({**manifest, "sha256": _digest_json(manifest)}, indent=1))
    _fsync(writing)
    replaced = final.with_name(f"deleting-{final.name}")
    if final.exists():
        final.rename(replaced)
    writing.rename(final)
    _fsync(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)  # last: a kill before this leaves the new one in its place


def damage(checkpoint: Path) -> str | None:
    """What is wrong with a committed checkpoint, or None. Raises CheckpointUnreadable where that cannot be told."""
    try:
        manifest = _read_manifest(checkpoint)
        for name, expected in manifest["files"].items():
            if problem := _damage_of_file(checkpoint / name, expected):
                return f"{name} {problem}"
    except FileNotFoundError:
        return f"{MANIFEST} is missing"
    except OSError as error:
        raise CheckpointUnreadable(checkpoint, error) from error
    except ValueError as error:
        return str(error)
    return None


def _damage_of_file(file: Path, expected: Mapping[str, Any]) -> str | None:
    try:
        found = os.stat(file)
        if not stat.S_ISREG(found.st_mode):
            return "is missing"
        if found.st_size != expected["bytes"]:
            return f"has {found.st_size} bytes instead of {expected['bytes']}"
        return None if digest_file(file) == expected["sha256"] else "does not match its digest"
    except OSError as error:
        if error.errno in _NOT_THERE:
            return "is missing"
        raise


def _read_manifest(checkpoint: Path) -> dict[str, Any]:
    manifest = read_json_object(checkpoint / MANIFEST)
    expected = manifest.pop("sha256", None)
    if expected is None or _digest_json(manifest) != expected:
        raise ValueError(f"{MANIFEST} does not match its digest")
    files = manifest.get("files")
    if not isinstance(files, dict) or not isinstance(manifest.get("extra"), dict):
        raise ValueError(f"{MANIFEST} is not the manifest of a checkpoint")
    for name, entry in files.items():
        inside = not Path(name).is_absolute() and ".." not in Path(name).parts
        if not inside or not isinstance(entry, dict) or not {"bytes", "sha256"} <= set(entry):
            raise ValueError(f"{MANIFEST} has an entry {name!r} that is no file of a checkpoint")
    return manifest


def _as_checkpoint(path: Path, step: int, manifest: Mapping[str, Any]) -> Checkpoint:
    return Checkpoint(path, step, manifest["extra"], manifest.get("validation_loss"))


def read_json_object(path: Path) -> dict[str, Any]:
    """Raises ValueError with a sentence for a file that holds anything else."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise ValueError(f"{path} is damaged: it is not a file")  # a pipe would be waited for
    content = path.read_bytes()
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        shown = "it is empty" if not content.strip() else "it is not JSON"
        raise ValueError(f"{path} is damaged: {shown}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} is damaged: it holds {type(value).__name__} instead of an object")
    return value


def _is_of_its_kind(name: str, value: object) -> bool:
    if name in _STATUS_NUMBERS:
        return value is None or (isinstance(value, (int, float)) and not isinstance(value, bool))
    if name == "validation_scores":
        return value is None or (isinstance(value, dict) and all(isinstance(v, (int, float)) for v in value.values()))
    return name not in _STATUS_TEXTS or value is None or isinstance(value, str)


def _digest_json(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def digest_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_atomically(path: Path, text: str, *, durable: bool = True) -> None:
    """Readers see the old text or the new. `durable` also survives a power cut, for the price of a disk flush."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from error


def open_log(path: Path) -> IO[bytes]:
    """A file to append to. Not through a link: in a run directory from elsewhere it could lead to any file."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a file", str(path))
    return os.fdopen(descriptor, "ab")


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """Whole lines that hold an object: what a killed writer or a damaged disk left of others is passed over."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        for line in file:
            with contextlib.suppress(ValueError, RecursionError):
                record = json.loads(line)
                if isinstance(record, dict):
                    yield record


def find_runs(root: Path) -> list[RunDir]:
    """Runs at or below a folder, newest first."""
    configs = [root] if (root / "config.yaml").exists() else [p.parent for p in root.glob("*/config.yaml")]
    runs = [RunDir(p) for p in configs if (p / "status.json").exists()]
    return sorted(runs, key=lambda r: r.status().get("updated_at") or 0.0, reverse=True)


def _lacks_final_newline(path: Path) -> bool:
    with path.open("rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return False
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
