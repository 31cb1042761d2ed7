"""A database that is lost, damaged, locked, full or read-only: said in a sentence, and nothing is lost or doubled."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import sqlalchemy as sa
from fastapi.testclient import TestClient
from service_process import job, tree, wait_for

from lockstep.service import store as store_module
from lockstep.service.app import create_app
from lockstep.service.errors import ServiceError
from lockstep.service.jobs import JobManager
from lockstep.service.settings import ServiceSettings
from lockstep.service.store import Store


def lose(folder: Path) -> None:
    for path in folder.glob("service.db*"):
        path.unlink()


def num_starts(manager: JobManager, job_id: str) -> int:
    return len((manager.run_dir(job_id).path / "starts.txt").read_text().splitlines())


def test_a_lost_database_is_no_new_service_and_is_made_anew(
    make_manager: Callable[..., JobManager], tmp_path: Path
) -> None:
    first = make_manager(procs=1)
    first.datasets.add_rows("rows", [{"a": 1}, {"a": 2}], owner="ann")
    first.submit(job("quick", "done", priority=4), owner="ann")
    first.submit(job("bad", "wrong", priority=3), owner="bob")
    first.submit(job("hangs", "runs", priority=-1), owner="ann")
    first.submit(job("quick", "waits", priority=-2, max_restarts=2), owner="bob")
    first.submit(job("quick", "unwanted", priority=-3), owner="bob")
    first.cancel("unwanted")
    first.start()
    wait_for(lambda: first.get("runs").state == "running")
    before = {view.id: view for view in first.list()[0]}
    first.close()
    for damage in (lose, lambda folder: (folder / "service.db").write_bytes(b"")):
        lose(tmp_path / "data")
        damage(tmp_path / "data")
        for _ in range(2):
            with pytest.raises(ServiceError, match=r"the database is empty, but .* start with --rebuild"):
                make_manager(procs=1)
    again = make_manager(procs=1, rebuild=True)
    after = {view.id: view for view in again.list()[0]}
    same = ("id", "name", "owner", "priority", "kind", "model", "procs", "num_slots", "max_restarts", "created_at")
    for name, view in before.items():
        assert {key: getattr(after[name], key) for key in same} == {key: getattr(view, key) for key in same}
    states = {name: (view.state, view.reason) for name, view in after.items()}
    assert states.pop("runs") == ("preparing", "")
    assert states == {name: (view.state, view.reason) for name, view in before.items() if name != "runs"}
    assert [(d.name, d.owner, d.rows) for d in again.datasets.list()] == [("rows", "ann", 2)]
    assert again.num_free() == 0, "the one that runs has its slot"
    assert again.submit(job("quick", "done", priority=4), owner="ann").state == "completed", "known by its content"
    again.start()
    wait_for(lambda: again.get("runs").state == "running")
    assert again.get("waits").state == "queued"
    again.cancel("runs")
    wait_for(lambda: again.get("waits").state == "completed")
    assert [num_starts(again, name) for name in ("done", "wrong", "runs", "waits")] == [1, 1, 1, 1]
    assert not again.run_dir("unwanted").path.exists()
    again.delete("done")
    again.close()
    lose(tmp_path / "data")
    last = make_manager(procs=1, rebuild=True)
    assert {view.id for view in last.list()[0]} == before.keys() - {"done"}, "what was deleted stays deleted"


def test_jobs_of_versions_that_kept_no_records_belong_to_administrators(
    make_manager: Callable[..., JobManager], tmp_path: Path
) -> None:
    first = make_manager()
    first.datasets.add_rows("rows", [{"a": 1}], owner="ann")
    first.submit(job(id="done"), owner="ann")
    first.start()
    wait_for(lambda: first.get("done").state == "completed")
    first.close()
    lose(tmp_path / "data")
    shutil.rmtree(tmp_path / "data" / "records")
    (tmp_path / "data" / "jobs" / "strange").mkdir()
    for kind, name in (("jobs", "done"), ("jobs", "none"), ("datasets", "rows")):  # as if the disk had been full
        path = tmp_path / "data" / "records" / kind / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text('{"name": "x"}' if name == "done" else "")
    again = make_manager(rebuild=True)
    view = again.get("done")
    assert (view.state, view.owner, view.kind, view.model) == ("completed", "", "sft", "some/model")
    assert (again.datasets.get("rows").owner, again.datasets.get("rows").rows) == ("", 1)
    assert again.list()[1] == 1


def test_records_that_were_not_written_are_written_at_the_next_start(
    make_manager: Callable[..., JobManager], tmp_path: Path
) -> None:
    first = make_manager()
    first.submit(job(id="waits"), owner="ann")
    first.submit(job(id="unwanted"), owner="ann")
    first.cancel("unwanted")
    first.close()
    shutil.rmtree(tmp_path / "data" / "records")  # as if killed between the database and the record
    make_manager().close()
    lose(tmp_path / "data")
    again = make_manager(rebuild=True)
    assert {view.id: view.state for view in again.list()[0]} == {"waits": "queued", "unwanted": "cancelled"}


@pytest.mark.parametrize("damage", ["page", "header", "text"])
def test_a_damaged_database_is_a_sentence(damage: str, make_manager: Callable[..., JobManager], tmp_path: Path) -> None:
    first = make_manager()
    for number in range(20):
        first.submit(job(id=f"job-{number}"))
    first.close()
    path = tmp_path / "data" / "service.db"
    content = bytearray(path.read_bytes())
    assert len(content) > 3 * 4096
    if damage == "page":
        for start in range(4096, len(content), 4096):
            content[start : start + 100] = b"\xff" * 100
    elif damage == "header":
        content[:100] = bytes(100)
    else:
        content = bytearray(b"hello\n" * 1000)
    path.write_bytes(content)
    with pytest.raises(
        ServiceError, match=r"cannot open the database .*it is damaged: move the file away and start with"
    ):
        make_manager()
    lose(tmp_path / "data")
    assert make_manager(rebuild=True).list()[1] == 20


def test_a_database_of_an_earlier_version_gets_its_new_columns(database: str) -> None:
    Store(database, identity="here").close()
    engine = sa.create_engine(database)
    with engine.begin() as connection:
        for name in ("num_slots", "restart_at"):
            connection.execute(sa.text(f"ALTER TABLE lockstep_jobs DROP COLUMN {name}"))
        values = dict.fromkeys(("name", "owner", "kind", "model", "device", "config", "digest", "reason"), "''")
        values |= {"number": "1", "id": "'old'", "datasets": "'[]'", "slots": "'[]'", "wish": "''", "mark": "''"}
        values |= {"priority": "0", "procs": "3", "state": "'queued'", "restarts": "0", "max_restarts": "0"}
        values |= {"created_at": "1", "queued_at": "1"}
        columns = f"({', '.join(values)}) VALUES ({', '.join(values.values())})"
        connection.execute(sa.text(f"INSERT INTO lockstep_jobs {columns}"))
    engine.dispose()
    store = Store(database, identity="here")
    assert (store.get("old").num_slots, store.get("old").restart_at) == (3, None)
    assert [job.id for job in store.queue(5, due_by=1.0)] == ["old"]
    store.close()


# --- in the middle of the work ---------------------------------------------------------------------------------------


@contextmanager
def locked(manager: JobManager) -> Iterator[None]:
    other = sqlite3.connect(manager.data_dir.path / "service.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    try:
        yield
    finally:
        other.execute("ROLLBACK")
        other.close()


listening: list[Callable[..., None]] = []


@pytest.fixture(autouse=True)
def _listen_no_more() -> Iterator[None]:
    yield
    while listening:
        sa.event.remove(sa.Pool, "checkout", listening.pop())


@contextmanager
def pragma(on: str, off: str) -> Iterator[None]:
    """On every connection, from now until the end."""
    wanted = [on]

    def set_it(connection: sqlite3.Connection, *_: object) -> None:
        connection.execute(f"PRAGMA {wanted[0]}")

    sa.event.listen(sa.Pool, "checkout", set_it)  # until the test ends: the next use of a connection must undo it
    listening.append(set_it)
    try:
        yield
    finally:
        wanted[0] = off


FAULTS = {
    "locked": locked,
    "disk is full": lambda manager: pragma("max_page_count=1", "max_page_count=1073741823"),
    "read-only": lambda manager: pragma("query_only=ON", "query_only=OFF"),
}


@pytest.mark.parametrize(
    "fault", [pytest.param(name, marks=() if name == "locked" else pytest.mark.slow) for name in FAULTS]
)
def test_requests_are_answered_with_503_and_jobs_end_once_it_is_over(
    fault: str, make_manager: Callable[..., JobManager], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "_BUSY_TIMEOUT_S", 0.2)
    manager = make_manager()
    app = create_app(ServiceSettings(tmp_path / "data"), manager)
    large = tree(name="quick", data={"train": [f"some/rows-{number}" for number in range(150)]})

    def submit(name: str) -> tuple[int, str]:
        answer = http.post("/api/jobs", json={"id": name, "config": large})
        return answer.status_code, answer.text

    with TestClient(app, base_url="http://localhost:8322", raise_server_exceptions=False) as http:
        assert submit("first")[0] == 201
        wait_for(lambda: manager.run_dir("first").path.exists())
        with FAULTS[fault](manager):
            status, text = submit("second")
            assert (status, fault in text) == (503, True), text
            assert '"code":"busy"' in text
            assert "Traceback" not in text
            if fault != "disk is full":  # which what is there does not feel
                assert http.post("/api/jobs/first/cancel").status_code == 503
            assert http.get("/api/health").status_code == 200, "what only reads goes on"
            wait_for(lambda: manager.run_dir("first").status().get("state") == "completed")
        assert manager.store.find("second") is None, "refused is not half done"
        assert submit("second")[0] == submit("second")[0] == 201
        wait_for(lambda: all(view.state == "completed" for view in manager.list()[0]))
        assert manager.list()[1] == 2
        assert [num_starts(manager, name) for name in ("first", "second")] == [1, 1]
