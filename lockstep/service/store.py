"""What the run directories cannot hold: the queue, owners, priorities, restarts, which launch is the present one.

SQLite in a file, or any database by its SQLAlchemy URL. Every change of state is one conditional UPDATE: of two that
race, the second changes nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, fields
from typing import Any

import sqlalchemy as sa

from lockstep.service.errors import Conflict, NotFound, ServiceError

SCHEMA_VERSION = "1"
_BUSY_TIMEOUT_S = 5.0  # then the request is answered with 503, and the scheduler tries again
ACTIVE = ("preparing", "running")
MAX_RESTART_DELAY_S = 300.0
UNFINISHED = ("queued", *ACTIVE)

_tables = sa.MetaData()
_facts = sa.Table(
    "lockstep_facts",
    _tables,
    sa.Column("key", sa.String(64), primary_key=True),
    sa.Column("value", sa.Text, nullable=False),
)
_jobs = sa.Table(
    "lockstep_jobs",
    _tables,
    sa.Column("number", sa.Integer, primary_key=True, autoincrement=True),
    sa.Column("id", sa.String(64), nullable=False, unique=True),
    sa.Column("name", sa.Text, nullable=False),
    sa.Column("owner", sa.String(64), nullable=False, index=True),
    sa.Column("priority", sa.Integer, nullable=False),
    sa.Column("kind", sa.String(32), nullable=False),
    sa.Column("model", sa.Text, nullable=False),
    sa.Column("procs", sa.Integer, nullable=False),
    sa.Column("device", sa.String(16), nullable=False),
    sa.Column("config", sa.Text, nullable=False),
    sa.Column("datasets", sa.JSON, nullable=False),
    sa.Column("digest", sa.String(64), nullable=False),
    sa.Column("state", sa.String(16), nullable=False),
    sa.Column("reason", sa.Text, nullable=False),
    # In the database under their first names, so that databases of earlier versions stay readable.
    sa.Column("wish", sa.String(16), nullable=False, key="requested_action"),
    sa.Column("mark", sa.String(64), nullable=False, key="launch_id"),
    sa.Column("slots", sa.JSON, nullable=False),
    sa.Column("restarts", sa.Integer, nullable=False),
    sa.Column("max_restarts", sa.Integer, nullable=False),
    sa.Column("created_at", sa.Double, nullable=False),
    sa.Column("queued_at", sa.Double, nullable=False),
    sa.Column("prepared_at", sa.Double),
    sa.Column("started_at", sa.Double),
    sa.Column("finished_at", sa.Double),
    # Added later: see _ADDED.
    sa.Column("num_slots", sa.Integer),
    sa.Column("restart_at", sa.Double),
    sa.Index("lockstep_jobs_queue", "state", sa.text("priority DESC"), "number"),
    sa.Index("lockstep_jobs_wish", "requested_action", "state"),
    sqlite_autoincrement=True,  # otherwise the number of a deleted job is given again
)
_datasets = sa.Table(
    "lockstep_datasets",
    _tables,
    sa.Column("name", sa.String(64), primary_key=True),
    sa.Column("owner", sa.String(64), nullable=False),
    sa.Column("rows", sa.Integer, nullable=False),
    sa.Column("bytes", sa.BigInteger, nullable=False),
    sa.Column("sha256", sa.String(64), nullable=False),
    sa.Column("created_at", sa.Double, nullable=False),
)


@dataclass(frozen=True)
class Job:
    """A row. `launch_id` names the present launch; `requested_action` is cancel, delete or empty. `procs` are ranks,
    `num_slots` also the engines beside them. `restart_at`: not before then, after a failure."""

    number: int
    id: str
    name: str
    owner: str
    priority: int
    kind: str
    model: str
    procs: int
    device: str
    config: str
    datasets: list[str]
    digest: str
    state: str
    reason: str
    requested_action: str
    launch_id: str
    slots: list[int]
    restarts: int
    max_restarts: int
    created_at: float
    queued_at: float
    prepared_at: float | None
    started_at: float | None
    finished_at: float | None
    num_slots: int
    restart_at: float | None


@dataclass(frozen=True)
class Dataset:
    name: str
    owner: str
    rows: int
    bytes: int
    sha256: str
    created_at: float


# Columns that databases of earlier versions lack, and what they are for the jobs that are there.
_ADDED = {"num_slots": _jobs.c.procs, "restart_at": None}
_JOB_COLUMNS = [_jobs.c[field.name].label(field.name) for field in fields(Job)]
_NEXT_FIRST = (_jobs.c.priority.desc(), _jobs.c.number)


class Store:
    def __init__(self, url: str, *, identity: str, prepare: Callable[[Store], None] = lambda store: None) -> None:
        """`identity` is the data directory's: rows name files in it, so another one must not work on them.

        `prepare` is called with a database that nobody has claimed yet; what it raises leaves it unclaimed."""
        self._engine = _connect(url)
        try:
            self._claim("schema", SCHEMA_VERSION, "was made by another version of lockstep")
            if self._fact("identity") is None:
                prepare(self)
            self._claim(
                "identity", identity, "belongs to another data directory: give each service a database of its own"
            )
        except sa.exc.SQLAlchemyError as error:
            raise ServiceError(f"cannot use the database {_shown(url)}: {describe_fault(error)}") from error

    def close(self) -> None:
        self._engine.dispose()

    def _fact(self, key: str) -> str | None:
        with self._engine.connect() as connection:
            return connection.execute(sa.select(_facts.c.value).where(_facts.c.key == key)).scalar()

    def _claim(self, key: str, value: str, problem: str) -> None:
        held = self._fact(key)
        if held is None:
            with self._engine.begin() as connection:
                connection.execute(_facts.insert().values(key=key, value=value))
        elif held != value:
            raise ServiceError(f"this database {problem}")

    # --- jobs ------------------------------------------------------------------------------------------------------

    def add(self, **values: object) -> bool:
        """A new job at the end of its queue. False if the id is taken."""
        now = time.time()
        blank = {"state": "queued", "reason": "", "requested_action": "", "launch_id": "", "slots": [], "restarts": 0}
        blank |= {"created_at": now, "queued_at": now, "num_slots": values["procs"]}
        try:
            with self._engine.begin() as connection:
                connection.execute(_jobs.insert().values(**blank | values))
        except sa.exc.IntegrityError:
            return False
        return True

    def find(self, job_id: str) -> Job | None:
        jobs = self._read(sa.select(*_JOB_COLUMNS).where(_jobs.c.id == job_id))
        return jobs[0] if jobs else None

    def get(self, job_id: str) -> Job:
        job = self.find(job_id)
        if job is None:
            raise NotFound(f"there is no job {job_id}")
        return job

    def state(self, job_id: str) -> str | None:
        with self._engine.connect() as connection:
            return connection.execute(sa.select(_jobs.c.state).where(_jobs.c.id == job_id)).scalar()

    def select(
        self, *, state: str | None, owner: str | None, limit: int, offset: int = 0, search: str | None = None
    ) -> tuple[list[Job], int]:
        """Newest first, and how many there are in all."""
        wanted = sa.and_(sa.true() if state is None else _jobs.c.state == state, _matches(owner, search))
        page = sa.select(*_JOB_COLUMNS).where(wanted).order_by(_jobs.c.number.desc()).limit(limit).offset(offset)
        jobs = self._read(page)
        with self._engine.connect() as connection:
            total = connection.execute(sa.select(sa.func.count()).select_from(_jobs).where(wanted)).scalar_one()
        return jobs, total

    def every_job(self) -> list[Job]:
        return self._read(sa.select(*_JOB_COLUMNS).order_by(_jobs.c.number))

    def queue(self, limit: int, *, due_by: float | None = None, without_owners: Collection[str] = ()) -> list[Job]:
        """Those that wait, the next one first; of those that failed, the ones that may be started again by then. A
        time further ahead than any restart waits is from a clock that has been set back."""
        waiting = sa.select(*_JOB_COLUMNS).where(_jobs.c.state == "queued", _jobs.c.owner.not_in(without_owners))
        if due_by is not None:
            at = _jobs.c.restart_at
            waiting = waiting.where(sa.or_(at.is_(None), at <= due_by, at > due_by + 2 * MAX_RESTART_DELAY_S))
        return self._read(waiting.order_by(*_NEXT_FIRST).limit(limit))

    def next_restart(self) -> float | None:
        """When the first of those that wait for it may be started again."""
        first = sa.select(sa.func.min(_jobs.c.restart_at)).where(_jobs.c.state == "queued")
        with self._engine.connect() as connection:
            return connection.execute(first).scalar()

    def num_queued(self, owner: str) -> int:
        count = sa.select(sa.func.count()).select_from(_jobs).where(_jobs.c.state == "queued", _jobs.c.owner == owner)
        with self._engine.connect() as connection:
            return connection.execute(count).scalar_one()

    def queue_order(self) -> list[str]:
        with self._engine.connect() as connection:
            waiting = sa.select(_jobs.c.id).where(_jobs.c.state == "queued").order_by(*_NEXT_FIRST)
            return list(connection.execute(waiting).scalars())

    def queue_position(self, job: Job) -> int:
        ahead = sa.or_(
            _jobs.c.priority > job.priority,
            sa.and_(_jobs.c.priority == job.priority, _jobs.c.number < job.number),
        )
        count = sa.select(sa.func.count()).select_from(_jobs).where(_jobs.c.state == "queued", ahead)
        with self._engine.connect() as connection:
            return 1 + connection.execute(count).scalar_one()

    def active(self) -> list[Job]:
        return self._read(sa.select(*_JOB_COLUMNS).where(_jobs.c.state.in_(ACTIVE)))

    def to_delete(self) -> list[Job]:
        """Ended jobs whose deletion was requested."""
        return self._read(
            sa.select(*_JOB_COLUMNS).where(_jobs.c.requested_action == "delete", _jobs.c.state.not_in(UNFINISHED))
        )

    def counts(self, owner: str | None = None, search: str | None = None) -> dict[str, int]:
        """How many jobs there are in each state that has some."""
        by_state = sa.select(_jobs.c.state, sa.func.count()).where(_matches(owner, search)).group_by(_jobs.c.state)
        with self._engine.connect() as connection:
            rows = connection.execute(by_state)
            return {row.state: row[1] for row in rows}

    def change(self, job: Job, *, states: Sequence[str] | None = None, **values: object) -> bool:
        """If the job is still as it was read: its state (or one of `states`), its launch, its requested action."""
        seen = sa.and_(
            _jobs.c.id == job.id,
            _jobs.c.number == job.number,
            _jobs.c.state.in_(states or (job.state,)),
            _jobs.c.launch_id == job.launch_id,
            _jobs.c.requested_action == job.requested_action,
        )
        with self._engine.begin() as connection:
            return connection.execute(_jobs.update().where(seen).values(**values)).rowcount == 1

    def remove(self, job: Job) -> bool:
        """Only one that has ended."""
        ended = sa.and_(_jobs.c.number == job.number, _jobs.c.state.not_in(UNFINISHED))
        with self._engine.begin() as connection:
            return connection.execute(_jobs.delete().where(ended)).rowcount == 1

    def _read(self, query: sa.Select[object]) -> list[Job]:
        with self._engine.connect() as connection:
            return [Job(**row._mapping) for row in connection.execute(query)]

    # --- data sets ---------------------------------------------------------------------------------------------------

    def add_dataset(self, dataset: Dataset) -> None:
        try:
            with self._engine.begin() as connection:
                connection.execute(_datasets.insert().values(**dataset.__dict__))
        except sa.exc.IntegrityError:
            raise Conflict(f"there is already a data set {dataset.name}: choose another name, or delete it") from None

    def find_dataset(self, name: str) -> Dataset | None:
        with self._engine.connect() as connection:
            row = connection.execute(sa.select(_datasets).where(_datasets.c.name == name)).one_or_none()
            return None if row is None else Dataset(**row._mapping)

    def datasets(self, owner: str | None = None) -> list[Dataset]:
        query = sa.select(_datasets).order_by(_datasets.c.name)
        with self._engine.connect() as connection:
            rows = connection.execute(query if owner is None else query.where(_datasets.c.owner == owner))
            return [Dataset(**row._mapping) for row in rows]

    def remove_dataset(self, name: str) -> None:
        with self._engine.begin() as connection:
            connection.execute(_datasets.delete().where(_datasets.c.name == name))

    def jobs_that_need(self, dataset: str) -> list[str]:
        unfinished = sa.select(_jobs.c.id, _jobs.c.datasets).where(_jobs.c.state.in_(UNFINISHED))
        with self._engine.connect() as connection:
            return [job_id for job_id, needed in connection.execute(unfinished) if dataset in needed]


def _matches(owner: str | None, search: str | None) -> sa.ColumnElement[bool]:
    """Every word of `search` is somewhere in the job's name, id, owner or model, in any case of letters."""
    if "\0" in f"{owner}{search}":  # which no name holds, and PostgreSQL takes for a mistake
        return sa.false()
    wanted = [sa.true() if owner is None else _jobs.c.owner == owner]
    seen = (_jobs.c.name, _jobs.c.id, _jobs.c.owner, _jobs.c.model)
    for word in (search or "").split():
        wanted.append(sa.or_(*(column.icontains(word, autoescape=True) for column in seen)))
    return sa.and_(*wanted)


