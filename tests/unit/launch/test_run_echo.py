"""What a pod prints of its run directory, and the directory that is written from it elsewhere."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lockstep.config import resolve_config
from lockstep.launch.run_echo import RunEcho, RunMirror
from lockstep.rundir import RunDir


@pytest.fixture
def there(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path / "there", resolve_config({"model": "org/model", "data": {"train": "org/data"}}))


@pytest.fixture
def here(tmp_path: Path) -> RunDir:
    run = RunDir.create(tmp_path / "here", resolve_config({"model": "org/model", "data": {"train": "org/data"}}))
    run.write_status(launch="id")
    return run


def test_the_directory_here_follows(there, here):
    lines: list[str] = []
    echo = RunEcho(there, [0], is_first=True, say=lines.append)
    there.log_metrics({"step": 1, "loss": 2.0, "text": "grün"})
    there.log_event("model", parameters=3)
    (there.logs / "rank-0.log").write_bytes(b"one\nbar 1%\rbar 100%\ntwo\nunfinished")
    (there.logs / "rank-1.log").write_text("of another machine\n")
    echo.show()
    there.log_metrics({"step": 2, "loss": 1.0})
    there.record_failure(0, "why")
    there.write_status(state="failed", error="why", step=2, launch="another")
    echo.show()
    echo.show()

    mirror = RunMirror(here)
    plain = [line for line in lines if not mirror.take(line)]
    assert plain == ["rank 0: one", "rank 0: bar 100%", "rank 0: two"]
    mirror.flush()
    for name in ("metrics.jsonl", "events.jsonl"):
        assert (here.path / name).read_bytes() == (there.path / name).read_bytes()
    assert here.failures()[0]["message"] == "why"
    status = here.status()
    assert (status["state"], status["step"], status["launch"]) == ("failed", 2, "id")

    before = (here.path / "metrics.jsonl").read_bytes()
    again = RunMirror(here)  # another process, which reads the log from its beginning
    for line in lines:
        again.take(line)
    assert (here.path / "metrics.jsonl").read_bytes() == before


def test_a_pod_that_takes_over_repeats_what_nobody_may_have_seen(there, here):
    there.log_metrics({"step": 1, "loss": 2.0})
    lines: list[str] = []
    RunEcho(there, None, is_first=True, say=lines.append).show()
    mirror = RunMirror(here)
    for line in lines:
        mirror.take(line)
    there.log_metrics({"step": 2, "loss": 1.0})
    RunEcho(there, None, is_first=True, say=lambda line: mirror.take(line) and None).show()
    assert [record["step"] for record in here.metrics()] == [1, 2]
    assert (here.path / "metrics.jsonl").read_text().count("\n") == 2


def test_other_machines_show_their_own_ranks_only(there):
    lines: list[str] = []
    echo = RunEcho(there, [2, 3], is_first=False, say=lines.append)
    there.log_metrics({"step": 1})
    for rank in range(4):
        (there.logs / f"rank-{rank}.log").write_text(f"{rank}\n")
    echo.show()
    assert lines == ["rank 2: 2", "rank 3: 3"]


@pytest.mark.parametrize(
    "line",
    [
        "hello",
        "{",
        "[]",
        '{"a": 1}',
        json.dumps({"lockstep": "config.yaml", "text": "model: evil"}),
        json.dumps({"lockstep": "../metrics.jsonl", "at": 0, "line": "{}"}),
        json.dumps({"lockstep": "logs/../../rank-0.error.json", "text": "{}"}),
        json.dumps({"lockstep": 3}),
    ],
)
def test_other_lines_are_for_people(line, here):
    assert not RunMirror(here).take(line)


@pytest.mark.parametrize(
    "record",
    [
        {"lockstep": "metrics.jsonl", "at": "x", "line": "{}"},
        {"lockstep": "metrics.jsonl", "at": 0},
        {"lockstep": "status.json", "text": "["},
        {"lockstep": "status.json", "text": "[]"},
        {"lockstep": "status.json"},
    ],
)
def test_damaged_records_change_nothing(record, here):
    before = here.status()
    assert RunMirror(here).take(json.dumps(record))
    assert here.status() == before
    assert not (here.path / "metrics.jsonl").exists()
