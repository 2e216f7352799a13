"""`SqlStore`: the index in SQLite (a file beside the jobs) or PostgreSQL (a URL)."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from sqlalchemy import Connection, Engine, Integer, Select, Text, cast, create_engine, event, func, select, tuple_
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.pool import NullPool

from dayfly.errors import ConfigError, DayflyError, HostError
from dayfly.evidence import JobFolder, list_jobs
from dayfly.model import Isolation, Outcome, RolloutRecord
from dayfly.stores.schema import REINDEX, bring_up_to_date
from dayfly.stores.tables import GROUPED, ROLLOUTS, record_of, row_of

INDEX_NAME = "index.db"
BUSY_TIMEOUT_S = 60.0
BATCH = 1000


@dataclass(frozen=True)
class JobRow:
    """What the index knows of one job."""

    job_id: str
    rollouts: int
    graded: int
    started_unix: float
    finished_unix: float


@dataclass(frozen=True)
class Reindexed:
    """What a rebuild found."""

    jobs: int
    rollouts: int
    broken: tuple[tuple[Path, str], ...] = ()
    """Folders whose record cannot be read, with the reason."""


@dataclass(frozen=True, slots=True)
class TaskRow:
    """The attempts of one agent at one version of a task that agree in all that is named here, added up."""

    task: str
    version: str
    """See `tables.version_of`."""
    graded: bool
    isolation: Isolation | None
    verifier_class: str
    disk_digest: str
    count: int
    attempts: str
    """Number and mark of each, in no order: `2F1P`."""
    reward_sum: float
    seconds_sum: float
    tokens_known: int
    """For how many attempts."""
    tokens_sum: int
    cost_known: int
    cost_sum: float
    started_unix: float
    """The first start."""
    finished_unix: float
    """The last end."""
    indexed_unix: float
    """When the latest of the rows was made."""


class SqlStore:
    """Implements `protocols.Store`. Safe to use from several threads and processes at once.

    Every method raises `HostError`, with cause `index_broken`, `index_newer`, `index_busy` or `index_error`;
    nothing is lost by it, as the files are the truth.
    """

    def __init__(self, target: str | Path) -> None:
        """Open the index at a path or database URL, and make or migrate its schema."""
        self.url = _url(target)
        self._writing = threading.Lock()  # one writer per process queues here, the rest in SQLite's busy wait
        with _index_errors(self.url):
            self._engine = connect(self.url)
            bring_up_to_date(self._engine, _lock_file(self.url))

    @classmethod
    def open(cls, jobs_dir: Path, url: str | None = None) -> SqlStore:
        """The index of a jobs folder: `index.db` in it, or the database that `url` names."""
        return cls(jobs_dir / INDEX_NAME if url is None else url)

    def close(self) -> None:
        self._engine.dispose()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- writing -----------------------------------------------------------------------------------

    def add(self, record: RolloutRecord) -> None:
        """Take in a rollout; one of the same attempt is replaced, as in the folders."""
        self.add_many([record])

    def add_many(self, records: Iterable[RolloutRecord]) -> int:
        """Take in many, in transactions of a thousand; returns how many."""
        count, iterator = 0, iter(records)
        while batch := list(islice(iterator, BATCH)):
            with self._transaction() as connection:
                self._upsert(connection, batch)
            count += len(batch)
        return count

    def rebuild(self, jobs_dir: Path, *, forget_missing: bool = False) -> Reindexed:
        """Make the rows of every job in `jobs_dir` anew from its files, one transaction per job.

        `forget_missing`: also drop jobs whose folder is not there (not for an index that several folders share).
        """
        broken: list[tuple[Path, str]] = []
        jobs, count = list_jobs(jobs_dir), 0
        for job_id in jobs:
            records = JobFolder(jobs_dir, job_id).records(lambda path, e: broken.append((path, e.message)))
            with self._transaction() as connection:
                connection.execute(ROLLOUTS.delete().where(ROLLOUTS.c.job_id == job_id))
                while batch := list(islice(records, BATCH)):
                    self._upsert(connection, [r for r in batch if r.job_id == job_id])
                    count += len(batch)
        if forget_missing:
            for row in self.jobs():
                if row.job_id not in jobs:
                    with self._transaction() as connection:
                        connection.execute(ROLLOUTS.delete().where(ROLLOUTS.c.job_id == row.job_id))
        return Reindexed(len(jobs), count, tuple(broken))

    @classmethod
    def reindex(cls, jobs_dir: Path, url: str | None = None) -> Reindexed:
        """`rebuild`, also when the index itself is damaged: an `index.db` that is, is set aside first."""
        try:
            return cls._reindex(jobs_dir, url)
        except HostError as error:
            if url is not None or error.cause not in ("index_broken", "index_newer"):
                raise
            _set_aside(jobs_dir / INDEX_NAME)
            return cls._reindex(jobs_dir, url)

    @classmethod
    def _reindex(cls, jobs_dir: Path, url: str | None) -> Reindexed:
        with cls.open(jobs_dir, url) as store:
            store._refuse_damage()
            return store.rebuild(jobs_dir, forget_missing=url is None)

    def _refuse_damage(self) -> None:
        """SQLite notices a damaged page only when it reads it; this reads all."""
        if self.url.get_backend_name() != "sqlite":
            return
        with _index_errors(self.url), self._engine.connect() as connection:
            found = connection.exec_driver_sql("PRAGMA quick_check(1)").scalar()
        if found != "ok":
            raise HostError(
                f"the index {self.url.database} is damaged: {found}", hint=REINDEX, cause="index_broken"
            )

    # --- reading -----------------------------------------------------------------------------------

    def query(self, job_id: str | None = None) -> list[RolloutRecord]:
        """The rollouts of one job, or all, by job, task, agent and attempt."""
        return list(self.iterate(job_id))

    def iterate(
        self,
        job_id: str | None = None,
        *,
        task: str | None = None,
        agent: str | None = None,
        outcome: Outcome | None = None,
    ) -> Iterator[RolloutRecord]:
        """As `query`, with filters, and in constant memory: it reads page by page, holding no lock between."""
        wanted = {"job_id": job_id, "task": task, "agent": agent, "outcome": outcome and outcome.value}
        key = [ROLLOUTS.c[name] for name in ("job_id", "task", "agent", "attempt")]
        page = select(ROLLOUTS.c.record, *key).order_by(*key).limit(BATCH)
        for name, value in wanted.items():
            if value is not None:
                page = page.where(ROLLOUTS.c[name] == value)
        after: tuple[Any, ...] | None = None
        while rows := self._fetch(page if after is None else page.where(_after(key, after))):
            yield from (record_of(row[0]) for row in rows)
            after = tuple(rows[-1][1:])

    def find(self, rollout_id: str) -> RolloutRecord | None:
        rows = self._fetch(select(ROLLOUTS.c.record).where(ROLLOUTS.c.rollout_id == rollout_id))
        return record_of(rows[0][0]) if rows else None

    def jobs(self) -> list[JobRow]:
        """Every job that the index knows, oldest first."""
        graded = func.sum(cast(ROLLOUTS.c.graded, Integer))
        span = func.min(ROLLOUTS.c.started_unix), func.max(ROLLOUTS.c.finished_unix)
        grouped = select(ROLLOUTS.c.job_id, func.count(), graded, *span).group_by(ROLLOUTS.c.job_id)
        return [JobRow(*row) for row in self._fetch(grouped.order_by(ROLLOUTS.c.job_id))]

    def outcome_counts(self, job_id: str) -> Counter[Outcome]:
        grouped = select(ROLLOUTS.c.outcome, func.count()).where(ROLLOUTS.c.job_id == job_id)
        rows = self._fetch(grouped.group_by(ROLLOUTS.c.outcome))
        return Counter({Outcome(name): count for name, count in rows})

    def task_rows(self, job_id: str, agent: str, attempts: int) -> list[TaskRow]:
        """One agent's first `attempts` of each task in a job, gathered by task in one pass over an index."""
        c = ROLLOUTS.c
        by = [c[name] for name in GROUPED if name != "agent"]
        marks = func.aggregate_strings(cast(c.attempt, Text).concat(c.mark), "")
        sums = (
            func.coalesce(func.sum(c.reward), 0.0),
            func.sum(c.finished_unix - c.started_unix),
            func.count(c.tokens),
            func.coalesce(func.sum(c.tokens), 0),
            func.count(c.cost_usd),
            func.coalesce(func.sum(c.cost_usd), 0.0),
        )
        span = func.min(c.started_unix), func.max(c.finished_unix), func.max(c.indexed_unix)
        grouped: Select[Any] = select(*by, func.count(), marks, *sums, *span).group_by(*by).order_by(*by)
        wanted = c.job_id == job_id, c.agent == agent, c.attempt.between(1, attempts)
        return [TaskRow(*row) for row in self._fetch(grouped.where(*wanted))]

    def graded_versions(self, job_id: str, attempts: int) -> Counter[tuple[str, str, str]]:
        """Graded rollouts of the first `attempts` in a job, by agent, task and version."""
        by = [ROLLOUTS.c[name] for name in ("agent", "task", "version")]
        wanted = ROLLOUTS.c.job_id == job_id, ROLLOUTS.c.graded, ROLLOUTS.c.attempt.between(1, attempts)
        rows = self._fetch(select(*by, func.count()).where(*wanted).group_by(*by))
        return Counter({(agent, task, version): count for agent, task, version, count in rows})

    # --- connections -------------------------------------------------------------------------------

    @contextmanager
    def _transaction(self) -> Iterator[Connection]:
        with self._writing, _index_errors(self.url):
            with self._engine.connect().execution_options(dayfly_write=True) as connection, connection.begin():
                yield connection

    def _fetch(self, statement: Select[Any]) -> list[Any]:
        with _index_errors(self.url), self._engine.connect() as connection:
            return list(connection.execute(statement).all())

    def _upsert(self, connection: Connection, records: list[RolloutRecord]) -> None:
        if not records:
            return
        insert: Any = (sqlite if self.url.get_backend_name() == "sqlite" else postgresql).insert(ROLLOUTS)
        keys = list(ROLLOUTS.primary_key.columns)
        rest = {c.name: insert.excluded[c.name] for c in ROLLOUTS.columns if not c.primary_key}
        connection.execute(
            insert.on_conflict_do_update(index_elements=keys, set_=rest), [row_of(r) for r in records]
        )


