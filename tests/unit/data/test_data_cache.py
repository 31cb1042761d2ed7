"""The cache: one process builds, the others wait for it, take over from the dead, and never wait forever."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lockstep.data import DataError, cache
from lockstep.data.cache import Patience, cache_folder, obtain, open_entry, sweep
from lockstep.data.lock import Holder, Watch, break_lock, read_holder, try_lock

# Builds an entry slowly, one row at a time, and tells on its output what it did. Stops at a file "stop".
PREPARER = """
import os, sys, time
from pathlib import Path
from lockstep.data.cache import Patience, obtain
folder, num_rows, silent_s, rows_advance = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), sys.argv[4] == "yes"

def build(made, tell):
    print("building", os.getpid(), flush=True)
    for row in range(num_rows):
        (made / "rows.bin").open("ab").write(b"x")
        tell(row if rows_advance else 1)
        time.sleep(0.05)
    return {"by": os.getpid()}

print("ready", flush=True)
entry = obtain(folder, "key", build, patience=Patience(60, silent_s, beat_s=0.1))
print("opened", entry.manifest.get("by"), flush=True)
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []

    def start(num_rows: int = 20, silent_s: float = 30.0, rows_advance: bool = True) -> subprocess.Popen[str]:
        settings = [str(tmp_path), str(num_rows), str(silent_s), "yes" if rows_advance else "no"]
        command = [sys.executable, "-c", PREPARER, *settings]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def read_line(process: subprocess.Popen[str]) -> list[str]:
    assert process.stdout is not None
    return process.stdout.readline().split()


def started_building(process: subprocess.Popen[str]) -> None:
    assert read_line(process) == ["ready"]
    assert read_line(process) == ["building", str(process.pid)]


def make(folder: Path, key: str = "key", text: str = "rows", **patience: float) -> cache.Entry:
    def build(made: Path, tell: Callable[[int], None]) -> dict[str, Any]:
        (made / "rows.bin").write_text(text)
        tell(1)
        return {"text": text}

    return obtain(folder, key, build, patience=Patience(**patience))


def must_not_build(made: Path, tell: Callable[[int], None]) -> dict[str, Any]:
    raise AssertionError("the entry is there")


def test_an_entry_is_built_once_and_opened_after(tmp_path: Path) -> None:
    entry = make(tmp_path / "deep" / "cache")
    assert entry.warning is None
    assert (entry.path / "rows.bin").read_text() == "rows"
    again = obtain(tmp_path / "deep" / "cache", "key", must_not_build, patience=Patience())
    assert again == entry
    assert make(tmp_path / "deep" / "cache", "other", "else").manifest["text"] == "else"
    assert sorted(p.name for p in (tmp_path / "deep" / "cache").iterdir()) == ["key", "other"]


def test_of_two_processes_one_builds(tmp_path: Path, start: Callable[..., subprocess.Popen[str]]) -> None:
    both = [start(), start()]
    outputs = [process.communicate()[0].split() for process in both]
    assert sum("building" in output for output in outputs) == 1
    builder = next(output[2] for output in outputs if "building" in output)
    assert [output[-2:] for output in outputs] == [["opened", builder]] * 2
    assert [p.name for p in tmp_path.iterdir()] == ["key"]


def test_a_waiting_process_says_for_whom(tmp_path: Path, start: Callable[..., subprocess.Popen[str]]) -> None:
    holder = start(num_rows=10)
    started_building(holder)
    holders: list[Holder] = []
    entry = obtain(tmp_path, "key", must_not_build, patience=Patience(), on_wait=holders.append)
    assert entry.manifest["by"] == holder.pid
    assert [waited.pid for waited in holders] == [holder.pid]


def test_a_killed_holder_is_replaced(tmp_path: Path, start: Callable[..., subprocess.Popen[str]]) -> None:
    holder = start(num_rows=10_000)
    started_building(holder)
    waiting = start(num_rows=1)
    assert read_line(waiting) == ["ready"]
    time.sleep(0.3)  # let it find the lock; if it does not, it meets the lock of a dead process, which is as good
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    assert read_line(waiting) == ["building", str(waiting.pid)]
    assert read_line(waiting) == ["opened", str(waiting.pid)]
    waiting.wait()
    assert [p.name for p in tmp_path.iterdir()] == ["key"]  # nothing of the dead one is left


