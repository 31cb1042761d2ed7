"""The store, on SQLite and on a real PostgreSQL: one winner for every change, strict order of the queue."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import sqlalchemy as sa
from service_process import job, wait_for

from lockstep.service.errors import Conflict, NotFound, ServiceError
from lockstep.service.jobs import JobManager
from lockstep.service.schemas import FINISHED
from lockstep.service.store import Dataset, Store


@pytest.fixture
def store(database: str) -> Iterator[Store]:
    made = Store(database, identity="here")
    yield made
    made.close()


def add(store: Store, job_id: str, **changes: Any) -> bool:
    values: dict[str, Any] = {"id": job_id, "name": job_id, "owner": "ann", "priority": 0, "max_restarts": 0}
    values |= {"kind": "sft", "model": "m", "procs": 1, "device": "cpu", "config": "", "datasets": [], "digest": "d"}
    return store.add(**values | changes)


def test_an_id_is_taken_once(store: Store) -> None:
    assert add(store, "a")
    assert not add(store, "a", owner="bob")
    assert store.get("a").owner == "ann"
    assert store.find("b") is None
    with pytest.raises(NotFound, match="no job b"):
        store.get("b")


def test_of_many_who_change_a_job_one_wins(store: Store) -> None:
    add(store, "a")
    seen = store.get("a")

    def start(number: int) -> bool:
        return store.change(seen, state="preparing", launch_id=f"launch-{number}", slots=[number])

    with ThreadPoolExecutor(16) as pool:
        won = list(pool.map(start, range(32)))
    assert won.count(True) == 1
    job = store.get("a")
    assert (job.launch_id, job.slots) == (f"launch-{won.index(True)}", [won.index(True)])


def test_columns_keep_the_names_that_databases_of_earlier_versions_have(store: Store, database: str) -> None:
    add(store, "a")
    assert store.change(store.get("a"), launch_id="first", requested_action="cancel")
    engine = sa.create_engine(database)
    with engine.connect() as connection:
        assert connection.execute(sa.text("SELECT mark, wish FROM lockstep_jobs")).one() == ("first", "cancel")
    engine.dispose()


def test_many_submissions_of_one_id_make_one_job(store: Store) -> None:
    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(lambda _: add(store, "a"), range(32))).count(True) == 1
    assert store.select(state=None, owner=None, limit=10)[1] == 1


@pytest.mark.parametrize("other", [{"state": "running"}, {"launch_id": "second"}, {"requested_action": "cancel"}])
def test_what_was_decided_on_an_older_view_is_not_done(store: Store, other: dict[str, str]) -> None:
    add(store, "a")
    seen = store.get("a")
    assert store.change(seen, **other)
    assert not store.change(seen, state="completed")


def test_a_job_of_the_same_name_is_another_job(store: Store) -> None:
    add(store, "a")
    first = store.get("a")
    assert not store.remove(first), "it has not ended"
    store.change(first, state="cancelled")
    assert store.remove(first)
    add(store, "a")
    assert not store.change(first, state="running")
    assert not store.remove(first)


def test_the_queue_is_in_order_of_priority_then_age(store: Store) -> None:
    for name, priority in (("old", 0), ("urgent", 5), ("new", 0), ("whenever", -1), ("also-urgent", 5)):
        add(store, name, priority=priority)
    expected = ["urgent", "also-urgent", "old", "new", "whenever"]
    assert store.queue_order() == [job.id for job in store.queue(10)] == expected
    assert [store.queue_position(store.get(name)) for name in expected] == [1, 2, 3, 4, 5]
    assert [job.id for job in store.queue(2)] == expected[:2]


def test_lists_are_newest_first_in_pages(store: Store) -> None:
    for number in range(5):
        add(store, f"job-{number}", owner="ann" if number % 2 else "bob")
    store.change(store.get("job-4"), state="running")
    jobs, total = store.select(state=None, owner=None, limit=2, offset=1)
    assert ([job.id for job in jobs], total) == (["job-3", "job-2"], 5)
    jobs, total = store.select(state="queued", owner="bob", limit=10)
    assert ([job.id for job in jobs], total) == (["job-2", "job-0"], 2)
    assert store.counts() == {"queued": 4, "running": 1}
    assert [job.id for job in store.active()] == ["job-4"]


@pytest.mark.parametrize(
    ("search", "found"),
    [
        ("QWEN", ["b", "a"]),
        ("qwen maths", ["a"]),
        ("ann", ["c"]),
        ("100%", ["c"]),
        ("_", []),
        ("%", ["c"]),
        ("' OR 1=1 --", []),
        ("a\0", []),
        ("  ", ["c", "b", "a"]),
    ],
)
def test_jobs_are_found_by_words(store: Store, search: str, found: list[str]) -> None:
    """In name, id, owner and model; what a database reads as a pattern is plain text here."""
    add(store, "a", name="Maths", model="org/Qwen3-1.7B", owner="bob")
    add(store, "b", name="chat", model="org/Qwen3-1.7B", owner="bob")
    add(store, "c", name="100%", owner="ann")
    store.change(store.get("a"), state="running")
    jobs, total = store.select(state=None, owner=None, limit=10, search=search)
    assert ([job.id for job in jobs], total) == (found, len(found))
    running, queued = "a" in found, len(found) - ("a" in found)
    expected = {"running": int(running), "queued": queued}
    assert store.counts(search=search) == {state: count for state, count in expected.items() if count}


def test_data_sets(store: Store) -> None:
    rows = Dataset("rows", "ann", 3, 100, "digest", 1.0)
    store.add_dataset(rows)
    with pytest.raises(Conflict, match="already a data set rows"):
        store.add_dataset(rows)
    add(store, "a", datasets=["rows"])
    assert (store.datasets("bob"), store.datasets("ann"), store.find_dataset("rows")) == ([], [rows], rows)
    assert store.jobs_that_need("rows") == ["a"]
    store.change(store.get("a"), state="failed")
    assert store.jobs_that_need("rows") == []
    store.remove_dataset("rows")
    assert store.datasets() == []


def test_a_database_belongs_to_one_data_directory(store: Store, database: str) -> None:
    Store(database, identity="here").close()
    with pytest.raises(ServiceError, match="belongs to another data directory"):
        Store(database, identity="elsewhere")


def test_jobs_run_on_either_database(database: str, make_manager: Callable[..., JobManager]) -> None:
    manager = make_manager(database=database)
    for number in range(4):
        manager.submit(job(id=f"job-{number}"))
    manager.start()
    wait_for(lambda: all(view.state in FINISHED for view in manager.list()[0]))
    assert {view.state for view in manager.list()[0]} == {"completed"}
    manager.close()
    again = make_manager(database=database)
    assert again.get("job-0").state == "completed"


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("nonsense", "not a database URL"),
        ("mongodb://localhost/x", "mongodb"),
        ("sqlite:////nowhere/at/all.db", "unable to open database file"),
        ("postgresql+psycopg://ann:secret@127.0.0.1:1/x", "ann:***@127.0.0.1"),
    ],
)
def test_a_database_that_cannot_be(url: str, problem: str) -> None:
    with pytest.raises(ServiceError, match=re.escape(problem)) as caught:
        Store(url, identity="here")
    assert "secret" not in str(caught.value)