def _after(key: list[Any], values: tuple[Any, ...]) -> Any:
    """Rows behind `values` in the order of `key`."""
    return tuple_(*key) > tuple_(*values)


def _url(target: str | Path) -> URL:
    if isinstance(target, Path) or "://" not in target:
        return URL.create("sqlite", database=str(target))
    try:
        url = make_url(target)
    except SQLAlchemyError as error:
        raise ConfigError(f"the database URL cannot be read: {error}") from error
    if url.get_backend_name() == "postgresql" and url.drivername == "postgresql":
        url = url.set(drivername="postgresql+psycopg")
    if url.get_backend_name() not in ("sqlite", "postgresql"):
        raise ConfigError(
            f"an index cannot be kept in {url.get_backend_name()!r}",
            hint="use a path, sqlite:///… or postgresql://…",
        )
    return url


def _lock_file(url: URL) -> Path | None:
    if url.get_backend_name() != "sqlite":
        return None
    path = Path(url.database or "")
    return path.with_name(f".{path.name}.lock")


def connect(url: URL) -> Engine:
    """An engine with our rules for SQLite: bounded busy wait, explicit transactions, no WAL.

    WAL has a corruption bug up to SQLite 3.51.2 and does not work on network file systems; the rollback
    journal is fast enough for an index.
    """
    if url.get_backend_name() != "sqlite":
        return create_engine(url)
    engine = create_engine(url, poolclass=NullPool, connect_args={"timeout": BUSY_TIMEOUT_S})

    @event.listens_for(engine, "connect")
    def _leave_transactions_to_us(connection: Any, _: Any) -> None:
        connection.isolation_level = None  # pysqlite commits before DDL otherwise

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        # A write lock from the start: a reader that turns writer can be refused without waiting.
        writes = connection.get_execution_options().get("dayfly_write", False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")

    return engine


@contextmanager
def _index_errors(url: URL) -> Iterator[None]:
    try:
        yield
    except DayflyError:
        raise
    except (SQLAlchemyError, OSError) as error:
        reason = str(getattr(error, "orig", None) or error).strip().splitlines()[0]
        where = url.database if url.get_backend_name() == "sqlite" else url.render_as_string(hide_password=True)
        raise HostError(f"the index {where} failed: {reason}", hint=REINDEX, cause=_cause(reason)) from error


def _cause(reason: str) -> str:
    if "locked" in reason:
        return "index_busy"
    damaged = ("not a database", "malformed", "already exists", "no such table", "no such column", "corrupt")
    return "index_broken" if any(word in reason for word in damaged) else "index_error"


def _set_aside(path: Path) -> None:
    number = 1
    while (aside := path.with_name(f"{path.name}.broken-{number}")).exists():
        number += 1
    path.rename(aside)
    path.with_name(f"{path.name}-journal").unlink(missing_ok=True)  # belongs to what was set aside