# --- the engine, and what may be wrong with it ----------------------------------------------------------------------


def _connect(url: str) -> sa.Engine:
    """An engine that has been seen to work."""
    wanted = "write sqlite:///FILE or postgresql+psycopg://USER@HOST/NAME"
    try:
        parsed = sa.make_url(url)
    except (sa.exc.ArgumentError, ValueError) as error:
        raise ServiceError(f"--database is not a database URL: {wanted}") from error
    shown = _shown(url)
    try:
        engine = _make_engine(parsed)
        _check_pages(engine)
        _tables.create_all(engine)
        _add_columns(engine)
    except ImportError as error:
        raise ServiceError(f"--database {shown} needs a package: pip install 'lockstep[postgres]' ({error})") from error
    except sa.exc.DatabaseError as error:
        raise ServiceError(f"cannot open the database {shown}: {describe_fault(error)}") from error
    except (sa.exc.SQLAlchemyError, TypeError) as error:
        raise ServiceError(f"cannot open the database {shown}: {_first_line(error)}; {wanted}") from error
    return engine


def _shown(url: str) -> str:
    return sa.make_url(url).render_as_string(hide_password=True)


def _first_line(error: Exception) -> str:
    return str(getattr(error, "orig", None) or error).strip().splitlines()[0]


def describe_fault(error: Exception) -> str:
    """What a database said, in a sentence for the operator."""
    problem = _first_line(error)
    said = {
        "malformed": "is damaged: move the file away and start with --rebuild, which makes the list of jobs anew",
        "not a database": "is damaged: move the file away and start with --rebuild, which makes the list of jobs anew",
        "no such table": "has lost its tables: end the service and start it with --rebuild",
        "locked": "is locked by another program",
        "disk is full": "cannot grow: the disk is full",
        "readonly": "cannot be written: it is read-only",
        "disk I/O error": "cannot be read or written",
    }
    return next((f"it {meaning} ({problem})" for sign, meaning in said.items() if sign in problem), problem)