def test_a_silent_holder_is_replaced_and_does_no_harm_when_it_wakes(
    tmp_path: Path, start: Callable[..., subprocess.Popen[str]]
) -> None:
    """As on another machine, where nobody can ask whether the process exists."""
    holder = start(num_rows=8)
    started_building(holder)
    os.kill(holder.pid, signal.SIGSTOP)
    assert make(tmp_path, silent_s=0.5).manifest["text"] == "rows"
    os.kill(holder.pid, signal.SIGCONT)
    output, _ = holder.communicate()
    assert holder.returncode == 0
    assert output == "opened None\n"  # what the other made; its own is thrown away
    found = open_entry(tmp_path / "key")
    assert found is not None
    assert found.manifest["text"] == "rows"
    assert read_holder(tmp_path / "key.lock") is None


def test_a_holder_that_gets_nowhere_is_named(tmp_path: Path, start: Callable[..., subprocess.Popen[str]]) -> None:
    holder = start(num_rows=10_000, rows_advance=False)
    started_building(holder)
    with pytest.raises(DataError, match=rf"\(process {holder.pid}\) prepares the data but has finished no row for 1 s"):
        make(tmp_path, stuck_s=1.0)


def test_a_failed_build_frees_the_lock_and_leaves_nothing(tmp_path: Path) -> None:
    def fail(made: Path, tell: Callable[[int], None]) -> dict[str, Any]:
        (made / "rows.bin").write_text("half")
        raise DataError("a.jsonl:3: wrong")

    for _ in range(2):  # whoever comes next tries, and gets the same
        with pytest.raises(DataError, match=r"a\.jsonl:3: wrong"):
            obtain(tmp_path, "key", fail, patience=Patience())
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "damage",
    ["short", "longer", "missing", "other bytes", "no manifest", "half a manifest", "another manifest", "null", "old"],
)
def test_a_damaged_entry_is_built_again(tmp_path: Path, damage: str) -> None:
    path = make(tmp_path).path
    match damage:
        case "short":
            (path / "rows.bin").write_text("ro")
        case "longer":
            (path / "rows.bin").write_text("rows and rows")
        case "missing":
            (path / "rows.bin").unlink()
        case "no manifest":
            (path / "manifest.json").unlink()
        case "other bytes":
            (path / "rows.bin").write_text("rowz")
        case "half a manifest":
            (path / "manifest.json").write_text('{"sizes": {"rows')
        case "another manifest":
            text = (path / "manifest.json").read_text()
            (path / "manifest.json").write_text(text.replace('"text": "rows"', '"text": "rowz"'))
        case "null":
            (path / "manifest.json").write_text("null")
        case "old":  # as it was before entries had digests
            (path / "manifest.json").write_text('{"text": "rows", "sizes": {"rows.bin": 4}}')
    assert open_entry(path) is None
    again = make(tmp_path, text="anew")
    assert again.path == path
    assert (again.path / "rows.bin").read_text() == "anew"
    assert "were damaged, and have been compiled again" in (again.warning or "")
    assert [p.name for p in tmp_path.iterdir()] == ["key"]


def test_only_the_entry_that_was_found_damaged_is_removed(tmp_path: Path) -> None:
    damaged = make(tmp_path)
    cache.discard(damaged)
    assert open_entry(damaged.path) is None
    anew = make(tmp_path)
    cache.discard(damaged)  # another process that had mapped the old one
    assert open_entry(anew.path) is not None


