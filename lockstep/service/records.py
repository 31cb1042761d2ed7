"""What was asked for, as files beside the database: should that be lost, the list of jobs is made anew from them.

A record is written once, when a job or data set is accepted, and once more if a job ends before it has a run directory.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from lockstep.config import ConfigError, load_config
from lockstep.launch.local import is_running, read_handle, visible_devices
from lockstep.rundir import RunDir, digest_file, write_atomically
from lockstep.service.data_dir import DataDir
from lockstep.service.scheduler import Slots
from lockstep.service.schemas import FINISHED
from lockstep.service.store import Dataset, Job, Store

log = logging.getLogger(__name__)
_ASKED = ["id", "name", "owner", "priority", "max_restarts", "kind", "model", "procs", "num_slots", "device", "config"]
_ASKED += ["datasets", "digest", "created_at"]
_LOST = "the list of jobs was lost before this one began: submit it again"


class Records:
    def __init__(self, data_dir: DataDir) -> None:
        self._data_dir = data_dir
        for folder in (self._jobs, self._datasets):
            folder.mkdir(parents=True, exist_ok=True)

    @property
    def _jobs(self) -> Path:
        return self._data_dir.records / "jobs"

    @property
    def _datasets(self) -> Path:
        return self._data_dir.records / "datasets"

    def keep_job(self, job: Job) -> None:
        """`state` only where no run directory will say it."""
        ended = job.state if job.state in FINISHED and not self._has_run(job.id) else ""
        content = {name: getattr(job, name) for name in _ASKED} | {"state": ended}
        _write(self._jobs / f"{job.id}.json", content)

    def keep_dataset(self, dataset: Dataset) -> None:
        _write(self._datasets / f"{dataset.name}.json", asdict(dataset))

    def drop_job(self, job_id: str) -> None:
        (self._jobs / f"{job_id}.json").unlink(missing_ok=True)

    def drop_dataset(self, name: str) -> None:
        (self._datasets / f"{name}.json").unlink(missing_ok=True)

    def any(self) -> bool:
        """Whether there is anything that a list could be made of."""
        folders = (self._jobs, self._datasets, self._data_dir.jobs, self._data_dir.datasets)
        return any(any(folder.iterdir()) for folder in folders)

    def sync(self, store: Store) -> None:
        """Records of what came before there were any, or just before a kill."""
        for job in store.every_job():
            record = _read(self._jobs / f"{job.id}.json")
            ended_early = job.state in FINISHED and not self._has_run(job.id)
            if record is None or (ended_early and record.get("state") != job.state):
                self.keep_job(job)
        for dataset in store.datasets():
            if not (self._datasets / f"{dataset.name}.json").exists():
                self.keep_dataset(dataset)

    # --- the list, made anew ----------------------------------------------------------------------------------

    def rebuild(self, store: Store, slots: Slots, hide: Callable[[str], str] = str) -> tuple[int, int]:
        """Adds what the store does not have. Returns how many jobs and data sets were found. `hide` writes a path of
        this machine as requests do."""
        num_datasets = 0
        for dataset in self._find_datasets():
            if store.find_dataset(dataset.name) is None:
                store.add_dataset(dataset)
                num_datasets += 1
        num_jobs = 0
        taken = [slot for job in store.active() for slot in job.slots]
        for row in sorted(self._find_jobs(hide), key=lambda row: float(row["created_at"])):
            if store.find(row["id"]) is not None:
                continue
            if row["state"] == "preparing":
                row["slots"] = _slots_of(self._data_dir.jobs / row["id"], row["num_slots"], slots, taken)
                taken += row["slots"]
            num_jobs += store.add(**row)
        return num_jobs, num_datasets

    def _has_run(self, job_id: str) -> bool:
        return (self._data_dir.jobs / job_id / "config.yaml").exists()

    def _find_jobs(self, hide: Callable[[str], str]) -> Iterator[dict[str, Any]]:
        names = {path.stem for path in self._jobs.glob("*.json")} | {
            path.name for path in self._data_dir.jobs.iterdir()
        }
        for name in sorted(names):
            record = _read(self._jobs / f"{name}.json", [*_ASKED, "state"]) or self._record_of_folder(name, hide)
            if record is None:
                log.warning("jobs/%s has neither a record nor a configuration that can be read: left out", name)
            else:
                yield _row(record, RunDir(self._data_dir.jobs / name))

    def _record_of_folder(self, name: str, hide: Callable[[str], str]) -> dict[str, object] | None:
        """Of a job that an earlier version ran: whose it was is not known, so it is the administrators'."""
        run = RunDir(self._data_dir.jobs / name)
        try:
            config = load_config(run.config_path)
            created_at = run.config_path.stat().st_mtime
        except (ConfigError, OSError):
            return None
        values = {"id": name, "name": config.name, "owner": "", "priority": 0, "max_restarts": 0, "digest": ""}
        values |= {"kind": config.algorithm.kind, "model": hide(config.model.path), "device": config.launch.device}
        values |= {"procs": config.launch.procs, "num_slots": config.launch.procs + config.rollouts.engines}
        begun = "launch" in run.status()
        return values | {
            "config": config.to_yaml(),
            "datasets": [],
            "created_at": created_at,
            "state": "" if begun else "failed",
        }

    def _find_datasets(self) -> Iterator[Dataset]:
        for path in sorted(self._data_dir.datasets.glob("*.jsonl")):
            names = [field.name for field in fields(Dataset)]
            record = _read(self._datasets / f"{path.stem}.json", names)
            if record is not None:
                yield Dataset(**{name: record[name] for name in names})
                continue
            with path.open("rb") as file:
                num_rows = sum(1 for _ in file)
            stat = path.stat()
            yield Dataset(path.stem, "", num_rows, stat.st_size, digest_file(path), stat.st_mtime)


def _write(path: Path, content: dict[str, Any]) -> None:
    """What is already in the database is done, whether or not a copy of it can be kept."""
    try:
        write_atomically(path, json.dumps(content))
    except OSError as error:
        log.error("no record could be kept in %s: %s; the next start tries again", path, error.strerror or error)


def _read(path: Path, needed: Iterable[str] = ()) -> dict[str, Any] | None:
    """None for one that is not there, or not whole."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) and record.keys() >= set(needed) else None


def _row(record: dict[str, Any], run: RunDir) -> dict[str, object]:
    """As the job stood, by its run directory: ended, begun (the scheduler asks its processes), or still waiting."""
    row = {name: record[name] for name in _ASKED}
    status, handle = run.status(), read_handle(run.path)
    launch_id = handle.launch_id if handle is not None else status.get("launch")
    state = status.get("state")
    if state in FINISHED:
        times = {"prepared_at": status.get("started_at") or row["created_at"], "started_at": status.get("started_at")}
        times["finished_at"] = status.get("updated_at") or time.time()
        return row | times | {"state": state, "reason": str(status.get("error") or "")}
    if launch_id:
        return row | {"state": "preparing", "launch_id": launch_id, "prepared_at": time.time()}
    if record["state"]:
        reason = _LOST if record["state"] == "failed" else ""
        return row | {"state": record["state"], "reason": reason, "finished_at": time.time()}
    return row | {"state": "queued"}


def _slots_of(run_dir: Path, needed: int, slots: Slots, taken: list[int]) -> list[int]:
    """Those of the GPUs that its processes see, or any that are free; none if it has ended."""
    if not is_running(run_dir):
        return []
    visible = visible_devices(run_dir)
    seen = [slot for slot, device in enumerate(slots.devices) if device in visible]
    return seen or slots.free(taken)[:needed]