def _check_pages(engine: sa.Engine) -> None:
    """A damaged page of SQLite would otherwise be met in the middle of a request."""
    if engine.dialect.name != "sqlite":
        return
    with engine.connect() as connection:
        found = connection.execute(sa.text("PRAGMA quick_check(1)")).scalar()
    if found != "ok":
        raise sa.exc.DatabaseError("quick_check", None, ValueError(f"malformed: {str(found).splitlines()[-1]}"))


def _add_columns(engine: sa.Engine) -> None:
    present = {column["name"] for column in sa.inspect(engine).get_columns(_jobs.name)}
    with engine.begin() as connection:
        for name, value in _ADDED.items():
            if name not in present:
                kind = _jobs.c[name].type.compile(engine.dialect)
                connection.execute(sa.text(f"ALTER TABLE {_jobs.name} ADD COLUMN {name} {kind}"))
                if value is not None:
                    connection.execute(_jobs.update().values({name: value}))


def _make_engine(url: sa.URL) -> sa.Engine:
    pool: dict[str, object] = {"pool_size": 20, "max_overflow": 30}
    if url.get_backend_name() != "sqlite":
        return sa.create_engine(url, pool_pre_ping=True, **pool)
    engine = sa.create_engine(url, connect_args={"timeout": _BUSY_TIMEOUT_S}, **pool)

    def prepare(connection: Any, _: Any) -> None:
        for pragma in ("journal_mode=WAL", "synchronous=FULL", f"busy_timeout={int(_BUSY_TIMEOUT_S * 1000)}"):
            connection.execute(f"PRAGMA {pragma}")

    sa.event.listen(engine, "connect", prepare)
    return engine