def test_without_a_writable_cache_the_rows_go_elsewhere(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    entry = make(blocked / "data")
    assert (entry.path / "rows.bin").read_text() == "rows"
    assert not entry.path.is_relative_to(tmp_path)
    assert entry.warning is not None
    assert f"the data cache {blocked / 'data'} cannot be written" in entry.warning


def test_a_full_disk_is_said_plainly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = [True, False]

    def build(made: Path, tell: Callable[[int], None]) -> dict[str, Any]:
        if full.pop(0):
            raise OSError(errno.ENOSPC, "No space left on device")
        return {}

    entry = obtain(tmp_path / "a", "key", build, patience=Patience())
    assert "(No space left on device)" in (entry.warning or "")
    assert list((tmp_path / "a").iterdir()) == []
    full[:] = [True, True]
    monkeypatch.setattr(cache.tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    with pytest.raises(DataError, match=r"neither to .* nor to a temporary folder .*: free some space"):
        obtain(tmp_path / "a", "key", build, patience=Patience())
    assert list((tmp_path / "temporary").iterdir()) == []


def test_an_error_of_the_build_itself_is_not_taken_for_a_full_disk(tmp_path: Path) -> None:
    def build(made: Path, tell: Callable[[int], None]) -> dict[str, Any]:
        raise ConnectionResetError("the server is gone")

    with pytest.raises(ConnectionResetError):
        obtain(tmp_path, "key", build, patience=Patience())


def test_sweeping_removes_what_the_dead_left_and_nothing_else(tmp_path: Path) -> None:
    dead = subprocess.Popen(["true"])
    dead.wait()
    held = try_lock(tmp_path / "living.lock")
    assert held is not None
    try:
        says = json.loads((tmp_path / "living.lock").read_text())
        (tmp_path / "dead.lock").write_text(json.dumps(says | {"pid": dead.pid, "token": "t1"}))
        (tmp_path / "afar.lock").write_text(json.dumps(says | {"pid": dead.pid, "token": "t2", "space": "elsewhere"}))
        (tmp_path / "torn.lock").write_text('{"token": ')
        kept = [f"living.making-{held.token}", "afar.making-t2", "torn.making-t4"]
        swept = ["dead.making-t1", "gone.making-t3", "living.making-older"]
        for name in kept + swept:
            (tmp_path / name).mkdir()
            (tmp_path / name / "rows.bin").write_text("x")
        make(tmp_path, "entry")
        sweep(tmp_path)
        found = sorted(p.name for p in tmp_path.iterdir())
        assert found == sorted([*kept, "afar.lock", "entry", "living.lock", "torn.lock"])
    finally:
        held.release()


def test_a_lock_is_held_by_one(tmp_path: Path) -> None:
    first = try_lock(tmp_path / "lock")
    assert first is not None
    assert try_lock(tmp_path / "lock") is None
    first.release()
    second = try_lock(tmp_path / "lock")
    assert second is not None
    second.release()
    assert list(tmp_path.iterdir()) == []


def test_breaking_a_lock_spares_a_newer_one(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    old = try_lock(path)
    assert old is not None
    stale = read_holder(path)
    break_lock(path, stale)
    new = try_lock(path)
    assert new is not None
    old.beat()  # it was not dead after all, and goes on
    break_lock(path, stale)  # by a second process that waited as long
    holder = read_holder(path)
    assert holder is not None
    assert holder.token == new.token
    old.release()  # must not take the new one's lock with it
    assert read_holder(path) is not None
    new.release()
    assert list(tmp_path.iterdir()) == []


def test_a_holder_that_wakes_in_time_keeps_its_lock(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    lock = try_lock(path, beat_s=0.01)
    assert lock is not None
    before = read_holder(path)
    while read_holder(path) == before:
        time.sleep(0.01)
    break_lock(path, before)
    assert path.exists()
    lock.release()


def test_a_newer_lock_that_was_moved_aside_is_put_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "lock"
    old = try_lock(path)
    assert old is not None
    stale = read_holder(path)
    rename, new = os.rename, []

    def rename_too_late(source: Path, target: Path) -> None:
        monkeypatch.setattr(os, "rename", rename)
        old.release()
        new.append(try_lock(path))
        rename(source, target)

    monkeypatch.setattr(os, "rename", rename_too_late)
    break_lock(path, stale)
    holder = read_holder(path)
    assert holder is not None
    assert holder.token == new[0].token
    new[0].release()
    assert list(tmp_path.iterdir()) == []


def test_a_lock_that_was_never_written_is_broken_too(tmp_path: Path) -> None:
    (tmp_path / "key.lock").touch()  # its holder died between creating and writing it
    assert make(tmp_path, silent_s=0.2).manifest["text"] == "rows"


def test_a_torn_read_is_no_sign_of_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    path = tmp_path / "lock"
    says = {"token": "t", "host": "h", "pid": 1, "space": "s", "beat": 0, "rows": 5}
    path.write_text(json.dumps(says))
    watch = Watch(path)
    for text in ('{"tok', json.dumps(says | {"beat": 1})):
        clock[0] += 10
        path.write_text(text)
        watch.look()
        assert watch.silent_s == 0
    assert watch.stuck_s == 20
    path.write_text(json.dumps(says | {"beat": 2, "rows": 6}))
    watch.look()
    assert watch.stuck_s == 0


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_CACHE", "there")
    assert cache_folder("here") == Path("here")
    assert cache_folder(None) == Path("there/data")
    monkeypatch.delenv("LOCKSTEP_CACHE")
    assert cache_folder(None) == Path.home() / ".cache" / "lockstep" / "data"
