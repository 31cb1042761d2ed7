"""The run directory: what survives a kill at any moment, and what readers see meanwhile."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lockstep.config import ConfigError, RunConfig, parse_config
from lockstep.rundir import (
    MANIFEST,
    CheckpointUnreadable,
    RunDir,
    damage,
    digest_file,
    find_runs,
    read_jsonl,
    write_atomically,
)


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return parse_config("name: test\nmodel: org/model\ndata: {train: train.jsonl}\n", directory=tmp_path)


@pytest.fixture
def run(tmp_path: Path, config: RunConfig) -> RunDir:
    return RunDir.create(tmp_path / "run", config)


def commit(run: RunDir, step: int, content: str = "tensors", validation_loss: float | None = None) -> Path:
    writing = run.begin_checkpoint(step)
    (writing / "part-0").write_text(content)
    (writing / "deep").mkdir(exist_ok=True)
    (writing / "deep" / "part-1").write_text(content)
    return run.commit_checkpoint(step, {"cursor": 10 * step}, validation_loss)


def steps_of(run: RunDir) -> list[int]:
    return [checkpoint.step for checkpoint in run.list_checkpoints()]


# --- creating -------------------------------------------------------------------------------------------------------


def test_a_new_run_holds_its_resolved_configuration_and_a_status(run, config):
    assert RunDir(run.path).config() == config
    assert run.status()["state"] == "created"
    assert run.logs.is_dir()
    assert run.checkpoints.is_dir()


def test_a_run_is_created_once(run, config):
    before = run.config_path.read_text()
    with pytest.raises(ConfigError, match="already holds a run: choose another --run-dir, or continue"):
        RunDir.create(run.path, config)
    assert run.config_path.read_text() == before


def test_a_directory_that_cannot_be_made_is_one_sentence(tmp_path, config):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot create the run directory .*file/run: "):
        RunDir.create(tmp_path / "file" / "run", config)


def test_a_folder_without_a_configuration_is_no_run(tmp_path):
    with pytest.raises(ConfigError, match=r"is not a run directory: it has no config\.yaml"):
        RunDir(tmp_path).config()
    assert RunDir(tmp_path).status() == {"state": "unknown"}


def test_runs_are_found_newest_first(tmp_path, config):
    root = tmp_path / "runs"
    first, second = (RunDir.create(root / name, config) for name in ("first", "second"))
    (root / "other").mkdir()
    first.write_status(step=1)
    assert [r.path.name for r in find_runs(root)] == ["first", "second"]
    assert [r.path for r in find_runs(second.path)] == [second.path]
    assert find_runs(tmp_path / "nothing") == []


# --- status ---------------------------------------------------------------------------------------------------------


def test_status_fields_are_merged(run):
    run.write_status(state="running", step=1)
    run.write_status(step=2)
    status = run.status()
    assert (status["state"], status["step"]) == ("running", 2)
    assert status["updated_at"] > 0


def test_only_the_owner_writes(run):
    reader = RunDir(run.path)
    reader.write_status(state="failed")
    reader.log_metrics({"step": 1})
    reader.log_event("hello")
    commit(run, 1)
    commit(run, 2)
    run.begin_checkpoint(3)
    reader.prune_checkpoints(keep_last=1, keep_best=0)
    reader.sweep()
    assert run.status()["state"] == "created"
    assert (run.metrics(), run.events(), steps_of(run)) == ([], [], [1, 2])
    assert (run.checkpoints / "writing-step-3").is_dir()


def test_a_reader_never_sees_half_a_status(run):
    padding = "x" * 50_000
    stop = threading.Event()

    def write() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            run.write_status(first=number, padding=padding, last=number)

    run.write_status(first=0, padding=padding, last=0)
    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(200):
            status = json.loads((run.path / "status.json").read_text())
            assert status["first"] == status["last"]
    finally:
        stop.set()
        writer.join()


def test_a_failed_write_leaves_the_old_text_and_no_rubbish(tmp_path, monkeypatch):
    target = tmp_path / "status.json"
    write_atomically(target, "old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(target, "new")
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


# --- metrics and events ---------------------------------------------------------------------------------------------


def test_metrics_come_in_step_order_and_a_repeated_step_counts_once(run):
    for step, loss in ((1, 3.0), (2, 2.0), (3, 1.5), (2, 1.9)):  # resumed after step 1
        run.log_metrics({"step": step, "split": "train", "loss": loss})
    run.log_metrics({"step": 2, "split": "validation", "loss": 9.0})
    assert [(r["step"], r["split"], r["loss"]) for r in run.metrics()] == [
        (1, "train", 3.0),
        (2, "train", 1.9),
        (2, "validation", 9.0),
        (3, "train", 1.5),
    ]


def test_metrics_of_older_runs_come_with_the_names_of_today_and_answer_to_both(run, caplog):
    run.log_metrics({"step": 1, "split": "train", "logprob_gap": 0.1, "length": 7.0, "reward": 1.0})
    run.log_metrics({"step": 2, "split": "train", "sampler_trainer_logprob_diff": 0.2, "reward": 1.0})
    first, second = run.metrics()
    assert set(first) == {"step", "split", "sampler_trainer_logprob_diff", "completion_length", "reward"}
    assert [r["sampler_trainer_logprob_diff"] for r in (first, second)] == [0.1, 0.2]
    assert [r["logprob_gap"] for r in (first, second)] == [0.1, 0.2]
    assert first.get("length") == 7.0
    assert second.get("length", 3) == 3
    notices = [record.getMessage() for record in caplog.records if "logprob_gap" in record.getMessage()]
    assert len(notices) <= 1  # none, where another test of this process has already asked
    with pytest.raises(KeyError, match="nothing"):
        first["nothing"]


def test_former_metric_names_are_announced_once(run):
    run.log_metrics({"step": 1, "split": "train", "cut": 0.5})
    program = (
        f"from lockstep.rundir import RunDir; record, = RunDir({str(run.path)!r}).metrics()\n"
        "print(record['truncated_frac']); print(record['cut'], record['cut'])"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["0.5"] * 3
    assert result.stderr.splitlines() == ["metric cut is now called truncated_frac; the old name still works"]


def test_events_carry_their_time_and_kind(run):
    run.log_event("warning", message="look")
    (event,) = run.events()
    assert (event["event"], event["message"]) == ("warning", "look")
    assert event["time"] > 0


def test_the_unfinished_last_line_of_a_killed_writer_is_passed_over_and_closed(run):
    run.log_metrics({"step": 1, "loss": 1.0})
    with (run.path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 2, "lo')
    assert [r["step"] for r in run.metrics()] == [1]
    run.log_metrics({"step": 3, "loss": 3.0})
    assert [r["step"] for r in run.metrics()] == [1, 3]
    assert (run.path / "metrics.jsonl").read_bytes().endswith(b"}\n")


def test_a_missing_file_has_no_lines(tmp_path):
    assert list(read_jsonl(tmp_path / "none.jsonl")) == []


# --- failures -------------------------------------------------------------------------------------------------------


def test_failures_of_any_rank_come_in_the_order_they_happened(run):
    RunDir(run.path).record_failure(1, "first", 2)
    RunDir(run.path).record_failure(0, "second")
    (run.logs / "rank-2.error.json").write_text("{")
    assert [(f["rank"], f["message"], f["exit_code"]) for f in run.failures()] == [(1, "first", 2), (0, "second", 1)]
    run.clear_failures()
    assert run.failures() == []


# --- checkpoints ----------------------------------------------------------------------------------------------------


def test_a_checkpoint_exists_only_when_it_is_committed(run):
    (run.begin_checkpoint(4) / "part-0").write_text("half")
    assert run.list_checkpoints() == []
    assert run.latest_checkpoint() is None
    path = commit(run, 4, validation_loss=0.5)
    assert path == run.checkpoints / "step-4"
    latest = run.latest_checkpoint()
    assert latest is not None
    assert (latest.path, latest.step, latest.extra, latest.validation_loss) == (path, 4, {"cursor": 40}, 0.5)
    assert not (run.checkpoints / "writing-step-4").exists()


def test_the_manifest_lists_every_file_with_its_size_and_digest(run):
    path = commit(run, 1, "four")
    manifest = json.loads((path / MANIFEST).read_text())
    assert set(manifest["files"]) == {"part-0", "deep/part-1"}
    assert manifest["files"]["part-0"] == {"bytes": 4, "sha256": digest_file(path / "part-0")}
    assert damage(path) is None


def test_a_step_that_is_committed_again_replaces_the_old_one(run):
    commit(run, 1, "old")
    commit(run, 1, "new")
    assert (run.checkpoints / "step-1" / "part-0").read_text() == "new"
    assert damage(run.checkpoints / "step-1") is None
    assert [p.name for p in run.checkpoints.iterdir()] == ["step-1"]


def test_checkpoints_are_ordered_by_number_not_by_name(run):
    for step in (9, 10, 100):
        commit(run, step)
    assert steps_of(run) == [9, 10, 100]


def _flip_a_bit(path: Path) -> None:
    (path / "part-0").write_text("tensorz")


def _shorten(path: Path) -> None:
    (path / "deep" / "part-1").write_text("t")


def _remove_a_file(path: Path) -> None:
    (path / "deep" / "part-1").unlink()


@pytest.mark.parametrize(
    ("break_it", "problem"),
    [
        (_flip_a_bit, "part-0 does not match its digest"),
        (_shorten, "deep/part-1 has 1 bytes instead of 7"),
        (_remove_a_file, "deep/part-1 is missing"),
    ],
)
def test_a_damaged_checkpoint_is_passed_over_and_reported(run, break_it, problem):
    commit(run, 1)
    path = commit(run, 2)
    break_it(path)
    assert damage(path) == problem
    latest = run.latest_checkpoint()
    assert latest is not None
    assert latest.step == 1
    assert steps_of(run) == [1], "set aside, or it would count among the last ones to keep"
    assert [(e["event"], e["step"], e["problem"]) for e in run.events()] == [("checkpoint_damaged", 2, problem)]


def _cut_the_manifest(path: Path) -> None:
    (path / MANIFEST).write_text("{")


def _remove_the_manifest(path: Path) -> None:
    (path / MANIFEST).unlink()


def _change_the_manifest(path: Path) -> None:
    text = (path / MANIFEST).read_text()
    (path / MANIFEST).write_text(text.replace('"cursor": 20', '"cursor": 21'))


@pytest.mark.parametrize("break_it", [_cut_the_manifest, _remove_the_manifest, _change_the_manifest])
def test_a_broken_manifest_is_damage(run, break_it):
    commit(run, 1)
    path = commit(run, 2)
    break_it(path)
    assert MANIFEST in (damage(path) or "")
    assert steps_of(run) == [1]
    assert run.latest_checkpoint().step == 1
    assert [(e["event"], e["step"]) for e in run.events()] == [("checkpoint_damaged", 2)]


def test_when_every_checkpoint_is_damaged_there_is_none(run):
    _flip_a_bit(commit(run, 1))
    assert run.latest_checkpoint() is None


# --- going on ---------------------------------------------------------------------------------------------------------


def test_a_run_without_checkpoints_begins_at_its_start(run):
    assert run.resume_point() is None
    run.checkpoints.rmdir()
    assert run.resume_point() is None


def commit_as_the_loop_does(run: RunDir, step: int) -> Path:
    path = commit(run, step)
    run.log_event("checkpoint", step=step)
    return path


@pytest.mark.parametrize("lose", ["damage", "delete", "delete all"])
def test_a_run_that_lost_its_checkpoints_does_not_begin_again_unasked(run, lose):
    path = commit_as_the_loop_does(run, 4)
    if lose == "damage":
        _flip_a_bit(path)
    else:
        shutil.rmtree(path if lose == "delete" else run.checkpoints)
    for _ in range(2):  # also when the first start has set a damaged one aside
        with pytest.raises(ConfigError, match=r"no checkpoint that can be used.*--start-over"):
            run.resume_point()
    run.start_over()
    assert run.resume_point() is None
    assert list(run.checkpoints.iterdir()) == []
    asides = [p.name for p in (run.path / "checkpoints-aside-1").glob("*")]
    assert asides == (["damaged-step-4"] if lose == "damage" else []), "nothing is thrown away"
    commit_as_the_loop_does(run, 2)
    assert run.resume_point().step == 2


@pytest.fixture
def stranger(config: RunConfig) -> Iterator[RunDir]:
    """A run with two checkpoints in a folder that everybody may enter; this user is nobody in particular."""
    folder = Path(tempfile.mkdtemp(prefix="lockstep-rundir-"))
    folder.chmod(0o777)
    run = RunDir.create(folder / "run", config)
    for step in (1, 2):
        commit_as_the_loop_does(run, step)
    for path in (run.path, run.checkpoints):
        path.chmod(0o777)
    (run.path / "events.jsonl").chmod(0o666)
    before = os.geteuid()
    try:
        if before == 0:  # root reads everything
            os.seteuid(65534)
        yield run
    finally:
        if before == 0:
            os.seteuid(before)
        for path in (run.checkpoints, *run.checkpoints.glob("*")):
            path.chmod(0o777)
        shutil.rmtree(folder)


@pytest.mark.parametrize("name", ["", "step-2", "step-2/manifest.json", "step-2/part-0"])
def test_what_may_not_be_read_is_an_error_and_not_damage(stranger, name):
    names = sorted(os.listdir(stranger.checkpoints))
    _as_owner(lambda: (stranger.checkpoints / name).chmod(0))
    with pytest.raises(CheckpointUnreadable, match=r"Permission denied.*nothing was changed") as caught:
        stranger.resume_point()
    assert caught.value.exit_code == 2, "for the user to mend: not started again"
    assert {e["event"] for e in stranger.events()} == {"checkpoint"}
    _as_owner(lambda: (stranger.checkpoints / name).chmod(0o755))
    assert sorted(os.listdir(stranger.checkpoints)) == names
    assert stranger.resume_point().step == 2


def _as_owner(act: Callable[[], None]) -> None:
    user = os.geteuid()
    if os.getuid() == 0:
        os.seteuid(0)
    act()
    os.seteuid(user)


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EMFILE])
def test_a_disk_that_does_not_answer_is_asked_again_later(run, monkeypatch, number):
    commit(run, 1)

    def fail(path: Path) -> str:
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr("lockstep.rundir.digest_file", fail)
    with pytest.raises(CheckpointUnreadable, match="part-") as caught:
        run.resume_point()
    assert caught.value.exit_code == 1, "the launcher starts it again"
    monkeypatch.undo()
    assert run.resume_point().step == 1


def test_checkpoints_that_are_no_folder_are_an_error(run):
    run.checkpoints.rmdir()
    run.checkpoints.write_text("")
    with pytest.raises(CheckpointUnreadable, match="Not a directory"):
        run.resume_point()
    assert run.list_checkpoints() == []


def test_a_step_committed_again_is_there_at_every_moment_but_a_rename(run, monkeypatch):
    path = commit(run, 1)
    seen: list[bool] = []
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: seen.append(damage(path) is None))
    commit(run, 1, "other")
    assert seen == [True], "the old one is removed only when the new one is in its place"


# --- damaged files ----------------------------------------------------------------------------------------------------

NONSENSE = {
    "empty": b"",
    "null": b"null",
    "list": b"[]",
    "text": b'""',
    "number": b"7",
    "binary": b"\x80\x04\xff\xfe\x00",
    "deep": b"[" * 200_000,
    "fields": b'{"state": 7, "step": "x", "loss": [], "updated_at": {}, "validation_scores": 3, "time": "x"}',
}


@pytest.mark.parametrize("content", NONSENSE.values(), ids=NONSENSE)
def test_damaged_files_of_a_run_are_told_and_never_a_traceback(run, config, content):
    (run.path / "status.json").write_bytes(content)
    status = run.status()
    assert status["state"] == "unknown"
    assert content.startswith(b"{") or "status.json is damaged" in status["error"]
    assert [r.path for r in find_runs(run.path)] == [run.path]
    for name in ("metrics.jsonl", "events.jsonl"):
        (run.path / name).write_bytes(content + b"\n" + b'{"step": 1, "event": "checkpoint"}\n')
    assert [record["step"] for record in run.metrics()] == [1]
    assert {"step": 1, "event": "checkpoint"} in run.events()
    (run.logs / "rank-0.error.json").write_bytes(content)
    assert run.failures() == []
    commit(run, 1)
    path = commit(run, 2)
    (path / MANIFEST).write_bytes(content)
    assert MANIFEST in (damage(path) or "")
    assert run.latest_checkpoint().step == 1
    run.write_status(state="running", error=None)
    assert run.status()["state"] == "running"


@pytest.mark.parametrize("content", NONSENSE.values(), ids=NONSENSE)
def test_a_damaged_configuration_is_a_sentence(run, content):
    run.config_path.write_bytes(content)
    with pytest.raises(ConfigError):
        run.config()


@pytest.mark.parametrize("name", ["metrics.jsonl", "events.jsonl"])
def test_nothing_is_written_through_a_link_or_waited_for_in_a_pipe(run, tmp_path, name):
    target = tmp_path / "target"
    target.write_text("mine")
    (run.path / name).unlink(missing_ok=True)
    (run.path / name).symlink_to(target)
    with pytest.raises(OSError, match=name):
        run.log_event("hello") if name == "events.jsonl" else run.log_metrics({"step": 1})
    assert target.read_text() == "mine"
    (run.path / name).unlink()
    for pipe in (name, "status.json", "checkpoints"):
        (run.path / pipe).unlink(missing_ok=True) if pipe != "checkpoints" else run.checkpoints.rmdir()
        os.mkfifo(run.path / pipe)
    assert "is not a file" in run.status()["error"]
    assert (run.metrics(), run.events()) == ([], [])
    with pytest.raises(OSError, match=name):
        run.log_event("hello") if name == "events.jsonl" else run.log_metrics({"step": 1})
    with pytest.raises(CheckpointUnreadable):
        run.resume_point()


@pytest.mark.parametrize("name", ["/etc/passwd", "../../status.json", "part-0"])
def test_a_manifest_names_only_files_of_its_checkpoint(run, name):
    path = commit(run, 1)
    manifest = json.loads((path / MANIFEST).read_text())
    del manifest["sha256"]
    manifest["files"][name] = {} if name == "part-0" else {"bytes": 1, "sha256": ""}
    signed = {**manifest, "sha256": hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()}
    (path / MANIFEST).write_text(json.dumps(signed))
    assert "that is no file of a checkpoint" in (damage(path) or "")


def test_looking_at_a_run_changes_nothing_in_it(run):
    _flip_a_bit(commit(run, 1))
    before = sorted(p.relative_to(run.path) for p in run.path.rglob("*"))
    assert RunDir(run.path).latest_checkpoint() is None
    assert sorted(p.relative_to(run.path) for p in run.path.rglob("*")) == before


def test_an_abandoned_checkpoint_gives_its_room_back(run):
    (run.begin_checkpoint(2) / "part-0").write_text("half")
    RunDir(run.path).abandon_checkpoint(2)
    assert (run.checkpoints / "writing-step-2").is_dir(), "only the owner may"
    run.abandon_checkpoint(2)
    assert list(run.checkpoints.iterdir()) == []


def test_pruning_keeps_the_last_and_the_best(run):
    for step, loss in ((1, 0.5), (2, 0.1), (3, 0.4), (4, None), (5, 0.3), (6, 0.9)):
        commit(run, step, validation_loss=loss)
    run.prune_checkpoints(keep_last=2, keep_best=1)
    assert steps_of(run) == [2, 5, 6]
    run.prune_checkpoints(keep_last=1, keep_best=0)
    assert [p.name for p in run.checkpoints.iterdir()] == ["step-6"]


def test_of_equally_good_checkpoints_the_earlier_is_the_best(run):
    for step in (1, 2, 3):
        commit(run, step, validation_loss=0.5)
    run.prune_checkpoints(keep_last=1, keep_best=1)
    assert steps_of(run) == [1, 3]


def test_sweeping_removes_what_was_interrupted_and_nothing_else(run):
    commit(run, 1)
    (run.begin_checkpoint(2) / "part-0").write_text("half")
    (run.checkpoints / "deleting-step-0").mkdir()
    run.sweep()
    assert [p.name for p in run.checkpoints.iterdir()] == ["step-1"]
    assert run.latest_checkpoint().step == 1


def test_folders_with_other_names_are_not_checkpoints(run):
    for name in ("step-x", "step-1-copy", "step-"):
        (run.checkpoints / name).mkdir()
    assert run.list_checkpoints() == []


def test_threads_that_write_the_status_lose_nothing_of_each_other(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "run", parse_config("model: x\ndata: {train: a}"))

    def report(name: str) -> None:
        for number in range(20):
            run.report_slow(f"{name} {number}")
            run.write_status(**{name: number})

    threads = [threading.Thread(target=report, args=(name,)) for name in ("one", "other")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    status = run.status()
    assert (status["one"], status["other"], len(status["slow"])) == (19, 19, 40)


def test_a_rank_that_is_not_the_owner_says_in_its_log_what_is_slow(tmp_path: Path) -> None:
    RunDir.create(tmp_path / "run", parse_config("model: x\ndata: {train: a}"))
    other = RunDir(tmp_path / "run")
    with pytest.warns(UserWarning, match="steps are not captured"):
        other.report_slow("steps are not captured")
    assert not other.events()
    assert "slow" not in other.status()
